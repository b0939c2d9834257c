"""Build a corpus from the config's section `data`: train and held-out splits, one tokenizer."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspeed.config.run_sections import Data, MixtureSource
from jaxspeed.data import prompts as prompt_records
from jaxspeed.data import token_store
from jaxspeed.data.chat_masks import ChatEncoder, remember_template
from jaxspeed.data.chats import Chats
from jaxspeed.data.choose_tokenizer import choose_tokenizer
from jaxspeed.data.complete_documents import Counts, DocumentCounts, most_patches
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.data.model_limits import Kind, ModelLimits, PairForm, PromptForm
from jaxspeed.data.open_source import (
    OpenSource,
    encoded,
    is_chat,
    open_source,
    packing_of,
    samples_of,
)
from jaxspeed.data.packing import entropy
from jaxspeed.data.pair_samples import PairCounts, blank_rows, checked
from jaxspeed.data.samples import IMAGE, IMAGE_ROWS, PATCH, PATCHES, Samples
from jaxspeed.data.sources import Texts
from jaxspeed.data.split import Split
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import DataError
from jaxspeed.vision import ImageProcessor


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    train: Split
    held_out: Split | None  # or the samples of `data.eval`
    tokenizer: Tokenizer | None
    fingerprint: str  # changes with the data or its order; a run resumes only with the same one
    unigram_entropy: float | None  # nats per training token
    summary: str  # one line for people
    conversations: Counts | None = None  # of all, training and held-out
    plain_prompts: bool = False  # they are prompts and completions, without a template
    context: int | None = None  # tokens that a document can have
    rows_of_each: int = 1  # of prompts: their completions, in each iteration

    @property
    def epoch(self) -> int:
        """Rows of the steps of an epoch, in which every training sample is read once."""
        return len(self.train) * self.rows_of_each


def build(
    data: Data,
    *,
    sample: Kind | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    targets: bool = False,
    pairs: PairForm | None = None,
    prompts: PromptForm | None = None,
    images: ImageProcessor | None = None,
    seed: int,
    tokenizer: Tokenizer | None = None,
    batch_size: int | None = None,
) -> Corpus:
    """Open the sources of `data` for a model with this kind of samples and these limits.

    Args:
      data: the section of the config.
      sample, seq_len, vocab_size, image_shape, classes, targets: known limits of the model
        (`ModelLimits`).
      pairs: of an objective that reads preferences.
      prompts: of one that reads prompts.
      images: of a model that reads images.
      seed: of the order, if `data.seed` is unset.
      tokenizer: that of a resumed run; then none is trained or read.
      batch_size: minimum number of training samples; of prompts, of their completions.

    Raises:
      DataError: the data cannot be read, is too small or does not fit the model.
    """
    if pairs is not None:
        pairs = checked(pairs, data, targets, batch_size)
    if prompts is not None:
        prompt_records.check_keys(data)
        if batch_size is not None:
            batch_size = -(-batch_size // prompts.num_generations)
    limits = ModelLimits(sample, seq_len, vocab_size, image_shape, classes, targets, pairs, prompts)
    limits = replace(limits, images=images)
    sources = data.sources
    opened = [open_source(source, limits) for source in sources]
    tokenizer = choose_tokenizer(data, limits, opened, tokenizer)
    if data.eval is not None:  # nothing of the training data is held out
        data = data.model_copy(update={"held_out": 0.0})
    encoder = None if tokenizer is None else ChatEncoder(tokenizer, data, images)
    parts = [
        samples_of(data, source, limits, content, encoder)
        for source, content in zip(sources, opened)
    ]
    chats = [content for content in opened if isinstance(content, Chats)]
    if encoder is not None:
        remember_template(encoder, [kind for content in chats for kind in content.formats()])
    counted = [part.conversations for part in parts if part.conversations is not None]
    if limits.form is None:
        _check_keys(data, bool(counted))
    weights = [s.weight if isinstance(s, MixtureSource) else 1.0 for s in sources]
    seed = seed if data.seed is None else data.seed
    with_targets = targets and limits.form is None  # records have them
    how: dict[str, Any] = {"seed": seed, "targets": with_targets}
    trained = prompt_records.alike([p.train for p in parts])
    train = Split(trained, shuffle=data.shuffle, weights=weights, **how)
    held = [p.held_out for p in parts if p.held_out is not None]
    if data.eval is not None:
        apart = evaluation_parts(data, data.eval, limits, tokenizer)
        held = [samples for samples in apart.values() if samples is not None]
    held_out = Split(prompt_records.alike(held), shuffle=False, **how) if held else None
    _check_sizes(data, parts, train, batch_size)
    total = _sum_of(counted, encoder)
    labelled = total.labelled if isinstance(total, PairCounts) else 0
    if labelled and total.desirable in (0, labelled):
        kind = ("false", "true")[total.desirable > 0]
        raise DataError(f"data: all {labelled:,} labels are {kind}; needs true and false ones")
    identity: dict[str, Any] = {
        "parts": [[p.digest, w] for p, w in zip(parts, weights)],
        "tokenizer": tokenizer.to_bytes().decode(errors="surrogateescape") if tokenizer else None,
        "seq_len": train.tokens_each,
        "order": [seed, data.shuffle, data.held_out, data.document_masks],
    }
    if counted:
        identity["conversations"] = [data.truncate, data.packing]
    if pairs is not None:
        identity["pairs"] = vars(pairs)
    context = train.tokens_each if limits.form is None else packing_of(data, limits).seq_len
    return Corpus(
        train,
        held_out,
        tokenizer,
        hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest(),
        _entropy(parts, weights),
        _summary(parts, weights, train, held_out, tokenizer),
        total,
        encoder is not None and encoder.plain > 0 and not encoder.rendered,
        context,
        1 if prompts is None else prompts.num_generations * prompts.num_iterations,
    )


def _sum_of(counted: Sequence[Any], encoder: ChatEncoder | None) -> Any:
    if not counted or encoder is None:
        return None
    first = DocumentCounts(dropped=encoder.untrained)
    return sum(counted, first if isinstance(counted[0], DocumentCounts) else type(counted[0])())


# Keys that only conversations have an effect of.
_OF_CHATS = {
    key: Data.model_fields[key].get_default(call_default_factory=True)
    for key in (
        *("chat_template", "chat_template_kwargs", "train_on", "truncate"),
        *("untrained", "packing"),
    )
}


def _check_keys(data: Data, has_chats: bool) -> None:
    chat_keys = [key for key, default in _OF_CHATS.items() if getattr(data, key) != default]
    is_set = "train_on" in data.model_fields_set  # its default too is meant for conversations
    if is_set and any(source.source != "synthetic" for source in data.sources):  # as of a plan
        chat_keys.append("train_on")
    if chat_keys and not has_chats:
        raise DataError(
            f"data.{chat_keys[0]}: only conversations have it, and the sources hold none; "
            "docs/data.md has their fields"
        )


@dataclass(frozen=True)
class Tokenized:
    """Summary of a folder of tokens that `tokenize` wrote."""

    name: str
    documents: int
    tokens: int
    tokenizer: str
    bytes: int
    folder: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.documents:,} documents, {self.tokens:,} tokens "
            f"({self.tokenizer}), {self.bytes / 1e6:,.1f} MB in {self.folder}"
        )


def tokenize(
    data: Data,
    out_folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    pairs: PairForm | None = None,
) -> Tokenized:
    """Write the text of `data` as token files, to be read by source `tokens`.

    Documents are encoded one at a time: memory does not limit the size of the corpus. `vocab_size`
    is the model's, if known; `pairs` of an objective that reads preferences.
    """
    texts = [open_source(source, ModelLimits(pairs=pairs)) for source in data.sources]
    if not all(isinstance(source, Texts | Chats) for source in texts):
        raise DataError("data tokenize: the source holds no text")
    chosen = tokenizer or choose_tokenizer(data, ModelLimits(vocab_size=vocab_size), texts, None)
    assert chosen is not None
    sources = [source for source in texts if isinstance(source, Texts | Chats)]
    if len({type(source) for source in sources}) > 1:
        raise DataError("data tokenize: some sources hold texts and others conversations")
    name = ", ".join(source.name for source in sources)
    encoder = ChatEncoder(chosen, data)
    documents: Iterable[token_store.Encoded] = itertools.chain.from_iterable(
        encoded(source, encoder) for source in sources
    )
    remember_template(
        encoder,
        [kind for source in sources if isinstance(source, Chats) for kind in source.formats()],
    )
    written = token_store.write(Path(out_folder), name, documents, chosen)
    return Tokenized(
        name,
        len(written.lengths),
        len(written.tokens),
        chosen.name,
        written.tokens.nbytes,
        str(out_folder),
    )


# -- sizes --------------------------------------------------------------------------------------


def _check_sizes(
    data: Data, parts: Sequence[OpenSource], train: Split, batch_size: int | None
) -> None:
    for part in parts:
        of = f" of {train.tokens_each:,} tokens" if train.tokens_each else ""
        less = ", or a shorter data.seq_len" if train.tokens_each else ""
        if not len(part.train):
            raise DataError(
                f"data: too small: {part.summary}: not one training sample{of}; more data"
                f"{less} would do"
            )
        if part.held_out is not None and not len(part.held_out):
            raise DataError(
                f"data.held_out: {data.held_out} of {part.summary} is less than one sample; a "
                "larger fraction, more data, or 0 would do"
            )
    check_batch(train, batch_size)
    first, *others = map(_shape, train.parts)
    for shape, part in zip(others, parts[1:]):
        if shape != first:
            raise DataError(
                f"data.mixture: samples differ: {parts[0].summary} has {first}, but "
                f"{part.summary} has {shape}"
            )


def check_batch(train: Split, batch_size: int | None) -> None:
    """Raise DataError if there are fewer samples than one batch has."""
    if batch_size is not None and train.samples < batch_size:
        less = ", or a shorter data.seq_len" if train.tokens_each else ""
        raise DataError(
            f"data: too small: {train.samples:,} training samples, but a batch has {batch_size:,};"
            f" a train_batch_size of at most {train.samples:,}{less} would do"
        )


def _shape(samples: Samples) -> dict[str, str]:
    none = samples.read(np.zeros(0, np.int64))
    shapes = {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in none.items()}
    # Arrays of images others get.
    return {name: x for name, x in shapes.items() if not name.startswith((PATCH, IMAGE))}


# -- figures ------------------------------------------------------------------------------------


def _entropy(parts: Sequence[OpenSource], weights: Sequence[float]) -> float | None:
    """Unigram entropy of the training tokens: the parts' frequencies mixed by weight."""
    counts = [part.counts for part in parts if part.counts is not None]
    if len(counts) < len(parts):
        return None
    mixed = np.zeros(max(map(len, counts)))
    for frequencies, weight in zip(counts, weights):
        mixed[: len(frequencies)] += weight * frequencies / frequencies.sum()
    return entropy(mixed)


def _summary(
    parts: Sequence[OpenSource],
    weights: Sequence[float],
    train: Split,
    held_out: Split | None,
    tokenizer: Tokenizer | None,
) -> str:
    total = sum(weights)
    shares = [f"{w / total:.1%} " if len(parts) > 1 else "" for w in weights]
    shown = " + ".join(f"{share}{part.summary}" for share, part in zip(shares, parts))
    by = f" ({tokenizer.name})" if tokenizer else ""
    of = f" of {train.tokens_each:,} tokens" if train.tokens_each else ""
    out = held_out.samples if held_out else 0
    return f"{shown}{by}; {train.samples:,} training samples{of}, {out:,} held out"


def known_shapes(
    data: Data, reads: ModelLimits, samples: int
) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Shapes of a batch of so many samples, as far as model and data section determine them.

    None for a user's own data source or model, where a sample has to be read.
    """
    if reads.form is not None:
        if data.seq_len is None and reads.seq_len is None:
            return None
        length = packing_of(data, reads).seq_len
        if reads.pairs is not None:
            rows = blank_rows(reads.pairs, length, 1)
        else:
            assert reads.prompts is not None
            rows = prompt_records.blank_rows(reads.prompts, length, 1)
        return {n: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype) for n, x in rows.items()}
    user_source = any(":" in (section.source or "") for section in data.sources)
    if user_source or reads.sample is None:
        return None
    changes = {"source": "synthetic", "samples": 1, "mixture": [], "held_out": 0.0, "eval": None}
    changes |= {**_OF_CHATS, "format": None}
    first = build(data.model_copy(update=changes), **vars(reads), seed=0).train.batch(0, 1)
    shapes = {
        name: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
    if reads.sample == "tokens" and any(is_chat(x, reads.images) for x in data.sources):
        also = ["positions"] * data.document_masks + ["mask"]
        shapes |= dict.fromkeys(also, shapes["tokens"])
        if reads.images is not None:
            most = data.patches or most_patches(reads.images, packing_of(data, reads).seq_len)
            length = shapes["tokens"].shape[1]
            blank = {
                "tokens": np.zeros((1, length), np.int32),
                IMAGE_ROWS: np.full((1, length), -1, np.int32),
                PATCHES: np.zeros((1, most, reads.images.patch), np.float32),
            }
            shapes |= {
                name: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype)
                for name, x in (blank | reads.images.beside(blank, [[]])).items()
            }
    return shapes
