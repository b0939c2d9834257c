"""Operators at shard boundaries: gathers and reductions of both passes (Megatron's f and g).

Between sharded regions an activation is replicated, or with sequence-parallel activations sharded
along its sequence (Korthikanti et al., arXiv:2205.05198). Entering a sharded region then gathers it
forward and reduce-scatters its gradient backward; leaving does the reverse. These are constraints;
the compiler chooses the collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxspeed.placement.constrain import constrain


@dataclass(frozen=True)
class BoundaryLayout:
    """Shardings of an activation at a boundary: as a matmul's operand or result, and as saved."""

    replicated: Sharding
    saved: Sharding  # `replicated`, or sharded along the sequence


def enter(at: BoundaryLayout) -> Callable[[jax.Array], jax.Array]:
    """Enter a sharded region: backward, reduce the gradient.

    Forward needs no constraint: the sharded weight makes the compiler gather the activation.
    """

    @jax.custom_vjp
    def entering(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.saved, "tensor.enter"),)

    entering.defvjp(forward, backward)
    return entering


def leave(at: BoundaryLayout) -> Callable[[jax.Array], jax.Array]:
    """Leave a sharded region: forward, reduce the partial sums."""

    @jax.custom_vjp
    def leaving(y: jax.Array) -> jax.Array:
        # Replicated first: otherwise a lookup's ids would be sharded as its result, and sent.
        y = constrain(y, at.replicated, "tensor.leave")
        return constrain(y, at.saved, "tensor.leave.saved")

    def forward(y: jax.Array) -> tuple[jax.Array, None]:
        return leaving(y), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.replicated, "tensor.leave.backward"),)

    leaving.defvjp(forward, backward)
    return leaving


@dataclass(frozen=True)
class ExpertLayout:
    """Shardings of an activation around experts: by sample, and by expert.

    Outside of the experts the samples are sharded over all of their axes. Inside, the experts are
    sharded over their axis, and the samples over the others.
    """

    local: Sharding
    by_expert: Sharding


def to_experts(at: ExpertLayout) -> Callable[[jax.Array], jax.Array]:
    """Send rows to their experts, and gradients back: an all-to-all in each pass."""

    def sending(x: jax.Array) -> jax.Array:
        # Local first: otherwise what computes the rows is sharded by expert too.
        x = constrain(x, at.local, "experts.local")
        return constrain(x, at.by_expert, "experts.exchange")

    return sending


def from_experts(at: ExpertLayout) -> Callable[[jax.Array], jax.Array]:
    """Send rows back from their experts: an all-to-all in each pass."""

    def returning(x: jax.Array) -> jax.Array:
        x = constrain(x, at.by_expert, "experts.exchange")
        return constrain(x, at.local, "experts.local")

    return returning


def gather_for_experts(at: ExpertLayout) -> Callable[[jax.Array], jax.Array]:
    """Gather tokens that all experts read; backward, reduce-scatter their gradients."""

    @jax.custom_vjp
    def gathering(x: jax.Array) -> jax.Array:
        return constrain(x, at.by_expert, "experts.exchange")

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return gathering(x), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.local, "experts.local"),)

    gathering.defvjp(forward, backward)
    return gathering


def sum_over_experts(at: ExpertLayout) -> Callable[[jax.Array], jax.Array]:
    """Reduce-scatter partial sums over the experts' devices; backward, gather the gradient."""

    @jax.custom_vjp
    def summing(y: jax.Array) -> jax.Array:
        return constrain(y, at.local, "experts.local")

    def forward(y: jax.Array) -> tuple[jax.Array, None]:
        return summing(y), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (constrain(gradient, at.by_expert, "experts.exchange"),)

    summing.defvjp(forward, backward)
    return summing


Matmuls = Sequence[Callable[[jax.Array, jax.Array], jax.Array]]  # (activation, weight) -> result


def columns(matmuls: Matmuls, at: BoundaryLayout) -> Callable[..., list[jax.Array]]:
    """Matmuls of one activation with several sharded weights: `f(x, *weights)`.

    The activation is gathered once for all of them, and again in the backward pass, so that only
    its shard is saved.
    """

    @jax.custom_vjp
    def multiply(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        full = constrain(x, at.replicated, "tensor.columns")
        return [matmul(full, w) for matmul, w in zip(matmuls, weights, strict=True)]

    def forward(x: jax.Array, *weights: jax.Array) -> tuple[list[jax.Array], Any]:
        return multiply(x, *weights), (constrain(x, at.saved, "tensor.columns.saved"), weights)

    def backward(saved: Any, gradients: list[jax.Array]) -> tuple[jax.Array, ...]:
        x, weights = saved
        # Without the barrier the compiler saves the gathered array of the forward pass.
        x, gradients = jax.lax.optimization_barrier((x, gradients))
        to_x, to_weights = [], []
        for matmul, w, gradient in zip(matmuls, weights, gradients, strict=True):
            _, pull = jax.vjp(matmul, x, w)
            for_x, for_w = pull(gradient)
            to_x.append(for_x)
            to_weights.append(for_w)
        total = sum(to_x[1:], to_x[0])
        return (constrain(total, at.saved, "tensor.columns.backward"), *to_weights)

    multiply.defvjp(forward, backward)
    return multiply
