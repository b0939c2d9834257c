"""What mixtures ask of a step: routers in fp32, and the rounds of what capacity leaves.

And the factor of a router's weights.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspeed.models import mixtral, mixture
from safetensors import safe_open

import jaxspeed
from jaxspeed.errors import JaxspeedError
from tests.moe.small_models import MIXTRAL, tokens

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def with_fields(**fields: Any) -> dict[str, Any]:
    return {**MIXTRAL, "config": {**MIXTRAL["config"], **fields}}


def test_a_router_is_not_rounded_in_bf16():
    config = {"model": MIXTRAL, "train_batch_size": 8, "bf16": {"enabled": True}, **ADAM}
    table = jaxspeed.initialize(config=config).placements
    dtypes = {row.path: jnp.dtype(row.read.dtype).name for row in table}
    assert dtypes["blocks/mlp/router"] == "float32"
    assert {dtypes[f"blocks/mlp/w_{name}"] for name in ("gate", "up", "down")} == {"bfloat16"}


@pytest.mark.sampled
def test_rounds_are_those_of_pairs_that_are_not_dropped(monkeypatch):
    fields = {**MIXTRAL["config"], "capacity_factor": 1.0, "min_capacity": 1}
    model = mixtral.build(mixtral.Config(**fields), nnx.Rngs(0))
    sent = []
    monkeypatch.setattr(
        mixture.ops.moe,
        "rounds_of",
        lambda counts, k, seq: (sent.append(np.asarray(counts)), jnp.ones(1))[1],
    )
    *_, metrics = mixture.loss(model, {k: jnp.asarray(v) for k, v in tokens(4).items()})
    (counts,) = sent
    pairs = 4 * 2 * 16 * 2  # samples, layers, tokens, experts of a token
    assert 0 < float(metrics["dropped_share"]) < 1
    assert counts.sum() == round(pairs * (1 - float(metrics["dropped_share"])))


@pytest.mark.sampled
def test_experts_that_are_parts_of_a_feed_forward_sum_up_to_it_with_the_factor_of_their_number():
    fields = {**MIXTRAL["config"], "num_experts": 2, "routed_scaling_factor": 2.0}
    experts = mixtral.block(mixtral.Config(**fields), nnx.Rngs(0)).mlp
    experts.router[...] = jnp.zeros_like(experts.router[...])  # each has the weight 1/2
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32))
    gate, up = (jnp.concatenate(list(w[...]), -1) for w in (experts.w_gate, experts.w_up))
    down = jnp.concatenate(list(experts.w_down[...]), 0)
    np.testing.assert_allclose(
        experts(x)[0], (jax.nn.silu(x @ gate) * (x @ up)) @ down, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "fields, mesh, says",
    [
        ({"num_experts_per_tok": 9}, {}, "k = 9 of 8 experts"),
        ({"capacity_factor": 0.0, "min_capacity": 0}, {}, "min_capacity 0 drop all tokens"),
        ({"num_experts": 6}, {"expert": 4}, "expert.* 6"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_error_before_anything_is_allocated(fields, mesh, says):
    config = {"model": with_fields(**fields), "train_batch_size": 8, "mesh": mesh, **ADAM}
    with pytest.raises(JaxspeedError, match=says):
        jaxspeed.initialize(config=config)


@pytest.mark.sampled
def test_a_factor_that_a_form_lacks_is_in_the_experts_last_weights(tmp_path):
    config = {"train_batch_size": 8, **ADAM}
    model = with_fields(routed_scaling_factor=2.0)
    engine = jaxspeed.initialize(config={**config, "model": model})
    engine.save_pretrained(tmp_path)
    batch = tokens(8)
    expected = float(engine.eval_batch(batch)["loss"])
    down = np.asarray(engine.parameters["blocks/mlp/w_down"])  # [layers, experts, in, out]
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
        np.testing.assert_array_equal(file.get_tensor(name), 2 * down[1, 3].T)
    assert "routed_scaling_factor" not in json.loads((tmp_path / "config.json").read_text())
    read = jaxspeed.initialize(config={**config, "model": {"pretrained": str(tmp_path)}})
    assert float(read.eval_batch(batch)["loss"]) == pytest.approx(expected, rel=1e-6)
