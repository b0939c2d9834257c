"""The engine's steps: what they return, what they use up, and that they never wait."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.engine import reporter
from jaxspeed.train import dispatch_limit
from tests.engine import tiny
from tests.engine.tiny import PAIR, Linen, Listed, squared_error
from tests.optim.test_lr_schedules import BASE_LR, linear, warmup_decay_lr

STEP_METRICS = {
    "loss",
    "weight",
    "grad_norm",
    "grad_norm_clipped",
    "lr",
    "loss_scale",
    "skipped",
    "skipped_steps",
}


@pytest.fixture(scope="module", params=[0, 3])
def engine(request):
    return tiny.engine(stage=request.param)


def with_metrics(model, batch):
    out = model(batch["x"])
    return (jnp.square(out[:, 0] - batch["y"]).mean(), {"largest": out.max()})


def test_training_lowers_the_loss(engine):
    losses = [float(engine.train_batch(tiny.batch())["loss"]) for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]


BATCH = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
DECAY = dict.fromkeys(
    ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
)
WITHOUT_OPTIMIZER = {
    "plain": (BATCH, linear(5, 5)),
    "auto": (BATCH | {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}, linear(5, 5)),
    "a scheduler alone": (
        BATCH | {"scheduler": {"type": "WarmupDecayLR", "params": DECAY}},
        warmup_decay_lr(5, 5, high=BASE_LR, steps=0),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_a_config_without_an_optimizer_trains_as_hugging_faces_trainer_does(name):
    """Optax's AdamW of clipped gradients, with the rates of the schedules' formulas."""
    config, rates = WITHOUT_OPTIMIZER[name]
    auto = {"preset": "hf", "optimizer.params.lr": BASE_LR, "scheduler.params.total_num_steps": 5}
    engine = jaxspeed.initialize(PAIR, squared_error, config, auto=auto)
    schedule = jnp.asarray(rates, jnp.float32)
    adamw = optax.adamw(lambda n: schedule[n], weight_decay=0.0)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    params = {path: jnp.asarray(np.asarray(x)) for path, x in engine.parameters.items()}

    def loss(params, batch):
        layers = [{"w": params[path]} for path in sorted(params) if path != "out"]
        out = tiny.apply_pair({"layers": layers, "out": params["out"]}, batch["x"])
        return jnp.square(out[:, 0] - batch["y"]).mean()

    @jax.jit
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for number in range(5):
        batch = tiny.batch(seed=number)
        metrics = engine.train_batch(batch)
        params, state, value = step(params, state, batch)
        assert float(metrics["lr"]) == pytest.approx(rates[number], rel=1e-6)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)


def test_an_optimizer_that_is_passed_is_not_replaced_by_hugging_faces():
    sgd = optax.sgd(0.25)
    engine = jaxspeed.initialize(PAIR, squared_error, BATCH, optimizer=sgd, auto="hf")
    assert engine.config.optimizer is None and engine.config.scheduler is None
    before = np.asarray(engine.parameters["out"])
    engine.train_batch(tiny.batch())
    assert (np.asarray(engine.parameters["out"]) != before).any()


def test_metrics_are_scalar_arrays_on_the_devices(engine):
    metrics = engine.train_batch(tiny.batch())
    assert set(metrics) == STEP_METRICS
    for value in metrics.values():
        assert isinstance(value, jax.Array) and value.shape == ()
        assert len(value.sharding.device_set) == 8


def test_a_losss_own_metrics_come_with_the_steps():
    engine = tiny.engine(loss_fn=with_metrics)
    batch = tiny.batch()
    expected = float(engine.module(batch["x"]).max())
    assert float(engine.eval_batch(batch)["largest"]) == pytest.approx(expected, rel=1e-6)
    metrics = engine.train_batch(batch)
    assert set(metrics) == STEP_METRICS | {"largest"}
    assert float(metrics["largest"]) == pytest.approx(expected, rel=1e-6)


def test_a_step_moves_nothing_between_host_and_devices(engine):
    batch = tiny.batch()
    placed = jax.device_put(batch, engine.program.batch_shardings(batch))
    engine.train_batch(placed)  # compile
    engine.eval_batch(placed)
    with jax.transfer_guard("disallow_explicit"):
        for _ in range(3):
            engine.train_batch(placed)
            engine.eval_batch(placed)
    with pytest.raises(Exception, match="Disallowed"), jax.transfer_guard("disallow_explicit"):
        engine.train_batch(batch)  # the guard is on: this one has to be moved


def test_a_step_waits_for_nothing(engine, monkeypatch):
    """No value is read before it is there. (On CPU the guard above does not see reads.)"""
    from jax._src.array import ArrayImpl

    def read(*values):
        raise AssertionError("the host waited for a device")

    batch = tiny.batch()
    engine.train_batch(batch)
    monkeypatch.setattr(reporter, "_is_ready", lambda x: False)
    monkeypatch.setattr(
        dispatch_limit, "MOST_IN_FLIGHT", 1000
    )  # as on real devices, which have no bound
    with monkeypatch.context() as reading:
        reading.setattr(ArrayImpl, "_value", property(read))
        reading.setattr(ArrayImpl, "block_until_ready", read)
        reading.setattr(jax, "block_until_ready", read)
        for _ in range(3):
            metrics = engine.train_batch(batch)
            engine.eval_batch(batch)
        with pytest.raises(AssertionError, match="the host waited"):
            float(metrics["loss"])
    assert np.isfinite(metrics["loss"])


def test_the_state_is_used_up_by_the_step_and_stays_in_its_placements(engine):
    before = engine.state
    shardings = jax.tree.map(lambda x: x.sharding, before)
    engine.train_batch(tiny.batch())
    big = [x for x in jax.tree.leaves(before.params) if x.size > 1]
    assert big and all(x.is_deleted() for x in big)
    assert jax.tree.map(lambda x: x.sharding, engine.state) == shardings


def test_evaluating_uses_up_and_changes_nothing(engine):
    before = jax.tree.map(np.asarray, engine.state.params)
    engine.eval_batch(tiny.batch(16))
    after = jax.tree.map(np.asarray, engine.state.params)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_an_evaluation_batch_may_have_another_size(engine):
    batch = tiny.batch(24)
    out = np.asarray(engine.module(batch["x"]))[:, 0]
    metrics = engine.eval_batch(batch)
    assert float(metrics["loss"]) == pytest.approx(np.square(out - batch["y"]).mean(), rel=1e-5)
    assert float(metrics["weight"]) == 24


def test_state_and_step_are_a_pure_function_of_their_own(engine):
    copy = jax.tree.map(jnp.copy, engine.state)
    batch = tiny.batch(seed=5)
    placed = jax.device_put(batch, engine.program.batch_shardings(batch))
    state, metrics = engine.step(copy, placed)
    expected = engine.train_batch(batch)
    assert float(metrics["loss"]) == float(expected["loss"])
    assert int(state.step) == int(engine.state.step)
    for path, value in state.params.items():
        np.testing.assert_array_equal(value, engine.state.params[path])


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        pytest.param(Listed, 3, id="nnx-3"),
        pytest.param(Linen(), 0, id="linen-0"),
        pytest.param(PAIR, 3, id="pair-3"),
        pytest.param(Listed, 0, id="nnx-0", marks=pytest.mark.full),
        pytest.param(Linen(), 3, id="linen-3", marks=pytest.mark.full),
        pytest.param(PAIR, 0, id="pair-0", marks=pytest.mark.full),
    ],
)
def test_module_is_the_current_model(model, stage):
    engine = tiny.engine(model, stage=stage)
    batch = tiny.batch()
    first = engine.module
    assert isinstance(first, nnx.Module) == (model is Listed)
    for _ in range(2):
        out = np.asarray(engine.module(batch["x"]))[:, 0]
        loss = float(engine.train_batch(batch)["loss"])
        assert loss == pytest.approx(np.square(out - batch["y"]).mean(), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_weights_are_those_of_the_factory_on_one_device(stage):
    engine = tiny.engine(stage=stage, run={"seed": 7})
    plain = nnx.to_flat_state(nnx.state(Listed(nnx.Rngs(7)), nnx.Param))
    expected = {"/".join(map(str, keys)): v.get_value() for keys, v in plain}
    assert set(engine.parameters) == set(expected)
    for path, value in engine.parameters.items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-6, atol=1e-7)


def test_a_users_own_optimizer_is_used_and_clipped_only_when_asked():
    batch = tiny.batch()

    def moved(**config):
        engine = tiny.engine(optimizer=None, optimizer_=optax.sgd(1.0), **config)
        before = {path: np.asarray(x) for path, x in engine.parameters.items()}
        metrics = engine.train_batch(batch)
        after = {path: np.asarray(x) for path, x in engine.parameters.items()}
        norm = np.sqrt(sum(np.square(after[p] - x).sum() for p, x in before.items()))
        return norm, float(metrics["grad_norm"])

    plain = tiny.config()
    plain.pop("gradient_clipping")
    plain.pop("optimizer")
    engine = jaxspeed.initialize(Listed, squared_error, plain, optax.sgd(1.0))
    assert engine.program.optimizer.clipping == 0.0
    norm, gradient = moved(gradient_clipping=0.0)
    assert norm == pytest.approx(gradient, rel=1e-5)
    norm, gradient = moved(gradient_clipping=0.01)
    assert gradient > 0.1
    assert norm == pytest.approx(0.01, rel=1e-4)


class Buffered(nnx.Module):
    """Keeps arrays that are no Variables."""

    def __init__(self, rngs):
        self.scale = jnp.arange(1.0, 1 + tiny.FEATURES)
        self.shift = np.linspace(-1, 1, tiny.FEATURES, dtype=np.float32)
        self.linear = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(x * self.scale + self.shift)


@pytest.mark.parametrize("stage", [0, 3])
def test_arrays_that_a_module_keeps_without_a_variable_are_used_as_they_are(stage):
    engine, batch = tiny.engine(Buffered, stage=stage), tiny.batch()
    out = np.asarray(Buffered(nnx.Rngs(0))(batch["x"]))[:, 0]
    loss = float(engine.train_batch(batch)["loss"])
    assert loss == pytest.approx(np.square(out - batch["y"]).mean(), rel=1e-5)
    np.testing.assert_array_equal(engine.module.scale, jnp.arange(1.0, 1 + tiny.FEATURES))
    assert set(engine.parameters) == {"linear/kernel", "linear/bias"}


def test_summed_gradients_move_the_weights_by_as_many_ranks():
    moved = []
    for op in ("mean", "sum"):
        engine = tiny.engine(PAIR, gradient_allreduce_op=op)
        before = np.asarray(engine.parameters["out"])
        engine.train_batch(tiny.batch())
        moved.append(np.asarray(engine.parameters["out"]) - before)
    np.testing.assert_allclose(moved[1], 8 * moved[0], rtol=1e-4)
