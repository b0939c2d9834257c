"""The placement table: sharding, memory kind and dtype of every role of each train state leaf.

The ZeRO stage selects the roles that are sharded over data: stage 1 `master` and `opt`, 2 also
`grad`, 3 also the copy that layers read. Stage 3 stores one sharded copy (the master, or in pure
fp32 the parameter itself), and layers read it gathered, one unit at a time.

Offload is the memory kind of a row: `master` and `opt` in host memory, or `param` and `grad`; or
`master` and `opt` are on a disk. Layers never read a master from there: stage 3 then also stores
the parameter in compute dtype.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxspeed.axes import PIPE, data_ranks
from jaxspeed.errors import PlacementError
from jaxspeed.placement import show
from jaxspeed.placement.codec import (
    PLAIN,
    AssignsCodecs,
    Codec,
    CodecRule,
    StoredValue,
    codec_of,
)
from jaxspeed.placement.owned import Matrices, OwnedStack, owned_stacks
from jaxspeed.placement.paths import listed
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
from jaxspeed.placement.rules import ModelSharding, model_sharding, nearest, refuse_misfits
from jaxspeed.placement.specs import num_shards, spec_axes
from jaxspeed.placement.stacks import Stack
from jaxspeed.placement.zero import ZeroSharding, shard_leaf


class StateLeaf(NamedTuple):
    """A leaf of the state that is no parameter."""

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    placement: Placement
    stacked: int = 0  # leading dims that stack layers


WIDTH = 120  # of the table as text


@dataclass(frozen=True)
class PlacementTable:
    """All rows, and the other leaves of the state; printable."""

    mesh: Mesh
    stage: int
    rows: Mapping[str, Row]
    opt_leaves: Mapping[str, StateLeaf] = field(default_factory=dict)
    extra: Mapping[str, StateLeaf] = field(default_factory=dict)
    stack: Stack | None = None  # the blocks that are sharded over pipe
    codecs: Sequence[AssignsCodecs] = ()  # of moments and of frozen parameters
    owned: Sequence[OwnedStack] = ()  # matrices that the optimizer computes at their owners

    def __getitem__(self, path: str) -> Row:
        return self.rows[path]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def sharding(self, placement: Placement) -> NamedSharding:
        """A placement as a sharding over the table's mesh."""
        return placement.sharding(self.mesh)

    @cached_property
    def parameters(self) -> Mapping[str, tuple[Row, ...]]:
        """The rows of each parameter of the model: several where ranges of layers are leaves."""
        rows: dict[str, tuple[Row, ...]] = {}
        for row in self:
            rows[row.leaf.parameter] = (*rows.get(row.leaf.parameter, ()), row)
        return rows

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        """The shape of a parameter of the model."""
        first, *more = (row.leaf.shape for row in self.parameters[parameter])
        return (first[0] + sum(shape[0] for shape in more), *first[1:]) if more else first

    def joined(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of rows as those of the model's parameters, by their paths."""
        return {
            parameter: values[rows[0].path]
            if len(rows) == 1
            else jnp.concatenate([values[row.path] for row in rows])
            for parameter, rows in self.parameters.items()
            if rows[0].path in values
        }

    def in_rows(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of parameters of the model as those of their rows."""
        return {
            row.path: values[parameter][row.leaf.range.rows]
            if row.leaf.range
            else values[parameter]
            for parameter in values
            for row in self.parameters[parameter]
        }

    def with_owners(self, asked: Iterable[Mapping[str, Matrices]]) -> "PlacementTable":
        """The table with the stacks of matrices that each function of them is asked for."""
        stacks = [s for leaves in asked for s in owned_stacks(leaves, self.rows, self.mesh)]
        return replace(self, owned=tuple(stacks))

    @property
    def ranks(self) -> int:
        """Number of shards of a batch's samples."""
        return data_ranks(self.mesh.shape)

    @property
    def grads_sharded(self) -> bool:
        """Whether gradients accumulate sharded over the storing axes: stages 2 and 3."""
        return self.stage >= 2

    def bytes_by_role(self) -> dict[str, tuple[int, int]]:
        """{role: (total bytes, device memory bytes per device)} stored, with the grad accumulator.

        The total counts each element once, as if one device held the entire state.
        """
        return {role: (total, device) for role, (total, device, *_) in self._bytes().items()}

    def host_bytes_by_role(self) -> dict[str, int]:
        """{role: bytes in host memory per device}, of the roles that have any there."""
        return {role: host for role, (_, _, host, _) in self._bytes().items() if host}

    def disk_bytes_by_role(self) -> dict[str, int]:
        """{role: bytes on a disk per device}, of the roles that have any there."""
        return {role: disk for role, (*_, disk) in self._bytes().items() if disk}

    def _bytes(self) -> dict[str, tuple[int, int, int, int]]:
        totals: dict[str, tuple[int, int, int, int]] = {}

        def add(role: str, placement: Placement, value: StoredValue) -> None:
            here, in_host = value.device_bytes, placement.memory_kind == HOST
            total, device, host, disk = totals.get(role, (0, 0, 0, 0))
            totals[role] = (
                total + value.total_bytes,
                device + (0 if in_host or placement.disk else here),
                host + (here if in_host and not placement.disk else 0),
                disk + (here if placement.disk else 0),
            )

        for row in self:
            for role in ROLES[:3]:
                if placement := getattr(row, role):
                    add(role, placement, row.stored(placement, self.mesh))
        for role, leaves in (("opt", self.opt_leaves), ("other", self.extra)):
            for leaf in leaves.values():
                add(role, leaf.placement, self.stored_leaf(leaf))
        return totals

    def stored_leaf(self, leaf: StateLeaf) -> StoredValue:
        """The arrays of a leaf of the state that is no parameter."""
        at = leaf.placement
        sharding = self.sharding(at)
        return StoredValue(leaf.shape, leaf.padded, at.dtype, sharding, at.codec, leaf.stacked)

    def stored(self, row: Row, placement: Placement) -> StoredValue:
        """The arrays of one role of a parameter."""
        return row.stored(placement, self.mesh)

    def with_state(
        self, opt_leaves: Mapping[str, StateLeaf], extra: Mapping[str, StateLeaf]
    ) -> "PlacementTable":
        """Add the placements of the optimizer's state and of the other state leaves."""
        return replace(self, opt_leaves=dict(opt_leaves), extra=dict(extra))

    def __rich__(self) -> Any:
        sharded_over = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        elsewhere = self.host_bytes_by_role(), self.disk_bytes_by_role()
        totals = show.totals(self.stage, sharded_over, self.bytes_by_role(), *elsewhere)
        parts = [totals, show.leaves(list(self))]
        if self.owned:
            parts.append(show.owned_matrices(self.owned))
        if others := self._opt_leaves_of_other_shapes():
            parts.append(show.other_state(others))
        return show.together(*parts)

    def _opt_leaves_of_other_shapes(self) -> list[tuple[str, Sequence[int], Placement, int]]:
        """(path, shape, placement, bytes per device) of the optimizer's state that is no moment."""
        others: list[tuple[str, Sequence[int], Placement, int]] = []
        for path, (shape, _, at, _) in self.opt_leaves.items():
            is_moment = any(
                path.endswith(f"/{row.path}") and row.leaf.shape == tuple(shape) for row in self
            )
            if math.prod(shape) > 1 and not is_moment:
                shards = math.prod(num_shards(entry, self.mesh.shape) for entry in at.spec)
                others.append((path, shape, at, math.prod(shape) * at.dtype.itemsize // shards))
        return others

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
    codecs: Sequence[AssignsCodecs] = (),
) -> PlacementTable:
    """Build the table: apply ZeRO stage, precision, offload and codecs to each leaf.

    Under stage 3 a leaf of fewer than `persistence_threshold` elements has an unsharded `param` and
    is otherwise placed as under stage 2.
    """
    leaves = list(leaves)
    refuse_misfits(leaves, mesh.shape)
    _refuse_codecs(codecs, leaves, stack)
    device = device_memory_kind(mesh)
    offloaded = _offloaded(leaves, offload.optimizer)

    def param(leaf: Leaf) -> str:
        persists = math.prod(leaf.shape[leaf.stacked :]) < persistence_threshold
        return HOST if offload.param and not persists else device

    rows = {
        leaf.path: _row(
            leaf,
            mesh,
            stage,
            precision,
            persistence_threshold,
            _Memories(
                param(leaf),
                # Pipeline stages add to gradients in each tick.
                param(leaf) if mesh.shape[PIPE] == 1 else device,
                HOST if leaf.path in offloaded and offload.on_host else device,
                device,
                offload.disk and leaf.path in offloaded,
            ),
            stack,
            codecs,
        )
        for leaf in leaves
    }
    return PlacementTable(mesh, stage, rows, stack=stack, codecs=tuple(codecs))


def _refuse_codecs(
    codecs: Sequence[AssignsCodecs], leaves: Sequence[Leaf], stack: Stack | None
) -> None:
    """Raise PlacementError for a codec of nothing, of what is trained, or of stages."""
    for rule in (rule for rule in codecs if isinstance(rule, CodecRule)):
        if rule.role == "param" and not any(rule.covers(leaf.path) for leaf in leaves):
            raise PlacementError(
                f"the codec {rule.codec.name}: no parameter matches {rule.pattern!r}; nearest: "
                + listed(nearest(rule.pattern, [leaf.path for leaf in leaves]))
            )
    for leaf in leaves:
        codec = codec_of(codecs, "param", leaf.path)
        if codec == PLAIN:
            continue
        if leaf.trainable:
            raise PlacementError(
                f"the codec {codec.name} of {leaf.path}, which is trained: a codec encodes frozen "
                "parameters and moments. Freeze it (optimizer.groups, or trainable=), or let the "
                "pattern not match it"
            )
        if stack and leaf.path in stack.paths and stack.cannot_be_encoded(leaf.path):
            raise PlacementError(
                f"the codec {codec.name} of {leaf.path}: mesh.pipe has unlike stages, or layers "
                "that are no first dim, whose parameters are stored as plain arrays; use mesh.pipe "
                "1, or stack the layers along the first dim"
            )


@dataclass(frozen=True)
class _Memories:
    """Memory kinds of one leaf's roles."""

    param: str
    grad: str
    optimizer: str  # master and moments
    read: str
    disk: bool  # whether master and moments are on a disk


def _offloaded(leaves: Sequence[Leaf], share: float) -> set[str]:
    """Paths of the largest trained leaves that together hold this share of all bytes."""
    trained = [leaf for leaf in leaves if leaf.trainable]
    sizes = {x.path: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in trained}
    wanted, offloaded = share * sum(sizes.values()), set[str]()
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        if wanted <= 0:
            break
        offloaded.add(path)
        wanted -= sizes[path]
    return offloaded


def device_memory_kind(mesh: Mesh) -> str:
    """Memory kind of device memory: `device` where compile-only devices do not report it."""
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
    codecs: Sequence[AssignsCodecs],
) -> Row:
    model = model_sharding(leaf.shape, leaf.names, mesh.shape)
    notes = [model.note]
    if stage == 3 and math.prod(leaf.shape) < threshold:
        stage = 2
        notes.append(f"replicated: fewer than {threshold:,} elements")
    codec = codec_of(codecs, "opt" if leaf.trainable else "param", leaf.path)
    base, zero = _storage(leaf, model, mesh, stack, codec.multiples(leaf.shape))
    if PIPE in spec_axes(base.spec) - spec_axes(model.spec):
        notes.append("sharded over pipe for storage")
    shapes = {model.spec: model.stored_shape, base.spec: base.stored_shape}
    shapes |= {zero.spec: zero.stored_shape} if stage else {}
    stored = zero.stored_shape if stage else base.stored_shape
    sizes = enumerate(zip(leaf.shape, stored, strict=True))
    notes += [f"dim {dim} padded {a} -> {b}" for dim, (a, b) in sizes if a != b]
    frozen = "" if leaf.trainable or any(notes) else "frozen"
    also = f"also {listed(leaf.shared)}" if leaf.shared else ""
    note = ", ".join(filter(None, [*notes, frozen, also]))

    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):  # there is no 16-bit complex dtype
        precision = AS_MADE
    compute = leaf.dtype if leaf.full_precision else precision.compute or leaf.dtype
    mixed = jnp.dtype(compute) != jnp.dtype(leaf.dtype) and not precision.master_in_compute

    def at(
        from_stage: int, dtype: Any, memory: str, codec: Codec = PLAIN, disk: bool = False
    ) -> Placement:
        """Shard over data from this ZeRO stage on."""
        spec = zero.spec if stage >= from_stage else base.spec
        return Placement(spec, memory, jnp.dtype(dtype), codec, disk)

    read = Placement(model.spec, memories.read, jnp.dtype(compute))
    param: Placement | None
    param = at(3, compute, memories.param, PLAIN if leaf.trainable else codec)
    if not leaf.trainable:
        return Row(leaf, shapes, read, param, None, None, None, note)
    disk = memories.disk
    master = at(1, leaf.dtype, memories.optimizer, disk=disk) if mixed else None
    in_place = memories.optimizer == memories.param == memories.read and not disk
    if mixed and stage == 3 and in_place:
        param = None  # layers read the master
    wide = precision.grad or jnp.promote_types(leaf.dtype, jnp.float32)
    grad = at(2, wide, memories.grad)
    updated = (master or param or read).dtype
    opt = at(1, precision.opt or updated, memories.optimizer, codec, disk)
    return Row(leaf, shapes, read, param, master, grad, opt, note)


def _storage(
    leaf: Leaf, model: ModelSharding, mesh: Mesh, stack: Stack | None, multiples: Sequence[int]
) -> tuple[ZeroSharding, ZeroSharding]:
    """Compute the storage sharding of a leaf: (without ZeRO, with ZeRO).

    ZeRO does not shard the layers dim of a stack. A stack that is not in place has another dim
    sharded over pipe, inside of data's shards, so that the stages' exchange
    (`pipeline/stage_layout.py`) leaves those unchanged.
    """
    names, sizes = leaf.names, mesh.shape
    base = ZeroSharding(model.spec, model.stored_shape)
    if stack is None or sizes[PIPE] == 1 or leaf.path not in stack.paths:
        zero = shard_leaf(base.stored_shape, base.spec, names, sizes, multiples=multiples)
        return base, zero or base
    kept = stack.layers_dim(leaf.path)
    inner = None if stack.in_place else PIPE
    if not stack.in_place:
        over = base.stored_shape, base.spec, names, sizes, (PIPE,)
        base = shard_leaf(*over, kept=kept, multiples=multiples) or base
    zero = shard_leaf(
        base.stored_shape, base.spec, names, sizes, kept=kept, inner=inner, multiples=multiples
    )
    return base, zero or base
