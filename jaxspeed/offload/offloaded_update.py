"""Optimizer update of offloaded and of encoded state: parameter by parameter, streamed in slices.

The same slice of all arrays of a parameter (gradient, moments, master, compute-dtype copy, moving
average) is updated on the device or on the host's cores, and written back to where each is stored.

The optimizer determines the slices: any rows along any dim where its operations are element-wise;
one layer of a stack where it needs full matrices (LAMB, Muon); otherwise the entire parameter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxspeed.errors import ConfigError
from jaxspeed.offload.per_leaf_update import LeafProgram, Separated, Shared, Slot, separate
from jaxspeed.offload.streaming import StreamedArray, StreamPlan, choose_stream_plan, stream, total
from jaxspeed.offload.update_device import ON_DEVICE, UpdateDevice
from jaxspeed.optim import ema, global_norm
from jaxspeed.optim.skippable_update import guarded
from jaxspeed.placement.codec import PLAIN, StoredValue, pad, parts_of, unpad
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.placement.mesh import simulated
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Row
from jaxspeed.placement.table import PlacementTable
from jaxspeed.train_state.opt_layout import OptLayout, owner_of
from jaxspeed.train_state.state import Arrays, TrainState, native_tree, wide_dtype
from jaxspeed.user_models import Model

GRAD, UPDATED, READ, EMA, OPT = "grad", "updated", "read", "ema", "opt/"
_ONLY_WRITTEN = (READ,)
_UNSTACKED = 1 << 22  # elements of a slice, where no parameter stacks layers


class Updated(NamedTuple):
    """The fields of a train state that an update replaces."""

    params: Arrays
    master: Arrays
    opt: Any
    ema: Arrays


@dataclass(frozen=True)
class StreamedUpdate:
    """`__call__(grads, factor, state, finite) -> Updated`, of state in host memory or encoded."""

    table: PlacementTable
    model: Model
    layout: OptLayout
    transform: optax.GradientTransformation
    by_layer: bool  # whether the optimizer updates each layer of a stack independently
    ema_decay: float | None
    cores: UpdateDevice = ON_DEVICE  # for parameters with any array in host memory
    bucket: int | None = None  # elements per device of a bucket, if state is on a disk

    # -- the optimizer, separated per parameter ---------------------------------------------------

    @cached_property
    def full_update(self) -> Separated:
        """The traced update of unsliced parameters."""
        return self._separated({})

    def check(self) -> None:
        """Raise ConfigError where the update of one parameter reads another."""
        mixed = self.full_update.mixed()
        if mixed:
            slot, others = mixed
            raise ConfigError(_refusal(slot, sorted(others)))

    @cached_property
    def _layer_update(self) -> Separated:
        """The traced update with layers in place of the stacks that are streamed by layer."""
        shapes = {}
        for row in self.trained:
            plan = self.plan(row, self.layouts(row))
            if plan and not self.full_update.leaf(row.path, row.leaf.shape).elementwise:
                shapes[row.path] = plan.slice_shape(row.leaf.shape)
        return self._separated(shapes)

    def _separated(self, shapes: Mapping[str, tuple[int, ...]]) -> Separated:
        """The update traced with `shapes` overriding the shapes of parameters."""
        rows = {row.path: row for row in self.trained}

        def shape_of(path: str | None, shape: tuple[int, ...]) -> tuple[int, ...]:
            part = shapes.get(path or "")
            return part if part and path and shape == rows[path].leaf.shape else shape

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
                jax.ShapeDtypeStruct(shape_of(self.owner(path), leaf.shape), leaf.placement.dtype)
                for path, leaf in places.items()
            ],
        )
        grads, params = tree(True), tree(False)
        param_slots = [Slot("param", path, path) for path in flat_with_paths(params)]
        states = [Slot("opt", path, self.owner(path)) for path in places]
        inputs = [*(slot._replace(role="grad") for slot in param_slots), *states, *param_slots]

        def update(grads: Any, opt: Any, params: Any) -> Any:
            by_leaf = replace(self.table, owned=())
            updates, after = self.transform.update(grads, opt, params, placements=by_leaf)
            return after, optax.apply_updates(params, updates)

        return separate(update, (grads, opt, params), inputs, [*states, *param_slots])

    def owner(self, path: str) -> str | None:
        """The parameter to which a leaf of the optimizer state belongs."""
        return owner_of(path, self.table.rows)

    # -- slices -----------------------------------------------------------------------------------

    @property
    def trained(self) -> list[Row]:
        return [row for row in self.table if row.leaf.trainable]

    @cached_property
    def slice_elements(self) -> int:
        """Elements of an array that a device should hold at once: a layer of the largest stack."""
        if self.bucket is not None:
            return self.bucket
        sizes = [
            self.elements(row) // row.leaf.shape[0] for row in self.trained if row.leaf.stacked
        ]
        return max(sizes, default=_UNSTACKED)

    def elements(self, row: Row) -> int:
        """Elements per device, sharded as the optimizer state."""
        assert row.opt is not None
        at = self.table.sharding(row.opt)
        return math.prod(at.shard_shape(row.shape(row.opt)))

    def layouts(self, row: Row) -> dict[str, StreamedArray]:
        """Shape and sharding of each array of a parameter."""
        assert row.opt is not None and row.grad is not None

        def layout(placement: Any) -> StreamedArray:
            return StreamedArray(row.shape(placement), self.table.sharding(placement))

        moments = layout(row.opt)
        on_device = StreamedArray(moments.shape, moments.at.with_memory_kind(row.read.memory_kind))
        layouts = {
            GRAD: layout(row.grad) if in_host(row.grad) else on_device,
            UPDATED: layout(row.updated),
        }
        if row.master and row.param:
            read, updated = layout(row.param), layouts[UPDATED]
            if read.shape == updated.shape and not in_host(read.at):
                # Each device fetches its shard, and gathers in device memory.
                read = StreamedArray(read.shape, updated.at.with_memory_kind(row.read.memory_kind))
            layouts[READ] = read
        if self.ema_decay is not None:
            layouts[EMA] = moments
        for path, value in self.layout.values.items():
            if self.owner(path) == row.path and value.shape == row.leaf.shape:
                arrays = parts_of(OPT + path, value.arrays)
                layouts |= {name: StreamedArray(x.shape, x.sharding) for name, x in arrays.items()}
        return layouts

    def encoded(self, row: Row) -> dict[str, StoredValue]:
        """The moments of a parameter that a codec stores."""
        values = self.layout.values.items()
        moments = {OPT + path: value for path, value in values if self.owner(path) == row.path}
        return {name: value for name, value in moments.items() if value.codec != PLAIN}

    def plan(self, row: Row, layouts: Mapping[str, StreamedArray]) -> StreamPlan | None:
        """How a parameter is streamed; None where all of it is updated at once.

        Encoded moments are too: their values are computed before a block's scale is known, and
        stay in memory until its codes are.
        """
        encoded = self.encoded(row).values()
        assert row.opt is not None
        is_streamed = row.opt.disk or any(in_host(layout.at) for layout in layouts.values())
        if not encoded and not is_streamed:
            return None
        sharded = StreamedArray(row.shape(row.opt), self.table.sharding(row.opt))
        parts = [part for value in encoded for part in value.parts.values()]
        dims = [
            dim
            for dim in range(len(row.leaf.shape))
            if all(part.blocks[dim : dim + 1] == (1,) for part in parts)
        ]
        if self.full_update.leaf(row.path, row.leaf.shape).elementwise:
            return choose_stream_plan(layouts, sharded, dims, self.slice_elements)
        shapes = {v.shape for path, v in self.layout.values.items() if self.owner(path) == row.path}
        if self.by_layer and row.leaf.stacked and shapes <= {row.leaf.shape}:
            layers = [dim for dim in dims if dim == 0]
            return choose_stream_plan(layouts, sharded, layers, self.slice_elements, even=True)
        return None

    def with_squares(self, seen: jax.Array, row: Row, grad: jax.Array) -> jax.Array:
        """Add to a sum of squares those of a gradient in host memory, in the update's dtype."""
        assert row.grad is not None
        layout = StreamedArray(row.shape(row.grad), self.table.sharding(row.grad))
        plan = choose_stream_plan(
            {GRAD: layout}, layout, range(len(layout.shape)), self.slice_elements
        )

        def squares(part: jax.Array) -> jax.Array:
            return global_norm(part.astype(wide_dtype(row))) ** 2

        if plan is None:
            return seen + on_device(self.cores.compute(squares)(self.cores.fetch(grad, layout.at)))
        return total(plan, layout, grad, squares, seen, self.cores)

    # -- the update -------------------------------------------------------------------------------

    def __call__(
        self, grads: Arrays, factor: jax.Array | None, state: TrainState, finite: jax.Array
    ) -> Updated:
        """The updated state; `factor` multiplies the gradients, where it is not None."""
        opt = self.layout.flat(state.opt)
        params, master, average = dict(state.params), dict(state.master), dict(state.ema)
        shared = {
            id(program): program.shared(self._shared_values(program, opt))
            for program in self._programs()
        }
        token, ready = jnp.zeros(()), finite
        fields = Updated(params, master, opt, average)
        for row in self.trained:
            arrays = {GRAD: grads[row.path], **self.arrays_of(row, fields)}
            updated, token = _ParameterUpdate(self, shared, factor, ready)(row, arrays, token)
            ready = self._after(updated[UPDATED], finite, state.step)
            self.put(row, fields, updated)
        for path, value in shared[id(self.full_update)].outputs().items():
            opt[path] = jnp.where(finite, value, opt[path])
        return Updated(params, master, jax.tree.unflatten(self.layout.tree, opt.values()), average)

    def arrays_of(self, row: Row, fields: Updated) -> Arrays:
        """The arrays of a parameter by name, without its gradient; `fields.opt` is flat."""
        arrays = {UPDATED: (fields.master if row.master else fields.params)[row.path]}
        if row.master and row.param:
            arrays[READ] = fields.params[row.path]
        if self.ema_decay is not None:
            arrays[EMA] = fields.ema[row.path]
        for path in self.states[row.path]:
            arrays |= parts_of(OPT + path, fields.opt[path])
        return arrays

    def put(self, row: Row, fields: Updated, updated: Arrays) -> None:
        """Replace the arrays of a parameter that were updated; `fields.opt` is flat."""
        if UPDATED in updated:
            (fields.master if row.master else fields.params)[row.path] = updated[UPDATED]
        if READ in updated:
            fields.params[row.path] = updated[READ]
        if EMA in updated:
            fields.ema[row.path] = updated[EMA]
        for path in self.states[row.path]:
            old = parts_of(OPT + path, fields.opt[path])
            new = [updated.get(name, x) for name, x in old.items()]
            is_encoded = isinstance(fields.opt[path], dict)
            fields.opt[path] = dict(zip(fields.opt[path], new)) if is_encoded else new[0]

    @cached_property
    def states(self) -> dict[str, list[str]]:
        """The paths of each parameter's leaves of the optimizer's state."""
        states: dict[str, list[str]] = {row.path: [] for row in self.trained}
        for path in self.layout.places:
            if (owner := self.owner(path)) in states:
                states[owner].append(path)
        return states

    # -- buckets on a disk ------------------------------------------------------------------------

    def update_rows(
        self,
        pieces: Sequence[tuple[str, int | None]],
        stored: Sequence[Arrays],
        carried: Mapping[str, Arrays],
        grads: Arrays,
        opt: Arrays,
        factor: jax.Array | None,
        starts: Sequence[jax.Array],
    ) -> tuple[list[Arrays], dict[str, Arrays]]:
        """(the updated rows of what is on a disk, the other arrays with theirs); traced.

        Args:
          pieces: (path, number of rows, or None for an entire parameter).
          stored: the rows on the disk, of each piece by name.
          carried: the other arrays of each parameter.
          opt: the optimizer's leaves that belong to no parameter.
          starts: the first row of each piece.
        """
        shared = {
            id(program): program.shared(self._shared_values(program, opt))
            for program in self._programs()
        }
        update = _ParameterUpdate(self, shared, factor, jnp.asarray(True))
        rows_after, arrays_after = list[Arrays](), {path: dict(x) for path, x in carried.items()}
        for (path, rows), on_disk, start in zip(pieces, stored, starts, strict=True):
            row = self.table[path]
            updated = update.on_rows(
                row, on_disk, {GRAD: grads[path], **arrays_after[path]}, start, rows
            )
            rows_after.append({name: updated[name] for name in on_disk})
            arrays_after[path] = {name: updated[name] for name in arrays_after[path]}
        return rows_after, arrays_after

    def update_one(self, row: Row, arrays: Arrays, shared: Shared, factor: Any = None) -> Arrays:
        """The updated arrays, without the gradient, of one parameter in device memory."""
        keep = jnp.asarray(True)
        return _ParameterUpdate(self, {id(self.full_update): shared}, factor, keep)(
            row, arrays, jnp.zeros(())
        )[0]

    def shared(self, opt: Arrays) -> Shared:
        """Values shared by all parameters, from the optimizer leaves that belong to none."""
        values = [
            opt[s.path] if s.role == "opt" and not s.owner else None
            for s in self.full_update.inputs
        ]
        return self.full_update.shared(values)

    def _after(self, last: jax.Array, finite: jax.Array, step: jax.Array) -> jax.Array:
        """`finite`, with a data dependency on the last parameter's loop on simulated devices.

        Simulated devices run independent loops in any order, each device in another, and these
        loops contain collectives, which would deadlock. The dependency is a condition that never
        holds.
        """
        if not simulated(self.table.mesh) or not last.size:
            return finite
        first = jax.lax.slice(last, (0,) * last.ndim, (1,) * last.ndim)
        return jnp.where(step < 0, on_device(first).reshape(()) > 0, finite)

    def _programs(self) -> list[Separated]:
        return [self.full_update, *([self._layer_update] if self.by_layer else [])]

    def _shared_values(self, separated: Separated, opt: Arrays) -> list[Any]:
        return [opt[slot.path] if slot.owner is None else None for slot in separated.inputs]


@dataclass(frozen=True)
class _ParameterUpdate:
    """The update of one parameter in one step."""

    of: StreamedUpdate
    shared: Mapping[int, Shared]
    factor: jax.Array | None
    finite: jax.Array

    def __call__(self, row: Row, arrays: Arrays, token: jax.Array) -> tuple[Arrays, jax.Array]:
        """The updated arrays without the gradient, and the token for the next parameter."""
        of = self.of
        layouts = of.layouts(row)
        plan = of.plan(row, layouts)
        if plan is None:
            return self._at_once(row, layouts, *self._program(row, None), arrays, token)
        carried = {name: x for name, x in arrays.items() if name != GRAD}
        read, compute = {GRAD: arrays[GRAD]}, self._on_slices(row, layouts, plan)
        return stream(plan, layouts, read, carried, compute, of.cores, _ONLY_WRITTEN), token

    def on_rows(
        self, row: Row, on_disk: Arrays, arrays: Arrays, start: jax.Array, rows: int | None
    ) -> Arrays:
        """The updated rows of arrays on a disk, and the other arrays with theirs."""
        of, layouts = self.of, self.of.layouts(row)
        plan = of.plan(row, layouts)
        if plan is None:
            return self._at_once(
                row, layouts, *self._program(row, None), on_disk | arrays, jnp.zeros(())
            )[0]
        assert rows is not None
        slices = dict(on_disk)
        for name, x in arrays.items():
            if name not in _ONLY_WRITTEN:
                slices[name] = plan.fetch(x, layouts[name], start, rows, of.cores)
        updated = self._on_slices(row, layouts, plan)(slices, start, rows)
        return {
            name: x
            if name in on_disk
            else plan.write(arrays[name], layouts[name], start, x, of.cores)
            for name, x in updated.items()
        }

    def _program(self, row: Row, plan: StreamPlan | None) -> tuple[LeafProgram, list[Any]]:
        """The update of a parameter, or of a slice of it, and the shared values that it reads."""
        separated = self.of.full_update
        program = separated.leaf(row.path, row.leaf.shape)
        if plan and not program.elementwise:
            separated = self.of._layer_update
            program = separated.leaf(row.path, plan.slice_shape(row.leaf.shape))
        return program, [self.shared[id(separated)](var) for var in program.shared]

    def _on_slices(
        self, row: Row, layouts: Mapping[str, StreamedArray], plan: StreamPlan
    ) -> Callable[[Arrays, Any, int], Arrays]:
        """`compute(slices, start, rows)`: the updated slices."""
        of, (program, values) = self.of, self._program(row, plan)

        def compute(slices: Arrays, start: Any, rows: int) -> Arrays:
            shape = plan.slice_shape(row.leaf.shape, rows)
            fitted = program.on_slice(shape, row.leaf.shape) if program.elementwise else program
            keep = self.finite
            if any(
                layout.shape[plan.dim] > row.leaf.shape[plan.dim] for layout in layouts.values()
            ):
                inside = plan.positions(start, rows) < row.leaf.shape[plan.dim]
                keep = keep & inside.reshape(-1, *[1] * (len(shape) - plan.dim - 1))
            stored = {n: plan.slice_shape(layout.shape, rows) for n, layout in layouts.items()}
            run = of.cores.compute(partial(self._computed, row, stored, fitted, shape))
            return run(slices, values, self.factor, keep)

        return compute

    def _at_once(
        self,
        row: Row,
        layouts: Mapping[str, StreamedArray],
        program: LeafProgram,
        values: list[Any],
        arrays: Arrays,
        token: jax.Array,
    ) -> tuple[Arrays, jax.Array]:
        """Update an entire parameter at once, after the parameter before it."""
        offloaded = any(in_host(layout.at) for layout in layouts.values())
        cores = self.of.cores if offloaded else ON_DEVICE
        if offloaded:
            arrays, token = jax.lax.optimization_barrier((arrays, token))
        slices = {
            name: cores.fetch(x, layouts[name].at) if name in layouts else x
            for name, x in arrays.items()
            if name not in _ONLY_WRITTEN
        }
        stored = {name: layout.shape for name, layout in layouts.items()}
        run = cores.compute(partial(self._computed, row, stored, program, row.leaf.shape))
        results = run(slices, values, self.factor, self.finite)
        if offloaded:
            results = {
                name: cores.store(x, layouts[name].at) if name in layouts else on_device(x)
                for name, x in results.items()
            }
            results, token = jax.lax.optimization_barrier((results, token))
        return results, token

    def _computed(
        self,
        row: Row,
        stored: Mapping[str, tuple[int, ...]],
        program: LeafProgram,
        shape: tuple[int, ...],
        slices: Arrays,
        shared: Sequence[Any],
        factor: jax.Array | None,
        keep: jax.Array,
    ) -> Arrays:
        """The update of a slice of this shape, padded to the `stored` shapes of its arrays.

        All arrays that it reads are arguments, so that it runs on the device and on the host.
        """
        encoded = self.of.encoded(row)
        slices = dict(slices)
        parts = {
            name: {part: slices.pop(f"{name}/{part}") for part in value.arrays}
            for name, value in encoded.items()
        }
        padded = {name: v.codec.decode(parts[name], shape, v.dtype) for name, v in encoded.items()}
        old = {name: unpad(x, shape) if name in stored else x for name, x in slices.items()}
        old |= {name: unpad(x, shape) for name, x in padded.items()}
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
        updated = {OPT + slot.path: x for slot, x in zip(states, done)}
        updated[UPDATED] = done[-1]
        if READ in stored:
            assert row.param is not None
            updated[READ] = done[-1].astype(row.param.dtype)
        if EMA in old:
            assert self.of.ema_decay is not None
            average = ema.update(old[EMA], done[-1], self.of.ema_decay)
            updated[EMA] = jnp.where(keep, average, old[EMA])
        for name, value in encoded.items():
            new = pad(updated.pop(name), padded[name].shape)
            like = {
                part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=value.arrays[part].sharding)
                for part, x in parts[name].items()
            }
            recoded = value.codec.encode(new, shape, like)
            for part, x in recoded.items():  # which may have fewer dims than the value
                mask = keep.reshape(
                    keep.shape[: keep.ndim + x.ndim - len(shape)] if keep.ndim else ()
                )
                updated[f"{name}/{part}"] = jnp.where(mask, x, parts[name][part])
        return {name: pad(x, stored[name]) if name in stored else x for name, x in updated.items()}


def _refusal(slot: Slot, others: list[str]) -> str:
    updated = slot.owner or f"the optimizer's {slot.path}"
    return (
        "zero_optimization.offload_optimizer: offloaded state is updated one parameter at a time, "
        f"and this optimizer's update of {updated} depends on "
        f"{len(others)} other parameter{'s' if len(others) > 1 else ''} ({others[0]}, ...). Use "
        "gradient_clipping of the config instead of optax.clip_by_global_norm, and "
        "gradient_accumulation_steps instead of optax.MultiSteps; or remove offload_optimizer"
    )
