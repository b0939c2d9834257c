"""The compiled programs of one run: initialise, train, evaluate. No arrays are held here.

A Program is made from a config, a model, a loss and devices, and the devices may be ones that are
only compiled for. What the engine runs and what a compile for another machine measures is the same.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.communication import Communication
from jaxspeed.config import Batch, Config
from jaxspeed.objective import Model
from jaxspeed.objective.accumulate import per_weight
from jaxspeed.objective.batch_checks import check_arrays, check_shared_evenly, check_train_batch
from jaxspeed.objective.objective import Objective
from jaxspeed.objective.train_state import Arrays, OptLayout, TrainState, native_tree, pad, unpad
from jaxspeed.offload import made_in_groups
from jaxspeed.optim import ema, loss_scale
from jaxspeed.pipeline import Pipeline, PipelineReport
from jaxspeed.pipeline.report_for_batch import pipeline_report
from jaxspeed.placement.memory_kinds import in_host, on_device
from jaxspeed.placement.mesh import data_parallel_size
from jaxspeed.placement.table import PlacementTable
from jaxspeed.remat.residual_report import ResidualReport
from jaxspeed.tensor_parallel import ShardingProposal
from jaxspeed.train.gradients import Gradients, batch_specs
from jaxspeed.train.optimizer import Optimizer
from jaxspeed.train.update import Update

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class BuildInputs:
    """What a program was built from, so that it can be built again in another way."""

    build: Callable[..., "Program"]  # (config, model, loss_fn, **these below, devices)
    model: Any
    optimizer: optax.GradientTransformation | None
    example_batch: Any
    trainable: Any


@dataclass(frozen=True)
class Serving:
    """The parameter server of a program."""

    servers: int
    pace: str  # how the workers follow each other, in words
    pull: Communication  # of a worker, of each version: each trained parameter as layers read it
    push: Communication  # ... of each part: each gradient as it is made, or as it is sent


@dataclass(frozen=True)
class Program:
    """`init(seed) -> state`, `step(state, batch) -> (state, metrics)`, `evaluate(state, batch)`."""

    config: Config
    batch: Batch
    objective: Objective
    gradients: Gradients
    update: Update
    source: BuildInputs
    proposal: ShardingProposal | None = None  # of what the tensor axis cuts, where it was inferred

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
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def pipeline(self) -> Pipeline | None:
        """How the blocks are run over the stages of the mesh, where it has several."""
        return self.gradients.pipeline

    @property
    def ring_errors(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the state keeps of what rings lose by packing."""
        return self.update.ring.errors if self.update.ring else {}

    @property
    def ranks(self) -> int:
        """Over how many devices, or groups of them, a batch is cut."""
        return data_parallel_size(self.mesh)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the run."""
        return tuple(self.mesh.devices.flat)

    @property
    def layout(self) -> OptLayout:
        return self.update.layout

    # -- what differs where a step is several programs, or runs in other processes ---------------

    @property
    def serving(self) -> Serving | None:
        """The parameter server, where there is one: `step` is then not one program."""
        return None

    @property
    def in_this_process(self) -> bool:
        """Whether this process computes."""
        return True

    @property
    def ranks_draw_apart(self) -> bool:
        """Whether each rank numbers its own micro-batches, from which random numbers follow."""
        return self.update.ring is not None

    def given_for_one_mesh(self) -> dict[str, Any]:
        """The config as it was given, less what needs more than one mesh."""
        return self.config.given

    def rebuilt(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        model: Any = None,
    ) -> "Program":
        """A program of the same model (or of another) and loss by another config."""
        source = self.source
        return source.build(
            config,
            source.model if model is None else model,
            self.objective.loss_fn,
            devices=devices,
            optimizer=source.optimizer,
            example_batch=source.example_batch,
            trainable=source.trainable,
        )

    def traced_step(self, batch: Any) -> tuple[Any, Mesh]:
        """What is compiled for a batch of these shapes, traced, and the mesh that it runs on."""
        return self.step.trace(self.state, self.abstract_batch(batch)), self.mesh

    def as_one_rank(self, x: np.ndarray) -> np.ndarray:
        """Samples in the order in which one rank would take them: micro-batch after micro-batch."""
        if not x.shape:
            return x
        parts = x.reshape(self.ranks, self.batch.accumulation, -1, *x.shape[1:])
        return np.swapaxes(parts, 0, 1).reshape(x.shape)

    # -- state ----------------------------------------------------------------------------------

    def _fresh_model(self, seed: jax.Array | int) -> tuple[Arrays, Arrays, Arrays]:
        """(params, masters, variables), as they are stored."""
        values, variables = self.model.init(seed)
        params: Arrays = {}
        master: Arrays = {}
        for row in self.table:
            for stored, placement in ((params, row.param), (master, row.master)):
                if placement is not None:
                    value = values[row.path].astype(placement.dtype)
                    stored[row.path] = pad(value, row.shape(placement))
        return params, master, variables

    def fresh_rest(self, params: Arrays, master: Arrays) -> dict[str, Any]:
        """What a state holds beside the model."""
        params, master = on_device((params, master))
        trained = {
            # A copy: a transformation may keep it as it is, and no two arrays share a buffer.
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
        shapes = jax.eval_shape(self.init, 0)
        return jax.tree.map(
            lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at),
            shapes,
            self.shardings,
        )

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where each array of the state lives."""
        at = self.table.sharding
        whole = NamedSharding(self.mesh, PartitionSpec())
        rows = list(self.table)
        averaged = rows if self.optimizer.ema_decay is not None else []
        return TrainState(
            step=whole,
            skipped=whole,
            params={r.path: at(r.param) for r in rows if r.param},
            master={r.path: at(r.master) for r in rows if r.master},
            opt=self.layout.shardings(),
            ema={r.path: at(r.opt) for r in averaged if r.opt},
            variables=dict.fromkeys(self.model.variables, whole),
            loss_scale=jax.tree.map(lambda _: whole, loss_scale.init(self.optimizer.rule)),
            ring_errors={name: x.sharding for name, x in self.ring_errors.items()},
        )

    @functools.cached_property
    def init(self) -> Callable[[int], TrainState]:
        """A fresh state, each array made straight into its shards.

        In two programs: what random numbers need of memory is free again before the moments come.
        """
        at = self.shardings

        def init(seed: int) -> TrainState:
            places = (at.params, at.master, at.variables)
            params, master, variables = self._made(self._fresh_model, places)(seed)
            rest = self.rest(params, master)
            return TrainState(params=params, master=master, variables=variables, **rest)

        return init

    @functools.cached_property
    def rest(self) -> Callable[[Arrays, Arrays], dict[str, Any]]:
        """What a state holds beside the model: `rest(params, master)`."""
        names = ("step", "skipped", "opt", "ema", "loss_scale", "ring_errors")
        return self._made(self.fresh_rest, {name: getattr(self.shardings, name) for name in names})

    def _made(self, function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """The function as a compiled program; in parts where results wait in host memory."""
        in_mesh = self.in_mesh(function)
        if any(map(in_host, jax.tree.leaves(shardings))):
            return functools.partial(made_in_groups, in_mesh, shardings)
        return jax.jit(in_mesh, out_shardings=shardings)

    # -- steps ----------------------------------------------------------------------------------

    @functools.cached_property
    def step(self) -> Any:
        """One optimizer step over a global batch; the state given to it is used up."""

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            sums, variables = self.gradients(
                state.sources(self.table),
                state.variables,
                batch,
                state.step,
                state.loss_scale.scale,
                state.ring_errors,
            )
            return self.update(state, sums, variables)

        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(self.in_mesh(step), donate_argnums=0, out_shardings=(self.shardings, whole))

    @functools.cached_property
    def evaluate(self) -> Any:
        """The loss of a batch in evaluation mode, and its metrics."""

        def evaluate(state: TrainState, batch: Any) -> Metrics:
            sources = state.sources(self.table)
            if self.pipeline:
                loss = self.pipeline.evaluate(sources, state.variables, batch, state.step)
            else:
                loss, _ = self.objective(sources, state.variables, batch, state.step, 0, False)
            mean = per_weight(loss.total, loss.weight)
            return {**loss.metrics, "loss": mean, "weight": loss.weight}

        return jax.jit(
            self.in_mesh(evaluate), out_shardings=NamedSharding(self.mesh, PartitionSpec())
        )

    def pipeline_report(self, batch: Any) -> PipelineReport | None:
        """What the pipeline costs on a batch of these shapes; None where the mesh has no stages."""
        pipeline, micro_batches = self.gradients.pipeline, self.batch.accumulation
        if pipeline is None:
            return None
        report = self.in_mesh(pipeline_report)
        made: PipelineReport = report(pipeline, self.model.variables, batch, micro_batches)
        return made

    def kept_report(self, batch: Any) -> ResidualReport | None:
        """What units keep between their passes; None where the config leaves it all."""
        if self.pipeline:  # stages keep their inputs too: the pipeline's own report has it
            return None
        parts = self.batch.accumulation
        one = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)
                if x.shape
                else jax.ShapeDtypeStruct((), x.dtype)
            ),
            batch,
        )
        made: ResidualReport | None = self.in_mesh(self.objective.kept)(self.model.variables, one)
        return made

    def in_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function traced with this mesh in its context, where kernels look for it."""

        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return traced

    # -- batches --------------------------------------------------------------------------------

    def batch_shardings(self, batch: Any) -> Any:
        """Where each array of a batch lives: its first dim over the data axes."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), batch_specs(batch))

    def abstract_batch(self, batch: Any) -> Any:
        """The shapes of a batch (arrays or ShapeDtypeStructs), with its shardings."""
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            batch,
            self.batch_shardings(batch),
        )

    def check_batch(self, batch: Any, size: int | None, abstract: bool = False) -> None:
        """BatchError unless every array's first dim is `size` (None: one that can be cut)."""
        arrays = check_arrays(batch, abstract=abstract)
        if size is None:
            check_shared_evenly(arrays, self.ranks)
        else:
            check_train_batch(arrays, self.batch, self.ranks)
