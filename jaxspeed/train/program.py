"""The compiled programs of one run (init, step, evaluate), without arrays.

A Program is built from a config, a model, a loss and devices, which may be devices to compile for
only: the engine runs the same programs that a compile for absent hardware measures.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.config import Batch, Config
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.disk.disk_array import in_memory
from jaxspeed.errors import BatchError
from jaxspeed.objectives import objective_of
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.terms_and_metrics import results, totals
from jaxspeed.pipeline import Pipeline, PipelineReport
from jaxspeed.pipeline.report_for_batch import pipeline_report
from jaxspeed.placement.batch_dims import batch_specs, check_sequence_dims
from jaxspeed.placement.mesh import in_mesh
from jaxspeed.placement.paths import counted, listed
from jaxspeed.placement.table import PlacementTable
from jaxspeed.placement.xla_options import compiler_options
from jaxspeed.remat.residual_report import ResidualReport
from jaxspeed.sequence_parallel import AttentionReport
from jaxspeed.tensor_parallel import ShardingProposal
from jaxspeed.traced_loss.accumulate import Sums, micro_batch_shapes, per_weight
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train.gradients import Gradients
from jaxspeed.train.phases import BATCH, FIRST_ADAPTER, METRICS, STATE, StepPhase
from jaxspeed.train.update import Update
from jaxspeed.train_state.opt_layout import OptLayout
from jaxspeed.train_state.optimizer import RunOptimizer
from jaxspeed.train_state.state import Arrays, TrainState
from jaxspeed.train_state.state_storage import StateStorage
from jaxspeed.user_models import Model
from jaxspeed.user_models.batch_checks import check_shared_evenly, check_train_batch
from jaxspeed.user_models.batches import WithExtra, read_batch, with_extra

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
class Program:
    """`init(seed) -> state`, `step(state, batch) -> (state, metrics)`, `evaluate(state, batch)`."""

    config: Config
    batch: Batch
    traced_loss: MicroBatchLoss
    gradients: Gradients
    update: Update
    source: BuildInputs
    proposal: ShardingProposal | None = None  # of the sharding over `tensor`, if inferred
    phases_of: Callable[["Program"], Sequence[StepPhase]] | None = None  # of a step of several
    completed: Callable[["Program", Any, bool], Any] | None = None  # what `complete` computes
    # The models beside it that phases read, which are not trained, by the names of their states.
    frozen: Mapping[str, "Program"] = field(default_factory=dict)

    @property
    def table(self) -> PlacementTable:
        return self.traced_loss.table

    @property
    def mesh(self) -> Mesh:
        return self.table.mesh

    @property
    def model(self) -> Model:
        return self.traced_loss.model

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
        return self.table.ranks

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All devices of the run."""
        return tuple(self.mesh.devices.flat)

    @property
    def layout(self) -> OptLayout:
        return self.update.layout

    # -- overridden where a step is several programs, or runs in other processes -----------------

    @property
    def on_one_mesh(self) -> bool:
        """Whether all phases run on the devices of `mesh`, and the state is in this process."""
        return True

    @functools.cached_property
    def phases(self) -> tuple[StepPhase, ...]:
        """The phases of a step, in their order: here one program, unless `phases_of` has others."""
        if self.phases_of:
            return tuple(self.phases_of(self))
        names = (STATE, BATCH), (STATE, METRICS), (STATE,)
        return (StepPhase("step", self.step, *names, mesh=self.mesh),)

    @property
    def array_phases(self) -> tuple[StepPhase, ...]:
        """The first phases, which add arrays to the batch."""
        writers = [i for i, phase in enumerate(self.phases) if BATCH in phase.writes]
        return self.phases[: max(writers) + 1] if writers else ()

    def values(self, batch: Any) -> dict[str, Any]:
        """The shapes of the values with which a step begins, from those of a global batch."""
        of_frozen: dict[str, Any] = {name: x.state for name, x in self.frozen.items()}
        if self.reads_first_adapter:
            of_frozen[FIRST_ADAPTER] = self.adapter_of(self.state)
        return {
            STATE: self.state,
            BATCH: self.abstract_batch(self.complete(batch, True)),
            **of_frozen,
        }

    def complete(self, batch: Any, stored_alone: bool = False) -> Any:
        """The shapes of a batch, with those of the arrays that its objective computes.

        Those of all arrays, or of those that are computed once and stored with the data.
        """
        return self.completed(self, batch, stored_alone) if self.completed else batch

    def refuse_missing(self, batch: Any) -> None:
        """Raise BatchError if a batch lacks an array that is computed once, before a run."""
        samples = batch.samples if isinstance(batch, WithExtra) else batch
        for entry in self.computed_arrays if isinstance(samples, Mapping) else ():
            missing = [name for name in entry.writes if name not in samples]
            if entry.once and missing:
                raise BatchError(
                    f"the batch lacks {listed(missing)}, which the objective reads: it is computed "
                    "once for the data, before a run. engine.logprobs(batch, reference=True) "
                    'computes log-probabilities; objective.reference "each_step" does in each step'
                )

    @functools.cached_property
    def computed_arrays(self) -> tuple[ComputedArrays, ...]:
        """What the objective adds to batches, once or in each step."""
        objective = objective_of(self.traced_loss.loss_fn)
        if objective is None:
            return ()
        frozen = getattr(objective.options, "reference_model", None)
        model, is_new = self.config.model, not self.config.run.init_from
        if objective.records == "prompts" and not self.config.lora and model and is_new:
            frozen = frozen or model.pretrained  # full training changes the model before the run
        if frozen is None:
            return tuple(objective.computed())
        section = FrozenModelSection.model_validate(frozen)
        return tuple(
            replace(entry, model=section) if entry.model == "reference" else entry
            for entry in objective.computed()
        )

    def held(self, state: TrainState) -> dict[str, Any]:
        """The values beside state and batch with which each step begins, for a fresh state."""
        values: dict[str, Any] = {name: x.init(0) for name, x in self.frozen.items()}
        if self.reads_first_adapter:
            values[FIRST_ADAPTER] = jax.tree.map(jnp.copy, in_memory(self.adapter_of(state)))
        return values

    @property
    def reads_first_adapter(self) -> bool:
        """Whether a phase reads the adapter with which a run began."""
        return any(FIRST_ADAPTER in phase.reads for phase in self.phases)

    def adapter_of(self, state: TrainState) -> tuple[Any, Any]:
        """(params, masters) of a state's adapters."""
        paths = {row.path for row in self.table if row.leaf.adapts}
        stored = state.params, state.master
        params, master = ({p: x for p, x in part.items() if p in paths} for part in stored)
        return params, master

    @property
    def in_this_process(self) -> bool:
        """Whether this process computes, instead of processes on Ray."""
        return True

    holder = "device"  # what holds a share of the state

    @property
    def place(self) -> str:
        """What runs the program."""
        return f"on {counted(len(self.devices), 'device')}"

    @property
    def exchange_figures(self) -> dict[str, dict[str, Any]]:
        """What the parts of a program exchange beside collectives, for a plan's JSON."""
        return {}

    @property
    def exchange_text(self) -> str:
        """The same in a line."""
        return ""

    def freed_by_more(self, state_bytes: int) -> tuple[int, str] | None:
        """(bytes that one more holder of the state frees, of so many on each, the change)."""
        return None

    @property
    def numbered_micro_batches(self) -> int:
        """The micro-batches of a step with random numbers of their own.

        With rings each rank numbers its own: `ranks` times as many. So does each of the parts into
        which a device divides a micro-batch.
        """
        ranks = self.ranks if self.update.ring else 1
        return self.batch.accumulation * ranks * self.config.parallel.batch_parts

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
        built = source.build(
            config,
            source.model if model is None else model,
            self.traced_loss.loss_fn,
            devices=devices,
            optimizer=source.optimizer,
            example_batch=source.example_batch,
            trainable=source.trainable,
            init_with=source.init_with,
        )
        return replace(built, phases_of=self.phases_of) if self.phases_of else built

    def as_one_rank(self, x: Any) -> Any:
        """Reorder samples so that one rank computes the same micro-batches in the same order."""
        if not x.shape:
            return x
        parts = x.reshape(self.ranks, self.batch.accumulation, -1, *x.shape[1:])
        return parts.swapaxes(0, 1).reshape(x.shape)

    # -- state ----------------------------------------------------------------------------------

    @functools.cached_property
    def storage(self) -> StateStorage:
        """How the state is stored, and fresh ones."""
        parts = self.table, self.model, self.optimizer, self.layout, self.ring_errors
        return StateStorage(*parts, self.update.tier)

    @property
    def state(self) -> TrainState:
        """The state's shapes, dtypes and shardings, without arrays."""
        return self.storage.shapes

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        return self.storage.shardings

    @property
    def init(self) -> Callable[[int], TrainState]:
        """`init(seed)`: a fresh state, each array created as its shards."""
        return self.storage.fresh

    # -- steps ----------------------------------------------------------------------------------

    def summed(self, state: TrainState, batch: Any) -> tuple[Sums, Arrays]:
        """The gradients over all micro-batches, and the variables after them; traced."""
        variables, batch = with_extra(state.variables, batch)
        return self.gradients(
            state.sources(self.table),
            variables,
            batch,
            state.step,
            state.loss_scale.scale,
            state.ring_errors,
        )

    @functools.cached_property
    def step(self) -> Any:
        """One optimizer step over a global batch; donates the state."""

        def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            return self.update(state, *self.summed(state, batch))

        replicated = NamedSharding(self.mesh, PartitionSpec())
        return self.jit(step, donate_argnums=0, out_shardings=(self.shardings, replicated))

    @functools.cached_property
    def evaluate(self) -> Any:
        """The loss of a batch in evaluation mode, and its metrics."""

        def loss_of(state: TrainState, batch: Any) -> Loss:
            sources = state.sources(self.table)
            variables, batch = with_extra(state.variables, batch)
            if self.pipeline:
                return self.pipeline.evaluate(sources, variables, batch, state.step)
            return self.traced_loss(sources, variables, batch, state.step, 0, False)[0]

        return self.evaluation(loss_of)

    def evaluation(self, loss_of: Callable[[Any, Any], Loss]) -> Any:
        """The compiled `evaluate` of a loss of (state, batch)."""

        def evaluate(state: Any, batch: Any) -> Metrics:
            loss = loss_of(state, batch).folded(None)
            mean = per_weight(loss.total, loss.weight)
            metrics = {**results(loss.metrics), "loss": mean, "weight": loss.weight}
            return metrics | totals(loss.metrics)

        return self.jit(evaluate, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def pipeline_report(self, batch: Any) -> PipelineReport | None:
        """The pipeline's bubble, memory and communication for such a batch; None without stages."""
        if (pipeline := self.pipeline) is None:
            return None
        report = self.in_mesh(pipeline_report)
        stages_report: PipelineReport = report(
            pipeline, *self.loss_inputs(batch), self.batch.accumulation
        )
        return stages_report

    def kept_report(self, batch: Any) -> ResidualReport | None:
        """The residuals that units save; None where the config sets no rematerialization."""
        if self.pipeline:  # stages save their inputs too: `PipelineReport` includes them
            return None
        kept = self.in_mesh(self.traced_loss.kept)
        report: ResidualReport | None = kept(*self._micro_batch(batch))
        return report

    def attention_report(self, batch: Any) -> AttentionReport | None:
        """How attention runs over `seq`, and why; None where no axis shards sequences.

        Raises ConfigError with all problems if it cannot run as the config says.
        """
        attention = self.in_mesh(self.traced_loss.attention)
        report: AttentionReport | None = attention(*self._micro_batch(batch))
        return report

    def recomputes(self, batch: Any) -> bool:
        """Whether a unit has a backward pass, in which the config's remat has an effect."""
        if self.pipeline:
            return True
        is_recomputed: bool = self.in_mesh(self.traced_loss.recomputes)(*self._micro_batch(batch))
        return is_recomputed

    def loss_inputs(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """The shapes of variables and of a complete batch, as the loss reads them."""
        return with_extra(self.model.variables, self.complete(batch))

    def _micro_batch(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """The same of a micro-batch."""
        variables, batch = self.loss_inputs(batch)
        return variables, micro_batch_shapes(batch, self.batch.accumulation)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Compile a function for this mesh."""
        xla = compiler_options(self.mesh)
        return jax.jit(self.in_mesh(function), compiler_options=xla, **options)

    def in_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Trace the function with this mesh as the context mesh, which kernels read."""
        return in_mesh(self.mesh, function)

    def set_mesh(self) -> AbstractContextManager[Any]:
        """This mesh instead of one that the process has set, as some libraries do on import.

        jit lowers what it has traced, `jax.shard_map` included, for the mesh of its caller.
        """
        unset = jax.sharding.get_abstract_mesh().empty
        return nullcontext() if unset else jax.set_mesh(self.mesh)

    # -- batches --------------------------------------------------------------------------------

    def batch_shardings(self, batch: Any) -> Any:
        """The shardings of a batch: samples and positions over their axes, extra ones as given."""
        if isinstance(batch, WithExtra):
            extra = jax.tree.map(self._as_it_lies, batch.extra)
            return WithExtra(self.batch_shardings(batch.samples), extra)
        specs = batch_specs(batch, self.config.parallel.sequence.dims, self.mesh.shape)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

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
        check_sequence_dims(batch, self.config.parallel.sequence.dims, self.mesh.shape)
        return batch
