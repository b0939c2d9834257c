"""Adapters of a model's weights: their leaves, ranks and scales, and their first values."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.adapters.products import (
    Factors,
    factor_shapes,
    initialized,
    merged,
    norms,
)
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.specs import by_dim

PREFIX = "lora/"  # of the paths of adapters


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight, of all its layers where it stacks them.

    Attributes:
      path, shape, dims: of the weight.
      ranks, scales: of each layer where the weight stacks layers, else one. A layer of rank 0 is
        not adapted.
      is_assumed: whether the dims are those that are usual, of a loss that was not traced.
      of_parameter: whether `target_parameters` names the weight.
    """

    path: str
    shape: tuple[int, ...]
    dims: WeightDims
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    dropout: float = 0.0
    dora: bool = False
    is_assumed: bool = False
    of_parameter: bool = False

    @property
    def rank(self) -> int:
        """The largest rank: the factors of layers of smaller ranks are padded with zeros."""
        return max(self.ranks)

    @property
    def how(self) -> Any:
        """All that the program of an adapted product depends on."""
        uniform = self.scale if self.is_uniform else None
        return self.dims, self.dropout, self.dora, uniform, self.rank

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have one rank and one scale."""
        return len({*self.ranks}) == len({*self.scales}) == 1

    @property
    def scale(self) -> float:
        return self.scales[0]

    @cached_property
    def stack(self) -> tuple[int, ...]:
        """The sizes of the stacked dims."""
        return tuple(self.shape[d] for d in self.dims.stack)

    def per_layer(self, values: Sequence[float]) -> np.ndarray:
        """Values of layers for all stacked dims; an array of no dims where there are none."""
        per_layer = np.asarray(values).reshape(-1, *[1] * (len(self.stack) - 1))
        return np.broadcast_to(per_layer if self.stack else per_layer[0], self.stack)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its leaves, by their paths."""
        a, b = factor_shapes(self.shape, self.dims, self.rank)
        shapes = {self.leaf("A"): a, self.leaf("B"): b}
        if self.dora:
            shapes[self.leaf("magnitude")] = self.outputs
        return shapes

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of what there is one of for each output."""
        return (*self.stack, *(self.shape[d] for d in self.dims.outputs))

    def leaf(self, name: Literal["A", "B", "magnitude", "squares"]) -> str:
        """The path of a leaf; "squares" is no leaf, but a variable of a step with DoRA."""
        return f"{PREFIX}{self.path}/{name}"

    def leaves(self, weight: Leaf) -> tuple[Leaf, ...]:
        """Its leaves, with the dims' names of the weight."""
        names = by_dim(weight.names, len(self.shape))
        stack, inputs, outputs = (
            tuple(names[d] for d in dims)
            for dims in (self.dims.stack, self.dims.inputs, self.dims.outputs)
        )
        of_leaf = {
            self.leaf("A"): (*stack, *inputs, None),
            self.leaf("B"): (*stack, None, *outputs),
            self.leaf("magnitude"): (*stack, *outputs),
        }
        return tuple(
            Leaf(
                path,
                shape,
                jnp.promote_types(weight.dtype, jnp.float32),
                of_leaf[path],
                full_precision=weight.full_precision,
                adapts=weight.path,
            )
            for path, shape in self.shapes.items()
        )

    def key(self, key: jax.Array) -> jax.Array:
        """The adapter's own key, from one of all adapters."""
        return jax.random.fold_in(key, zlib.crc32(self.path.encode()))

    def initialized(self, key: jax.Array, how: Any, dtype: Any) -> dict[str, jax.Array]:
        """First values of A and B; `how` is `lora.init_lora_weights`."""
        ranks: Any = self.per_layer(self.ranks) if len(self.ranks) > 1 else self.rank
        a, b = initialized(self.key(key), self.shape, self.dims, ranks, how, dtype)
        return {self.leaf("A"): a, self.leaf("B"): b}

    def scales_of_layers(self) -> Any:
        """The scale, or an array with that of each layer."""
        return self.scale if self.is_uniform else self.per_layer(self.scales).astype(np.float32)

    def factors(self, values: Mapping[str, Any]) -> Factors:
        """The factors among values by path."""
        a, b = values[self.leaf("A")], values[self.leaf("B")]
        return Factors(a, b, values[self.leaf("magnitude")] if self.dora else None)

    def merged(self, weight: Any, values: Mapping[str, Any]) -> Any:
        """The weight with its adapter, of which `values` has the leaves."""
        factors = self.factors(values)
        total = merged(weight, self.dims, factors, self.scales_of_layers())
        if self.dora and 0 in self.ranks:
            adapted = self.per_layer(self.ranks) > 0
            order = np.argsort([*self.dims.stack, *self.dims.inputs, *self.dims.outputs])
            rest = [1] * (len(self.shape) - len(self.stack))
            adapted = adapted.reshape(*self.stack, *rest).transpose(order)
            total = jnp.where(adapted, total, weight)
        return total

    def magnitude(self, weight: Any, values: Mapping[str, Any]) -> Any:
        """The first magnitude of DoRA: the norm of each output of the merged weight."""
        factors = self.factors({**values, self.leaf("magnitude"): None})
        return norms(weight, self.dims, factors, self.scales_of_layers())


def leaves_with_adapters(
    leaves: Iterable[Leaf], adapters: Mapping[str, Adapter]
) -> tuple[Leaf, ...]:
    """A model's leaves, and those of its adapters."""
    leaves = tuple(leaves)
    adapted = (weight for weight in leaves if weight.path in adapters)
    adapter_leaves = (leaf for weight in adapted for leaf in adapters[weight.path].leaves(weight))
    return (*leaves, *adapter_leaves)
