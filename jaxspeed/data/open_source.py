"""Open one source of a corpus and split it into training and held-out samples."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.config.run_sections import Data, SourceSection
from jaxspeed.data import array_sources, columns, files, token_records, token_store
from jaxspeed.data.chat_formats import format_of
from jaxspeed.data.chat_masks import ChatEncoder
from jaxspeed.data.chats import Chats, chats_in, numbered
from jaxspeed.data.complete_documents import DocumentCounts, Packing, pack_documents
from jaxspeed.data.holdout import hold_out_documents, hold_out_samples
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.packing import Spans, Stream, add_counts
from jaxspeed.data.pair_samples import PairCounts, pack_pairs
from jaxspeed.data.preference_records import preference_format
from jaxspeed.data.prompts import PROMPT, PromptCounts, PromptRecord, Prompts, digest_of, fitting
from jaxspeed.data.samples import ArrayRows, Chain, Samples, Subset, Windows
from jaxspeed.data.sources import SUFFIXES, Texts, import_source, iterations, text_source
from jaxspeed.data.synthetic import Blots, Counting, counting_pairs, counting_prompts
from jaxspeed.errors import DataError

TEXT_SOURCES = (None, "stdlib", "text", "jsonl", "json", "parquet", "huggingface")
RECORDS = ("jsonl", "json", "parquet", "arrow", "huggingface")  # in which conversations can be
SYNTHETIC_SAMPLES, SYNTHETIC_RECORDS = 1 << 16, 1 << 12  # records are all in memory
log = logging.getLogger("jaxspeed")
_LONG_READ = 30.0  # seconds after which it is reported that an iterable is still read


@dataclass(frozen=True)
class SyntheticSource:
    """A synthetic source."""

    samples: int


# The contents of a source, before there is a tokenizer.
Opened = Texts | Chats | list[token_store.Documents] | array_sources.Arrays | SyntheticSource


@dataclass(frozen=True)
class OpenSource:
    """The samples of one source."""

    train: Samples
    held_out: Samples | None
    digest: str
    counts: np.ndarray | None  # of each id in the training tokens, or proportional to it
    summary: str
    conversations: DocumentCounts | PairCounts | PromptCounts | None = None


def open_source(source: SourceSection, limits: ModelLimits) -> Opened:
    """Open a source; DataError if it cannot be read."""
    kind = source.source
    paths = files.given_paths(source.path, source.paths)
    if kind == "huggingface" and paths and all(map(columns.is_saved, paths)):
        kind = "arrow"
    if kind in ("arrow", "parquet"):
        return columns.open_columns(source, kind, limits.form, limits.images is not None)
    if kind in TEXT_SOURCES:
        return text_source(source, limits.form, limits.images is not None)
    if source.format is not None and (kind in ("tokens", "images", "synthetic")):
        raise DataError(f"data.format: source {kind} has no records with conversations")
    if kind == "tokens":
        return [token_store.read(path, source.dtype) for path in _token_paths(paths)]
    if kind == "images":
        return array_sources.read_images(paths, limits)
    if kind == "synthetic":
        default = SYNTHETIC_SAMPLES if limits.form is None else SYNTHETIC_RECORDS
        return SyntheticSource(source.samples or default)
    assert kind is not None
    return _user_iterable(kind, source, limits)


def is_chat(source: SourceSection, images: Any = None) -> bool:
    """Whether a source holds conversations, as far as that is known without reading all of it.

    `images` is of a model that reads some, to which captions are conversations.
    """
    if source.format is not None:
        return True
    try:
        paths = files.given_paths(source.path, source.paths)
        if source.source == "tokens":
            return any((path / token_store.TRAINED).is_file() for path in _token_paths(paths))
        if source.source not in RECORDS or source.source == "huggingface":  # on a network
            return False
        return isinstance(open_source(source, ModelLimits(images=images)), Chats)
    except DataError:  # a plan needs no data
        return False


def by_file(source: SourceSection) -> dict[str, SourceSection]:
    """A section for each file of a source, by the file's path; the source itself if it has none.

    A source that has paths and no kind is of the kinds that its files' names show.
    """
    paths, kind = files.given_paths(source.path, source.paths), source.source
    if not paths or ":" in (kind or ""):
        return {kind or "stdlib": source}
    kinds: dict[str, str] = {}  # the kind of each
    for name in paths:
        path = Path(name).expanduser()
        if kind in ("arrow", "huggingface", None) and columns.is_saved(name):
            column_paths = columns.column_files(name, "arrow", source.split)
            kinds |= {str(file): "arrow" for file in column_paths}
        elif kind == "huggingface":
            kinds[name] = kind
        elif kind == "tokens" or (kind is None and _is_token_folder(path)):
            kinds |= {str(folder): "tokens" for folder in _token_paths([name])}
        elif kind in ("images", None) and (path / "images.npy").is_file():
            kinds[name] = "images"
        else:
            raw_files = files.find_files([name], SUFFIXES.get(kind or "", ()))
            raw = {file.parent for file in raw_files if file.suffix == ".bin"}
            kinds |= {
                str(file): kind or _kind_of(file)
                for file in raw_files
                if kind or file.name != token_store.RAW_META or file.parent not in raw
            }
    sections = {}
    for name, its_kind in kinds.items():
        changed: dict[str, Any] = {"source": its_kind, "path": name, "paths": None}
        if kind is None and its_kind not in RECORDS:
            changed["format"] = None
        sections[name] = source.model_copy(update=changed)
    return sections


def fields_of_records(sources: Iterable[SourceSection]) -> Iterator[list[str]]:
    """The names of each record's fields, of sources that are files of records."""
    for source in sources:
        file, kind = Path(source.path or ""), source.source
        is_json, field = kind in ("json", "jsonl"), source.text_field
        assert kind is not None
        read = files.json_records(file) if is_json else columns.records_of(file, kind, [field])
        yield from ([*record.value] for record in read if isinstance(record.value, dict))


def _kind_of(file: Path) -> str:
    ends = (kind for kind, suffixes in SUFFIXES.items() if file.name.endswith(suffixes))
    kind = next(ends, "text")
    if kind == "json":  # of records, or else a text as any other
        first = next(files.json_records(file), None)
        fields = first.value if first is not None and isinstance(first.value, dict) else {}
        are_records = format_of(fields) or preference_format(fields) or PROMPT in fields
        return "json" if are_records else "text"
    return kind


def _token_paths(paths: Sequence[str]) -> list[Path]:
    """Token folders, and the .npy and .bin files of other folders."""
    token_paths: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        suffixes = SUFFIXES["tokens"]
        is_store = _is_token_folder(path)
        is_store |= not any(any(path.glob(f"*{suffix}")) for suffix in suffixes)
        if path.is_dir() and is_store:
            token_paths.append(path)
            continue
        if all((path / f"{split}.bin").is_file() for split in ("train", "val")):
            raise DataError(
                f"data: the folder {name!r} holds train.bin and val.bin; name the one to read: "
                f"{str(path / 'train.bin')!r}"
            )
        token_paths += files.find_files([name], suffixes)
    return token_paths


def _is_token_folder(path: Path) -> bool:
    return any((path / name).exists() for name in (token_store.HEADER, token_store.OFFSETS))


def _user_iterable(path: str, source: SourceSection, limits: ModelLimits) -> Opened:
    """A user's array of ids, or iterable of texts, records, token documents, samples or batches."""
    data = import_source(path)
    if isinstance(data, np.ndarray):
        return [token_store.of_array(path, data)]
    begin = iterations(data, path, source.samples)
    first = next(begin(), None)
    field = source.text_field
    if first is None:
        raise DataError(f"data.source: {path!r} has no items")
    records = [numbered(path, begin, "item")]
    if limits.form is not None:
        names = first if isinstance(first, Mapping) else ()
        return chats_in(source, path, records, names, limits.form) or Texts(path, begin)
    if isinstance(first, str):
        return Texts(path, begin)
    if isinstance(first, Mapping) and isinstance(first.get(field), str):
        return Texts(
            path,
            lambda: (files.text_of(r, field, f"{path}, item {i}") for i, r in enumerate(begin())),
        )
    if isinstance(first, Mapping) or source.format is not None:
        names = first if isinstance(first, Mapping) else ()
        sees = limits.images is not None
        if chats := chats_in(source, path, records, names, sees=sees):
            return chats
    items = _all_of(begin(), path)
    if isinstance(first, Mapping):
        return _records(items, path, limits, getattr(data, "batch_size", None) is not None)
    documents = [token_records.numpy_of(item, f"{path}, item {i}") for i, item in enumerate(items)]
    for i, ids in enumerate(documents):
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0):
            raise DataError(
                f"data.source: {path!r}: item {i} is a {type(items[i]).__name__}; items are texts, "
                "mappings from names to arrays, or lists of token ids"
            )
    return [token_store.in_memory(path, documents, None)]


def _all_of(items: Iterable[Any], path: str) -> list[Any]:
    """The items; a warning names an iterable that may have no end."""
    read, begun, warned = [], time.monotonic(), False
    for item in items:
        read.append(item)
        if not warned and time.monotonic() - begun > _LONG_READ:
            warned = True
            log.warning(
                "data.source: %s: %s items so far, all of which are read into memory; an iterable "
                "without an end needs data.samples",
                path,
                f"{len(read):,}",
            )
    return read


def _records(
    items: Sequence[Any], path: str, limits: ModelLimits, batched: bool
) -> list[token_store.Documents] | array_sources.Arrays:
    """Records with ids as documents, and others as samples, or if `batched` as batches of them."""
    names = [f"{path}, item {i}" for i in range(len(items))]
    for name, item in zip(names, items):
        if not isinstance(item, Mapping):
            raise DataError(f"data: {name}: a {type(item).__name__}, but the first is a mapping")
    field = token_records.token_field(items[0])
    # A model of which nothing is known may read rows of equal length as they are.
    if field and (limits.sample == "tokens" or len({np.shape(x.get(field)) for x in items}) > 1):
        documents = (token_records.documents_in(x, field, name) for x, name in zip(items, names))
        return [token_store.in_memory(path, itertools.chain.from_iterable(documents), None)]
    records = [
        {key: token_records.numpy_of(x, f"{name}, {key!r}") for key, x in item.items()}
        for item, name in zip(items, names)
    ]
    batched |= limits.sample == "images" and np.ndim(records[0].get("images", 0)) == 4
    return array_sources.joined(records, path) if batched else array_sources.stack(records, path)


# -- into samples -------------------------------------------------------------------------------


def samples_of(
    data: Data,
    source: SourceSection,
    limits: ModelLimits,
    opened: Opened,
    encoder: ChatEncoder | None,
) -> OpenSource:
    """The samples of an opened source, for a model with these limits.

    Args:
      encoder: with the tokenizer, if there is one.
    """
    if limits.prompts is not None:
        return prompts_part(opened, data, source, limits, encoder)
    if limits.pairs is not None and isinstance(opened, SyntheticSource):
        pairs = counting_pairs(
            opened.samples, packing_of(data, limits).seq_len, limits.vocab_size or 256
        )
        opened = [token_store.in_memory("synthetic", pairs, None)]
    if limits.pairs is not None and isinstance(opened, dict):
        raise DataError(
            f"data: source {source.source} has no preferences, which the objective reads"
        )
    if isinstance(opened, dict):
        if limits.sample == "tokens":
            raise DataError(f"data: source {source.source} has arrays, but the model reads tokens")
        return arrays_part(opened, data.held_out, source.path or str(source.source))
    if isinstance(opened, SyntheticSource):
        packing = None if limits.sample != "tokens" else packing_of(data, limits)
        return made_part(opened, limits, packing, data.held_out)
    if limits.sample == "images":
        kind = source.source or "stdlib"
        raise DataError(
            f"data: source {kind} holds text, but the model reads images; sources images and "
            "synthetic have some"
        )
    if isinstance(opened, Texts | Chats):
        assert encoder is not None
        opened = [encoded_in_memory(opened, encoder)]
    for documents in opened:
        if not len(documents.tokens) and not documents.dropped:
            raise DataError(f"data: {documents.name} holds no text")
        if limits.vocab_size and documents.largest >= limits.vocab_size:
            raise DataError(
                f"data: {documents.name} has ids up to {documents.largest:,}, but the model's "
                f"vocabulary has {limits.vocab_size:,}"
            )
    return documents_part(opened, data, limits)


def encoded_in_memory(opened: Texts | Chats, encoder: ChatEncoder) -> token_store.Documents:
    """The documents of texts or of conversations."""
    return token_store.in_memory(opened.name, encoded(opened, encoder), encoder.tokenizer)


def encoded(
    opened: Texts | Chats, encoder: ChatEncoder
) -> Iterable[np.ndarray] | Iterable[token_store.Masked | token_store.RecordTokens]:
    if isinstance(opened, Texts):
        return token_store.encode_all(opened, encoder.tokenizer)
    return opened.encoded(encoder)


def packing_of(data: Data, limits: ModelLimits) -> Packing:
    """How documents become samples.

    Raises:
      DataError: their length is unknown, or the model has fewer positions.
    """
    positions, also = limits.seq_len, ""
    if positions and limits.pairs is not None and limits.pairs.reads_ends:
        positions, also = positions - 1, ", and a score is read at the last of seq_len + 1 tokens"
    seq_len = data.seq_len or positions
    if seq_len is None:
        raise DataError("data.seq_len: must be set, because the model's positions are unknown")
    if positions and seq_len > positions:
        raise DataError(
            f"data.seq_len is {seq_len:,}, but the model has {limits.seq_len:,} positions{also}; "
            f"{positions:,} or less would do"
        )
    how = seq_len, data.document_masks, data.truncate, data.packing
    return Packing(*how, limits.images, data.patches)


def documents_part(
    documents: Sequence[token_store.Documents], data: Data, limits: ModelLimits
) -> OpenSource:
    """Pack documents into windows, or pairs of preferences into rows: training and held-out.

    Without a vocabulary of the model's, ids up to the largest of each source are read.
    """
    packing, held_out, pairs = packing_of(data, limits), data.held_out, limits.pairs
    train: list[Samples] = []
    held: list[Samples] = []
    frequencies, counts = np.zeros(0, np.int64), list[Any]()
    for part in documents:
        kept: Samples
        out: Samples | None = None
        counted: DocumentCounts | PairCounts
        known = limits.vocab_size or part.largest + 1
        if pairs is not None:
            kept, out, counted = pack_pairs(part, pairs, packing, held_out, known)
            counts.append(counted)
        elif part.per_record:
            raise DataError(
                f"data: {part.name} holds preferences, but the objective reads documents; dpo, for "
                "one, reads preferences"
            )
        elif part.trained is not None:
            kept, out, ids, counted = pack_documents(part, packing, held_out, known)
            frequencies = add_counts(frequencies, ids)
            counts.append(counted)
        else:
            spans = Spans(np.asarray(part.offsets[:-1]), part.lengths)
            if held_out:
                spans, beyond = hold_out_documents(part.offsets, held_out)
                last = Stream(part.tokens, beyond, known, part.name)
                out = _windows(last, packing, pad_last=True)
            stream = Stream(part.tokens, spans, known, part.name)
            kept = _windows(stream, packing, pad_last=False)
            frequencies = add_counts(frequencies, stream.counts())
        train.append(kept)
        held += [] if out is None else [out]
    number = sum(len(part.offsets) - 1 for part in documents)
    tokens = sum(int(part.offsets[-1]) for part in documents)
    shown = f"{number:,} document{'' if number == 1 else 's'}, {tokens:,} tokens"
    total = sum(counts[1:], counts[0]) if counts else None
    return OpenSource(
        Chain(train),
        Chain(held) if held else None,
        " ".join(part.digest for part in documents),
        frequencies if pairs is None else None,
        f"{', '.join(part.name for part in documents)}: {total or shown}",
        total,
    )


def prompts_part(
    opened: Opened,
    data: Data,
    source: SourceSection,
    limits: ModelLimits,
    encoder: ChatEncoder | None,
) -> OpenSource:
    """Prompts that fit, training and held-out.

    Raises:
      DataError: the source has none, or none fits.
    """
    form, context = limits.prompts, packing_of(data, limits).seq_len
    assert form is not None
    name = f"synthetic prompts, {limits.vocab_size or 256} ids"
    if isinstance(opened, SyntheticSource):
        most = context - form.max_completion_length
        records = counting_prompts(opened.samples, most, limits.vocab_size or 256)
    elif isinstance(opened, Chats):
        assert encoder is not None
        name, records = opened.name, prompts_in(opened, encoder)
    else:
        raise DataError(f"data: source {source.source} has no prompts, which the objective reads")
    fit, counts = fitting(records, form, context, name)
    train, held = (
        Prompts([fit[i] for i in ids], form, context)
        for ids in hold_out_samples(len(fit), data.held_out)
    )
    return OpenSource(
        train,
        held if data.held_out else None,
        digest_of(fit),
        None,
        f"{name}: {counts}",
        counts,
    )


def prompts_in(opened: Chats, encoder: ChatEncoder) -> list[PromptRecord]:
    """The records of a source of prompts."""
    return [record for record in opened.encoded(encoder) if isinstance(record, PromptRecord)]


def _windows(stream: Stream, packing: Packing, *, pad_last: bool) -> Windows:
    return Windows(stream, packing.seq_len, segments=packing.segments, pad_last=pad_last)


def arrays_part(arrays: array_sources.Arrays, held_out: float, name: str) -> OpenSource:
    """Split rows of arrays into training and held-out."""
    rows = ArrayRows(arrays)
    shapes = ", ".join(f"{key} {list(array.shape[1:])}" for key, array in arrays.items())
    summary = f"{name}: {len(rows):,} samples of {shapes}"
    return _split(rows, held_out, array_sources.digest(arrays), None, summary)


def made_part(
    source: SyntheticSource, limits: ModelLimits, packing: Packing | None, held_out: float
) -> OpenSource:
    """Synthetic samples of the kind that the model reads."""
    if limits.sample == "images" and limits.image_shape:
        images = Blots(source.samples, limits.image_shape, limits.classes or 2)
        shown = f"images of {' x '.join(map(str, limits.image_shape))}"
        return _split(
            images,
            held_out,
            f"blots {source.samples} {shown} {images.classes}",
            None,
            f"synthetic {shown}",
        )
    if packing is None:
        raise DataError(
            'data.source "synthetic" makes samples for models of tokens or images, but the kind '
            "of this model's samples is unknown; set data.source to the import path of an iterable"
        )
    vocab_size = limits.vocab_size or 256

    def counting(masked: bool) -> Counting:
        return Counting(
            source.samples, packing.seq_len, vocab_size, segments=packing.segments, masked=masked
        )

    train, held = hold_out_samples(source.samples, held_out)
    return OpenSource(
        Subset(counting(False), train),
        Subset(counting(True), held) if held_out else None,
        f"counting {source.samples} {vocab_size}",
        np.ones(vocab_size, np.int64),
        f"synthetic tokens, {vocab_size} ids",
    )


def _split(
    samples: Samples, held_out: float, digest: str, counts: np.ndarray | None, summary: str
) -> OpenSource:
    train, held = hold_out_samples(len(samples), held_out)
    out = Subset(samples, held) if held_out else None
    return OpenSource(Subset(samples, train), out, digest, counts, summary)
