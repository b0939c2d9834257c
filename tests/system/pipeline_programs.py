"""What pipelines compile to: their ticks, messages and bytes; and the same work without stages."""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxspeed import models
from jaxspeed.hlo import cost
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.replica_groups import axes_of, source_target_pairs
from jaxspeed.hlo.trip_counts import walk
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from tests.system import stacks
from tests.system.measured import compile_step, measure

LAYERS, EMBED, SEQ, VOCABULARY = 16, 64, 64, 512
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "max_position_embeddings": SEQ},
    "llama": {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "intermediate_size": 128},
    "vit": {"image_size": 64, "patch_size": 8, "num_classes": 16},
}


def pipeline_program(
    devices: Sequence[jax.Device],
    family: str = "gpt2",
    preset: str | None = None,
    sizes: dict[str, Any] | None = None,
    seq: int = SEQ,
    micro: int = 1,
    micro_batches: int = 8,
    mesh: dict[str, int] | None = None,
    stage: int = 0,
    mixed: bool = False,
    **more: Any,
) -> tuple[Program, Any]:
    """A family's program over the stages of a mesh, and the shapes of its batch."""
    own = {"hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    given = sizes or {} if preset else {**own, **SIZES[family], **(sizes or {})}
    built = models.build(family, preset, given)
    config = stacks.config_of(
        stage,
        mixed=mixed,
        accumulation=micro_batches,
        micro=micro,
        mesh=mesh or {"pipe": 4, "data": 2},
        **more,
    )
    program = build_program(config, built.factory, built.loss, devices=devices)
    samples = micro * micro_batches * program.mesh.shape["data"]
    if family == "vit":
        side = given["image_size"]
        images = jax.ShapeDtypeStruct((samples, side, side, 3), jnp.float32)
        return program, {"images": images, "labels": jax.ShapeDtypeStruct((samples,), jnp.int32)}
    return program, {"tokens": jax.ShapeDtypeStruct((samples, seq + 1), jnp.int32)}


def figures(program: Program, batch: Any) -> dict[str, Any]:
    """What one step compiles to, and what its pipeline's report says of it."""
    compiled = compile_step(program, batch)
    text = compiled.as_text()
    assert text is not None
    report = program.pipeline_report(batch)
    return {
        **measure(program, batch, lambda *_: compiled),
        "flops": cost(text).flops,
        "tick_loops": tick_loops(text, program.mesh),
        "report": report.figures() if report else None,
    }


def bytes_of(devices: Sequence[jax.Device], **case: Any) -> dict[str, int]:
    """Of a device, of `pipeline_program(**case)`: the text of the largest programs for TPUs cannot
    be had (libtpu 0.0.51 with jaxlib 0.10.2: "async-update instruction should have 1 operands")."""
    memory = compile_step(*pipeline_program(devices, **case)).memory_analysis()
    assert memory is not None
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def figures_of(
    devices: Sequence[jax.Device], cases: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """{name: the figures of `pipeline_program(**case)`}."""
    return {name: figures(*pipeline_program(devices, **case)) for name, case in cases.items()}


def tick_loops(text: str, mesh: Mesh) -> list[dict[str, Any]]:
    """The loops in which stages send messages: the trip counts of each, those around it first, and
    the bytes of each message of a trip."""
    module, found = parse(text), {}
    for site in walk(module):
        one = site.instruction
        if one.opcode.removesuffix("-start") != "collective-permute" or not site.loops:
            continue
        pairs = source_target_pairs(one.attribute("source_target_pairs") or "")
        if axes_of(pairs, mesh) == ("pipe",):
            trips = [loop.trips for loop in site.loops]
            loop = found.setdefault(site.loops[-1].instruction.name, {"trips": trips, "sent": []})
            loop["sent"].append(sum(x.bytes for x in site.computation.operands(one)))
    return list(found.values())


def kept_inputs(found: dict[str, Any], shape: Sequence[int]) -> set[int]:
    """How many inputs of this shape the loops carry in one buffer [1, slots, ...]."""
    return {
        dims[1]
        for _, dims in found["carry"]
        if len(dims) == len(shape) + 2 and dims[2:] == tuple(shape)
    }


# -- the same work without stages ------------------------------------------------------------------


@contextlib.contextmanager
def recomputed(rows: int, recompute: str) -> Iterator[None]:
    """Inside, a model's backward pass makes again what a pipeline's does, `rows` layers at a time.

    "stage": the residuals of such a group from its input, "layers": besides, each layer's from its
    own input; "save": nothing.
    """
    real = sys.modules["jaxspeed.models.layers"].scan_blocks

    def grouped(
        blocks: nnx.Module,
        x: jax.Array,
        *args: object,
        each: tuple[()] = (),
        unroll: int | bool = 1,
    ) -> Any:
        assert not each
        graphdef, params, rest = nnx.split(blocks, nnx.Param, ...)

        def layer(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, *layer)(x, *args), None

        def group(x: jax.Array, layers: Any) -> tuple[jax.Array, None]:
            one = again(layer) if recompute == "layers" else layer
            return lax.scan(one, x, layers, unroll=unroll)[0], None

        again = functools.partial(jax.checkpoint, prevent_cse=False)
        groups = jax.tree.map(lambda w: w.reshape(-1, rows, *w.shape[1:]), (params, rest))
        return lax.scan(group if recompute == "save" else again(group), x, groups)[0]

    names = [f"jaxspeed.models.{family}" for family in SIZES]
    users = [sys.modules[name] for name in names if name in sys.modules]
    for module in users:
        module.scan_blocks = grouped  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.scan_blocks = real  # type: ignore[attr-defined]
