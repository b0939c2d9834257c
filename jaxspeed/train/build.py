"""Build a Program from a config, a model, a loss and devices, without creating arrays."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from os.path import abspath, expanduser
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.adapters.adapt_loss import weight_dims
from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.adapters.choose_adapters import OtherNames, SavedAdapter, choose_adapters
from jaxspeed.axes import AXES, PIPE, data_ranks, storing_ranks
from jaxspeed.config import Batch, Config
from jaxspeed.config.lora_section import Lora
from jaxspeed.config.parallelism import Parallel
from jaxspeed.config.problems import config_error
from jaxspeed.config.remat import Recompute
from jaxspeed.config.rollout_options import rollout_problems
from jaxspeed.config.zero_section import LARGEST_BUCKET, Zero
from jaxspeed.disk.tier import DiskOptions, DiskTier
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.jaxpr.weight_uses import Uses
from jaxspeed.known_jax_bugs import installed, refuse_known_bugs
from jaxspeed.objectives import Objective, objective_of
from jaxspeed.offload import ON_DEVICE, ON_HOST, UpdateDevice
from jaxspeed.offload.disk_buckets import disk_buckets
from jaxspeed.offload.offloaded_update import StreamedUpdate
from jaxspeed.ops.cpu_products import merge_summed_dims
from jaxspeed.optim.owners import matrices_asked
from jaxspeed.pipeline import Pipeline
from jaxspeed.pipeline.find_blocks import find_stages
from jaxspeed.pipeline.scanned_stack import with_scanned_layers
from jaxspeed.placement.codec import AssignsCodecs
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.mesh import build_mesh, simulated
from jaxspeed.placement.precision import (
    DTYPES,
    compute_dtype,
    dtype_named,
    keeps_fp32,
    precision_of,
)
from jaxspeed.placement.rows import Leaf, Offload, Placement
from jaxspeed.placement.rules import check_patterns, examples, nearest
from jaxspeed.placement.stacks import (
    Stack,
    UnlikeStages,
    divided_like,
    with_adapters_of,
    with_stages,
)
from jaxspeed.placement.table import PlacementTable, StateLeaf, build_table, device_memory_kind
from jaxspeed.quantization.choose_codecs import codec_rules
from jaxspeed.ring_reduction import PER_DEVICE, Reduction, rings_of
from jaxspeed.sequence_parallel.settings import SequenceSettings, SequenceTiles
from jaxspeed.tensor_parallel import (
    ActivationLayout,
    PropagatedDims,
    ShardingProposal,
    best_overlap,
)
from jaxspeed.traced_loss.autocast import autocast_of
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.train.array_phases import with_array_phases
from jaxspeed.train.disk_phases import step_phases
from jaxspeed.train.gradients import Gradients
from jaxspeed.train.program import BuildInputs, Program
from jaxspeed.train.ring_gradients import RingGradients
from jaxspeed.train.tensor_names import propagated_dims, traced_example, with_tensor_names
from jaxspeed.train.update import Update
from jaxspeed.train_state.opt_layout import OptLayout
from jaxspeed.train_state.optimizer import RunOptimizer, optimizer_of
from jaxspeed.train_state.state import native_tree, wide_dtype
from jaxspeed.user_models import Model, adapt_model
from jaxspeed.user_models.trainable import NamedLeaves, TrainRule, train_rule
from jaxspeed.zero3 import BY_CONSTRAINT, Exchange


def build_program(
    config: Config,
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    optimizer: optax.GradientTransformation | None = None,
    devices: Sequence[jax.Device] | None = None,
    example_batch: Any = None,
    trainable: Any = None,
    init_with: Callable[[Any, Any], Any] | None = None,
    codecs: Sequence[AssignsCodecs] = (),
    exchange: Exchange = BY_CONSTRAINT,
    saved: SavedAdapter | None = None,
    other_names: Callable[[Mapping[str, Any]], OtherNames] | None = None,
    frozen_on: Mesh | None = None,
) -> Program:
    """The program of a run on one mesh.

    `codecs` encode moments and frozen parameters; `exchange` gathers what ZeRO 3 stores sharded;
    `saved` is the adapter that `lora.adapter` names; `other_names` are those that the section
    `lora` may have for parameters of these shapes, beside the model's own; `frozen_on` is the mesh
    of the program beside which this one has a model that is not trained at all.

    `parameter_server.build` takes any config, those with a parameter server too.
    """
    parallel, zero = config.parallel, config.zero_optimization
    assert parallel.data_reduction != "parameter_server"
    if not callable(loss_fn):
        raise ModelError(f"loss_fn is a {type(loss_fn).__name__}; it is called as (model, batch)")
    mesh = frozen_on or _mesh_of(config.mesh.model_dump(), devices, _offload_keys(config))
    batch = config.batch_on(mesh.shape)
    _check_parts(parallel.batch_parts, batch, mesh)

    build = partial(build_program, saved=saved, other_names=other_names)
    source = BuildInputs(build, model, optimizer, example_batch, trainable, init_with)
    read = _read_model(config, mesh, source, loss_fn, saved, other_names)
    if frozen_on is None and not any(leaf.trainable for leaf in read.leaves):
        raise ModelError(_nothing_trained(read.leaves))
    _check_rollouts(objective_of(loss_fn), batch, read.stack)
    placed = _placed(config, mesh, read, optimizer, codecs)
    table, chosen = placed.table, placed.optimizer
    traced_loss = _traced_loss_of(config, read.model, loss_fn, table, exchange)
    streamed = _streamed(table, read.model, placed.layout, chosen, optimizer is None, zero)
    update = Update(
        table,
        read.model,
        placed.layout,
        chosen,
        gradient_factor=table.ranks if config.gradient_allreduce_op == "sum" else 1,
        skip_non_finite=config.bf16.check_grad_overflow or not config.bf16.enabled,
        streamed=streamed,
        ring=placed.ring,
        tier=_tier_of(config, streamed),
    )
    gradients = _gradients_of(
        parallel, traced_loss, batch.accumulation, placed.ring, config.pipeline_recompute
    )
    phases_of = step_phases if update.tier else None
    program = Program(
        config, batch, traced_loss, gradients, update, source, read.proposal, phases_of
    )
    return with_array_phases(program)


def _check_rollouts(objective: Objective | None, batch: Batch, stack: Stack | None) -> None:
    """Raise ConfigError unless a model that is so partitioned can sample such batches."""
    if objective is None or objective.records != "prompts":
        return
    if isinstance(stack, UnlikeStages):
        raise ConfigError(
            "mesh.pipe: the objective samples completions, and this model's stages are of unlike "
            "blocks, which do not sample: write 1, or shard by mesh.tensor or ZeRO stage 3"
        )
    problems = rollout_problems(objective.options, batch.train, batch.accumulation)
    if wrong := list(problems):
        raise config_error(wrong, "the config")


class _ReadModel(NamedTuple):
    """A model with adapters, and its leaves, divided where their layers or stages differ."""

    model: Model
    leaves: tuple[Leaf, ...]
    stack: Stack | None  # of the blocks that are partitioned over `pipe`
    named: NamedLeaves  # by the paths that patterns match
    uses: Uses | None  # of each weight, if the loss is traced and a codec or an adapter reads them
    proposal: ShardingProposal | None  # of the sharding over `tensor`, if inferred


def _read_model(
    config: Config,
    mesh: Mesh,
    source: BuildInputs,
    loss_fn: Callable[[Any, Any], Any],
    saved: SavedAdapter | None,
    other_names: Callable[[Mapping[str, Any]], OtherNames] | None,
) -> _ReadModel:
    """The model, whose dims are named, and what of it is trained."""
    parallel, example_batch = config.parallel, source.example_batch
    kept = config.data_types.keep_in_fp32_modules
    in_fp32: Sequence[str] = () if kept == "auto" else kept
    trained = train_rule(config, source.trainable)
    base = adapt_model(
        source.model,
        loss_fn,
        example_batch=example_batch,
        trained=trained,
        full_precision=parallel.full_precision,
        keep_in_fp32=in_fp32,
        state_collections=parallel.state_collections,
        init_with=source.init_with,
    )
    trace, dims = _traces_of(base, loss_fn, example_batch, mesh, compute_dtype(config))
    leaves, proposal = with_tensor_names(parallel, config.layer_specs, base.leaves, mesh, dims)
    by_use = config.lora or config.quantize  # what reads a weight decides how
    if trace and (by_use or trained.names_layers(leaves)):
        leaves = with_scanned_layers(leaves, trace())
    uses = _uses_of(trace()) if trace and by_use else None
    objective = objective_of(loss_fn)
    beside = () if objective is None else objective.modules_to_save
    model, leaves, trained = _with_adapters(
        config.lora, base, leaves, trained, uses, saved, other_names, beside
    )
    if config.checkpoint.exclude_frozen_parameters and model.weights is None:
        raise ConfigError(
            "checkpoint.exclude_frozen_parameters: this model's parameters are not read from a "
            "folder (model.pretrained), so those that a checkpoint leaves out would be lost; "
            "remove it"
        )
    _check_patterns(parallel.full_precision, in_fp32, leaves, model.variables)
    stack = _stack_of(parallel, mesh, leaves, trace, _against_unlike_stages(config, mesh))
    named = NamedLeaves(leaves)
    leaves = trained.by_layers(named)
    if stack:
        stack = divided_like(stack, leaves)
        leaves = with_stages(leaves, stack)
    return _ReadModel(model, leaves, stack, named, uses, proposal)


class _Placed(NamedTuple):
    """The placement table of a run, and what its rows are of besides the model."""

    table: PlacementTable
    optimizer: RunOptimizer
    layout: OptLayout
    ring: Reduction | None


def _placed(
    config: Config,
    mesh: Mesh,
    read: _ReadModel,
    transform: optax.GradientTransformation | None,
    codecs: Sequence[AssignsCodecs],
) -> _Placed:
    """The placement of the parameters, of the optimizer's state and of what else is stored."""
    zero, by_path = config.zero_optimization, {leaf.path: leaf for leaf in read.leaves}

    def covers(pattern: str, path: str) -> bool:
        return read.named.covers_row(pattern, by_path[path])

    if_frozen = config.quantizes_what_is_frozen
    rules = codec_rules(config.quantize, read.leaves, read.uses, if_frozen=if_frozen)
    optimizer = optimizer_of(config, transform, by_path, covers)
    table = build_table(
        read.leaves,
        mesh,
        stage=zero.stage,
        precision=precision_of(config),
        persistence_threshold=zero.stage3_param_persistence_threshold,
        stack=read.stack,
        offload=offload_of(zero),
        codecs=(*codecs, *rules, *optimizer.codecs),
    )
    layout = _layout_of(table, read.model, optimizer.transform)
    several = table.mesh.size > 1
    if several and optimizer.sees_matrices and not _is_streamed(table, optimizer):
        table = _with_owners(table, read.model, layout, optimizer.transform)
        layout = layout.over(table) if table.owned else layout
    rings = rings_of(config.parallel, mesh)
    ring = Reduction(rings, table) if rings else None
    table = table.with_state(layout.places, _extra_rows(mesh, read.model.variables, ring))
    return _Placed(table, optimizer, layout, ring)


def _mesh_of(
    sizes: Mapping[str, int], devices: Sequence[jax.Device] | None, offload_keys: Collection[str]
) -> Mesh:
    """The mesh, on a platform whose JAX computes right."""
    mesh = build_mesh(sizes, devices)
    if simulated(mesh):
        merge_summed_dims()
    platform = mesh.devices.flat[0].platform
    refuse_known_bugs(platform, installed(platform), offload_keys)
    return mesh


def _traces_of(
    model: Model, loss_fn: Callable[[Any, Any], Any], example_batch: Any, mesh: Mesh, dtype: Any
) -> tuple[Callable[[], LossProgram], Callable[[], PropagatedDims]] | tuple[None, None]:
    """The loss traced on an example batch, and its dims; each when it is first called."""
    if example_batch is None:
        return None, None
    inputs = model, loss_fn, example_batch, mesh
    return cache(partial(traced_example, *inputs)), cache(partial(propagated_dims, *inputs, dtype))


def _uses_of(program: LossProgram) -> Uses:
    """The dims of each weight in the products that read it."""
    return weight_dims(program.closed.jaxpr, {v: path for path, v in program.parameters.items()})


def _with_adapters(
    section: Lora | None,
    base: Model,
    leaves: tuple[Leaf, ...],
    trained: TrainRule,
    uses: Uses | None,
    saved: SavedAdapter | None,
    other_names: Callable[[Mapping[str, Any]], OtherNames] | None,
    beside: Collection[str],
) -> tuple[Model, tuple[Leaf, ...], TrainRule]:
    """The model with the adapters of a section, its leaves, and the rule by which they train.

    The modules named `beside` are trained in full too.
    """
    adapted, layers = base, dict[str, Sequence[bool]]()
    if section is not None:
        choice = choose_adapters(section, leaves, uses, saved, other_names)
        base_leaves = [
            replace(
                leaf, trainable=leaf.path in choice.trained or leaf.path.split("/")[0] in beside
            )
            for leaf in leaves
        ]
        adapted = AdaptedModel(base, base_leaves, choice.adapters, choice.section, saved)
        leaves, layers = adapted.leaves, dict(choice.layers)
    trained = replace(trained, layers=layers)
    leaves = trained.over(leaves)
    trained.check(leaves)
    return adapted, leaves, trained


def _check_parts(parts: int, batch: Batch, mesh: Mesh) -> None:
    if parts > 1 and mesh.size > 1:
        raise ConfigError(
            f"parallel.batch_parts {parts} on {mesh.size} devices: each computes a part of its own "
            "already; remove it, or train on one device"
        )
    if batch.micro % parts:
        raise ConfigError(
            f"parallel.batch_parts {parts}: a micro-batch of {batch.micro} samples does not divide "
            "into so many parts of equal size"
        )


def _offload_keys(config: Config) -> list[str]:
    """The keys of a config that offload something to host memory."""
    zero, recompute = config.zero_optimization, config.recompute
    asked = {
        "activation_checkpointing.cpu_checkpointing": recompute.on_host,
        "parallel.remat.offload": recompute.offload,
        "parallel.remat.budget": recompute.budget is not None,
        "zero_optimization.offload_optimizer": zero.offload_optimizer.device == "cpu"
        or _update_device_of(zero) is ON_HOST,
        "zero_optimization.offload_param": zero.offload_param.device == "cpu",
    }
    return [key for key, on in asked.items() if on]


def _nothing_trained(leaves: Sequence[Leaf]) -> str:
    if not leaves:
        return "the model has no floating parameters"
    return f"the model has no trained parameters ({len(leaves)} floating ones, all frozen)"


def _check_patterns(
    full_precision: Sequence[str],
    in_fp32: Sequence[str],
    leaves: Sequence[Leaf],
    variables: Iterable[str],
) -> None:
    """Raise where a pattern of the config matches no parameter."""
    paths = [path for leaf in leaves for path in leaf.paths]
    check_patterns("parallel.full_precision", full_precision, paths)
    for name in in_fp32:
        if not any(keeps_fp32(name, path) for path in (*paths, *variables)):
            raise ConfigError(
                f"data_types.keep_in_fp32_modules: {name!r} is in no path of this model; it has, "
                f"for example: {examples(nearest(name, paths))}"
            )


def _stack_of(
    parallel: Parallel,
    mesh: Mesh,
    leaves: Sequence[Leaf],
    trace: Callable[[], LossProgram] | None,
    against_unlike: Sequence[str],
) -> Stack | None:
    """The blocks that are partitioned over `pipe`.

    `against_unlike` are the settings that exclude stages of unlike blocks.
    """
    stages, chunks = mesh.shape[PIPE], _chunks_of(parallel)
    if stages == 1:
        return None
    base_leaves = [leaf for leaf in leaves if not leaf.adapts]
    stack = find_stages(base_leaves, parallel.units, trace, stages, chunks, against_unlike)
    return with_adapters_of(replace(stack, chunks=chunks), leaves)


def _against_unlike_stages(config: Config, mesh: Mesh) -> list[str]:
    """The settings that stages of unlike blocks exclude, each with what to set."""
    zero, parallel = config.zero_optimization, config.parallel
    axes = [
        name
        for name, axis in AXES.items()
        if (axis.dims or axis.batch == "positions") and name != PIPE and mesh.shape[name] > 1
    ]
    sharded = zero.stage >= 2 and storing_ranks(mesh.shape) > 1
    drawn = config.lora is not None and config.lora.lora_dropout > 0
    settings = {f"mesh.{axis} 1": True for axis in axes} | {
        'parallel.pipeline_schedule "1f1b" or "gpipe"': parallel.pipeline_schedule == "interleaved",
        'parallel.pipeline_recompute "stage"': config.pipeline_recompute != "stage",
        "no remat": bool(config.recompute),
        "zero_optimization.stage 0 or 1": sharded,
        "no offload_param": zero.offload_param.device == "cpu",
        "no model.quantize": config.quantize is not None,
        "lora.lora_dropout 0": drawn and data_ranks(mesh.shape) > 1,
    }
    return [setting for setting, excluded in settings.items() if excluded]


def _chunks_of(parallel: Parallel) -> int:
    """The schedule's number of chunks per stage."""
    return parallel.pipeline_chunks if parallel.pipeline_schedule == "interleaved" else 1


def offload_of(zero: Zero) -> Offload:
    """The state that is offloaded."""
    optimizer, param = zero.offload_optimizer, zero.offload_param.device == "cpu"
    share, disk = 0.0 if optimizer.device == "none" else optimizer.ratio, optimizer.device == "nvme"
    return Offload(share, param, disk, on_host=not disk or optimizer.where == "host")


def _update_device_of(zero: Zero) -> UpdateDevice:
    """Where offloaded state is updated: on the host's cores or on the device."""
    optimizer = zero.offload_optimizer
    return ON_HOST if optimizer.device != "none" and optimizer.where == "host" else ON_DEVICE


def _tier_of(config: Config, streamed: StreamedUpdate | None) -> DiskTier | None:
    """The files of state on a disk, which are opened when they are first used."""
    offload = config.zero_optimization.offload_optimizer
    if streamed is None or streamed.bucket is None:
        return None
    assert offload.nvme_path is not None
    threads = min(max(config.aio.thread_count, 2), 4)
    path = abspath(expanduser(offload.nvme_path))
    options = DiskOptions(path, offload.buffer_count, threads)
    return DiskTier(disk_buckets(streamed), options)


def _is_streamed(table: PlacementTable, optimizer: RunOptimizer) -> bool:
    """Whether any state is in host memory, on a disk or encoded."""
    rows = [row for row in table if row.leaf.trainable]
    places = [place for row in rows for place in (row.updated, row.opt, row.grad, row.param)]
    return bool(optimizer.codecs) or any(
        place and (in_host(place) or place.disk) for place in places
    )


def _streamed(
    table: PlacementTable,
    model: Model,
    layout: OptLayout,
    optimizer: RunOptimizer,
    by_layer: bool,
    zero: Zero,
) -> StreamedUpdate | None:
    """The streamed update of state in host memory, on a disk, or in 8 bits; None without these.

    Raises ConfigError for an optimizer that cannot update one parameter at a time.
    """
    if not _is_streamed(table, optimizer):
        return None
    elements = min(zero.sub_group_size or LARGEST_BUCKET, LARGEST_BUCKET)
    bucket = elements if table.disk_bytes_by_role() else None
    streamed = StreamedUpdate(
        table,
        model,
        layout,
        optimizer.transform,
        by_layer,
        optimizer.ema_decay,
        _update_device_of(zero),
        bucket,
    )
    streamed.check()
    return streamed


def _traced_loss_of(
    config: Config,
    model: Model,
    loss_fn: Callable[[Any, Any], Any],
    table: PlacementTable,
    exchange: Exchange,
) -> MicroBatchLoss:
    """The loss of a micro-batch, with all that rewrites it."""
    parallel, safe = config.parallel, config.torch_autocast.lower_precision_safe_modules
    platform = table.mesh.devices.flat[0].platform
    overlap, objective = config.tensor_overlap, objective_of(loss_fn)
    return MicroBatchLoss(
        model,
        loss_fn,
        table,
        compute_dtype(config),
        tuple(parallel.units),
        dtype_named(config.reduction_dtype),
        ActivationLayout(
            parallel.sequence_parallel_activations,
            best_overlap(platform) if overlap == "auto" else overlap,
        ),
        config.recompute,
        exchange,
        autocast_of(DTYPES[config.compute_dtype], safe, table) if config.autocasts else None,
        _sequence_of(parallel, config.recompute),
        () if objective is None else objective.in_fp32,
    )


def _gradients_of(
    parallel: Parallel,
    traced_loss: MicroBatchLoss,
    accumulation: int,
    ring: Reduction | None,
    recompute: str,
) -> Gradients:
    """The gradients of a step: by rings, by a pipeline of stages, or as XLA reduces them."""
    if ring:
        return RingGradients(traced_loss, accumulation, ring=ring)
    pipeline = None
    if traced_loss.table.mesh.shape[PIPE] > 1:
        pipeline = Pipeline(
            traced_loss,
            parallel.pipeline_schedule,
            _chunks_of(parallel),
            recompute,
            parallel.pipeline_gather,
        )
    return Gradients(
        traced_loss, accumulation, parallel.gradient_reduction, pipeline, parallel.batch_parts
    )


def _layout_of(
    table: PlacementTable, model: Model, transform: optax.GradientTransformation
) -> OptLayout:
    """The placement of the optimizer's state, from the shapes of its `init`."""
    trained = {
        row.path: jax.ShapeDtypeStruct(row.leaf.shape, row.updated.dtype)
        for row in table
        if row.leaf.trainable
    }
    abstract = jax.eval_shape(transform.init, native_tree(model, trained))
    return OptLayout.of(table, abstract, device_memory_kind(table.mesh))


def _with_owners(
    table: PlacementTable,
    model: Model,
    layout: OptLayout,
    transform: optax.GradientTransformationExtraArgs,
) -> PlacementTable:
    """The table with the matrices that the optimizer's update computes at their owners."""
    trained = [row for row in table if row.leaf.trainable]
    grads, params = (
        native_tree(
            model, {row.path: jax.ShapeDtypeStruct(row.leaf.shape, dtype(row)) for row in trained}
        )
        for dtype in (wide_dtype, lambda row: row.updated.dtype)
    )
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.placement.dtype) for leaf in layout.places.values()
    ]
    opt = jax.tree.unflatten(layout.tree, leaves)
    with matrices_asked() as asked:
        jax.eval_shape(partial(transform.update, placements=table), grads, opt, params)
    return table.with_owners(asked)


def _sequence_of(parallel: Parallel, recompute: Recompute) -> SequenceSettings:
    """How sequences are sharded and tiled; tiles keep what the policy of `recompute` names."""
    number = parallel.sequence_tiles
    attention = ("attention",) if recompute.policy == "attention" else ()
    kept = (*attention, *recompute.save, *recompute.offload)
    tiles = SequenceTiles(1 if number == "none" else number, kept)
    return SequenceSettings(**parallel.sequence.model_dump(), tiles=tiles)


def _extra_rows(
    mesh: Mesh, variables: Mapping[str, jax.ShapeDtypeStruct], ring: Reduction | None
) -> dict[str, StateLeaf]:
    """State beside parameters: replicated variables, and ring errors sharded over devices."""
    memory = device_memory_kind(mesh)
    rows = {path: (v, PartitionSpec()) for path, v in variables.items()}
    rows |= {
        f"ring_errors/{name}": (v, PER_DEVICE) for name, v in (ring.errors if ring else {}).items()
    }
    return {
        path: StateLeaf(tuple(v.shape), tuple(v.shape), Placement(spec, memory, v.dtype))
        for path, (v, spec) in rows.items()
    }
