"""The example batch by which a model's `init` is called: its shapes, and the values it reads.

Most initializations read shapes only. A layer that normalizes by its first batch (ActNorm, weight
normalization with data-dependent scales) reads values, which then have to be the user's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import listed
from jaxspeed.user_models.batches import WithExtra, read_batch, zeros_of
from jaxspeed.user_models.rng import is_key


class ExampleBatch:
    """An example batch, whose arrays may be shapes where only their shapes are read."""

    def __init__(self, batch: Any) -> None:
        arrays, _ = read_batch(batch, name="example_batch", abstract=True)
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        self._given = jax.tree.leaves(arrays)
        self._values: list[Any] = [None if _is_shape(x) else x for x in self._given]

    def trace(self, create: Callable[[jax.Array, Any], Any]) -> Any:
        """Shapes of `create(key, batch)`; keep the arrays of the batch that its results depend on.

        Raises ModelError if one of these was given as a shape.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        closed, shapes = jax.make_jaxpr(create, return_shape=True)(key, self.shapes)
        every = [True] * len(closed.jaxpr.outvars)
        _, (_, *read) = partial_eval.dce_jaxpr(closed.jaxpr, every)
        self._keep(read, "the initialization of this model depends on")
        return shapes

    def keep_all(self) -> None:
        """Keep all arrays, for an initialization that cannot be traced."""
        every = [True] * len(self._values)
        self._keep(every, "the initialization of this model cannot be traced, and may depend on")

    def _keep(self, read: list[bool], why: str) -> None:
        tree = self.shapes.samples if isinstance(self.shapes, WithExtra) else self.shapes
        extra = self.shapes.extra if isinstance(self.shapes, WithExtra) else ()
        places = [
            name + jax.tree_util.keystr(keys)
            for name, part in (("example_batch", tree), ("example_extra", extra))
            for keys, _ in jax.tree_util.tree_leaves_with_path(part)
        ]
        leaves = list(zip(places, self._given, read, strict=True))
        absent = [place for place, x, is_read in leaves if is_read and _is_shape(x)]
        if absent:
            raise ModelError(
                f"{why} the values of {listed(absent)}, of which only the shapes were given: pass "
                "arrays, such as the first batch"
            )
        self._values = [_on_host(x) if is_read else None for _, x, is_read in leaves]

    def arrays(self) -> Any:
        """The batch, with zeros in place of arrays that are not read."""
        leaves, tree = jax.tree.flatten(self.shapes)
        return jax.tree.unflatten(
            tree,
            [
                zeros_of(shape) if x is None else jnp.asarray(x)
                for shape, x in zip(leaves, self._values, strict=True)
            ],
        )


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _on_host(x: Any) -> Any:
    """A copy on no certain device, so that a program for any devices can read it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        raise ModelError(
            "the initialization of this model depends on the values of example_batch, which has an "
            "array that is spread over processes: pass the same NumPy arrays on each"
        )
    if is_key(x):
        data = jnp.asarray(np.array(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.array(x)
