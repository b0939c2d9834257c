"""Overlap of tensor parallelism's communication with matmuls, by form, read from HLO.

    python benchmarks/tensor_overlap.py [--topologies v5e:2x4 v5p:2x2x2] [--tensor 4] [--json]

Compiles the forward and backward pass of one Llama block (its projections and its MLP, sequence
4096, 2 sequences per data rank, bf16, sequence-parallel activations) for absent TPUs, in the three
forms of `parallel.tensor_overlap`, and walks the schedule of the compiled program:

- `async` and `sync` collectives over the tensor axis. Asynchronous are pairs of `-start` and
  `-done`, and collectives that XLA:TPU spreads over a chain of fusions.
- `covered`: the matmuls that are scheduled while one or more is in flight, in Tflop.
- `ms exposed`: a model, not a measurement: the time in which matmuls wait for communication over
  the tensor axis. Matmuls run at the chip's peak and nothing else takes time. A permute goes by the
  shortest way, x before y before z, without wrap-around, and each link carries one message at a
  time in each direction; any other collective takes all links of its group, two of them at once for
  each device. `laid out` is for the mesh as `jax.make_mesh` lays it out, where neighbours on the
  tensor axis may be two links apart; `in a ring`, the same schedule with them next to each other.

All-reduces of gradients over `data` are equal in all forms, and left out.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.hlo.collectives import KINDS
from jaxspeed.hlo.cost import own_flops
from jaxspeed.hlo.parser import Computation, Instruction, Module, parse
from jaxspeed.hlo.replica_groups import axes_of, replica_groups, source_target_pairs
from jaxspeed.hlo.trip_counts import Site
from jaxspeed.tensor_parallel.collective_matmul import RingMatmul, ring_columns, ring_row

EMBED, MLP, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
SEQ, BATCH = 4096, 2
U = P.UNCONSTRAINED


class Chip(NamedTuple):
    """Public figures: peak bf16 flop/s, bytes/s of one link in one direction."""

    flops: float
    link: float


CHIPS = {
    "v5e": Chip(1.97e14, 4.5e10),
    "v5p": Chip(4.59e14, 9.0e10),
    "v6e": Chip(9.20e14, 9.0e10),
}

# -- the block, and the form without a ring -------------------------------------------------------


def contracting(x_dims: Sequence[int], w_dims: Sequence[int]) -> Callable[[Array, Array], Array]:
    return lambda x, w: lax.dot_general(x, w, ((tuple(x_dims), tuple(w_dims)), ((), ())))


INTO_HEADS = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=1, x_sharded=None, y_sharded=2)
INTO_MLP = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=1, x_sharded=None, y_sharded=2)
OUT_OF_HEADS = RingMatmul(
    contracting((2, 3), (0, 1)), 1, 1, w_sharded=0, x_sharded=2, y_sharded=None
)
OUT_OF_MLP = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=0, x_sharded=2, y_sharded=None)

SHAPES: dict[str, tuple[tuple[int, ...], P]] = {
    "q": ((EMBED, HEADS, HEAD), P(None, "tensor")),
    "k": ((EMBED, KV_HEADS, HEAD), P(None, "tensor")),
    "v": ((EMBED, KV_HEADS, HEAD), P(None, "tensor")),
    "o": ((HEADS, HEAD, EMBED), P("tensor")),
    "gate": ((EMBED, MLP), P(None, "tensor")),
    "up": ((EMBED, MLP), P(None, "tensor")),
    "down": ((MLP, EMBED), P("tensor")),
}


class Form(NamedTuple):
    columns: Callable[..., list[Array]]
    row: Callable[..., Array]


def block(form: Form, x: Array, w: Mapping[str, Array]) -> Array:
    """x [batch, seq, embed], sharded along seq; a stand-in for attention without matmuls."""
    q, k, v = form.columns(norm(x), [w["q"], w["k"], w["v"]], [INTO_HEADS] * 3)
    grouped = q.reshape(*k.shape[:3], HEADS // KV_HEADS, HEAD).swapaxes(3, 4)
    mixed = (grouped * k[..., None] + v[..., None]).swapaxes(3, 4).reshape(q.shape)
    x = x + form.row(mixed, w["o"], OUT_OF_HEADS)
    gate, up = form.columns(norm(x), [w["gate"], w["up"]], [INTO_MLP] * 2)
    return x + form.row(jax.nn.silu(gate) * up, w["down"], OUT_OF_MLP)


def norm(x: Array) -> Array:
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def along_seq(x: Array, axis: str | None) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    spec = P(*(axis if dim == 1 else U for dim in range(x.ndim)))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def plain_columns(
    x: Array, weights: Sequence[Array], products: Sequence[RingMatmul]
) -> list[Array]:
    """Gather, multiply; backward multiply, reduce-scatter, and gather again: all by constraint."""

    @jax.custom_vjp
    def columns(x: Array, weights: Sequence[Array]) -> list[Array]:
        x = along_seq(x, None)
        return [p.bind(x, w) for p, w in zip(products, weights)]

    def backward(saved: Any, dys: list[Array]) -> Any:
        # Tied to the cotangents, or XLA keeps what the forward pass has gathered.
        (x, weights), dys = lax.optimization_barrier((saved, dys))
        gathered = along_seq(x, None)
        _, pullback = jax.vjp(
            lambda x, ws: [p.bind(x, w) for p, w in zip(products, ws)], gathered, weights
        )
        dx, dws = pullback(dys)
        return along_seq(dx, "tensor"), dws

    columns.defvjp(lambda x, weights: (columns(x, weights), (x, weights)), backward)
    return columns(along_seq(x, "tensor"), list(weights))


def plain_row(h: Array, weight: Array, product: RingMatmul) -> Array:
    """Multiply, reduce-scatter; backward gather once, for both products."""

    @jax.custom_vjp
    def row(h: Array, weight: Array) -> Array:
        return along_seq(product.bind(h, weight), "tensor")

    def backward(saved: Any, dy: Array) -> Any:
        return jax.vjp(product.bind, *saved)[1](along_seq(dy, None))

    row.defvjp(lambda h, weight: (row(h, weight), (h, weight)), backward)
    return row(h, weight)


FORMS = {
    "none": Form(plain_columns, plain_row),
    "ring": Form(ring_columns, ring_row),
    "ring_both_directions": Form(
        functools.partial(ring_columns, bidirectional=True),
        functools.partial(ring_row, bidirectional=True),
    ),
}


def lowered(mesh: Mesh, form: Form, layers: int = 1) -> jax.stages.Traced:
    """Loss and gradients of `layers` blocks."""

    def loss(weights: list[Mapping[str, Array]], x: Array) -> Array:
        for w in weights:
            x = block(form, x, w)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def array(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = [{name: array(*SHAPES[name]) for name in SHAPES} for _ in range(layers)]
    x = array((BATCH * mesh.shape["data"], SEQ, EMBED), P("data", "tensor"))
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, (0, 1))).trace(weights, x)


# -- the schedule ---------------------------------------------------------------------------------


@dataclass
class Overlap:
    """The figures of one compiled program's schedule, per device."""

    asynchronous: int = 0
    synchronous: int = 0
    product_flops: float = 0.0
    covered_flops: float = 0.0
    exposed_seconds: float = 0.0
    exposed_in_a_ring_seconds: float = 0.0
    temp_bytes: int = 0
    compile_seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)


Link = tuple[tuple[int, ...], tuple[int, ...]]  # from one chip to the next one


class Transfer(NamedTuple):
    """One collective over the tensor axis."""

    kind: str
    bytes: float  # over each link that it takes, once
    links: dict[Link, int]  # how many times; empty for all links there are


def read_schedule(hlo_text: str, mesh: Mesh, chip: Chip) -> Overlap:
    """Walk the scheduled instructions, with a clock that only matmuls advance."""
    module = parse(hlo_text)
    flops = functools.cache(functools.partial(flops_of, module))
    result, clock = Overlap(), 0.0
    free: dict[Link, float] = {}  # when each link is free
    everything = 0.0  # when all of them are
    under_way: dict[str, float] = {}  # when each arrives

    def begin(name: str, transfer: Transfer) -> None:
        nonlocal everything
        seconds = transfer.bytes / chip.link
        if transfer.links:
            for link, times in transfer.links.items():
                free[link] = max(clock, everything, free.get(link, 0.0)) + times * seconds
            arrives = max(free[link] for link in transfer.links)
        else:
            arrives = everything = max(clock, everything, *free.values(), 0.0) + seconds
        under_way[name] = arrives
        result.kinds[transfer.kind] = result.kinds.get(transfer.kind, 0) + 1

    def wait(name: str) -> None:
        nonlocal clock
        arrives = under_way.pop(name)
        result.exposed_seconds += max(0.0, arrives - clock)
        clock = max(clock, arrives)

    for instruction in module.entry.instructions.values():
        name, opcode = instruction.name, instruction.opcode
        found = transfer_of(module, module.entry, instruction, mesh)
        if opcode.endswith("-done") and instruction.operands[0] in under_way:
            wait(instruction.operands[0])
        elif found is not None and opcode.endswith("-start"):
            result.asynchronous += 1
            begin(name, found)
        elif found is not None and (chain := chain_of(module, instruction)):
            if chain.first:
                result.asynchronous += 1
                begin(chain.channel, found)
        elif found is not None:
            result.synchronous += 1
            begin(name, found)
            wait(name)
        own = flops(instruction.name, module.entry.name)
        result.product_flops += own
        result.covered_flops += own if under_way else 0
        clock += own / chip.flops
        if (chain := chain_of(module, instruction)) and chain.last and chain.channel in under_way:
            wait(chain.channel)
    return result


def flops_of(module: Module, name: str, computation: str) -> float:
    """FLOPs of the matmuls of one instruction, including called computations."""
    where = module.computations[computation]
    instruction = where.instructions[name]
    own = own_flops(Site(instruction, where, (), None)) or 0
    inner = (instruction.called("calls"), instruction.called("to_apply"))
    if instruction.opcode not in ("fusion", "call", "async-start"):
        return own
    return own + sum(
        flops_of(module, inside, called)
        for called in (*inner[0], *inner[1])
        for inside in module.computations[called].instructions
    )


class Part(NamedTuple):
    """Whether a fusion is part of a chain over which XLA:TPU spreads a collective."""

    channel: str
    first: bool
    last: bool


def chain_of(module: Module, instruction: Instruction) -> Part | None:
    for _, inside in contents(module, instruction):
        if "async_collective_fusion_config" in inside.attributes and inside.opcode in KINDS:
            return Part(
                f"channel {inside.attribute('channel_id')}",
                instruction.name.startswith("async-collective-start"),
                instruction.name.startswith("async-collective-done"),
            )
    return None


def transfer_of(
    module: Module, computation: Computation, instruction: Instruction, mesh: Mesh
) -> Transfer | None:
    """The collective over `tensor` that an instruction is or contains."""
    for where, inside in [(computation, instruction), *contents(module, instruction)]:
        kind = inside.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        pairs = source_target_pairs(inside.attribute("source_target_pairs") or "{}")
        groups = pairs or replica_groups(inside.attribute("replica_groups") or "{}", mesh.size)
        if axes_of(groups, mesh) != ("tensor",):
            continue
        size = mesh.shape["tensor"]
        given = sum(shape.bytes for value in where.operands(inside) for shape in value.arrays)
        if kind == "collective-permute":
            return Transfer(kind, given, loads(pairs, mesh))
        rounds = {"all-gather": size - 1, "all-reduce": 2 * (size - 1) / size}
        if kind == "all-reduce" and is_scattered(where, inside, instruction):
            kind = "reduce-scatter"
        share = rounds.get(kind, (size - 1) / size)
        return Transfer(kind, given * share / 2, {})
    return None


def loads(pairs: Sequence[Sequence[int]], mesh: Mesh) -> dict[Link, int]:
    """Messages of a permute by link: routed one dim after the other, without wrap-around."""
    found: dict[Link, int] = {}
    chips = [tuple(device.coords) for device in mesh.devices.flat]
    for source, target in pairs:
        at, end = chips[source], chips[target]
        for dim in range(len(at)):
            while at[dim] != end[dim]:
                step = 1 if end[dim] > at[dim] else -1
                after = (*at[:dim], at[dim] + step, *at[dim + 1 :])
                found[at, after] = found.get((at, after), 0) + 1
                at = after
    return found


def in_a_ring(mesh: Mesh) -> Mesh:
    """The mesh with each tensor group reordered for the fewest links around its ring."""

    def around(order: Sequence[Any]) -> int:
        chips = [device.coords for device in (*order, order[0])]
        return sum(abs(a - b) for p, q in itertools.pairwise(chips) for a, b in zip(p, q))

    grid = mesh.devices.copy()
    for row in grid.reshape(-1, grid.shape[-1]):
        first, *others = row
        row[:] = min(((first, *rest) for rest in itertools.permutations(others)), key=around)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def is_scattered(where: Computation, inside: Instruction, instruction: Instruction) -> bool:
    """Whether a fusion is XLA:TPU's reduce-scatter: an all-reduce and a slice."""
    return inside is not instruction and where.root.bytes < inside.bytes


def contents(module: Module, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    if instruction.opcode in ("fusion", "async-start"):
        for name in instruction.called("calls"):
            called = module.computations[name]
            for inside in called.instructions.values():
                yield called, inside
                yield from contents(module, inside)


# -- the table ------------------------------------------------------------------------------------


def measure(
    topology: str, tensor: int, form: str, layers: int, options: Mapping[str, str]
) -> Overlap:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = (len(devices) // tensor, tensor)
    axes = ("data", "tensor")
    mesh = jax.make_mesh(shape, axes, devices=devices, axis_types=(AxisType.Auto,) * 2)
    start = time.perf_counter()
    compiled = lowered(mesh, FORMS[form], layers).lower().compile(dict(options))
    seconds = time.perf_counter() - start
    chip, text = CHIPS[topology.split(":")[0]], compiled.as_text()
    result = read_schedule(text, mesh, chip)
    result.exposed_in_a_ring_seconds = read_schedule(text, in_a_ring(mesh), chip).exposed_seconds
    result.temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    result.compile_seconds = seconds
    return result


HEADER = (
    f"{'target':<12}{'form':<16}{'async':>6}{'sync':>6}{'Tflop':>8}{'covered':>9}"
    f"{'ms exposed: laid out':>22}{'in a ring':>11}{'temp MB':>9}{'compile s':>11}"
    "  collectives over tensor"
)


def row_of(target: str, form: str, found: Overlap) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items()))
    return (
        f"{target:<12}{form:<16}{found.asynchronous:>6}{found.synchronous:>6}"
        f"{found.product_flops / 1e12:>8.2f}{found.covered_flops / 1e12:>9.2f}"
        f"{found.exposed_seconds * 1e3:>22.2f}{found.exposed_in_a_ring_seconds * 1e3:>11.2f}"
        f"{found.temp_bytes / 1e6:>9.0f}{found.compile_seconds:>11.1f}  {kinds}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x4", "v5p:2x2x2"])
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--option", nargs="*", default=[], help="of the compiler, as name=value")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = dict(option.split("=", 1) for option in args.option)
    found: list[dict[str, Any]] = []
    if not args.json:
        print(HEADER)
    for topology in args.topologies:
        for form in args.forms:
            one = measure(topology, args.tensor, form, args.layers, options)
            found.append({"topology": topology, "form": form, **asdict(one)})
            if not args.json:
                print(row_of(topology, form, one), flush=True)
    if args.json:
        json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
