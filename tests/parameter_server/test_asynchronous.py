"""Workers at their own pace: what is applied, what is dropped, who waits, and what it comes to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.parameter_server import Rule, VirtualClock, WorkerSchedule
from jaxspeed.parameter_server.schedules import Task
from jaxspeed.parameter_server.server import mean_loss
from tests.parameter_server import serving
from tests.parameter_server.serving import (
    BF16,
    DROP,
    MICRO,
    RANKS,
    SLOWED,
    WAIT,
    assert_bitwise_equal,
    losses,
    parameters,
    served,
    train,
)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="fp32", marks=pytest.mark.full),
        pytest.param({**BF16, "gradient_clipping": 0.5}, id="bf16"),
    ],
)
def test_max_staleness_0_equals_synchronous_bitwise(more):
    """Though pushes arrive in the order of the clock, with one worker far behind."""
    uneven = {"worker_pace": [3.0, 1.0, 5.0, 2.0]}
    apart = served(parallel={"max_staleness": 0, **uneven}, **more)
    in_step = served(**more)
    assert losses(train(apart, 10)) == losses(train(in_step, 10))
    assert_bitwise_equal(apart, in_step)


def test_synchronous_steps_sum_in_worker_order_whatever_the_arrival(monkeypatch):
    """The last to arrive is the first in the sum."""
    engine = served(parallel={"max_staleness": 0, "worker_pace": [4.0, 3.0, 2.0, 1.0]})
    folded = []
    fold = engine.program.server.fold

    def seen(sums, new):
        folded.append(float(new.total))
        return fold(sums, new)

    monkeypatch.setitem(engine.program.server.__dict__, "fold", seen)
    batch = serving.batch(0)
    alone = []
    for worker in range(RANKS):
        rows = slice(2 * worker, 2 * worker + 2)
        error = engine.module(batch["x"][rows])[:, 0] - batch["y"][rows]
        alone.append(float((error**2).sum()))
    engine.train_batch(batch)
    np.testing.assert_allclose(folded, alone[1:], rtol=1e-5)


def test_each_accepted_push_is_one_version():
    engine = served(parallel=DROP)
    told = train(engine, 5)
    assert [int(m["version"]) for m in told] == list(np.cumsum([m["accepted"] for m in told]))
    arrived = sum(engine.staleness.values())
    state = engine.state  # once nothing is in flight
    assert sum(engine.staleness.values()) == 5 * RANKS > arrived
    assert int(state.step) == sum(n for age, n in engine.staleness.items() if age <= 4)


@pytest.mark.default_cases("wait")
@pytest.mark.parametrize(
    "rule",
    [Rule(6, "wait"), Rule(3, "drop", decay=0.5)],
    ids=["wait", "drop"],
)
def test_it_is_plain_jax_with_each_gradient_of_the_version_that_was_pulled(rule):
    """With a history of all versions in place of workers, and Optax in place of servers."""
    sgd, steps = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.5}}, 8
    words = {"max_staleness": rule.max_staleness, "on_stale": rule.on_stale}
    words |= {"worker_pace": SLOWED, **({"staleness_decay": 0.5} if rule.decay < 1 else {})}
    engine = served(parallel=words, model=serving.tiny.PAIR, optimizer=sgd)
    start = parameters(engine)
    train(engine, steps)

    def loss(params, part):
        x = part["x"]
        for layer in range(3):
            x = x + jnp.tanh(x @ params[f"layers/{layer}/w"])
        return jnp.square((x @ params["out"])[:, 0] - part["y"]).mean()

    gradient, plain = jax.jit(jax.grad(loss)), optax.sgd(0.05, momentum=0.5)
    schedule = WorkerSchedule(rule, VirtualClock(SLOWED, seed=3))
    versions, state = [start], plain.init(start)
    in_flight = {}
    parts = [
        {name: x[MICRO * i : MICRO * (i + 1)] for name, x in serving.batch(step).items()}
        for step in range(steps)
        for i in range(RANKS)
    ]
    while True:
        begun = schedule.begin() if parts else None
        if begun is not None:
            in_flight[begun] = gradient(versions[-1], parts.pop(0))
            continue
        arrival = schedule.arrive()
        if arrival is None:
            break
        done, push = arrival
        grads = in_flight.pop(done.worker)
        if push.accepted:
            grads = jax.tree.map(lambda g, by=push.factor: g * by, grads)
            updates, state = plain.update(grads, state)
            versions.append(optax.apply_updates(versions[-1], updates))
    after = parameters(engine)
    assert len(versions) - 1 == int(engine.state.step) == schedule.ledger.accepted
    assert schedule.ledger.dropped > 0 or rule.on_stale == "wait"
    for path, value in versions[-1].items():
        np.testing.assert_allclose(after[path], value, atol=1e-5, err_msg=path)


def test_with_drop_a_slow_worker_does_not_slow_the_others():
    """At least twice the accepted pushes a virtual second of the synchronous mode."""
    slowed = {"worker_pace": SLOWED}
    in_step = train(served(parallel=slowed), 4)
    apart = train(served(parallel={**DROP, **slowed}), 12)
    synchronous = 4 * RANKS / in_step[-1]["virtual_seconds"]
    asynchronous = sum(m["accepted"] for m in apart) / apart[-1]["virtual_seconds"]
    assert asynchronous >= 2 * synchronous
    assert max(m["staleness_max"] for m in apart) > 4 and sum(m["dropped"] for m in apart) >= 1


def test_dropped_gradients_are_neither_applied_nor_sent():
    engine = served(parallel={"max_staleness": 1, "on_stale": "drop", "worker_pace": SLOWED})
    told = train(engine, 8)
    state = engine.state
    dropped = sum(n for age, n in engine.staleness.items() if age > 1)
    assert dropped >= 2 and int(state.step) == 8 * RANKS - dropped
    pushes = int(state.step)
    each = engine.program.serving.push.bytes
    assert each * pushes <= sum(engine.traffic.up.values()) < each * pushes + 16 * 8 * RANKS + 1
    assert sum(m["dropped"] for m in told) <= dropped


def test_with_wait_nothing_is_dropped_and_the_slow_worker_sets_the_pace():
    engine = served(parallel={**WAIT, "worker_pace": SLOWED})
    told = train(engine, 12)
    assert max(engine.staleness) <= 4 and sum(m["dropped"] for m in told) == 0
    assert sum(m["waited"] for m in told) > 0
    # The others make s = 4 versions for each of the slow one, which takes 5 seconds.
    since = told[-1]["virtual_seconds"] - told[3]["virtual_seconds"]
    versions = told[-1]["version"] - told[3]["version"]
    assert versions / since == pytest.approx(5 / 5.0, rel=0.15)


def test_a_seed_replays_a_run():
    first, again = (served(parallel={**DROP, "worker_pace": SLOWED}) for _ in range(2))
    assert train(first, 5) == train(again, 5)
    assert_bitwise_equal(first, again)
    other = served(parallel={**DROP, "worker_pace": SLOWED}, run={"seed": 4})
    assert train(other, 5) != train(first, 5)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "rule", [pytest.param(WAIT, id="wait", marks=pytest.mark.full), pytest.param(DROP, id="drop")]
)
def test_it_converges_as_synchronous_training(rule):
    """To within 5% of the synchronous loss, after as many samples."""
    rate = {"type": "SGD", "params": {"lr": 0.005}}
    in_step = served(optimizer=rate)
    apart = served(optimizer=rate, parallel={**rule, "worker_pace": SLOWED})
    held_out = serving.tiny.batch(256, seed=1000)

    def loss(engine):
        return float(engine.eval_batch(held_out)["loss"])

    start = loss(in_step)
    for engine in (in_step, apart):
        train(engine, 100)
    assert loss(apart) <= 1.05 * loss(in_step) < 0.5 * start


@pytest.mark.parametrize("what", ["state", "eval_batch", "save_checkpoint"])
def test_pushes_in_flight_arrive_before_the_state_is_read(what, tmp_path):
    engine = served(parallel=WAIT)
    told = train(engine, 2)
    assert sum(engine.staleness.values()) < 2 * RANKS
    given = {"eval_batch": [serving.batch(9)], "save_checkpoint": [tmp_path]}
    getattr(engine, what) if what == "state" else getattr(engine, what)(*given[what])
    assert sum(engine.staleness.values()) == 2 * RANKS
    engine.wait()
    told += train(engine, 1)  # which reports what arrived in between as well
    assert sum(m["accepted"] for m in told) == sum(engine.staleness.values())


def test_the_loss_scale_skips_an_asynchronous_push():
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}}
    engine = served(parallel=WAIT, **fp16)
    told = train(engine, 8)
    state = engine.state
    assert int(state.skipped) > 0 and int(state.step) == 8 * RANKS
    assert told[-1]["loss_scale"] < 2.0**30
    assert all(np.isfinite(x).all() for x in parameters(engine).values())


def test_a_push_of_another_loss_scale_has_the_same_weight():
    """The scale falls while a worker computes; its gradients are those of the scale it pulled."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}

    def after_a_push(fall):
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = served(parallel=WAIT, optimizer=sgd, **fp16)
        program, workers, store = engine.program, engine._workers, engine._store
        data = serving.batch(0)
        (part, *_) = program.parts(jax.device_put(data, program.batch_shardings(data)))
        workers.start(0, Task(0, part, store.publish()))
        done = workers.next()
        scale = store.state.loss_scale
        fallen = scale._replace(scale=scale.scale / fall)
        store.state = dataclasses.replace(store.state, loss_scale=fallen)
        store.apply(store.reduce([(done, store.losses(done))]))
        return {path: np.array(x) for path, x in store.state.master.items()}

    one, two = after_a_push(1), after_a_push(4)
    for path, value in one.items():
        np.testing.assert_allclose(two[path], value, rtol=1e-3, atol=1e-5)


def test_each_part_is_used_once():
    """All samples are in the losses, whichever worker had them; the rate changes nothing."""
    still = {"type": "SGD", "params": {"lr": 0.0}}
    engine = served(parallel={**DROP, "worker_pace": SLOWED}, optimizer=still)
    told = train(engine, 6)
    engine.wait()
    rest = {k: float(x) for k, x in mean_loss(engine._schedule._losses).items()}
    found = sum(m["loss"] * m["weight"] for m in [*told, rest])
    wanted = 0.0
    for step in range(6):
        batch = serving.batch(step)
        wanted += float(((np.asarray(engine.module(batch["x"])[:, 0]) - batch["y"]) ** 2).sum())
    assert found == pytest.approx(wanted, rel=1e-5)
