"""LAMB's norms and Muon's orthogonalisation are per matrix, however the layers are held."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.jaxpr.flops import count_products, program_flops
from jaxspeed.optim import build_optimizer, uses_muon
from jaxspeed.optim.muon import orthogonalize
from tests.optim.from_config import built

LAYERS, STEPS = 3, 3
SHAPES = {"kernel": (5, 8), "tall": (8, 5), "square": (6, 6), "conv": (3, 2, 4, 7), "bias": (8,)}


def layers(seed):
    rng = np.random.default_rng(seed)
    # Layers of unlike size, so that a norm over all of them would be far from each one's.
    return [
        {name: jnp.asarray(10.0**i * rng.normal(size=shape)) for name, shape in SHAPES.items()}
        for i in range(LAYERS)
    ]


def train(optimizer, arrange):
    params = {"blocks": arrange(layers(0))}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(STEPS):
        updates, state = update({"blocks": arrange(layers(1 + step))}, state, params)
        params = optax.apply_updates(params, updates)
    return params["blocks"]


def stack(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@pytest.mark.default_cases("Muon")
@pytest.mark.parametrize("type_", ["Lamb", "Muon"])
def test_stacked_layers_train_as_a_list_of_layers(type_):
    params = {"lr": 0.1, "weight_decay": 0.01}
    with jax.enable_x64(True):
        listed = stack(train(build_optimizer(type_, params), list))
        stacked = train(build_optimizer(type_, params, stacked=lambda path: 1), stack)
        unaware = train(build_optimizer(type_, params), stack)
    for name in SHAPES:
        np.testing.assert_allclose(stacked[name], listed[name], rtol=1e-9, err_msg=name)
    assert not np.allclose(unaware["kernel"], listed["kernel"], rtol=1e-3)


def test_two_stacked_dims_train_as_one():
    """Pipeline stages times layers: [stages, layers, in, out]."""

    def nested(layers):
        return jax.tree.map(lambda leaf: leaf[None], stack(layers))

    for type_ in ("Lamb", "Muon"):
        with jax.enable_x64(True):
            one = train(build_optimizer(type_, {}, stacked=lambda path: 1), stack)
            two = train(build_optimizer(type_, {}, stacked=lambda path: 2), nested)
        for name in SHAPES:
            np.testing.assert_allclose(two[name][0], one[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("ns_method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (2, 3, 4, 9)])
def test_orthogonalize_keeps_the_singular_vectors_and_levels_the_values(shape, ns_method):
    x = np.random.default_rng(0).normal(size=shape)
    with jax.enable_x64(True):
        y = np.asarray(orthogonalize(jnp.asarray(x), ns_method))
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    values = np.swapaxes(u, -1, -2) @ y @ np.swapaxes(vt, -1, -2)
    diagonal = np.diagonal(values, axis1=-2, axis2=-1)
    # Off the diagonal nothing; on it the quintic, five times, of the normalised singular values.
    s = s / np.linalg.norm(x, axis=(-2, -1), keepdims=True)[..., 0]
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    np.testing.assert_allclose(diagonal, s, rtol=1e-5)
    np.testing.assert_allclose(values - np.eye(s.shape[-1]) * diagonal[..., None], 0, atol=1e-6)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3


def test_the_gram_form_equals_the_standard_one_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 96)), jnp.float32)
    np.testing.assert_allclose(
        orthogonalize(x, "gram"), orthogonalize(x, "standard"), rtol=0, atol=1e-5
    )


def test_the_gram_form_multiplies_fewer_numbers_of_a_wide_matrix():
    """A standard iteration has two products with the matrix, X X^T and B X, the gram form none."""
    wide = {"blocks": {"kernel": jnp.ones((4, 64))}}

    def products(type_, **form):
        muon = built(type_, {"lr": 0.1, **form}).transform
        update = jax.make_jaxpr(muon.update)(wide, muon.init(wide), wide)
        return program_flops(update.jaxpr, count_products)

    assert products("Muon", ns_method="gram") < products("Muon", ns_method="standard") / 2
    gram = products("NorMuon", use_gram_newton_schulz=True)
    assert gram < products("NorMuon", use_gram_newton_schulz=False) / 2


def test_a_zero_gradient_moves_nothing():
    params = {"kernel": jnp.ones((4, 6)), "still": jnp.zeros((4, 6))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for type_ in ("Lamb", "Muon", "Lion", "Adam"):
        optimizer = build_optimizer(type_, {})
        updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
        for leaf in jax.tree.leaves(updates):
            np.testing.assert_array_equal(leaf, 0)


def test_muon_takes_a_convolution_as_a_matrix_of_patches_by_channels():
    """[height, width, in, out] is one matrix [height * width * in, out], scaled as DeepSpeed does
    by the filter's own two dims, sqrt(max(1, height / width))."""
    g = np.random.default_rng(0).normal(size=(3, 2, 4, 7))
    with jax.enable_x64(True):
        optimizer = build_optimizer("Muon", {"lr": 1.0})
        params = {"kernel": jnp.zeros(g.shape)}
        updates, _ = optimizer.update({"kernel": jnp.asarray(g)}, optimizer.init(params), params)
    x = (0.05 + 0.95 * 0.05) * g.reshape(24, 7)
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    expected = -np.sqrt(3 / 2) * x.reshape(g.shape)
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-9)


def test_lamb_steps_at_ratio_one_where_a_matrix_is_zero():
    """A bias that starts at 0 has no norm to be scaled by; its neighbour in the stack has."""
    params = {"bias": jnp.asarray([[0.0, 0.0], [3.0, 4.0]])}
    optimizer = build_optimizer("Lamb", {"lr": 0.1, "eps": 0.0}, stacked=lambda path: 1)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    # Raw moments of the first step: m / sqrt(v) = 0.1 / sqrt(0.001), which the rate undoes.
    np.testing.assert_allclose(updates["bias"][0], -0.1, rtol=1e-4)
    size = np.sqrt(2) * 0.1 / np.sqrt(0.001)
    np.testing.assert_allclose(updates["bias"][1], -0.1 * 5 / size, rtol=1e-4)


@pytest.mark.parametrize(
    "path, ndim, uses",
    [
        ("blocks/attn/q_proj/kernel", 2, True),
        ("blocks/3/mlp/up/kernel", 2, True),
        ("stem/conv/kernel", 4, True),
        ("blocks/attn/heads_proj/kernel", 2, True),
        ("embed/embedding", 2, False),
        ("patch_embed/kernel", 4, False),
        ("model/lm_head/kernel", 2, False),
        ("wte/embedding", 2, False),
        ("head/kernel", 2, False),
        ("blocks/norm1/scale", 1, False),
        ("blocks/attn/q_proj/bias", 2, False),  # [heads, head_dim]
        ("blocks/attn/q_proj/kernel", 3, False),  # which dims are the matrix cannot be told
        ("blocks/mlp/gate/kernel", 2, True),
        ("blocks/block_sparse_moe/gate/kernel", 2, False),
        ("blocks/mlp/shared_expert_gate/kernel", 2, False),
        ("blocks/mlp/router", 2, False),
        ("lora/blocks/up/kernel/A", 2, True),
        ("lora/blocks/up/kernel/B", 2, True),
        ("lora/blocks/q_proj/kernel/magnitude", 2, False),  # [heads, head_dim]
    ],
)
def test_muon_takes_hidden_matrices_only(path, ndim, uses):
    assert uses_muon(path, ndim) is uses
