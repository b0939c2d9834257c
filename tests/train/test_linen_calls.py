"""Linen modules as losses call them: several calls, methods, streams, collections, flags."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxspeed
from jaxspeed import ModelError
from tests.engine import tiny
from tests.train.flax_loop import (
    REPLICATED,
    SEED,
    STAGE_1,
    Setting,
    settings,
    train_jaxspeed,
    train_linen,
)

WIDTH = 8
SGD = optax.sgd(0.05, momentum=0.9)


class Coder(nn.Module):
    """Encoder and decoder, called one after the other."""

    def setup(self):
        self.encoder = nn.Dense(4)
        self.decoder = nn.Dense(WIDTH)
        self.norm = nn.BatchNorm(momentum=0.5)

    def enc(self, x, train):
        return self.norm(jnp.tanh(self.encoder(x)), use_running_average=not train)

    def dec(self, z):
        return self.decoder(z)


class Towers(nn.Module):
    """Two towers without a common call."""

    def setup(self):
        self.left = nn.Dense(4)
        self.right = nn.Dense(4)

    def of_left(self, x):
        return self.left(x)

    def of_right(self, x):
        return self.right(x)


def coded(model, batch):
    out = model(model(batch["x"], method="enc"), method="dec")
    return jnp.mean((out - batch["x"]) ** 2)


def coded_by_name(model, batch):
    return jnp.mean((model.dec(model.enc(batch["x"])) - batch["x"]) ** 2)


def contrasted(model, batch):
    left, right = model.of_left(batch["x"]), model.of_right(batch["y"])
    return jnp.mean((left - right - 1) ** 2)


def plain_coded(module, batch, train):
    return jnp.mean((module.dec(module.enc(batch["x"], train)) - batch["x"]) ** 2)


def plain_contrasted(module, batch, train):
    return jnp.mean((module.of_left(batch["x"]) - module.of_right(batch["y"]) - 1) ** 2)


def batches():
    rng = np.random.default_rng(0)
    return [
        {name: rng.normal(size=(32, WIDTH)).astype(np.float32) for name in "xy"} for _ in range(3)
    ]


def train_plain(module, loss_fn, setting):
    """Created by one call of all (`nn.init`), trained by Optax."""
    key = jax.random.key(SEED)
    variables = nn.init(lambda m, b: loss_fn(m, b, False), module)(key, batches()[0])
    params, state = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    opt, losses = SGD.init(params), []
    step = nn.apply(lambda m, b: loss_fn(m, b, True), module, mutable=["batch_stats"])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def micro_batch(params, state, part):
        return step({"params": params, **state}, part)

    for batch in batches():
        sums, seen = jax.tree.map(jnp.zeros_like, params), []
        for part in setting.micro_batches(batch):
            (loss, state), grads = micro_batch(params, state, part)
            seen.append(float(loss))
            sums = jax.tree.map(lambda s, g: s + g / setting.accumulation, sums, grads)
        losses.append(float(np.mean(seen)))
        updates, opt = SGD.update(sums, opt)
        params = optax.apply_updates(params, updates)
    flat = flatten_dict(params, sep="/") | flatten_dict(dict(state), sep="/")
    return losses, {path: np.array(x) for path, x in flat.items()}


@pytest.mark.default_cases("towers-setting0")
@pytest.mark.parametrize(
    "setting", [Setting(3, 4, 1), pytest.param(Setting(0, 1, 2), marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("module", "loss_fn", "plain"),
    [
        pytest.param(Coder(), coded, plain_coded, id="methods"),
        pytest.param(Coder(), coded_by_name, plain_coded, id="names", marks=pytest.mark.full),
        pytest.param(Towers(), contrasted, plain_contrasted, id="towers"),
    ],
)
def test_all_calls_of_the_loss_create_parameters(module, loss_fn, plain, setting):
    ours = train_jaxspeed(module, loss_fn, batches(), SGD, setting)
    losses, values = train_plain(module, plain, setting)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-5)
    assert set(ours.values) == set(values)
    for path, x in values.items():
        np.testing.assert_allclose(ours.values[path], x, atol=1e-5, err_msg=path)


@pytest.mark.sampled
def test_init_with_creates_what_the_loss_calls_in_a_transformation():
    class Field(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(jnp.tanh(nn.Dense(8)(x)))[..., 0]

    def loss(model, batch):
        call = jax.checkpoint(lambda x: model(x))
        slope = jax.vmap(jax.grad(call))(batch["x"])
        return jnp.mean((slope - 1) ** 2)

    with pytest.raises(ModelError, match=r"init_with=lambda model, batch"):
        tiny.engine(Field(), loss)
    engine = tiny.engine(Field(), loss, init_with=lambda model, batch: model(batch["x"]))
    params = unflatten_dict({k: np.asarray(v) for k, v in engine.parameters.items()}, sep="/")
    wanted = loss(lambda x: Field().apply({"params": params}, x), tiny.batch())
    np.testing.assert_allclose(engine.train_batch(tiny.batch())["loss"], wanted, rtol=1e-5)
    assert engine.check(tiny.batch()).ok
    with pytest.raises(ModelError, match="init_with is for Linen"):
        tiny.engine(init_with=lambda model, batch: None)


class Rich(nn.Module):
    """Statistics, sown values, a stream of its own, and a mode under a name of its own."""

    @nn.compact
    def __call__(self, x, learning):
        h = nn.Dense(WIDTH, name="up")(x)
        h = nn.BatchNorm(use_running_average=not learning, momentum=0.5)(h)
        self.sow("losses", "square", (h**2).mean())
        if learning:
            h = h + 0.1 * jax.random.normal(self.make_rng("noise"), h.shape)
        return nn.Dense(1, name="down")(jnp.tanh(h))[:, 0]


def by_call(model, batch):
    out, changed = model(
        batch["x"],
        model.training,
        rngs={"noise": jax.random.key(7)},
        mutable=["losses", "intermediates"],
        capture_intermediates=True,
    )
    hidden = changed["intermediates"]["up"]["__call__"][0]
    return jnp.mean(out**2) + changed["losses"]["square"][0] + jnp.mean(hidden**2)


def by_apply(model, batch):
    out, changed = model.apply(
        model.variables,
        batch["x"],
        model.training,
        rngs={"noise": jax.random.key(7)},
        mutable=["losses", "intermediates", "batch_stats"],
        capture_intermediates=True,
    )
    model.variables = {**model.variables, "batch_stats": changed["batch_stats"]}
    hidden = changed["intermediates"]["up"]["__call__"][0]
    return jnp.mean(out**2) + changed["losses"]["square"][0] + jnp.mean(hidden**2)


class NoisySteps(nn.Module):
    """A recurrence with noise in each step, of a stream that only `split_rngs` names."""

    @nn.compact
    def __call__(self, x):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, carry, x):
                noise = jax.random.normal(self.make_rng("noise"), carry.shape)
                return jnp.tanh(nn.Dense(WIDTH)(carry + x)) + noise, noise

        scan = nn.scan(
            Step,
            variable_broadcast="params",
            split_rngs={"params": False, "noise": True},
            in_axes=1,
            out_axes=1,
        )
        carry, noise = scan()(x, jnp.repeat(x[:, None], 5, axis=1))
        return jnp.mean(carry**2), noise


def test_a_stream_that_a_lifted_scan_splits_draws_anew_in_each_step():
    def loss(model, batch):
        value, noise = model(batch["x"])
        apart = jnp.abs(noise[:, 1:] - noise[:, :-1]).min()
        return value, {"first": noise[0, 0, 0], "apart": apart}

    engine = tiny.engine(NoisySteps(), loss)
    params = unflatten_dict({k: np.asarray(v) for k, v in engine.parameters.items()}, sep="/")
    metrics = engine.train_batch(tiny.batch())
    assert metrics["apart"] > 0
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0)
    rngs = {"noise": jax.random.fold_in(key, 2)}  # after `params` and `dropout`
    plain = loss(lambda x: NoisySteps().apply({"params": params}, x, rngs=rngs), tiny.batch())
    np.testing.assert_allclose(metrics["loss"], plain[0], rtol=1e-5)
    np.testing.assert_allclose(metrics["first"], plain[1]["first"], rtol=1e-5)


@pytest.mark.default_cases("by_apply")
@pytest.mark.parametrize("loss_fn", [by_call, by_apply])
def test_streams_collections_and_intermediates_as_with_apply(loss_fn):
    setting = Setting(3, 4, 1)
    ours = train_jaxspeed(Rich(), loss_fn, batches(), SGD, setting)
    variables = Rich().init(jax.random.key(SEED), batches()[0]["x"], False)
    params, stats = variables["params"], variables["batch_stats"]
    opt, losses = SGD.init(params), []

    def loss_of(params, stats, part):
        out, changed = Rich().apply(
            {"params": params, "batch_stats": stats},
            part["x"],
            True,
            rngs={"noise": jax.random.key(7)},
            mutable=["losses", "intermediates", "batch_stats"],
            capture_intermediates=True,
        )
        hidden = changed["intermediates"]["up"]["__call__"][0]
        loss = jnp.mean(out**2) + changed["losses"]["square"][0] + jnp.mean(hidden**2)
        return loss, changed["batch_stats"]

    micro_batch = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for batch in batches():
        sums, seen = jax.tree.map(jnp.zeros_like, params), []
        for part in setting.micro_batches(batch):
            (loss, stats), grads = micro_batch(params, stats, part)
            seen.append(float(loss))
            sums = jax.tree.map(lambda s, g: s + g / 4, sums, grads)
        losses.append(float(np.mean(seen)))
        updates, opt = SGD.update(sums, opt)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-5)
    flat = flatten_dict(params, sep="/") | flatten_dict({"batch_stats": stats}, sep="/")
    for path, x in flat.items():
        np.testing.assert_allclose(ours.values[path], x, atol=1e-5, err_msg=path)


def test_the_loss_may_take_the_mode():
    def loss(model, batch, train):
        return jnp.mean(model(batch["x"])) + (100.0 if train else 0.0)

    engine = tiny.engine(loss_fn=loss)
    assert float(engine.train_batch(tiny.batch())["loss"]) > 50
    assert float(engine.eval_batch(tiny.batch())["loss"]) < 50


class Fielded(nn.Module):
    """A mode that is a field of the module, as of many GANs, and may be an argument as well."""

    training: bool = True

    @nn.compact
    def __call__(self, x, training=None):
        training = nn.merge_param("training", self.training, training)
        h = nn.BatchNorm(use_running_average=not training, momentum=0.5)(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(jnp.tanh(h))[:, 0]


def test_a_mode_that_is_a_field_is_off_in_evaluation():
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    engine = tiny.engine(Fielded(), loss)
    before = engine.module.variables
    plain, changed = Fielded().apply(before, tiny.batch()["x"], mutable=["batch_stats"])
    wanted = jnp.mean((plain - tiny.batch()["y"]) ** 2)
    np.testing.assert_allclose(engine.train_batch(tiny.batch())["loss"], wanted, rtol=1e-5)
    after = engine.module.variables
    for ours, theirs in zip(*map(jax.tree.leaves, (after["batch_stats"], changed)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

    out = Fielded(training=False).apply(after, tiny.batch()["x"])
    wanted = jnp.mean((out - tiny.batch()["y"]) ** 2)
    np.testing.assert_allclose(engine.eval_batch(tiny.batch())["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(engine.module(tiny.batch()["x"]), out, rtol=1e-5, atol=1e-6)


class Noisy(nn.Module):
    """A layer whose mode is a field of its own, read in `setup`."""

    is_training: bool = True

    def setup(self):
        self.noise = 1.0 if self.is_training else 0.0

    def __call__(self, x):
        return x + self.noise


class Nested(nn.Module):
    """Modes that are fields of modules inside: given, in a list, made in a call."""

    noisy: nn.Module
    norms: tuple[nn.Module, ...]
    training: bool | None = None  # no mode, but what a call sets

    @nn.compact
    def __call__(self, x):
        x = self.noisy(nn.Dense(WIDTH, name="up")(x))
        for norm in self.norms:
            x = norm(x)
        x = nn.Sequential([nn.Dense(WIDTH), Noisy()])(x)
        return nn.Dense(1)(nn.remat(Noisy)()(jnp.tanh(x)))[:, 0]


def nested(is_training):
    form = {"momentum": 0.5, "use_running_average": not is_training}
    return Nested(Noisy(is_training), (nn.BatchNorm(**form), nn.BatchNorm(**form)))


class Quiet(Noisy):
    """What `Noisy` is in evaluation, for the plain loop."""

    is_training: bool = False


@settings(REPLICATED, STAGE_1)
def test_modes_of_nested_modules_are_off_in_evaluation(setting, monkeypatch):
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"][:, 0]) ** 2)

    engine = jaxspeed.initialize(
        nested(True), loss, setting.config(32), SGD, example_batch=batches()[0]
    )
    plain = train_linen(
        nested(True),
        lambda out, after, batch: jnp.mean((out - batch["y"][:, 0]) ** 2),
        batches(),
        SGD,
        setting,
    )
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    np.testing.assert_allclose(losses, plain.losses, rtol=1e-5)

    batch = batches()[0]
    evaluated = engine.eval_batch(batch)["loss"]
    shown = engine.module(batch["x"])
    assert engine.train_batch(batch)["loss"] < 2 * losses[-1]  # in training as before
    monkeypatch.setitem(globals(), "Noisy", Quiet)
    values = unflatten_dict(plain.values, sep="/")
    stats = values.pop("batch_stats")
    out = nested(False).apply({"params": values, "batch_stats": stats}, batch["x"])
    np.testing.assert_allclose(shown, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(evaluated, loss(lambda x: out, batch), rtol=1e-4)
