"""What a parameter server cannot be is refused at the door, with the reason and what would do."""

import jax
import numpy as np
import pytest

from jaxspeed import BatchError, Config, ConfigError, PlacementError
from tests.engine import tiny
from tests.parameter_server import serving
from tests.parameter_server.serving import served

SERVER = {"data_reduction": "parameter_server"}


def test_all_problems_are_in_one_error():
    offload = {"offload_param": {"device": "cpu"}}
    wrong = {
        "mesh": {"pipe": 2, "tensor": 2, "replica": -1, "data": 3},
        "zero_optimization": {"stage": 3, **offload},
        "parallel": {
            **SERVER,
            "gradient_reduction": "micro_batch",
            "ring_wire": "bf16",
            "on_stale": "drop",
            "worker_pace": [1.0, 2.0],
        },
    }
    with pytest.raises(ConfigError) as raised:
        Config.load(tiny.config(**wrong))
    said = str(raised.value)
    for words in (
        "stages store stacks of layers",
        "mesh.replica: found -1",
        "It sets the devices of each worker: write their number",
        "zero_optimization.stage: found 3",
        "Servers already shard parameters, gradients and moments",
        "zero_optimization.offload_param.device",
        "Each version arrives on the devices of the workers",
        "Workers push once for all their micro-batches",
        'Only parallel.data_reduction "ring" uses it',
        "Without it training is synchronous",
        "Needs one per worker: mesh.data is 3",
    ):
        assert words in said, words


@pytest.mark.parametrize(
    ("devices", "more", "says"),
    [
        (2, {"servers": 2}, "servers is 2 of 2 devices, and at least one has to be a worker: at m"),
        (1, {}, "more devices would do"),
        (6, {"servers": 2, "data": 3}, "6 devices without 2 servers leave 4 workers: write 4"),
        (4, {"worker_pace": [1.0]}, "1 paces, and there are 3 workers"),
        (6, {"tensor": 2}, "is 2, the devices of each worker, and 6 devices without 1 servers"),
        (7, {"tensor": 2, "data": 2}, "leave 3 workers: write 3"),
    ],
)
def test_impossible_device_counts_are_refused_with_what_works(devices, more, says):
    mesh = {axis: more.pop(axis) for axis in ("data", "tensor") if axis in more}
    with pytest.raises((PlacementError, ConfigError), match=says):
        tiny.engine(parallel={**SERVER, **more}, mesh=mesh, devices=jax.devices()[:devices])


def test_several_processes_are_refused_with_a_pointer_to_ray(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="--engine ray"):
        served()


def test_the_batch_is_shared_by_the_workers_alone():
    engine = served()
    with pytest.raises(BatchError, match="2 per rank x 1 micro-batches x 4 data ranks"):
        engine.train_batch(tiny.batch(12))
    with pytest.raises(BatchError, match="4 data ranks cannot share evenly"):
        engine.eval_batch(tiny.batch(6))
    with pytest.raises(ConfigError, match="train_batch_size"):
        served(train_batch_size=9)


def test_a_refused_batch_changes_nothing():
    engine = served(parallel=serving.WAIT)
    serving.train(engine, 1)
    with pytest.raises(BatchError):
        engine.train_batch({"x": np.zeros((7, 3), np.float32)})
    assert serving.train(engine, 1, first=1)[0]["loss"] > 0


def test_running_out_of_memory_names_more_servers(monkeypatch):
    engine = served()

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine._schedule, "train", full)
    with pytest.raises(Exception, match=r"one more of parallel\.servers frees"):
        engine.train_batch(serving.batch(0))
