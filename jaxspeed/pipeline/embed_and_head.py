"""Embedding, head and loss of a pipeline: run in the global view, shared by all stages.

Where they read a vocabulary, it is cut over `pipe` (and `tensor`): each stage looks up and
multiplies its share of the rows. Otherwise the samples are cut over `pipe` too, where they divide.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.objective.loss import Loss
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.pipeline.stage_shard_map import PIPE
from jaxspeed.pipeline.step_values import Split, Values
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.mesh import DATA_AXES
from jaxspeed.placement.specs import spec_axes
from jaxspeed.tensor_parallel import AS_WHOLE, Style, with_crossings
from jaxspeed.zero3 import Way, run_sliced


def before(split: Split, micro: Any, outer: Mapping[str, Any]) -> Values:
    """What the first block reads of one micro-batch."""
    outs = _run(split, split.parts.before, micro, outer, [], split.objective.style)
    return [_between(split, x) for x in outs]


def after(split: Split, micro: Any, outer: Mapping[str, Any], carry: Values) -> Loss:
    """The loss of one micro-batch, of what the last block gave."""
    carry = [_between(split, x) for x in carry]
    # The head reads whole activations: of its own, nothing is cut along a sequence.
    outs = _run(split, split.parts.after, micro, outer, carry, AS_WHOLE)
    return jax.tree.unflatten(split.program.out_tree, outs)[0]


def read_in(split: Split, jaxpr: Any) -> list[str]:
    """The trained parameters outside of the blocks that a part reads."""
    read = read_by(jaxpr)
    paths = [path for path, v in split.outside.items() if v in read]
    return [path for path in paths if split.table[path].leaf.trainable]


def _run(
    split: Split, jaxpr: Any, micro: Any, outer: Mapping[str, Any], carry: Values, style: Style
) -> Values:
    inputs, read, table = split.inputs(micro, outer), read_by(jaxpr), split.table
    given = {v: x for v, x in zip(jaxpr.invars, [*inputs, *carry], strict=True) if v in read}
    paths = {path: v for path, v in split.outside.items() if v in read}
    activations = [v for v in given if v not in split.index]
    samples = [*(v for v in split.program.batch if v in read), *activations]
    specs = {path: table[path].read.spec for path in paths}
    if not any(PIPE in spec_axes(spec) for spec in specs.values()):
        given |= {v: _over_stages(given[v]) for v in samples}
    storage = {v: split.objective.stored(table[p]) for p, v in paths.items() if table[p].gathered}
    units = split.program.units
    of_unit = units.of if storage else lambda eqn: None
    jaxpr = jaxpr.replace(invars=list(given))
    jaxpr = with_crossings(jaxpr, paths, samples, specs, table.mesh, style, of_unit)
    return run_sliced(jaxpr, (), list(given.values()), storage, Way(units, split.samples))


def _over_stages(x: Any) -> Any:
    """Samples that the stages share as well as the data ranks."""
    at = _cut(x, (*DATA_AXES, PIPE))
    return x if at is None else constrain(x, at, "pipeline.samples")


def _between(split: Split, x: Any) -> Any:
    """An activation on its way into the first stage or out of the last."""
    of_samples = x.ndim and x.shape[0] == split.samples
    at = _cut(x, DATA_AXES) if of_samples else None
    return x if at is None else constrain(x, at, "pipeline.between")


def _cut(x: Any, axes: tuple[str, ...]) -> NamedSharding | None:
    """The first dim over these axes, as far as they are not manual here; None if they do not
    divide it."""
    free = free_axes()
    axes = tuple(axis for axis in axes if free.get(axis, 1) > 1)
    if not axes or not x.ndim or x.shape[0] % math.prod(free[axis] for axis in axes):
        return None
    entries = [axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)]
    return NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*entries))
