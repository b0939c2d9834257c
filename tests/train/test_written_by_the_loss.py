"""What the loss writes: state is carried as in plain Flax, sown values are fresh each time."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from jaxspeed.traced_loss import micro_batch_loss
from jaxspeed.user_models import linen_model, nnx_model
from tests.train.flax_loop import (
    REPLICATED,
    SGD,
    SHARDED,
    WIDTH,
    Setting,
    assert_alike,
    batches,
    settings,
    squared,
    train_jaxspeed,
    train_linen,
    train_nnx,
)

ONE = Setting(0, 1, 1)


def add(a, b):
    return a + b


def zero():
    return jnp.zeros(())


# -- sown values ----------------------------------------------------------------------------------


class LinenSower(nn.Module):
    """Sows an auxiliary loss, with a reduce_fn and without, and counts its calls."""

    @nn.compact
    def __call__(self, x):
        h = jnp.tanh(nn.Dense(2 * WIDTH)(x))
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if self.is_mutable_collection("counters") and not self.is_initializing():
            calls.value = calls.value + 1
        self.sow("losses", "added", jnp.mean(h**2), reduce_fn=add, init_fn=zero)
        self.sow("metrics", "each", jnp.mean(jnp.abs(h)))
        return nn.Dense(1)(h)[:, 0]


class NnxSower(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.largest = nnx.Intermediate(jnp.zeros(()))  # declared, and so there from the start
        self(jnp.zeros((1, WIDTH)))  # sows already

    def __call__(self, x):
        h = jnp.tanh(self.up(x))
        self.calls[...] += 1
        self.largest[...] += jnp.max(h)
        self.sow(nnx.Intermediate, "added", jnp.mean(h**2), reduce_fn=add, init_fn=zero)
        self.sow(nnx.Intermediate, "each", jnp.mean(jnp.abs(h)))
        return self.down(h)[:, 0]


def linen_loss(model, batch):
    out = model(batch["x"])
    sown = model.variables
    return squared(out, batch) + sown["losses"]["added"] + 0.1 * sum(sown["metrics"]["each"])


@settings(REPLICATED)
def test_sown_losses_in_linen_are_those_of_plain_flax(setting):
    def plain(out, after, batch):
        return squared(out, batch) + after["losses"]["added"] + 0.1 * sum(after["metrics"]["each"])

    ours = train_jaxspeed(LinenSower(), linen_loss, batches(), SGD, setting)
    args = (batches(), SGD, setting, ("counters",))
    assert_alike(ours, train_linen(LinenSower(), plain, *args))
    assert int(ours.values["counters/calls"]) == 4 * setting.accumulation


@settings(SHARDED)
def test_sown_losses_in_nnx_are_those_of_plain_flax(setting):
    class Plain(NnxSower):
        """What a call in the factory sowed is popped, as it is after each step of the loop."""

        def __init__(self, rngs):
            super().__init__(rngs)
            nnx.pop(self, nnx.Intermediate)
            self.largest = nnx.Intermediate(jnp.zeros(()))

        def __call__(self, x):
            if not hasattr(self, "largest"):
                self.largest = nnx.Intermediate(jnp.zeros(()))
            return super().__call__(x)

    def loss(model, batch):
        out = model(batch["x"])
        return squared(out, batch) + 0.1 * sum(model.each.get_value())

    ours = train_jaxspeed(NnxSower, loss, batches(), SGD, setting)
    plain = train_nnx(Plain, loss, batches(), SGD, setting)
    assert int(ours.values["calls"]) == 4 * setting.accumulation + 1
    assert_alike(ours, plain, also=("largest", "added"))


@pytest.mark.default_cases("4")
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_one_that_is_sown_stays_one(accumulation):
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "one", jnp.ones(()), reduce_fn=add, init_fn=zero)
            return nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros)(x)

    def loss(model, batch):
        out = model(batch["x"])
        return jnp.sum(0 * out) + model.variables["losses"]["one"]

    setting = Setting(0, accumulation, 1)
    ours = train_jaxspeed(Sows(), loss, batches(), SGD, setting)
    assert ours.losses == [1.0] * 4
    assert not any(path.startswith("losses") for path in ours.values)


def test_they_can_be_read_in_evaluation():
    engine = jaxspeed.initialize(
        LinenSower(), linen_loss, ONE.config(64), SGD, example_batch=batches(1)[0]
    )
    one = batches(1)[0]
    before = float(engine.eval_batch(one)["loss"])
    assert before == float(engine.eval_batch(one)["loss"])
    assert before == pytest.approx(float(engine.train_batch(one)["loss"]), rel=1e-6)


class Accumulates(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow(
            "totals", "seen", jnp.asarray(x.shape[0], jnp.float32), reduce_fn=add, init_fn=zero
        )
        return nn.Dense(1)(x)[:, 0]


@pytest.mark.sampled
def test_the_config_says_what_is_state():
    def loss(model, batch):
        return squared(model(batch["x"]), batch)

    def carried(collections):
        sections = {"parallel": {"state_collections": collections}}
        ours = train_jaxspeed(Accumulates(), loss, batches(), SGD, ONE, **sections)
        return {path: float(x) for path, x in ours.values.items() if "totals" in path}

    assert carried(["totals"]) == {"totals/seen": 4 * 64 + 64}  # and once when it was made
    assert carried([]) == {}


def test_the_config_says_what_is_state_in_nnx():
    def loss(model, batch):
        return squared(model(batch["x"]), batch)

    sections = {"parallel": {"state_collections": ["Intermediate"]}}
    ours = train_jaxspeed(NnxSower, loss, batches(), SGD, ONE, **sections)
    assert int(ours.values["calls"]) == 1  # as the factory left it
    assert float(ours.values["largest"]) > 2


@pytest.mark.parametrize("model", [NnxSower, LinenSower()], ids=["nnx", "linen"])
def test_a_collection_that_is_not_there_is_refused_with_those_that_are(model):
    sections = {"parallel": {"state_collections": ["counter"]}}
    with pytest.raises(ModelError, match=r"names 'counter', which .*(Intermediate|counters)"):
        train_jaxspeed(model, linen_loss, batches(), SGD, ONE, **sections)


def test_a_tuple_that_grows_cannot_be_state():
    sections = {"parallel": {"state_collections": ["metrics"]}}
    with pytest.raises(ModelError, match=r"'metrics'.* each without a reduce_fn.*reduce_fn and"):
        train_jaxspeed(LinenSower(), linen_loss, batches(), SGD, ONE, **sections)


# -- parameters that the loss writes --------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))[:, 0]


class WithTeacher(nnx.Module):
    """A student and the moving average of it, which the loss takes on."""

    def __init__(self, rngs):
        self.student, self.teacher = Net(rngs), Net(rngs)


def distilled(model, batch):
    def moved(old, new):
        return 0.9 * old + 0.1 * jax.lax.stop_gradient(new)

    teacher, student = (nnx.state(m, nnx.Param) for m in (model.teacher, model.student))
    nnx.update(model.teacher, jax.tree.map(moved, teacher, student))
    target = jax.lax.stop_gradient(model.teacher(batch["x"]))
    out = model.student(batch["x"])
    return squared(out, batch) + jnp.mean((out - target) ** 2)


@settings(SHARDED)
def test_a_moving_average_teacher_moves_as_in_plain_flax(setting):
    args = (distilled, batches(), SGD, setting)
    ours = train_jaxspeed(WithTeacher, *args, trainable="student/**")
    plain = train_nnx(WithTeacher, *args, frozen=lambda path: path.startswith("teacher"))
    assert_alike(ours, plain)


def test_between_micro_batches_a_written_parameter_stays_sharded():
    """Under stage 3 the loop over micro-batches carries an eighth of it."""

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.student, self.teacher = (nnx.Linear(512, 512, rngs=rngs) for _ in range(2))

    def loss(model, batch):
        teacher, student = (nnx.state(m, nnx.Param) for m in (model.teacher, model.student))
        nnx.update(model.teacher, jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, teacher, student))
        return jnp.mean((model.student(batch["x"]) - model.teacher(batch["x"])) ** 2)

    config = Setting(3, 4, 1).config(64)
    engine = jaxspeed.initialize(Wide, loss, config, SGD, trainable="student/**")
    batch = engine.program.abstract_batch({"x": np.zeros((64, 512), np.float32)})
    text = engine.program.step.lower(engine.program.state, batch).compile().as_text()
    (loop,) = [line for line in text.splitlines() if " while(" in line]
    assert "f32[512,512]" not in loop
    assert loop.count("f32[64,512]") + loop.count("f32[512,64]") >= 3


@pytest.mark.sampled
@settings(REPLICATED)
def test_a_trained_parameter_that_the_loss_writes_is_updated_from_there(setting):
    """As flax's own WeightNorm does: the kernel that is used is the kernel that is stored."""

    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            kernel = self.up.kernel[...]
            self.up.kernel[...] = kernel / jnp.linalg.norm(kernel, axis=0)
            return self.down(jnp.tanh(self.up(x)))[:, 0]

    def loss(model, batch):
        return squared(model(batch["x"]), batch)

    args = (loss, batches(), SGD, setting)
    assert_alike(train_jaxspeed(Normed, *args), train_nnx(Normed, *args))


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_what_only_went_through_a_jit_was_not_written(stage):
    """A jit of the model's own returns every variable: under bf16 no reason to refuse."""

    class Jitted(nnx.Module):
        def __init__(self, rngs):
            self.frozen, self.net = Net(rngs), Net(rngs)

        def __call__(self, x):
            return nnx.jit(lambda m, x: m.net(x) + m.frozen(x))(self, x)

    def loss(model, batch):
        return squared(model(batch["x"]).astype(jnp.float32), batch)

    config = Setting(stage, 4, 1).config(64, bf16={"enabled": True})
    engine = jaxspeed.initialize(Jitted, loss, config, SGD, trainable="net/**")
    before = {path: np.array(x) for path, x in engine.parameters.items()}
    engine.train_batch(batches(1)[0])
    for path, x in engine.parameters.items():
        assert np.array_equal(before[path], x) == path.startswith("frozen")


@pytest.mark.sampled
def test_under_sixteen_bits_a_written_parameter_has_to_keep_its_precision():
    def engine(**sections):
        config = Setting(3, 4, 1).config(64, bf16={"enabled": True}, **sections)
        return jaxspeed.initialize(WithTeacher, distilled, config, SGD, trainable="student/**")

    one = batches(1)[0]
    with pytest.raises(ModelError, match=r"writes the parameter teacher/.*full_precision"):
        engine().train_batch(one)
    made = engine(parallel={"full_precision": ["teacher/**"]})
    before = np.array(made.parameters["teacher/up/kernel"])
    made.train_batch(one)
    after = made.parameters["teacher/up/kernel"]
    assert after.dtype == np.float32
    assert not np.array_equal(before, after)


def test_a_step_that_is_skipped_leaves_what_the_loss_wrote():
    engine = jaxspeed.initialize(
        WithTeacher, distilled, ONE.config(64), SGD, trainable="student/**"
    )
    one = batches(1)[0]
    before = {path: np.array(x) for path, x in engine.parameters.items()}
    metrics = engine.train_batch({**one, "y": np.full_like(one["y"], np.inf)})
    assert bool(metrics["skipped"])
    for path, x in engine.parameters.items():
        np.testing.assert_array_equal(x, before[path])


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"parallel": {"data_reduction": "ring"}}, "ring"),
        ({"parallel": {"data_reduction": "parameter_server"}, "mesh": {}}, "parameter_server"),
    ],
)
def test_where_it_cannot_be_kept_it_is_refused(sections, text):
    config = ONE.config(56, **sections)
    del config["gradient_accumulation_steps"]
    engine = jaxspeed.initialize(WithTeacher, distilled, config, SGD, trainable="student/**")
    with pytest.raises(ModelError, match=text):
        engine.train_batch(batches(1, 56)[0])


# -- check, when the fault is put back ------------------------------------------------------------


@pytest.mark.sampled
def test_check_finds_sown_values_that_are_carried(monkeypatch):
    monkeypatch.setattr(linen_model.LinenModel, "_without_fresh", lambda self, variables: variables)

    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(WIDTH)(x)
            self.sow("losses", "added", jnp.mean(h**2), reduce_fn=add, init_fn=zero)
            return nn.Dense(1)(h)[:, 0]

    def loss(model, batch):
        return squared(model(batch["x"]), batch) + model.variables["losses"]["added"]

    one = batches(1)[0]
    engine = jaxspeed.initialize(Sows(), loss, ONE.config(64), SGD, example_batch=one)
    engine.train_batch(one)
    report = engine.check(one)
    assert not report.ok
    assert any(fault.startswith("losses/added is carried") for fault in report.faults)


def test_check_finds_intermediate_values_that_are_carried(monkeypatch):
    monkeypatch.setattr(nnx_model, "_is_state", lambda v, names: not isinstance(v, nnx.RngState))
    engine = jaxspeed.initialize(
        NnxSower, lambda m, b: squared(m(b["x"]), b) + m.largest[...], ONE.config(64), SGD
    )
    report = engine.check(batches(1)[0])
    assert not report.ok
    assert any(fault.startswith("largest is carried") for fault in report.faults)


@pytest.mark.sampled
def test_check_finds_a_write_that_is_dropped(monkeypatch):
    monkeypatch.setattr(micro_batch_loss.MicroBatchLoss, "_as_stored", lambda self, written: {})
    engine = jaxspeed.initialize(
        WithTeacher, distilled, ONE.config(64), SGD, trainable="student/**"
    )
    report = engine.check(batches(1)[0])
    assert not report.ok
    assert {fault.split(" ")[0] for fault in report.faults} >= {"teacher/up/kernel"}
