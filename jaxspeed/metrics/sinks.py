"""Metric sinks: JSONL always; CSV, TensorBoard and W&B if the config enables them.

A resumed run writes some steps a second time. So each sink gets the first step that will be written
again and drops its records from that step on: the files read as one run. Only one process of a run
writes.
"""

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxspeed.config import Config
from jaxspeed.config.before_start import monitor_packages, refuse_missing
from jaxspeed.config.run_sections import FileMonitor, Wandb
from jaxspeed.errors import RunError
from jaxspeed.metrics.records import from_json, plain, to_json

RECORDS = "metrics.jsonl"


class Sink(Protocol):
    """Accepts records, each with a `step`, until it is closed."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One line of JSON per record, flushed after each.

    Args:
      path: the file; its folder is created.
      resume_from_step: the first step that will be written again. None: all records stay.
    """

    def __init__(self, path: str | Path, resume_from_step: int | None = None) -> None:
        trim(Path(path), lambda line: from_json(line).get("step"), resume_from_step)
        self._file = open_to_append(Path(path))

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvSink:
    """A file per metric, as DeepSpeed writes: `loss.csv` with the columns `step,loss`."""

    def __init__(self, folder: str | Path, resume_from_step: int | None = None) -> None:
        self._folder = Path(folder)
        self._files: dict[str, TextIO] = {}
        for path in sorted(self._folder.glob("*.csv")):
            trim(path, _csv_step, resume_from_step)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            file = self._file(name)
            file.write(f"{record['step']},{value!r}\n")
            file.flush()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            file = self._files[name] = open_to_append(path)
            if file.tell() == 0:
                file.write(f"step,{name}\n")
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TensorBoardSink:
    """Event files for TensorBoard: numbers as scalars, strings when they change."""

    def __init__(self, folder: str | Path, resume_from_step: int | None = None) -> None:
        writer = importlib.import_module("tensorboardX").SummaryWriter
        # With purge_step TensorBoard discards events of that step and later ones.
        self._writer = writer(logdir=str(folder), purge_step=resume_from_step, flush_secs=10)
        self._texts: dict[str, str] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, step)
        for name, value in record.items():
            if isinstance(value, str) and self._texts.get(name) != value:
                self._texts[name] = value
                self._writer.add_text(name, value, step)

    def close(self) -> None:
        self._writer.close()


def sinks_of(config: Config, folder: str | Path, resume_from_step: int | None = None) -> list[Sink]:
    """The sinks that a config enables.

    Args:
      config: the sections `tensorboard`, `csv_monitor` and `wandb` are read.
      folder: the run folder: `metrics.jsonl`, and sinks without an `output_path`.
      resume_from_step: the first step that will be written again. None: all records stay.

    Raises:
      ConfigError: an extra is missing (raised before anything is written).
      RunError: a file cannot be written.
    """
    require_monitors(config)
    records = JsonlSink(Path(folder) / RECORDS, resume_from_step)
    return [records, *monitors_of(config, folder, resume_from_step)]


def require_monitors(config: Config) -> bool:
    """Whether the config enables a monitor. ConfigError if its extra is missing."""
    refuse_missing(monitor_packages(config))
    return config.tensorboard.enabled or config.wandb.enabled or config.csv_monitor.enabled


def monitors_of(
    config: Config, folder: str | Path, resume_from_step: int | None = None
) -> list[Sink]:
    """The sinks of `tensorboard`, `csv_monitor` and `wandb`; arguments as of `sinks_of`."""
    folder = Path(folder)
    sinks: list[Sink] = []
    if config.csv_monitor.enabled:
        sinks.append(CsvSink(_place(config.csv_monitor, folder / "csv"), resume_from_step))
    if config.tensorboard.enabled:
        place = _place(config.tensorboard, folder / "tensorboard")
        try:
            sinks.append(TensorBoardSink(place, resume_from_step))
        except OSError as error:
            raise RunError(f"tensorboard: cannot write {place}: {error.strerror}") from error
    if config.wandb.enabled:
        sinks.append(WandbSink(config.wandb, folder, config.given))
    return sinks


def _place(section: FileMonitor, default: Path) -> Path:
    """`output_path`/`job_name`, as in DeepSpeed; without a path, the run folder."""
    if section.output_path:
        return Path(section.output_path) / section.job_name
    return default / section.job_name if "job_name" in section.model_fields_set else default


def _numbers(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record, without the step; booleans as 0 or 1."""
    numbers = {}
    for name, value in record.items():
        value = plain(value)
        if name != "step" and isinstance(value, bool | int | float):
            numbers[name] = int(value) if isinstance(value, bool) else value
    return numbers


def _csv_step(line: str) -> int | None:
    first = line.split(",")[0]
    return None if first == "step" else int(first)


# -- Weights & Biases ------------------------------------------------------------------------------

RUN_ID = "wandb-run-id"


class WandbSink:
    """Logs each record at its step. The run's id is kept in the run's folder.

    W&B takes no step twice: what it has of steps that are trained again stays, and is the same.
    """

    def __init__(self, section: Wandb, folder: str | Path, config: Mapping[str, Any]) -> None:
        library = importlib.import_module("wandb")
        try:
            self._run = library.init(
                project=section.project,
                entity=section.team,
                group=section.group,
                dir=str(folder),
                id=_run_id(Path(folder)),
                resume="allow",
                config=dict(config),
            )
        except Exception as error:  # the library raises errors of its own, of the network, ...
            raise RunError(
                f"wandb: cannot start a run of project {section.project!r}: {error}; "
                "with WANDB_MODE=offline it needs neither network nor login"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        values = plain(record)
        step = values.pop("step")
        if step >= self._run.step:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    path = folder / RUN_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()


# -- append-only files with a line per step: opening, and trimming when a run resumes --------------

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
