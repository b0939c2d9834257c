"""Repeated run of a list of layers: finding it, building it as one stack, and scanning it.

A period may be several layers long: in `[embed, A, B, A, B, A, B, head]` the pair A, B repeats
three times. In a stack each variable, including random streams, has a first dim
`layers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspeed.user_models.nnx_model import dim_names, value_of

LAYERS = "layers"  # logical name of the stacked dim
_NEW_DIM = {nnx.PARTITION_NAME: LAYERS, "logical_axes": LAYERS}


@dataclass(frozen=True)
class Run:
    """Items `start` up to `stop` of a list: `period` of them, `repeats` times over."""

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.repeats


def find_run(labels: Sequence[int | None], holds: Sequence[bool]) -> Run | None:
    """Find the run that covers most items of a list; None if nothing repeats.

    Of runs that cover equally many, the one with the shortest period, and of these the first.

    Args:
      labels: equal for items that are equal; None for one that may be in no run.
      holds: which items have parameters; each repeat has to hold some.
    """
    best: Run | None = None
    for period in range(1, len(labels) // 2 + 1):
        for start, repeats in _stretches(labels, period):
            if not any(holds[start : start + period]):
                continue
            if best is None or period * repeats > best.stop - best.start:
                best = Run(start, period, repeats)
    return best


def _stretches(labels: Sequence[int | None], period: int) -> list[tuple[int, int]]:
    """Yield (start, repeats >= 2) of each longest range whose items repeat with the period."""
    stretches, start = [], 0
    for i in range(len(labels) - period + 1):
        alike = i + period < len(labels) and labels[i] is not None
        if not alike or labels[i] != labels[i + period]:
            repeats = (i - start) // period + 1
            if repeats > 1:
                stretches.append((start, repeats))
            start = i + 1
    return stretches


def stacked_run(
    make: Callable[[nnx.Rngs, jax.Array], nnx.Module], repeats: int, rngs: nnx.Rngs
) -> nnx.Module:
    """Stack `[make(rngs, 0), make(rngs, 1), ...]` in one module; `rngs` advance as in that loop.

    A scan computes the state of the streams before each repeat; from there all are built under
    vmap, directly as one stack: no device ever holds more than its shard of it.
    """
    graph, begin = nnx.split(rngs)

    def advance(streams: nnx.State, repeat: jax.Array) -> tuple[nnx.State, nnx.State]:
        after = nnx.merge(graph, streams, copy=True)
        make(after, repeat)  # the result is unused, and not compiled
        return nnx.state(after), streams

    end, begins = lax.scan(advance, begin, jnp.arange(repeats))
    nnx.update(rngs, end)
    create = nnx.vmap(make, in_axes=0, out_axes=0, transform_metadata=_NEW_DIM)
    stack = create(nnx.merge(graph, begins), jnp.arange(repeats))
    for _, node in nnx.iter_graph(stack):
        if isinstance(node, nnx.Variable):
            names = dim_names(node) or (LAYERS,)
            rank = value_of(node).ndim
            node.set_metadata(logical_axes=(*names, *(None,) * (rank - len(names))))
    return stack


def scan_run(stack: nnx.Module, x: Any, repeats: int) -> Any:
    """Apply all repeats to x by a `lax.scan` over the stack.

    Parameters are inputs only; changed state (dropout counters, statistics) is written back. Layers
    that change the shape or dtype of x, such as pooling, are called one after the other.
    """
    graph, *states = nnx.split(stack, nnx.Param, ...)

    def call(x: Any, layer: Any) -> tuple[Any, nnx.State]:
        before = {path: value_of(v) for path, v in nnx.to_flat_state(layer[1])}
        module: Any = nnx.merge(graph, *layer)
        y = module(x)
        after = nnx.to_flat_state(nnx.split(module, nnx.Param, ...)[-1])
        changed = [(p, v) for p, v in after if p in before and value_of(v) is not before[p]]
        return y, nnx.from_flat_state(changed)

    stacked = tuple(states)
    abstract_layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), stacked)
    if _alike(x, jax.eval_shape(call, x, abstract_layer)[0]):
        x, changed = lax.scan(call, x, stacked, length=repeats)
    else:
        outs = []
        for i in range(repeats):
            x, out = call(x, jax.tree.map(lambda a, i=i: a[i], stacked))
            outs.append(out)
        changed = jax.tree.map(lambda *a: jnp.stack(a), *outs)
    if changed:
        nnx.update(stack, changed)
    return x


def _alike(x: Any, y: Any) -> bool:
    def kinds(tree: Any) -> Any:
        shapes = jax.eval_shape(lambda z: z, tree)
        return jax.tree.structure(shapes), [(z.shape, z.dtype) for z in jax.tree.leaves(shapes)]

    return bool(kinds(x) == kinds(y))
