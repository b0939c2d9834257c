"""The engine: a state, the compiled step that advances it, and what can be asked of both."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspeed.config import Config
from jaxspeed.engine import check as checking
from jaxspeed.engine import diagnose as diagnosing
from jaxspeed.engine.offload_check import asks, check_host_bytes, check_moves, transfer_of
from jaxspeed.engine.oom_help import explain_out_of_memory, is_out_of_memory
from jaxspeed.engine.reporter import Reporter
from jaxspeed.engine.saver import Saver
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.hlo import CompiledReport, report
from jaxspeed.objective.train_state import TrainState, unpad, updated_values
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.rows import Row
from jaxspeed.placement.table import PlacementTable
from jaxspeed.train.dispatch_limit import DispatchLimit
from jaxspeed.train.program import Metrics, Program

log = logging.getLogger("jaxspeed")
Batch = Mapping[str, Any] | Any


class Engine:
    """Trains one model: `engine.train_batch(batch)` is one optimizer step over a global batch."""

    def __init__(self, program: Program, state: TrainState) -> None:
        self._state = state
        self._open(program, int(state.step))

    def _open(self, program: Program, step: int) -> None:
        self.program = program
        path = program.config.run.executable
        self._from_file = StepFromFile(program, path) if path is not None else None
        self._shapes = {name: ShapeLog(name) for name in ("train_batch", "eval_batch")}
        self._reporter = Reporter(program, step)
        self._pace = DispatchLimit(program.mesh.devices.flat[0])
        self._saver = Saver(program)
        self._moves_checked = False

    @property
    def state(self) -> TrainState:
        """What the next step starts from. Another state may be put here; its step counts on."""
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._reporter.begin_at(int(state.step))
        self._state = state

    @property
    def held(self) -> TrainState | None:
        """What this process gives up where another state takes its place."""
        return self.state

    def reset(self) -> None:
        """A fresh state, as `initialize` made it."""
        self.state = self.program.init(self.config.run.seed)

    # -- training -------------------------------------------------------------------------------

    def train_batch(self, batch: Batch) -> Metrics:
        """One step. Metrics are arrays still being computed: float(m["loss"]) waits for them."""
        placed = self._place(batch, "train_batch", self.program.batch.train)
        if not self._moves_checked:
            if asks(self.program):
                check_moves(self.program, self._state, placed)
            self._moves_checked = True
        start = time.perf_counter()
        self._state, metrics = self._run(self.step, placed)
        self._pace.sent(metrics["loss"])
        self._reporter.stepped(metrics, start)
        return metrics

    def eval_batch(self, batch: Batch) -> Metrics:
        """The loss of a batch in evaluation mode; as many samples as the ranks can share evenly."""
        metrics = self._run(self.program.evaluate, self._place(batch, "eval_batch", None))
        self._pace.sent(metrics["loss"])
        return metrics

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled step as a function: `state, metrics = step(state, batch)`.

        It uses up the state that it is given.
        """
        return self._from_file or self.program.step

    def add_hook(self, fn: Callable[[int, dict[str, float]], Any], every: int = 1) -> None:
        """Calls `fn(step, metrics)` every so many steps, with numbers.

        Nothing waits for them: a step's hooks are called once its metrics have arrived, some steps
        later, and the last ones by `wait` or `close`.
        """
        self._reporter.add_hook(fn, every)

    def wait(self) -> None:
        """Until the steps and saves so far are done, and what there is to say has been logged."""
        self._reporter.flush()
        jax.block_until_ready(self.state)
        self._saver.wait()

    def close(self) -> None:
        """At the end of a run: wait."""
        self.wait()
        self._saver.close()

    def _run(self, function: Any, batch: Any) -> Any:
        return self._explained(function, self.state, batch)

    def _explained(self, function: Any, *args: Any) -> Any:
        """A call whose lack of memory is told from the table."""
        try:
            return function(*args)
        except Exception as error:
            if is_out_of_memory(error):
                raise explain_out_of_memory(self.program, error) from error
            raise

    def _place(self, batch: Batch, what: str, size: int | None) -> Any:
        self.program.check_batch(batch, size)
        placed = jax.device_put(batch, self.program.batch_shardings(batch))
        self._shapes[what].see(placed)
        return placed

    # -- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
    ) -> str:
        """Begins a checkpoint of the state of now and returns its tag; training may go on.

        It is written in the background: `wait` says when, and raises what went wrong.
        """
        return self._saver.save(self.state, directory, tag, client_state)

    def load_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        *,
        weights_only: bool = False,
        renames: Mapping[str, str] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Takes the state of a checkpoint, written on any mesh; (its tag, its client_state).

        Without a tag the newest that is sound; (None, {}) where the directory holds none. With
        `weights_only` the optimizer and the step begin anew, and what was left out is logged;
        `renames` maps paths of the checkpoint to the model's. The state of now is freed before the
        other is read, so that the devices never hold two.
        """
        restored = self._saver.load(directory, tag, weights_only, renames, self.held)
        if restored is None:
            return None, {}
        self.state = restored.state
        for note in restored.notes:
            log.warning("checkpoint %s: %s", restored.tag, note)
        return restored.tag, restored.client_state

    # -- looking --------------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self.program.config

    @property
    def placements(self) -> PlacementTable:
        """Where every array of the state lives; it prints itself."""
        return self.program.table

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The parameters by path, unpadded, in the precision in which they are updated.

        On the devices; what waits in host memory is copied there.
        """

        def here(row: Row) -> jax.Array:
            at = self.placements.sharding(row.updated).with_memory_kind(row.read.memory_kind)
            value = updated_values(self.state, row)
            return jax.device_put(value, at) if in_host(row.updated) else value

        return {row.path: unpad(here(row), row.leaf.shape) for row in self.placements}

    @property
    def runnable(self) -> tuple[Program, TrainState]:
        """A program and a state with which the model can be run."""
        return self.program, self.state

    @property
    def module(self) -> Any:
        """The live model with the parameters of now, in evaluation mode; valid until the next step.

        A Flax module, or for Linen modules and pairs a callable with the same face.
        """
        variables = self.state.variables
        return self.program.model.bind(self.parameters, variables, train=False, step=0, micro=0)

    def compiled(self, batch: Batch) -> CompiledReport:
        """Bytes, flops and collectives of the step for such a batch, without running it."""
        return compiled_report(self.program, batch, self._from_file)

    def check(self, batch: Batch, **smaller: Any) -> checking.CheckReport:
        """This step against the same step on one device, from the state of now, which is kept.

        Where the model does not fit one device: `layers=2` (models that the config names) or
        `model=<a smaller factory>` checks a smaller one, freshly initialised.
        """
        return checking.check(self.program, self.state, batch, self.reduced_by, **smaller)

    def reduced_by(self, program: Program) -> checking.Reduced:
        """The reduced gradients of a batch, as this engine has them of a program like its own."""
        return checking.reduced_by_one(program)

    def diagnose(self, batch: Batch) -> diagnosing.Diagnosis:
        """The first input, parameter, layer or gradient that is not finite on this batch."""
        self.program.check_batch(batch, self.program.batch.train)
        placed = jax.device_put(batch, self.program.batch_shardings(batch))
        return diagnosing.diagnose(self.program, self.state, placed)


def compiled_report(
    program: Program, batch: Any, from_file: StepFromFile | None = None
) -> CompiledReport:
    """What the compiler makes of a program's step for a batch of these shapes, or made of it."""
    program.check_batch(batch, program.batch.train, abstract=True)
    traced, mesh = program.traced_step(batch)
    transfer = None if program.serving else transfer_of(program, traced)
    kept_one = from_file.compiled(batch) if from_file else None
    start = time.perf_counter()
    compiled = kept_one or traced.lower().compile()
    timed = None if kept_one else _timed(time.perf_counter() - start)
    if program.serving:
        return report(compiled, mesh, timed)
    waiting = program.table.host_bytes_by_role()
    schedule = program.pipeline_report(batch)
    kept = program.kept_report(batch)
    made = report(compiled, mesh, timed, schedule, transfer, waiting, kept)
    check_host_bytes(program, made.host_argument_bytes, made.host_temp_bytes)
    return made


def _timed(seconds: float) -> float | None:
    """Within a millisecond nothing was compiled: jax had the program of an earlier call."""
    return seconds if seconds > 1e-3 else None


MANY = 4  # shapes of one program from which on recompiling is a habit


class ShapeLog:
    """Remembers the batch shapes that one program has seen."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._seen: dict[Any, int] = {}

    def see(self, batch: Any) -> bool:
        """Whether these shapes are new; says so in the log."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        key = tuple((jax.tree_util.keystr(k), tuple(x.shape), str(x.dtype)) for k, x in leaves)
        if key in self._seen:
            return False
        self._seen[key] = len(self._seen) + 1
        shown = ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in key)
        log.info("%s: compiling for batch %s", self._program, shown)
        if len(self._seen) >= MANY:
            log.warning(
                "%s: this is the %dth batch shape, and each is compiled anew; pad batches to a few "
                "fixed shapes. Now: %s",
                self._program,
                len(self._seen),
                shown,
            )
        return True
