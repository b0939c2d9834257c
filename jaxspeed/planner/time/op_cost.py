"""What the operations of a scope cost a device: its matrix units, and its memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspeed.hardware.known_chips import Chip
from jaxspeed.jaxpr.flops import kernel_flops, of_products, product_flops
from jaxspeed.jaxpr.primitives import CUDNN_ATTENTION, PRODUCTS
from jaxspeed.ops.mask import Mask, computed_blocks
from jaxspeed.planner.memory.materialization import OUT, VIEWS, ScopeAnalysis
from jaxspeed.planner.memory.tiles import Sizes
from jaxspeed.planner.memory.trace_ir import Op, Scope, Value

KERNELS = ("pallas_call", CUDNN_ATTENTION)


@dataclass(frozen=True)
class Work:
    """Of one run of an operation on one device."""

    flops: float
    compute: float  # seconds on the matrix units
    memory: float  # seconds for the bytes that it reads and writes

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def works(walk: ScopeAnalysis, sizes: Sizes, chip: Chip) -> list[Work]:
    """Of a scope's operations, in their order; of loops none, which have scopes of their own."""
    bytes_ = _passed(walk, sizes)
    found = []
    for op, passed in zip(walk.scope.ops, bytes_, strict=True):
        flops, rate = _product(op, sizes.mesh, chip)
        memory = passed / (chip.bandwidth * chip.reached["bandwidth"])
        found.append(Work(flops, flops / rate if flops else 0.0, memory))
    return found


def device_flops(scope: Scope, mesh: Mapping[str, int]) -> float:
    """Of the products and kernels of one run of a scope on one device, its loops too."""

    def of(op: Op) -> float:
        if op.bodies:
            return max(op.trips, 1) * max(device_flops(body, mesh) for body in op.bodies)
        if op.name.startswith(KERNELS):
            return _kernel(op, mesh)
        return _flops(op, mesh) if op.name in PRODUCTS else 0.0

    return sum(map(of, scope.ops))


def _passed(walk: ScopeAnalysis, sizes: Sizes) -> list[float]:
    """Bytes that each operation reads from memory and writes to it."""
    ops = walk.scope.ops
    found = [0.0] * len(ops)
    by_product = _read_for_products(walk)
    for value, by in walk.readers.items():
        if value.host or not value.shape or (value not in walk.real and value in walk.makers):
            continue
        for reader in by - {OUT}:
            i = by_product.get((value, reader), reader)
            if not ops[i].bodies and not _is_view(ops[i]):
                base = ops[i].ins[0]
                indexed = base is not None and walk.root(base) is value
                found[i] += _read_of(ops[i], sizes) if indexed else sizes.of(value)
    for value in walk.real:
        i = walk.makers[value]
        if not ops[i].bodies and not _is_view(ops[i]) and not value.host and value.shape:
            found[i] += _written_of(ops[i], value, sizes)
    return found


def _read_of(op: Op, sizes: Sizes) -> float:
    """Of its first operand, which some operations read by indices."""
    if op.name in ("gather", "dynamic_slice"):
        return sizes.of(op.outs[0])
    if op.name == "dynamic_update_slice":
        return 0
    if op.name.startswith("scatter"):
        return _updates(op, sizes)
    return sizes.of(op.ins[0]) if op.ins[0] is not None else 0


def _written_of(op: Op, value: Value, sizes: Sizes) -> float:
    if op.name == "dynamic_update_slice" or op.name.startswith("scatter"):
        return _updates(op, sizes)
    return sizes.of(value)


def _updates(op: Op, sizes: Sizes) -> float:
    """Of what is written in the place of an operand's part."""
    updates = op.ins[1 if op.name == "dynamic_update_slice" else 2]
    return min(sizes.of(updates), sizes.of(op.outs[0])) if updates else sizes.of(op.outs[0])


def _is_view(op: Op) -> bool:
    """Whether it passes nothing: what it gives is what it reads."""
    if op.name == "broadcast_in_dim":
        return op.ins[0] is not None and op.ins[0].size == op.outs[0].size
    return op.name in VIEWS


def _read_for_products(walk: ScopeAnalysis) -> dict[tuple[Value, int], int]:
    """What is read where a product's result goes on, but by the product."""
    found = {}
    for j, op in enumerate(walk.scope.ops):
        if op.name not in PRODUCTS or op.outs[0] in walk.real:
            continue
        for i in walk.readers.get(op.outs[0], set()) - {OUT}:
            found.update({(r, i): j for v in op.values for r in walk.read_by(v)})
    return found


# -- products --------------------------------------------------------------------------------------


def _product(op: Op, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    """(flops of a device, flops a second that it reaches)."""
    if op.name == "dot_general":
        return _dot(op, mesh, chip)
    if op.name == "conv_general_dilated" and op.ins[1] is not None:
        return _flops(op, mesh), _peak(op, chip) * chip.reached["products"]
    if op.name.startswith(KERNELS):
        return _kernel(op, mesh), _peak(op, chip) * chip.reached["attention"]
    return 0.0, 1.0


def _flops(op: Op, mesh: Mapping[str, int]) -> float:
    """Of a product, shared by the axes that cut its result or what it sums over."""
    shapes = [() if v is None else v.shape for v in op.ins]
    flops = product_flops(op.name, op.params, shapes, op.outs[0].shape)
    assert flops is not None
    summed: Any = [(op.ins[1], range(len(shapes[1])))]
    if op.name == "dot_general":
        summed = zip(op.ins, op.params["dimension_numbers"][0], strict=True)
    cut = [v.cut[int(d)] for v, dims in summed if v is not None for d in dims]
    return flops / math.prod(mesh[a] for a in {a for e in (*cut, *op.outs[0].cut) for a in e})


def _dot(op: Op, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    left, right, out = op.ins[0], op.ins[1], op.outs[0]
    if left is None or right is None:
        return 0.0, 1.0
    (contracted, other), (batch, _) = op.params["dimension_numbers"]
    free = len(left.shape) - len(contracted) - len(batch)
    first = len(batch)
    axes: set[str] = set()

    def parts(*dims: tuple[Value, int]) -> int:
        """Elements of a device along these dims; an axis cuts a product once."""
        new = {a for v, d in dims for a in v.cut[d]} - axes
        axes.update(new)
        return math.prod(mesh[a] for a in new)

    def along(v: Value, dims: range) -> float:
        return math.prod(v.shape[d] for d in dims) / parts(*((v, d) for d in dims))

    depth: float = math.prod(left.shape[int(d)] for d in contracted)
    depth /= parts(*((left, int(d)) for d in contracted), *((right, int(d)) for d in other))
    parts(*((out, d) for d in range(first)))  # batch dims take their axes before the others do
    rows = along(out, range(first, first + free))
    columns = along(out, range(first + free, len(out.shape)))
    if min(rows, columns) <= 1:  # a sum of products: no work for matrix units
        return 0.0, 1.0
    whole = _filled(rows, columns, depth, chip)
    return _flops(op, mesh), _peak(op, chip) * chip.reached["products"] * whole


def _filled(rows: float, columns: float, depth: float, chip: Chip) -> float:
    """The share of the matrix units' tiles that a product fills, where all dims count alike."""
    tile = chip.tile
    dims = sorted((rows, columns, depth))
    full = 1.0
    for n in dims[:2] if chip.platform == "tpu" else dims:
        full *= n / (math.ceil(n / tile - 1e-9) * tile)
    return full


def _peak(op: Op, chip: Chip) -> float:
    width = max((jnp.dtype(v.dtype).itemsize for v in op.values if _floats(v)), default=2)
    if width >= 4:
        return chip.flops["fp32"]
    halves = {str(v.dtype) for v in op.values}
    return (
        chip.flops["fp16"] if "float16" in halves and "fp16" in chip.flops else chip.flops["bf16"]
    )


def _floats(v: Value) -> bool:
    return v.dtype is not None and jnp.issubdtype(v.dtype, jnp.floating)


def _kernel(op: Op, mesh: Mapping[str, int]) -> float:
    """Of a kernel: its whole grid, less the blocks that the mask of `ops.attention` leaves out."""
    if op.name == "pallas_call":
        grid = op.params["grid_mapping"].grid
        blocks = computed_blocks(op.scopes)
        return kernel_flops(
            op.params, of_products, grid if blocks is None else (*grid[:-2], blocks)
        )
    query = op.ins[0]
    if query is None:
        return 0.0
    batch, seq, heads, dim = query.shape  # or [batch, heads, seq, dim]
    if op.params.get("layout") == 1:
        heads, seq = seq, heads
    ways = math.prod(mesh[a] for e in query.cut for a in e)
    products = 2 if "fwd" in op.name else 5
    keys = op.ins[1].shape[2 if op.params.get("layout") == 1 else 1] if op.ins[1] else seq
    # cuDNN's window looks back: a query sees itself and so many keys less one before it.
    mask = Mask("CAUSAL" in str(op.params.get("mask_type")), op.params.get("sliding_window_length"))
    seen = mask.share(seq, keys)
    return products * 2 * batch * heads * seq * keys * dim * seen / ways
