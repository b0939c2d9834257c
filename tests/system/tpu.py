"""What the tests of this folder compile for a TPU topology, one child process a function."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.config import Config
from jaxspeed.hlo.collectives import collectives
from jaxspeed.hlo.parser import parse
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.torus_gather import steps_between
from jaxspeed.train import build_program
from tests.support.strict_models import CASES
from tests.system.measured import (
    compile_gradients,
    compile_step,
    head_program,
    lookup_program,
    measure,
    measure_stacks,
    stack_program,
    without,
)
from tests.system.stacks import FORMS

DEEP_WIDTH, DEEP_BATCH = 2048, 512  # 8.4 MB of bf16 a layer; samples a device
REPLICATED = {"replica": 2, "data": 4}
FEW_ROWS = {"rows": 512, "micro": 16}  # a table smaller than what is looked up in it
EACH_MICRO_BATCH = {"gradient_reduction": "micro_batch"}


def volumes(devices: list[jax.Device], names: list[str]) -> dict[str, Any]:
    """`stacks` under every stage, with one micro-batch and with four; those of these names."""
    cases: dict[str, dict[str, Any]] = {
        f"stage {stage}, {accumulation}": {"stage": stage, "accumulation": accumulation}
        for stage in (0, 1, 2, 3)
        for accumulation in (1, 4)
    }
    cases |= {
        "replicas, stage 2": {"stage": 2, "accumulation": 4, "mesh": REPLICATED},
        "replicas, stage 3": {"stage": 3, "accumulation": 4, "mesh": REPLICATED},
        "each micro-batch, stage 0": {
            "stage": 0,
            "accumulation": 4,
            "parallel": EACH_MICRO_BATCH,
        },
        "each micro-batch, stage 1": {
            "stage": 1,
            "accumulation": 4,
            "parallel": EACH_MICRO_BATCH,
        },
    }
    return measure_stacks(devices, {name: cases[name] for name in names})


def depths(devices: list[jax.Device], form: str, few: int) -> dict[str, Any]:
    """Few layers and twice as many, scanned or not, wide enough for their weights to weigh."""
    cases = {
        f"{form}, {layers}": {
            "stage": 3,
            "form": form,
            "layers": layers,
            "width": DEEP_WIDTH,
            "micro": DEEP_BATCH,
        }
        for layers in (few, 2 * few)
    }
    return measure_stacks(devices, cases)


def forms(devices: list[jax.Device]) -> dict[str, Any]:
    """The same layers written in four ways."""
    return measure_stacks(devices, {form: {"stage": 3, "form": form} for form in FORMS})


def torus(devices: list[jax.Device], dropped: str | None) -> dict[str, Any]:
    """Scanned layers gathered over three closed dims of a torus."""
    case = {"stage": 3, "form": "scanned", "width": DEEP_WIDTH, "micro": DEEP_BATCH}
    with without(dropped):
        return measure(*stack_program(devices, **case))


def gathers(devices: list[jax.Device], meshes: list[dict[str, int]]) -> list[list[Any]]:
    """The collectives that gather a matrix from shards over all axes of each mesh."""
    found = []
    for sizes in meshes:
        mesh = build_mesh(sizes, devices)
        stored, gathered = NamedSharding(mesh, P(tuple(sizes))), NamedSharding(mesh, P())

        def read(x: jax.Array, places: Any = (stored, gathered)) -> jax.Array:
            for step in (*steps_between(*places), places[1]):
                x = jax.lax.with_sharding_constraint(x, step)
            return x

        x = jax.ShapeDtypeStruct((DEEP_WIDTH, DEEP_WIDTH), jnp.bfloat16, sharding=stored)
        text = jax.jit(read).lower(x).compile().as_text()
        found.append([(c.kind, c.dtype, c.axes) for c in collectives(text, mesh)])
    return found


def heads(devices: list[jax.Device], names: list[str]) -> dict[str, Any]:
    """Language models, with their head tied to the embedding and not; at stage 3 and 2."""
    cases: dict[str, dict[str, Any]] = {
        "untied, 1": {"tied": False},
        "tied, 2": {"accumulation": 2},
        "stage 2": {"accumulation": 2, "stage": 2},
    }
    return {name: measure(*head_program(devices, **cases[name])) for name in names}


def dropped(devices: list[jax.Device]) -> dict[str, Any]:
    """For each site a program in which it matters, with it and without."""
    sgd = {"type": "SGD", "params": {"lr": 1e-3}}
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "reduce": (
            stack_program,
            compile_step,
            {"stage": 1, "mixed": False, "optimizer": sgd},
        ),
        "accumulate": (
            stack_program,
            compile_step,
            {"stage": 1, "accumulation": 4, "parallel": EACH_MICRO_BATCH},
        ),
        "update.gather": (stack_program, compile_step, {"stage": 1}),
        "unit.gather": (stack_program, compile_step, {"stage": 3}),
        "unit.scatter": (stack_program, compile_gradients, {"stage": 3}),
        "lookup.columns": (lookup_program, compile_step, FEW_ROWS),
        "lookup.rows": (lookup_program, compile_step, FEW_ROWS),
    }
    found: dict[str, Any] = {}
    for site, (build, compiling, case) in cases.items():
        kept = measure(*build(devices, **case), compiling)
        with without(site):
            found[site] = {"kept": kept, "dropped": measure(*build(devices, **case), compiling)}
    return found


def rings(devices: list[jax.Device], **case: Any) -> dict[str, Any]:
    """A program of `stacks` whose ranks add up around rings."""
    return measure(*stack_program(devices, parallel={"data_reduction": "ring"}, **case))


def autocast(devices: list[jax.Device], name: str) -> list[tuple[str, ...]]:
    """The dtypes of the operands of each matmul and convolution of a step under autocast."""
    case = CASES[name]
    config = Config(
        train_batch_size=8,
        optimizer={"type": "Adam", "params": {"lr": 1e-2}},
        torch_autocast={"enabled": True, "dtype": "bfloat16"},
    )
    program = build_program(
        config, case.model, case.loss, devices=devices[:1], example_batch=case.batch
    )
    lowered = program.step.lower(program.state, program.abstract_batch(case.batch))
    module = parse(lowered.compile().as_text())
    found = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ("dot", "convolution"):
                shapes = [computation.instructions[name].shape for name in instruction.operands]
                found.add(tuple(shape.dtype for shape in shapes))
    return sorted(found)
