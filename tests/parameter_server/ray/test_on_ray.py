"""Workers and servers as real processes: what they compute, and what it is worth when they die."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import load_config
from jaxspeed.errors import BatchError, ModelError, RunError, StateLostError
from jaxspeed.parameter_server import Rule
from jaxspeed.parameter_server import ray as actors
from jaxspeed.parameter_server.ray import cluster as clusters
from jaxspeed.parameter_server.ray import pools
from jaxspeed.parameter_server.schedules import Task
from jaxspeed.user_models.config_model import resolve_model
from tests.parameter_server.ray import ray_parts
from tests.parameter_server.ray.ray_parts import LLAMA, batches
from tests.support.covering import covering

pytest.importorskip("ray")  # as a script that imports Ray before jaxspeed does
pytestmark = [pytest.mark.ray, pytest.mark.sampled]

STORE = 200 * 2**20  # bytes
config, plain = (partial(of, model=LLAMA) for of in (ray_parts.config, ray_parts.plain))
WRONG, DEADLY = 5, 6  # lengths of sequences at which the loss raises, or ends its process


def loss_with_mistakes():
    """The family's own loss. A closure, so that it travels by value."""
    own, wrong, deadly = resolve_model(load_config(config()))[1], WRONG, DEADLY

    def loss(model, batch):
        length = batch["tokens"].shape[1]
        if length == wrong:
            raise ValueError("a mistake of my own")
        if length == deadly:
            os._exit(1)
        return own(model, batch)

    return loss


@pytest.fixture(scope="module")
def engine():
    ray = clusters.ray_module()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=2, object_store_memory=STORE, **quiet)
    try:
        made = actors.initialize(config=config(), loss_fn=loss_with_mistakes())
        yield made
        made.close()
    finally:
        ray.shutdown()


@pytest.fixture
def fresh(engine):
    """Synchronous, at its beginning, with all of its processes."""
    return under(engine, Rule())


def under(engine, rule):
    """The same processes under another rule."""
    engine.program = replace(engine.program, rule=rule)
    engine.reset()
    return engine


def trained(engine, given):
    return [float(engine.train_batch(batch)["loss"]) for batch in given]


def arrays(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def uninterrupted(engine):
    """The losses and the state of eight steps in which nobody died."""
    under(engine, Rule())
    return trained(engine, batches(8)), arrays(engine.state)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_ten_steps_equal_data_parallelism(fresh):
    reference = jaxspeed.initialize(config=plain(), devices=jax.devices()[:2])
    given = batches(10)
    np.testing.assert_allclose(trained(fresh, given), trained(reference, given), rtol=1e-5)
    theirs = reference.parameters
    for path, value in fresh.parameters.items():
        np.testing.assert_allclose(value, theirs[path], atol=1e-5, err_msg=path)
    ours, theirs = (e.eval_batch(given[0]) for e in (fresh, reference))
    for name in ("loss", "weight"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


def test_each_worker_and_each_server_is_a_process(fresh):
    there = fresh.processes
    assert {name: len(pids) for name, pids in there.items()} == {"workers": 2, "servers": 2}
    assert len({os.getpid(), *there["workers"], *there["servers"]}) == 5


@pytest.mark.parametrize("when", covering(["between steps", "in a step"], ["in a step"]))
def test_a_killed_worker_is_restarted_and_no_number_changes(fresh, uninterrupted, when, caplog):
    given, losses = batches(8), uninterrupted[0]
    assert trained(fresh, given[:3]) == losses[:3]
    before = fresh.processes["workers"]
    if when == "between steps":
        kill(before[1])
    else:
        threading.Timer(0.004, kill, before[1:]).start()
    assert trained(fresh, given[3:]) == losses[3:]
    time.sleep(0.1)
    assert arrays(fresh.state) == uninterrupted[1]
    fresh.eval_batch(given[0])  # where the end came too late for a step to see it
    after = fresh.processes["workers"]
    assert after[0] == before[0] and after[1] != before[1]
    assert "worker 1 died" in caplog.text


def test_a_killed_server_loses_the_state_since_the_last_checkpoint(
    fresh, uninterrupted, tmp_path, capfd
):
    given, (losses, state) = batches(8), uninterrupted
    assert trained(fresh, given[:3]) == losses[:3]
    fresh.save_checkpoint(tmp_path, client_state={"next": 3})
    trained(fresh, given[3:5])
    before = fresh.processes["servers"]
    kill(before[0])
    with pytest.raises(StateLostError, match="a server died"):
        trained(fresh, given[5:])
    with pytest.raises(StateLostError):
        _ = fresh.state
    tag, kept = fresh.load_checkpoint(tmp_path)
    assert (tag, kept) == ("step-00000003", {"next": 3})
    assert trained(fresh, given[3:]) == losses[3:]
    assert arrays(fresh.state) == state
    after = fresh.processes["servers"]
    assert after[0] != before[0] and after[1] == before[1]
    assert capfd.readouterr().out == ""  # Ray's own words stay out of a program's output


def test_a_checkpoint_is_read_by_any_other_mode_and_theirs_here(fresh, tmp_path):
    given = batches(4)
    trained(fresh, given[:2])
    fresh.save_checkpoint(tmp_path / "ours")
    fresh.wait()
    parameters = fresh.parameters
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    other = jaxspeed.initialize(config=plain(zero_optimization=zero), devices=jax.devices()[:2])
    other.load_checkpoint(tmp_path / "ours")
    for path, value in other.parameters.items():
        np.testing.assert_array_equal(value, parameters[path], err_msg=path)
    next_loss = trained(other, given[2:3])
    np.testing.assert_allclose(trained(fresh, given[2:3]), next_loss, rtol=1e-5)
    other.save_checkpoint(tmp_path / "theirs")
    other.wait()
    trained(fresh, given[:1])
    fresh.load_checkpoint(tmp_path / "theirs")
    np.testing.assert_allclose(trained(fresh, given[3:]), trained(other, given[3:]), rtol=1e-5)


def test_synchronous_steps_equal_those_of_one_controller_bitwise(engine, uninterrupted):
    under(engine, Rule(max_staleness=0))
    assert trained(engine, batches(8)) == uninterrupted[0]
    assert arrays(engine.state) == uninterrupted[1]


@pytest.mark.full  # test_asynchronous.py has the bound, and above one dies
def test_asynchronous_workers_keep_the_bound_though_one_dies(engine):
    under(engine, Rule(max_staleness=1))
    given, found = batches(1) * 12, []  # one batch: the loss of others would not fall
    for number, batch in enumerate(given):
        if number == 4:
            kill(engine.processes["workers"][0])
        found.append(engine.train_batch(batch))
    engine.wait()
    accepted = sum(int(one["accepted"]) for one in found)
    assert sum(int(one["dropped"]) for one in found) == 0
    assert max(engine.staleness) <= 1
    # Each part makes a version, that of the worker that died included.
    assert int(engine.state.step) == 2 * len(given) == sum(engine.staleness.values())
    assert accepted <= 2 * len(given)  # some arrive after the last call
    assert float(found[-1]["loss"]) < float(found[0]["loss"])


def test_a_push_that_is_too_old_is_dropped_and_counted(engine):
    under(engine, Rule(max_staleness=1, on_stale="drop", decay=0.5))
    batch, schedule, store = batches(1)[0], engine._schedule, engine._store
    ledger, asynchronous = schedule._schedule.ledger, schedule._schedule
    engine.train_batch(batch)
    engine.wait()
    version, before = ledger.version, arrays(engine.state)
    # Worker 0 pulled three versions ago.
    ledger.pull(0)
    ledger.version += 3
    asynchronous._free.remove(0)
    part = engine._parts(batch, "train_batch", 8)[0]
    engine._workers.start(0, Task(0, part, store.publish()))
    schedule.drain()
    assert ledger.dropped == 1 and schedule.staleness[3] == 1
    assert ledger.version == version + 3
    store._local = None
    assert arrays(engine.state) == before


def test_an_exception_of_the_loss_is_raised_once_with_its_message(fresh, uninterrupted):
    wrong = {name: x[:, :WRONG] for name, x in batches(1)[0].items()}
    with pytest.raises(ModelError, match=r"ValueError.*a mistake of my own") as caught:
        fresh.train_batch(wrong)
    assert str(caught.value).count("a mistake of my own") == 1
    assert trained(fresh, batches(8)) == uninterrupted[0]  # nothing was left in flight


def test_a_worker_that_dies_repeatedly_ends_the_run(fresh, monkeypatch):
    monkeypatch.setattr(pools, "MAX_CONSECUTIVE_DEATHS", 1)
    deadly = {name: x[:, :DEADLY] for name, x in batches(1)[0].items()}
    with pytest.raises(RunError, match=r"worker . died 1 times without doing any work"):
        fresh.train_batch(deadly)


def test_a_batch_of_another_size_is_refused_with_the_workers_in_the_sum(fresh):
    with pytest.raises(BatchError, match="2 per rank x 2 micro-batches x 2 data ranks"):
        fresh.train_batch({name: x[:4] for name, x in batches(1)[0].items()})


def test_a_cluster_without_resources_is_an_error_at_once(engine, monkeypatch):
    with pytest.raises(RunError, match="need 2 GPUs, and the cluster has 0"):
        clusters.Cluster(4, accelerated=2, platform="gpu")
    monkeypatch.setattr(clusters, "SECONDS_TO_RESERVE", 1)
    with pytest.raises(RunError, match="need 2 CPUs, and the cluster has free 0"):
        clusters.Cluster(4)


def test_processes_of_several_devices_that_update_in_buckets_are_restarted(engine, tmp_path):
    """Tensor-parallel workers; then one of them is killed, and a server."""
    free = {"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}
    mesh = {"data": 2, "tensor": 2}
    engine.ends.close()  # its two cores
    made = actors.initialize(config=config(**free, mesh=mesh))
    try:
        assert len(made._store.buckets) >= 3
        given = batches(6)
        losses = trained(made, given)
        state = arrays(made.state)
        reference = jaxspeed.initialize(config=plain(**free), devices=jax.devices()[:2])
        np.testing.assert_allclose(losses, trained(reference, given), rtol=2e-2)
        made.reset()
        assert trained(made, given[:2]) == losses[:2]
        made.save_checkpoint(tmp_path)
        made.wait()
        kill(made.processes["workers"][1])
        assert trained(made, given[2:4]) == losses[2:4]
        kill(made.processes["servers"][0])
        with pytest.raises(StateLostError, match="a server died"):
            trained(made, given[4:])
        made.load_checkpoint(tmp_path)
        assert trained(made, given[2:]) == losses[2:]
        assert arrays(made.state) == state
    finally:
        made.close()
