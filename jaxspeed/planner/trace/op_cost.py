"""Cost of a scope's operations per device: FLOPs on the matrix units, bytes of memory traffic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspeed.hardware.known_chips import Chip
from jaxspeed.jaxpr.flops import count_products, kernel_flops, product_flops
from jaxspeed.jaxpr.primitives import CUDNN_ATTENTION, GROUPED_PRODUCTS, PALLAS, PRODUCTS
from jaxspeed.ops.mask import Mask, computed_blocks, computed_flops
from jaxspeed.planner.trace.materialization import OUT, VIEWS, ScopeAnalysis
from jaxspeed.planner.trace.tiles import Sizes
from jaxspeed.planner.trace.trace_ir import Op, Scope, Value

KERNELS = (*PALLAS, CUDNN_ATTENTION)


@dataclass(frozen=True)
class Work:
    """Cost of one run of an operation on one device."""

    flops: float
    compute: float  # seconds on the matrix units
    memory: float  # seconds for the bytes read and written

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory)


def works(analysis: ScopeAnalysis, sizes: Sizes, chip: Chip) -> list[Work]:
    """The work of a scope's operations, in order; zero for loops, whose bodies are scopes."""
    bytes_ = _traffic(analysis, sizes)
    per_op = []
    for op, traffic in zip(analysis.scope.ops, bytes_, strict=True):
        flops, rate = _product(op, sizes.mesh, chip)
        memory = traffic / (chip.bandwidth * chip.reached["bandwidth"])
        per_op.append(Work(flops, flops / rate if flops else 0.0, memory))
    return per_op


def device_flops(scope: Scope, mesh: Mapping[str, int]) -> float:
    """FLOPs per device of the matmuls and kernels of one run of a scope, loops included."""

    def of(op: Op) -> float:
        if op.bodies:
            return max(op.trips, 1) * max(device_flops(body, mesh) for body in op.bodies)
        if op.name.startswith(KERNELS):
            return _kernel(op, mesh)
        return _flops(op, mesh) if op.name in PRODUCTS | GROUPED_PRODUCTS else 0.0

    return sum(map(of, scope.ops))


def _traffic(analysis: ScopeAnalysis, sizes: Sizes) -> list[float]:
    """Bytes that each operation reads from memory and writes to memory."""
    ops = analysis.scope.ops
    traffic = [0.0] * len(ops)
    by_product = _read_for_products(analysis)
    for value, by in analysis.readers.items():
        if (
            value.host
            or not value.shape
            or (value not in analysis.materialized and value in analysis.producers)
        ):
            continue
        for reader in by - {OUT}:
            i = by_product.get((value, reader), reader)
            if not ops[i].bodies and not _is_view(ops[i]):
                base = ops[i].ins[0]
                indexed = base is not None and analysis.root(base) is value
                traffic[i] += _read_of(ops[i], sizes) if indexed else sizes.of(value)
    for value in analysis.materialized:
        i = analysis.producers[value]
        if not ops[i].bodies and not _is_view(ops[i]) and not value.host and value.shape:
            traffic[i] += _written_of(ops[i], value, sizes)
    return traffic


def _read_of(op: Op, sizes: Sizes) -> float:
    """Bytes read of the first operand, of which some operations read only indexed elements."""
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
    """Bytes of an in-place update."""
    updates = op.ins[1 if op.name == "dynamic_update_slice" else 2]
    return min(sizes.of(updates), sizes.of(op.outs[0])) if updates else sizes.of(op.outs[0])


def _is_view(op: Op) -> bool:
    """Whether the output is a view of the input, without memory traffic."""
    if op.name == "broadcast_in_dim":
        return op.ins[0] is not None and op.ins[0].size == op.outs[0].size
    return op.name in VIEWS


def _read_for_products(analysis: ScopeAnalysis) -> dict[tuple[Value, int], int]:
    """{(operand of a fused matmul, consumer): the matmul, which reads it instead}."""
    matmuls = {}
    for j, op in enumerate(analysis.scope.ops):
        if op.name not in PRODUCTS or op.outs[0] in analysis.materialized:
            continue
        for i in analysis.readers.get(op.outs[0], set()) - {OUT}:
            matmuls.update({(r, i): j for v in op.values for r in analysis.read_by(v)})
    return matmuls


# -- matmuls, convolutions, kernels ----------------------------------------------------------------


def _product(op: Op, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    """(FLOPs per device, achieved FLOP/s)."""
    if op.name == "dot_general":
        return _dot(op, mesh, chip)
    is_convolution = op.name == "conv_general_dilated" and op.ins[1] is not None
    if is_convolution or op.name in GROUPED_PRODUCTS:
        return _flops(op, mesh), _peak(op, chip) * chip.reached["products"]
    if op.name.startswith(KERNELS):
        return _kernel(op, mesh), _peak(op, chip) * chip.reached["attention"]
    return 0.0, 1.0


def _flops(op: Op, mesh: Mapping[str, int]) -> float:
    """FLOPs per device of a product, sharded over axes of its operands and result."""
    shapes = [() if v is None else v.shape for v in op.ins]
    flops = product_flops(op.name, op.params, shapes, op.outs[0].shape)
    assert flops is not None
    if op.name in GROUPED_PRODUCTS:
        layout = op.params["layout"]
        return flops / (layout.shards * (layout.parts if op.params["sharded"] else 1))
    summed: Any = [(op.ins[1], range(len(shapes[1])))]
    if op.name == "dot_general":
        summed = zip(op.ins, op.params["dimension_numbers"][0], strict=True)
    sharded = [v.spec[int(d)] for v, dims in summed if v is not None for d in dims]
    return flops / math.prod(mesh[a] for a in {a for e in (*sharded, *op.outs[0].spec) for a in e})


def _dot(op: Op, mesh: Mapping[str, int], chip: Chip) -> tuple[float, float]:
    left, right, out = op.ins[0], op.ins[1], op.outs[0]
    if left is None or right is None:
        return 0.0, 1.0
    (contracted, other), (batch, _) = op.params["dimension_numbers"]
    free = len(left.shape) - len(contracted) - len(batch)
    first = len(batch)
    axes: set[str] = set()

    def shards(*dims: tuple[Value, int]) -> int:
        """Number of shards along these dims; an axis shards a matmul only once."""
        new = {a for v, d in dims for a in v.spec[d]} - axes
        axes.update(new)
        return math.prod(mesh[a] for a in new)

    def along(v: Value, dims: range) -> float:
        return math.prod(v.shape[d] for d in dims) / shards(*((v, d) for d in dims))

    depth: float = math.prod(left.shape[int(d)] for d in contracted)
    depth /= shards(*((left, int(d)) for d in contracted), *((right, int(d)) for d in other))
    count = along(out, range(first))  # batch dims claim their axes first
    rows = along(out, range(first, first + free))
    columns = along(out, range(first + free, len(out.shape)))
    if min(rows, columns) <= 1:  # a vector product: not on the matrix units
        return 0.0, 1.0
    cores = (chip.compiler or {}).get("cores", 0) if chip.platform == "cuda" else 0
    if cores:
        used = _used(rows, columns, depth, count, cores)
    else:
        used = _filled(rows, columns, depth, chip)
    return _flops(op, mesh), _peak(op, chip) * chip.reached["products"] * used


def _filled(rows: float, columns: float, depth: float, chip: Chip) -> float:
    """The filled share of the matrix units' tiles."""
    dims = sorted((rows, columns, depth))
    full = 1.0
    for n in dims[:2] if chip.platform == "tpu" else dims:
        full *= n / _up(n, chip.tile)
    return full


# Output tiles of a GPU's library, and what a core reaches with each in proportion to the largest: a
# small tile reads more operands per product (NVIDIA, Matrix Multiplication Background User's Guide,
# sections "Tile quantization" and "Tile efficiency"; assumed figures in the range of its plots).
_GPU_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.75, (64, 128): 0.75}
_GPU_DEPTH = 64  # of a tile's step along the contracted dim
_SPLITS = {1: 1.0, 2: 0.9, 4: 0.9, 8: 0.9}  # of the contracted dim, whose parts are summed after it
_SPLIT_DEPTH = 1024  # the least depth of a part


def _used(rows: float, columns: float, depth: float, count: float, cores: int) -> float:
    """The used share of a GPU's cores: its library chooses among tiles, which run in full waves.

    A wave is a tile per core; the last one leaves cores idle ("wave quantization", ibid.).
    """
    best = 0.0
    for (tall, wide), efficiency in _GPU_TILES.items():
        full = rows / _up(rows, tall) * columns / _up(columns, wide)
        tiles = count * _up(rows, tall) / tall * _up(columns, wide) / wide
        for parts, left in _SPLITS.items():
            if parts == 1 or depth >= parts * _SPLIT_DEPTH:
                waves = tiles * parts / _up(tiles * parts, cores)
                best = max(best, full * waves * efficiency * left)
    return best * depth / _up(depth, _GPU_DEPTH)


def _up(n: float, tile: int) -> float:
    return math.ceil(n / tile - 1e-9) * tile


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
    """FLOPs of a kernel: its grid without the blocks that the mask of `ops.attention` skips."""
    if op.name == "pallas_call":
        grid = op.params["grid_mapping"].grid
        if (blocks := computed_blocks(op.scopes)) is not None:
            # Splash's gradient of keys and values has the heads between the blocks' two dims.
            others = (*grid[:-3], grid[-2]) if "splash_mha_dkv" in op.scopes else grid[:-2]
            grid = (*others, blocks)
        return kernel_flops(op.params, count_products, grid)
    if op.name in PALLAS:
        return computed_flops(op.scopes) or 0.0
    query = op.ins[0]
    if query is None:
        return 0.0
    batch, seq, heads, dim = query.shape  # or [batch, heads, seq, dim]
    if op.params.get("layout") == 1:
        heads, seq = seq, heads
    shards = math.prod(mesh[a] for e in query.spec for a in e)
    products = 2 if "fwd" in op.name else 5
    keys = op.ins[1].shape[2 if op.params.get("layout") == 1 else 1] if op.ins[1] else seq
    # cuDNN's window is causal: a query attends to itself and the length - 1 keys before it.
    mask = Mask("CAUSAL" in str(op.params.get("mask_type")), op.params.get("sliding_window_length"))
    seen = mask.share(seq, keys)
    return products * 2 * batch * heads * seq * keys * dim * seen / shards
