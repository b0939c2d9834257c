"""Text sources: stdlib, text, JSON lines, Hugging Face, and user iterables."""

import hashlib
import importlib
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.config.objective_keys import imported
from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import files
from jaxspeed.data.chats import Chats, chats_in, json_file, kinds_of, numbered
from jaxspeed.data.model_limits import RecordForm
from jaxspeed.errors import DataError

# How the files of a folder end that a kind of source reads; the kind `text` reads all.
SUFFIXES = {
    "jsonl": tuple(
        name + by for by in ("", files.GZIP, files.ZSTD) for name in (".jsonl", ".ndjson")
    ),
    "json": tuple(f".json{by}" for by in ("", files.GZIP, files.ZSTD)),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "tokens": (".npy", ".bin"),
    "images": (".npz",),
}
STDLIB_BYTES = 8 << 20
# Tests and data tables are not library code.
STDLIB_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Texts:
    """Text documents; each iteration starts from the first."""

    name: str
    read: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        return self.read()


def text_source(
    source: SourceSection, form: RecordForm | None = None, sees: bool = False
) -> Texts | Chats:
    """The documents of `stdlib`, `text`, `jsonl`, `json` or `huggingface`.

    With `form` they are preferences or prompts, for an objective that reads them; `sees` as of
    `chats_in`.
    """
    paths = files.given_paths(source.path, source.paths)
    kind = source.source or ("text" if paths else "stdlib")
    if kind in ("stdlib", "text") and form is not None:
        what, fields = kinds_of(form)
        raise DataError(
            f"data: source {kind} holds no {what}, which the objective reads: records {fields}"
        )
    if kind in ("stdlib", "text") and source.format is not None:
        raise DataError(f"data.format: source {kind} has no records with conversations")
    if kind == "stdlib":
        return stdlib()
    shown = f"{kind} {', '.join(paths)}"
    field = source.text_field
    if kind == "text":
        source_files = files.find_files(paths)
        return Texts(shown, lambda: map(files.read_text, source_files))
    if kind == "huggingface":
        hub = [(name, lambda name=name: _hub_records(name, source.split)) for name in paths]
        records = [numbered(name, read, "record") for name, read in hub]
        return chats_in(source, shown, records, form=form, sees=sees) or Texts(
            shown,
            lambda: (
                files.text_of(record, field, f"{name}, record {i}")
                for name, read in hub
                for i, record in enumerate(read())
            ),
        )
    source_files = files.find_files(paths, SUFFIXES[kind])
    chats = chats_in(source, shown, [*map(json_file, source_files)], form=form, sees=sees)
    return chats or Texts(
        shown,
        lambda: itertools.chain.from_iterable(
            files.read_json_texts(f, field) for f in source_files
        ),
    )


# -- the standard library -----------------------------------------------------------------------


def stdlib(folder: Path | None = None, limit: int = STDLIB_BYTES) -> Texts:
    """Source files of Python's standard library, up to `limit` bytes.

    They are chosen by a hash of their paths, so no part of the library is preferred.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    taken, total = [], 0
    for file in sorted(_modules(root), key=lambda f: _scattered(f.relative_to(root).as_posix())):
        content = file.read_bytes()
        if total + len(content) > limit:
            break
        try:
            text = files.decode_text(content, str(file))
        except DataError:  # a few modules are in other encodings
            continue
        total += len(content)
        taken.append((file.relative_to(root).as_posix(), text))
    if not taken:
        raise DataError(
            f"data: source stdlib: {str(root)!r} holds no Python source; give data.path a folder "
            "of text"
        )
    documents = [text for _, text in sorted(taken)]
    version = ".".join(map(str, sys.version_info[:3]))
    return Texts(f"Python {version}'s standard library", lambda: iter(documents))


def _modules(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB_LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _scattered(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


# -- Hugging Face (an optional library) ---------------------------------------------------------


def needs_extra(library: str, what: str, extra: str) -> Any:
    """Import an optional library; DataError with the extra that it comes with."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise DataError(
            f"data: {what} needs the library {library}; install jaxspeed[{extra}]"
        ) from None


def _hub_records(name: str, split: str) -> Iterator[Any]:
    datasets = needs_extra("datasets", "source huggingface", "hf")
    try:
        records = datasets.load_dataset(name, split=split)
    except Exception as error:  # of many kinds: network, names, scripts, formats
        raise DataError(f"data: the data set {name!r}, split {split!r}: {error}") from error
    yield from records


# -- user iterables -----------------------------------------------------------------------------


def import_source(path: str) -> Any:
    """Import a NumPy array, an iterable, or a callable that returns one of these."""
    try:
        source = imported(path)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data.source: {path!r} cannot be imported: {error}") from None
    if callable(source) and isinstance(array := source(), np.ndarray):
        return array
    return source


def iterations(source: Any, path: str, samples: int | None) -> Callable[[], Iterator[Any]]:
    """Begin to iterate over an imported iterable, anew with each call of the result.

    At most `samples` items are read; an infinite iterable needs it.
    """

    def begin() -> Iterator[Any]:
        items = source() if callable(source) else source
        if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
            raise DataError(f"data.source: {path!r} is a {type(items).__name__}, no iterable")
        return itertools.islice(iter(items), samples)

    if isinstance(source, Iterator):  # it can be read only once
        items = list(begin())
        return lambda: iter(items)
    return begin
