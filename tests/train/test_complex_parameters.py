"""Complex parameters are parameters: trained along the conjugate of what JAX calls the gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.train import gradients
from jaxspeed.user_models import linen_model, nnx_model, pair_model
from tests.support.covering import covering
from tests.train.flax_loop import (
    REPLICATED,
    SHARDED,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    loss,
    settings,
    train_jaxspeed,
    train_linen,
    train_nnx,
)

OPTIMIZERS = {"sgd": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(1e-2)}


def complex_normal(key, shape, dtype=jnp.complex64):
    return jax.random.normal(key, shape, dtype) / shape[0] ** 0.5


class Spectral(nnx.Module):
    """A product in the frequency domain, as in a Fourier neural operator, between real ones."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mix = nnx.Param(complex_normal(rngs.params(), (WIDTH + 1, WIDTH + 1)))
        self.shift = nnx.Param(complex_normal(rngs.params(), (WIDTH + 1,)))
        self.down = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        h = jnp.fft.rfft(self.up(x))
        h = h @ self.mix[...] + self.shift[...]
        return self.down(jnp.tanh(jnp.fft.irfft(h, n=2 * WIDTH)))[:, 0]


class LinenSpectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = jnp.fft.rfft(nn.Dense(2 * WIDTH)(x))
        h = h @ self.param("mix", complex_normal, (WIDTH + 1, WIDTH + 1))
        h = h + self.param("shift", complex_normal, (WIDTH + 1,))
        return nn.Dense(1)(jnp.tanh(jnp.fft.irfft(h, n=2 * WIDTH)))[:, 0]


@settings(SHARDED)
@pytest.mark.parametrize("name", ["sgd", pytest.param("adam", marks=pytest.mark.full)])
def test_an_nnx_module_trains_as_in_plain_flax(setting, name):
    args = (loss, batches(), OPTIMIZERS[name], setting)
    assert_alike(train_jaxspeed(Spectral, *args), train_nnx(Spectral, *args))


@pytest.mark.sampled
@settings(REPLICATED)
def test_a_linen_module_trains_as_in_plain_flax(setting):
    def plain(out, after, batch):
        return jnp.mean((out - batch["y"]) ** 2)

    args = (batches(), OPTIMIZERS["adam"], setting)
    ours = train_jaxspeed(LinenSpectral(), loss, *args)
    assert_alike(ours, train_linen(LinenSpectral(), plain, *args))


@pytest.mark.parametrize("stage", covering([0, 3], [3]))
def test_the_loss_of_the_issue_falls(stage):
    """The mean of (|x w| - y)^2 under plain SGD; without the conjugate it rises."""

    def init(key):
        return {"w": complex_normal(key, (WIDTH, 4))}

    def loss(model, batch):
        return jnp.mean((jnp.abs(model(batch["x"])) - batch["y"][:, None]) ** 2)

    apply = lambda params, x: x.astype(jnp.complex64) @ params["w"]  # noqa: E731
    one = batches(1)[0] | {"y": np.full(64, 5.0, np.float32)}
    ours = train_jaxspeed((init, apply), loss, [one] * 10, optax.sgd(0.2), Setting(stage, 4, 1))
    w = init(jax.random.key(3))["w"]
    plain, slope = [], jax.jit(jax.value_and_grad(lambda w: loss(lambda x: x @ w, one)))
    for _ in range(10):
        value, grad = slope(w)
        plain.append(float(value))
        w = w - 0.2 * jnp.conj(grad)
    np.testing.assert_allclose(ours.losses, plain, rtol=1e-5)
    np.testing.assert_allclose(ours.values["w"], w, rtol=0, atol=1e-5)
    assert ours.losses[-1] < 0.75 * ours.losses[0]


@pytest.mark.parametrize("stage", covering([0, 3], [3]))
def test_norm_and_clipping_use_magnitudes(stage):
    one = batches(1)
    config = {"gradient_clipping": 0.1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = jaxspeed.initialize(Spectral, loss, Setting(stage, 1, 1).config(64, **config))
    before = {path: np.array(x) for path, x in engine.parameters.items()}
    metrics = engine.train_batch(one[0])
    moved = [np.array(x) - before[path] for path, x in engine.parameters.items()]
    length = np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in moved))
    assert float(metrics["grad_norm"]) > 0.1
    assert length == pytest.approx(0.1, rel=1e-4)

    module = Spectral(nnx.Rngs(3))
    grads = jax.tree.leaves(nnx.jit(nnx.grad(loss))(module, one[0]))
    plain = np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in grads))
    assert float(metrics["grad_norm"]) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("precision", covering(["bf16", "fp16"], ["fp16"]))
def test_sixteen_bit_precision_leaves_them_as_they_are(precision):
    engine = jaxspeed.initialize(
        Spectral,
        lambda model, batch: jnp.mean((model(batch["x"].astype(jnp.float32)) - batch["y"]) ** 2),
        Setting(3, 4, 1).config(
            64,
            optimizer={"type": "Adam", "params": {"lr": 1e-2}},
            communication_data_type=precision,
            **{precision: {"enabled": True}},
        ),
    )
    row = engine.placements["mix"]
    assert {p.dtype for p in (row.read, row.param, row.grad, row.opt)} == {np.dtype("complex64")}
    assert row.master is None
    losses = [float(engine.train_batch(b)["loss"]) for b in batches(1) * 10]
    assert losses[-1] < losses[0]


def test_zero_shards_them():
    engine = jaxspeed.initialize(Spectral, loss, Setting(3, 1, 1).config(64), optax.adam(1e-2))
    stored = engine.state.params["mix"]
    assert stored.addressable_shards[0].data.nbytes * 8 == stored.nbytes
    moments = [x for x in jax.tree.leaves(engine.state.opt) if jnp.iscomplexobj(x) and x.ndim == 2]
    assert len(moments) == 2
    assert all(x.addressable_shards[0].data.nbytes * 8 == x.nbytes for x in moments)


@pytest.mark.default_cases("ring")
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"data_reduction": "ring"}},
        pytest.param(
            {"parallel": {"data_reduction": "ring", "ring_wire": "int8"}}, marks=pytest.mark.full
        ),
        {"parallel": {"data_reduction": "parameter_server"}},
        {"parallel": {"gradient_reduction": "step"}, "communication_data_type": "bf16"},
    ],
    ids=["ring", "int8", "server", "once a step"],
)
def test_other_ways_of_reducing_agree(sections):
    """With what XLA's collectives give; int8 within what its blocks round."""
    data = batches(3, samples=56)  # which seven workers share as well as eight devices
    setting = Setting(0, 1, 1)
    optimizer = {"type": "SGD", "params": {"lr": 0.05}}
    ours = train_jaxspeed(
        Spectral, loss, data, None, setting, check=False, optimizer=optimizer, **sections
    )
    plain = train_nnx(Spectral, loss, data, optax.sgd(0.05), setting)
    tolerance = {"int8": 1e-2, "bf16": 1e-3}
    close = next((t for word, t in tolerance.items() if word in str(sections)), 1e-5)
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=close)
    np.testing.assert_allclose(ours.values["mix"], plain.values["mix"], rtol=0, atol=close)


def test_a_checkpoint_holds_them(tmp_path):
    def engine(stage):
        return jaxspeed.initialize(
            Spectral, loss, Setting(stage, 1, 1).config(64), optax.adam(1e-2)
        )

    first, (one, two) = engine(3), batches(2)
    first.train_batch(one)
    first.save_checkpoint(tmp_path)
    first.wait()
    second = engine(0)
    second.load_checkpoint(tmp_path)
    np.testing.assert_array_equal(second.parameters["mix"], first.parameters["mix"])
    losses = [float(e.train_batch(two)["loss"]) for e in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# -- check, when the fault is put back ------------------------------------------------------------


def only_real(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.default_cases("nnx")
@pytest.mark.parametrize("model", [Spectral, LinenSpectral()], ids=["nnx", "linen"])
def test_check_finds_that_they_are_not_trained(model, monkeypatch):
    for module in (nnx_model, linen_model, pair_model):
        monkeypatch.setattr(module, "is_inexact", only_real)
    one = batches(1)[0]
    engine = jaxspeed.initialize(
        model, loss, Setting(0, 1, 1).config(64), optax.sgd(0.1), example_batch=one
    )
    report = engine.check(one)
    assert not report.ok
    assert any(fault.startswith("mix is not trained: its jax.grad") for fault in report.faults)
    assert "mix is not trained" in str(report)


def test_check_finds_that_they_are_trained_the_wrong_way(monkeypatch):
    monkeypatch.setattr(gradients, "steepest", lambda grad: grad)
    engine = jaxspeed.initialize(Spectral, loss, Setting(0, 1, 1).config(64), optax.sgd(0.1))
    report = engine.check(batches(1)[0])
    assert not report.ok
    assert {leaf.path for leaf in report.leaves if leaf.gradient > 0.1} == {"mix", "shift"}
