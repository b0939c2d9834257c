"""Columns of Arrow and Parquet files, of the library `datasets` among others: texts, or ids.

`Dataset.save_to_disk` writes a folder of Arrow streams with a state.json that lists them; of a
`DatasetDict`, one such folder a split.
"""

import contextlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import files, prompts, token_records, token_store
from jaxspeed.data.chats import COLUMNS, Chats, RecordFile, chats_in
from jaxspeed.data.model_limits import PromptForm, RecordForm
from jaxspeed.data.sources import SUFFIXES, Texts, needs_extra
from jaxspeed.errors import DataError

_FILE = b"ARROW1"  # begins a file, not a stream
STATE, SPLITS = "state.json", "dataset_dict.json"


def is_saved(name: str) -> bool:
    """Whether a path is that of a folder that `save_to_disk` wrote."""
    try:
        return any((Path(name).expanduser() / file).is_file() for file in (STATE, SPLITS))
    except (OSError, RuntimeError):  # a name that is too long, a user that is unknown
        return False


def column_files(name: str, kind: str, split: str) -> list[Path]:
    """The files of a path: those that a folder of `datasets` lists, or all of its kind."""
    if kind != "arrow" or not is_saved(name):
        return files.find_files([name], SUFFIXES[kind])
    path = Path(name).expanduser()
    if (path / SPLITS).is_file():
        splits = _json_of(path / SPLITS, "splits")
        if split not in splits:
            raise DataError(
                f"data.split: {name!r} has no split {split!r}; its splits: {', '.join(splits)}"
            )
        path /= split
    if _json_of(path / STATE, "_indices_files", of="filename", default=[]):
        raise DataError(
            f"data: {str(path)!r} was saved with an index by an early version of datasets; save it "
            "again with a newer one"
        )
    names = _json_of(path / STATE, "_data_files", of="filename")
    if not names:
        raise DataError(f"data: {str(path)!r} is empty: {STATE} lists no file")
    for file_name in names:
        if not (path / file_name).is_file():
            raise DataError(f"data: {str(path)!r}: {STATE} lists {file_name!r}, which is not there")
    return [path / file_name for file_name in names]


def _json_of(file: Path, key: str, of: str | None = None, default: Any = None) -> list[str]:
    """Names of files or folders in a list of a JSON file, none of them outside of its folder."""
    try:
        tree = json.loads(file.read_text())
        listed = tree.get(key, default) if default is not None else tree[key]
        names = [entry[of] if of else entry for entry in listed]
        if all(isinstance(n, str) and Path(n).name == n and n not in ("", "..") for n in names):
            return names
        problem = f"{key} lists other than names of files in it"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise DataError(f"data: {str(file)!r} cannot be read: {problem}")


def open_columns(
    source: SourceSection, kind: str, form: RecordForm | None = None, sees: bool = False
) -> Texts | Chats | list[token_store.Documents]:
    """The texts in the column `text_field`, or documents in `tokens` or `input_ids`, or chats.

    With `form` they are preferences or prompts, for an objective that reads them; `sees` as of
    `chats_in`.
    """
    paths = files.given_paths(source.path, source.paths)
    column_paths = [file for name in paths for file in column_files(name, kind, source.split)]
    tables = []
    for file in column_paths:
        with _opened(file, kind) as (names, _):
            tables.append(names)
    shown, field = f"{kind} {', '.join(paths)}", source.text_field
    ids = token_records.token_field(tables[0])
    if form or source.format is not None or ids is None or field in tables[0]:
        more = None if isinstance(form, PromptForm) else ()
        records = [
            RecordFile(str(f), partial(records_of, f, kind, more), f.parent) for f in column_paths
        ]
        if chats := chats_in(source, shown, records, tables[0], form, sees):
            return chats
    if all(field in names for names in tables):
        return Texts(
            shown,
            lambda: itertools.chain.from_iterable(_texts(f, kind, field) for f in column_paths),
        )
    for file, names in zip(column_paths, tables):
        if ids is None or ids not in names:
            raise DataError(
                f'data: {file}: no field "{field}" (data.text_field), '
                f"{' or '.join(token_records.FIELDS)}; its fields: {', '.join(names) or 'none'}"
            )
    assert ids is not None
    documents = itertools.chain.from_iterable(_documents(f, kind, ids) for f in column_paths)
    return [token_store.in_memory(shown, documents, None)]


def _texts(file: Path, kind: str, field: str) -> Iterator[str]:
    with _opened(file, kind) as (_, batches):
        rows = itertools.chain.from_iterable(b.column(0).to_pylist() for b in batches([field]))
        for i, text in enumerate(rows):
            yield files.text_of({field: text}, field, f"{file}, row {i}")


def records_of(file: Path, kind: str, more: Sequence[str] | None = ()) -> Iterator[files.Record]:
    """The columns of conversations, and `more` of them, as records.

    With `more` None they are those of prompts, and all others as they are.
    """
    with _opened(file, kind) as (names, batches):
        rows = itertools.count()
        as_they_are = [n for n in names if more is None and n not in prompts.COLUMNS]
        for batch in batches([n for n in names if n in (*COLUMNS, *as_they_are, *(more or ()))]):
            for row in batch.to_pylist():
                kept = {name: row.pop(name) for name in as_they_are}
                yield files.Record(f"row {next(rows)}", _without_none(row) | kept)


def _without_none(value: Any) -> Any:
    """A value without the fields of structs that another row has: a column has one type."""
    if isinstance(value, dict):
        kept = {"content"} if "role" in value else ()  # that of a message may be null
        return {k: _without_none(x) for k, x in value.items() if x is not None or k in kept}
    return [*map(_without_none, value)] if isinstance(value, list) else value


def _documents(file: Path, kind: str, field: str) -> Iterator[np.ndarray]:
    with _opened(file, kind) as (names, batches):
        read = [field, *(n for n in (token_records.MASK, token_records.LABELS) if n in names)]
        rows = itertools.count()
        for batch in batches(read):
            columns = [_lists(batch.column(i), f"{file}: {name!r}") for i, name in enumerate(read)]
            for row in zip(*columns):
                where = f"{file}, row {next(rows)}"
                yield from token_records.documents_in(dict(zip(read, row)), field, where)


def _lists(column: Any, where: str) -> Sequence[np.ndarray]:
    """The rows of a column of lists, which share memory with it."""
    if not hasattr(column, "flatten") or not str(column.type).endswith(("]", ">")):
        raise DataError(f"data: {where} holds {column.type}, not lists of ids")
    lengths = importlib.import_module("pyarrow.compute").list_value_length(column).fill_null(0)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(lengths.to_numpy())[:-1]) if len(column) else []


@contextlib.contextmanager
def _opened(file: Path, kind: str) -> Iterator[tuple[list[str], Callable[[list[str]], Any]]]:
    """The names of a file's columns, and the record batches of some of them."""
    arrow = needs_extra("pyarrow", f"source {kind}", "arrow")
    try:
        if kind == "parquet":
            table = needs_extra("pyarrow.parquet", "source parquet", "arrow").ParquetFile(file)
            yield table.schema_arrow.names, lambda names: table.iter_batches(columns=names)
            return
        with arrow.memory_map(str(file)) as content:
            is_file = content.read(len(_FILE)) == _FILE
            content.seek(0)
            reader = arrow.ipc.open_file(content) if is_file else arrow.ipc.open_stream(content)
            count = range(reader.num_record_batches) if is_file else ()
            batches = map(reader.get_batch, count) if is_file else iter(reader)

            def selected(names: list[str]) -> Iterator[Any]:
                for batch in batches:
                    batch.validate(full=True)  # offsets in a damaged file may point anywhere
                    yield batch.select(names)

            yield reader.schema.names, selected
    except DataError:
        raise
    except (OSError, ValueError, MemoryError, arrow.ArrowException) as error:
        problem = str(error).partition("\n")[0]
        raise DataError(f"data: {str(file)!r} cannot be read as {kind}: {problem}") from None
