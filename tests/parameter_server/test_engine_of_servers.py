"""The synchronous parameter server: equal to data parallelism; bytes and transfers by device."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from jaxspeed.communication import PULL, PUSH
from jaxspeed.errors import JaxspeedError
from jaxspeed.parameter_server.server import folded
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.user_models.rng import loss_key
from tests.engine import tiny
from tests.parameter_server import serving
from tests.parameter_server.serving import (
    ADAM,
    BF16,
    RANKS,
    SERVERS,
    assert_bitwise_equal,
    bytes_by_device,
    data_parallel,
    losses,
    parameters,
    served,
    train,
)
from tests.support.covering import covering

SGD = {"type": "SGD", "params": {"lr": 0.01}}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}


@pytest.fixture(scope="module")
def shared():
    return served()


@pytest.fixture
def engine(shared):
    """At its beginning."""
    shared.reset()
    return shared


def assert_trains_as(ours, theirs, tolerance=1e-5, accumulation=1, steps=10):
    a, b = (losses(train(engine, steps, accumulation)) for engine in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=tolerance)
    ours, theirs = parameters(ours), parameters(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=0, atol=tolerance, err_msg=path)


def uneven(model, batch):
    """Padding weighs nothing, and the parts have different amounts of it."""
    error = jnp.square(model(batch["x"])[:, 0] - batch["y"])
    kept = (batch["x"][:, 0] > 0).astype(error.dtype)
    return (error * kept).sum(), kept.sum()


@pytest.mark.parametrize(
    ("servers", "accumulation", "more"),
    [
        pytest.param(2, 1, {}, marks=pytest.mark.full),
        # Parts are weighted by their loss weight.
        (3, 1, {"gradient_clipping": 0.1, "loss_fn": uneven}),
        pytest.param(1, 2, {"parallel": {"remat": "full"}}, marks=pytest.mark.full),
        pytest.param(
            2, 2, {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, marks=pytest.mark.full
        ),
        pytest.param(2, 1, {"optimizer": {**ADAM, "ema_decay": 0.9}}, marks=pytest.mark.full),
        pytest.param(4, 1, {"gradient_allreduce_op": "sum"}, marks=pytest.mark.full),
    ],
)
def test_ten_steps_equal_data_parallelism(servers, accumulation, more):
    ours = served(servers, accumulation=accumulation, **more)
    theirs = data_parallel(accumulation=accumulation, **more)
    assert_trains_as(ours, theirs, accumulation=accumulation)


def test_the_mean_by_weight_is_the_sum_over_all_samples():
    """Of three workers, one of whose sums has no weight: its gradient is per weight of 1."""
    random = np.random.default_rng(0)
    shares = [(random.normal(size=5).astype(np.float32), w) for w in (3.0, 0.0, 1.0)]
    sums = [Sums({"p": jnp.asarray(g)}, jnp.float32(2 * w), jnp.float32(w), {}) for g, w in shares]
    found = folded(folded(sums[0], sums[1]), sums[2])
    wanted = (3 * shares[0][0].astype(np.float64) + shares[1][0] + shares[2][0]) / 4
    np.testing.assert_allclose(found.grads["p"], wanted, rtol=1e-6)
    assert (float(found.total), float(found.weight)) == (8.0, 4.0)


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.full  # fp16 does below, and what is sent is in bf16 there
def test_bf16_follows_data_parallelism():
    ours, theirs = served(accumulation=2, **BF16), data_parallel(accumulation=2, **BF16)
    a, b = losses(train(ours, 10, 2)), losses(train(theirs, 10, 2))
    np.testing.assert_allclose(a, b, rtol=2e-2)
    assert ours.parameters["head/kernel"].dtype == jnp.float32


@pytest.mark.sampled
def test_fp16_skips_steps_and_adapts_its_scale_as_data_parallelism_does():
    """With micro-batches, where both add up gradients of the same parts."""
    given = {"accumulation": 2, "optimizer": SGD, **FP16}
    ours, theirs = (train(make(**given), 16, 2) for make in (served, data_parallel))
    assert [m["skipped"] for m in ours] == [m["skipped"] for m in theirs]
    assert [m["loss_scale"] for m in ours] == [m["loss_scale"] for m in theirs]
    assert 0 < ours[-1]["skipped_steps"] < 16
    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=2e-2)


def test_gradients_are_sent_in_the_dtype_of_the_config(engine):
    before = engine.traffic.up[0]
    train(engine, 1)
    short = served(communication_data_type="bf16", optimizer=SGD)
    train(short, 1)
    assert short.traffic.up[0] < 0.52 * (engine.traffic.up[0] - before)


# -- who holds what, and what crosses --------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    "more", [pytest.param({}, id="fp32", marks=pytest.mark.full), pytest.param(BF16, id="bf16")]
)
def test_workers_hold_no_optimizer_bytes_and_servers_no_activations(more):
    """After a step, by what is alive on each device."""
    before = bytes_by_device()
    engine = served(**more)
    train(engine, 2)
    jax.block_until_ready(engine.state)
    size = sum(x.size for x in engine.parameters.values())
    here = 2 if more else 4
    workers, servers = engine.program.worker_devices, list(engine.program.mesh.devices.flat)
    assert len(workers) == RANKS and len(servers) == SERVERS and not set(workers) & set(servers)
    made = bytes_by_device()
    made.subtract(before)
    for device in workers:
        # Parameters as layers read them, a loss scale, and the model's own keys and counters.
        assert size * here <= made[device] <= size * here + 64, device
    state = bytes_by_device(jax.tree.leaves(engine.state))
    for device in servers:
        own = state[device]
        assert own <= 1.1 * 3 * size * 4 / SERVERS + 64  # a master and two moments, cut
        # Beside the state: the metrics, and what was published of these parameters.
        rest = made[device] - own
        assert rest <= size * here / SERVERS + 128, device


def test_servers_receive_no_batch_and_run_no_model(monkeypatch):
    """Of the calls of the model, none is traced for a mesh of servers."""
    sizes = set()

    class Seen(serving.Small):
        def __call__(self, x):
            sizes.add(jax.sharding.get_abstract_mesh().size)
            return super().__call__(x)

    train(served(model=Seen), 1)
    assert sizes == {1}


def crossing(monkeypatch):
    """Bytes that leave each device for another, by (from, to), counted where JAX moves them."""
    moved, put = Counter(), jax.device_put

    def counted(x, device=None, **rest):
        if isinstance(x, list) and isinstance(device, list):
            for array, to in zip(x, device, strict=True):
                assert len(array.devices()) == 1
                moved[next(iter(array.devices())), to] += array.nbytes
        return put(x, device, **rest)

    monkeypatch.setattr(jax, "device_put", counted)
    return moved


@pytest.mark.parametrize(
    "more", [pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16", marks=pytest.mark.full)]
)
def test_a_step_pushes_gradients_and_pulls_parameters_once_per_worker(monkeypatch, more):
    engine = served(model=tiny.PAIR, **more)  # whose sizes two servers divide
    train(engine, 1)
    moved = crossing(monkeypatch)
    train(engine, 3, first=1)
    size = sum(x.nbytes for x in engine.parameters.values()) // (2 if more else 1)
    servers = set(engine.program.mesh.devices.flat)
    for number, worker in enumerate(engine.program.worker_devices):
        up = sum(n for (a, b), n in moved.items() if a == worker and b in servers)
        down = sum(n for (a, b), n in moved.items() if a in servers and b == worker)
        loss_and_weight = 2 * 4 * SERVERS
        assert up == 3 * (size + loss_and_weight), number
        assert down == 3 * size, number  # the first step pulled the static loss scale
        pieces = {b: n for (a, b), n in moved.items() if a == worker}
        assert len(set(pieces.values())) == 1  # as much to each server
    assert {a for a, _ in moved} | {b for _, b in moved} == set(engine.program.devices)


def test_frozen_parameters_are_pulled_once():
    def trained(path):
        return "blocks" not in path

    words = {"data_reduction": "parameter_server", "servers": 2}
    engine = jaxspeed.initialize(
        serving.Small,
        tiny.squared_error,
        tiny.config(optimizer=SGD, parallel=words, train_micro_batch_size_per_gpu=2),
        devices=jax.devices()[:6],
        trainable=trained,
    )
    train(engine, 1)
    first = engine.traffic.down[0]
    train(engine, 1)
    sizes = {path: x.nbytes for path, x in engine.parameters.items()}
    rest = sum(n for path, n in sizes.items() if "blocks" not in path)
    assert engine.traffic.down[0] - first <= rest + 16
    assert first >= sum(sizes.values())


# -- overlap ---------------------------------------------------------------------------------------


FREE = {"bf16": {"enabled": True, "check_grad_overflow": False}}  # no step is skipped
AVERAGED = {**ADAM, "ema_decay": 0.9}


def test_the_first_pull_begins_before_the_last_push():
    engine = served(**FREE, optimizer=AVERAGED)
    train(engine, 2)
    ways = [one.kind for one in engine.traffic.order if one.purpose != "scalars"]
    assert ways.index(PULL) < len(ways) - 1 - ways[::-1].index(PUSH)
    assert len(engine.program.server.buckets.paths) >= 3
    assert sorted(sum(engine.program.server.buckets.paths, ())) == sorted(engine.parameters)


@pytest.mark.parametrize(
    "more",
    [
        {**FREE, "gradient_clipping": 1.0},
        BF16,
        {},
        {**FREE, "optimizer": None, "optimizer_": CLIPPED},
    ],
    ids=["clipping", "skipping bf16", "skipping fp32", "an optimizer that reads all"],
)
def test_an_update_that_needs_all_gradients_precedes_every_pull(more):
    assert served(**more).program.server.buckets is None


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"optimizer": AVERAGED}, id="adam"),
        # ray/test_server_program.py has it
        pytest.param(
            {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
            id="lamb",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_bucketed_update_equals_the_update_at_once(monkeypatch, more):
    ours = served(**FREE, **more)
    told = train(ours, 3)
    theirs = served(**FREE, **more)
    assert ours.program.server.buckets is not None
    monkeypatch.setitem(theirs.program.server.__dict__, "buckets", None)
    wanted = train(theirs, 3)
    for a, b in zip(told, wanted, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose([*a.values()], [*b.values()], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(e.state) for e in (ours, theirs)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-6)


# -- the rest of the face --------------------------------------------------------------------------


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.input = nnx.Linear(tiny.FEATURES, tiny.HIDDEN, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(tiny.HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jnp.tanh(self.input(x))))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(tiny.FEATURES, rngs=rngs)
        self.head = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x))


@pytest.mark.sampled
@pytest.mark.parametrize("model", covering([serving.Small, Dropping], [Dropping]))
def test_check_agrees_with_one_device(model):
    """With random numbers too: each worker's are those of its micro-batches on one device."""
    engine = served(model=model, accumulation=2, optimizer=SGD)
    train(engine, 1, 2)
    before = parameters(engine)
    report = engine.check(serving.batch(5, 2))
    assert report.ok and report.gradient < 1e-5 and report.devices == RANKS + SERVERS
    assert all((parameters(engine)[path] == x).all() for path, x in before.items())


def test_check_sees_a_worker_that_computes_on_another_part(monkeypatch):
    engine = served(model=Dropping, accumulation=2, optimizer=SGD)  # as above
    parts = type(engine.program).parts
    monkeypatch.setattr(
        type(engine.program), "parts", lambda self, x: [*parts(self, x)[:-1], parts(self, x)[0]]
    )
    assert not engine.check(serving.batch(0, 2)).ok


def test_statistics_that_a_training_pass_changes_are_refused():
    with pytest.raises(ModelError, match="changes statistics"):
        train(served(model=Normed), 1)


def test_evaluation_is_that_of_the_full_batch(engine):
    train(engine, 2)
    batch = tiny.batch(16, seed=9)
    found = engine.eval_batch(batch)
    error = serving.small_by_hand(parameters(engine), batch["x"]) - batch["y"]
    assert float(found["loss"]) == pytest.approx(np.square(error).mean(), rel=1e-5)
    assert float(found["weight"]) == 16


def test_parts_draw_numbers_of_their_own_in_evaluation():
    def drawn(model, batch, rng):
        x = jax.random.normal(rng, batch["x"].shape)
        return jnp.square(model(x)[:, 0]).sum(), jnp.float32(len(x))

    engine, batch = served(loss_fn=drawn, optimizer=SGD), tiny.batch(8)
    parts = []
    for part in range(4):
        x = jax.random.normal(loss_key(jax.random.key(3), 0, part), (2, tiny.FEATURES))
        parts.append(np.square(serving.small_by_hand(parameters(engine), np.asarray(x))).sum())
    assert float(engine.eval_batch(batch)["loss"]) == pytest.approx(sum(parts) / 8, rel=1e-5)


def test_diagnosis_names_what_is_not_finite_in_any_part(engine):
    batch = serving.batch(0)
    assert engine.diagnose(batch).finite
    batch["x"][-1, 0] = np.nan
    found = engine.diagnose(batch)
    assert found.batch == "x" and found.layer and "input" in found.layer


def test_the_compiled_report_is_of_one_workers_part_then_of_the_servers_update(engine):
    report = engine.compiled(serving.batch(0))
    assert report.phase == "gradients of a worker" and report.collectives == ()
    size = sum(x.nbytes for x in engine.parameters.values())
    assert size <= report.argument_bytes < 1.5 * size + 500
    (update,) = report.others.values()
    assert list(report.others) == list(report.figures()["others"]) == ["update"]
    # A server's half of the parameters and of two moments, and of the gradients.
    assert 4 * size / 2 <= update.argument_bytes < 2.5 * size + 500
    assert "compiled, update, per device" in str(report)


def test_an_update_in_buckets_is_a_phase_for_each():
    bucketed = served(**FREE, optimizer=AVERAGED)
    _, *updates = bucketed.program.phases
    assert len(updates) == len(bucketed.program.server.buckets.paths) >= 3
    report = bucketed.compiled(serving.batch(0))
    assert [each.name for each in updates] == list(report.others)
    assert all(each.argument_bytes for each in report.others.values())


def test_the_module_has_the_current_parameters(engine):
    train(engine, 1)
    x = serving.batch(0)["x"]
    wanted = serving.small_by_hand(parameters(engine), x)
    np.testing.assert_allclose(engine.module(x)[:, 0], wanted, rtol=1e-5, atol=1e-6)


def test_there_is_no_one_step_function(shared):
    with pytest.raises(JaxspeedError, match=r"call engine\.train_batch"):
        shared.step  # noqa: B018


# -- checkpoints -----------------------------------------------------------------------------------


def test_every_data_reduction_restores_checkpoints_of_the_others(engine, tmp_path):
    """Servers to ZeRO 2, to servers, and to others at their own pace: nothing is misread."""
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "a")
    engine.wait()
    second = data_parallel(zero_optimization={"stage": 2})
    second.load_checkpoint(tmp_path / "a")
    train(second, 1, first=3)
    second.save_checkpoint(tmp_path / "b")
    second.wait()
    third = served(3, parallel=serving.WAIT)
    train(third, 1)  # what is in flight is forgotten
    third.load_checkpoint(tmp_path / "b")
    engine.load_checkpoint(tmp_path / "b")
    assert int(third.state.step) == int(engine.state.step) == 4
    for path, value in parameters(second).items():
        assert (parameters(third)[path] == value).all() and (
            parameters(engine)[path] == value
        ).all()
    np.testing.assert_allclose(
        losses(train(engine, 2, first=4)), losses(train(second, 2, first=4)), rtol=1e-5
    )


@pytest.mark.full  # above, a run with servers continues from every other's checkpoint
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = served(**BF16)
    train(whole, 4)
    half = served(**BF16)
    train(half, 2)
    half.save_checkpoint(tmp_path)
    half.wait()
    rest = served(**BF16)
    rest.load_checkpoint(tmp_path)
    train(rest, 2, first=2)
    assert_bitwise_equal(whole, rest)
