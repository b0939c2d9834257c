"""A micro-batch computed in parts at once: the same steps, and refused where it would differ."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import Config, ConfigError, ModelError

SAMPLES, WIDTH, STEPS = 8, 6, 4


class Net(nnx.Module):
    def __init__(self, rngs, norm=False, dropout=0.0):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.last(self.dropout(jnp.tanh(x)))


def weighted(model, batch):
    """Some samples weigh nothing, so that the parts weigh differently."""
    errors = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
    total, weight = (errors * batch["w"]).sum(), batch["w"].sum()
    return total, weight, {"error": total / jnp.maximum(weight, 1)}


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x, y = rng.normal(size=(2, SAMPLES, WIDTH)).astype(np.float32)
        w = np.array([0, 0, 1, 0, 2, 1, 1, 3], np.float32)
        yield {"x": x, "y": y, "w": w}


def engine(parts, loss=weighted, devices=1, accumulation=1, **options):
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        "parallel": {"batch_parts": parts},
    }
    return jaxspeed.initialize(
        lambda rngs: Net(rngs, **options), loss, config, devices=jax.devices()[:devices]
    )


def trained(*args, **options):
    ours = engine(*args, **options)
    first = {path: np.asarray(x) for path, x in ours.state.params.items()}
    metrics = [jax.device_get(ours.train_batch(batch)) for batch in batches()]
    return first, metrics, ours.state.params


def plain(first):
    """Optax on the formula of the loss."""

    def loss(p, batch):
        hidden = jnp.tanh(batch["x"] @ p["first/kernel"] + p["first/bias"])
        errors = jnp.square(hidden @ p["last/kernel"] + p["last/bias"] - batch["y"]).mean(-1)
        return (errors * batch["w"]).sum() / batch["w"].sum()

    tx = optax.sgd(0.3, momentum=0.9)
    params, state, losses = first, jax.jit(tx.init)(first), []

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for batch in batches():
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, params


@pytest.mark.default_cases("4-1", "2-2")
@pytest.mark.parametrize(("parts", "accumulation"), [(2, 1), (4, 1), (2, 2)])
def test_parts_take_the_steps_of_the_whole_batch(parts, accumulation):
    first, metrics, last = trained(parts, accumulation=accumulation)
    losses, wanted = plain(first)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-6)
    np.testing.assert_allclose([m["error"] for m in metrics], losses, rtol=1e-6)
    for path, x in wanted.items():
        np.testing.assert_allclose(last[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_part_has_its_own_products(parts):
    """XLA does not join them again: a core can take a part's without those of another."""
    program, batch = engine(parts).program, next(batches())
    text = program.step.lower(program.state, batch).compile().as_text()
    rows = re.findall(r"= f32\[(\d+),16\]\S* (?:dot|fusion|custom-call)\(", text)
    assert rows.count(str(SAMPLES // parts)) >= parts
    assert parts == 1 or str(SAMPLES) not in rows


def test_parts_draw_their_own_numbers():
    """The mean over both parts of a number that the second counts as negative."""

    def drawn(model, batch):
        number = model.dropout(jnp.exp2(jnp.arange(16.0))).sum() * batch["sign"].mean()
        return model(batch["x"]).sum(), float(len(batch["x"])), {"number": number}

    batch = next(batches()) | {"sign": np.repeat(np.float32([1, -1]), SAMPLES // 2)}
    assert float(engine(2, drawn, dropout=0.5).train_batch(batch)["number"]) != 0
    assert float(engine(2, drawn, dropout=0.0).train_batch(batch)["number"]) == 0


def mean(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": mean}, r"batch_parts 2: the loss is not a \(sum, weight\)"),
        ({"norm": True}, "batch_parts 2: the training pass changes the model's statistics"),
    ],
)
def test_a_loss_that_is_no_sum_over_parts_is_refused(options, says):
    with pytest.raises(ModelError, match=says):
        engine(2, **options).train_batch(next(batches()))


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (2, {"devices": 2}, "batch_parts 2 on 2 devices: each computes a part of its own already"),
        (3, {}, "batch_parts 3: a micro-batch of 8 samples does not divide"),
        (4, {"accumulation": 4}, "batch_parts 4: a micro-batch of 2 samples does not divide"),
    ],
)
def test_impossible_parts_are_refused(parts, options, says):
    with pytest.raises(ConfigError, match=says):
        engine(parts, **options)


def test_workers_of_a_parameter_server_have_no_parts():
    both = {"data_reduction": "parameter_server", "batch_parts": 2}
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "parallel": both}
    with pytest.raises(ConfigError, match=r"parallel\.batch_parts: found 2"):
        Config.load(config)
