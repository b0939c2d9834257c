"""Metric sinks: JSONL always; CSV, TensorBoard and W&B if the config enables them.

A resumed run writes some steps a second time. So each sink gets the first step that will be written
again and drops its records from that step on: the files read as one run. Only one process of a run
writes.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxspeed.config import Config
from jaxspeed.config.run_sections import FileMonitor
from jaxspeed.errors import ConfigError, RunError
from jaxspeed.metrics.line_files import open_to_append, trim
from jaxspeed.metrics.records import from_json, plain, to_json
from jaxspeed.metrics.wandb_sink import WandbSink

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
    folder = Path(folder)
    if config.tensorboard.enabled:
        _need("tensorboardX", "tensorboard")
    if config.wandb.enabled:
        _need("wandb", "wandb")
    sinks: list[Sink] = [JsonlSink(folder / RECORDS, resume_from_step)]
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


def _need(library: str, extra: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"{extra}.enabled: needs {library}, which is not installed; "
            f'pip install "jaxspeed[{extra}]", or set {extra}.enabled to false'
        )


def _numbers(record: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a record, without the step; booleans as 0 or 1."""
    found = {}
    for name, value in record.items():
        value = plain(value)
        if name != "step" and isinstance(value, bool | int | float):
            found[name] = int(value) if isinstance(value, bool) else value
    return found


def _csv_step(line: str) -> int | None:
    first = line.split(",")[0]
    return None if first == "step" else int(first)
