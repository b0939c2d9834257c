"""Optimizer update of offloaded state: parameter by parameter, streamed in slices.

A piece is cut from all arrays of a parameter alike: its gradient, moments, master, what is
published to layers, the moving average. It is updated as the whole would be, on the device or on
the host's cores, and each part goes back to where it lay.

What a piece is depends on the optimizer. Where its operations are element-wise, any run of rows
along any dim; where it looks at matrices (LAMB, Muon) a layer of a stack, and else the parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.errors import ConfigError
from jaxspeed.objective import Model
from jaxspeed.objective.train_state import (
    Arrays,
    OptLayout,
    TrainState,
    native_tree,
    owner_of,
    pad,
    unpad,
    wide_dtype,
)
from jaxspeed.offload.per_leaf_update import LeafProgram, Separated, Shared, Slot, separate
from jaxspeed.offload.streaming import StreamedArray, StreamPlan, choose_walk, stream, total
from jaxspeed.offload.update_device import OF_DEVICE, UpdateDevice
from jaxspeed.optim import ema, global_norm
from jaxspeed.optim.skippable_update import guarded
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Row
from jaxspeed.placement.table import PlacementTable

GRAD, UPDATED, READ, EMA, OPT = "grad", "updated", "read", "ema", "opt/"
_ONLY_WRITTEN = (READ,)
_UNSTACKED = 1 << 22  # elements of a piece, where no parameter stacks layers


class Updated(NamedTuple):
    """The parts of a state that an update changes."""

    params: Arrays
    master: Arrays
    opt: Any
    ema: Arrays


@dataclass(frozen=True)
class Streamed:
    """`__call__(grads, factor, state, finite) -> Updated`, for tables with rows in host memory."""

    table: PlacementTable
    model: Model
    layout: OptLayout
    transform: optax.GradientTransformation
    by_layer: bool  # whether the optimizer takes the layers of a stack one by one, and any of them
    ema_decay: float | None
    cores: UpdateDevice = OF_DEVICE  # that update what has anything in host memory

    # -- the optimizer, taken apart ---------------------------------------------------------------

    @cached_property
    def whole(self) -> Separated:
        """The update of whole parameters."""
        return self._separated({})

    def check(self) -> None:
        """ConfigError where the update of one parameter reads another."""
        mixed = self.whole.mixed()
        if mixed:
            slot, others = mixed
            raise ConfigError(_refusal(slot, sorted(others)))

    @cached_property
    def _layered(self) -> Separated:
        """The update of pieces of those whose pieces are layers."""
        shapes = {}
        for row in self._trained:
            walk = self.walk(row, self.lanes(row))
            if walk and not self.whole.leaf(row.path, row.leaf.shape).elementwise:
                shapes[row.path] = walk.piece_shape(row.leaf.shape)
        return self._separated(shapes)

    def _separated(self, shapes: Mapping[str, tuple[int, ...]]) -> Separated:
        """The update traced with these shapes in place of the parameters' own."""
        rows = {row.path: row for row in self._trained}

        def shape_of(path: str | None, own: tuple[int, ...]) -> tuple[int, ...]:
            piece = shapes.get(path or "")
            return piece if piece and path and own == rows[path].leaf.shape else own

        def tree(wide: bool) -> Any:
            flat = {}
            for path, row in rows.items():
                dtype = wide_dtype(row) if wide else row.updated.dtype
                flat[path] = jax.ShapeDtypeStruct(shape_of(path, row.leaf.shape), dtype)
            return native_tree(self.model, flat)

        places = self.layout.places
        opt = jax.tree.unflatten(
            self.layout.tree,
            [
                jax.ShapeDtypeStruct(shape_of(self.owner(path), shape), at.dtype)
                for path, (shape, _, at) in places.items()
            ],
        )
        grads, params = tree(True), tree(False)
        own = [Slot("param", path, path) for path in flat_with_paths(params)]
        states = [Slot("opt", path, self.owner(path)) for path in places]
        inputs = [*(slot._replace(role="grad") for slot in own), *states, *own]

        def update(grads: Any, opt: Any, params: Any) -> Any:
            updates, after = self.transform.update(grads, opt, params)
            return after, optax.apply_updates(params, updates)

        return separate(update, (grads, opt, params), inputs, [*states, *own])

    def owner(self, path: str) -> str | None:
        """The parameter that a leaf of the optimizer's state belongs to."""
        return owner_of(path, self.table.rows)

    # -- pieces -----------------------------------------------------------------------------------

    @property
    def _trained(self) -> list[Row]:
        return [row for row in self.table if row.leaf.trainable]

    @cached_property
    def piece(self) -> int:
        """The elements of one array that a device should hold at once: a layer of the largest."""
        sizes = [
            self._elements(row) // row.leaf.shape[0] for row in self._trained if row.leaf.stacked
        ]
        return max(sizes, default=_UNSTACKED)

    def _elements(self, row: Row) -> int:
        """Of a device, cut as the optimizer's state is."""
        assert row.opt is not None
        at = self.table.sharding(row.opt)
        return math.prod(at.shard_shape(row.shape(row.opt)))

    def lanes(self, row: Row) -> dict[str, StreamedArray]:
        """The arrays of a parameter."""
        assert row.opt is not None and row.grad is not None

        def lane(placement: Any) -> StreamedArray:
            return StreamedArray(row.shape(placement), self.table.sharding(placement))

        moments = lane(row.opt)
        on_device = StreamedArray(moments.shape, moments.at.with_memory_kind(row.read.memory_kind))
        found = {
            GRAD: lane(row.grad) if in_host(row.grad) else on_device,
            UPDATED: lane(row.updated),
        }
        if row.master and row.param:
            read, updated = lane(row.param), found[UPDATED]
            if read.shape == updated.shape and not in_host(read.at):
                # Each device brings what it has, and gathers there.
                read = StreamedArray(read.shape, updated.at.with_memory_kind(row.read.memory_kind))
            found[READ] = read
        if self.ema_decay is not None:
            found[EMA] = moments
        for path, (shape, stored, at) in self.layout.places.items():
            if self.owner(path) == row.path and shape == row.leaf.shape:
                found[OPT + path] = StreamedArray(stored, self.table.sharding(at))
        return found

    def walk(self, row: Row, lanes: Mapping[str, StreamedArray]) -> StreamPlan | None:
        """How a parameter is walked; None where all of it is on the device at once."""
        if not any(in_host(lane.at) for lane in lanes.values()):
            return None
        assert row.opt is not None
        cut = StreamedArray(row.shape(row.opt), self.table.sharding(row.opt))
        if self.whole.leaf(row.path, row.leaf.shape).elementwise:
            return choose_walk(lanes, cut, range(len(row.leaf.shape)), self.piece)
        if self.by_layer and row.leaf.stacked:
            return choose_walk(lanes, cut, range(1), self.piece, even=True)
        return None

    def with_squares(self, seen: jax.Array, row: Row, grad: jax.Array) -> jax.Array:
        """A sum of squares with those of a gradient that waits in host memory.

        In the dtype of an update.
        """
        assert row.grad is not None
        lane = StreamedArray(row.shape(row.grad), self.table.sharding(row.grad))
        walk = choose_walk({GRAD: lane}, lane, range(len(lane.shape)), self.piece)

        def squares(piece: jax.Array) -> jax.Array:
            return global_norm(piece.astype(wide_dtype(row))) ** 2

        if walk is None:
            return seen + on_device(self.cores.compute(squares)(self.cores.brought(grad, lane.at)))
        return total(walk, lane, grad, squares, seen, self.cores)

    # -- the update -------------------------------------------------------------------------------

    def __call__(
        self, grads: Arrays, factor: jax.Array | None, state: TrainState, finite: jax.Array
    ) -> Updated:
        """The state's next parts; `factor` is what gradients are multiplied with, if anything."""
        opt = flat_with_paths(state.opt)
        params, master, average = dict(state.params), dict(state.master), dict(state.ema)
        shared = {
            id(each): each.shared(self._shared_values(each, opt)) for each in self._programs()
        }
        token, turn = jnp.zeros(()), finite
        for row in self._trained:
            arrays = {GRAD: grads[row.path]}
            arrays[UPDATED] = (master if row.master else params)[row.path]
            if row.master and row.param:
                arrays[READ] = params[row.path]
            if self.ema_decay is not None:
                arrays[EMA] = average[row.path]
            arrays |= {OPT + path: x for path, x in opt.items() if self.owner(path) == row.path}
            new, token = _One(self, shared, factor, turn)(row, arrays, token)
            turn = self._after(new[UPDATED], finite, state.step)
            (master if row.master else params)[row.path] = new[UPDATED]
            if READ in new:
                params[row.path] = new[READ]
            if EMA in new:
                average[row.path] = new[EMA]
            opt |= {name.removeprefix(OPT): x for name, x in new.items() if name.startswith(OPT)}
        for path, value in shared[id(self.whole)].outputs().items():
            opt[path] = jnp.where(finite, value, opt[path])
        return Updated(params, master, jax.tree.unflatten(self.layout.tree, opt.values()), average)

    def one(self, row: Row, arrays: Arrays, shared: Shared, factor: Any = None) -> Arrays:
        """What becomes of the arrays of one parameter that is on the device, but the gradient's."""
        keep = jnp.asarray(True)
        return _One(self, {id(self.whole): shared}, factor, keep)(row, arrays, jnp.zeros(()))[0]

    def shared(self, opt: Arrays) -> Shared:
        """What all parameters share, from the optimizer's leaves that are no parameter's."""
        values = [
            opt[s.path] if s.role == "opt" and not s.owner else None for s in self.whole.inputs
        ]
        return self.whole.shared(values)

    def _after(self, last: jax.Array, finite: jax.Array, step: jax.Array) -> jax.Array:
        """`finite`, not before the last parameter's loop is done.

        Simulated devices run loops that wait for nothing of each other in any order, each device in
        another, and these gather and scatter: there each takes something of the last one's result,
        by a condition that never holds.
        """
        if not simulated(self.table.mesh) or not last.size:
            return finite
        first = jax.lax.slice(last, (0,) * last.ndim, (1,) * last.ndim)
        return jnp.where(step < 0, on_device(first).reshape(()) > 0, finite)

    def _programs(self) -> list[Separated]:
        return [self.whole, *([self._layered] if self.by_layer else [])]

    def _shared_values(self, separated: Separated, opt: Arrays) -> list[Any]:
        return [opt[slot.path] if slot.owner is None else None for slot in separated.inputs]


@dataclass(frozen=True)
class _One:
    """The update of one parameter in one step."""

    of: Streamed
    shared: Mapping[int, Shared]
    factor: jax.Array | None
    finite: jax.Array

    def __call__(self, row: Row, arrays: Arrays, token: jax.Array) -> tuple[Arrays, jax.Array]:
        """(what becomes of the arrays but the gradient, what the next parameter waits for)."""
        of = self.of
        lanes = of.lanes(row)
        walk = of.walk(row, lanes)
        program = of.whole.leaf(row.path, row.leaf.shape)
        separated = of.whole
        if walk and not program.elementwise:
            separated = of._layered
            program = separated.leaf(row.path, walk.piece_shape(row.leaf.shape))
        values = [self.shared[id(separated)](var) for var in program.shared]
        if walk is None:
            return self._at_once(row, lanes, program, values, arrays, token)

        def compute(pieces: Arrays, start: Any, rows: int) -> Arrays:
            shape = walk.part_shape(row.leaf.shape, rows)
            fitted = program.on(shape, row.leaf.shape) if program.elementwise else program
            keep = self.finite
            if any(lane.shape[walk.dim] > row.leaf.shape[walk.dim] for lane in lanes.values()):
                inside = walk.positions(start, rows) < row.leaf.shape[walk.dim]
                keep = keep & inside.reshape(-1, *[1] * (len(shape) - walk.dim - 1))
            stored = {n: walk.part_shape(lane.shape, rows) for n, lane in lanes.items()}
            run = of.cores.compute(partial(self._computed, row, stored, fitted, shape))
            return run(pieces, values, self.factor, keep)

        carried = {name: x for name, x in arrays.items() if name != GRAD}
        read = {GRAD: arrays[GRAD]}
        return stream(walk, lanes, read, carried, compute, of.cores, _ONLY_WRITTEN), token

    def _at_once(
        self,
        row: Row,
        lanes: Mapping[str, StreamedArray],
        program: LeafProgram,
        values: list[Any],
        arrays: Arrays,
        token: jax.Array,
    ) -> tuple[Arrays, jax.Array]:
        """All of a parameter, after the one before it."""
        waits = any(in_host(lane.at) for lane in lanes.values())
        cores = self.of.cores if waits else OF_DEVICE
        if waits:
            arrays, token = jax.lax.optimization_barrier((arrays, token))
        pieces = {
            name: cores.brought(x, lanes[name].at) if name in lanes else x
            for name, x in arrays.items()
            if name not in _ONLY_WRITTEN
        }
        stored = {name: lane.shape for name, lane in lanes.items()}
        run = cores.compute(partial(self._computed, row, stored, program, row.leaf.shape))
        made = run(pieces, values, self.factor, self.finite)
        if waits:
            made = {
                name: cores.put_back(x, lanes[name].at) if name in lanes else on_device(x)
                for name, x in made.items()
            }
            made, token = jax.lax.optimization_barrier((made, token))
        return made, token

    def _computed(
        self,
        row: Row,
        stored: Mapping[str, tuple[int, ...]],
        program: LeafProgram,
        shape: tuple[int, ...],
        pieces: Arrays,
        shared: Sequence[Any],
        factor: jax.Array | None,
        keep: jax.Array,
    ) -> Arrays:
        """What becomes of a piece of this shape, padded to how its arrays are `stored`.

        All arrays that it reads are arguments, since whose cores run it is not its business.
        """
        old = {name: unpad(x, shape) if name in stored else x for name, x in pieces.items()}
        grad = old[GRAD].astype(wide_dtype(row))
        if factor is not None:
            grad = grad * factor.astype(grad.dtype)
        names = {"grad": GRAD, "param": UPDATED}
        args = [
            grad if slot.role == "grad" else old[names.get(slot.role, OPT + slot.path)]
            for slot in program.inputs
        ]
        states = [slot for slot in program.outputs if slot.role == "opt"]
        done = guarded(
            program.jaxpr,
            (),
            [*args, *shared],
            [old[OPT + slot.path] for slot in states],
            [old[UPDATED]],
            keep,
        )
        new = {OPT + slot.path: x for slot, x in zip(states, done)}
        new[UPDATED] = done[-1]
        if READ in stored:
            assert row.param is not None
            new[READ] = done[-1].astype(row.param.dtype)
        if EMA in old:
            assert self.of.ema_decay is not None
            average = ema.update(old[EMA], done[-1], self.of.ema_decay)
            new[EMA] = jnp.where(keep, average, old[EMA])
        return {name: pad(x, stored[name]) if name in stored else x for name, x in new.items()}


def _refusal(slot: Slot, others: list[str]) -> str:
    whose = f"{slot.owner}" if slot.owner else f"the optimizer's own {slot.path}"
    return (
        "zero_optimization.offload_optimizer: the optimizer's state is updated a parameter at a "
        f"time, and in this optimizer what becomes of {whose} depends on "
        f"{len(others)} other parameter{'s' if len(others) > 1 else ''} ({others[0]}, ...). What "
        "works: gradient_clipping in the config in place of optax.clip_by_global_norm, and "
        "gradient_accumulation_steps in place of optax.MultiSteps; or leave offload_optimizer out"
    )
