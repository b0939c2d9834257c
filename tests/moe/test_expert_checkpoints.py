"""Checkpoints of experts: saved on one mesh and continued on others, with their moments."""

from typing import Any

import numpy as np
import pytest

import jaxspeed
from tests.moe.dense_experts import DenseMixture, batches, config, loss_fn
from tests.support.covering import covering

MESHES: dict[str, dict[str, int]] = {
    "expert 4": {"expert": 4},
    "expert 2": {"expert": 2},
    "expert 1": {},
    "tensor 2": {"tensor": 2},
    "expert 2, tensor 2": {"expert": 2, "tensor": 2},
}
CASES = [(mesh, stage) for mesh in MESHES for stage in (0, 1, 3)]
DEFAULT = [("expert 2", 3), ("expert 1", 0), ("tensor 2", 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, losses of the steps after it) of a run with expert 4."""
    folder = tmp_path_factory.mktemp("saved")
    engine = jaxspeed.initialize(DenseMixture, loss_fn, config(3, mesh=MESHES["expert 4"]))
    for batch in batches():
        engine.train_batch(batch)
    engine.save_checkpoint(folder)
    engine.wait()
    return folder, [float(engine.train_batch(batch)["loss"]) for batch in batches()]


@pytest.mark.default_cases("expert 1-0")
@pytest.mark.parametrize(("mesh", "stage"), covering(CASES, DEFAULT))
def test_a_run_continues_on_another_mesh(mesh, stage, saved):
    folder, expected = saved
    engine = jaxspeed.initialize(DenseMixture, loss_fn, config(stage, mesh=MESHES[mesh]))
    engine.load_checkpoint(folder)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.default_cases("zero0")
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        pytest.param(
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
                "stage3_param_persistence_threshold": 0,
            },
            id="stage 3, parameters too",
        ),
    ],
)
def test_experts_in_host_memory_train_alike(zero):
    given = config(0, mesh={"expert": 2}, zero_optimization=zero)
    engine = jaxspeed.initialize(DenseMixture, loss_fn, given)
    plain = jaxspeed.initialize(DenseMixture, loss_fn, config(0, mesh={"data": 8}))
    ours, theirs = (
        [float(each.train_batch(batch)["loss"]) for batch in batches()] for each in (engine, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert engine.placements["blocks/0/up"].opt.memory_kind == "pinned_host"
    for path, value in plain.parameters.items():
        np.testing.assert_allclose(engine.parameters[path], value, atol=2e-6, rtol=1e-5)
