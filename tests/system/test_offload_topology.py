"""Offload as TPUs compile it: host memory holds the optimizer's state once, the device a layer of
it, and host transfers are those counted in the traced step.

XLA:CPU does not tell the two memories apart.
"""

from typing import Any

import pytest

from tests.support.topology import run_on_topology

pytestmark = pytest.mark.full  # minutes of compiling

EMBED, LAYERS = 1024, 16
SIZES = {
    "hidden_size": EMBED,
    "num_attention_heads": 8,
    "num_hidden_layers": LAYERS,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}
MESHES = {
    "one device": (1, {"data": 1}, 0, 1),
    "data 4, stage 1": (4, {"data": 4}, 1, 1),
    "data 4, stage 3": (4, {"data": 4}, 3, 1),
    "data 2 x tensor 2, stage 2": (4, {"data": 2, "tensor": 2}, 2, 1),
    "pipe 2 x data 2, stage 3": (4, {"pipe": 2, "data": 2}, 3, 4),
}


def figures(name: str, offloaded: bool, where: str = "device") -> dict[str, int]:
    count, mesh, stage, micro_batches = MESHES[name]
    case = {
        "count": count,
        "sizes": SIZES,
        "seq": 256,
        "mesh": mesh,
        "stage": stage,
        "mixed": True,
        "micro_batches": micro_batches,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu" if offloaded else "none", "where": where},
        },
    }
    target = "tests.system.offload_programs:bytes_of"
    return run_on_topology(target, "v5e:2x2", cases={"it": case})["it"]


@pytest.mark.parametrize("name", MESHES)
def test_the_state_waits_in_host_memory_and_a_device_holds_a_layer_of_it(name):
    resident, offloaded = (figures(name, each) for each in (False, True))
    waiting = offloaded["state_in_host"]
    assert offloaded["host_argument_bytes"] == pytest.approx(waiting, rel=0.01)
    # In place: what comes out lies where what went in lay, and there is no third.
    assert offloaded["host_alias_bytes"] == offloaded["host_argument_bytes"]
    assert offloaded["host_temp_bytes"] <= 0.01 * waiting
    assert resident["host_argument_bytes"] == 0
    # On the device stay the 16-bit parameters, 2 bytes each beside 12 that wait.
    assert offloaded["argument_bytes"] == pytest.approx(waiting / 6 * _copies(name), rel=0.05)
    # A layer of masters and moments, and as much on the way in as out.
    layer = waiting / LAYERS
    assert offloaded["temp_bytes"] <= resident["temp_bytes"] + 2 * layer


@pytest.mark.parametrize("name", ["one device", "data 4, stage 1", "data 4, stage 3"])
def test_the_hosts_cores_update_where_the_state_lies(name):
    resident = figures(name, False)
    device, host = (figures(name, True, where) for where in ("device", "host"))
    assert host["host_argument_bytes"] == device["host_argument_bytes"]
    assert host["host_alias_bytes"] == host["host_argument_bytes"]
    assert host["argument_bytes"] == device["argument_bytes"]
    # Gradients and new parameters of a piece, and nothing of masters and moments.
    assert host["temp_bytes"] <= resident["temp_bytes"] + device["state_in_host"] / LAYERS


ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
TRANSFERS: dict[str, dict[str, Any]] = {
    "optimizer": {
        "mesh": {"data": 4},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    },
    # Saved activations are sharded over `tensor` because layer norms' inputs are.
    "activations, sequence-parallel": {
        **ON_HOST,
        "mesh": {"data": 2, "tensor": 2},
        "parallel": {"sequence_parallel_activations": True},
    },
    # Of the empty buffer of a stage's activations, which is copied to the host, each has its own.
    "activations of stages": {**ON_HOST, "mesh": {"data": 2, "pipe": 2}, "micro_batches": 4},
}


@pytest.mark.parametrize("name", TRANSFERS)
def test_host_transfers_are_those_of_the_compiled_step(name):
    few = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512}
    case = {"sizes": SIZES | few, "seq": 128, "micro": 2, "micro_batches": 1, "mixed": True}
    found = run_on_topology(
        "tests.system.offload_programs:transfers_of", "v5e:2x2", count=4, **case | TRANSFERS[name]
    )
    assert found["traced"] == found["compiled"]
    assert min(found["compiled"].values()) > 100_000


def _copies(name: str) -> int:
    """On how many devices of those that share a master each 16-bit parameter lies."""
    _, mesh, stage, _ = MESHES[name]
    return mesh["data"] if stage in (1, 2) else 1
