"""Extra arrays, numbers in a batch, and what two networks need of each other."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import BatchError, ModelError
from tests.engine import tiny
from tests.train.flax_loop import SEED, Setting

WIDTH, LATENT, SAMPLES = 6, 4, 16
RATE = 0.05


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.net = nnx.Linear(LATENT, WIDTH, rngs=rngs)

    def __call__(self, z):
        return jnp.tanh(self.net(z))


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))[:, 0]


def batches(steps=4):
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(SAMPLES, WIDTH)).astype(np.float32),
            "z": rng.normal(size=(SAMPLES, LATENT)).astype(np.float32),
        }
        for _ in range(steps)
    ]


def start(model, loss, stage=3, accumulation=2, **more):
    setting = Setting(stage, accumulation, 1)
    config = setting.config(SAMPLES)
    return jaxspeed.initialize(model, loss, config, optax.sgd(RATE, momentum=0.9), **more)


def values(state):
    return {"/".join(map(str, keys)): x.get_value() for keys, x in nnx.to_flat_state(state)}


def sgd_steps(module, loss):
    """A plain step of one network over a full batch."""
    optimizer = nnx.Optimizer(module, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def update(module, optimizer, *args):
        optimizer.update(module, nnx.grad(loss)(module, *args))

    return lambda *args: update(module, optimizer, *args)


def assert_parameters(engine, module, tolerance=1e-5):
    for path, wanted in values(nnx.state(module, nnx.Param)).items():
        np.testing.assert_allclose(engine.parameters[path], wanted, atol=tolerance, err_msg=path)


def fake_loss(generator, critic, z):
    return jax.nn.softplus(-critic(generator(z))).mean()


def critic_loss(critic, generator, batch):
    real, fake = critic(batch["x"]), critic(generator(batch["z"]))
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.full)])
def test_two_engines_train_against_each_other(stage):
    def of_generator(model, batch, extra):
        return fake_loss(model, nnx.merge(critic_graph, extra), batch["z"])

    def of_critic(model, batch, extra):
        return critic_loss(model, nnx.merge(generator_graph, extra), batch)

    generator, critic = start(Generator, of_generator, stage), start(Critic, of_critic, stage)
    generator_graph, critic_graph = nnx.graphdef(generator.module), nnx.graphdef(critic.module)
    plain_generator, plain_critic = Generator(nnx.Rngs(SEED)), Critic(nnx.Rngs(SEED))
    plain_step = sgd_steps(plain_critic, critic_loss), sgd_steps(plain_generator, fake_loss)
    for batch in batches():
        critic.train_batch(batch, extra=nnx.state(generator.module))
        generator.train_batch({"z": batch["z"]}, extra=nnx.state(critic.module))
        plain_step[0](plain_generator, batch)
        plain_step[1](plain_critic, batch["z"])
    assert_parameters(critic, plain_critic)
    assert_parameters(generator, plain_generator)
    state = nnx.state(critic.module)
    report = generator.check({"z": batch["z"]}, extra=state)
    assert report.ok, str(report)
    assert generator.diagnose({"z": batch["z"]}, extra=state).finite
    assert generator.compiled({"z": batch["z"]}, extra=state).flops


def test_a_student_learns_from_a_teacher():
    def distilled(model, batch, extra):
        return ((model(batch["x"]) - nnx.merge(graph, extra)(batch["x"])) ** 2).mean()

    graph, teacher = nnx.split(Critic(nnx.Rngs(9)))
    engine, student = start(Critic, distilled), Critic(nnx.Rngs(SEED))
    step = sgd_steps(student, distilled)
    for batch in batches():
        engine.train_batch(batch, extra=teacher)
        step(batch, teacher)
    assert_parameters(engine, student)
    mine = engine.eval_batch(batch, extra=teacher)["loss"]
    np.testing.assert_allclose(mine, distilled(student, batch, teacher), rtol=1e-5)


def test_a_teacher_that_is_the_moving_average_of_its_student():
    def consistent(model, batch, extra):
        target = nnx.merge(graph, extra)(batch["x"] + 0.1)
        return ((model(batch["x"]) - target - batch["x"][:, 0]) ** 2).mean()

    def average(teacher, student):
        return jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student)

    engine, plain = start(Critic, consistent), Critic(nnx.Rngs(SEED))
    graph, teacher = nnx.split(engine.module)  # the arrays that the first step donates
    plain_teacher = jax.tree.map(jnp.copy, nnx.state(plain, nnx.Param))
    step = sgd_steps(plain, consistent)
    for batch in batches():
        engine.train_batch(batch, extra=teacher)
        student = nnx.state(engine.module)
        teacher = average(teacher, student)
        step(batch, plain_teacher)
        plain_teacher = average(plain_teacher, nnx.state(plain, nnx.Param))
    assert_parameters(engine, plain)


class Convolved(nn.Module):
    """Messages along the edges of a graph."""

    @nn.compact
    def __call__(self, x, edges):
        sources, targets = edges
        sent = nn.Dense(WIDTH)(x)[:, sources]  # [batch, edges, features]
        return jnp.zeros_like(x).at[:, targets].add(sent)


@pytest.mark.sampled
def test_a_graph_in_a_linen_model_is_not_divided():
    nodes, edges = 5, (np.int32([0, 1, 2, 3, 4, 0, 2]), np.int32([1, 2, 3, 4, 0, 2, 0]))

    def loss(model, batch, extra):
        return ((model(batch["x"], extra["edges"]) * batch["scale"] - batch["x"]) ** 2).mean()

    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, nodes, WIDTH)).astype(np.float32)
    batch, extra = {"x": x, "scale": 0.5}, {"edges": edges}
    engine = start(Convolved(), loss, example_batch=batch, example_extra=extra)
    params = {"Dense_0": {k: engine.parameters[f"Dense_0/{k}"] for k in ("kernel", "bias")}}
    optimizer = optax.sgd(RATE, momentum=0.9)
    opt = optimizer.init(params)

    def plain(params):
        def model(x, edges):
            return Convolved().apply({"params": params}, x, edges)

        return loss(model, batch, extra)

    slope = jax.jit(jax.value_and_grad(plain))
    for _ in range(3):
        mine = float(engine.train_batch(batch, extra=extra)["loss"])
        wanted, grads = slope(params)
        np.testing.assert_allclose(mine, wanted, rtol=1e-5)
        updates, opt = optimizer.update(grads, opt)
        params = optax.apply_updates(params, updates)
    assert engine.check(batch, extra=extra).ok


def test_numbers_are_for_every_micro_batch():
    def loss(model, batch):
        x, scale, count, double = batch
        return (model(x) ** 2).mean() * scale * count * jnp.where(double, 2.0, 1.0)

    engine = start(Critic, loss)
    x = batches(1)[0]["x"]
    with_arrays = (x, np.float32(0.5), np.int32(3), np.bool_(True))
    mine = float(engine.eval_batch((x, 0.5, 3, True))["loss"])
    assert mine == float(engine.eval_batch(with_arrays)["loss"])
    assert np.isfinite(float(engine.train_batch((x, 0.5, 3, True))["loss"]))


REFUSED = {
    "text": ({"x": np.ones((8, 8)), "name": "cat"}, r"batch\['name'\] is a str"),
    "texts": ({"x": np.ones((8, 8)), "name": ["cat"] * 8}, r"batch\['name'\]\[0\] is a str"),
    "a number too large": ({"x": np.ones((8, 8)), "y": 2**31}, r"batch\['y'\] is 2147483648"),
    "a list of labels": ({"x": np.ones((8, 8)), "y": [1.0] * 8}, r"batch\['y'\]\[0\] is a float"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_a_batch(case):
    batch, message = REFUSED[case]
    with pytest.raises(BatchError, match=message):
        tiny.engine().train_batch(batch)


def test_extra_arrays_that_are_missing_or_not_taken_are_refused():
    def takes(model, batch, extra):
        return tiny.squared_error(model, batch)

    with pytest.raises(BatchError, match=r"train_batch\(batch, extra=...\)"):
        tiny.engine(loss_fn=takes).train_batch(tiny.batch())
    with pytest.raises(ModelError, match="no parameter extra"):
        tiny.engine().train_batch(tiny.batch(), extra={"a": np.ones(3)})
    with pytest.raises(BatchError, match=r"extra\['a'\] is a str"):
        tiny.engine().train_batch(tiny.batch(), extra={"a": "text"})
    served = {"parallel": {"data_reduction": "parameter_server", "servers": 2}}
    with pytest.raises(BatchError, match="workers take no extra arrays"):
        tiny.engine(loss_fn=takes, **served).train_batch(tiny.batch(6), extra={"a": np.ones(3)})


# -- parameters and module ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"bf16": {"enabled": True}}, marks=pytest.mark.full),
        pytest.param({"stage": 1}, marks=pytest.mark.full),
        pytest.param(
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"parallel": {"data_reduction": "parameter_server", "servers": 2}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_parameters_can_be_set(sections):
    stage = 0 if "parallel" in sections else 3
    first, second = (tiny.engine(**{"stage": stage, **sections}) for _ in range(2))
    batch = tiny.batch(first.program.batch.train)
    first.train_batch(batch)
    second.train_batch(batch)
    kernel = np.ones((tiny.FEATURES, tiny.HIDDEN), np.float32)
    second.parameters = {**first.parameters, "input/kernel": kernel}
    np.testing.assert_array_equal(second.parameters["input/kernel"], 1)
    np.testing.assert_array_equal(second.parameters["head/bias"], first.parameters["head/bias"])
    second.train_batch(batch)
    kernel[:] = 7  # the engine has copies
    assert np.isfinite(float(second.eval_batch(batch)["loss"]))
    assert np.isfinite(float(first.train_batch(batch)["loss"]))


def test_parameters_that_do_not_exist_or_do_not_fit_are_refused():
    engine = tiny.engine()
    with pytest.raises(ModelError, match=r"no parameter 'inptu/kernel'.*: input/kernel"):
        engine.parameters = {"inptu/kernel": np.ones(3)}
    with pytest.raises(ModelError, match=r"head/bias has shape \(1,\); found \(3,\)"):
        engine.parameters = {"head/bias": np.ones(3)}


def test_edits_of_the_module_are_refused():
    engine = tiny.engine()
    with pytest.raises(ModelError, match=r"engine.parameters ="):
        engine.module.head.bias[...] = jnp.ones(1)
    with pytest.raises(ModelError, match=r"engine.parameters ="):
        engine.module.head.bias.set_value(jnp.ones(1))
    batch = tiny.batch()
    assert nnx.jit(lambda m, x: m(x))(engine.module, batch["x"]).shape == (8, 1)
    linen = tiny.engine(tiny.Linen())
    with pytest.raises((TypeError, ValueError)):
        linen.module.variables["params"]["Dense_0"]["bias"] = jnp.ones(16)
    assert linen.module(batch["x"]).shape == (8, 1)
