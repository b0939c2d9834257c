"""engine.check: it agrees where the step is right, names what is wrong, and says what cannot be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import ConfigError, ModelError, OutOfMemoryError
from jaxspeed.engine import check as checking
from jaxspeed.train.gradients import Gradients
from jaxspeed.zero3.sharded_param import ShardedParam
from tests.engine import tiny
from tests.engine.tiny import PAIR, Listed, squared_error
from tests.support.awkward import AWKWARD, state
from tests.support.covering import covering
from tests.train import cases

ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
PATHS = {"layers/0/w", "layers/1/w", "layers/2/w", "out"}


def two_blocks(rngs):
    return Listed(rngs, layers=2)


def checked(stage=0, accumulation=1, samples=16, **more):
    engine = tiny.engine(
        more.pop("model", PAIR),
        more.pop("loss_fn", squared_error),
        stage,
        gradient_accumulation_steps=accumulation,
        train_micro_batch_size_per_gpu=samples // 8 // accumulation,
        **more,
    )
    return engine, engine.check(tiny.batch(samples))


@pytest.mark.default_cases("2-2-more2")
@pytest.mark.parametrize(
    ("stage", "accumulation", "more"),
    [
        (0, 2, {"optimizer": ADAM}),
        # Stage 1 is also that of test_dropout_..., stage 3 that of test_a_module_agrees_....
        pytest.param(1, 1, {"optimizer": ADAM}, marks=pytest.mark.full),
        (2, 2, {"gradient_clipping": 0.5}),
        pytest.param(3, 1, {"optimizer": ADAM}, marks=pytest.mark.full),
        (3, 2, {"mesh": {"replica": 2, "data": 4}}),
    ],
)
def test_every_stage_agrees_with_one_device(stage, accumulation, more):
    _, report = checked(stage, accumulation, **more)
    assert report.ok
    assert report.loss < 1e-6 and report.gradient < 1e-5
    assert {leaf.path for leaf in report.leaves} == PATHS
    assert all(leaf.update < 1e-3 for leaf in report.leaves)
    assert report.devices == 8
    assert "the step on 8 devices agrees with the step on one device" in str(report)


# In bf16 the step of test_pipeline_engine.py agrees as well.
@pytest.mark.parametrize("precision", covering(["bf16", "fp16"], ["fp16"]))
def test_sixteen_bits_agree_within_what_their_mantissa_allows(precision):
    _, report = checked(3, 1, **{precision: {"enabled": True}})
    assert report.ok
    assert report.gradient <= report.tolerance


def test_a_module_agrees_and_the_engine_trains_on_as_if_nothing_had_been():
    engine, report = checked(3, model=two_blocks)
    assert report.ok
    other = tiny.engine(two_blocks, stage=3, train_micro_batch_size_per_gpu=2)
    batch = tiny.batch(16)
    assert float(engine.train_batch(batch)["loss"]) == float(other.train_batch(batch)["loss"])


def test_one_wrong_gradient_is_named_with_its_size(monkeypatch):
    right = Gradients.__call__

    def wrong(self, *args):
        sums, variables = right(self, *args)
        if self.table.mesh.size > 1:
            sums = sums._replace(
                grads={**sums.grads, "layers/1/w": 1.01 * sums.grads["layers/1/w"]}
            )
        return sums, variables

    monkeypatch.setattr(Gradients, "__call__", wrong)
    _, report = checked(2)
    assert not report.ok
    off = {leaf.path: leaf.gradient for leaf in report.leaves if leaf.gradient > 1e-4}
    assert off == {"layers/1/w": pytest.approx(0.01, rel=1e-2)}
    text = str(report)
    assert "DIFFERS from" in text
    assert text.index("layers/1/w") < text.index("layers/0/w")  # the worst first


def test_a_reduction_that_is_dropped_is_found(monkeypatch):
    """Each rank's own part in place of the sum over all ranks: what a lost psum would give."""
    right = ShardedParam.scatter

    def unreduced(self, grad, like):
        return right(self, grad / 8, like)

    monkeypatch.setattr(ShardedParam, "scatter", unreduced)
    _, report = checked(3)
    assert not report.ok
    assert all(leaf.gradient == pytest.approx(7 / 8, rel=1e-3) for leaf in report.leaves)


def test_a_loss_that_depends_on_the_mesh_is_found():
    def of_the_mesh(model, batch):
        total, weight = squared_error(model, batch)
        return total * (1.0 + 0.01 * (jax.sharding.get_abstract_mesh().size > 1)), weight

    _, report = checked(0, loss_fn=of_the_mesh)
    assert not report.ok
    assert report.loss == pytest.approx(0.01, rel=1e-3)


def test_a_wrong_update_is_shown(monkeypatch):
    from jaxspeed.train.update import Update

    right = Update.__call__

    def wrong(self, state, sums, variables):
        after, metrics = right(self, state, sums, variables)
        if self.table.mesh.size > 1:
            params = {**after.params, "out": after.params["out"] + 1.0}
            after = dataclasses.replace(after, params=params)
        return after, metrics

    monkeypatch.setattr(Update, "__call__", wrong)
    _, report = checked(0)
    assert [leaf.path for leaf in report.leaves if leaf.update > 1e-3] == ["out"]


def test_nan_is_no_agreement():
    def undefined(model, batch):
        total, weight = squared_error(model, batch)
        return total * jnp.nan, weight

    _, report = checked(0, loss_fn=undefined)
    assert not report.ok


def test_a_step_that_would_be_skipped_is_no_agreement_and_its_state_is_not_compared():
    class Counts(nnx.Module):
        def __init__(self, rngs):
            self.out, self.seen = nnx.Linear(4, 1, rngs=rngs), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.seen[...] = self.seen[...] + 1
            return self.out(x)

    def loss(model, batch):  # its gradients are finite, the squares of their norm are not
        return 1e25 * jnp.mean(model(batch["x"][:, :4]) ** 2)

    _, report = checked(model=Counts, loss_fn=loss)
    assert not report.ok
    assert report.faults == ("the step is skipped: the norm of its gradients is not finite",)


# -- a model that does not fit one device -------------------------------------------------------


def test_a_model_that_cannot_fit_is_refused_with_numbers_and_a_smaller_one_checked(monkeypatch):
    engine = tiny.engine(PAIR, stage=3, train_micro_batch_size_per_gpu=2)
    monkeypatch.setattr(checking, "device_limit", lambda program: 1000)
    # 200 parameters and as many gradients in fp32, and the key: 1.6 kB.
    with pytest.raises(OutOfMemoryError, match=r"needs 1.61 kB .* has 1 kB. .*layers=2.*model="):
        engine.check(tiny.batch(16))

    def init_smaller(key):
        params = tiny.init_pair(key)
        return {**params, "layers": params["layers"][:1]}

    report = engine.check(tiny.batch(16), model=(init_smaller, tiny.apply_pair))
    assert report.ok
    assert {leaf.path for leaf in report.leaves} == {"layers/0/w", "out"}


@pytest.mark.sampled
def test_fewer_layers_of_a_model_that_the_config_names(monkeypatch):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "model": {
            "family": "mlp",
            "config": {"input_size": 8, "hidden_size": 16, "num_hidden_layers": 6},
        },
    }
    engine = tiny.jaxspeed.initialize(config=config)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32), "y": np.arange(8) % 10}
    whole = {r.path: r.leaf.shape for r in engine.placements}
    monkeypatch.setattr(checking, "device_limit", lambda program: 8000)
    with pytest.raises(OutOfMemoryError, match="has 8 kB"):
        engine.check(batch)
    kept = engine.state
    report = engine.check(batch, layers=1)
    assert report.ok
    assert {leaf.path for leaf in report.leaves} == set(whole)
    assert engine.state is kept
    assert {r.path: r.leaf.shape for r in engine.placements} == whole


def test_what_check_cannot_do_is_said():
    engine = tiny.engine(PAIR)
    with pytest.raises(ModelError, match="for your own model, pass"):
        engine.check(tiny.batch(), layers=2)
    with pytest.raises(ModelError, match="both given"):
        named = tiny.jaxspeed.initialize(
            config=tiny.config(model={"family": "mlp", "preset": "tiny"})
        )
        named.check({"x": np.zeros((8, 16)), "y": np.zeros(8, int)}, layers=2, model=Listed)
    summed = tiny.engine(PAIR, gradient_allreduce_op="sum")
    with pytest.raises(ConfigError, match="gradient_allreduce_op is sum"):
        summed.check(tiny.batch())


@pytest.mark.sampled
def test_dropout_is_the_same_on_one_device_and_on_eight():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.inner = Listed(rngs, layers=1)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.inner(self.dropout(x))

    _, report = checked(1, 2, model=Dropped)
    assert report.ok and report.loss < 1e-6


# -- what is trained and carried, by plain Flax ---------------------------------------------------

QUICK = {"OwnScan"}  # test_check_noise.py has batch statistics


@pytest.mark.sampled
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, id=m.__name__, marks=() if m.__name__ in QUICK else pytest.mark.full)
        for m in AWKWARD
    ],
)
def test_no_awkward_model_is_trained_otherwise_than_by_plain_flax(model):
    """In bf16, where a write that is none would be refused."""
    lr = 1e-7 if model is state.PythonCounter else 0.05  # the norm of its gradient is 3e5
    optimizer = {"type": "SGD", "params": {"lr": lr}}
    config = tiny.config(
        3, bf16={"enabled": True}, train_micro_batch_size_per_gpu=2, optimizer=optimizer
    )
    engine = tiny.jaxspeed.initialize(model, cases.squared_error, config)
    batch = cases.vectors(np.random.default_rng(0), 16)
    engine.train_batch(batch)
    report = engine.check(batch)
    assert report.faults == ()
    assert report.loss <= report.tolerance


def test_an_evaluation_that_draws_is_that_of_the_batch_in_its_order():
    def noisy(model, batch, rng, train):
        x = batch["x"] + jax.random.normal(rng, batch["x"].shape)
        return (1 if train else 2) * jnp.square(model(x)[:, 0] - batch["y"]).mean()

    _, report = checked(0, 2, loss_fn=noisy)
    assert report.ok, str(report)


def test_a_micro_batch_without_weight_keeps_its_gradient():
    def penalized(model, batch):
        z = model(batch["x"])[:, 0]
        counts = (batch["x"][:, 0] > 10).astype(jnp.float32)
        return (jnp.square(z) * counts).sum() + 0.1 * z.sum(), counts.sum()

    engine = tiny.engine(
        PAIR, penalized, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1
    )
    batch = tiny.batch(16)
    batch["x"][0, 0] = 20  # of the first micro-batch
    report = engine.check(batch)
    assert report.ok, str(report)
