"""What compiled: one report of a compiled step's bytes, flops and collectives, per device."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.errors import JaxspeedError
from jaxspeed.observe.collectives import Collective, collectives, ring_bytes, unknown_loops
from jaxspeed.observe.cost import cost
from jaxspeed.parallel.pipeline import PipelineReport
from jaxspeed.placement.show import as_text, scaled_text


@dataclass(frozen=True)
class CompiledReport:
    """Per device and execution, read from the compiled program.

    Attributes:
      argument_bytes: device memory of the arguments.
      temp_bytes: device memory of intermediate values, at their peak.
      output_bytes: device memory of the results, those included that overwrite a donated argument.
      alias_bytes: the part of `output_bytes` that does: it needs no memory of its own.
      host_bytes: arguments, results and intermediate values in host memory. XLA:CPU does not tell
        host from device memory: there it is 0.
      peak_bytes: XLA's own figure for what is held at once. XLA:TPU's has buffers in VMEM in it,
        which `temp_bytes` leaves out; XLA:CPU's leaves `temp_bytes` out, so add them there.
      flops: of matrix products and convolutions, loops multiplied out (see `observe.cost`).
      bytes_accessed: what the instructions read and write, loops multiplied out.
      collectives: each one of the program.
      compile_seconds: wall time of the compilation, None where it was not timed.
      uncounted: kernels whose flops are not in `flops`.
      unknown_loops: loops of unknown length, counted as if they ran once.
      pipeline: what its pipeline costs by the schedule; None where the mesh has no stages.
    """

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    host_bytes: int
    peak_bytes: int
    flops: int
    bytes_accessed: int
    collectives: tuple[Collective, ...]
    compile_seconds: float | None = None
    uncounted: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    pipeline: PipelineReport | None = None

    def __rich__(self) -> Group:
        # A pipeline's loop over micro-batches goes tick by tick.
        trip = "tick" if self.pipeline else "micro-batch"
        parts = [_summary(self), _collective_table(self.collectives, trip)]
        if self.pipeline:
            parts.insert(1, self.pipeline.costs())
        return Group(*[each for part in parts for each in (part, Text())][:-1])

    def __str__(self) -> str:
        return as_text(self, width=110)

    def figures(self) -> dict[str, Any]:
        """What was read from the compiled program, as plain numbers and words."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["pipeline"]  # is not of the compiler
        return {**own, "collectives": [asdict(one) for one in self.collectives]}


def report(
    compiled: jax.stages.Compiled,
    mesh: Mesh | AbstractMesh,
    compile_seconds: float | None = None,
    pipeline: PipelineReport | None = None,
) -> CompiledReport:
    """Read a program that was compiled for `mesh`."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        raise JaxspeedError("this backend shows neither the memory nor the text of its programs")
    counted = cost(text)
    return CompiledReport(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes
        + memory.host_temp_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        flops=counted.flops,
        bytes_accessed=counted.bytes_accessed,
        collectives=tuple(collectives(text, mesh)),
        compile_seconds=compile_seconds,
        uncounted=counted.uncounted,
        unknown_loops=unknown_loops(text),
        pipeline=pipeline,
    )


def _summary(report: CompiledReport) -> Table:
    table = Table(
        title="compiled, per device (from the compiler)",
        title_justify="left",
        show_header=False,
        box=None,
    )
    table.add_column("what")
    table.add_column("how much", justify="right")
    for name in ("argument", "temp", "output", "alias", "host", "peak"):
        table.add_row(f"{name} bytes", scaled_text(getattr(report, f"{name}_bytes"), "B"))
    table.add_row("flops (products, convolutions)", scaled_text(report.flops, "flop"))
    table.add_row("bytes accessed", scaled_text(report.bytes_accessed, "B"))
    if report.compile_seconds is not None:
        table.add_row("compile time (measured)", f"{report.compile_seconds:.2f} s")
    for kernel in report.uncounted:
        table.add_row("flops not counted of", kernel)
    for loop in report.unknown_loops:
        table.add_row("counted once, length unknown", loop)
    return table


def _collective_table(found: Iterable[Collective], trip: str) -> Table:
    """Like collectives in one row: how many, how often they run, what a device sends in all.

    `trip` is what one trip of the loop over micro-batches is called. In 80 columns axes and trips
    are broken into lines before a number is cut off.
    """
    rows: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for one in found:
        where = trip if one.in_accumulation else "step"
        rows[one.kind, " x ".join(one.axis), one.dtype, where].append(one)
    table = Table(title="collectives, per device and step", title_justify="left", box=None)
    for column, narrowest in (("kind", None), ("axis", 7), ("dtype", None), ("each", 6)):
        table.add_column(column, no_wrap=narrowest is None, min_width=narrowest, overflow="fold")
    for column, narrowest in (
        ("in program", 7),
        ("runs", None),
        ("payload", 7),
        ("sent (ring)", 7),
    ):
        table.add_column(column, justify="right", min_width=narrowest)
    for key, alike in rows.items():
        table.add_row(
            *key,
            str(len(alike)),
            str(sum(one.runs for one in alike)),
            scaled_text(sum(one.bytes * one.runs for one in alike), "B"),
            scaled_text(sum(ring_bytes(one) for one in alike), "B"),
        )
    return table
