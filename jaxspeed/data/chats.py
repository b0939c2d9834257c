"""Sources of conversations: records of files or iterables, with all that is wrong with a file."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxspeed.config.run_sections import ChatFormat, SourceSection
from jaxspeed.data import files
from jaxspeed.data import preference_records as preferences
from jaxspeed.data.chat_formats import NAMES, OPTIONAL, format_of, read_record
from jaxspeed.data.chat_masks import ChatEncoder
from jaxspeed.data.chat_template import MissingTemplateError
from jaxspeed.data.files import Record
from jaxspeed.data.model_limits import PromptForm, RecordForm
from jaxspeed.data.preference_records import PreferenceFormat, preference_format, read_preference
from jaxspeed.data.preference_tokens import PreferenceEncoder
from jaxspeed.data.prompts import PROMPT, PromptEncoder
from jaxspeed.errors import DataError

log = logging.getLogger("jaxspeed")
# What is read of records.
COLUMNS = (*{*NAMES, *OPTIONAL, *preferences.NAMES, *preferences.OPTIONAL},)
SHOWN = 10  # problems of a file that are listed
_AT_ONCE = 64  # texts, which the library encodes in parallel


@dataclass(frozen=True)
class RecordFile:
    """A file's records, or those of anything else with a name; each iteration begins anew."""

    name: str
    read: Callable[[], Iterator[Record]]
    folder: Path | None = None  # to which the paths in records are relative


@dataclass(frozen=True)
class Chats:
    """Conversations, or preferences or prompts of them or of texts.

    `format` is that of the first file, and of all if the config names it, or of other records.
    """

    name: str
    files: Sequence[RecordFile]
    format: ChatFormat | PreferenceFormat | Literal["prompt"]
    is_named: bool

    def __iter__(self) -> Iterator[str]:
        """The texts in the messages, to train a tokenizer on."""
        for file in self.files:
            for record in file.read():
                if isinstance(record.value, dict):
                    names = preferences.NAMES if self.format in preferences.FIELDS else NAMES
                    names = (PROMPT,) if self.format == PROMPT else names
                    yield from _texts([record.value.get(name) for name in names])

    def formats(self) -> set[str]:
        return {self._format_of(file) for file in self.files}

    def encoded(self, encoder: ChatEncoder) -> Iterator[Any]:
        """A `Masked` of each conversation, `RecordTokens` of a preference, or a `PromptRecord`.

        Raises:
          DataError: records of a file cannot be used, once all of the file is read.
        """
        has_preferences = self.format in preferences.FIELDS
        chosen: Any = PreferenceEncoder(encoder) if has_preferences else encoder
        chosen = PromptEncoder(encoder) if self.format == PROMPT else chosen
        for file in self.files:
            kind = self._format_of(file)
            problems: dict[int, str] = {}
            count, records = 0, enumerate(file.read())
            while chunk := [*itertools.islice(records, _AT_ONCE)]:
                count += len(chunk)
                texts: list[tuple[int, str, Any]] = []
                for i, (where, value, problem) in chunk:
                    try:
                        if problem:
                            raise DataError(problem)
                        if self.format == PROMPT:
                            text = chosen.render(value, f"{file.name}, {where}")
                        elif has_preferences:
                            text = chosen.render(read_preference(value, kind))
                        else:
                            record = read_record(value, kind, encoder.images is not None)
                            place = f"{file.name}, {where}"
                            text = chosen.render(record, kind, place, file.folder)
                        texts.append((i, where, text))
                    except MissingTemplateError:  # no record is at fault
                        raise
                    except DataError as error:
                        problems[i] = f"{where}: {error}"
                encodings = chosen.encode([text for *_, text in texts])
                for (i, where, _), encoding in zip(texts, encodings):
                    if not isinstance(encoding, str):
                        yield encoding
                    elif encoding:
                        problems[i] = f"{where}: {encoding}"
            if problems:
                in_order = [problems[i] for i in sorted(problems)]
                raise DataError(_listed(file.name, in_order, count))

    def _format_of(self, file: RecordFile) -> Any:
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
    return RecordFile(str(file), lambda: files.json_records(file), file.parent)


def numbered(name: str, records: Callable[[], Iterable[Any]], what: str) -> RecordFile:
    """Records that have no place but their number."""
    return RecordFile(name, lambda: (Record(f"{what} {i}", x) for i, x in enumerate(records())))


def chats_in(
    source: SourceSection,
    name: str,
    record_files: Sequence[RecordFile],
    names: Iterable[str] | None = None,
    form: RecordForm | None = None,
    sees: bool = False,
) -> Chats | None:
    """The conversations of files, if the config says so, or else the first record has no text.

    Args:
      names: the fields of the first file's records, if they are known.
      form: of an objective that reads preferences or prompts; all files have the first's format.
      sees: whether the model reads images, so that captions of some are conversations.

    Raises:
      DataError: they hold none of these, but the objective reads some.
    """
    if source.format is not None and form is None:
        return Chats(name, record_files, source.format, True)
    there = first_names(record_files[0]) if names is None else [*names]
    if form is not None:
        if there is None:
            raise DataError(f"data: {_without_fields(record_files[0])}")
        return Chats(name, record_files, _format(name, there, source, form), True)
    kind = None if there is None else format_of(there)
    if there is None or kind is None or (kind == "caption" and not sees):
        return None
    if source.text_field in there and kind != "caption":
        log.warning(
            'data: %s: read as text, of the field "%s" (data.text_field); data.format: %s reads '
            "its conversations",
            name,
            source.text_field,
            kind,
        )
        return None
    return Chats(name, record_files, kind, False)


def _without_fields(file: RecordFile) -> str:
    """Why none of a file's records has fields."""
    first = next(file.read(), None)
    if first is None:
        return f"{file.name} has no records"
    kind = f"a {type(first.value).__name__}, not an object"
    return f"{file.name}, {first.where}: {first.problem or kind}"


def _format(
    name: str, names: Sequence[str], source: SourceSection, form: RecordForm
) -> PreferenceFormat | Literal["prompt"]:
    what, fields = kinds_of(form)
    if source.format is not None:
        raise DataError(
            f"data.format: {source.format}, but the objective reads {what}, which show in the "
            "fields of records; leave it out"
        )
    if isinstance(form, PromptForm):
        kind: Any = PROMPT if PROMPT in names else None
    else:
        kind = preference_format(names)
    if kind is None:
        raise DataError(
            f"data: {name} holds no {what}, which the objective reads: records {fields}; the "
            f"fields of its first record: {', '.join(map(str, names)) or 'none'}"
        )
    return kind


def kinds_of(form: RecordForm) -> tuple[str, str]:
    """What an objective reads, and the fields of its records, for messages."""
    if isinstance(form, PromptForm):
        before = "of a conversation the messages before the answer, which is sampled"
        return "prompts", f"with the field prompt: text, or messages, {before}"
    return "preferences", "of prompt, chosen and rejected, or of prompt, completion and label"
