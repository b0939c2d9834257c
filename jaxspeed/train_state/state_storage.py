"""How a run's state is stored on its mesh, and how one is created: drawn, read, or from values."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.disk.disk_array import DiskArray, in_memory, is_on_disk
from jaxspeed.disk.tier import DiskTier
from jaxspeed.errors import ModelError
from jaxspeed.optim import ema, loss_scale
from jaxspeed.placement.codec import PLAIN, Stored, StoredValue, pad, unpad
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.placement.mesh import in_mesh
from jaxspeed.placement.rows import Leaf, Row
from jaxspeed.placement.rules import examples, nearest
from jaxspeed.placement.table import PlacementTable
from jaxspeed.placement.xla_options import init_options
from jaxspeed.train_state.opt_layout import OptLayout
from jaxspeed.train_state.optimizer import RunOptimizer
from jaxspeed.train_state.staged_init import (
    StagedInit,
    compile_in_background,
    is_traced,
    staged_init,
)
from jaxspeed.train_state.state import Arrays, TrainState, native_tree
from jaxspeed.user_models import Model
from jaxspeed.user_models.pretrained_model import Weights


@dataclass(frozen=True)
class StateStorage:
    """The shapes and shardings of a run's state, and fresh ones.

    Attributes:
      layout: of the optimizer's state.
      ring_errors: the shapes of the rings' saved quantization errors.
      tier: the disk that some of it is on.
    """

    table: PlacementTable
    model: Model
    optimizer: RunOptimizer
    layout: OptLayout
    ring_errors: Mapping[str, jax.ShapeDtypeStruct]
    tier: DiskTier | None = None

    @property
    def mesh(self) -> Mesh:
        return self.table.mesh

    @functools.cached_property
    def shapes(self) -> TrainState:
        """The shapes, dtypes and shardings of the state, without arrays."""
        values = {
            path: jax.ShapeDtypeStruct(self.table.shape_of(path), rows[0].leaf.dtype)
            for path, rows in self.table.parameters.items()
        }
        shapes = jax.eval_shape(self._state_of, values, dict(self.model.variables))
        shapes = self._with_disk(shapes)
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            shapes,
            self.shardings,
        )

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        at = self.table.sharding
        stored = self.table.stored
        replicated = NamedSharding(self.mesh, PartitionSpec())
        rows = list(self.table)
        averaged = rows if self.optimizer.ema_decay is not None else []
        state = TrainState(
            step=replicated,
            skipped=replicated,
            params={r.path: stored(r, r.param).shardings for r in rows if r.param},
            master={r.path: stored(r, r.master).shardings for r in rows if r.master},
            opt=self.layout.shardings(),
            ema={r.path: at(r.opt) for r in averaged if r.opt},
            variables=dict.fromkeys(self.model.variables, replicated),
            loss_scale=jax.tree.map(lambda _: replicated, loss_scale.init(self.optimizer.rule)),
            ring_errors={name: x.sharding for name, x in self.ring_errors.items()},
        )
        return self._with_disk(state)

    @functools.cached_property
    def on_disk(self) -> dict[str, DiskArray]:
        """The arrays that are on a disk, by their names in a checkpoint."""
        return self.tier.arrays if self.tier else {}

    def _with_disk(self, state: TrainState) -> TrainState:
        """The state with arrays on a disk in place of what these are."""
        if not self.tier:
            return state

        def replaced(prefix: str, values: Mapping[str, Any]) -> Arrays:
            return {
                path: {
                    part: self.on_disk.get(f"{prefix}/{path}/{part}", y) for part, y in x.items()
                }
                if isinstance(x, dict)
                else self.on_disk.get(f"{prefix}/{path}", x)
                for path, x in values.items()
            }

        opt = replaced("opt", self.layout.flat(state.opt))
        return replace(
            state,
            master=replaced("params", state.master),
            opt=jax.tree.unflatten(self.layout.tree, opt.values()),
            ema=replaced("ema", state.ema),
        )

    def stored_master(self, path: str, x: Any) -> Any:
        """A master as the state has it: written, if it belongs on a disk."""
        place = self.on_disk.get(f"params/{path}")
        return x if place is None or is_on_disk(x) else place.write(x)

    def _state_of(self, values: Arrays, variables: Arrays) -> TrainState:
        params, master, variables = self._as_stored(values, variables)
        rest = in_mesh(self.mesh, self._fresh_rest)(params, master)
        return TrainState(params=params, master=master, variables=variables, **rest)

    def fresh(self, seed: int) -> TrainState:
        """A fresh state, each array created as its shards.

        The model before the rest, so that the memory of random initialization is free before the
        moments are allocated.
        """
        if self.tier is None or is_traced(seed):
            return self._fresh(seed)
        with self.tier.replacing():
            state = self._fresh(seed)
        self.tier.step = 0
        return state

    def _fresh(self, seed: int) -> TrainState:
        at = self.shardings
        if self.model.weights is not None:
            weights = self.model.weights
            there = [row for row in self.table if not row.leaf.adapts]
            rows = [row for row in there if row.leaf.parameter not in weights.initialized]
            params, master = self._read(weights, rows)
            if absent := list(weights.initialized):
                fresh = self._stored_by(lambda seed: self._drawn(seed, absent), absent)(seed)
                params, master = params | fresh[0], master | fresh[1]
            params, master = self._with_adapters(seed, params, master)
            draw = in_mesh(self.mesh, lambda seed: self.model.init(seed)[1])
            variables = staged_init(draw, at.variables, seed)
            for path in self._variables_of(weights):
                shape, dtype = variables[path].shape, variables[path].dtype
                value = weights.read(path, tuple(slice(0, n) for n in shape), dtype)
                variables[path] = jax.device_put(value, at.variables[path], may_alias=False)
        elif self.model.needs_values:
            params, master, variables = self._sharded_one_by_one(*self.model.init(seed))
        else:
            places = (at.params, at.master, at.variables)
            draw = in_mesh(self.mesh, lambda seed: self._as_stored(*self.model.init(seed)))
            drawn = StagedInit(draw, places, seed)
            if not is_traced(seed):
                _ = self.rest  # compiled beside the others
            params, master, variables = drawn(seed)
        if isinstance(self.model, AdaptedModel) and self.model.saved and not is_traced(params):
            shapes = {path: self.table.shape_of(path) for path in self.table.parameters}
            saved = self.placed(self.model.saved.values(shapes))
            params, master = params | saved[0], master | saved[1]
        rest = (self._traced_rest if is_traced(params) else self.rest)(params, master)
        return TrainState(params=params, master=master, variables=variables, **rest)

    @functools.cached_property
    def rest(self) -> Callable[[Arrays, Arrays], dict[str, Any]]:
        """`rest(params, master)`: the fields of a fresh state other than the model's.

        Compiled in the background; in small programs if some are in host memory.
        """
        stored = [{r.path: (r, r.param) for r in self.table if r.param}]
        stored += [{r.path: (r, r.master) for r in self.table if r.master}]
        shapes = [
            {path: self.table.stored(row, at).arrays for path, (row, at) in placements.items()}
            for placements in stored
        ]
        if self.tier or any(map(in_host, jax.tree.leaves(self._shardings_of_rest))):
            return StagedInit(
                in_mesh(self.mesh, self._fresh_rest), self._shardings_of_rest, *shapes
            )
        return compile_in_background(self._traced_rest, *shapes)

    @functools.cached_property
    def _traced_rest(self) -> Any:
        return jax.jit(
            in_mesh(self.mesh, self._fresh_rest),
            out_shardings=self._shardings_of_rest,
            compiler_options=init_options(self.shardings.step),
        )

    @property
    def _shardings_of_rest(self) -> dict[str, Any]:
        names = ("step", "skipped", "opt", "ema", "loss_scale", "ring_errors")
        return {name: getattr(self.shardings, name) for name in names}

    def placed(self, values: Mapping[str, Any], *, onto_disk: bool = True) -> tuple[Arrays, Arrays]:
        """(params, masters) of these values by path, sharded as stored, one parameter at a time.

        Those that belong on a disk replace what is there, or are left out.
        """
        params: Arrays = {}
        master: Arrays = {}
        table = self.table
        for path, value in values.items():
            if path not in table.parameters:
                raise ModelError(
                    f"the model has no parameter {path!r}; it has, for example: "
                    + examples(nearest(path, list(table.parameters)))
                )
            if tuple(np.shape(value)) != (shape := table.shape_of(path)):
                raise ModelError(f"the parameter {path} has shape {shape}; found {np.shape(value)}")
        for path, value in (
            (p, x) for entry in values.items() for p, x in table.in_rows(dict([entry])).items()
        ):
            row = table[path]
            if isinstance(value, np.ma.MaskedArray):  # of a saved adapter, which has some layers
                if np.ma.is_masked(value):
                    continue
                value = value.data
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is not None and (onto_disk or not placement.disk):
                    form = self.table.stored(row, placement)
                    copy = _stored_copy(value, form.dtype, form.padded, form.sharding)
                    stored[path] = _encoded(form)(copy)
            if row.path in master:
                master[row.path] = self.stored_master(row.path, master[row.path])
        return params, master

    def _as_stored(self, values: Arrays, variables: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        params: Arrays = {}
        master: Arrays = {}
        for path, value in self.table.in_rows(values).items():
            row = self.table[path]
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is not None:
                    stored[path] = self.table.stored(row, placement).encode(value)
        return params, master, variables

    def _drawn(self, seed: Any, paths: Sequence[str]) -> Arrays:
        values = self.model.init(seed)[0]
        return {path: values[path] for path in paths}

    def _with_adapters(self, seed: Any, params: Arrays, master: Arrays) -> tuple[Arrays, Arrays]:
        """(params, masters) with first adapters, beside weights that were read."""
        model = self.model
        if not isinstance(model, AdaptedModel):
            return params, master
        of_each = ((adapter.leaf("A"), adapter.leaf("B")) for adapter in model.adapters.values())
        drawn = self._stored_by(model.drawn, [path for paths in of_each for path in paths])(seed)
        return self.with_magnitudes(params | drawn[0], master | drawn[1])

    def with_magnitudes(
        self, params: Arrays, master: Arrays, known: Collection[str] = ()
    ) -> tuple[Arrays, Arrays]:
        """(params, masters) with first magnitudes of these weights, but for those `known`."""
        model = self.model
        adapters = model.adapters.values() if isinstance(model, AdaptedModel) else ()
        measured = [a for a in adapters if a.dora and a.leaf("magnitude") not in known]
        if not measured or not isinstance(model, AdaptedModel):
            return params, master
        reads = {path for a in measured for path in (a.path, a.leaf("A"), a.leaf("B"))}
        stored = {
            row.path: (master if row.master else params)[row.path]
            for row in self.table
            if row.leaf.parameter in reads
        }
        wanted = [a.leaf("magnitude") for a in measured]

        def magnitudes(stored: Arrays) -> Arrays:
            rows = {path: self.table[path] for path in stored}
            values = {p: row.decoded(row.updated, on_device(stored[p])) for p, row in rows.items()}
            values = self.table.joined(values)
            initial = [(a.leaf("magnitude"), a.magnitude(values[a.path], values)) for a in measured]
            return {
                path: x.astype(self.table.parameters[path][0].leaf.dtype) for path, x in initial
            }

        measured_arrays = self._stored_by(magnitudes, wanted)(in_memory(stored))
        return params | measured_arrays[0], master | measured_arrays[1]

    def _stored_by(
        self, function: Callable[..., Arrays], parameters: Sequence[str]
    ) -> Callable[..., tuple[Arrays, Arrays]]:
        """A function of parameters' values, compiled to give them as they are stored."""
        rows = [row.path for path in parameters for row in self.table.parameters[path]]
        at = self.shardings
        places = tuple(
            {
                path: x[path].sharding if is_on_disk(x[path]) else x[path]
                for path in rows
                if path in x
            }
            for x in (at.params, at.master)
        )
        compiled: Callable[..., tuple[Arrays, Arrays]] = jax.jit(
            in_mesh(self.mesh, lambda *args: self._as_stored(function(*args), {})[:2]),
            out_shardings=places,
            compiler_options=init_options(at.step),
        )

        def stored(*args: Any) -> tuple[Arrays, Arrays]:
            params, master = compiled(*args)
            return params, {path: self.stored_master(path, x) for path, x in master.items()}

        return stored if self.tier else compiled

    def _fresh_rest(self, params: Arrays, master: Arrays) -> dict[str, Any]:
        params, master = on_device((params, master))
        trained = {
            # A copy: a transformation may store it unchanged, and no two arrays may share a buffer.
            row.path: jnp.copy(unpad((master if row.master else params)[row.path], row.leaf.shape))
            for row in self.table
            if row.leaf.trainable
        }
        opt = self.layout.stored(self.optimizer.transform.init(native_tree(self.model, trained)))
        average: Arrays = {}
        if self.optimizer.ema_decay is not None:
            for path, value in ema.init(trained).items():
                row = self.table[path]
                assert row.opt is not None
                average[path] = pad(value, row.shape(row.opt))
        scale = loss_scale.init(self.optimizer.rule)
        zeros = {name: jnp.zeros((), jnp.int32) for name in ("step", "skipped")}
        errors = {name: jnp.zeros(x.shape, x.dtype) for name, x in self.ring_errors.items()}
        return {**zeros, "opt": opt, "ema": average, "loss_scale": scale, "ring_errors": errors}

    def frozen(self) -> Arrays:
        """The parameters that are not trained, read from where the model's weights are."""
        assert self.model.weights is not None
        return self._read(
            self.model.weights, [row for row in self.table if not row.leaf.trainable]
        )[0]

    def _read(self, weights: Weights, rows: Sequence[Row]) -> tuple[Arrays, Arrays]:
        """(params, masters), each shard read by itself, once for the devices that have it.

        A stack that is encoded is read and encoded layer by layer: none of its values exists at
        once on any device.
        """
        base_params = {row.leaf.parameter for row in self.table if not row.leaf.adapts}
        shapes = {path: self.model.variables[path].shape for path in self._variables_of(weights)}
        shapes |= {
            path: self.table.shape_of(path) for path in self.table.parameters if path in base_params
        }
        weights.check(shapes)
        params: Arrays = {}
        master: Arrays = {}
        for row in rows:
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is None:
                    continue
                form = self.table.stored(row, placement)
                if form.codec == PLAIN or not form.stacked:
                    value = read_encoded(weights, row.leaf, form)
                    stored[row.path] = (
                        self.stored_master(row.path, value) if stored is master else value
                    )
                    continue
                shapes = {name: (x.shape, x.dtype) for name, x in form.arrays.items()}
                arrays = jax.jit(
                    lambda shapes=shapes: {n: jnp.zeros(*x) for n, x in shapes.items()},
                    out_shardings=form.on_device,
                )()
                for number in range(form.shape[0]):
                    layer = read_encoded(weights, row.leaf, form.layer, number)
                    arrays = _layer_written(form)(arrays, layer, number)
                stored[row.path] = jax.device_put(arrays, form.shardings, donate=True)
        return params, master

    def _variables_of(self, weights: Weights) -> list[str]:
        """The model's variables that are read."""
        return [path for path in weights.variables if path in self.model.variables]

    def _sharded_one_by_one(
        self, values: Arrays, variables: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Values in host memory as stored, of which each is freed when it is sharded."""
        params: Arrays = {}
        master: Arrays = {}
        for path in list(values):
            param, wide = self.placed({path: values.pop(path)})
            params |= param
            master |= wide
        copied = jax.jit(jnp.copy, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        placed = jax.device_put(variables, self.shardings.variables)
        return params, master, {path: copied(x) for path, x in placed.items()}


def read_shards(
    weights: Weights, leaf: Leaf, form: StoredValue, layer: int | None = None
) -> jax.Array:
    """A padded value, or a layer of a stack, with each shard read by itself."""
    shape, at = form.padded, form.sharding
    first = leaf.range.start if leaf.range else 0
    devices: dict[Any, list[jax.Device]] = {}
    for device, index in at.addressable_devices_indices_map(shape).items():
        spans = [span.indices(size)[:2] for span, size in zip(index or (), shape)]
        devices.setdefault(tuple(spans), []).append(device)
    shards = {}
    for spans, where in devices.items():
        inside = [(min(a, n), min(b, n)) for (a, b), n in zip(spans, form.shape)]
        inside = inside if layer is None else [(layer, layer + 1), *inside]
        if first:
            (a, b), *others = inside
            inside = [(a + first, b + first), *others]
        index = tuple(slice(a, b) for a, b in inside)
        block = weights.read(leaf.parameter, index, form.dtype)
        block = block if layer is None else block[0]
        pads = [(0, b - a - n) for (a, b), n in zip(spans, block.shape)]
        block = np.pad(block, pads) if any(map(any, pads)) else block
        for device in where:
            here = SingleDeviceSharding(device, memory_kind=at.memory_kind)
            # Not as an alias of NumPy's memory: the step donates it.
            shards[device] = jax.device_put(block, here, may_alias=False)
        jax.block_until_ready([shards[device] for device in where])
    order = [shards[d] for d in at.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape, at, order)


def read_encoded(
    weights: Weights, leaf: Leaf, form: StoredValue, layer: int | None = None
) -> Stored:
    """The arrays of a parameter, or of a layer of a stack, in device memory for a layer."""
    first = leaf.range.start if leaf.range else 0
    number = None if layer is None else layer + first
    codes = None if form.codec == PLAIN else weights.encoded(leaf.parameter, number, form.codec)
    if codes is None:
        return _encoded(form)(read_shards(weights, leaf, form, layer))
    arrays = {}
    for name, array in form.arrays.items():
        full = np.zeros(array.shape, array.dtype)
        full[tuple(map(slice, codes[name].shape))] = codes[name]
        arrays[name] = jax.make_array_from_callback(full.shape, array.sharding, full.__getitem__)
    return arrays


@functools.lru_cache(maxsize=64)
def _layer_written(form: StoredValue) -> Callable[[Stored, Stored, Any], Stored]:
    """The arrays of a stack, on the device, with those of a layer."""

    def write(arrays: Stored, layer: Stored, number: Any) -> Stored:
        at = jax.lax.dynamic_update_index_in_dim
        layer = on_device(layer)
        return {name: at(x, layer[name], number, 0) for name, x in arrays.items()}

    return jax.jit(write, out_shardings=form.on_device, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _encoded(form: StoredValue) -> Callable[[jax.Array], Stored]:
    """The arrays of a padded value that is on its devices."""
    if form.codec == PLAIN:
        return lambda value: value

    def encode(value: jax.Array) -> Stored:
        return form.codec.encode(on_device(value), form.shape, form.arrays)

    return jax.jit(encode, out_shardings=form.shardings)


def _stored_copy(value: Any, dtype: Any, shape: tuple[int, ...], at: NamedSharding) -> jax.Array:
    """A value in a stored dtype and shape; its devices only receive their shards."""
    if isinstance(value, jax.Array) and value.sharding.device_set == at.device_set:
        kind = value.sharding.memory_kind
        here = at.with_memory_kind(kind) if kind else at
        copy = jax.jit(lambda x: jnp.copy(pad(x.astype(dtype), shape)), out_shardings=here)
        return jax.device_put(copy(value), at)
    array = np.asarray(value).astype(dtype)
    pads = [(0, b - a) for a, b in zip(array.shape, shape, strict=True)]
    placed = jax.device_put(np.pad(array, pads), at)
    # A copy: on the CPU an array may share its buffer with NumPy's, and the step donates it.
    return placed if in_host(at) else jax.jit(jnp.copy, out_shardings=at)(placed)
