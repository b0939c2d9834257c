"""Step records: metrics, throughput, MFU and memory, written to sinks and the progress line."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
from rich.console import Console

from jaxspeed.engine import Engine
from jaxspeed.errors import RunError
from jaxspeed.metrics import (
    ModelFlops,
    Progress,
    Sink,
    TimeLedger,
    sinks_of,
    utilisation,
)
from jaxspeed.metrics.progress import is_watched
from jaxspeed.metrics.start_lines import Showing, not_shown, start_lines
from jaxspeed.run.folder import RunFolder
from jaxspeed.run.watchdog import Watchdog

# The watchdog's section of each phase.
SECTIONS = {
    "data": "step",
    "compute": "step",
    "compile": "compile",
    "rollout": "rollout",
    "rewards": "rewards",
    "evaluate": "evaluate",
    "other": "evaluate",
    "checkpoint": "save",
    "restart": "restore",
}
DOING = {
    "checkpoint": "saving",
    "evaluate": "evaluating",
    "compile": "compiling",
    "rollout": "sampling",
    "rewards": "waiting for rewards",
}


class Instant(NamedTuple):
    """A time, and the seconds waited for data until then."""

    seconds: float
    waited: float


@dataclass
class Recorder:
    """Turns a step's metrics into a record for the sinks and the progress display."""

    engine: Engine
    sinks: list[Sink]
    progress: Progress
    ledger: TimeLedger
    flops: ModelFlops | None
    opened: Callable[[int], list[Sink]]  # the sinks of a run that resumes after a step
    watchdog: Watchdog
    showing: Showing = not_shown  # of the first step
    _compiled: bool = False
    _compile_began: Instant | None = None  # of the first step, until that is sent
    _since: Instant = field(
        default_factory=lambda: Instant(0.0, 0.0)
    )  # when the previous steps were done
    _last: Instant | None = None  # the seconds of the last step that is done
    _running: deque[Any] = field(default_factory=deque)  # an output of each step in flight
    _done: deque[Instant] = field(default_factory=deque)  # the seconds of steps not yet recorded

    def __enter__(self) -> Self:
        self.progress.__enter__()
        self._restart_clock()
        return self

    def __exit__(self, *caught: Any) -> None:
        self.progress.__exit__(*caught)
        for sink in self.sinks:
            sink.close()

    def back_to(self, step: int) -> None:
        """Drop the records after this step, which will be repeated."""
        self._running.clear()
        self._done.clear()
        for sink in self.sinks:
            sink.close()
        self.sinks = self.opened(step)
        self._restart_clock()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time by phase, from which a resumed run continues."""
        return self.ledger.as_record()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time of the `with` block to a phase; the first step's to compile."""
        showing: Showing = not_shown
        if name == "compile":  # before the first step, and shown there
            self.showing = not_shown
        elif name == "compute" and not self._compiled:
            self._compiled, name, showing = True, "compile", self.showing
            self._compile_began = self._now()
        is_of_step = name in ("data", "compute")
        if not is_of_step and self._last is None and self._running:
            self._running[-1].block_until_ready()  # no step was timed: these are, before the phase
            self._note_done()
        shown = DOING.get(name)
        with self.watchdog.section(SECTIONS[name]), self.ledger.phase(name):
            if shown is None:
                yield
                return
            with self.progress.doing(shown), showing("compiling the step"):
                yield
        if not is_of_step:  # other phases are not part of a step's time
            self._note_hidden()
            self._restart_clock()

    def _restart_clock(self) -> None:
        self._since = self._now()

    def _now(self) -> Instant:
        return Instant(time.perf_counter(), self.ledger.seconds()["data"])

    def sent(self, output: Any) -> None:
        """Count a step that was dispatched, and is done once this output of it is ready.

        Engines differ: some return once a step is dispatched, some once it is done. So what is
        done is looked up here, and not when the metrics are read, some steps later.
        """
        self._running.append(output)
        if self._compile_began and output.is_ready():  # it was done in the phase `compile`
            self._since = self._compile_began
        self._compile_began = None
        self._note_done()

    def _note_done(self, at_least: int = 0) -> None:
        """Share the time since the last steps were done among those that are done now."""
        ready = 0
        while self._running and (ready < at_least or self._running[0].is_ready()):
            self._running.popleft()
            ready += 1
        if ready:
            now = self._now()
            self._done += [
                Instant(
                    (now.seconds - self._since.seconds) / ready,
                    (now.waited - self._since.waited) / ready,
                )
            ] * ready
            self._since, self._last = now, self._done[-1]

    def _note_hidden(self) -> None:
        """Steps that were in flight during another phase take as long as the ones before."""
        if self._last is not None:
            self._done += [self._last] * len(self._running)
            self._running.clear()

    def arrived(self, tokens: Sequence[int]) -> list[dict[str, float]]:
        """The throughput of each of the next steps, of so many tokens, whose metrics were read."""
        # One device's copy of the metrics was read; those of others may still be computed.
        self._note_done(at_least=len(tokens) - len(self._done))
        return [self._pace(self._done.popleft(), of_step) for of_step in tokens]

    def _pace(self, step: Instant, tokens: int) -> dict[str, float]:
        took = max(step.seconds, 1e-9)
        pace = {
            "step_seconds": took,
            "data_seconds": step.waited,
            "samples_per_second": self.engine.program.batch.train / took,
            "compile_seconds": self.ledger.seconds()["compile"],
        }
        return {**pace, "tokens_per_second": tokens / took} if tokens else pace

    def record(
        self, step: int, values: Mapping[str, float], tokens: int, pace: Mapping[str, float]
    ) -> None:
        """Write a step's record; `tokens` is the total number so far."""
        samples = step * self.engine.program.batch.train
        record: dict[str, Any] = {"step": step, **values, "samples": samples, **pace}
        record["skipped"] = bool(values["skipped"])
        if tokens:
            record["tokens"] = tokens
        devices = self.engine.program.devices
        device = devices[0]
        if self.flops is not None:
            items = pace[f"{self.flops.item}s_per_second"]
            record |= utilisation(self.flops, items, device.device_kind, len(devices))
        stats = device.memory_stats() or {} if device.process_index == jax.process_index() else {}
        if "bytes_in_use" in stats:
            record["bytes_in_use"] = stats["bytes_in_use"]
            record["peak_bytes"] = stats.get("peak_bytes_in_use", 0)
        self._write(record)

    def evaluated(self, step: int, means: Mapping[str, float]) -> None:
        """Write a record with the held-out loss and metrics, and the wall time by phase."""
        held_out = {f"eval_{name}": value for name, value in means.items()}
        self._write({"step": step, **held_out, **self.ledger.as_record()})

    def saved(self, step: int) -> None:
        """Write a record with the wall time by phase at the start of a save."""
        self._write({"step": step, **self.ledger.as_record()})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            for sink in self.sinks:
                sink.write(record)
        except OSError as error:  # for example a full disk
            raise RunError(
                f"step {record['step']}: its metrics cannot be written: {error.strerror or error}. "
                "Once they can be, the run resumes from its newest checkpoint."
            ) from error
        self.progress.update(record)


def recorder_of(
    engine: Engine,
    folder: RunFolder,
    flops: ModelFlops | None,
    *,
    step: int,
    seconds: Mapping[str, float],
    watchdog: Watchdog,
    console: Console | None = None,
) -> Recorder:
    """The recorder of a run at a step. Only the first process writes."""
    first = jax.process_index() == 0

    def opened(step: int) -> list[Sink]:
        return sinks_of(engine.config, folder.path, step + 1) if first else []

    shown = (console or Console()) if first else Console(quiet=True)
    progress = Progress(engine.config.run.steps or 0, step, shown)
    showing = start_lines(None if is_watched(shown) else shown)  # a live line shows it, too
    ledger = TimeLedger(seconds)
    return Recorder(engine, opened(step), progress, ledger, flops, opened, watchdog, showing)
