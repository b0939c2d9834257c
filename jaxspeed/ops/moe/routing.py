"""Routers: which k experts each token goes to, and with what weights their results are summed.

For a token x and the router's weight W, with l = x W + logit_bias:

    scores             s                          weights of the chosen experts
    softmax            softmax(l)                 s_i                   GShard, Switch, Qwen, V2
    sigmoid            sigmoid(l)                 s_i                   DeepSeek-V3
    softmax_of_top     l                          softmax of those l_i  Mixtral, gpt-oss

The k experts with the largest s + bias are chosen, the lowest numbers first where they are equal.
The bias only selects: it is no part of the weights and has no gradient (DeepSeek-V3's balance
without a loss, arXiv:2412.19437, equation 16). Where experts are in groups, only those of the
`limited_groups` best groups can be chosen. Weights are divided by their sum to renormalize them,
and multiplied by `scale`.

All of it is computed in fp32 (fp64 for fp64 tokens): a router that rounds chooses other experts.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxspeed.errors import ModelError

# Names of values: what rematerialization can save, so that the recomputed pass takes the same
# route, and what `engine.diagnose` looks for NaNs in. With a capacity, which pairs are not dropped.
DECISION, LOGITS, TAKEN = "router_experts", "router_logits", "router_taken"

type Scores = Literal["softmax", "sigmoid", "softmax_of_top"]
type GroupScore = Literal["max", "top2"]


class Routing(NamedTuple):
    """The experts of each token, and what the balance of a sample is computed from."""

    experts: jax.Array  # [batch, seq, k] int32; of a dropped pair: the number of experts
    weights: jax.Array  # [batch, seq, k] fp32, with the scale; of a dropped pair: 0
    counts: jax.Array  # [batch, experts] int32: tokens that chose an expert, also if dropped
    probabilities: jax.Array  # [batch, experts] fp32: the sum over tokens of s / sum(s)
    z: jax.Array  # [batch] fp32: the sum over tokens of logsumexp(l)^2
    dropped: jax.Array  # [batch] int32: dropped pairs of token and expert


def route(
    x: jax.Array,
    weight: jax.Array,
    *,
    k: int,
    scores: Scores = "softmax",
    renormalize: bool = False,
    bias: jax.Array | None = None,
    logit_bias: jax.Array | None = None,
    groups: int = 1,
    limited_groups: int | None = None,
    group_score: GroupScore = "max",
    scale: float = 1.0,
    capacity_factor: float | None = None,
    min_capacity: int = 4,
) -> Routing:
    """Choose k experts for each token.

    Args:
        x: [batch, seq, embed]: tokens, in any floating dtype.
        weight: [embed, experts].
        scores: the module's table.
        renormalize: divide the weights of a token by their sum.
        bias: [experts], added to the scores for the choice alone.
        logit_bias: [experts], added to the logits (gpt-oss).
        groups: number of groups of adjacent experts.
        limited_groups: how many groups a token's experts may come from; by default all.
        group_score: of a group: its largest score (DeepSeek-V2), or the sum of its two largest
            (DeepSeek-V3), the bias included.
        scale: factor of all weights.
        capacity_factor: if given, an expert takes the first `capacity_of(...)` tokens of each
            sample that choose it, in their order, and the others are dropped. The weights of a
            token's other experts stay as they are. Documents packed into a sample share it.
        min_capacity: the least capacity.
    """
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ModelError(
            f"a router of [embed, experts] {weight.shape} does not fit tokens of "
            f"[batch, seq, embed] {x.shape}"
        )
    experts = weight.shape[1]
    check_router(
        experts,
        k=k,
        scores=scores,
        groups=groups,
        limited_groups=limited_groups,
        group_score=group_score,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
    )
    for name, vector in (("bias", bias), ("logit_bias", logit_bias)):
        if vector is not None and vector.shape != (experts,):
            raise ModelError(f"{name} of a router is {vector.shape}, should be {(experts,)}")

    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(x.astype(dtype), weight.astype(dtype), precision=lax.Precision.HIGHEST)
    if logit_bias is not None:
        logits += logit_bias.astype(dtype)
    logits = checkpoint_name(logits, LOGITS)
    score = {
        "softmax": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
        "softmax_of_top": lambda logits: logits,
    }[scores](logits)
    # As a softmax, a quotient s / sum(s) neither underflows nor needs an epsilon, which has no
    # derivative in fp32 where all scores are small.
    log_score = jax.nn.log_sigmoid(logits) if scores == "sigmoid" else logits
    preference = lax.stop_gradient(score)
    if bias is not None:
        preference += lax.stop_gradient(bias).astype(dtype)
    if limited_groups is not None and limited_groups < groups:
        preference = _within_best_groups(preference, groups, limited_groups, group_score)
    chosen = checkpoint_name(_largest(preference, k), DECISION)

    def of_chosen(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, chosen, axis=-1, mode="promise_in_bounds")

    if renormalize or scores == "softmax_of_top":
        weights = jax.nn.softmax(of_chosen(log_score))
        # A logit that is not finite makes all scores of a softmax NaN. Those that are read here
        # may be finite, and would hide it.
        of_score = of_chosen(lax.stop_gradient(score))
        weights = jnp.where(jnp.isnan(of_score), of_score, weights)
    else:
        weights = of_chosen(score)
    weights *= scale

    chooses = _are_among(chosen, experts)
    dropped = jnp.zeros(x.shape[0], jnp.int32)
    sent = chosen
    if capacity_factor is not None:
        capacity = capacity_of(
            experts, x.shape[1], k=k, factor=capacity_factor, min_capacity=min_capacity
        )
        order = jnp.cumsum(chooses, axis=1, dtype=jnp.int32)  # from 1
        taken = of_chosen(order) <= capacity
        taken = checkpoint_name(taken, TAKEN)
        sent, weights = jnp.where(taken, chosen, experts), jnp.where(taken, weights, 0)
        dropped = jnp.sum(~taken, axis=(1, 2), dtype=jnp.int32)
    return Routing(
        sent,
        weights,
        counts=jnp.sum(chooses, axis=1, dtype=jnp.int32),
        probabilities=jnp.sum(jax.nn.softmax(log_score), axis=1),
        z=jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)), axis=1),
        dropped=dropped,
    )


def _within_best_groups(
    preference: jax.Array, groups: int, limited: int, group_score: GroupScore
) -> jax.Array:
    """The scores [..., experts], with minus infinity outside of the best groups of each token."""
    grouped = preference.reshape(*preference.shape[:-1], groups, -1)
    counted = _are_among(_largest(grouped, 1 if group_score == "max" else 2), grouped.shape[-1])
    best = _largest(jnp.sum(jnp.where(counted, grouped, 0), axis=-1), limited)
    is_best = _are_among(best, groups)[..., None]
    return jnp.where(is_best, grouped, -jnp.inf).reshape(preference.shape)


def _largest(values: jax.Array, k: int) -> jax.Array:
    """The indices [..., k] of the k largest of [..., n], as those of `lax.top_k`.

    XLA does not partition that one: it all-gathers the scores of all samples. The indices differ
    whatever the values are.
    """
    left, indices = jnp.maximum(values, jnp.finfo(values.dtype).min), []
    for _ in range(k):
        indices.append(lax.argmax(left, left.ndim - 1, jnp.int32))
        left = jnp.where(indices[-1][..., None] == jnp.arange(left.shape[-1]), -jnp.inf, left)
    return jnp.stack(indices, axis=-1)


def _are_among(indices: jax.Array, n: int) -> jax.Array:
    """[..., n] bool: whether each index is one of [..., k]."""
    return jnp.any(indices[..., None] == jnp.arange(n), axis=-2)


def capacity_of(experts: int, tokens: int, *, k: int, factor: float, min_capacity: int = 4) -> int:
    """max(min_capacity, ceil(k factor tokens / experts)): tokens of a sample that an expert takes.

    The factor is the decimal number that is written: 1.1 x 10 is 11, and not 11.000000000000002.
    """
    return max(min_capacity, math.ceil(k * Fraction(str(factor)) * tokens / experts))


def check_router(
    experts: int,
    *,
    k: int,
    scores: Scores = "softmax",
    groups: int = 1,
    limited_groups: int | None = None,
    group_score: GroupScore = "max",
    capacity_factor: float | None = None,
    min_capacity: int = 4,
) -> None:
    """Raise a ModelError if no router can have these settings, which are those of `route`."""
    limited = groups if limited_groups is None else limited_groups
    if scores not in ("softmax", "sigmoid", "softmax_of_top"):
        raise ModelError(f"scores {scores!r} is not 'softmax', 'sigmoid' or 'softmax_of_top'")
    if group_score not in ("max", "top2"):
        raise ModelError(f"group_score {group_score!r} is neither 'max' nor 'top2'")
    if not 1 <= k <= experts:
        raise ModelError(f"a token cannot choose k = {k} of {experts} experts: 1 to {experts}")
    if groups < 1 or experts % groups:
        divisors = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ModelError(
            f"{experts} experts do not form {groups} equal groups: groups is one of {divisors}"
        )
    size = experts // groups
    if not 1 <= limited <= groups:
        raise ModelError(f"limited_groups is {limited} of {groups} groups: 1 to {groups}")
    if limited * size < k:
        raise ModelError(
            f"{limited} groups of {size} experts have fewer than the k = {k} that a token "
            f"chooses: limited_groups is at least {-(-k // size)}"
        )
    if limited < groups and group_score == "top2" and size < 2:
        raise ModelError("groups of one expert have no two best: group_score is 'max'")
    if capacity_factor is not None:
        if not math.isfinite(capacity_factor) or capacity_factor < 0:
            raise ModelError(f"capacity_factor is {capacity_factor}: a number of at least 0")
        if capacity_factor == 0 and min_capacity < 1:
            raise ModelError(
                f"capacity_factor {capacity_factor} and min_capacity {min_capacity} drop all "
                "tokens: one of them is above 0"
            )
