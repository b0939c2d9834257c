"""Append-only files with a line per step: opening, and trimming when a run resumes."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from jaxspeed.errors import RunError

log = logging.getLogger("jaxspeed")


def open_to_append(path: Path) -> TextIO:
    """Open the file, creating it and its folder. RunError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def trim(path: Path, step_of: Callable[[str], int | None], resume_from_step: int | None) -> None:
    """Drop the lines of `resume_from_step` and later, and a truncated last line.

    The file is replaced atomically, and only if a line is dropped. A line without a step stays; one
    for which `step_of` raises ValueError is dropped with a warning.
    """
    if not path.exists():
        return
    try:
        # The file of a long run is large: it is read twice instead of held in memory.
        if all(stays for stays, _ in _judged(path, step_of, resume_from_step)):
            return
        temporary = path.with_name(f".{path.name}.trimmed")
        with temporary.open("wb") as out:
            for stays, line in _judged(path, step_of, resume_from_step, warn=True):
                if stays:
                    out.write(line)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def _judged(
    path: Path,
    step_of: Callable[[str], int | None],
    resume_from_step: int | None,
    warn: bool = False,
) -> Iterator[tuple[bool, bytes]]:
    """Each line, and whether it stays."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):  # truncated: the process died while writing it
                yield False, line
                continue
            try:
                step = step_of(line.decode())
            except ValueError:
                if warn:
                    log.warning("%s: line %d cannot be read and is dropped", path, number)
                yield False, line
                continue
            yield resume_from_step is None or step is None or step < resume_from_step, line
