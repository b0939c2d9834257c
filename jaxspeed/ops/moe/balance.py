"""The balance of experts' load: statistics of all mixture layers, auxiliary losses, bias updates.

Blocks write statistics of each sample; what mixes samples is computed from them in the loss, after
the last block. So they pass through scans and pipelines as activations do.

For E experts and T tokens with k experts each, with f_e = (tokens that chose e) / (k T) and P_e the
mean over tokens of their normalized scores:

    switch_loss     sum over layers of E sum_e f_e P_e over all samples   (Switch, arXiv:2101.03961)
    sequence_loss   the same of each sample, averaged over samples   (DeepSeek-V3, arXiv:2412.19437)
    z_loss          sum over layers of the mean of logsumexp(logits)^2   (ST-MoE, arXiv:2202.08906)

The first two are 1 a layer where the load is balanced. Gradients reach the router through P alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.ops.moe.dispatch import pairs_of_parts
from jaxspeed.ops.moe.grouped_products import layout
from jaxspeed.ops.moe.routing import Routing


class Balance(NamedTuple):
    """Statistics of all mixture layers, with the samples in dim 0 of each array."""

    counts: jax.Array  # [batch, layers, experts] int32: tokens that chose an expert
    probabilities: jax.Array  # [batch, layers, experts] fp32: the sum over tokens of s / sum(s)
    z: jax.Array  # [batch, layers] fp32: the mean over tokens of logsumexp(logits)^2
    # [batch, layers, parts, experts] int32: pairs that travel, of each device's positions
    sent: jax.Array
    dropped: jax.Array  # [batch, layers] int32: dropped pairs of token and expert

    @classmethod
    def zeros(cls, batch: int, layers: int, experts: int) -> Balance:
        """What a model's first block gets."""
        return cls(
            jnp.zeros((batch, layers, experts), jnp.int32),
            jnp.zeros((batch, layers, experts), jnp.float32),
            jnp.zeros((batch, layers), jnp.float32),
            jnp.zeros((batch, layers, layout().seq_shards, experts), jnp.int32),
            jnp.zeros((batch, layers), jnp.int32),
        )

    def with_layer(self, number: jax.Array | int, routing: Routing) -> Balance:
        """With the statistics of one layer, whose number among mixture layers may be traced."""
        of_layer = Balance(
            routing.counts,
            routing.probabilities,
            routing.z / routing.experts.shape[1],
            pairs_of_parts(routing.experts, routing.counts.shape[-1]),
            routing.dropped,
        )

        def write(all_layers: jax.Array, layer: jax.Array) -> jax.Array:
            layer = layer[:, None].astype(all_layers.dtype)
            return lax.dynamic_update_slice_in_dim(all_layers, layer, number, axis=1)

        return jax.tree.map(write, self, of_layer)

    def switch_loss(self, k: int) -> jax.Array:
        """The load-balancing loss of Switch and GShard, of all samples of the micro-batch."""
        return jnp.sum(_alignment(self.total(), jnp.sum(self.probabilities, axis=0), k))

    def sequence_loss(self, k: int) -> jax.Array:
        """DeepSeek-V3's sequence-wise loss: the same sum of each sample, averaged over them."""
        of_samples = jnp.sum(_alignment(self.counts, self.probabilities, k), axis=-1)
        return jnp.mean(of_samples)

    def z_loss(self) -> jax.Array:
        """The loss that makes the router's logits small."""
        return jnp.mean(jnp.sum(self.z, axis=-1))

    def total(self) -> jax.Array:
        """[layers, experts] int32: tokens of the micro-batch that chose each expert."""
        return jnp.sum(self.counts, axis=0)

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to report, averaged over the layers.

        expert_load: the most tokens that an expert has, over the mean: 1 if balanced.
        expert_entropy: of the experts' shares of the tokens, over its maximum: 1 if balanced.
        dropped_share: of the pairs of token and expert.
        router_z: the mean of logsumexp(logits)^2.
        """
        total = self.total().astype(jnp.float32)
        shares = total / jnp.sum(total, axis=-1, keepdims=True)
        experts = shares.shape[-1]
        entropy = jnp.sum(jax.scipy.special.entr(shares), axis=-1)
        return {
            "expert_load": jnp.mean(jnp.max(shares, axis=-1)) * experts,
            "expert_entropy": jnp.mean(entropy) / jnp.log(max(experts, 2)),
            "dropped_share": jnp.sum(self.dropped) / jnp.sum(total),
            "router_z": jnp.mean(self.z),
        }


def _alignment(counts: jax.Array, probabilities: jax.Array, k: int) -> jax.Array:
    """E sum_e f_e P_e, for counts and summed probabilities [..., experts]."""
    counts = counts.astype(probabilities.dtype)
    pairs = jnp.sum(counts, axis=-1)  # k T
    experts = counts.shape[-1]
    return jnp.sum(counts * probabilities, axis=-1) * (experts * k) / jnp.square(pairs)


def updated_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
    """bias + rate sign(mean - counts), with the mean over experts, which are the last dim.

    DeepSeek-V3's balance without a loss (arXiv:2408.15664). The sign is exact for any counts: it is
    computed of integers.
    """
    experts = counts.shape[-1]
    pairs = jnp.sum(counts, axis=-1, keepdims=True)
    quotient, rest = pairs // experts, pairs % experts
    sign = jnp.sign(jnp.where(counts == quotient, rest, quotient - counts))
    return bias + rate * sign.astype(bias.dtype)
