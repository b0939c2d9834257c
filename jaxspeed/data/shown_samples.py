"""What a corpus holds, for people: its first documents with what the loss counts, and sums."""

import itertools
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxspeed.config.run_sections import Data
from jaxspeed.config.verdicts import shown as quoted
from jaxspeed.data.chat_masks import ChatEncoder
from jaxspeed.data.chats import Chats
from jaxspeed.data.choose_tokenizer import choose_tokenizer
from jaxspeed.data.complete_documents import Counts, DocumentCounts, Packing, fit
from jaxspeed.data.model_limits import ModelLimits, PairForm
from jaxspeed.data.open_source import encoded_in_memory, open_source, prompts_in
from jaxspeed.data.packing import Spans
from jaxspeed.data.pair_samples import PairCounts, check_kind, truncated, usable
from jaxspeed.data.prompts import fitting
from jaxspeed.data.sources import Texts
from jaxspeed.data.token_store import Documents
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import DataError


class ShownPart(NamedTuple):
    """A part of a document's text that the loss counts, or that it does not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownSample:
    """A document as it is trained on; of preferences a completion after its prompt.

    `side` is chosen and then rejected of a pair; desirable or undesirable by its label. `columns`
    are those of a prompt, whose completion is not there yet.
    """

    tokens: int
    trained: int
    pieces: list[ShownPart]
    side: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownData:
    """The first documents, and the sums of each source by its name."""

    samples: list[ShownSample]
    counts: Mapping[str, Counts]
    seq_len: int | None

    @property
    def total(self) -> Any:
        first, *others = self.counts.values()
        return sum(others, first)


def show_data(
    data: Data, limits: ModelLimits, tokenizer: Tokenizer | None = None, samples: int = 3
) -> ShownData:
    """Read all of a config's data; nothing is held out.

    Args:
      data: the config's section.
      limits: of the model.
      tokenizer: that of a run; by default the config's.
      samples: how many documents are shown of each source.

    Raises:
      DataError: the data cannot be read, or are no texts.
    """
    opened = [open_source(source, limits) for source in data.sources]
    tokenizer = choose_tokenizer(data, limits, opened, tokenizer)
    seq_len = data.seq_len or limits.seq_len
    shown: list[ShownSample] = []
    counts: dict[str, Any] = {}
    for source, content in zip(data.sources, opened):
        if isinstance(content, Chats) and limits.prompts is not None:
            assert tokenizer is not None
            records = prompts_in(content, ChatEncoder(tokenizer, data))
            fits, counts[content.name] = fitting(
                records, limits.prompts, seq_len or 1 << 30, content.name
            )
            for record in fits[:samples]:
                text = tokenizer.spell([*record.tokens])
                columns = {name: quoted(value) for name, value in record.columns.items()}
                pieces = [ShownPart(text, False)]
                shown.append(ShownSample(len(record.tokens), 0, pieces, columns=columns))
            continue
        if isinstance(content, Texts | Chats):
            assert tokenizer is not None
            encoder = ChatEncoder(tokenizer, data, limits.images)
            documents = [encoded_in_memory(content, encoder)]
            dropped = DocumentCounts(dropped=encoder.untrained)
        elif isinstance(content, list) and tokenizer is not None:
            documents, dropped = content, DocumentCounts()
        else:
            what = "ids without a tokenizer" if isinstance(content, list) else "no text"
            raise DataError(f"data show: source {source.source} has {what}")
        for part in documents:
            if limits.pairs is not None:
                first_pairs, pair_counts = _pairs(
                    part, data, limits.pairs, seq_len, samples, tokenizer
                )
                shown += first_pairs
                counts[part.name] = counts.get(part.name, PairCounts()) + pair_counts
                continue
            spans, number = _fitting(part, data, seq_len, limits)
            counts[part.name] = counts.get(part.name, DocumentCounts()) + number + dropped
            first = zip(spans.starts[:samples], spans.lengths[:samples])
            # Without masks a text continues the one before.
            continues = part.trained is None and not data.document_masks
            shown += [
                _shown(part, int(start), int(length), tokenizer, continues and i > 0)
                for i, (start, length) in enumerate(first)
            ]
    return ShownData(shown, counts, seq_len)


def _pairs(
    documents: Documents,
    data: Data,
    form: PairForm,
    seq_len: int | None,
    samples: int,
    tokenizer: Tokenizer,
) -> tuple[list[ShownSample], PairCounts]:
    """The sequences of the first pairs, or of completions with a label; not mismatched ones."""
    check_kind(documents, form)
    packing = Packing(seq_len or int(documents.lengths.max()), True, data.truncate)
    records = np.arange(len(documents.lengths) // documents.per_record)
    sequences, counts = usable(documents, records, form, packing)
    shown = []
    spans = zip(*truncated(sequences, packing))
    for starts, lengths, value in itertools.islice(spans, samples):
        sides = ["chosen", "rejected"]
        if form.records == "unpaired":
            sides = ["desirable" if value > 0 else "undesirable"]
        for side, (start, _), (prompt, completion) in zip(sides, starts, lengths):
            count = int(prompt + completion)
            ids = documents.tokens[int(start) : int(start) + count].tolist()
            trained = np.arange(count) >= max(prompt, 1)  # nothing predicts the first
            pieces = [*_pieces(ids, trained, tokenizer)]
            shown.append(ShownSample(count, int(trained.sum()), pieces, side))
    return shown, counts + PairCounts(**documents.dropped)


def _fitting(
    documents: Documents, data: Data, seq_len: int | None, limits: ModelLimits
) -> tuple[Spans, DocumentCounts]:
    """The documents that are trained on; those of texts are split, not truncated."""
    lengths = documents.lengths
    longest = int(lengths.max(initial=0))
    if documents.trained is not None:
        length = seq_len or longest
        packing = Packing(length, True, data.truncate, True, limits.images, data.patches)
        spans, _, counts = fit(documents, packing)
        return spans, counts
    tokens = int(lengths.sum())
    begin = len(lengths) if data.document_masks else min(1, tokens)  # what nothing predicts
    counts = DocumentCounts(len(lengths), tokens, tokens - begin, longest)
    return Spans(np.asarray(documents.offsets[:-1]), lengths), counts


def _shown(
    documents: Documents, start: int, length: int, tokenizer: Tokenizer, continues: bool
) -> ShownSample:
    ids = documents.tokens[start : start + length].tolist()
    trained = np.ones(length, bool)
    if documents.trained is not None:
        trained = np.array(documents.trained[start : start + length])
    trained[0] = continues  # otherwise nothing predicts it
    return ShownSample(length, int(trained.sum()), [*_pieces(ids, trained, tokenizer)])


def _pieces(ids: list[int], trained: np.ndarray, tokenizer: Tokenizer) -> Iterator[ShownPart]:
    """The text in runs of equal masks. A run is what it adds to the text: decoders drop spaces."""
    text = ""
    edges = [*(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    for edge in edges:
        longer = tokenizer.spell(ids[:edge])
        new = longer[len(text) :] if longer.startswith(text) else longer
        text = longer
        yield ShownPart(new, bool(trained[edge - 1]))


_DIRECTIONS = {*"\u061c\u200e\u200f", *map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))}


def harmless(text: str) -> str:
    """A text of which a terminal shows all: control characters and the like are escaped."""

    def is_shown(letter: str) -> bool:
        hidden = unicodedata.category(letter) in ("Cc", "Cn", "Co", "Cs", "Zl", "Zp")
        return letter in "\n\t" or not (hidden or letter in _DIRECTIONS)

    return "".join(
        letter if is_shown(letter) else letter.encode("unicode_escape").decode() for letter in text
    )


def as_json(shown: ShownData) -> dict[str, Any]:
    return {
        "samples": [
            {**vars(sample), "pieces": [piece._asdict() for piece in sample.pieces]}
            for sample in shown.samples
        ],
        "seq_len": shown.seq_len,
        "counts": vars(shown.total),
        "sources": {name: vars(counts) for name, counts in shown.counts.items()},
    }
