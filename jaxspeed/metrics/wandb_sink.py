"""Weights & Biases: one run there, however often it is started again here."""

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspeed.config.run_sections import Wandb
from jaxspeed.errors import RunError
from jaxspeed.metrics.records import plain

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
