"""Tokenized documents: one array of ids with document offsets, in memory or memory-mapped files.

Sizes, dtypes and offsets of a folder are checked whenever it is opened. Its digest, which takes a
pass over all tokens, is checked when the folder is opened first, which a file in it records, and
again once a file has changed.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspeed.config.run_sections import IdDtype
from jaxspeed.data.files import read_array
from jaxspeed.data.tokenizer import FILES, Tokenizer, files_of, read_tokenizer, tokenizer_file
from jaxspeed.errors import DataError
from jaxspeed.vision import ImageSource
from jaxspeed.vision.images import digest_of

log = logging.getLogger("jaxspeed")
# Formats that earlier versions would misread have numbers: with a mask, and of preferences.
FORMAT, MASKED_FORMAT, PREFERENCE_FORMAT = FORMATS = 1, 2, 3
VALUES = ("label", "margin")  # of records, each in a file of its name
DROPPED = ("equal", "empty")  # why a record has no tokens
HEADER, TOKENS, OFFSETS, TRAINED = "header.json", "tokens.npy", "offsets.npy", "trained.npy"
VERIFIED = ".verified.json"
_BLOCK = 1 << 24  # tokens that are hashed at once
_LONG = 1 << 30  # bytes that take so long to read that it is logged


class Masked(NamedTuple):
    """The tokens of a document, of which the loss counts some."""

    ids: np.ndarray  # unsigned [tokens]
    trained: np.ndarray  # bool [tokens]
    images: tuple[ImageSource, ...] = ()


class RecordTokens(NamedTuple):
    """The documents of a record of preferences: its prompt with each completion, which is masked.

    `dropped` is why it has none.
    """

    documents: tuple[Masked, ...]
    values: Mapping[str, float] = {}
    dropped: str = ""


Encoded = np.ndarray | Masked | RecordTokens


@dataclass(frozen=True)
class Documents:
    """Document i is tokens[offsets[i] : offsets[i + 1]].

    Of preferences record r has the documents from r * `per_record` on.
    """

    name: str
    tokens: np.ndarray  # unsigned [tokens]
    offsets: np.ndarray  # int64 [documents + 1]
    digest: str  # changes with any token or offset
    largest: int  # the largest id
    tokenizer: Tokenizer | None
    trained: np.ndarray | None = None  # bool [tokens]: those that the loss counts; None: all
    per_record: int = 0  # documents: 2 of a pair, 1 of a completion with a label; 0: no preferences
    values: Mapping[str, np.ndarray] = field(default_factory=dict)  # fp32 [records]
    dropped: Mapping[str, int] = field(default_factory=dict)  # records, by reason
    images: Sequence[tuple[ImageSource, ...]] | None = None  # of each document; None: of none

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds the ids."""
    return np.min_scalar_type(max(vocab_size - 1, 0))


@dataclass
class _Beside:
    """What documents have beside their ids, collected as these are read."""

    masks: list[np.ndarray] = field(default_factory=list)
    images: list[tuple[ImageSource, ...]] = field(default_factory=list)
    per_record: int = 0
    records: list[Mapping[str, float]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def ids_of(self, encoded: Iterable[Encoded]) -> Iterator[np.ndarray]:
        """The ids of each document that is not empty."""
        for record in encoded:
            for document in self._documents_of(record):
                if isinstance(document, Masked):
                    if len(document.ids):
                        self.masks.append(document.trained)
                        self.images.append(document.images)
                        yield document.ids
                elif len(document):
                    yield document

    def _documents_of(self, record: Encoded) -> Sequence[np.ndarray | Masked]:
        if not isinstance(record, RecordTokens):
            return [record]
        if record.dropped:
            self.dropped[record.dropped] += 1
            return []
        self.per_record = self.per_record or len(record.documents)
        if len(record.documents) != self.per_record:
            raise DataError("data: some records are pairs, others completions with a label")
        self.records.append(record.values)
        return record.documents

    @property
    def trained(self) -> np.ndarray | None:
        return np.concatenate(self.masks) if self.masks else None

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Those of records, 0 where one has none."""
        names = [name for name in VALUES if any(name in values for values in self.records)]
        return {n: np.array([x.get(n, 0) for x in self.records], np.float32) for n in names}


def in_memory(name: str, encoded: Iterable[Encoded], tokenizer: Tokenizer | None) -> Documents:
    """Concatenate encoded documents in memory; empty ones are dropped."""
    beside = _Beside()
    ids = [*beside.ids_of(encoded)]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    largest = max((int(document_ids.max()) for document_ids in ids), default=0)
    dtype = id_dtype(tokenizer.vocab_size if tokenizer else largest + 1)
    tokens = np.empty(offsets[-1], dtype)
    for document_ids, at in zip(ids, offsets):
        tokens[at : at + len(document_ids)] = document_ids
    trained, values = beside.trained, beside.values
    digest = _digest_of(tokens, offsets, trained, values)
    images = beside.images if any(beside.images) else None
    if images is not None:
        digest += f" {digest_of(images)}"
    records = beside.per_record, values, beside.dropped, images
    return Documents(name, tokens, offsets, digest, largest, tokenizer, trained, *records)


def encode_all(texts: Iterable[str], tokenizer: Tokenizer) -> Iterable[np.ndarray]:
    """The ids of each nonempty document, with the end-of-document id."""
    end = [] if tokenizer.end is None else [tokenizer.end]
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids):
            yield np.append(ids, np.asarray(end, ids.dtype)) if end else ids


class _Digest:
    def __init__(self, dtype: np.dtype) -> None:
        self._hash = hashlib.blake2b(dtype.str.encode(), digest_size=16)

    def add(self, tokens: np.ndarray) -> None:
        self._hash.update(np.ascontiguousarray(tokens).data)

    def end(
        self,
        offsets: np.ndarray,
        trained: np.ndarray | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> str:
        self._hash.update(np.ascontiguousarray(offsets, np.int64).data)
        if trained is not None:
            self._hash.update(np.packbits(trained).data)
        for name, array in sorted((values or {}).items()):
            self._hash.update(name.encode())
            self._hash.update(np.ascontiguousarray(array).data)
        return self._hash.hexdigest()


def _digest_of(
    tokens: np.ndarray,
    offsets: np.ndarray,
    trained: np.ndarray | None = None,
    values: Mapping[str, np.ndarray] | None = None,
) -> str:
    digest = _Digest(tokens.dtype)
    for start in range(0, tokens.size, _BLOCK):
        digest.add(tokens[start : start + _BLOCK])
    return digest.end(offsets, trained, values)


# -- files --------------------------------------------------------------------------------------


def write(out: Path, name: str, encoded: Iterable[Encoded], tokenizer: Tokenizer) -> Documents:
    """Write documents one at a time into a new folder, which appears when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"data tokenize: {str(out)!r} already exists; name a new folder")
    temporary = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(temporary, name, encoded, tokenizer)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise DataError(f"data tokenize: {str(out)!r} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _read_folder(out)


def _write_files(folder: Path, name: str, encoded: Iterable[Encoded], tokenizer: Tokenizer) -> None:
    dtype, beside = id_dtype(tokenizer.vocab_size), _Beside()
    digest, largest, ends = _Digest(dtype), 0, [0]
    with (folder / TOKENS).open("wb") as file:
        _npy_header(file, dtype, 0)
        for ids in beside.ids_of(encoded):
            if any(beside.images[-1:]) and beside.images[-1]:
                raise DataError(
                    f"data tokenize: {name} has images, which a token folder does not hold; train "
                    "on the records themselves"
                )
            largest = max(largest, int(ids.max()))
            narrow = ids.astype(dtype)
            digest.add(narrow)
            file.write(narrow.data)
            ends.append(ends[-1] + len(ids))
        file.seek(0)
        # NumPy pads the header such that the first dim can grow.
        _npy_header(file, dtype, ends[-1])
    if len(ends) == 1:
        left = " that is left: all records are dropped" if beside.dropped else ""
        raise DataError(f"data tokenize: {name} holds no text{left}")
    offsets = np.asarray(ends, np.int64)
    np.save(folder / OFFSETS, offsets)
    trained, values = beside.trained, beside.values
    if trained is not None:
        np.save(folder / TRAINED, trained)
    for value_name, array in values.items():
        np.save(folder / f"{value_name}.npy", array)
    for written, content in files_of(tokenizer).items():
        (folder / written).write_bytes(content)
    header = {
        "format": FORMAT if trained is None else MASKED_FORMAT,
        "name": name,
        "tokenizer": tokenizer.name,
        "documents": len(offsets) - 1,
        "tokens": ends[-1],
        "dtype": dtype.str,
        "largest": largest,
        "digest": digest.end(offsets, trained, values),
    }
    if beside.per_record:
        header |= {
            "format": PREFERENCE_FORMAT,
            "per_record": beside.per_record,
            "values": [*values],
            "dropped": beside.dropped,
        }
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n")


def _npy_header(file: Any, dtype: np.dtype, length: int) -> None:
    described = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, described)


def read(path: Path, dtype: str | None = None) -> Documents:
    """Read a folder that `write` made, a .npy file of ids, or a raw file of ids.

    A .npy file holds [tokens] or [documents, tokens]; a raw one the tokens of one document, of a
    `dtype` that it does not name itself.
    """
    if path.is_file():
        return _read_file(path, dtype)
    documents = _read_folder(path)
    if not _is_verified(path, documents):
        _check_digest(path, documents)
    return documents


def verify(path: Path) -> Documents:
    """Read a folder or a file of ids, and compare every token with the folder's digest.

    Raises:
      DataError: it is damaged.
    """
    if path.is_file():
        return _read_file(path, None)
    documents = _read_folder(path)
    _check_digest(path, documents)
    return documents


def _read_folder(folder: Path) -> Documents:
    if not (folder / HEADER).is_file():
        raise DataError(
            f"data: {str(folder)!r} is not a token folder: it has no {HEADER}; "
            "`jaxspeed data tokenize` writes such folders"
        )
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["format"] not in FORMATS:
            raise DataError(
                f"data: {str(folder)!r} has format {header['format']}; this version of jaxspeed "
                f"reads {', '.join(map(str, FORMATS))}"
            )
        is_masked, per_record = header["format"] != FORMAT, int(header.get("per_record", 0))
        names = [name for name in VALUES if name in header.get("values", ())]
        counts = header.get("dropped", {})
        dropped = {why: int(counts[why]) for why in DROPPED if why in counts}
        try:
            tokens, offsets = read_array(folder / TOKENS), read_array(folder / OFFSETS)
            trained = read_array(folder / TRAINED) if is_masked else None
            values = {name: read_array(folder / f"{name}.npy") for name in names}
        except DataError as error:
            raise ValueError(str(error).removeprefix("data: ")) from None
        file = tokenizer_file(folder)
        tokenizer = read_tokenizer(folder) if file else None
        name, digest = f"{header['name']}, tokenized", str(header["digest"])
        largest = int(header["largest"])
        problem = _problem(folder, header, tokens, offsets) if file else f"it has no {FILES[0]}"
        if trained is not None and (trained.dtype, trained.shape) != (np.bool_, tokens.shape):
            problem = f"{TRAINED} holds {trained.dtype}{list(trained.shape)}, not bool [tokens]"
        if header["format"] == PREFERENCE_FORMAT and not problem:
            problem = _record_problem(per_record, values, len(offsets) - 1)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        problem = str(error)
    if problem:
        raise DataError(f"data: {str(folder)!r} is damaged: {problem}")
    beside = per_record, values, dropped
    return Documents(name, tokens, offsets, digest, largest, tokenizer, trained, *beside)


def _record_problem(per_record: int, values: Mapping[str, np.ndarray], documents: int) -> str:
    """What is wrong with the records of preferences, or ""."""
    if per_record not in (1, 2) or documents % per_record:
        return f"{documents} documents are no records of {per_record}"
    if per_record == 1 and "label" not in values:
        return "its completions have no label"
    for name, array in values.items():
        if (array.dtype, array.shape) != (np.float32, (documents // per_record,)):
            return f"{name}.npy holds {array.dtype}{list(array.shape)}, not float32 [records]"
    return ""


def _problem(folder: Path, header: Any, tokens: np.ndarray, offsets: np.ndarray) -> str:
    """What the arrays' sizes, dtypes and offsets have of what `write` does not write, or ""."""
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        return f"{TOKENS} holds {tokens.dtype}{list(tokens.shape)}, not unsigned ids [tokens]"
    if tokens.dtype.str != header.get("dtype", tokens.dtype.str):
        return f"{TOKENS} holds {tokens.dtype.str}, but its header lists {header['dtype']}"
    if offsets.ndim != 1 or offsets.dtype != np.int64:
        return f"{OFFSETS} holds {offsets.dtype}{list(offsets.shape)}, not int64 [documents + 1]"
    for file, array in ((TOKENS, tokens), (OFFSETS, offsets)):
        size = (folder / file).stat().st_size
        if isinstance(array, np.memmap) and size != array.offset + array.nbytes:
            return f"{file} has {size:,} bytes, not {array.offset + array.nbytes:,}"
    if len(tokens) != header["tokens"] or len(offsets) != header["documents"] + 1:
        return (
            f"{len(tokens)} tokens in {len(offsets) - 1} documents, but its header lists "
            f"{header['tokens']} in {header['documents']}"
        )
    largest = header["largest"]
    if type(largest) is not int or not 0 <= largest <= np.iinfo(tokens.dtype).max:
        return f"its header lists {largest!r} as the largest id of {tokens.dtype}"
    if not len(offsets):
        return f"{OFFSETS} is empty"
    if offsets[0] != 0 or offsets[-1] != len(tokens):
        return f"{OFFSETS} goes from {offsets[0]} to {offsets[-1]}, not from 0 to {len(tokens)}"
    if (empty := np.flatnonzero(np.diff(offsets) <= 0)).size:
        at = int(empty[0])
        return f"{OFFSETS} does not rise from {offsets[at]} to {offsets[at + 1]}, document {at}"
    return ""


def _check_digest(folder: Path, documents: Documents) -> None:
    """Compare the tokens with the digest, and record that they agree."""
    before = _stamp(folder, documents)
    if documents.tokens.nbytes >= _LONG:
        log.info("%s: comparing all tokens with the digest, which is done once", folder)
    computed = _digest_of(documents.tokens, documents.offsets, documents.trained, documents.values)
    if computed != documents.digest:
        raise DataError(
            f"data: {str(folder)!r} is damaged: its tokens or offsets are not those that were "
            "written (the digest in its header differs); tokenize the text again"
        )
    temporary = folder / f"{VERIFIED}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(before))
        temporary.replace(folder / VERIFIED)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if documents.tokens.nbytes >= _LONG:
            log.info(
                "%s cannot be written (%s), so that its digest is checked at each start; `jaxspeed "
                "data verify`, where it can be, records that it is intact",
                folder,
                error.strerror,
            )


def _is_verified(folder: Path, documents: Documents) -> bool:
    try:
        recorded = json.loads((folder / VERIFIED).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return bool(recorded == _stamp(folder, documents))


def _stamp(folder: Path, documents: Documents) -> dict[str, Any]:
    """What changes with the folder's files: digest, sizes and times of modification."""
    names = [TOKENS, OFFSETS, *[TRAINED] * (documents.trained is not None)]
    names += [f"{name}.npy" for name in documents.values]
    stats = {name: (folder / name).stat() for name in names}
    files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return {"digest": documents.digest, **files}


# -- arrays of ids without a folder -------------------------------------------------------------

RAW_META = "meta.json"


def _read_file(file: Path, dtype: str | None) -> Documents:
    if file.suffix == ".npy":
        return of_array(str(file), read_array(file), file)
    array = _map_raw(file, dtype)
    return of_array(f"{file} (raw {array.dtype.name})", array, file)


def _map_raw(file: Path, dtype: str | None) -> np.ndarray:
    """The ids of a file that is nothing but them, little-endian: what `ndarray.tofile` writes."""
    if dtype is None:
        dtype = _dtype_beside(file)
    kind, size = np.dtype(dtype).newbyteorder("<"), file.stat().st_size
    if size == 0:
        raise DataError(f"data: {str(file)!r} is empty")
    if size % kind.itemsize:
        raise DataError(
            f"data: {str(file)!r} has {size:,} bytes, which {kind.itemsize} (of {dtype}) does not "
            "divide: it is truncated, or no raw file of such ids"
        )
    try:
        ids = np.memmap(file, kind, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"data: {str(file)!r} cannot be read: {error}") from None
    if dtype == "uint16" and _has_empty_halves(ids[: 1 << 16]):
        log.warning(
            "%s: every second id is 0, as in a file of uint32 that is read as uint16 (data.dtype)",
            file,
        )
    return ids


def _dtype_beside(file: Path) -> str:
    """The dtype in the meta.json beside a raw file."""
    meta = file.with_name(RAW_META)
    try:
        known = json.loads(meta.read_text())
        if known["dtype"] in typing.get_args(IdDtype):
            return str(known["dtype"])
        problem = f'; the "dtype" in {RAW_META} beside it is none of these'
    except FileNotFoundError:
        problem = f', or {{"dtype": ...}} in a file {RAW_META} beside it'
        if file.with_name("meta.pkl").exists():
            problem += " (meta.pkl is not read: a pickle can run any code)"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        problem = f'; {RAW_META} beside it is no object with a "dtype"'
    raise DataError(
        f"data.dtype: {str(file)!r} is a raw file of ids, which needs "
        f"{', '.join(typing.get_args(IdDtype))} here (nanoGPT writes uint16){problem}"
    )


def _has_empty_halves(ids: np.ndarray) -> bool:
    return len(ids) >= 64 and bool(ids[::2].any()) and not ids[1::2].any()


def of_array(name: str, array: np.ndarray, file: Path | None = None) -> Documents:
    """Ids [tokens] or [documents, tokens] as they are in memory, or mapped from `file`."""
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise DataError(
            f"data: {name!r} holds {array.dtype}{list(array.shape)}; ids must be integers, "
            "[tokens] or [documents, tokens]"
        )
    tokens = array.reshape(-1)
    offsets = np.arange(0, array.size + 1, array.shape[-1], dtype=np.int64)
    digest, largest = _passed(name, tokens, offsets, file)
    return Documents(name, tokens, offsets, digest, largest, None)


def _passed(
    name: str, tokens: np.ndarray, offsets: np.ndarray, file: Path | None
) -> tuple[str, int]:
    """Digest and largest id: of a pass over all tokens, or of a long file's earlier pass.

    Ids are compared with the model's vocabulary again as they are read.
    """
    long = file is not None and tokens.nbytes >= _LONG
    if long:
        assert file is not None
        record, stat = file.with_name(f".{file.name}{VERIFIED}"), file.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, tokens.dtype.str]
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            known = json.loads(record.read_text())
            if known["file"] == stamp and type(known["largest"]) is int:
                return str(known["digest"]), known["largest"]
        log.info("%s: reading all tokens for their digest, which is done once", name)
    hasher, smallest, largest = _Digest(tokens.dtype), 0, 0
    for start in range(0, tokens.size, _BLOCK):
        block = tokens[start : start + _BLOCK]
        hasher.add(block)
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    if smallest < 0:
        raise DataError(f"data: {name!r} holds negative ids")
    digest = hasher.end(offsets)
    if long:
        with contextlib.suppress(OSError):
            record.write_text(json.dumps({"file": stamp, "digest": digest, "largest": largest}))
    return digest, largest
