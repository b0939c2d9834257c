"""Training with positions sharded over `seq` equals plain JAX on one device."""

from typing import Any

import pytest

from jaxspeed.placement.specs import spec_axes
from tests.sequence.tiny_llama import assert_equal, batches, config, plain, trained
from tests.support.covering import covering

KINDS = ("gather", "ulysses", "ring", "both", "auto")
MESHES = ("seq 2, data 4", "seq 4, data 2", "seq 8", "seq 2, tensor 2", "seq 2, pipe 2")
CASES = [
    (kind, mesh, stage, accumulation, remat)
    for kind in KINDS
    for mesh in MESHES
    for stage in range(4)
    for accumulation in (1, 2)
    for remat in ("none", "full")
    # A pipeline needs a micro-batch for each stage; 2 devices form no groups of Ulysses.
    if accumulation > 1 or "pipe" not in mesh
    if kind != "both" or "seq 2" not in mesh
]
DEFAULT = [
    ("gather", "seq 4, data 2", 1, 2, "none"),
    ("ulysses", "seq 8", 3, 1, "none"),
    ("ring", "seq 2, data 4", 2, 2, "full"),
    ("both", "seq 8", 0, 1, "none"),
    ("auto", "seq 2, tensor 2", 3, 2, "full"),
    ("ulysses", "seq 2, tensor 2", 0, 2, "none"),
    ("auto", "seq 2, pipe 2", 1, 2, "none"),
]


def mesh_of(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split() for part in text.split(", "))}


@pytest.fixture(scope="module")
def expected() -> Any:
    return plain(batches())


@pytest.mark.default_cases("ulysses-seq 8-3-1-none")
@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "accumulation", "remat"), covering(CASES, DEFAULT)
)
def test_training_equals_plain_jax(kind, mesh, stage, accumulation, remat, expected):
    parallel = {"sequence": {"kind": kind}, "remat": remat}
    settings = config(stage, accumulation, mesh=mesh_of(mesh), parallel=parallel)
    engine, run = trained(batches(), settings)
    assert_equal(run, expected)
    sizes = engine.program.mesh.shape
    stored = {axis for axis in ("data", "seq") if sizes[axis] > 1}
    for path, row in engine.placements.rows.items():
        added = spec_axes(row.opt.spec if row.opt else row.updated.spec) - {"tensor", "pipe"}
        assert added == (stored if stage else set()), path
    for at in engine.program.batch_shardings(batches()[0]).values():
        assert spec_axes(at.spec[1:]) == {"seq"}
