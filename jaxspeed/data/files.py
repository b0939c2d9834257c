"""Find and read a source's files: text and JSON lines, plain or compressed with gzip or zstd.

Errors name the place. Compressed content is bounded as it is read: its size, by that of the file.
"""

import contextlib
import glob
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxspeed.errors import DataError
from jaxspeed.placement.paths import listed


def given_paths(path: str | None, paths: Sequence[str] | None) -> list[str]:
    return [path] if path else list(paths or [])


def find_files(paths: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """The files that paths, folders and globs name: sorted, without duplicates.

    Of a folder the files with one of `suffixes` (all if there is none), without hidden ones.
    """
    unique: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        try:
            files = _named_by(path, tuple(suffixes))
        except OSError as error:  # for example a folder without permission
            raise DataError(f"data: {name!r} cannot be read: {error}") from None
        if not files:
            raise DataError(f"data: {_nothing(name, path, suffixes)}")
        unique.update(dict.fromkeys(files))
    return list(unique)


def _named_by(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        return [f for f in _inside(path) if not suffixes or f.name.endswith(suffixes)]
    matches = sorted(glob.glob(str(path), recursive=True))
    return [f for f in map(Path, matches) if f.is_file()]


def _inside(folder: Path) -> list[Path]:
    files = (f for f in folder.rglob("*") if f.is_file())
    visible = [f for f in files if not any(p[0] == "." for p in f.relative_to(folder).parts)]
    return sorted(visible, key=lambda f: f.relative_to(folder).as_posix())


def _nothing(name: str, path: Path, suffixes: Sequence[str]) -> str:
    if path.is_dir():
        return f"the folder {name!r} holds no {' or '.join(suffixes) or 'visible'} file"
    if glob.has_magic(name):
        return f"no file matches {name!r} (relative to {Path.cwd()})"
    parent = path.parent
    near = ""
    if parent.is_dir():
        there = sorted(f.name for f in parent.iterdir() if not f.name.startswith("."))
        near = f"; {str(parent)!r} holds {listed(there, 5) or 'nothing'}"
    return f"{name!r} does not exist (relative to {Path.cwd()}){near}"


GZIP, ZSTD = ".gz", ".zst"
# A compressed file may expand to FREE bytes, and beyond to FACTOR times its size: text has 2 to 30
# times, and one that was made to fill the memory 1,000 (gzip) or 30,000 (zstd) times.
FREE, FACTOR = 64 << 20, 200
LONGEST = 1 << 30  # bytes of one document in a compressed file, or of one line
_CHUNK = 1 << 20


class _Expanding(io.RawIOBase):
    """Decompressed content, refused where it has more bytes than such a file may expand to."""

    def __init__(self, content: IO[bytes], file: Path) -> None:
        self._content, self._file = content, file
        self._left = max(FREE, FACTOR * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._content.read(len(buffer))
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(
                f"data: {str(self._file)!r} expands to more than {FACTOR} times its size; if that "
                "is meant, decompress it"
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """The content of a file, decompressed as it is read; DataError if it cannot be."""
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if file.suffix == ZSTD:
        zstd = _zstd_library(file)
        damage = (*damage, zstd.ZstdError)
    try:
        if file.suffix == ZSTD:
            with zstd.open(file) as content:
                yield io.BufferedReader(_Expanding(content, file), _CHUNK)
        elif file.suffix == GZIP:
            with gzip.open(file) as content:
                yield io.BufferedReader(_Expanding(content, file), _CHUNK)  # type: ignore[arg-type]
        else:
            with file.open("rb") as content:
                yield content
    except damage as error:
        raise DataError(f"data: {str(file)!r} cannot be read: {error}") from None


def _zstd_library(file: Path) -> Any:
    """Python's own since 3.14, or its backport."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise DataError(
        f"data: {str(file)!r} needs the library backports.zstd, or Python 3.14; install "
        "jaxspeed[zstd]"
    )


def read_bytes(file: Path) -> bytes:
    with opened(file) as content:
        if file.suffix not in (GZIP, ZSTD):
            return content.read()
        chunks, size = [], 0
        while chunk := content.read(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > LONGEST:
                raise DataError(
                    f"data: {str(file)!r} expands to more than {LONGEST:,} bytes, the limit of one "
                    "document; decompress it, or write JSON lines"
                )
    return b"".join(chunks)


def read_text(file: Path) -> str:
    """A file's text; DataError if it is binary or not UTF-8."""
    return decode_text(read_bytes(file), str(file))


def decode_text(content: bytes, name: str) -> str:
    null = content.find(b"\0")
    if null >= 0:
        raise DataError(f"data: {name!r} is not text: it is binary (byte {null} is 0)")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {name!r} is not UTF-8 text: byte {error.start} is "
            f"0x{content[error.start]:02x}; convert it, for example with iconv"
        ) from None


class Record(NamedTuple):
    """A record of a file, or what is wrong with it, and where it is."""

    where: str
    value: Any
    problem: str = ""


def json_records(file: Path) -> Iterator[Record]:
    """The records of a file: of a JSON array, or one per line; blank lines are skipped."""
    is_first = True
    with opened(file) as lines:
        # Files of lines are large: line by line.
        for number, line in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), 1):
            if len(line) > LONGEST:
                raise DataError(f"data: {file}, line {number}: more than {LONGEST:,} bytes")
            if not (start := line.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            if is_first and start.startswith(b"["):
                break
            is_first = False
            value, problem = _json_of(line)
            if problem and not line.endswith(b"\n"):
                problem += ": the file ends within this line, so it was truncated"
            yield Record(f"line {number}", value, problem)
        else:
            return
    value, problem = _json_of(read_bytes(file))
    if problem:
        yield Record("the array", None, problem)
    else:
        yield from (Record(f"record {i}", element) for i, element in enumerate(value))


def read_json_texts(file: Path, field: str) -> Iterator[str]:
    """The text of each record of a JSON array or of JSON lines."""
    for where, value, problem in json_records(file):
        if problem:
            raise DataError(f"data: {file}, {where}: {problem}")
        yield text_of(value, field, f"{file}, {where}")


def _json_of(content: bytes) -> tuple[Any, str]:
    """A value, or what is wrong with it."""
    try:
        return json.loads(content), ""
    except RecursionError:
        return None, "the nesting is too deep"
    except UnicodeDecodeError:
        return None, "not JSON: not UTF-8"
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):
            return None, f"not JSON: {error}"
        at = f", in line {error.lineno}" if error.lineno > 1 else ""
        return None, f"not JSON: {error.msg}{at}"


def read_array(file: Path) -> np.ndarray:
    """The array of a .npy file, mapped; DataError if there is none."""
    try:
        array = np.load(file, mmap_mode="r")
    except Exception as error:  # NumPy parses the header as Python, with errors of many kinds
        raise DataError(f"data: {str(file)!r} cannot be read: {error}") from None
    if not isinstance(array, np.ndarray):
        raise DataError(f"data: {str(file)!r} cannot be read: it is no .npy file")
    return array


_FORMS = (
    ". A conversation has messages, prompt and completion, or instruction and output (docs/data.md)"
)


def text_of(record: Any, field: str, where: str) -> str:
    """The text in a record's field."""
    if not isinstance(record, dict):
        raise DataError(f"data: {where}: a {type(record).__name__}, not an object with fields")
    if field not in record:
        has = ", ".join(map(str, record)) or "none"
        raise DataError(
            f'data: {where}: no field "{field}" (data.text_field); its fields: {has}{_FORMS}'
        )
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        raise DataError(f'data: {where}: the field "{field}" holds a {kind}, not text')
    return record[field]
