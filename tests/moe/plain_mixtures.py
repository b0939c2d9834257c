"""Training of the small mixtures on one device without dispatch: every expert computes every token.

The loops over steps, micro-batches and layers are Python's. Of the package it uses the
models' attention, norms and embedding; routers, experts, losses and the update are written here and
in `dense_reference.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspeed.config import Config
from jaxspeed.user_models.config_model import resolve_model
from tests.moe import dense_reference as dense
from tests.moe.small_models import MODELS, tokens
from tests.support.reference import slice_of_each_rank

SAMPLES, SEQ, STEPS, RATE = 32, 8, 2, 0.5
# With which no choice of an expert is near a tie.
SEEDS = {"mixtral": 3, "deepseek": 7}

Arrays = dict[str, np.ndarray]


class Plain(NamedTuple):
    """Where a plain run came to."""

    losses: list[float]
    norms: list[float]
    first: Arrays  # parameters by path
    last: Arrays
    counts: list[np.ndarray]  # [layers, experts] of each step
    bias: np.ndarray | None
    margin: float  # the least between a chosen expert and one that is not


def batches() -> list[Arrays]:
    """Tokens of which those of a micro-batch that count are more than those of another."""
    found = []
    for step in range(STEPS):
        batch = tokens(SAMPLES, SEQ, seed=step)
        ignored = np.random.default_rng(step).integers(0, SEQ, SAMPLES)
        mask = np.arange(SEQ + 1) >= ignored[:, None]
        found.append({**batch, "mask": mask.astype(np.int32)})
    return found


def factory(name: str) -> Any:
    return resolve_model(Config.load({"train_batch_size": 8, "model": MODELS[name]}))[0]


def options(name: str, config: Any) -> dict[str, Any]:
    """Of the router, as the papers have them."""
    if name == "mixtral":
        return {"k": config.num_experts_per_tok, "scores": "softmax_of_top"}
    return {
        "k": config.num_experts_per_tok,
        "scores": "sigmoid",
        "renormalize": True,
        "groups": config.num_groups,
        "limited_groups": config.num_limited_groups,
        "group_score": "top2",
        "scale": config.routed_scaling_factor,
    }


def layers_of(stack: Any) -> list[Any]:
    graph, state = nnx.split(stack)
    count = jax.tree.leaves(state)[0].shape[0]
    return [nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count)]


def forward(name: str, model: Any, bias: Any, batch: Any) -> Any:
    """(sum, weight, auxiliary, routings of all mixture layers)."""
    c, read, targets = model.config, batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x = model.embed(read)
    rotations = [rotary.at(jnp.arange(read.shape[1])) for rotary in model.rotaries]
    if model.dense_blocks is not None:
        for block in layers_of(model.dense_blocks):
            x = block(x, rotations, None, None)
    routings = []
    for number, block in enumerate(layers_of(model.blocks)):
        x = x + block.attn(block.attn_norm(x), rotations, None, None)
        into, experts = block.mlp_norm(x), block.mlp
        own = None if bias is None else bias[number]
        routing = dense.routed(into, experts.router[...], bias=own, **options(name, c))
        weights = (w[...] for w in (experts.w_gate, experts.w_up, experts.w_down))
        y = every_expert(into, routing, *weights)
        if experts.shared is not None:
            y = y + experts.shared(into)
        x = x + y
        routings.append(routing)
    logits = model.norm(x) @ model.head.table[...].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    counted = batch["mask"][:, 1:]
    auxiliary, k = c.router_z_loss_coef * dense.z_loss(routings), c.num_experts_per_tok
    if c.router_aux_loss_coef:
        auxiliary += c.router_aux_loss_coef * dense.switch_loss(routings, k)
    if c.sequence_aux_loss_coef:
        auxiliary += c.sequence_aux_loss_coef * sequence_loss(routings, k)
    return -(picked * counted).sum(), counted.sum(), auxiliary, routings


def every_expert(x: Any, routing: Any, gate: Any, up: Any, down: Any) -> Any:
    """As the reference's `mixture`, whose loop over 64 experts takes minutes to compile."""

    def times(rows: Any, weights: Any, form: str) -> Any:
        return jnp.einsum(form, rows, weights, precision="highest")

    hidden = jax.nn.silu(times(x, gate, "bse,xem->bsxm")) * times(x, up, "bse,xem->bsxm")
    results = times(hidden, down, "bsxm,xme->bsxe")
    return times(routing.combine, results, "bsx,bsxe->bse")


def sequence_loss(routings: Any, k: int) -> Any:
    """As the reference's, whose loops over samples and experts take minutes to compile."""
    total: Any = 0.0
    for routing in routings:
        experts = routing.chosen.shape[-1]
        f, p = routing.chosen.mean(1) / k, routing.shares.mean(1)
        total += experts * (f * p).sum(-1).mean()
    return total


@functools.cache
def plain(name: str, ranks: int, accumulation: int) -> Plain:
    """Train a model; micro-batches are those of so many data ranks."""
    module = jax.jit(lambda: nnx.split(factory(name)(nnx.Rngs(SEEDS[name])))[1])()
    graph = nnx.split(nnx.eval_shape(lambda: factory(name)(nnx.Rngs(SEEDS[name]))))[0]
    rate = getattr(nnx.merge(graph, module), "bias_update_rate", None)
    _, params, rest = nnx.split(nnx.merge(graph, module), nnx.Param, ...)
    layers = params["blocks"]["mlp"]["router"].get_value().shape[0]
    experts = params["blocks"]["mlp"]["router"].get_value().shape[2]
    bias = None if rate is None else jnp.zeros((layers, experts))
    first = flat(params)

    @jax.jit
    def gradients(params: Any, bias: Any, micro: Any, step_weight: Any) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(graph, params, rest)
            total, _, auxiliary, routings = forward(name, model, bias, micro)
            counts = jnp.stack([dense.counts(routing) for routing in routings])
            margin = jnp.stack([routing.margin.min() for routing in routings]).min()
            return total / step_weight + auxiliary / accumulation, (counts, margin)

        return jax.value_and_grad(loss, has_aux=True)(params)

    losses, norms, counts_of_steps, margins = [], [], [], []
    for batch in batches():
        weight = float(batch["mask"][:, 1:].sum())
        loss, grads, counts = 0.0, None, 0
        for i in range(accumulation):
            micro = {n: slice_of_each_rank(x, i, accumulation, ranks) for n, x in batch.items()}
            (part, (chosen, margin)), new = gradients(params, bias, micro, weight)
            loss, counts = loss + float(part), counts + np.asarray(chosen)
            grads = new if grads is None else jax.tree.map(jnp.add, grads, new)
            margins.append(float(margin))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        losses.append(loss)
        norms.append(float(jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))))
        counts_of_steps.append(counts)
        if bias is not None:
            bias = jnp.stack(
                [dense.updated_bias(bias[i], counts[i], rate) for i in range(len(counts))]
            )
    of_bias = None if bias is None else np.asarray(bias)
    return Plain(losses, norms, first, flat(params), counts_of_steps, of_bias, min(margins))


def flat(state: Any) -> Arrays:
    pairs = nnx.to_flat_state(state)
    return {"/".join(map(str, keys)): np.array(v.get_value()) for keys, v in pairs}
