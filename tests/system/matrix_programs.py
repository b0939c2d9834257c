"""Steps of an 8 B Llama by optimizers of matrices, for devices that are not here."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxspeed.config import load_config
from jaxspeed.data import known_shapes
from jaxspeed.data.model_limits import limits_of_run
from jaxspeed.hardware.chip import Chip
from jaxspeed.hardware.targets import target_of
from jaxspeed.hlo.cost import _bytes_accessed, _own_flops
from jaxspeed.hlo.parser import parse
from jaxspeed.hlo.trip_counts import walk
from jaxspeed.objectives import objective_of
from jaxspeed.parameter_server import build
from jaxspeed.placement.owned import SCOPE as OWNERS
from jaxspeed.planner.time.roofline import time_of
from jaxspeed.train.phases import BATCH
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import resolve_model
from tests.system.measured import compile_step, measure

# Rows, columns and number of the matrices of a layer; 32 layers.
MATRICES = ((4096, 4096, 2), (4096, 1024, 2), (4096, 14336, 3))
LAYERS = 32


def step(devices: Sequence[jax.Device], optimizer: str, **more: Any) -> dict[str, Any]:
    """What the step compiles to, its owners' roofline, and the seconds that a plan says."""
    target = target_of("v5p:4x4x4")
    built, batch = program(devices, optimizer, **more)
    compiled = compile_step(built, batch)
    planned = time_of(built, batch, target)
    return {
        **measure(built, batch, lambda *_: compiled),
        "roofline": roofline(compiled.as_text() or "", target.chip),
        "planned": planned.compute + planned.memory,
    }


def roofline(text: str, chip: Chip) -> float:
    """Seconds of the operations at the owners, each by FLOPs or by bytes, without collectives."""
    module = parse(text)
    rate = chip.flops["bf16"] * chip.reached["products"]
    bandwidth = chip.bandwidth * chip.reached["bandwidth"]
    inside: dict[int, float] = {}
    total = 0.0
    sites = list(walk(module))
    for site in sites:
        if site.fusion is not None:
            inside[id(site.fusion)] = inside.get(id(site.fusion), 0) + (_own_flops(site) or 0)
    for site in sites:
        operation = site.instruction
        at_owners = OWNERS in operation.op_name.split("/")
        if site.fusion is None and at_owners and not operation.opcode.startswith("all-"):
            flops = inside.get(id(operation), 0) + (_own_flops(site) or 0)
            seconds = max(flops / rate, _bytes_accessed(module, site) / bandwidth)
            total += seconds * site.runs
    return total


def program(
    devices: Sequence[jax.Device] | None, optimizer: str, micro: int = 2, tensor: int = 1
) -> tuple[Program, Any]:
    """A step of `micro` rows of 4,096 tokens a data rank, and the shapes of its batch."""
    config = load_config(
        {
            "model": {"family": "llama", "preset": "llama3-8b"},
            "data": {"source": "synthetic", "seq_len": 4096},
            "mesh": {"tensor": tensor},
            "train_micro_batch_size_per_gpu": micro,
            "bf16": {"enabled": True},
            "optimizer": {"type": optimizer, "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
        }
    )
    model, loss_fn = resolve_model(config)
    built = build(config, model, loss_fn, devices=devices)
    reads = limits_of_run(config, None, objective_of(loss_fn))
    shapes = known_shapes(config.data, reads, built.batch.train)
    return built, built.values(shapes)[BATCH]
