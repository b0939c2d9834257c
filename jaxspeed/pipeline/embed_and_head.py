"""Embedding, head and loss of a pipeline: run in the global view, shared by all stages.

A vocabulary that they read is sharded over `pipe` (and `tensor`): each stage looks up and
multiplies its shard of the rows. Otherwise the samples are sharded over `pipe` too, if divisible.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.jaxpr.traverse import ClosedJaxpr
from jaxspeed.ops.free_axes import free_sample_axes
from jaxspeed.pipeline.step_values import SplitStep, Values
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.specs import spec_axes
from jaxspeed.tensor_parallel import REPLICATED, ActivationLayout
from jaxspeed.traced_loss.loss import Loss
from jaxspeed.traced_loss.passes import PartContext, after_split
from jaxspeed.train_state.state import Arrays
from jaxspeed.zero3 import EvalContext, run_segmented


def embed(split: SplitStep, micro: Any, outer: Mapping[str, Any]) -> Values:
    """The first block's input for one micro-batch: the embedding."""
    inputs = split.inputs(micro, outer)
    outs = _run(split, split.parts.before, inputs, [], split.traced_loss.style)
    return [_at_stage_boundary(split, x) for x in outs]


def head_and_loss(
    split: SplitStep, micro: Any, outer: Mapping[str, Any], carry: Values, written: Arrays
) -> tuple[Loss, Arrays]:
    """The loss of one micro-batch from the last block's output, and the variables after it.

    `written` are those that the loss changes, after the micro-batch before.
    """
    carry = [_at_stage_boundary(split, x) for x in carry]
    # The head reads unsharded activations, even with sequence parallelism.
    inputs = split.inputs(micro, outer, written)
    outs = _run(split, split.parts.after, inputs, carry, REPLICATED)
    loss: Loss
    loss, after = jax.tree.unflatten(split.program.out_tree, outs)
    return loss.folded(split.mean_weights), after


def _run(
    split: SplitStep, jaxpr: Any, inputs: Values, carry: Values, style: ActivationLayout
) -> Values:
    read, table = read_by(jaxpr), split.table
    arguments = {v: x for v, x in zip(jaxpr.invars, [*inputs, *carry], strict=True) if v in read}
    paths = {path: v for path, v in split.outside.items() if v in read}
    activations = [v for v in arguments if v not in split.index]
    samples = [*(v for v in split.program.batch if v in read), *activations]
    specs = {path: table[path].read.spec for path in paths}
    also: tuple[str, ...] = ()
    if not any(PIPE in spec_axes(spec) for spec in specs.values()):
        arguments |= {v: _shard_over_stages(arguments[v]) for v in samples}
        also = (PIPE,)
    storage = {v: split.traced_loss.stored(table[p]) for p, v in paths.items() if table[p].gathered}
    units = split.program.units
    closed = ClosedJaxpr(jaxpr.replace(invars=list(arguments)), ())
    part = split.program.part(closed, paths, samples)
    by_unit = units if storage else None
    part = after_split(
        part, PartContext(table.mesh, specs, style, by_unit, also, split.traced_loss.sequence)
    )
    context = EvalContext(units, split.samples, exchange=split.traced_loss.exchange)
    return run_segmented(part.closed.jaxpr, (), list(arguments.values()), storage, context)


def _shard_over_stages(x: Any) -> Any:
    """Shard samples over the stages as well as the data ranks."""
    at = _batch_sharding(x, (PIPE,))
    return x if at is None else constrain(x, at, "pipeline.samples")


def _at_stage_boundary(split: SplitStep, x: Any) -> Any:
    """Shard an activation entering the first stage or leaving the last one."""
    of_samples = x.ndim and x.shape[0] == split.samples
    at = _batch_sharding(x) if of_samples else None
    return x if at is None else constrain(x, at, "pipeline.between")


def _batch_sharding(x: Any, also: tuple[str, ...] = ()) -> NamedSharding | None:
    """Sharding of the first dim over the samples' axes and `also`; None if indivisible."""
    axes = free_sample_axes(x.shape[0], also=also) if x.ndim else ()
    if not axes:
        return None
    entries = [axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
    return NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*entries))
