"""Other meshes than data alone: replicas, tensor parallelism, fewer devices."""

import jax
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from tests.train.cases import CASES, EXAMPLE, squared_error
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    config,
    leaf_differences,
    plain,
    run,
    snapshot,
    whole_difference,
)

MESHES = [
    pytest.param("gpt2", {"replica": 2, "data": 4}, 1, "sgd", 8, marks=pytest.mark.full),
    ("dropout", {"replica": 2, "data": 4}, 3, "adam", 8),
    pytest.param("gpt2", {"data": 4, "tensor": 2}, 3, "adam", 4, marks=pytest.mark.full),
    pytest.param("llama", {"data": 4, "tensor": 2}, 1, "sgd", 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "mesh", "stage", "optimizer", "ranks"), MESHES)
def test_a_mesh_trains_as_one_device_does(name, mesh, stage, optimizer, ranks):
    case = CASES[name]
    reference = plain(case, 4, optimizer, ranks=ranks)
    ours = run(case, stage, 4, optimizer, mesh=mesh)
    assert_losses_equal(ours, reference, 1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, reference) <= 1e-4
    if optimizer == "sgd":
        assert max(leaf_differences(case, ours, reference).values()) <= 1e-5


@pytest.mark.default_cases("mesh1")
@pytest.mark.parametrize("mesh", [{"data": 4, "tensor": 2}, {"replica": 2, "data": 4}])
def test_replicas_and_tensor_ranks_share_the_weights_as_asked(mesh):
    """ZeRO cuts over `data` alone; `tensor` cuts what the model names; `replica` holds copies."""
    ours = run(CASES["gpt2"], 3, 1, "sgd", steps=0, mesh=mesh)
    kernel = ours.engine.state.params["blocks/mlp/up/kernel"]
    parts = {str(shard.index) for shard in kernel.addressable_shards}
    assert len(parts) == mesh["data"] * mesh.get("tensor", 1)


INITIAL_MESHES = [{}, {"data": 4, "tensor": 2}, {"replica": 4, "data": 2}]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.full), "unlike blocks"])
def test_initial_weights_are_the_factorys_on_every_mesh(name):
    case = CASES[name]
    state = nnx.state(case.model(nnx.Rngs(3)), nnx.Param)
    flat = {"/".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(state)}
    whole = {"infer_tensor_cuts": "never"}  # blocks that name no dim
    starts = [
        run(case, 3, 1, "sgd", steps=0, mesh=mesh, parallel=whole).first for mesh in INITIAL_MESHES
    ]
    for path, value in flat.items():
        # One multiplication in a compiled initializer may round otherwise: half a unit of 2^-23.
        np.testing.assert_allclose(starts[0][path], value, rtol=2**-22, atol=1e-9, err_msg=path)
        for other in starts[1:]:
            np.testing.assert_array_equal(other[path], starts[0][path], err_msg=path)


def test_linen_and_pairs_start_from_the_seeds_key():
    linen, pair = CASES["linen"], CASES["pair"]
    expected = linen.model.init(jax.random.key(3), EXAMPLE["x"], train=False)["params"]
    start = run(linen, 3, 1, "sgd", steps=0).first
    np.testing.assert_allclose(start["Dense_0/kernel"], expected["Dense_0"]["kernel"], rtol=2**-22)
    start = run(pair, 3, 1, "sgd", steps=0).first
    init, _ = pair.model
    np.testing.assert_allclose(start["head"], init(jax.random.key(3))["head"], rtol=2**-22)


@pytest.mark.sampled
def test_one_device_is_a_mesh_too():
    case = CASES["batch statistics"]
    batches = case.batches(4)[:3]
    engine = jaxspeed.initialize(
        case.model,
        squared_error,
        config(3, 4, len(batches[0]["x"])),
        case.optimizer("sgd"),
        devices=jax.devices()[:1],
    )
    for batch in batches:
        engine.train_batch(batch)
    reference = plain(case, 4, "sgd", ranks=1, steps=3)
    for path, value in snapshot(engine).items():
        np.testing.assert_allclose(value, reference.last[path], rtol=1e-5, atol=1e-6)
