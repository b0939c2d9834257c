"""The placement table: for each leaf of the train state, where every role of it lives.

The ZeRO stage says which rows gain the data axis: 1 cuts `master` and `opt`, 2 `grad` as well, 3
also what is read. Under stage 3 one copy is stored, cut (the master, or in pure fp32 the parameter
itself), and layers read it gathered, a unit at a time.

Offload is the memory kind of rows: `master` and `opt` in host memory, or `param` and `grad`. Layers
never read a master from there: stage 3 then stores the parameter as layers read it as well.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxspeed.placement import show
from jaxspeed.placement.rows import (
    AS_MADE,
    HOST,
    ON_DEVICE,
    ROLES,
    Leaf,
    Offload,
    Placement,
    Precision,
    Row,
)
from jaxspeed.placement.rules import ModelSharding, model_sharding, refuse_misfits
from jaxspeed.placement.specs import num_shards, spec_axes
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.zero import ZeroSharding, shard_leaf

# A leaf of the state that is no parameter: (its shape, the shape that is stored, where it lives).
StateLeaf = tuple[tuple[int, ...], tuple[int, ...], Placement]

PIPE = "pipe"
WIDTH = 120  # of the table as text


@dataclass(frozen=True)
class PlacementTable:
    """All rows, and what else the state holds; it prints itself."""

    mesh: Mesh
    stage: int
    rows: Mapping[str, Row]
    opt_leaves: Mapping[str, StateLeaf] = field(default_factory=dict)
    extra: Mapping[str, StateLeaf] = field(default_factory=dict)
    stack: Stack | None = None  # the blocks that the pipe axis cuts

    def __getitem__(self, path: str) -> Row:
        return self.rows[path]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def sharding(self, placement: Placement) -> NamedSharding:
        return placement.sharding(self.mesh)

    @property
    def grads_sharded(self) -> bool:
        """Whether gradients accumulate sharded over `data`: stages 2 and 3."""
        return self.stage >= 2

    def bytes_by_role(self) -> dict[str, tuple[int, int]]:
        """{role: (bytes in all, bytes in a device's own memory)} of what is stored, and of the
        accumulator.

        In all counts each element once, as if one device held the whole state.
        """
        return {role: (whole, own) for role, (whole, own, _) in self._bytes().items()}

    def host_bytes_by_role(self) -> dict[str, int]:
        """{role: bytes that a device has in host memory}, of the roles that have any there."""
        return {role: host for role, (_, _, host) in self._bytes().items() if host}

    def _bytes(self) -> dict[str, tuple[int, int, int]]:
        totals: dict[str, tuple[int, int, int]] = {}

        def add(role: str, shape: Sequence[int], placement: Placement, whole: Any) -> None:
            itemsize = placement.dtype.itemsize
            cut = math.prod(num_shards(entry, self.mesh.shape) for entry in placement.spec)
            here = math.prod(shape) * itemsize // cut
            in_host = placement.memory_kind == HOST
            old = totals.get(role, (0, 0, 0))
            totals[role] = (
                old[0] + math.prod(whole) * itemsize,
                old[1] + (0 if in_host else here),
                old[2] + (here if in_host else 0),
            )

        for row in self:
            for role in ROLES[:3]:
                if placement := getattr(row, role):
                    add(role, row.shape(placement), placement, row.leaf.shape)
        for role, leaves in (("opt", self.opt_leaves), ("other", self.extra)):
            for shape, stored_shape, placement in leaves.values():
                add(role, stored_shape, placement, shape)
        return totals

    def with_state(
        self, opt_leaves: Mapping[str, StateLeaf], extra: Mapping[str, StateLeaf]
    ) -> "PlacementTable":
        """The table with a row for each leaf of the optimizer's state and of what else is kept."""
        return replace(self, opt_leaves=dict(opt_leaves), extra=dict(extra))

    def __rich__(self) -> Any:
        cut_over = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        in_host = self.host_bytes_by_role()
        totals = show.totals(self.stage, cut_over, self.bytes_by_role(), in_host)
        return show.together(totals, show.leaves(list(self)))

    def __str__(self) -> str:
        return show.as_text(self, WIDTH)


def build_table(
    leaves: Iterable[Leaf],
    mesh: Mesh,
    *,
    stage: int = 0,
    precision: Precision = AS_MADE,
    persistence_threshold: int = 0,
    stack: Stack | None = None,
    offload: Offload = ON_DEVICE,
) -> PlacementTable:
    """The table for these leaves: what the ZeRO stage, the precision and offload mean for each.

    Under stage 3 a leaf of fewer than `persistence_threshold` elements keeps a full `param` row and
    is otherwise placed as under stage 2.
    """
    leaves = list(leaves)
    refuse_misfits(leaves, mesh.shape)
    device = device_memory_kind(mesh)
    moved = _offloaded(leaves, offload.optimizer)

    def param(leaf: Leaf) -> str:
        stays = math.prod(leaf.shape[leaf.stacked :]) < persistence_threshold
        return HOST if offload.param and not stays else device

    rows = {
        leaf.path: _row(
            leaf,
            mesh,
            stage,
            precision,
            persistence_threshold,
            _Memories(
                param(leaf),
                # The stages of a pipeline add to gradients in each tick.
                param(leaf) if mesh.shape[PIPE] == 1 else device,
                HOST if leaf.path in moved else device,
                device,
            ),
            stack,
        )
        for leaf in leaves
    }
    return PlacementTable(mesh, stage, rows, stack=stack)


@dataclass(frozen=True)
class _Memories:
    """The memory kinds of one leaf's roles."""

    param: str
    grad: str
    optimizer: str  # master and moments
    read: str


def _offloaded(leaves: Sequence[Leaf], share: float) -> set[str]:
    """The largest trained leaves, until they hold this share of the bytes of all."""
    trained = [leaf for leaf in leaves if leaf.trainable]
    sizes = {x.path: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in trained}
    wanted, found = share * sum(sizes.values()), set[str]()
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        if wanted <= 0:
            break
        found.add(path)
        wanted -= sizes[path]
    return found


def device_memory_kind(mesh: Mesh) -> str:
    """The name of the devices' own memory: `device` where compile-only devices do not tell."""
    try:
        return mesh.devices.flat[0].default_memory().kind
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return "device"


def _row(
    leaf: Leaf,
    mesh: Mesh,
    stage: int,
    precision: Precision,
    threshold: int,
    memories: _Memories,
    stack: Stack | None,
) -> Row:
    model = model_sharding(leaf.shape, leaf.names, mesh.shape)
    notes = [model.note]
    if stage == 3 and math.prod(leaf.shape) < threshold:
        stage = 2
        notes.append(f"whole: fewer than {threshold:,} elements")
    kept, cut = _cuts(leaf, model, mesh, stack)
    if PIPE in spec_axes(kept.spec) - spec_axes(model.spec):
        notes.append("cut over pipe for storage")
    shapes = {model.spec: model.stored_shape, kept.spec: kept.stored_shape}
    shapes |= {cut.spec: cut.stored_shape} if stage else {}
    stored = cut.stored_shape if stage else kept.stored_shape
    sizes = enumerate(zip(leaf.shape, stored, strict=True))
    notes += [f"dim {dim} padded {a} -> {b}" for dim, (a, b) in sizes if a != b]
    note = ", ".join(filter(None, notes))

    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):  # there is no 16-bit complex dtype
        precision = AS_MADE
    compute = leaf.dtype if leaf.full_precision else precision.compute or leaf.dtype
    mixed = jnp.dtype(compute) != jnp.dtype(leaf.dtype) and not precision.master_in_compute

    def at(from_stage: int, dtype: Any, memory: str) -> Placement:
        """Cut over data from this stage on."""
        spec = cut.spec if stage >= from_stage else kept.spec
        return Placement(spec, memory, jnp.dtype(dtype))

    read = Placement(model.spec, memories.read, jnp.dtype(compute))
    param: Placement | None = at(3, compute, memories.param)
    if not leaf.trainable:
        return Row(leaf, shapes, read, param, None, None, None, note or "frozen")
    master = at(1, leaf.dtype, memories.optimizer) if mixed else None
    if mixed and stage == 3 and memories.optimizer == memories.param == memories.read:
        param = None  # layers read the master
    wide = precision.grad or jnp.promote_types(leaf.dtype, jnp.float32)
    grad = at(2, wide, memories.grad)
    updated = (master or param or read).dtype
    opt = at(1, precision.opt or updated, memories.optimizer)
    return Row(leaf, shapes, read, param, master, grad, opt, note)


def _cuts(
    leaf: Leaf, model: ModelSharding, mesh: Mesh, stack: Stack | None
) -> tuple[ZeroSharding, ZeroSharding]:
    """How a leaf is stored: without ZeRO, and with its cut.

    Of a stack, the dim of the layers is not ZeRO's to cut. Where the stages do not hold it as it is
    stored, pipe cuts another dim. The parts that data makes are cut again by pipe, so that what
    the stages exchange (`pipeline/stage_layout.py`) leaves them as they are.
    """
    names, sizes = leaf.names, mesh.shape
    kept = ZeroSharding(model.spec, model.stored_shape)
    if stack is None or sizes[PIPE] == 1 or leaf.path not in stack.paths:
        return kept, shard_leaf(kept.stored_shape, kept.spec, names, sizes) or kept
    first = 1 if stack.stacked else 0
    inner = None if stack.in_place else PIPE
    if not stack.in_place:
        kept = shard_leaf(kept.stored_shape, kept.spec, names, sizes, PIPE, first=first) or kept
    cut = shard_leaf(kept.stored_shape, kept.spec, names, sizes, first=first, inner=inner)
    return kept, cut or kept
