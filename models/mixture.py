"""Mixtures of experts: their sizes, feed-forward and blocks, the decoder and its loss.

Blocks pass (x, balance) on: each writes the statistics of its router into the balance of all
layers, from which the loss computes its auxiliary terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.ad_checkpoint import checkpoint_name

from jaxspeed import ops
from jaxspeed.errors import ModelError

from . import language
from .blocks import GatedFeedForward, NormBefore, WithImages, swiglu
from .decoder import DecoderSizes, RotaryDecoder
from .layers import param, scan_blocks, stacked, zeros


@dataclass(frozen=True)
class MixtureSizes(DecoderSizes):
    """Fields that the configs of all mixtures have.

    `capacity_factor` drops tokens: see `ops.moe.route`; None for none.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001  # of Switch's loss
    sequence_aux_loss_coef: float = 0.0  # of DeepSeek-V3's, of each sequence
    router_z_loss_coef: float = 0.0
    capacity_factor: float | None = None
    min_capacity: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        of_weights = ("renormalize", "scale")
        choice = {name: x for name, x in self.routing.items() if name not in of_weights}
        try:
            ops.moe.check_router(self.num_experts, **choice)
        except ModelError as error:
            raise ValueError(str(error)) from None

    @property
    def routing(self) -> dict[str, Any]:
        """The options of `ops.moe.route`."""
        return {
            "k": self.num_experts_per_tok,
            "capacity_factor": self.capacity_factor,
            "min_capacity": self.min_capacity,
        }


class Experts(nnx.Module):
    """Feed-forward of experts, of which a router chooses some for each token.

    Args:
      mlp: inner size of an expert.
      shared: inner size of the feed-forward that all tokens go through, if there is one.
      activation: of gate and up.
      bias: of the router, and of each expert's three products.
    """

    def __init__(
        self,
        config: MixtureSizes,
        mlp: int,
        shared: int | None = None,
        activation: Callable[[jax.Array, jax.Array], jax.Array] = swiglu,
        *,
        out_init: Initializer | None = None,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        c = config
        count, out_init = {"experts": c.num_experts}, out_init or c.init
        outer, inner = {"embed": c.hidden_size}, {"mlp": mlp}
        # Rounded, it would choose other experts.
        self.router = param(rngs, c.init, {**outer, "router": c.num_experts}, full_precision=True)
        self.w_gate = param(rngs, c.init, {**count, **outer, **inner})
        self.w_up = param(rngs, c.init, {**count, **outer, **inner})
        self.w_down = param(rngs, out_init, {**count, **inner, **outer})
        self.router_bias = param(rngs, zeros, {"router": c.num_experts}) if bias else None
        self.b_gate = param(rngs, zeros, {**count, **inner}) if bias else None
        self.b_up = param(rngs, zeros, {**count, **inner}) if bias else None
        self.b_down = param(rngs, zeros, {**count, **outer}) if bias else None
        self.shared = (
            GatedFeedForward(
                c.hidden_size, shared, activation, init=c.init, out_init=out_init, rngs=rngs
            )
            if shared
            else None
        )
        self.activation = activation
        self.config = config

    def __call__(
        self, x: jax.Array, choice_bias: jax.Array | None = None
    ) -> tuple[jax.Array, ops.moe.Routing]:
        """`choice_bias` [experts] is added to the scores by which experts are chosen."""
        logit_bias = None if self.router_bias is None else self.router_bias[...]
        routing = ops.moe.route(
            x, self.router[...], bias=choice_bias, logit_bias=logit_bias, **self.config.routing
        )
        y = ops.moe.mixture(x, routing, self.of_rows)
        return y if self.shared is None else y + self.shared(x), routing

    def of_rows(self, rows: ops.moe.Rows) -> jax.Array:
        """The weighted results of the experts, of rows that are sorted by them."""
        gate, up = rows.product(self.w_gate[...]), rows.product(self.w_up[...])
        if self.b_gate is not None and self.b_up is not None:
            gate, up = gate + rows.bias(self.b_gate[...]), up + rows.bias(self.b_up[...])
        hidden = self.activation(gate, up)
        out = rows.product(self.w_down[...], hidden * rows.weights)
        if self.b_down is None:
            return out
        return out + (rows.bias(self.b_down[...], last=True) * rows.weights).astype(out.dtype)


class MixtureLayer(NamedTuple):
    """What a mixture block has of its own."""

    number: jax.Array  # among mixture layers
    choice_bias: jax.Array | None  # [experts]


class MixtureBlock(NormBefore):
    """x + attn(norm(x)), then x + experts(norm(x)); the balance gets the router's statistics.

    Called as block((x, balance), ..., layer), with what attention gets between them.
    """

    def __call__(self, carry: Any, *context: Any) -> Any:
        x, balance = carry
        *context_of_attention, layer = context
        normed = checkpoint_name(self.attn_norm(x), "attn_norm")
        attended = checkpoint_name(self.attn(normed, *context_of_attention), "attn_out")
        x = x + self.dropout(attended)
        normed = checkpoint_name(self.mlp_norm(x), "mlp_norm")
        y, routing = self.mlp(normed, layer.choice_bias)
        return x + self.dropout(y), balance.with_layer(layer.number, routing)


class ExpertState(nnx.Variable):
    """What is not trained of a mixture: biases of experts, and counts of their tokens."""


class MixtureDecoder(RotaryDecoder):
    """A decoder of mixture blocks, after dense blocks if there are any.

    Args:
      config, block, norm: as of RotaryDecoder.
      dense_block: makes a block without experts.
      dense_layers: how many of them.
      bias_update_rate: of the biases by which experts are chosen, after each optimizer step
        (arXiv:2408.15664); None: there are no biases.
    """

    def __init__(
        self,
        config: MixtureSizes,
        block: Callable[[Any, nnx.Rngs], nnx.Module],
        norm: Callable[[Any, nnx.Rngs], nnx.Module],
        *,
        dense_block: Callable[[Any, nnx.Rngs], nnx.Module] | None = None,
        dense_layers: int = 0,
        bias_update_rate: float | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        c, layers = config, config.num_hidden_layers - dense_layers
        super().__init__(c, block, norm, layers=layers, rngs=rngs, **options)
        self.mixture_layers = layers
        self.dense_blocks = (
            stacked(lambda rngs: dense_block(c, rngs), dense_layers, rngs)
            if dense_block is not None and dense_layers
            else None
        )
        self.bias_update_rate = bias_update_rate

        def state(dtype: Any) -> ExpertState | None:
            zeros = jnp.zeros((layers, c.num_experts), dtype)
            return None if bias_update_rate is None else ExpertState(zeros)

        self.expert_bias, self.expert_counts = state(jnp.float32), state(jnp.int32)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        x: jax.Array | None = None,
        segment_ids: jax.Array | WithImages | None = None,
        positions: jax.Array | None = None,
        rotated_at: jax.Array | None = None,
    ) -> jax.Array:
        return self.hidden_and_balance(tokens, segment_ids, positions, x, rotated_at)[0]

    def hidden_and_balance(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | WithImages | None,
        positions: jax.Array | None,
        x: jax.Array | None = None,
        rotated_at: jax.Array | None = None,
    ) -> tuple[jax.Array, ops.moe.Balance]:
        """tokens [batch, seq] to the head's input [batch, seq, embed], and the experts' load."""
        c, layers = self.config, self.mixture_layers
        x, context, each = self.embedded(tokens, segment_ids, positions, x, rotated_at)
        dense = c.num_hidden_layers - layers
        if self.dense_blocks is not None:
            of_dense = tuple(x[:dense] for x in each)
            x = scan_blocks(self.dense_blocks, x, *context, each=of_dense, unroll=c.unroll)
        bias = None if self.expert_bias is None else self.expert_bias[...]
        own = (*(x[dense:] for x in each), MixtureLayer(jnp.arange(layers), bias))
        balance = ops.moe.Balance.zeros(len(tokens), layers, c.num_experts)
        x, balance = scan_blocks(self.blocks, (x, balance), *context, each=own, unroll=c.unroll)
        return self.normed(x), balance

    def hidden_and_auxiliary(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        train: bool | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The head's input, the losses of the routers with their coefficients, and metrics.

        Unless in evaluation (`train` is False), the experts' tokens are counted.
        """
        c, k = self.config, self.config.num_experts_per_tok
        hidden, balance = self.hidden_and_balance(tokens, segment_ids, positions)
        auxiliary = (
            c.router_aux_loss_coef * balance.switch_loss(k)
            + c.sequence_aux_loss_coef * balance.sequence_loss(k)
            + c.router_z_loss_coef * balance.z_loss()
        )
        rounds = jnp.max(ops.moe.rounds_of(balance.sent, k, tokens.shape[1]))
        if self.expert_counts is not None and train is not False:
            self.expert_counts[...] += balance.total()
        metrics = {"auxiliary_loss": auxiliary, "dispatch_rounds": rounds}
        return hidden, auxiliary, {**balance.metrics(), **metrics}

    def after_step(self) -> None:
        """Update the experts' biases from the tokens of an optimizer step."""
        if self.expert_bias is None or self.expert_counts is None:
            return
        counts = self.expert_counts[...]
        self.expert_bias[...] = ops.moe.updated_bias(
            self.expert_bias[...], counts, self.bias_update_rate or 0.0
        )
        self.expert_counts[...] = jnp.zeros_like(counts)


def loss(model: MixtureDecoder, batch: language.LanguageBatch, train: bool | None = None) -> Any:
    """(sum, weight, auxiliary, metrics): the cross-entropy of each token's successor.

    The auxiliary term has the losses of the routers.
    """
    p = ops.split_batch(batch)
    hidden, auxiliary, metrics = model.hidden_and_auxiliary(
        p.tokens, segment_ids=p.segment_ids, positions=p.positions, train=train
    )
    return *language.cross_entropy(model, hidden, p.targets), auxiliary, metrics


objective = language.objective
