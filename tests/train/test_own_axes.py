"""Axis names that models bring: of collectives, of parameters, of constraints, of meshes."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import ModelError
from tests.engine import tiny
from tests.train.flax_loop import (
    REPLICATED,
    SHARDED,
    STAGE_1,
    Setting,
    assert_alike,
    settings,
    train_jaxspeed,
    train_linen,
    train_nnx,
)

WIDTH = 8
SGD = optax.sgd(0.05, momentum=0.9)


class Net(nnx.Module):
    """As in Flax's ImageNet example: statistics over all devices."""

    def __init__(self, rngs, axis_name="batch"):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, axis_name=axis_name, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.up(x))))[:, 0]


class LinenNet(nn.Module):
    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, momentum=0.5, axis_name=self.axis_name)(
            nn.Dense(WIDTH, use_bias=False)(x)
        )
        return nn.Dense(1)(jnp.tanh(x))[:, 0]


def squared(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


def plain_loss(model, batch):
    return squared(model(batch["x"]), batch)


def reduced_loss(model, batch):
    return lax.pmean(plain_loss(model, batch), "batch")


def as_sum(model, batch):
    """Reduced inside a scan and a checkpoint, as (sum, weight)."""

    def layer(x, _):
        return x - 0.1 * lax.pmean(x.mean(), "devices"), None

    x, _ = lax.scan(jax.checkpoint(layer), batch["x"], None, length=2)
    error = (model(x) - batch["y"]) ** 2
    return lax.psum(error.sum(), "devices"), error.size


def plain_sum(model, batch):
    x = batch["x"]
    for _ in range(2):
        x = x - 0.1 * x.mean()
    return jnp.mean((model(x) - batch["y"]) ** 2)


def batches():
    rng = np.random.default_rng(0)
    return [
        {
            "x": (1 + rng.normal(size=(32, WIDTH))).astype(np.float32),
            "y": rng.normal(size=32).astype(np.float32),
        }
        for _ in range(3)
    ]


@settings(SHARDED)
def test_statistics_over_an_axis_are_those_of_the_micro_batch(setting):
    plain = train_nnx(lambda rngs: Net(rngs, None), plain_loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Net, reduced_loss, batches(), SGD, setting), plain)


@pytest.mark.sampled
@settings(REPLICATED)
def test_statistics_of_a_linen_module_over_an_axis(setting):
    plain = train_linen(
        LinenNet(None), lambda out, after, b: squared(out, b), batches(), SGD, setting, train=True
    )
    assert_alike(train_jaxspeed(LinenNet(), reduced_loss, batches(), SGD, setting), plain)


def test_a_sum_over_an_axis_is_reduced_in_each_micro_batch():
    setting = Setting(0, 4, 1)  # would otherwise reduce once a step, rank by rank
    plain = train_nnx(lambda rngs: Net(rngs, None), plain_sum, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Net, as_sum, batches(), SGD, setting), plain)


def test_the_index_and_the_parts_of_an_axis_of_one():
    def loss(model, batch):
        every = lax.all_gather(model(batch["x"]), "batch")  # [1, samples, 1]
        return (every**2).mean() * (1 + lax.axis_index("batch"))

    engine = tiny.engine(loss_fn=loss)
    wanted = (engine.module(tiny.batch()["x"]) ** 2).mean()
    np.testing.assert_allclose(engine.eval_batch(tiny.batch())["loss"], wanted, rtol=1e-5)
    engine.train_batch(tiny.batch())


def test_rings_refuse_a_reduction_over_the_micro_batch():
    def loss(model, batch):
        return lax.pmean(jnp.mean(model(batch["x"])), "batch")

    engine = tiny.engine(loss_fn=loss, parallel={"data_reduction": "ring"})
    with pytest.raises(ModelError, match="'batch', which means the entire micro-batch"):
        engine.train_batch(tiny.batch())


# -- annotations ----------------------------------------------------------------------------------


class Annotated(nnx.Module):
    def __init__(self, rngs, out="tp"):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            WIDTH, 16, kernel_init=nnx.with_partitioning(init, ("fsdp", out)), rngs=rngs
        )
        self.head = nnx.Linear(
            16, 1, kernel_init=nnx.with_partitioning(init, (out, None)), rngs=rngs
        )

    def __call__(self, x):
        h = lax.with_sharding_constraint(self.up(x), P("fsdp", "tp"))

        def body(h, _):
            return jnp.tanh(lax.with_sharding_constraint(h, P("fsdp", None))), None

        return self.head(lax.scan(body, h, None, length=2)[0])[:, 0]


class Plain(Annotated):
    def __call__(self, x):
        return self.head(jnp.tanh(jnp.tanh(self.up(x))))[:, 0]


class LinenAnnotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", "model"))
        h = lax.with_sharding_constraint(nn.Dense(16, kernel_init=init)(x), P("fsdp", "model"))
        return nn.Dense(1)(jnp.tanh(h))[:, 0]


@pytest.mark.sampled
@settings(REPLICATED)
def test_annotations_of_a_model_are_mapped_or_ignored(setting, caplog):
    caplog.set_level(logging.INFO, "jaxspeed")
    with nnx.use_eager_sharding(False):
        plain = train_nnx(Plain, plain_loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Annotated, plain_loss, batches(), SGD, setting), plain)
    assert "own sharding of parameters over fsdp is ignored" in caplog.text
    assert "own sharding constraints are ignored" in caplog.text


@pytest.mark.default_cases("usual")
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Annotated, {}),
        (lambda rngs: Annotated(rngs, "columns"), {"columns": "tensor"}),
        (LinenAnnotated(), {}),
    ],
    ids=["usual", "by config", "linen"],
)
def test_a_models_axis_is_the_tensor_axis(model, names):
    engine = tiny.engine(
        model, plain_loss, stage=1, mesh={"tensor": 2}, parallel={"axis_names": names}
    )
    batch = tiny.batch(engine.program.batch.train)
    assert np.isfinite(float(engine.train_batch(batch)["loss"]))
    (kernel,) = (row for row in engine.placements if row.leaf.shape == (WIDTH, 16))
    assert kernel.read.spec == P(None, "tensor")
    report = engine.check(batch)
    assert report.ok, str(report)


def test_a_mesh_of_the_model_is_named_with_what_to_remove():
    own = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))

    class Sharded(Plain):
        def __call__(self, x):
            return super().__call__(
                jax.shard_map(lambda x: 2 * x, mesh=own, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)
            )

    engine = tiny.engine(Sharded, plain_loss)
    with pytest.raises(ModelError, match=r"a mesh of its own.*jax\.shard_map"):
        engine.train_batch(tiny.batch())


def test_constraints_on_a_mesh_of_the_same_devices_change_no_number():
    own = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))

    class Constrained(Plain):
        def __call__(self, x):
            return super().__call__(lax.with_sharding_constraint(x, NamedSharding(own, P("fsdp"))))

    engine = tiny.engine(Constrained, plain_loss)
    engine.train_batch(tiny.batch())
    assert engine.check(tiny.batch()).ok


@pytest.mark.default_cases("sections0")
@pytest.mark.parametrize("sections", [{}, {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2}])
def test_a_mesh_that_the_process_has_set_is_not_that_of_the_step(sections):
    """As a library may do when it is imported; `check` also runs the step on one device."""
    batch = tiny.batch()
    with jax.set_mesh(jax.make_mesh((8,), ("S",), axis_types=(jax.sharding.AxisType.Auto,))):
        engine = tiny.engine(**sections)
        found = float(engine.train_batch(batch)["loss"])
        assert engine.check(batch).ok
        assert engine.diagnose(batch).finite
        assert engine.compiled(batch).collectives
        assert np.isfinite(engine.eval_batch(batch)["loss"])
    plain = tiny.Listed(nnx.Rngs(jax.random.key(engine.config.run.seed)))
    total, weight = tiny.squared_error(plain, batch)
    np.testing.assert_allclose(found, total / weight, rtol=1e-5)


class Boxed(nn.Module):
    """Names of a parameter's dims that equal this mesh's axes, one for each dim after a reshape."""

    @nn.compact
    def __call__(self, x):
        named = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "tensor", None))
        x = nn.DenseGeneral((4, 2), kernel_init=named)(x)
        return nn.DenseGeneral(1, axis=(-2, -1))(jnp.tanh(x))[:, 0]


class BoxedNnx(nnx.Module):
    def __init__(self, rngs, names=("data", "tensor", None)):
        named = nnx.initializers.lecun_normal()
        named = nnx.with_partitioning(named, names) if names else named
        self.up = nnx.LinearGeneral(WIDTH, (4, 2), kernel_init=named, rngs=rngs)
        self.down = nnx.LinearGeneral((4, 2), 1, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))[:, 0]


@pytest.mark.sampled
@settings(REPLICATED, STAGE_1)
def test_dims_that_are_named_by_axes_of_this_mesh(setting):
    plain = train_linen(
        Boxed(), lambda out, after, batch: squared(out, batch), batches(), SGD, setting
    )
    assert_alike(train_jaxspeed(Boxed(), plain_loss, batches(), SGD, setting), plain)


@settings(SHARDED, STAGE_1)
def test_dims_of_nnx_that_are_named_by_axes_of_this_mesh(setting):
    plain = train_nnx(lambda rngs: BoxedNnx(rngs, None), plain_loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(BoxedNnx, plain_loss, batches(), SGD, setting), plain)
