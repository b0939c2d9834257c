"""What a config asks of Ray, and what is refused."""

import pytest

from jaxspeed.config import load_config
from jaxspeed.errors import ConfigError
from jaxspeed.parameter_server.programs import gradient_factor
from jaxspeed.parameter_server.ray import ray_engine, ray_resources
from tests.engine import tiny
from tests.parameter_server.ray.ray_parts import config, plain


def resources(**changes):
    return ray_resources(load_config(config(**changes)))


def test_mesh_data_sets_the_number_of_workers():
    found = resources()
    assert (found.workers, found.servers, found.platform) == (2, 2, None)
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == (8, 2, 2)


def test_simulated_devices_other_than_servers_are_workers():
    found = resources(mesh={}, run={"devices": "cpu:6"})
    assert (found.workers, found.servers, found.platform) == (4, 2, "cpu")
    # ... unless the mesh says another number: each process has a device of its own.
    assert resources(run={"devices": "cpu:8"}).workers == 2


def test_a_process_config_has_its_part_of_the_batch_and_one_device():
    process_config = load_config(resources(zero_optimization={"stage": 0}).worker_config)
    assert process_config.batch(1).train == 4 and process_config.mesh.data == -1
    assert process_config.parallel.data_reduction == "xla"
    assert process_config.gradient_clipping == 0.5 and process_config.optimizer.type == "AdamW"


def test_summed_gradients_are_scaled_by_workers_in_synchronous_steps_alone():
    summed = load_config(config(gradient_allreduce_op="sum"))
    assert gradient_factor(summed, 2) == 2
    at_own_pace = {**config()["parallel"], "max_staleness": 3}
    assert (
        gradient_factor(load_config(config(gradient_allreduce_op="sum", parallel=at_own_pace)), 2)
        == 1
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {}}, "mesh.data: found nothing"),
        ({"mesh": {}, "run": {"devices": "cpu:2"}}, "run.devices: found cpu:2, of which 2"),
        (
            {"parallel": {**config()["parallel"], "worker_pace": [1.0, 2.0]}},
            "parallel.worker_pace: found .*its own pace",
        ),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled: found true"),
    ],
)
def test_unsupported_configs_are_refused_with_the_reason(changes, message):
    with pytest.raises(ConfigError, match=message):
        resources(**changes)


def test_another_data_reduction_is_refused():
    with pytest.raises(ConfigError, match='data_reduction: found "xla"'):
        ray_resources(load_config(plain()))


def test_auto_is_filled_in_before_anything_starts(monkeypatch):
    class Loaded(Exception):
        pass

    def stop(config):
        raise Loaded(config)

    monkeypatch.setattr(ray_engine, "ray_resources", stop)
    given = config(gradient_clipping="auto")
    values = {"preset": "hf", "scheduler.params.total_num_steps": 5}
    with pytest.raises(Loaded) as found:
        ray_engine.initialize(tiny.PAIR, tiny.squared_error, given, auto=values)
    assert found.value.args[0].gradient_clipping == 1.0
    with pytest.raises(ConfigError, match="gradient_clipping"):
        ray_engine.initialize(tiny.PAIR, tiny.squared_error, given)
