"""A mesh axis is one row of the table: one that is added trains and is searched like `data`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from jaxspeed.axes import axis_names, position_axes, sample_axes, storing_axes, summing_axes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-m", "tests.train.added_axis", str(tmp_path_factory.mktemp("run"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled
def test_every_stage_trains_as_plain_flax_does(child):
    assert len(child["trained"]) == 8
    for case, found in child["trained"].items():
        assert found["losses"] < 1e-6 and found["final"] < 1e-6, case
        assert found["ranks"] == 4


@pytest.mark.sampled
def test_zero_stores_over_the_axis(child):
    stored = {case: found["moments"] for case, found in child["trained"].items()}
    assert stored["island, stage 0"] == []
    assert all(stored[f"island, stage {stage}"] == ["data", "island"] for stage in (1, 2, 3))


@pytest.mark.sampled
def test_an_axis_in_a_parameters_own_spec_drops_out_of_its_storage(child):
    found = child["trained"]
    assert all(found[f"team, stage {stage}"]["read"] == ["team"] for stage in (0, 1, 3))
    assert found["team, stage 0"]["moments"] == ["team"]  # sharded as the parameter is
    assert found["team, stage 3"]["moments"] == ["data", "team"]


@pytest.mark.sampled
def test_rings_refuse_a_parameter_that_no_rank_has(child):
    assert "up/bias is sharded over an axis that shards the batch" in child["refused"]


@pytest.mark.sampled
def test_the_search_finds_meshes_with_the_axis(child):
    sizes = child["searched"]
    assert {"island", "team"} <= set(sizes[0])
    assert any(mesh["island"] > 1 for mesh in sizes) and any(mesh["data"] > 1 for mesh in sizes)


@pytest.mark.fast
def test_what_the_axes_of_the_table_do():
    assert axis_names() == ("pipe", "replica", "data", "seq", "expert", "tensor")
    assert sample_axes() == ("replica", "data", "expert") and position_axes() == ("seq",)
    assert summing_axes() == ("replica", "data", "seq", "expert")
    assert storing_axes() == ("data", "seq", "expert")
    of_experts = PartitionSpec("expert", None, ("tensor", "data"))
    assert summing_axes(of_experts) == ("replica", "seq") and storing_axes(of_experts) == ("seq",)
