"""Muon, NorMuon and SOAP equal their definitions in numpy, matrix by matrix, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxspeed.models import deepseek

from jaxspeed.errors import ConfigError
from jaxspeed.optim import base_learning_rates
from jaxspeed.optim.muon import orthogonalize
from jaxspeed.placement import Leaf
from jaxspeed.placement.linear_layers import attention_heads
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.user_models import adapt_model
from tests.optim.from_config import built
from tests.optim.test_optimizer_formulas import adam, muon

# Paths, shapes and the names of their dims. Matrices have at most one row or column more than the
# other side: a gradient's null space would have no unique basis.
LAYERS = {
    "wide/kernel": ((5, 6), ()),
    "tall/kernel": ((6, 5), ()),
    "blocks/kernel": ((3, 6, 5), ("layers", "embed", "mlp")),
    "blocks/w_up": ((2, 3, 5, 5), ("layers", "experts", "embed", "mlp")),
    "rows/kernel": ((9, 4), ()),
    "columns/kernel": ((4, 9), ()),
    "large/kernel": ((8, 9), ()),
    "blocks/router": ((3, 6, 5), ("layers", "embed", "router")),
    "blocks/scores": ((3, 6, 5), ("layers", "embed", "experts")),
    "blocks/b_up": ((2, 3, 5), ("layers", "experts", "mlp")),
    "wide/bias": ((6,), ()),
}
OF_ADAM = ("blocks/router", "blocks/scores", "blocks/b_up", "wide/bias")


def leaves(layers):
    return [Leaf(path, shape, "float64", names) for path, (shape, names) in layers.items()]


def values(layers, seed):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape) for path, (shape, _) in layers.items()}


def gradients(layers, steps):
    """Those of each step, all with one part in common."""
    common = values(layers, 99)
    noise = [values(layers, 1 + t) for t in range(steps)]
    return [{path: common[path] + x for path, x in step.items()} for step in noise]


def trained(type_, params, layers, steps, **sections):
    """Parameters after each update, and the optimizer's last state."""
    with jax.enable_x64(True):
        optimizer = built(type_, params, leaves(layers), **sections).transform
        p = jax.tree.map(jnp.asarray, values(layers, 0))
        state, update = optimizer.init(p), jax.jit(optimizer.update)
        history = []
        for g in gradients(layers, steps):
            updates, state = update(jax.tree.map(jnp.asarray, g), state, p)
            p = optax.apply_updates(p, updates)
            history.append(jax.device_get(p))
    return history, state


def assert_equal(ours, path, reference, steps, rtol=1e-6):
    """Each update of a leaf is that of `reference(p, gradients)` of each of its matrices."""
    shape, names = LAYERS[path]
    stack = sum(name in ("layers", "experts") for name in names[:-2])
    p0, gs = values(LAYERS, 0)[path], [g[path] for g in gradients(LAYERS, steps)]
    for at in np.ndindex(shape[:stack]):
        expected = np.diff([p0[at], *reference(p0[at], [g[at] for g in gs])], axis=0)
        actual = np.diff([p0[at], *(p[path][at] for p in ours)], axis=0)
        for u, v in zip(actual, expected, strict=True):
            assert np.abs(u - v).max() <= rtol * np.abs(v).max(), (path, at)


SOAP = {
    "lr": 0.02,
    "betas": [0.9, 0.95],
    "shampoo_beta": 0.8,
    "eps": 1e-3,
    "weight_decay": 0.1,
    "precondition_frequency": 5,
    "max_precond_dim": 6,
}


def soap(p, gs, *, shampoo_beta=0.8):
    """After nikhilvyas/SOAP; the decay is AdamW's, of the weights before the update."""
    b1, b2 = SOAP["betas"]
    beta = b2 if shampoo_beta < 0 else shampoo_beta
    small = [n <= SOAP["max_precond_dim"] for n in p.shape]
    grams = [np.zeros((n, n)) for n in p.shape]
    bases = [np.eye(n) for n in p.shape]
    m, v = np.zeros_like(p), np.zeros_like(p)
    history = []
    for t, g in enumerate(gs):
        if t:  # the first gradient only makes the bases
            rotated = bases[0].T @ g @ bases[1]
            m = b1 * m + (1 - b1) * g  # in the basis of the weights
            v = b2 * v + (1 - b2) * rotated**2
            u = (bases[0].T @ m @ bases[1]) / (np.sqrt(v) + SOAP["eps"])
            u = bases[0] @ u @ bases[1].T * np.sqrt(1 - b2**t) / (1 - b1**t)
            p = p - SOAP["lr"] * (u + SOAP["weight_decay"] * p)
        outer = (g @ g.T, g.T @ g)
        grams = [beta * a + (1 - beta) * b for a, b in zip(grams, outer)]
        for side in range(2):
            if small[side] and t == 0:
                bases[side] = np.linalg.eigh(grams[side])[1][:, ::-1]
            elif small[side] and t % SOAP["precondition_frequency"] == 0:
                rayleigh = np.diag(bases[side].T @ grams[side] @ bases[side])
                order = np.argsort(-rayleigh)
                v = np.take(v, order, axis=side)
                bases[side] = np.linalg.qr(grams[side] @ bases[side][:, order])[0]
        history.append(p)
    return history


def each(rule):
    """A rule of the last value as one of all values."""
    return lambda p, gs: [rule(p.copy(), gs[: t + 1]) for t in range(len(gs))]


def soaps_adam(p, gs):
    b1, b2 = SOAP["betas"]
    return adam(p, gs, lr=SOAP["lr"], betas=(b1, b2), eps=SOAP["eps"], decay=SOAP["weight_decay"])


def test_soap_equals_its_reference_in_numpy():
    """Over two updates of the bases; on both sides, on one, stacked, and AdamW where neither is."""
    steps = 13
    ours, _ = trained("SOAP", SOAP, LAYERS, steps)
    for path in LAYERS:
        is_adams = path in (*OF_ADAM, "large/kernel")
        assert_equal(ours, path, each(soaps_adam) if is_adams else soap, steps)


@pytest.mark.sampled
def test_soaps_second_beta_is_that_of_its_preconditioners_by_default():
    one = {"tall/kernel": LAYERS["tall/kernel"]}
    ours, _ = trained("SOAP", {**SOAP, "shampoo_beta": -1}, one, 7)
    reference = soap(
        values(one, 0)["tall/kernel"],
        [g["tall/kernel"] for g in gradients(one, 7)],
        shampoo_beta=-1,
    )
    np.testing.assert_allclose(ours[-1]["tall/kernel"], reference[-1], rtol=1e-9)


def test_soaps_large_matrices_are_updated_one_at_a_time_with_equal_results(monkeypatch):
    one = {"blocks/kernel": ((5, 6, 5), ("layers", "embed", "mlp"))}
    at_once, _ = trained("SOAP", SOAP, one, 7)
    monkeypatch.setattr("jaxspeed.optim.owners.LARGE", 2 * 250)  # two of five matrices
    ours, _ = trained("SOAP", SOAP, one, 7)
    np.testing.assert_allclose(ours[-1]["blocks/kernel"], at_once[-1]["blocks/kernel"], rtol=1e-9)


def test_bases_stay_in_float32_where_moments_are_stored_in_bf16():
    bf16 = {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16)}
    state = built("SOAP", bf16=bf16).transform.init(params).inner_states["soap"].inner_state[0]
    of_kernel = {name: x["kernel"].dtype for tree in state[1:] for name, x in tree[0].items()}
    sides = ("rows", "columns", "gram_rows", "gram_columns")
    wanted = dict.fromkeys(sides, jnp.float32) | dict.fromkeys(("mu", "nu"), jnp.bfloat16)
    assert of_kernel == wanted


POLAR_EXPRESS = [  # arXiv:2505.16932, with a safety factor of 1.02
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def normuon(p, gs, *, nesterov, adjust):
    """After microsoft/dion, whose weights are [out, in]."""
    lr, mu, beta2, eps, decay = (
        NORMUON[k] for k in ("muon_lr", "mu", "muon_beta2", "epsilon", "weight_decay")
    )
    w, m, v = p.T, np.zeros_like(p.T), np.zeros((p.shape[1], 1))
    out, into = w.shape
    scale = {"spectral_norm": (out / into) ** 0.5, "rms_norm": 0.2 * max(out, into) ** 0.5}
    history = []
    for g in gs:
        m = mu * m + g.T
        x = mu * m + g.T if nesterov else m
        x = x / (1.02 * np.linalg.norm(x) + eps)
        for a, b, c in POLAR_EXPRESS:
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        v = beta2 * v + (1 - beta2) * (x**2).mean(1, keepdims=True)
        u = x / (np.sqrt(v) + 1e-8)
        u = u * np.linalg.norm(x) / np.linalg.norm(u)
        w = w * (1 - lr * decay) - lr * scale.get(adjust, 1.0) * u
        history.append(w.T)
    return history


NORMUON = {
    "muon_lr": 0.02,
    "adam_lr": 0.03,
    "mu": 0.8,
    "muon_beta2": 0.9,
    "betas": [0.8, 0.9],
    "epsilon": 1e-3,
    "weight_decay": 0.1,
}


FORMS = {
    "nesterov": {"nesterov": True, "adjust_lr": "rms_norm"},
    "gram": {"use_gram_newton_schulz": True, "adjust_lr": None},
    "plain": {},
}


@pytest.mark.default_cases("nesterov")
@pytest.mark.parametrize("name", ["nesterov", "gram", "plain"])
def test_normuon_equals_its_formula(name):
    params, steps = FORMS[name], 4
    ours, state = trained("NorMuon", {**NORMUON, **params}, LAYERS, steps)

    def of_adam(p, gs):
        return adam(p, gs, lr=0.03, betas=(0.8, 0.9), eps=1e-3, decay=0.1)

    def of_matrix(p, gs):
        adjust = params.get("adjust_lr", "spectral_norm")
        nesterov = params.get("nesterov", False)
        return normuon(p, gs, nesterov=nesterov, adjust=adjust)

    for path in LAYERS:
        assert_equal(ours, path, each(of_adam) if path in OF_ADAM else of_matrix, steps)
    neurons = state.inner_states["muon"].inner_state[0][1].by_matrix["second_moment"]
    assert neurons["blocks/w_up"].shape == (2, 3, 5) and neurons["rows/kernel"].shape == (4,)
    assert base_learning_rates("NorMuon", {}) == {"muon_lr": 0.01, "adam_lr": 3e-4}


def test_experts_are_matrices_and_routers_are_not():
    steps = 2
    ours, _ = trained("Muon", {"lr": 0.03}, LAYERS, steps)
    for path in LAYERS:
        rule = adam if path in OF_ADAM else muon
        options = {"betas": (0.9, 0.95), "eps": 1e-10} if rule is adam else {}
        assert_equal(ours, path, each(lambda p, gs, r=rule, o=options: r(p, gs, **o)), steps)


HEADS = {
    "q_proj/kernel": ((2, 5, 3, 8), ("layers", "embed", "heads", "head_dim")),
    "kv_up/kernel": ((6, 2, 4), ("kv_rank", "heads", "head_dim")),
    "k_down/kernel": ((6, 4), ("embed", "head_dim")),
    "o_proj/kernel": ((3, 2, 6), ("heads", "head_dim", "embed")),
    "qkv_proj/kernel": ((5, 6, 3), ("embed", "heads", "head_dim")),
    "down/kernel": ((8, 5), ("mlp", "embed")),
    "query/kernel": ((5, 3, 4), ()),
}


def test_per_head_muon_orthogonalizes_each_head_of_queries_keys_and_values():
    ours, _ = trained("Muon", {"lr": 0.03, "per_head_muon": True}, HEADS, 2)
    p0, gs = values(HEADS, 0), gradients(HEADS, 2)

    def reference(*at, path, rows):
        shape = p0[path][at].shape
        flat = [x[path][at].reshape(np.prod(shape[:rows]), -1) for x in (p0, *gs)]
        return muon(flat[0], flat[1:], lr=0.03).reshape(shape)

    ours = ours[-1]
    for layer, head in np.ndindex(2, 3):
        at = (layer, slice(None), head)
        expected = reference(*at, path="q_proj/kernel", rows=1)
        np.testing.assert_allclose(ours["q_proj/kernel"][at], expected, rtol=1e-6)
    for path, heads in (("kv_up/kernel", 2), ("query/kernel", 3)):
        for head in range(heads):
            at = (slice(None), head)
            expected = reference(*at, path=path, rows=1)
            np.testing.assert_allclose(ours[path][at], expected, rtol=1e-6, err_msg=path)
    for path in ("k_down/kernel", "o_proj/kernel", "qkv_proj/kernel", "down/kernel"):
        rows = 2 if path.startswith("o_proj") else 1
        expected = reference(path=path, rows=rows)
        np.testing.assert_allclose(ours[path], expected, rtol=1e-6, err_msg=path)


def test_per_head_muon_without_a_weight_of_heads_is_a_config_error():
    without = {path: HEADS[path] for path in ("o_proj/kernel", "down/kernel", "qkv_proj/kernel")}
    frozen = Leaf("q/kernel", (5, 3, 8), "float32", ("embed", "heads", "head_dim"), trainable=False)
    with pytest.raises(ConfigError, match="per_head_muon: no trained parameter qualifies"):
        built("Muon", {"per_head_muon": True}, [*leaves(without), frozen])


def test_a_consistent_rms_is_optaxs():
    """Optax corrects the momentum's bias, which leaves the first direction as it is."""
    shapes = {path: (LAYERS[path][0], ()) for path in ("wide/kernel", "tall/kernel", "rows/kernel")}
    params = {"lr": 0.03, "consistent_rms": 0.2}
    ours, _ = trained("Muon", params, shapes, 1)
    eps = 1e-7 * (0.95 / 1.95 + 1) / (1 - 0.95**2)  # of the sum as Optax scales it
    with jax.enable_x64(True):
        p = jax.tree.map(jnp.asarray, values(shapes, 0))
        optaxs = optax.contrib.muon(0.03, consistent_rms=0.2, eps=eps)
        updates, _ = jax.jit(optaxs.update)(gradients(shapes, 1)[0], optaxs.init(p), p)
    for path, u in updates.items():
        step = ours[0][path] - values(shapes, 0)[path]
        np.testing.assert_allclose(step, u, rtol=1e-9)


def test_products_of_16_bit_runs_are_rounded_to_bf16_before_and_after():
    g = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    p = {"kernel": jnp.zeros(g.shape, jnp.float32)}

    def direction(g, **sections):
        optimizer = built("Muon", {"lr": 1.0, "momentum": 0.0}, **sections).transform
        return optimizer.update({"kernel": jnp.asarray(g)}, optimizer.init(p), p)[0]["kernel"]

    rounded = jnp.asarray(g).astype(jnp.bfloat16)
    expected = orthogonalize(rounded).astype(jnp.bfloat16)
    expected = -expected.astype(jnp.float32) * 1.5**0.5
    in_float32 = -orthogonalize(rounded.astype(jnp.float32)) * 1.5**0.5
    assert 0 < np.abs(expected - in_float32).max() < 0.05
    for section in ("bf16", "fp16"):
        u = direction(g, **{section: {"enabled": True}})
        np.testing.assert_array_equal(u, expected)
    assert not np.array_equal(direction(g), expected)
    # A sum below the range of fp16 has a direction.
    tiny = direction(g * 2.0**-25, fp16={"enabled": True})
    assert np.linalg.norm(tiny) > 1


def test_which_parameters_of_deepseek_are_matrices_and_which_have_heads():
    config = deepseek.PRESETS["tiny"]
    model = adapt_model(lambda rngs: deepseek.build(config, rngs), deepseek.loss)
    optimizer = built("Muon", {}, model.leaves).transform
    shapes = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in model.leaves}
    state = jax.eval_shape(optimizer.init, shapes)
    moments = flat_with_paths(state.inner_states["muon"].inner_state[0].momentum)

    def names(paths):
        return {"/".join(path.split("/")[-2:]).removesuffix("/kernel") for path in paths}

    assert names(moments) == {
        *("q_down", "q_up", "kv_down", "kv_up", "k_rotated", "o_proj"),
        *("gate", "up", "down", "mlp/w_gate", "mlp/w_up", "mlp/w_down"),
    }
    assert {"mlp/router", "embed/table"} < names(shapes.keys() - moments.keys())
    heads = {x.path: attention_heads(x) for x in model.leaves}
    assert names(path for path, n in heads.items() if n > 1) == {"q_up", "kv_up"}
