"""Routers equal those of transformers: choices, weights and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops import moe

EXPERTS, EMBED = 16, 12
RNG = np.random.default_rng(5)
X = RNG.normal(size=(2, 9, EMBED)).astype(np.float32)
ROUTER = RNG.normal(size=(EMBED, EXPERTS)).astype(np.float32)
BIAS = RNG.normal(size=EXPERTS).astype(np.float32)
COMMON = {"hidden_size": EMBED, "num_attention_heads": 4, "num_experts_per_tok": 3}
GROUPED = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
# Of each model: (fields of its configuration, its tensors besides the weight, our keywords).
CASES = {
    "mixtral": ({"num_local_experts": EXPERTS}, {}, {"k": 3, "scores": "softmax_of_top"}),
    "qwen3_moe": (
        {"num_experts": EXPERTS, "norm_topk_prob": True},
        {},
        {"k": 3, "renormalize": True},
    ),
    "qwen3_moe, plain": ({"num_experts": EXPERTS, "norm_topk_prob": False}, {}, {"k": 3}),
    "deepseek_v2": (
        {"n_routed_experts": EXPERTS, "topk_method": "group_limited_greedy", **GROUPED},
        {},
        {"k": 4, "groups": 4, "limited_groups": 2, "scale": 2.5},
    ),
    "deepseek_v3": (
        {"n_routed_experts": EXPERTS, "norm_topk_prob": True, **GROUPED},
        {"e_score_correction_bias": BIAS},
        {
            "k": 4,
            "scores": "sigmoid",
            "renormalize": True,
            "bias": BIAS,
            "groups": 4,
            "limited_groups": 2,
            "group_score": "top2",
            "scale": 2.5,
        },
    ),
    "gpt_oss": (
        {"num_local_experts": EXPERTS},
        {"bias": BIAS},
        {"k": 3, "scores": "softmax_of_top", "logit_bias": BIAS},
    ),
}


def assert_near(found, wanted):
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.default_cases("qwen3_moe", "qwen3_moe, plain", "deepseek_v3", "gpt_oss")
@pytest.mark.parametrize("case", CASES)
def test_a_router_equals_transformers(references, case):
    fields, more, options = CASES[case]
    options = {
        name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in options.items()
    }
    slope = np.random.default_rng(6).normal(size=(2, 9, options["k"])).astype(np.float32)

    def ours(x, router):
        routing = moe.route(x, router, **options)
        order = jnp.argsort(routing.experts, -1)
        experts, weights = (jnp.take_along_axis(a, order, -1) for a in routing[:2])
        return jnp.sum(weights * slope), (experts, weights)

    (_, found), grads = jax.value_and_grad(ours, (0, 1), has_aux=True)(X, ROUTER)
    experts, weights, of_x, of_router = references.call(
        "routers.routed",
        model=case.partition(",")[0],
        fields=COMMON | fields,
        tensors={"weight": ROUTER.T, **more},
        x=X,
        slope=slope,
    )
    np.testing.assert_array_equal(found[0], experts)
    assert_near(found[1], weights)
    assert_near(grads[0], of_x)
    assert_near(grads[1], of_router.T)


def test_the_switch_loss_of_one_layer_is_mixtrals_over_k(references):
    """Mixtral's averages over layers, and a balanced load has a loss of k."""
    routing = moe.route(jnp.asarray(X), jnp.asarray(ROUTER), k=3, scores="softmax_of_top")
    balance = moe.Balance.zeros(2, 1, EXPERTS).with_layer(0, routing)
    wanted = references.call(
        "routers.balancing_loss", logits=[(X @ ROUTER).reshape(-1, EXPERTS)], experts=EXPERTS, k=3
    )
    assert_near(3 * balance.switch_loss(3), wanted)
