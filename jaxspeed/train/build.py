"""Build a Program from a config, a model, a loss and devices, without creating arrays."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.adapters.adapt_loss import weight_dims
from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.adapters.choose_adapters import OtherNames, SavedAdapter, choose_adapters
from jaxspeed.axes import AXES, PIPE, data_ranks, storing_ranks
from jaxspeed.config import Batch, Config
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.jaxpr.weight_uses import Uses
from jaxspeed.known_jax_bugs import installed, refuse_known_bugs
from jaxspeed.objective.autocast import autocast_of
from jaxspeed.objective.loss_program import LossProgram
from jaxspeed.objective.objective import Objective
from jaxspeed.offload import ON_DEVICE, ON_HOST, UpdateDevice
from jaxspeed.offload.offloaded_update import StreamedUpdate
from jaxspeed.ops.cpu_products import merge_summed_dims
from jaxspeed.pipeline import Pipeline
from jaxspeed.pipeline.find_blocks import find_stages
from jaxspeed.pipeline.scanned_stack import with_scanned_layers
from jaxspeed.placement.codec import AssignsCodecs
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.mesh import build_mesh, simulated
from jaxspeed.placement.precision import DTYPES, compute_dtype, keeps_fp32, precision_of
from jaxspeed.placement.rows import Leaf, Offload, Placement
from jaxspeed.placement.rules import check_patterns, examples, nearest
from jaxspeed.placement.stacks import Stack, divided_like, with_adapters_of, with_stages
from jaxspeed.placement.table import PlacementTable, StateLeaf, build_table, device_memory_kind
from jaxspeed.quantization.choose_codecs import codec_rules
from jaxspeed.ring_reduction import PER_DEVICE, Reduction, rings_of
from jaxspeed.sequence_parallel.settings import SequenceSettings, SequenceTiles
from jaxspeed.tensor_parallel import ActivationLayout, best_overlap
from jaxspeed.train.gradients import Gradients
from jaxspeed.train.program import BuildInputs, Program
from jaxspeed.train.ring_gradients import RingGradients
from jaxspeed.train.tensor_names import traced_example, with_tensor_names
from jaxspeed.train.update import Update
from jaxspeed.train_state.opt_layout import OptLayout
from jaxspeed.train_state.optimizer import RunOptimizer, optimizer_of
from jaxspeed.train_state.state import native_tree
from jaxspeed.user_models import Model, adapt_model
from jaxspeed.user_models.trainable import NamedLeaves, train_rule
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
) -> Program:
    """The program of a run on one mesh.

    `codecs` encode moments and frozen parameters; `exchange` gathers what ZeRO 3 stores sharded;
    `saved` is the adapter that `lora.adapter` names; `other_names` are those that the section
    `lora` may have for parameters of these shapes, beside the model's own.

    `parameter_server.build` takes any config, those with a parameter server too.
    """
    assert config.parallel.data_reduction != "parameter_server"
    if not callable(loss_fn):
        raise ModelError(f"loss_fn is a {type(loss_fn).__name__}; it is called as (model, batch)")
    mesh = build_mesh(config.mesh.model_dump(), devices)
    if simulated(mesh):
        merge_summed_dims()
    platform = mesh.devices.flat[0].platform
    refuse_known_bugs(platform, installed(platform), _offload_keys(config))
    batch = config.batch_on(mesh.shape)
    _check_parts(config.parallel.batch_parts, batch, mesh)
    trained = train_rule(config, trainable)
    base = adapt_model(
        model,
        loss_fn,
        example_batch=example_batch,
        trained=trained,
        full_precision=config.parallel.full_precision,
        keep_in_fp32=_kept_in_fp32(config),
        state_collections=config.parallel.state_collections,
        init_with=init_with,
    )
    leaves, proposal = with_tensor_names(config, mesh, base, loss_fn, example_batch)

    @functools.cache
    def example() -> LossProgram:
        return traced_example(base, loss_fn, example_batch, mesh)

    trace = None if example_batch is None else example
    by_use = config.lora or config.quantize  # what reads a weight decides how
    if trace and (by_use or trained.names_layers(leaves)):
        leaves = with_scanned_layers(leaves, trace())
    uses = None
    if trace and by_use:
        paths = {v: path for path, v in trace().parameters.items()}
        uses = weight_dims(trace().closed.jaxpr, paths)
    adapted, leaves, layers = _with_adapters(config, base, leaves, uses, saved, other_names)
    trained = replace(trained, layers=layers)
    leaves = trained.over(leaves)
    trained.check(leaves)
    if config.checkpoint.exclude_frozen_parameters and adapted.weights is None:
        raise ConfigError(
            "checkpoint.exclude_frozen_parameters: this model's parameters are not read from a "
            "folder (model.pretrained), so those that a checkpoint leaves out would be lost; "
            "remove it"
        )
    _check_patterns(config, leaves, adapted.variables)
    own = [leaf for leaf in leaves if not leaf.adapts]
    stack = _stack_of(config, mesh, own, trace)
    stack = with_adapters_of(stack, leaves) if stack else None
    named = NamedLeaves(leaves)
    leaves = trained.by_layers(named)
    stack = divided_like(stack, leaves) if stack else None
    leaves = with_stages(leaves, stack) if stack else leaves
    rules = codec_rules(config.quantize, leaves, uses, if_frozen=config.quantizes_what_is_frozen)
    codecs = (*codecs, *rules)
    by_path = {leaf.path: leaf for leaf in leaves}

    def covers(pattern: str, path: str) -> bool:
        return named.covers_row(pattern, by_path[path])

    chosen = optimizer_of(config, optimizer, by_path, covers)
    table = _table_of(config, mesh, leaves, stack, (*codecs, *chosen.codecs))
    layout = _layout_of(table, adapted, chosen.transform)
    rings = rings_of(config, mesh)
    ring = Reduction(rings, table) if rings else None
    table = table.with_state(layout.places, _extra_rows(mesh, adapted.variables, ring))
    wire = config.reduction_dtype
    objective = Objective(
        adapted,
        loss_fn,
        table,
        compute_dtype(config),
        tuple(config.parallel.units),
        DTYPES[wire] if wire else None,
        _style_of(config, mesh),
        config.recompute,
        exchange,
        autocast_of(config, table),
        _sequence_of(config),
    )
    build = functools.partial(build_program, saved=saved, other_names=other_names)
    update_device = _update_device_of(config)
    streamed = _streamed(table, adapted, layout, chosen, optimizer is None, update_device)
    update = Update(
        table,
        adapted,
        layout,
        chosen,
        gradient_factor=objective.table.ranks if config.gradient_allreduce_op == "sum" else 1,
        skip_non_finite=config.bf16.check_grad_overflow or not config.bf16.enabled,
        streamed=streamed,
        ring=ring,
    )
    return Program(
        config,
        batch,
        objective,
        RingGradients(objective, batch.accumulation, ring=ring)
        if ring
        else Gradients(
            objective,
            batch.accumulation,
            config.parallel.gradient_reduction,
            _pipeline_of(config, objective),
            config.parallel.batch_parts,
        ),
        update,
        BuildInputs(build, model, optimizer, example_batch, trainable, init_with),
        proposal,
    )


def _with_adapters(
    config: Config,
    base: Model,
    leaves: tuple[Leaf, ...],
    uses: Uses | None,
    saved: SavedAdapter | None,
    other_names: Callable[[Mapping[str, Any]], OtherNames] | None,
) -> tuple[Model, tuple[Leaf, ...], Mapping[str, Sequence[bool]]]:
    """The model with the config's adapters, and its leaves, of which these are trained.

    The third are the layers of leaves of which only some are trained.
    """
    if config.lora is None:
        return base, leaves, {}
    choice = choose_adapters(config.lora, leaves, uses, saved, other_names)
    own = [replace(leaf, trainable=leaf.path in choice.trained) for leaf in leaves]
    adapted = AdaptedModel(base, own, choice.adapters, choice.section, saved)
    return adapted, adapted.leaves, choice.layers


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
        "zero_optimization.offload_optimizer": zero.offload_optimizer.device == "cpu",
        "zero_optimization.offload_param": zero.offload_param.device == "cpu",
    }
    return [key for key, on in asked.items() if on]


def _check_patterns(config: Config, leaves: Sequence[Leaf], variables: Iterable[str]) -> None:
    """Raise where a pattern of the config matches no parameter, or none is trained."""
    if not any(leaf.trainable for leaf in leaves):
        raise ModelError(
            f"the model has no trained parameters ({len(leaves)} floating ones, all frozen)"
            if leaves
            else "the model has no floating parameters"
        )
    paths = [path for leaf in leaves for path in leaf.paths]
    check_patterns("parallel.full_precision", config.parallel.full_precision, paths)
    for name in _kept_in_fp32(config):
        if not any(keeps_fp32(name, path) for path in (*paths, *variables)):
            raise ConfigError(
                f"data_types.keep_in_fp32_modules: {name!r} is in no path of this model; it has, "
                f"for example: {examples(nearest(name, paths))}"
            )


def _kept_in_fp32(config: Config) -> Sequence[str]:
    """Names of parameters in fp32; "auto" leaves it to the model."""
    names = config.data_types.keep_in_fp32_modules
    return () if names == "auto" else names


def _stack_of(
    config: Config, mesh: Mesh, leaves: Sequence[Leaf], trace: Callable[[], LossProgram] | None
) -> Stack | None:
    """The blocks that are partitioned over `pipe`."""
    stages, chunks = mesh.shape[PIPE], _chunks_of(config)
    if stages == 1:
        return None
    against = _against_unlike_stages(config, mesh)
    stack = find_stages(leaves, config.parallel.units, trace, stages, chunks, against)
    return replace(stack, chunks=chunks)


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
    found = {f"mesh.{axis} 1": True for axis in axes} | {
        'parallel.pipeline_schedule "1f1b" or "gpipe"': parallel.pipeline_schedule == "interleaved",
        'parallel.pipeline_recompute "stage"': config.pipeline_recompute != "stage",
        "no remat": bool(config.recompute),
        "zero_optimization.stage 0 or 1": sharded,
        "no offload_param": zero.offload_param.device == "cpu",
        "no model.quantize": config.quantize is not None,
        "lora.lora_dropout 0": drawn and data_ranks(mesh.shape) > 1,
    }
    return [setting for setting, excluded in found.items() if excluded]


def _chunks_of(config: Config) -> int:
    """The schedule's number of chunks per stage."""
    parallel = config.parallel
    return parallel.pipeline_chunks if parallel.pipeline_schedule == "interleaved" else 1


def _table_of(
    config: Config,
    mesh: Mesh,
    leaves: Sequence[Leaf],
    stack: Stack | None,
    codecs: Sequence[AssignsCodecs],
) -> PlacementTable:
    zero = config.zero_optimization
    return build_table(
        leaves,
        mesh,
        stage=zero.stage,
        precision=precision_of(config),
        persistence_threshold=zero.stage3_param_persistence_threshold,
        stack=stack,
        offload=offload_of(config),
        codecs=codecs,
    )


def offload_of(config: Config) -> Offload:
    """The state that is offloaded to host memory."""
    optimizer = config.zero_optimization.offload_optimizer
    param = config.zero_optimization.offload_param.device == "cpu"
    return Offload(optimizer.ratio if optimizer.device == "cpu" else 0.0, param)


def _update_device_of(config: Config) -> UpdateDevice:
    """Where offloaded state is updated: on the host's cores or on the device."""
    optimizer = config.zero_optimization.offload_optimizer
    return ON_HOST if optimizer.device == "cpu" and optimizer.where == "host" else ON_DEVICE


def _streamed(
    table: PlacementTable,
    model: Model,
    layout: OptLayout,
    optimizer: RunOptimizer,
    by_layer: bool,
    update_device: UpdateDevice,
) -> StreamedUpdate | None:
    """The streamed update of state in host memory, or in 8 bits; None without these.

    Raises ConfigError for an optimizer that cannot update one parameter at a time.
    """
    rows = [row for row in table if row.leaf.trainable]
    places = [place for row in rows for place in (row.updated, row.opt, row.grad, row.param)]
    offloaded = any(place and in_host(place) for place in places)
    if not offloaded and not optimizer.codecs:
        return None
    streamed = StreamedUpdate(
        table, model, layout, optimizer.transform, by_layer, optimizer.ema_decay, update_device
    )
    streamed.check()
    return streamed


def _pipeline_of(config: Config, objective: Objective) -> Pipeline | None:
    if objective.table.mesh.shape[PIPE] == 1:
        return None
    parallel = config.parallel
    return Pipeline(
        objective,
        parallel.pipeline_schedule,
        _chunks_of(config),
        config.pipeline_recompute,
        parallel.pipeline_gather,
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


def _style_of(config: Config, mesh: Mesh) -> ActivationLayout:
    """How activations are sharded between matmuls that are sharded over `tensor`."""
    overlap = config.tensor_overlap
    if overlap == "auto":
        overlap = best_overlap(mesh.devices.flat[0].platform)
    return ActivationLayout(config.parallel.sequence_parallel_activations, overlap)


def _sequence_of(config: Config) -> SequenceSettings:
    number, recompute = config.parallel.sequence_tiles, config.recompute
    attention = ("attention",) if recompute.policy == "attention" else ()
    kept = (*attention, *recompute.save, *recompute.offload)
    tiles = SequenceTiles(1 if number == "none" else number, kept)
    return SequenceSettings(**config.parallel.sequence.model_dump(), tiles=tiles)


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
