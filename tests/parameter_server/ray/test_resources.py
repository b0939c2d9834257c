"""What a config asks of Ray, and what is refused."""

import pytest

from jaxspeed.config import load_config
from jaxspeed.errors import ConfigError
from jaxspeed.parameter_server.ray import staff_of
from tests.parameter_server.ray.ray_parts import config, plain


def staff(**changes):
    return staff_of(load_config(config(**changes)))


def test_the_mesh_says_how_many_workers_there_are():
    found = staff()
    assert (found.workers, found.servers, found.platform) == (2, 2, None)
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == (8, 2, 2)


def test_of_simulated_devices_workers_are_those_that_are_no_servers():
    found = staff(mesh={}, run={"devices": "cpu:6"})
    assert (found.workers, found.servers, found.platform) == (4, 2, "cpu")
    # ... unless the mesh says another number: each process has a device of its own.
    assert staff(run={"devices": "cpu:8"}).workers == 2


def test_a_process_is_told_its_own_part_of_the_batch_and_of_nobody_else():
    alone = load_config(staff(zero_optimization={"stage": 0}).alone)
    assert alone.batch(1).train == 4 and alone.mesh.data == -1
    assert alone.parallel.data_reduction == "xla"
    assert alone.gradient_clipping == 0.5 and alone.optimizer.type == "AdamW"


def test_summed_gradients_count_once_for_each_worker_by_rounds_alone():
    assert staff(gradient_allreduce_op="sum").factor == 2
    at_own_pace = {**config()["parallel"], "max_staleness": 3}
    assert staff(gradient_allreduce_op="sum", parallel=at_own_pace).factor == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": {}}, "mesh.data: found nothing"),
        ({"mesh": {}, "run": {"devices": "cpu:2"}}, "run.devices: found cpu:2, of which 2"),
        (
            {"parallel": {**config()["parallel"], "worker_pace": [1.0, 2.0]}},
            "parallel.worker_pace: found .*its own pace",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes, message):
    with pytest.raises(ConfigError, match=message):
        staff(**changes)


def test_another_way_of_reduction_is_refused():
    with pytest.raises(ConfigError, match='data_reduction: found "xla"'):
        staff_of(load_config(plain()))
