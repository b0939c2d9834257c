"""Checkpoints of a quantized base: its codes on every mesh, its values in plain storage."""

import json

import jax
import numpy as np
import pytest
from etils import epath

from jaxspeed.checkpoint import Checkpointer
from jaxspeed.checkpoint.header import read_header
from jaxspeed.checkpoint.manifest import read_manifest
from jaxspeed.interop.export_values import CheckpointValues, StateValues
from tests.train.test_quantized_base import MESHES, batch, by_layer, by_name, engine, is_base


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(an engine after a step, the folder of its checkpoint)."""
    folder = tmp_path_factory.mktemp("quantized")
    made = engine("stacked", 3)
    made.train_batch(batch())
    checkpoints = Checkpointer(folder)
    checkpoints.save(made.program, made.state, tag="first")
    checkpoints.close()
    return made, folder


def restored(made, folder):
    found = Checkpointer(folder).restore(made.program, tag="first")
    made.state = found.state
    return found


@pytest.mark.sampled
def test_it_resumes_with_the_same_codes_on_another_mesh(saved):
    made, folder = saved
    leaves = json.loads((folder / "first" / "checkpoint.json").read_text())["leaves"]
    assert leaves["params/layers/out"]["codec"] == "nf4 blocks of 64 double of 2 x 1 dims"
    other = engine("stacked", 1, MESHES["both"], gradient_accumulation_steps=2)
    assert not restored(other, folder).notes
    found = by_layer(other)
    for key, expected in by_layer(made).items():
        for part, array in expected.items():
            own = found[key][part]
            inside = tuple(slice(min(pair)) for pair in zip(own.shape, array.shape, strict=True))
            np.testing.assert_array_equal(own[inside], array[inside], f"{key} {part}")
    other.train_batch(batch(1))


@pytest.mark.sampled
def test_its_values_become_plain_parameters(saved):
    made, folder = saved
    other = engine("stacked", 1, plain=True)
    assert not restored(other, folder).notes
    values = by_name(made.parameters)
    for path, x in by_name(other.parameters).items():
        np.testing.assert_allclose(x, values[path], rtol=0, atol=1e-6, err_msg=path)
    assert not any(isinstance(x, dict) for x in other.state.params.values())


@pytest.mark.sampled
def test_the_table_and_live_arrays_have_the_bytes_of_the_codes(saved):
    made, _ = saved
    weights = sum(x.size for path, x in by_name(made.parameters).items() if is_base(path))
    arrays = {path: x for path, x in made.state.params.items() if is_base(path)}
    live = sum(x.nbytes for x in jax.tree.leaves(arrays))
    # Half a byte each, one for each scale, and groups and offsets.
    assert weights * (0.5 + 1 / 64) <= live < weights * (0.5 + 1 / 64) * 1.02
    row = made.placements["layers/up"]
    stored = made.placements.stored(row, row.param)
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(arrays["layers/up"])]
    assert stored.device_bytes == sum(x.nbytes for x in shards)
    assert "nf4 blocks of 64 double of f32" in str(made.placements)


@pytest.mark.sampled
def test_an_export_decodes_a_stack_layer_by_layer(saved):
    """From a checkpoint and from an engine, so that a host holds no stack in full precision."""
    made, folder = saved
    source = epath.Path(folder) / "first"
    header = read_header(source, read_manifest(source).format)
    names = {path: f"params/{path}" for path in made.placements.parameters}
    expected = made.parameters["layers/up"]
    for values in (
        CheckpointValues(source, header, names),
        StateValues(made.program, made.state),
    ):
        found = np.zeros(expected.shape, np.float32)
        for index, block in values.blocks("layers/up"):
            assert len(block) == 1
            found[index] = block
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
