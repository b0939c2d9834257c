"""The passes over a traced loss, in order.

Those of `BEFORE_SPLIT` rewrite the loss once it is traced; their result is cached with the trace.
Those of `AFTER_SPLIT` rewrite what is evaluated: the loss, or each part of it that the pipeline
runs (embedding, stage, head). They depend on the mesh of the trace's context and on the placement.
`zero3.run_segmented` evaluates the result.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.adapters.adapt_loss import adapt_loss
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.axes import SEQ
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.split_scans import in_parts
from jaxspeed.jaxpr.traverse import ClosedJaxpr, Var, forwarded, is_var, shape_of
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.paths import listed
from jaxspeed.sequence_parallel import (
    AttentionNotes,
    LeftAlone,
    LowProducts,
    SequenceSettings,
    sequences,
    with_attention_calls,
)
from jaxspeed.sequence_parallel.tile_sequence import in_sequence_tiles
from jaxspeed.sequence_parallel.zigzag import in_zigzag
from jaxspeed.sequence_parallel.zigzag_proof import ContiguousError
from jaxspeed.tensor_parallel import ActivationLayout, with_boundary_constraints
from jaxspeed.traced_loss.autocast import Autocast, lowers, with_autocast
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.loss_weight import with_weight_differentiated
from jaxspeed.traced_loss.sharded_draws import shared_sizes, with_draws_sharded
from jaxspeed.user_models.protocol import SEED
from jaxspeed.zero3 import Units

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class TraceContext:
    """What the first passes depend on."""

    autocast: Autocast | None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # by the paths of their weights
    train: bool = True
    dropout: bool = True  # of adapters, in training
    # Of parameters whose ranges of layers are leaves: (path, number of layers) of each.
    ranges: Mapping[str, Sequence[tuple[str, int]]] = field(default_factory=dict)
    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    trained: Collection[str] = ()  # paths of parameters, and of ranges of their layers


@dataclass(frozen=True)
class PartContext:
    """What the later passes depend on.

    Attributes:
      mesh: of the placement.
      specs: of the parameters as layers read them, by path.
      layout: of activations at shard boundaries.
      units: those by which the program is evaluated; None for none.
      also: axes that shard the samples of this part beside those of all samples.
      sequence: how the axis `seq` shards sequences.
      notes: filled with how attention runs, for a report.
    """

    mesh: Mesh
    specs: Mapping[str, PartitionSpec]
    layout: ActivationLayout
    units: Units | None
    also: tuple[str, ...] = ()
    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    notes: AttentionNotes | None = None


def prune(program: LossProgram, context: TraceContext) -> LossProgram:
    """Remove results that are unchanged inputs.

    Transposes that nothing else reads go too: a stack is found by what reads its parameters.
    """
    jaxpr = program.closed.jaxpr
    path_of = {v: path for path, v in program.parameters.items()} | {**program.variables}
    tree = program.out_tree
    loss, after = jax.tree.unflatten(tree, range(tree.num_leaves))
    origins = forwarded(jaxpr)
    changed = {path: i for path, i in after.items() if path_of.get(origins[i]) != path}
    outs = [jaxpr.outvars[i] for i in jax.tree.leaves((loss, changed))]
    eqns: list[Any] = []
    read = {*filter(is_var, outs)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name != "transpose" or eqn.outvars[0] in read:
            eqns.append(eqn)
            read.update(filter(is_var, eqn.invars))
    pruned = program.rewritten(jaxpr.replace(outvars=outs, eqns=eqns[::-1]))
    return replace(pruned, out_tree=jax.tree.structure((loss, changed)))


def adapters(program: LossProgram, context: TraceContext) -> LossProgram:
    """Adapt the products that read weights with adapters.

    Before the scans over ranges of layers are split: those of adapters too. Before the precision:
    an adapter's products are lowered as those of its weight.
    """
    if not context.adapters:
        return program
    key = None
    if context.dropout and any(adapter.dropout for adapter in context.adapters.values()):
        (seed,) = (v for v, path in program.variables.items() if path == SEED)
        step, micro = program.closed.jaxpr.invars[-2:]
        key = seed, step, micro
    jaxpr = program.closed.jaxpr
    paths = {path: v for v, path in program.variables.items()}
    squares = {
        path: paths[adapter.leaf("squares")]
        for path, adapter in context.adapters.items()
        if adapter.leaf("squares") in paths
    }
    adapted = adapt_loss(jaxpr, program.parameters, context.adapters, key, squares)
    _note_merged(adapted.merged)
    return program.rewritten(adapted.jaxpr)


@cache
def _note_merged(paths: tuple[str, ...]) -> None:
    if paths:
        log.info(
            "lora: %s is read otherwise than by a product, so its adapter is added to the weight "
            "there, which needs the memory of the merged weight and of its gradient",
            listed(paths),
        )


def layer_ranges(program: LossProgram, context: TraceContext) -> LossProgram:
    """Pass ranges of layers as parameters of their own, and split the scans over them."""
    sizes = {
        program.parameters[path]: [size for _, size in named_sizes]
        for path, named_sizes in context.ranges.items()
    }
    if not sizes:
        return program
    jaxpr, parts = in_parts(program.closed.jaxpr, sizes)
    parameters: dict[str, Var] = {}
    for path, v in program.parameters.items():
        of_ranges = [name for name, _ in context.ranges.get(path, ())]
        parameters |= dict(zip(of_ranges, parts[v], strict=True)) if of_ranges else {path: v}
    joined = [e.invars for e in jaxpr.eqns if e.primitive.name == "concatenate"]
    paths = [path for path, v in program.parameters.items() if v in parts and parts[v] in joined]
    _note_joined(tuple(paths))
    closed = ClosedJaxpr(jaxpr, program.closed.consts)
    return replace(program, closed=closed, parameters=parameters)


@cache
def _note_joined(paths: tuple[str, ...]) -> None:
    """Warn once; the loss is traced several times."""
    if paths:
        log.warning(
            "the loss reads all layers of %s at once, otherwise than by a scan over them: "
            "gradients are computed for the frozen layers too, and then dropped",
            listed(paths),
        )


def attention_calls(program: LossProgram, context: TraceContext) -> LossProgram:
    """Attention in the model's own code as single equations, where an axis shards its sequence.

    Before the precision: a call contains the precision of its own products.
    """
    if free_axes().get(SEQ, 1) == 1 or not context.sequence.shards:
        return program
    low = None
    if (autocast := context.autocast) is not None:
        low = LowProducts(
            autocast.dtype,
            lambda eqn: lowers(eqn, autocast),
            lambda closed: with_autocast(closed, autocast, {}),
        )
    jaxpr, left_alone = with_attention_calls(program.closed, low)
    for call in left_alone:
        _note_left_alone(call)
    return replace(program.rewritten(jaxpr), left_alone=tuple(left_alone))


@cache
def _note_left_alone(attention: LeftAlone) -> None:
    """Warn once; the loss is traced several times."""
    log.warning(
        "attention%s is left to the compiler, which gathers its sequence: %s",
        attention.where,
        attention.reason,
    )


def precision(program: LossProgram, context: TraceContext) -> LossProgram:
    """Automatic mixed precision, if the config enables it."""
    if context.autocast is None:
        return program
    paths = {v: path for path, v in program.parameters.items()}
    return program.rewritten(with_autocast(program.closed, context.autocast, paths).jaxpr)


def token_order(program: LossProgram, context: TraceContext) -> LossProgram:
    """Sequences in zig-zag order, where an axis shards them and the loss allows it.

    The last of the first passes: what the others insert is proved, too.
    """
    settings = context.sequence
    if free_axes().get(SEQ, 1) == 1 or not program.positions or settings.layout == "contiguous":
        return program
    traced = program.closed.jaxpr, program.parameters, program.batch, program.positions
    try:
        return program.rewritten(in_zigzag(*traced, settings))
    except ContiguousError as why:
        if settings.layout == "zigzag":
            raise ConfigError(f"parallel.sequence.layout zigzag: {why}: use contiguous") from None
        _note_contiguous(str(why))
        return program


@cache
def _note_contiguous(why: str) -> None:
    """Note once; the loss is traced several times."""
    log.info("tokens stay in contiguous order over seq, not zig-zag: %s", why)


def draws(program: LossProgram, context: PartContext) -> LossProgram:
    """Shard random numbers like the samples for which they are drawn."""
    shapes = [shape_of(v) for v in program.batch]
    sizes = {shape[0] for shape in shapes if shape}
    shared = shared_sizes(sizes, context.mesh, context.also)
    jaxpr = with_draws_sharded(program.closed.jaxpr, shared, context.mesh, context.also)
    return program.rewritten(jaxpr)


def boundaries(program: LossProgram, context: PartContext) -> LossProgram:
    """Insert the constraints of tensor parallelism and of sequences, and shard attention."""
    return program.rewritten(
        with_boundary_constraints(
            program.closed.jaxpr,
            program.parameters,
            program.batch,
            context.specs,
            context.mesh,
            context.layout,
            context.units.of if context.units else lambda eqn: None,
            sequences(program.positions, context.sequence, context.also, context.notes),
        )
    )


def sequence_tiles(program: LossProgram, context: PartContext) -> LossProgram:
    """Evaluate what is per token in tiles of the sequence, where that saves memory.

    The last pass: what the others insert is in the tiles.
    """
    if context.layout.sequence_parallel:  # shards of tiles would not be those of the sequence
        return program
    return program.rewritten(
        in_sequence_tiles(
            program.closed.jaxpr,
            program.parameters,
            program.batch,
            context.specs,
            context.mesh,
            context.units.of if context.units else lambda eqn: None,
            context.sequence.tiles,
        )
    )


def weight_derivative(program: LossProgram, context: TraceContext) -> LossProgram:
    """Give the weight of a loss its gradient, where it is no constant to the derivative."""
    return with_weight_differentiated(program, context.trained) if context.train else program


BEFORE_SPLIT: tuple[Callable[[LossProgram, TraceContext], LossProgram], ...] = (
    prune,
    adapters,
    layer_ranges,
    attention_calls,
    precision,
    token_order,
    weight_derivative,
)
AFTER_SPLIT: tuple[Callable[[LossProgram, PartContext], LossProgram], ...] = (
    draws,
    boundaries,
    sequence_tiles,
)


def before_split(program: LossProgram, context: TraceContext) -> LossProgram:
    """Rewrite a loss by the first passes."""
    return reduce(lambda program, rewrite: rewrite(program, context), BEFORE_SPLIT, program)


def after_split(program: LossProgram, context: PartContext) -> LossProgram:
    """Rewrite a loss, or a part of one, by the later passes."""
    first = replace(program, loss=program.loss or program)
    return reduce(lambda program, rewrite: rewrite(program, context), AFTER_SPLIT, first)
