"""Operators at shard boundaries: gathers and reductions of both passes.

Between the cuts an activation is whole on every device, or with sequence-parallel activations cut
along its sequence (Korthikanti et al., arXiv:2205.05198). Entering the cut then gathers it forward
and reduce-scatters its gradient backward; leaving does the same the other way round. The
constraints say so; which collectives they become is the compiler's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxspeed.placement.constrain import constrain


@dataclass(frozen=True)
class Between:
    """How an activation lives on the two sides of a crossing: whole to be multiplied, and kept."""

    whole: Sharding
    kept: Sharding  # `whole`, or cut along the sequence


def enter(at: Between) -> Callable[[jax.Array], jax.Array]:
    """An activation on its way into the cut: what is cut says already that it is needed whole."""

    @jax.custom_vjp
    def entering(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.kept, "tensor.enter"),)

    entering.defvjp(forward, backward)
    return entering


def leave(at: Between) -> Callable[[jax.Array], jax.Array]:
    """A sum over devices on its way out of the cut."""

    @jax.custom_vjp
    def leaving(y: jax.Array) -> jax.Array:
        # First as a sum that is whole: cut at once, a lookup's ids would be cut with it, and moved.
        y = constrain(y, at.whole, "tensor.leave")
        return constrain(y, at.kept, "tensor.leave.kept")

    def forward(y: jax.Array) -> tuple[jax.Array, None]:
        return leaving(y), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.whole, "tensor.leave.backward"),)

    leaving.defvjp(forward, backward)
    return leaving


Products = Sequence[Callable[[jax.Array, jax.Array], jax.Array]]  # (activation, weight) -> result


def columns(products: Products, at: Between) -> Callable[..., list[jax.Array]]:
    """`products` of one activation with weights that are cut: `f(x, *weights)`.

    The activation is gathered once for all of them, and again in the backward pass, so that only
    its cut form is kept in between.
    """

    @jax.custom_vjp
    def multiply(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        whole = constrain(x, at.whole, "tensor.columns")
        return [product(whole, w) for product, w in zip(products, weights, strict=True)]

    def forward(x: jax.Array, *weights: jax.Array) -> tuple[list[jax.Array], Any]:
        return multiply(x, *weights), (constrain(x, at.kept, "tensor.columns.kept"), weights)

    def backward(kept: Any, gradients: list[jax.Array]) -> tuple[jax.Array, ...]:
        x, weights = kept
        # Tied, or the compiler keeps what the forward pass gathered.
        x, gradients = jax.lax.optimization_barrier((x, gradients))
        to_x, to_weights = [], []
        for product, w, gradient in zip(products, weights, gradients, strict=True):
            _, pull = jax.vjp(product, x, w)
            for_x, for_w = pull(gradient)
            to_x.append(for_x)
            to_weights.append(for_w)
        total = sum(to_x[1:], to_x[0])
        return (constrain(total, at.kept, "tensor.columns.backward"), *to_weights)

    multiply.defvjp(forward, backward)
    return multiply
