"""All-reduce over data ranks by XLA and by rings: messages, bytes and time.

    python benchmarks/ring.py [--mib 16] [--times 10] [--json]

First the sum of one fp32 array on eight devices, in each form: XLA's all-reduce, a ring in one
direction and in both, rings within and across two nodes, and a ring in both directions with
compressed messages. Then full steps of a small GPT-2 at each ZeRO stage, by XLA and by rings.

Steps and bytes are read from the compiled programs: the messages that a device waits for one after
another, of which both directions send two at once, and the bytes that it sends. What XLA sends is
counted as if its collectives were rings; on simulated devices it never scatters, so that it sends
more than it would elsewhere. Times are medians; simulated links are this machine's memory, so they
measure the cost of copies, not of links.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed import models
from jaxspeed.communication import ring_bytes
from jaxspeed.hlo import collectives
from jaxspeed.placement.mesh import simulated
from jaxspeed.ring_reduction import WIRES, Levels, Ranks, Ring, hierarchical_all_reduce

DEVICES, NODES = 8, 2
AXES = ("replica", "data")
SMALL = 4096  # bytes: losses, weights and norms are left out
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 64,
}


class Form(NamedTuple):
    name: str
    nodes: int = 1
    directions: Any = "both"
    wire: Any = "none"


FORMS = (
    Form("one direction", directions="one"),
    Form("both directions"),
    Form("2 nodes of 4", nodes=NODES),
    Form("both, bf16", wire="bf16"),
    Form("both, int8", wire="int8"),
)


class Row(NamedTuple):
    """The figures of one form."""

    name: str
    steps: int  # of rings, one after another
    mib: float  # that a device sends
    ms: float


def mesh_of(nodes: int) -> Mesh:
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((nodes, DEVICES // nodes), AXES, axis_types=kinds)


def sum_program(form: Form | None, length: int) -> tuple[Any, Any, Mesh]:
    """The jitted sum of an array per device, the arrays, and their mesh."""
    nodes = form.nodes if form else 1
    mesh = mesh_of(nodes)
    size = DEVICES // nodes

    def device(inner: Any, outer: Any, x: Any) -> Any:
        if form is None:
            return jax.lax.psum(x, AXES)
        unrolled = simulated(mesh)
        inside = Ring("data", size, form.directions, unrolled)
        across = Ring("replica", nodes, form.directions, unrolled)
        levels = Levels(inside, across, WIRES[form.wire])
        ranks = Ranks(inner[0], outer[0])
        return hierarchical_all_reduce(x[0].reshape(size, -1), ranks, levels)[0].reshape(x.shape)

    run = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(P("data"), P("replica"), P(AXES)),
        out_specs=P(AXES),
        check_vma=False,
    )
    rank_ids = jnp.arange(size), jnp.arange(nodes)
    at = NamedSharding(mesh, P(AXES))
    x = jax.device_put(np.random.default_rng(0).normal(size=(DEVICES, length)), at)
    return jax.jit(lambda x: run(*rank_ids, x)), x.astype(jnp.float32), mesh


def counted(text: str, mesh: Mesh, directions: int) -> tuple[int, float]:
    """(sequential permutes, MiB that a device sends), of large collectives."""
    large = [c for c in collectives(text, mesh) if c.bytes * c.runs >= SMALL]
    messages = sum(c.runs for c in large if c.kind == "collective-permute")
    return messages // directions, sum(map(ring_bytes, large)) / 2**20


def median_ms(run: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return 1e3 * statistics.median(found[2:])


def sums(mib: int, times: int) -> list[Row]:
    rows = []
    for form in (None, *FORMS):
        run, x, mesh = sum_program(form, mib * 2**20 // 4)
        text = run.lower(x).compile().as_text() or ""
        directions = 2 if form and form.directions == "both" else 1
        ms = median_ms(functools.partial(run, x), times)
        rows.append(Row(form.name if form else "XLA", *counted(text, mesh, directions), ms))
    return rows


def steps(times: int) -> list[Row]:
    built = models.build("gpt2", None, SIZES)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (16, 65), np.int32)
    batch = {"tokens": tokens}
    rows = []
    for stage in range(4):
        for reduction in ("xla", "ring"):
            engine = jaxspeed.initialize(
                model=built.factory,
                loss_fn=built.loss,
                config={
                    "train_batch_size": len(tokens),
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                    "zero_optimization": {"stage": stage},
                    "parallel": {"data_reduction": reduction},
                    "run": {"compilation_cache": False},
                },
            )
            program = engine.program
            lowered = program.step.lower(program.state, program.abstract_batch(batch))
            text = lowered.compile().as_text() or ""
            placed = jax.device_put(batch, program.batch_shardings(batch))
            directions = 2 if reduction == "ring" else 1
            ms = median_ms(functools.partial(engine.train_batch, placed), times)
            name = f"stage {stage}, {reduction}"
            rows.append(Row(name, *counted(text, program.mesh, directions), ms))
            engine.close()
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--mib", type=int, default=16, help="of the array, on each device")
    arguments.add_argument("--times", type=int, default=10)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    tables = {
        f"the sum of {given.mib} MiB on {DEVICES} devices": sums(given.mib, given.times),
        "a step of a small GPT-2": steps(given.times),
    }
    if given.json:
        json.dump(
            {name: [row._asdict() for row in rows] for name, rows in tables.items()}, sys.stdout
        )
        return
    for name, rows in tables.items():
        print(f"\n{name:36}{'steps':>8}{'MiB sent':>12}{'ms':>10}")
        for row in rows:
            print(f"  {row.name:34}{row.steps or '-':>8}{row.mib:12.2f}{row.ms:10.1f}")


if __name__ == "__main__":
    main()
