"""What an export writes is read back with nothing but the format's own description."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.interop import export
from tests.checkpoint import states

DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "U32": np.uint32, "I32": np.int32}


def read(path: Path) -> dict[str, np.ndarray]:
    """github.com/huggingface/safetensors: the length, the header, the tensors one after another."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    data = content[8 + length :]
    spans = sorted(tensor["data_offsets"] for tensor in header.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
    assert spans[-1][1] == len(data)
    return {
        name: np.frombuffer(data[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint whose arrays are padded, sharded by rows and by columns."""
    folder = tmp_path_factory.mktemp("saved")
    engine = states.engine(stage=3, bf16={"enabled": True}, mesh={"data": 4, "tensor": 2})
    engine.save_checkpoint(folder)
    engine.wait()
    return folder, {path: np.asarray(x) for path, x in engine.parameters.items()}


def test_an_export_holds_the_parameters_as_they_are_updated(saved, tmp_path):
    folder, parameters = saved
    summary = export(folder, tmp_path)
    assert summary.files == ["model.safetensors"] and summary.tensors == len(parameters)
    states.assert_same(read(tmp_path / "model.safetensors"), parameters)


def test_blocks_of_a_tensor_are_joined(saved, tmp_path, monkeypatch):
    folder, parameters = saved
    monkeypatch.setattr("jaxspeed.interop.export_values._BLOCK_BYTES", 100)
    export(folder, tmp_path)
    states.assert_same(read(tmp_path / "model.safetensors"), parameters)


def test_floating_tensors_are_cast_when_asked(saved, tmp_path):
    folder, parameters = saved
    export(folder, tmp_path, dtype="bfloat16")
    expected = {path: x.astype(ml_dtypes.bfloat16) for path, x in parameters.items()}
    states.assert_same(read(tmp_path / "model.safetensors"), expected)


def test_several_files_have_an_index_that_names_each_tensors_file(saved, tmp_path):
    folder, parameters = saved
    summary = export(folder, tmp_path, file_bytes=400)
    assert len(summary.files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in parameters.values())
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = read(tmp_path / file)[name]
    states.assert_same(found, parameters)
    assert {f.name for f in tmp_path.glob("*.safetensors")} == set(summary.files)


def test_statistics_are_exported_and_random_keys_are_named_as_left_out(tmp_path):
    engine = states.engine(model=states.Stateful)
    states.steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "c")
    engine.wait()
    summary = export(tmp_path / "c", tmp_path / "out")
    found = read(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["norm/mean"], engine.state.variables["norm/mean"])
    assert found.keys() | summary.left_out == engine.parameters.keys() | engine.state.variables
    assert summary.left_out


def test_an_earlier_export_is_not_mixed_with_a_new_one(saved, tmp_path):
    export(saved[0], tmp_path)
    with pytest.raises(jaxspeed.CheckpointError, match="contains an export already"):
        export(saved[0], tmp_path, file_bytes=400)


def test_an_export_to_where_nothing_can_be_written_is_one_error(saved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxspeed.CheckpointError, match="export failed"):
        export(saved[0], tmp_path / "file" / "out")


def test_a_dtype_that_is_none_is_refused(saved, tmp_path):
    with pytest.raises(jaxspeed.CheckpointError, match="dtype 'int8': one of float32, bfloat16"):
        export(saved[0], tmp_path, dtype="int8")
    assert not list(tmp_path.iterdir())


def test_the_safetensors_library_reads_it(saved, tmp_path):
    folder, parameters = saved
    export(folder, tmp_path)
    states.assert_same(load_file(tmp_path / "model.safetensors"), parameters)


def test_the_checkpoint_that_is_asked_for_is_exported(saved, tmp_path):
    folder, _ = saved
    tag = Checkpointer(folder).latest()
    assert export(folder, tmp_path, tag=tag).tag == tag
    with pytest.raises(jaxspeed.CheckpointError, match="no checkpoint 'x'"):
        export(folder, tmp_path / "x", tag="x")
