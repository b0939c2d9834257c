"""The compiled programs of one run (init, step, evaluate), without arrays.

A Program is built from a config, a model, a loss and devices, which may be devices to compile for
only: the engine runs the same programs that a compile for absent hardware measures.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxspeed.communication import Communication
from jaxspeed.config import Batch, Config
from jaxspeed.errors import ModelError
from jaxspeed.objective import Model
from jaxspeed.objective.accumulate import micro_batch_shapes, per_weight
from jaxspeed.objective.batch_checks import check_shared_evenly, check_train_batch
from jaxspeed.objective.batches import WithExtra, read_batch, with_extra
from jaxspeed.objective.objective import Objective
from jaxspeed.objective.pretrained import Weights
from jaxspeed.objective.train_state import Arrays, OptLayout, TrainState, native_tree, pad, unpad
from jaxspeed.optim import ema, loss_scale
from jaxspeed.pipeline import Pipeline, PipelineReport
from jaxspeed.pipeline.report_for_batch import pipeline_report
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.placement.mesh import data_parallel_size
from jaxspeed.placement.rules import examples, nearest
from jaxspeed.placement.table import PlacementTable
from jaxspeed.remat.residual_report import ResidualReport
from jaxspeed.tensor_parallel import ShardingProposal
from jaxspeed.train.gradients import Gradients, batch_specs
from jaxspeed.train.optimizer import RunOptimizer
from jaxspeed.train.staged_init import staged_init
from jaxspeed.train.update import Update

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class BuildInputs:
    """The arguments of a program's build, from which a variant of it can be built."""

    build: Callable[..., "Program"]  # (config, model, loss_fn, **fields below, devices)
    model: Any
    optimizer: optax.GradientTransformation | None
    example_batch: Any
    trainable: Any
    init_with: Callable[[Any, Any], Any] | None


@dataclass(frozen=True)
class ServerTraffic:
    """The servers of a program, and what a worker exchanges with them."""

    servers: int
    workers: int
    pace: str  # how the workers are synchronized, as text
    pull: Communication  # per worker and version: each trained parameter as layers read it
    push: Communication  # per worker and part: each gradient in the dtype in which it is sent


@dataclass(frozen=True)
class Program:
    """`init(seed) -> state`, `step(state, batch) -> (state, metrics)`, `evaluate(state, batch)`."""

    config: Config
    batch: Batch
    objective: Objective
    gradients: Gradients
    update: Update
    source: BuildInputs
    proposal: ShardingProposal | None = None  # of the sharding over `tensor`, if inferred

    @property
    def table(self) -> PlacementTable:
        return self.objective.table

    @property
    def mesh(self) -> Mesh:
        return self.table.mesh

    @property
    def model(self) -> Model:
        return self.objective.model

    @property
    def optimizer(self) -> RunOptimizer:
        return self.update.optimizer

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, where the mesh has several stages."""
        return self.gradients.pipeline

    @property
    def ring_errors(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the rings' saved quantization errors."""
        return self.update.ring.errors if self.update.ring else {}

    @property
    def ranks(self) -> int:
        """The data ranks over which a batch is sharded."""
        return data_parallel_size(self.mesh)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the run."""
        return tuple(self.mesh.devices.flat)

    @property
    def layout(self) -> OptLayout:
        return self.update.layout

    # -- overridden where a step is several programs, or runs in other processes -----------------

    @property
    def serving(self) -> ServerTraffic | None:
        """The parameter server, if any: `step` is then not one program."""
        return None

    @property
    def in_this_process(self) -> bool:
        """Whether this process computes, instead of processes on Ray."""
        return True

    @property
    def numbered_micro_batches(self) -> int:
        """The micro-batches of a step with random numbers of their own.

        With rings each rank numbers its own: `ranks` times as many.
        """
        return self.batch.accumulation * (self.ranks if self.update.ring else 1)

    def given_for_one_mesh(self) -> dict[str, Any]:
        """The config as it was given, without the keys that need more than one mesh."""
        return self.config.given

    def rebuilt(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        model: Any = None,
    ) -> "Program":
        """A program of another config with the same loss, and the same model unless given."""
        source = self.source
        return source.build(
            config,
            source.model if model is None else model,
            self.objective.loss_fn,
            devices=devices,
            optimizer=source.optimizer,
            example_batch=source.example_batch,
            trainable=source.trainable,
            init_with=source.init_with,
        )

    def traced_step(self, batch: Any) -> tuple[Any, Mesh]:
        """The step traced for a batch of these shapes, and its mesh."""
        return self.step.trace(self.state, self.abstract_batch(batch)), self.mesh

    def as_one_rank(self, x: Any) -> Any:
        """Reorder samples so that one rank computes the same micro-batches in the same order."""
        if not x.shape:
            return x
        parts = x.reshape(self.ranks, self.batch.accumulation, -1, *x.shape[1:])
        return parts.swapaxes(0, 1).reshape(x.shape)

    # -- state ----------------------------------------------------------------------------------

    def _fresh_model(self, seed: jax.Array | int) -> tuple[Arrays, Arrays, Arrays]:
        """(params, masters, variables), in their stored shapes and dtypes."""
        return self._as_stored(*self.model.init(seed))

    def _as_stored(self, values: Arrays, variables: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        params: Arrays = {}
        master: Arrays = {}
        for row in self.table:
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is not None:
                    value = values[row.path].astype(placement.dtype)
                    stored[row.path] = pad(value, row.shape(placement))
        return params, master, variables

    def placed_parameters(self, values: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        """(params, masters) of these values by path, sharded as stored, one parameter at a time."""
        params: Arrays = {}
        master: Arrays = {}
        for path, value in values.items():
            if path not in self.table.rows:
                raise ModelError(
                    f"the model has no parameter {path!r}; it has, for example: "
                    + examples(nearest(path, list(self.table.rows)))
                )
            row = self.table[path]
            if tuple(np.shape(value)) != row.leaf.shape:
                raise ModelError(
                    f"the parameter {path} has shape {row.leaf.shape}; found {np.shape(value)}"
                )
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is not None:
                    at = self.table.sharding(placement)
                    stored[path] = _stored_copy(value, placement.dtype, row.shape(placement), at)
        return params, master

    def fresh_rest(self, params: Arrays, master: Arrays) -> dict[str, Any]:
        """The fields of a fresh state other than the model's."""
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

    @functools.cached_property
    def state(self) -> TrainState:
        """The state's shapes, dtypes and shardings, without arrays."""
        shapes = jax.eval_shape(self._state_of, *self._model_shapes)
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            shapes,
            self.shardings,
        )

    @property
    def _model_shapes(self) -> tuple[Arrays, Arrays]:
        leaves = {r.path: jax.ShapeDtypeStruct(r.leaf.shape, r.leaf.dtype) for r in self.table}
        return leaves, dict(self.model.variables)

    def _state_of(self, values: Arrays, variables: Arrays) -> TrainState:
        params, master, variables = self._as_stored(values, variables)
        rest = self.in_mesh(self.fresh_rest)(params, master)
        return TrainState(params=params, master=master, variables=variables, **rest)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        at = self.table.sharding
        replicated = NamedSharding(self.mesh, PartitionSpec())
        rows = list(self.table)
        averaged = rows if self.optimizer.ema_decay is not None else []
        return TrainState(
            step=replicated,
            skipped=replicated,
            params={r.path: at(r.param) for r in rows if r.param},
            master={r.path: at(r.master) for r in rows if r.master},
            opt=self.layout.shardings(),
            ema={r.path: at(r.opt) for r in averaged if r.opt},
            variables=dict.fromkeys(self.model.variables, replicated),
            loss_scale=jax.tree.map(lambda _: replicated, loss_scale.init(self.optimizer.rule)),
            ring_errors={name: x.sharding for name, x in self.ring_errors.items()},
        )

    @functools.cached_property
    def init(self) -> Callable[[int], TrainState]:
        """A fresh state, each array created as its shards.

        The model before the rest, so that the memory of random initialization is free before the
        moments are allocated.
        """
        at = self.shardings

        def init(seed: int) -> TrainState:
            if self.model.weights is not None:
                params, master = self._read(self.model.weights)
                draw = self.in_mesh(lambda seed: self.model.init(seed)[1])
                variables = staged_init(draw, at.variables, seed)
            elif self.model.needs_values:
                params, master, variables = self._sharded_one_by_one(*self.model.init(seed))
            else:
                places = (at.params, at.master, at.variables)
                fresh = self.in_mesh(self._fresh_model)
                params, master, variables = staged_init(fresh, places, seed)
            rest = self.rest(params, master)
            return TrainState(params=params, master=master, variables=variables, **rest)

        return init

    def _read(self, weights: Weights) -> tuple[Arrays, Arrays]:
        """(params, masters), each shard read by itself, once for the devices that have it."""
        weights.check({row.path: row.leaf.shape for row in self.table})
        params: Arrays = {}
        master: Arrays = {}
        for row in self.table:
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is None:
                    continue
                shape, at = row.shape(placement), self.table.sharding(placement)
                devices: dict[Any, list[jax.Device]] = {}
                for device, index in at.addressable_devices_indices_map(shape).items():
                    spans = [span.indices(size)[:2] for span, size in zip(index or (), shape)]
                    devices.setdefault(tuple(spans), []).append(device)
                shards = {}
                for spans, where in devices.items():
                    inside = [(min(a, n), min(b, n)) for (a, b), n in zip(spans, row.leaf.shape)]
                    block = weights.read(
                        row.path, tuple(slice(a, b) for a, b in inside), placement.dtype
                    )
                    pads = [(0, b - a - n) for (a, b), n in zip(spans, block.shape)]
                    block = np.pad(block, pads) if any(map(any, pads)) else block
                    for device in where:
                        here = SingleDeviceSharding(device, memory_kind=at.memory_kind)
                        # Not as an alias of NumPy's memory: the step donates it.
                        shards[device] = jax.device_put(block, here, may_alias=False)
                    jax.block_until_ready([shards[device] for device in where])
                order = [shards[d] for d in at.addressable_devices]
                stored[row.path] = jax.make_array_from_single_device_arrays(shape, at, order)
        return params, master

    def _sharded_one_by_one(
        self, values: Arrays, variables: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Values in host memory as stored, of which each is freed when it is sharded."""
        params: Arrays = {}
        master: Arrays = {}
        for path in list(values):
            param, wide = self.placed_parameters({path: values.pop(path)})
            params |= param
            master |= wide
        copied = jax.jit(jnp.copy, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
        placed = jax.device_put(variables, self.shardings.variables)
        return params, master, {path: copied(x) for path, x in placed.items()}

    @functools.cached_property
    def rest(self) -> Callable[[Arrays, Arrays], dict[str, Any]]:
        """`rest(params, master)`: the fields of a fresh state other than the model's."""
        names = ("step", "skipped", "opt", "ema", "loss_scale", "ring_errors")
        return self._jit_sharded(
            self.fresh_rest, {name: getattr(self.shardings, name) for name in names}
        )

    def _jit_sharded(self, function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """Compile with output shardings, in small programs if some are in host memory."""
        in_mesh = self.in_mesh(function)
        if any(map(in_host, jax.tree.leaves(shardings))):
            return functools.partial(staged_init, in_mesh, shardings)
        return jax.jit(in_mesh, out_shardings=shardings)

    # -- steps ----------------------------------------------------------------------------------

    @functools.cached_property
    def step(self) -> Any:
        """One optimizer step over a global batch; donates the state."""

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            given, batch = with_extra(state.variables, batch)
            sums, variables = self.gradients(
                state.sources(self.table),
                given,
                batch,
                state.step,
                state.loss_scale.scale,
                state.ring_errors,
            )
            return self.update(state, sums, variables)

        replicated = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            self.in_mesh(step), donate_argnums=0, out_shardings=(self.shardings, replicated)
        )

    @functools.cached_property
    def evaluate(self) -> Any:
        """The loss of a batch in evaluation mode, and its metrics."""

        def evaluate(state: TrainState, batch: Any) -> Metrics:
            sources = state.sources(self.table)
            variables, batch = with_extra(state.variables, batch)
            if self.pipeline:
                loss = self.pipeline.evaluate(sources, variables, batch, state.step)
            else:
                loss, _ = self.objective(sources, variables, batch, state.step, 0, False)
            mean = per_weight(loss.total, loss.weight)
            return {**loss.metrics, "loss": mean, "weight": loss.weight}

        return jax.jit(
            self.in_mesh(evaluate), out_shardings=NamedSharding(self.mesh, PartitionSpec())
        )

    def pipeline_report(self, batch: Any) -> PipelineReport | None:
        """The pipeline's bubble, memory and communication for such a batch; None without stages."""
        pipeline, micro_batches = self.gradients.pipeline, self.batch.accumulation
        if pipeline is None:
            return None
        report = self.in_mesh(pipeline_report)
        made: PipelineReport = report(
            pipeline, *with_extra(self.model.variables, batch), micro_batches
        )
        return made

    def kept_report(self, batch: Any) -> ResidualReport | None:
        """The residuals that units save; None where the config sets no rematerialization."""
        if self.pipeline:  # stages save their inputs too: `PipelineReport` includes them
            return None
        variables, batch = with_extra(self.model.variables, batch)
        one = micro_batch_shapes(batch, self.batch.accumulation)
        made: ResidualReport | None = self.in_mesh(self.objective.kept)(variables, one)
        return made

    def in_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Trace the function with this mesh as the context mesh, which kernels read."""

        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return traced

    # -- batches --------------------------------------------------------------------------------

    def batch_shardings(self, batch: Any) -> Any:
        """The shardings of a batch: first dims over the data axes, extra arrays as they lie."""
        if isinstance(batch, WithExtra):
            extra = jax.tree.map(self._as_it_lies, batch.extra)
            return WithExtra(self.batch_shardings(batch.samples), extra)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), batch_specs(batch))

    def _as_it_lies(self, x: Any) -> Any:
        """The sharding of an array on this mesh's devices; replicated if it lies elsewhere."""
        at = getattr(x, "sharding", None)
        here = at is not None and at.device_set == set(self.mesh.devices.flat)
        return at if here else NamedSharding(self.mesh, PartitionSpec())

    def abstract_batch(self, batch: Any) -> Any:
        """The shapes of a batch (arrays or ShapeDtypeStructs), with its shardings."""
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            batch,
            self.batch_shardings(batch),
        )

    def read_batch(
        self, batch: Any, size: int | None, extra: Any = None, abstract: bool = False
    ) -> Any:
        """The batch as the programs take it.

        BatchError unless every array's first dim is `size` (None: divisible by the ranks).
        """
        batch, arrays = read_batch(batch, extra, abstract=abstract)
        if size is None:
            check_shared_evenly(arrays, self.ranks)
        else:
            check_train_batch(arrays, self.batch, self.ranks)
        return batch


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
