"""A dense mixture of experts in plain jnp, which shares no code with the package.

Every expert computes every token, and masks choose what counts. Arrays are fp32, or fp64 where the
tokens are. Loops over experts and over ranks of choice are Python's.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Routed(NamedTuple):
    combine: Any  # [batch, seq, experts]: the weight of each expert's result, 0 if not chosen
    chosen: Any  # [batch, seq, experts] bool, before dropping
    taken: Any  # [batch, seq, experts] bool, after dropping
    shares: Any  # [batch, seq, experts]: normalized scores
    z: Any  # [batch, seq]: logsumexp(logits)^2
    margin: Any  # [batch, seq]: from the chosen score nearest to a score that is not chosen


def largest(values, count):
    """The mask of the `count` largest of the last dim, the first ones where they are equal."""
    mask = jnp.zeros(values.shape, bool)
    for _ in range(count):
        left = jnp.where(mask, -jnp.inf, values)
        top = left == left.max(-1, keepdims=True)
        mask |= top & ~mask & (jnp.cumsum(top & ~mask, -1) == 1)
    return mask


def routed(
    x,
    router,
    *,
    k,
    scores="softmax",
    renormalize=False,
    bias=None,
    logit_bias=None,
    groups=1,
    limited_groups=None,
    group_score="max",
    scale=1.0,
    capacity_factor=None,
    min_capacity=4,
):
    """The routing of tokens x [batch, seq, embed] by a router [embed, experts]."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, router = jnp.asarray(x, dtype), jnp.asarray(router, dtype)
    experts = router.shape[1]
    logits = jnp.einsum("bse,ex->bsx", x, router, precision="highest")
    if logit_bias is not None:
        logits = logits + logit_bias
    exps = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    softmax = exps / exps.sum(-1, keepdims=True)
    sigmoid = 1 / (1 + jnp.exp(-logits))
    values = {"softmax": softmax, "sigmoid": sigmoid, "softmax_of_top": logits}[scores]
    ranked = jax.lax.stop_gradient(values)
    if bias is not None:
        ranked = ranked + jax.lax.stop_gradient(bias)

    allowed = jnp.ones(ranked.shape, bool)
    group_margin = jnp.full(ranked.shape[:2], jnp.inf)
    if limited_groups is not None:
        size = experts // groups
        of_group = []
        for group in range(groups):
            members = jnp.sort(ranked[..., group * size : (group + 1) * size], axis=-1)
            of_group.append(members[..., {"max": -1, "top2": slice(-2, None)}[group_score]])
        of_group = jnp.stack([m if m.ndim == 2 else m.sum(-1) for m in of_group], axis=-1)
        best = largest(of_group, limited_groups)
        allowed = jnp.repeat(best, size, axis=-1)
        group_margin = margin_of(of_group, best, jnp.ones(best.shape, bool))
    ranked = jnp.where(allowed, ranked, -jnp.inf)
    chosen = largest(ranked, k)

    if scores == "softmax_of_top":
        weights = jnp.where(chosen, exps, 0)
        weights = weights / weights.sum(-1, keepdims=True)
    else:
        weights = jnp.where(chosen, values, 0)
        if renormalize:
            weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * scale

    taken = chosen
    if capacity_factor is not None:
        most = capacity(k, capacity_factor, x.shape[1], experts, min_capacity)
        earlier = jnp.cumsum(chosen, axis=1) - chosen
        taken = chosen & (earlier < most)
    return Routed(
        combine=jnp.where(taken, weights, 0),
        chosen=chosen,
        taken=taken,
        shares=sigmoid / sigmoid.sum(-1, keepdims=True) if scores == "sigmoid" else softmax,
        z=jnp.log(jnp.exp(logits).sum(-1)) ** 2,
        margin=jnp.minimum(margin_of(ranked, chosen, allowed), group_margin),
    )


def margin_of(values, chosen, allowed):
    """The least chosen value minus the largest of those that could be chosen instead."""
    lowest = jnp.where(chosen, values, jnp.inf).min(-1)
    return lowest - jnp.where(allowed & ~chosen, values, -jnp.inf).max(-1)


def capacity(k, factor, tokens, experts, min_capacity):
    """How many tokens of a sample an expert takes."""
    return max(min_capacity, math.ceil(Fraction(str(factor)) * k * tokens / experts))


def mixture(x, routing, experts, expert):
    """sum_e combine_e expert(x, e) [batch, seq, embed], by a loop over all experts."""
    out = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    for e in range(experts):
        result = expert(x, e)
        weight = routing.combine[..., e, None]
        # Not a product alone: an expert's infinity must not reach tokens that do not choose it.
        out = out + jnp.where(routing.taken[..., e, None], weight * result, 0)
    return out


def swiglu_expert(gate, up, down):
    """An expert for `mixture`, of weights [experts, embed, mlp] and [experts, mlp, embed]."""

    def expert(x, e):
        return (jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e]

    return expert


# -- balance, of the routings of all mixture layers ------------------------------------------------


def switch_loss(routings, k):
    """The sum over layers of E sum_e f_e P_e over all tokens."""
    total = 0.0
    for routing in routings:
        batch, seq, experts = routing.chosen.shape
        for e in range(experts):
            f = routing.chosen[..., e].sum() / (k * batch * seq)
            total += experts * f * routing.shares[..., e].mean()
    return total


def sequence_loss(routings, k):
    """The mean over samples of the sum over layers of E sum_e f_e P_e of the sample."""
    batch = routings[0].chosen.shape[0]
    total = 0.0
    for sample in range(batch):
        own = [
            routing._replace(
                chosen=routing.chosen[sample : sample + 1],
                shares=routing.shares[sample : sample + 1],
            )
            for routing in routings
        ]
        total += switch_loss(own, k) / batch
    return total


def z_loss(routings):
    """The sum over layers of the mean over tokens."""
    return sum(routing.z.mean() for routing in routings)


def counts(routing):
    """[experts]: how many tokens chose each expert."""
    return routing.chosen.sum((0, 1))


def updated_bias(bias, counts, rate):
    """The bias of one layer after a step; counts are numbers of tokens [experts]."""
    mean = Fraction(sum(map(int, counts)), len(counts))
    signs = [(mean > int(c)) - (mean < int(c)) for c in counts]
    return jnp.asarray(bias) + rate * jnp.asarray(signs, jnp.float32)
