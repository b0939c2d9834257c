"""A cluster of two machines, played by one, is joined by its address; and one of them fails."""

import logging

import pytest

from jaxspeed.errors import StateLostError
from jaxspeed.parameter_server import ray as actors
from jaxspeed.parameter_server.ray.cluster import ray_module
from tests.parameter_server.ray.ray_parts import LLAMA, batches, config

pytestmark = [pytest.mark.ray, pytest.mark.full]

MACHINE = {"num_cpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture
def machines():
    ray_module()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=MACHINE)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def wide():
    """Parameters of which pieces travel by the object stores: more than 100 kB."""
    given = config()
    sizes = LLAMA["config"] | {"hidden_size": 128, "intermediate_size": 512}
    return given | {"model": {"family": "llama", "config": sizes}}


def trained(engine, given):
    return [float(engine.train_batch(batch)["loss"]) for batch in given]


def test_a_machine_that_fails_takes_the_run_back_to_its_checkpoint(
    machines, wide, tmp_path, caplog
):
    second = machines.add_node(**MACHINE)
    engine = actors.initialize(config=wide, address=machines.address)
    try:
        given = batches(8)
        losses = trained(engine, given)
        engine.reset()
        assert trained(engine, given[:3]) == losses[:3]
        engine.save_checkpoint(tmp_path)
        engine.wait()
        machines.remove_node(second, allow_graceful=False)
        machines.add_node(**MACHINE)
        with pytest.raises(StateLostError), caplog.at_level(logging.WARNING):
            trained(engine, given[3:])
        engine.load_checkpoint(tmp_path)
        assert trained(engine, given[3:]) == losses[3:]
    finally:
        engine.close()
