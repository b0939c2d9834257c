"""The Plan of a config: memory, time, compiler figures, verdict; as text, JSON and a page."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from jaxspeed.generation.rollout_programs import RolloutPrograms
from jaxspeed.hardware.targets import Target
from jaxspeed.hlo import CompiledReport
from jaxspeed.offload.transfer_report import TransferReport
from jaxspeed.pipeline import PipelineReport
from jaxspeed.placement import show
from jaxspeed.placement.paths import counted, listed
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.memory import Memory
from jaxspeed.planner.page import page_of
from jaxspeed.planner.search.advice import Advice
from jaxspeed.planner.search.result import SearchResult
from jaxspeed.planner.time import Time
from jaxspeed.planner.time.torus import layout_of, layout_text
from jaxspeed.remat.residual_report import ResidualReport
from jaxspeed.run.opening import memory_line, on_what
from jaxspeed.sequence_parallel import AttentionReport
from jaxspeed.train.program import Program

WIDTH = 80  # of the plan as text


@dataclass(frozen=True)
class Plan:
    """The program of a config and the costs of its step; it prints itself."""

    program: Program
    pipeline: PipelineReport | None  # if the mesh has stages
    compiled: CompiledReport | None  # if it was compiled
    transfer: TransferReport | None = None  # if anything is offloaded
    kept: ResidualReport | None = None  # residuals, if the config sets a policy
    target: Target | None = None  # if it is for absent devices
    outcome: Outcome | None = None  # of compiling for the target
    memory: Memory | None = None  # estimated, for a target
    time: Time | None = None  # estimated, for a target
    run_tokens: float | None = None  # for the device-hours
    advice: Advice | None = None  # if it does not fit a target
    search: SearchResult | None = None  # among variants of the config
    attention: AttentionReport | None = None  # if an axis shards sequences
    rollout: RolloutPrograms | None = None  # if the objective samples completions
    disk_rate: float | None = None  # bytes a second of the disk that has state, if it is known

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step fits a device of the target; None if not compiled."""
        if self.search and self.search.proved is not None:
            return self.search.proved
        return self.outcome.fits(self.target) if self.outcome and self.target else None

    def __rich__(self) -> Group:
        program, compiled, target = self.program, self.compiled, self.target
        axes, roles = program.mesh.shape, program.table.bytes_by_role()
        temporary = max(x.temp_bytes for x in compiled.programs) if compiled else None
        parts: list[Any] = [
            Group(Text.from_markup(on_what(program, target)), Text(self._batch())),
            show.totals(
                program.table.stage,
                axes,
                roles,
                program.table.host_bytes_by_role(),
                program.table.disk_bytes_by_role(),
            ),
            Text(memory_line(program, temporary, target, self.rollout)),
        ]
        if disk := self._disk():
            parts.append(Text(_disk_text(disk)))
        if self.rollout:
            parts.append(Text(str(self.rollout)))
        if program.table.owned:
            parts.append(show.owned_matrices(program.table.owned))
        if once := [entry.name for entry in program.computed_arrays if entry.once]:
            parts.append(Text(f"before step 0: {listed(once)} of each sample, by a forward pass"))
        if target and target.topology and program.mesh.size > 1:
            parts[0] = Group(parts[0], Text(layout_text(target, axes)))
        if self.memory and target:
            parts.append(Group(self.memory, Text("\n".join(self._expected(self.memory, target)))))
        if self.time:
            parts.append(Group(self.time, Text(self._hours(self.time))))
        if self.attention:
            parts.append(self.attention)
        if self.pipeline:
            parts.append(self.pipeline.chart() if compiled else self.pipeline)
        if compiled:
            parts.append(compiled)
        else:
            parts += [note for note in (self.kept, self.transfer) if note]
        if self.outcome:
            parts.append(Text("\n".join([*self._verdict(self.outcome), *self._kept()])))
        if self.search:
            parts.append(self.search)
        return Group(*[row for part in parts for row in (part, Text())][:-1])

    def __str__(self) -> str:
        return show.as_text(self, WIDTH)

    def figures(self) -> dict[str, Any]:
        """The plan for JSON, sizes in bytes."""
        table, device = self.program.table, self.program.devices[0]
        roles, in_host = table.bytes_by_role().items(), table.host_bytes_by_role()
        on_disk = table.disk_bytes_by_role()
        chip = self.target.chip if self.target else None
        return {
            "model": self._model(),
            "target": self.target and _figures_of(self.target, self.program.mesh.shape),
            "mesh": dict(self.program.mesh.shape),
            "devices": {
                "count": len(self.program.devices),
                "platform": chip.platform if chip else device.platform,
                "kind": chip.kind if chip else device.device_kind,
                "simulated": (chip or device).platform == "cpu",
            },
            "batch": asdict(self.program.batch),
            "stage": table.stage,
            "state": {
                role: {
                    "bytes": total,
                    "bytes_per_device": per_device,
                    "host_bytes_per_device": in_host.get(role, 0),
                    "disk_bytes_per_device": on_disk.get(role, 0),
                }
                for role, (total, per_device) in roles
            },
            "disk": self._disk(),
            "memory": self.memory
            and chip
            and {**self.memory.figures(), "verdict": self.memory.on(chip.memory)},
            "rollout": self.rollout and self.rollout.figures(),
            "time": self.time and self._time_figures(self.time),
            "advice": self.advice and self.advice.figures(),
            "search": self.search and self.search.figures(),
            "attention": self.attention and self.attention.figures(),
            "kept": self.kept and self.kept.figures(),
            "transfer": self.transfer and self.transfer.figures(),
            "server": self.program.exchange_figures.get("server"),
            "pipeline": self.pipeline and self.pipeline.figures(),
            "compiled": self.compiled and self.compiled.figures(),
            "outcome": self.outcome and self.target and self.outcome.figures(self.target),
        }

    def html(self) -> str:
        """The plan as one self-contained HTML page."""
        return page_of(self.figures())

    def _model(self) -> dict[str, Any]:
        config, rows = self.program.config, list(self.program.table)
        named = config.model
        return {
            "name": (named.preset or named.family or named.factory) if named else None,
            "parameters": sum(math.prod(row.leaf.shape) for row in rows),
            "dtype": config.compute_dtype,
        }

    def _expected(self, memory: Memory, target: Target) -> list[str]:
        """Whether the estimate fits the chip's memory, and its error against the compiler."""
        chip, verdict = target.chip, memory.on(target.chip.memory)
        of = (
            f"{show.bytes_text(memory.device)} of the {show.bytes_text(chip.memory)} of {chip.name}"
        )
        verdicts = {
            "fits": f"expected to fit: {of}",
            "tight": f"tight: {of}, within the error of the estimate; --compile gives the answer",
            "does not fit": f"not expected to fit: {of}",
        }
        lines = [verdicts[verdict]]
        if self.rollout and verdict != "fits":
            parts = memory.phases.items()
            sizes = (f"the {n}: {part.on(chip.memory)}" for n, part in parts)
            of_caches = f"caches are for {self.rollout.shape.length:,} tokens of a row"
            keys = "data.seq_len and objective.max_completion_length"
            lines.append(f"{', '.join(sizes)}; {of_caches}: {keys} bound these")
        if self.advice and not self.outcome:
            lines += self.advice.lines()
        compiled = self.outcome.device_bytes if self.outcome else None
        if compiled:
            apart = memory.device / compiled - 1
            lines.append(f"the compiler: {show.bytes_text(compiled)}; the estimate is {apart:+.1%}")
        return lines

    def _tokens(self, time: Time) -> float:
        """Tokens of the run for the device-hours: as given, otherwise from the config's steps."""
        return self.run_tokens or (self.program.config.run.steps or 0) * time.tokens

    def _hours(self, time: Time) -> str:
        tokens = self._tokens(time)
        if not tokens:
            return "(--tokens shows the device-hours of a run)"
        hours = time.device_hours(tokens)
        days = hours / time.devices / 24
        return f"{tokens:.3g} {time.unit}: {hours:,.0f} device-hours, {days:,.1f} days"

    def _time_figures(self, time: Time) -> dict[str, Any]:
        tokens = self._tokens(time)
        hours = time.device_hours(tokens) if tokens else None
        return {**time.figures(), "run": {"tokens": tokens or None, "device_hours": hours}}

    def _verdict(self, outcome: Outcome) -> list[str]:
        """Whether the compiled step fits, and if not, advice."""
        assert self.target is not None
        chip, needed = self.target.chip, outcome.device_bytes
        has = f"{show.bytes_text(chip.memory)} of {chip.name}"
        took = f"compiled for {self.target} in {outcome.seconds:.0f} s"
        if not outcome.fits_device(self.target):
            what = f"{show.bytes_text(needed)}, and there are" if needed else "more than the"
            error = [f"the compiler reported: {outcome.refused.message}"] if outcome.refused else []
            advice = self.advice.lines() if self.advice else []
            return [f"does not fit: it needs {what} {has}; {took}", *advice, *error]
        assert needed is not None
        share = f"{show.bytes_text(needed)} of the {has} ({needed / chip.memory:.0%})"
        if not outcome.host_bytes:
            return [f"fits: {share}, {took}"]
        host = show.bytes_text(outcome.host_bytes)
        there = f"{show.bytes_text(chip.host_memory)} of host memory per device"
        if outcome.fits(self.target):
            return [f"fits: {share}, and {host} of the {there}, {took}"]
        return [f"does not fit: it needs {host}, more than the {there}"]

    def _kept(self) -> list[str]:
        kept = self.outcome.kept if self.outcome else None
        return [f"saved: a run with run.executable={kept} compiles no step"] if kept else []

    def _disk(self) -> dict[str, float | None] | None:
        """What a step reads and writes on the disk, if one process has all devices."""
        if (tier := self.program.update.tier) is None:
            return None
        seconds = 2 * tier.nbytes / self.disk_rate if self.disk_rate else None
        return {
            "file_bytes": tier.nbytes,
            "read_bytes_per_step": tier.nbytes,
            "written_bytes_per_step": tier.nbytes,
            "buckets": len(tier.buckets),
            "buffer_bytes": tier.buffer_bytes,
            "seconds_per_step": seconds,
        }

    def _batch(self) -> str:
        batch, ranks = self.program.batch, self.program.ranks
        return (
            f"batch  {counted(batch.train, 'sample')}: {batch.micro} per data rank and "
            f"micro-batch, x {counted(batch.accumulation, 'micro-batch', 'es')} "
            f"x {counted(ranks, 'rank')}"
        )


def _disk_text(disk: Mapping[str, Any]) -> str:
    size, buffers = show.bytes_text(disk["file_bytes"]), show.bytes_text(disk["buffer_bytes"])
    count, seconds = counted(disk["buckets"], "bucket"), disk["seconds_per_step"]
    takes = f": at least {show.seconds_text(seconds)} after the gradients" if seconds else ""
    return (
        f"disk   {size} in {count}, read and written in each step{takes}; {buffers} of host memory "
        "for buffers, if one process has all devices"
    )


def _figures_of(target: Target, sizes: Mapping[str, int]) -> dict[str, Any]:
    of_target = ("count", "topology", "slices", "node", "wraps")
    of_chip = ("memory", "host_memory", "link", "outside", "host_link")
    return {
        "name": str(target),
        "chip": target.chip.name,
        **{name: getattr(target, name) for name in of_target},
        **{name: getattr(target.chip, name) for name in of_chip},
        "layout": layout_of(target, sizes),
    }
