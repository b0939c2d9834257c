"""What a config would train, told without making an array of its model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Group
from rich.text import Text

from jaxspeed.config.data import Corpus
from jaxspeed.data import build
from jaxspeed.engine.cache import enable_compilation_cache
from jaxspeed.engine.engine import compiled_report
from jaxspeed.engine.family import resolve_model
from jaxspeed.engine.moving import asks, transfer_of
from jaxspeed.memory.kept import Kept
from jaxspeed.memory.transfer import Transfer
from jaxspeed.observe import CompiledReport
from jaxspeed.parallel.pipeline import PipelineReport
from jaxspeed.placement import show
from jaxspeed.run.opening import m_against_n, on_what
from jaxspeed.run.start import Source
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.train.served import ServedProgram

WIDTH = 80  # of the plan as text


@dataclass(frozen=True)
class Plan:
    """The program of a config, and what its step costs; it prints itself."""

    program: Program
    pipeline: PipelineReport | None  # where the mesh has stages
    compiled: CompiledReport | None  # where it was compiled
    transfer: Transfer | None = None  # where anything waits in host memory
    kept: Kept | None = None  # where the config says what units keep

    def __rich__(self) -> Group:
        program, compiled = self.program, self.compiled
        axes, roles = self._axes(), program.table.bytes_by_role()
        parts: list[Any] = [
            Group(Text.from_markup(on_what(program)), Text(self._batch())),
            show.totals(program.table.stage, axes, roles, program.table.host_bytes_by_role()),
            Text(m_against_n(program, compiled.temp_bytes if compiled else None)),
        ]
        if self.pipeline:
            parts.append(self.pipeline.chart() if compiled else self.pipeline)
        if compiled:
            parts.append(compiled)
        else:
            parts += [each for each in (self.kept, self.transfer) if each]
        return Group(*[each for part in parts for each in (part, Text())][:-1])

    def __str__(self) -> str:
        return show.as_text(self, WIDTH)

    def figures(self) -> dict[str, Any]:
        """All of it as plain numbers and words, bytes in bytes."""
        table, device = self.program.table, self.program.devices[0]
        roles, in_host = table.bytes_by_role().items(), table.host_bytes_by_role()
        return {
            "mesh": dict(self.program.mesh.shape),
            "devices": {
                "count": len(self.program.devices),
                "platform": device.platform,
                "kind": device.device_kind,
                "simulated": device.platform == "cpu",
            },
            "batch": asdict(self.program.batch),
            "stage": table.stage,
            "state": {
                role: {
                    "bytes": whole,
                    "bytes_per_device": part,
                    "host_bytes_per_device": in_host.get(role, 0),
                }
                for role, (whole, part) in roles
            },
            "kept": self.kept and self.kept.figures(),
            "transfer": self.transfer and self.transfer.figures(),
            "server": _server(self.program),
            "pipeline": self.pipeline and self.pipeline.figures(),
            "compiled": self.compiled and self.compiled.figures(),
        }

    def _axes(self) -> dict[str, int]:
        return {axis: size for axis, size in self.program.mesh.shape.items() if size > 1}

    def _batch(self) -> str:
        batch, ranks = self.program.batch, self.program.ranks
        return (
            f"batch  {batch.train} samples: {batch.micro} of a data rank and micro-batch, "
            f"x {batch.accumulation} micro-batches x {ranks} ranks"
        )


def _server(program: Program) -> dict[str, Any] | None:
    """Of a parameter server: who there is, and what each worker sends and gets of a version."""
    if not isinstance(program, ServedProgram):
        return None
    return {
        "servers": program.mesh.size,
        "workers": program.ranks,
        "bytes_down": program.bytes_down,
        "bytes_up": program.bytes_up,
    }


def plan_run(source: Source, *, compiling: bool = True) -> Plan:
    """The plan of a config on the devices that there are.

    Without `compiling` there are no figures of the compiler.
    """
    config = source.config
    enable_compilation_cache(config)
    model, loss_fn = resolve_model(config, source.model, source.loss_fn)
    program = build_program(config, model, loss_fn, optimizer=source.optimizer)
    batch = batch_shapes(source, program.batch.train)
    program.check_batch(batch, program.batch.train, abstract=True)
    if not compiling:
        transfer = None
        if asks(program) and not isinstance(program, ServedProgram):
            traced = program.step.trace(program.state, program.abstract_batch(batch))
            transfer = transfer_of(program, traced)
        schedule, kept = program.pipeline_report(batch), program.kept_report(batch)
        return Plan(program, schedule, None, transfer, kept)
    compiled = compiled_report(program, batch)
    return Plan(program, compiled.pipeline, compiled, compiled.transfer, compiled.kept)


def batch_shapes(source: Source, samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a global batch.

    What the model reads tells them, so that no corpus need be here yet; only where the samples are
    the user's own (or the model is), one is read.
    """
    data = source.config.data
    sources: Sequence[Corpus] = data.mixture or [data]
    own = any(":" in (each.source or "") for each in sources)
    if own or source.reads.sample is None:
        corpus = source.corpus()
    else:
        made = {"source": "synthetic", "samples": 1, "mixture": [], "held_out": 0.0}
        corpus = build(data.model_copy(update=made), **vars(source.reads), seed=0)
    first = corpus.train.batch(0, 1)
    return {
        name: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
