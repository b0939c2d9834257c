"""Report of a compiled step: bytes, flops and collectives per device, as tables."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import Communication, ring_bytes
from jaxspeed.errors import JaxspeedError
from jaxspeed.hlo.collectives import collectives, unknown_loops
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.sequence_exchanges import sequence_exchanges
from jaxspeed.offload.transfer_report import TransferReport
from jaxspeed.pipeline import PipelineReport
from jaxspeed.placement.paths import counted
from jaxspeed.placement.show import as_text, bytes_text, scaled_text
from jaxspeed.remat.residual_report import ResidualReport

_CPU_NOTE = " * from the placement table: XLA:CPU counts host memory as device memory"


@dataclass(frozen=True)
class CompiledReport:
    """Figures of a compiled program, per device and execution.

    Attributes:
      argument_bytes: device memory of the arguments.
      temp_bytes: device memory of intermediate values, at their peak.
      output_bytes: device memory of the results, including those that overwrite a donated argument.
      alias_bytes: the part of `output_bytes` that overwrites donated arguments.
      host_bytes: arguments, results and intermediate values in host memory. XLA:CPU does not
        distinguish host from device memory: there it is 0, and device figures include all.
      host_argument_bytes, host_temp_bytes, host_output_bytes: its parts.
      peak_bytes: XLA's figure for peak memory. XLA:TPU's includes buffers in VMEM, which
        `temp_bytes` excludes, and host memory; XLA:CPU's excludes `temp_bytes`, so add them there.
        None where it is unknown: of a GPU's program that was loaded from the compilation cache.
      flops: of matmuls and convolutions, times loop trip counts (see `hlo.cost`). None, like
        the next two, if the backend does not print the program's text.
      bytes_accessed: bytes that the instructions read and write, times loop trip counts.
      collectives: all collectives of the program.
      compile_seconds: wall time of the compilation, None if not measured.
      uncounted: kernels whose flops are not in `flops`.
      unknown_loops: loops of unknown length, counted as one iteration.
      pipeline: costs of the pipeline schedule; None if the mesh has no stages.
      transfer: host transfers; None if nothing is offloaded.
      separates_host: whether the backend distinguishes host memory.
      waiting: {role: bytes in host memory} from the placement table.
      no_text: why there is no text.
      kept: residuals that units save; None if the config sets no policy.
      phase: the name of this program, if a step is several.
      others: the reports of the others, by name.
      on_host: the bytes that the step's host work reads and writes, by name.
      held_bytes, held_host_bytes: what a step of several programs has in device and host memory
        while this one runs, beside its arguments.
      over_sequence: what XLA exchanges over the sequence axis besides attention, with the
        operation, the user's line and the bytes.
    """

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    host_bytes: int
    peak_bytes: int | None
    flops: int | None
    bytes_accessed: int | None
    collectives: tuple[Communication, ...] | None
    compile_seconds: float | None = None
    uncounted: tuple[str, ...] = ()
    unknown_loops: tuple[str, ...] = ()
    pipeline: PipelineReport | None = None
    host_argument_bytes: int = 0
    host_temp_bytes: int = 0
    host_output_bytes: int = 0
    transfer: TransferReport | None = None
    separates_host: bool = True
    waiting: Mapping[str, int] = field(default_factory=dict)
    no_text: str | None = None
    kept: ResidualReport | None = None
    phase: str | None = None
    others: Mapping[str, "CompiledReport"] = field(default_factory=dict)
    on_host: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    held_bytes: int = 0
    held_host_bytes: int = 0
    over_sequence: tuple[str, ...] = ()

    @property
    def programs(self) -> "tuple[CompiledReport, ...]":
        """The reports of all programs of the step."""
        return self, *self.others.values()

    @property
    def step_bytes(self) -> int:
        """Device memory that a step takes: of its largest program, with what it holds meanwhile."""
        return max(
            x.argument_bytes + x.temp_bytes + x.output_bytes - x.alias_bytes + x.held_bytes
            for x in self.programs
        )

    @property
    def step_host_bytes(self) -> int:
        """The same in host memory."""
        return max(x.host_bytes + x.held_host_bytes for x in self.programs)

    def __rich__(self) -> Group:
        # A pipeline's loop over micro-batches runs tick by tick.
        trip = "tick" if self.pipeline else "micro-batch"
        shown = _summary(self)
        of_table = self.waiting and not self.separates_host
        parts: list[Any] = [Group(shown, Text(_CPU_NOTE)) if of_table else shown]
        if self.no_text:
            parts.append(Text(f"flops, bytes accessed and collectives are unknown: {self.no_text}"))
        if self.unknown_loops:
            loops = counted(len(self.unknown_loops), "loop")
            parts.append(Text(f"of {loops} without a fixed length, one iteration is counted"))
        if self.kept:
            parts.append(self.kept)
        if self.transfer:
            parts.append(self.transfer)
        if self.pipeline:
            parts.append(self.pipeline.costs())
        if self.collectives:
            parts.append(_collective_table(self.collectives, trip))
        if self.over_sequence:
            title = "over seq, besides attention (XLA's; from the compiled program):"
            parts.append(Text("\n  ".join((title, *self.over_sequence))))
        parts += [replace(other, phase=name) for name, other in self.others.items()]
        parts += [
            Text(f"on the host, {name}: reads {bytes_text(read)}, writes {bytes_text(written)}")
            for name, (read, written) in self.on_host.items()
        ]
        return Group(*[row for part in parts for row in (part, Text())][:-1])

    def __str__(self) -> str:
        return as_text(self, width=110)

    def figures(self) -> dict[str, Any]:
        """The compiler's figures for JSON."""
        figures = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        for name in ("pipeline", "transfer", "waiting", "kept"):  # not from the compiler
            del figures[name]
        if figures.pop("others"):
            figures["others"] = {
                name: replace(other, phase=name).figures() for name, other in self.others.items()
            }
        elif self.phase is None:
            del figures["phase"], figures["held_bytes"], figures["held_host_bytes"]
        if not self.on_host:
            del figures["on_host"]
        for key, name in (("tells_host", "separates_host"), ("untold", "no_text")):  # stable keys
            figures[key] = figures.pop(name)
        listed = self.collectives
        return {**figures, "collectives": None if listed is None else [*map(_figures, listed)]}


def _figures(collective: Communication) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "axis": collective.axes,
        "bytes": collective.bytes,
        "elements": collective.elements,
        "dtype": collective.dtype,
        "leaves": collective.leaves,
        "group_size": collective.group_size,
        "runs": collective.runs,
        "in_accumulation": collective.in_accumulation,
        "op_name": collective.site,
    }


def report(
    compiled: jax.stages.Compiled,
    mesh: Mesh | AbstractMesh,
    compile_seconds: float | None = None,
    pipeline: PipelineReport | None = None,
    transfer: TransferReport | None = None,
    waiting: Mapping[str, int] = MappingProxyType({}),
    kept: ResidualReport | None = None,
    parameters: Collection[int] = (),
) -> CompiledReport:
    """The report of a program compiled for `mesh`.

    `waiting` is {role: offloaded bytes}, `parameters` the sizes in `sequence_exchanges`.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise JaxspeedError("this backend does not report the memory of its programs")
    text, no_text = _text(compiled)
    module = parse(text) if text else None
    costs = cost(module) if module else None
    flops = costs.flops if costs else None
    in_host = (
        memory.host_argument_size_in_bytes,
        memory.host_temp_size_in_bytes,
        memory.host_output_size_in_bytes,
    )
    return CompiledReport(
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        host_bytes=sum(in_host) - memory.host_alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes or None,
        flops=flops,
        bytes_accessed=costs.bytes_accessed if costs else None,
        collectives=tuple(collectives(module, mesh)) if module else None,
        compile_seconds=compile_seconds,
        uncounted=costs.uncounted if costs else (),
        unknown_loops=unknown_loops(module) if module else (),
        pipeline=pipeline,
        host_argument_bytes=in_host[0],
        host_temp_bytes=in_host[1],
        host_output_bytes=in_host[2],
        transfer=transfer and transfer.counted(flops),
        separates_host=not (isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"),
        waiting=dict(waiting),
        no_text=no_text,
        kept=kept,
        over_sequence=tuple(map(str, sequence_exchanges(text, mesh, parameters))) if text else (),
    )


def _text(compiled: jax.stages.Compiled) -> tuple[str | None, str | None]:
    """(the program's text, None), or (None, the reason).

    libtpu 0.0.51 compiles updates of host memory that it then cannot print: "async-update
    instruction should have 1 operands".
    """
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        return None, f"this backend cannot print the program ({str(error).splitlines()[0][:200]})"
    return text, None if text else "this backend does not print its programs"


def _summary(report: CompiledReport) -> Table:
    of_phase = f", {report.phase}" if report.phase else ""
    title = f"compiled{of_phase}, per device (from the compiler)"
    table = Table(
        title=title,
        title_justify="left",
        show_header=False,
        box=None,
        min_width=max(44, len(title)),
    )
    table.add_column("what")
    table.add_column("how much", justify="right")
    for name in ("argument", "temp", "output", "alias"):
        table.add_row(f"{name} bytes", bytes_text(getattr(report, f"{name}_bytes")))
    if report.held_bytes:
        table.add_row("held by the step besides", bytes_text(report.held_bytes))
    # XLA:TPU's peak includes offloaded arrays.
    with_host = " with host memory" if report.host_bytes else ""
    if report.peak_bytes is not None:
        table.add_row(f"peak bytes{with_host}", bytes_text(report.peak_bytes))
    if report.separates_host:
        table.add_row("in host memory", bytes_text(report.host_bytes))
        for name in ("argument", "temp", "output") if report.host_bytes else ():
            table.add_row(f"  {name} bytes", bytes_text(getattr(report, f"host_{name}_bytes")))
    elif report.waiting:
        waiting = sum(size for role, size in report.waiting.items() if role != "grad")
        table.add_row("of these arguments in host memory*", bytes_text(waiting))
    if report.collectives == ():
        table.add_row("collectives", "none")
    if report.flops is not None and report.bytes_accessed is not None:
        table.add_row("flops (matmuls, convolutions)", scaled_text(report.flops, "flop"))
        table.add_row("bytes accessed", bytes_text(report.bytes_accessed))
    if report.compile_seconds is not None:
        table.add_row("compile time (measured)", f"{report.compile_seconds:.2f} s")
    for kernel in report.uncounted:
        table.add_row("flops not counted in", kernel)
    return table


def _collective_table(communications: Iterable[Communication], trip: str) -> Table:
    """One row per kind, axis and dtype of collectives: their number, runs and bytes per device.

    `trip` names an iteration of the loop over micro-batches. In 80 columns axes and trips are
    wrapped before a number is truncated.
    """
    rows: dict[tuple[str, str, str, str], list[Communication]] = defaultdict(list)
    for collective in communications:
        where = trip if collective.in_accumulation else "step"
        rows[collective.kind, " x ".join(collective.axes), collective.dtype, where].append(
            collective
        )
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
            str(sum(collective.runs for collective in alike)),
            scaled_text(sum(collective.payload for collective in alike), "B"),
            scaled_text(sum(ring_bytes(collective) for collective in alike), "B"),
        )
    return table
