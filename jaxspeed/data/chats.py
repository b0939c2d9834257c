"""Sources of conversations: records of files or iterables, with all that is wrong with a file."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspeed.config.run_sections import ChatFormat, SourceSection
from jaxspeed.data import files
from jaxspeed.data.chat_formats import NAMES, OPTIONAL, format_of, read_record
from jaxspeed.data.chat_masks import ChatEncoder, Text
from jaxspeed.data.chat_template import MissingTemplateError
from jaxspeed.data.files import Record
from jaxspeed.data.token_store import Masked
from jaxspeed.errors import DataError

log = logging.getLogger("jaxspeed")
COLUMNS = (*NAMES, *OPTIONAL)  # what is read of records
SHOWN = 10  # problems of a file that are listed
_AT_ONCE = 64  # texts, which the library encodes in parallel


@dataclass(frozen=True)
class RecordFile:
    """A file's records, or those of anything else with a name; each iteration begins anew."""

    name: str
    read: Callable[[], Iterator[Record]]


@dataclass(frozen=True)
class Chats:
    """Conversations; `format` is that of the first file, and of all if the config names it."""

    name: str
    files: Sequence[RecordFile]
    format: ChatFormat
    is_named: bool

    def __iter__(self) -> Iterator[str]:
        """The texts in the messages, to train a tokenizer on."""
        for file in self.files:
            for record in file.read():
                if isinstance(record.value, dict):
                    yield from _texts([record.value.get(name) for name in NAMES])

    def formats(self) -> set[ChatFormat]:
        return {self._format_of(file) for file in self.files}

    def encoded(self, encoder: ChatEncoder) -> Iterator[Masked]:
        """The tokens of each conversation.

        Raises:
          DataError: records of a file cannot be used, once all of the file is read.
        """
        for file in self.files:
            kind = self._format_of(file)
            problems: dict[int, str] = {}
            count, records = 0, enumerate(file.read())
            while chunk := [*itertools.islice(records, _AT_ONCE)]:
                count += len(chunk)
                texts: list[tuple[int, str, Text]] = []
                for i, (where, value, problem) in chunk:
                    try:
                        if problem:
                            raise DataError(problem)
                        conversation = read_record(value, kind)
                        texts.append((i, where, encoder.render(conversation, kind)))
                    except MissingTemplateError:  # no record is at fault
                        raise
                    except DataError as error:
                        problems[i] = f"{where}: {error}"
                encodings = encoder.encode([text for *_, text in texts])
                for (i, where, _), encoding in zip(texts, encodings):
                    if isinstance(encoding, Masked):
                        yield encoding
                    elif encoding:
                        problems[i] = f"{where}: {encoding}"
            if problems:
                in_order = [problems[i] for i in sorted(problems)]
                raise DataError(_listed(file.name, in_order, count))

    def _format_of(self, file: RecordFile) -> ChatFormat:
        return self.format if self.is_named else first_format(file) or self.format


def _listed(name: str, problems: Sequence[str], count: int) -> str:
    lines = [f"\n  {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"\n  and {len(problems) - SHOWN:,} more")
    number = f"{len(problems):,} of {count:,} records cannot be used:"
    return f"data: {name}: {number}{''.join(lines)}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)


def first_format(file: RecordFile) -> ChatFormat | None:
    """The format of the first record that can be read."""
    names = first_names(file)
    return None if names is None else format_of(names)


def first_names(file: RecordFile) -> list[str] | None:
    """The fields of the first record that can be read; None if there is none."""
    known = (r.value for r in file.read() if not r.problem and isinstance(r.value, dict))
    return next(([*value] for value in known), None)


def json_file(file: Path) -> RecordFile:
    return RecordFile(str(file), lambda: files.json_records(file))


def numbered(name: str, records: Callable[[], Iterable[Any]], what: str) -> RecordFile:
    """Records that have no place but their number."""
    return RecordFile(name, lambda: (Record(f"{what} {i}", x) for i, x in enumerate(records())))


def chats_in(
    source: SourceSection,
    name: str,
    record_files: Sequence[RecordFile],
    names: Iterable[str] | None = None,
) -> Chats | None:
    """The conversations of files, if the config says so, or else the first record has no text.

    Args:
      names: the fields of the first file's records, if they are known.
    """
    if source.format is not None:
        return Chats(name, record_files, source.format, True)
    there = first_names(record_files[0]) if names is None else [*names]
    kind = None if there is None else format_of(there)
    if there is None or kind is None:
        return None
    if source.text_field in there:
        log.warning(
            'data: %s: read as text, of the field "%s" (data.text_field); data.format: %s reads '
            "its conversations",
            name,
            source.text_field,
            kind,
        )
        return None
    return Chats(name, record_files, kind, False)
