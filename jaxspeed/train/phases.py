"""A step of several phases: compiled programs and host work, which read and write named values.

A step begins with the values `state` and `batch`, and ends with `state` and `metrics`. Host work
runs in a thread: the phases after it that read none of its values run meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

STATE, BATCH, METRICS = "state", "batch", "metrics"
FIRST_ADAPTER = "first adapter"  # (params, masters), as a run began
SUMS, VARIABLES = "sums", "variables"  # what `Program.gradients` returns


@dataclass(frozen=True)
class StepPhase:
    """A compiled program of a step, or host work.

    Attributes:
      function: of the values that it reads; a jitted one, or for host work any other. It returns
        the written value, or a tuple of several.
      reads, writes: names of values.
      donates: those of `reads` whose arrays the function takes over.
      mesh: of the program; None for host work.
      shapes: of host work, the shapes of what it writes from those of what it reads; by default a
        written value has the shapes of the one that is read by that name.
    """

    name: str
    function: Any
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    donates: tuple[str, ...] = ()
    mesh: Mesh | None = None
    shapes: Callable[..., Any] | None = None

    @property
    def on_host(self) -> bool:
        return self.mesh is None

    def trace(self, values: Mapping[str, Any]) -> Any:
        """The traced program, for these shapes of values."""
        return self.function.trace(*(values[name] for name in self.reads))

    def shapes_written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The shapes of what host work writes."""
        if self.shapes is None:
            return {name: values[name] for name in self.writes}
        return self.named(self.shapes(*(values[name] for name in self.reads)))

    def named(self, returned: Any) -> dict[str, Any]:
        """What the function returned, by name."""
        return dict(zip(self.writes, returned if len(self.writes) > 1 else [returned], strict=True))


class PhasedStep:
    """`state, metrics = step(state, batch)`, phase by phase.

    `held` are further values that are there when a step begins, such as a frozen model's.
    """

    def __init__(self, phases: Sequence[StepPhase], held: Mapping[str, Any] | None = None) -> None:
        self._phases, self._held = tuple(phases), dict(held or {})
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[Any]] = []

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        values = self._run({STATE: state, BATCH: batch}, None)
        return _arrived(values[STATE]), _arrived(values[METRICS])

    def batch(self, state: Any, batch: Any) -> Any:
        """The batch with what the phases add to it."""
        return _arrived(self._run({STATE: state, BATCH: batch}, BATCH)[BATCH])

    def run(self, values: Mapping[str, Any], until: str) -> dict[str, Any]:
        """The values after the last phase that writes `until`."""
        return {name: _arrived(value) for name, value in self._run(values, until).items()}

    def _run(self, values: Mapping[str, Any], until: str | None) -> dict[str, Any]:
        """The same; those of host work are functions that wait for it."""
        known = {**self._held, **values}
        for phase in self._until(until):
            if phase.donates:  # host work, of the step before too, may still read these arrays
                self.wait()
            arguments = [_arrived(known[name]) for name in phase.reads]
            if phase.on_host:
                work = self._submit(phase, arguments)
                known |= {name: partial(_of_work, work, name) for name in phase.writes}
            else:
                known |= phase.named(phase.function(*arguments))
        return known

    def shapes(self, values: Mapping[str, Any], until: str) -> dict[str, Any]:
        """As `run`, of shapes, without running anything."""

        def written(phase: StepPhase, known: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
            read = (known[name] for name in phase.reads)
            return phase.named(jax.eval_shape(phase.function, *read))

        return over_programs(self._until(until), values, written)[0]

    def compile(self, state: Any, batch: Any) -> None:
        """Compile all programs for values of these shapes."""

        def compiled(phase: StepPhase, known: Mapping[str, Any], _: Any) -> Mapping[str, Any]:
            traced = phase.trace(known)
            return phase.named(shapes_after(traced.lower().compile(), traced))

        over_programs(self._phases, {**self._held, STATE: state, BATCH: batch}, compiled)

    def _until(self, name: str | None) -> Sequence[StepPhase]:
        writers = [i for i, phase in enumerate(self._phases) if name in phase.writes]
        return self._phases[: max(writers, default=-1) + 1] if name else self._phases

    def wait(self) -> None:
        """Wait for all host work, and raise what it raised."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()

    def _submit(self, phase: StepPhase, arguments: list[Any]) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxspeed-phase")
        work = self._pool.submit(lambda: phase.named(phase.function(*arguments)))
        self._pending.append(work)
        return work


def _of_work(work: Future[Any], name: str) -> Any:
    return work.result()[name]


def _arrived(value: Any) -> Any:
    """A value, of host work once that is done."""
    return value() if isinstance(value, partial) else value


def over_programs(
    phases: Sequence[StepPhase],
    values: Mapping[str, Any],
    results: Callable[[StepPhase, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Go over the programs of a step, without running any.

    Args:
      values: the shapes of those with which the step begins.
      results: called for each program with (phase, all values, those of them that are in memory
        meanwhile and that it does not read); it returns the shapes of what the program writes.

    Returns:
      The shapes of all values at the end; {host work: (bytes that it reads, that it writes)}.
    """
    known, on_host = dict(values), dict[str, tuple[int, int]]()
    for i, phase in enumerate(phases):
        if phase.on_host:
            written: Mapping[str, Any] = phase.shapes_written(known)
            read = [known[name] for name in phase.reads]
            on_host[phase.name] = _bytes(read), _bytes(written)
        else:
            read_later = {name for later in phases[i + 1 :] for name in later.reads}
            needed = (values.keys() | read_later) - {*phase.reads}
            held = {name: shapes for name, shapes in known.items() if name in needed}
            written = results(phase, known, held)
        known |= written
    return known, on_host


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def shapes_after(compiled: Any, traced: Any) -> Any:
    """The shapes of a compiled program's results, with their shardings."""
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        traced.out_info,
        compiled.output_shardings,
    )
