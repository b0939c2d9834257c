"""Engine of a parameter server: the Engine API, with several programs per step.

With synchronous workers (or `max_staleness: 0`) all compute on one version, and the servers make
the next from the mean of their pushes. Otherwise workers run asynchronously with bounded staleness.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from jaxspeed.config import Config
from jaxspeed.engine import check as checking
from jaxspeed.engine import diagnose as diagnosing
from jaxspeed.engine.engine import Batch, Engine, watched
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.engine.memory_precheck import refuse_attention, warn_of_room
from jaxspeed.engine.oom_help import explain_out_of_memory, is_out_of_memory
from jaxspeed.engine.startup_log import log_startup
from jaxspeed.interop.pretrained import refuse_other_tokenizer, tokenizer_of
from jaxspeed.jaxpr.paused_collector import paused_collector
from jaxspeed.metrics.start_lines import Showing, not_shown
from jaxspeed.objectives.terms_and_metrics import TOTALS
from jaxspeed.parameter_server.local import LocalServers, LocalWorkers, Traffic
from jaxspeed.parameter_server.programs import LocalProgram, ServedProgram, build
from jaxspeed.parameter_server.schedules import (
    AsynchronousSchedule,
    SynchronousSchedule,
    evaluated,
    run_all,
)
from jaxspeed.parameter_server.staleness import Rule
from jaxspeed.parameter_server.worker import host_parts
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train.aot_step import read_identity
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.config_model import resolve_model


class ServedEngine(Engine):
    """`train_batch` assigns each worker a part of the global batch."""

    program: ServedProgram

    def __init__(self, program: ServedProgram, workers: Any, store: Any) -> None:
        self._workers, self._store = workers, store
        self._open(program, store.version)
        self._schedule = self._new_schedule(program.rule)

    def _new_schedule(self, rule: Rule) -> SynchronousSchedule | AsynchronousSchedule:
        if rule.synchronous:
            return SynchronousSchedule(self._workers, self._store)
        return AsynchronousSchedule(self._workers, self._store, rule)

    # -- the state --------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """The servers' state, after every push in flight has arrived.

        Assign to replace it; its step counts on.
        """
        self._drain()
        state: TrainState = self._store.state
        return state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._workers.discard()
        self._store.state = state
        self._begin()

    @property
    def held(self) -> TrainState | None:
        self._drain()
        held: TrainState | None = self._store.held
        return held

    @watched("restore")
    def reset(self) -> None:
        """Replace the state by a freshly initialized one, where it is stored."""
        self._workers.discard()
        self._store.reset(self.config.run.seed)
        self._begin()

    def _begin(self) -> None:
        self._reporter.begin_at(self._store.version)
        self._workers.begin()
        self._schedule = self._new_schedule(self.program.rule)

    @property
    def staleness(self) -> Counter[int]:
        """The number of pushes by staleness, including dropped ones."""
        return Counter(self._schedule.staleness)

    # -- training ---------------------------------------------------------------------------------

    @watched("step")
    def train_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """A part of the batch for each worker.

        Synchronous workers make one update. Otherwise the call returns once all parts are assigned
        and a push was accepted; others are still in flight, and their losses are in a later call's
        metrics.

        Raises:
          StateLostError: on Ray, a server died. Assigning `state`, or `load_checkpoint`, starts
            another.
        """
        self._refuse_training()
        parts = self._parts(batch, "train_batch", self.program.batch.train, extra)
        start = time.perf_counter()
        metrics = self._as_arrays(self._aborting(self._schedule.train, parts))
        self._reporter.stepped(metrics, start)
        return metrics

    @watched("evaluate")
    def eval_totals(self, batch: Batch, extra: Any = None) -> Metrics:
        """The totals of `Engine.eval_totals`, once every push in flight has arrived."""
        parts = self._parts(batch, "eval_batch", None, extra)
        self._drain()
        return self._as_arrays(self._aborting(evaluated, self._workers, self._store, parts))

    def _parts(self, batch: Batch, what: str, size: int | None, extra: Any = None) -> list[Any]:
        """The workers' parts of a batch, by worker."""
        return host_parts(self.program.read_batch(batch, size, extra), self.program.workers)

    def _drain(self) -> None:
        self._aborting(self._schedule.drain)

    def _aborting(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the schedule; discard what is in flight where it fails."""
        try:
            return self._call(function, *args)
        except BaseException:
            self._schedule.abort()
            raise

    def _as_arrays(self, metrics: Mapping[str, Any]) -> Metrics:
        """Metrics that this process knows, as arrays like the others."""
        device = self.program.mesh.devices.flat[0]

        def array(x: Any) -> jax.Array:
            if isinstance(x, jax.Array):
                return x
            return jax.device_put(np.float32(x) if isinstance(x, int | float) else x, device)

        return {name: x if name == TOTALS else array(x) for name, x in metrics.items()}

    @watched("save")
    def wait(self) -> None:
        """Wait until everything in flight has arrived, and checkpoints are saved."""
        self._drain()
        self._reporter.flush()
        self._store.wait()
        self._saver.wait()


class LocalServedEngine(ServedEngine):
    """A parameter server on the devices of this process."""

    program: LocalProgram

    def __init__(self, program: LocalProgram, state: TrainState) -> None:
        super().__init__(program, *_opened(program, state))

    @property
    def traffic(self) -> Traffic:
        """Bytes between workers and servers so far."""
        traffic: Traffic = self._workers.traffic
        return traffic

    @watched("step")
    def train_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        self._profile.begin(self._reporter.step + 1, self._store.state)
        metrics = super().train_batch(batch, extra)
        compiled = partial(self.compiled, batch, extra)
        self._profile.end(self._reporter.step, metrics, compiled, batch, self._store.state)
        return metrics

    def _parts(self, batch: Batch, what: str, size: int | None, extra: Any = None) -> list[Any]:
        placed = self._place(batch, what, size, extra)
        self._call.log_shapes(placed)
        self.traffic.order.clear()
        return self.program.parts(placed)

    @watched("evaluate")
    def eval_totals(self, batch: Batch, extra: Any = None) -> Metrics:
        metrics = super().eval_totals(batch, extra)
        self._store.pace.sent(metrics["loss"])
        return metrics

    # -- inspection -------------------------------------------------------------------------------

    @property
    def runnable(self) -> tuple[Program, TrainState]:
        """The first worker's program, and the state that it reads."""
        self._drain()
        return self.program.worker(0).program, self._workers.state_of_first(self._store.publish())

    @property
    def module(self) -> Any:
        """The live model on the first worker, with a copy of the current parameters."""
        worker, state = self.runnable
        device = worker.mesh.devices.flat[0]
        params = {path: np.asarray(x) for path, x in self.parameters.items()}
        variables = jax.tree.map(lambda x: x.addressable_shards[0].data, state.variables)
        here = jax.device_put((params, variables), device)
        return self._bound(worker, *here)

    def reduced_by(self, program: Program, held: Mapping[str, Any]) -> checking.Reduced:
        """The gradients of one synchronous step of such a program."""
        assert isinstance(program, LocalProgram)

        def reduced(state: TrainState, batch: Any) -> tuple[Sums, Any]:
            workers, store = _opened(program, state)
            done = run_all(workers, store, program.parts(batch))
            return store.reduce(
                [(finished, store.losses(finished)) for finished in done]
            ).sums, state.variables

        return reduced

    @watched("evaluate")
    def diagnose(self, batch: Batch, extra: Any = None) -> diagnosing.Diagnosis:
        """The first non-finite value, part by part, on the first worker."""
        batch = self.program.read_batch(batch, self.program.batch.train, extra)
        worker, state = self.runnable
        diagnosis = None
        for part in host_parts(batch, self.program.workers):
            diagnosis = diagnosing.diagnose(
                worker, state, jax.device_put(part, worker.batch_shardings(part))
            )
            if not diagnosis.finite:
                break
        assert diagnosis is not None
        return diagnosis


def _opened(program: LocalProgram, state: TrainState) -> tuple[LocalWorkers, LocalServers]:
    traffic = Traffic()
    return LocalWorkers(program, traffic), LocalServers(program, state, traffic)


def engine_of(
    config: Config,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    optimizer: optax.GradientTransformation | None,
    *,
    example_batch: Any = None,
    showing: Showing = not_shown,
    before_init: Callable[[Program], Any] = lambda program: None,
    **options: Any,
) -> Engine:
    """An engine of any kind that writes to no monitor, for a run that writes records of its own.

    `showing` shows its phases, and `before_init` is called before anything is compiled; the other
    arguments are those of `jaxspeed.initialize`.
    """
    model, loss_fn = resolve_model(config, model, loss_fn)
    enable_compilation_cache(config.run.compilation_cache)
    with paused_collector():
        with showing("building the model"):
            program = build(
                config, model, loss_fn, optimizer=optimizer, example_batch=example_batch, **options
            )
        tokenizer = tokenizer_of(program.model.weights) if program.frozen else None
        for name, frozen in program.frozen.items():
            refuse_other_tokenizer(tokenizer, frozen.model.weights, name)
        if config.run.executable is not None:
            # Reports a bad file before anything is allocated.
            read_identity(config.run.executable, trusted=config.run.trust_executable)
        refuse_attention(program, example_batch)
        warn_of_room(program, example_batch)
        before_init(program)
        is_read = config.model is not None and config.model.pretrained is not None
        try:
            with showing("reading weights" if is_read else "initializing weights"):
                state = program.init(config.run.seed)
        except Exception as error:
            if is_out_of_memory(error):
                raise explain_out_of_memory(program, error) from error
            raise
    log_startup(program)
    if isinstance(program, LocalProgram):
        return LocalServedEngine(program, state)
    return Engine(program, state)
