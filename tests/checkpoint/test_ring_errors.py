"""Checkpoints of a run around rings: any other takes them, and the same goes on to the bit."""

import jax
import numpy as np
import pytest

from tests.checkpoint.states import NAMES, assert_same, engine, held, steps
from tests.support.covering import covering

AROUND = {"logical_axes": NAMES, "data_reduction": "ring"}
PACKED = {**AROUND, "ring_wire": "int8", "ring_bucket_bytes": 256}
BY_XLA = {"logical_axes": NAMES}


def errors_of(run):
    return {name: np.array(x) for name, x in run.state.ring_errors.items()}


def loaded(folder, **settings):
    """An engine that continued from the folder, and the notes."""
    run = engine(**settings)
    run.load_checkpoint(folder)
    return run


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2])
def test_packed_rings_go_on_to_the_bit(tmp_path, stage):
    run = engine(stage, parallel=PACKED)
    steps(run, 0, 2)
    run.save_checkpoint(tmp_path)
    run.wait()
    saved = errors_of(run)
    assert len(saved) > 1
    assert any(x.any() for x in saved.values())
    losses, last = steps(run, 2, 3), held(run)
    run.reset()
    assert not any(x.any() for x in errors_of(run).values())
    run.load_checkpoint(tmp_path)
    assert_same(errors_of(run), saved)
    assert steps(run, 2, 3) == losses
    assert_same(held(run), last)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"stage": 0, "parallel": PACKED}, id="stage", marks=pytest.mark.full),
        pytest.param({"stage": 2, "parallel": PACKED, "devices": 4}, id="devices"),
        pytest.param(
            {"stage": 2, "parallel": PACKED, "mesh": {"replica": 2}},
            id="replicas",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"stage": 2, "parallel": {**PACKED, "ring_bucket_bytes": 64}},
            id="buckets",
            marks=pytest.mark.full,
        ),
    ],
)
def test_errors_of_another_layout_begin_anew_with_a_note(tmp_path, settings, caplog):
    first = engine(2, parallel=PACKED)
    steps(first, 0, 2)
    first.save_checkpoint(tmp_path)
    first.wait()
    with caplog.at_level("WARNING", logger="jaxspeed"):
        second = loaded(tmp_path, **settings)
    assert "ring errors are reset to zero" in caplog.text
    assert_same(held(second), held(first))
    assert errors_of(second) and not any(x.any() for x in errors_of(second).values())
    steps(second, 2, 1)


@pytest.mark.parametrize(
    ("before", "after"),
    covering([(BY_XLA, PACKED), (PACKED, BY_XLA), (AROUND, BY_XLA)], [(PACKED, BY_XLA)]),
)
def test_every_reduction_continues_from_every_other(tmp_path, before, after):
    first = engine(3 if before == AROUND else 1, parallel=before)
    steps(first, 0, 2)
    first.save_checkpoint(tmp_path)
    first.wait()
    second = loaded(tmp_path, stage=1, parallel=after)
    assert_same(held(second), held(first))
    assert all(np.isfinite(steps(second, 2, 1)))


def test_the_table_counts_the_ring_errors_of_each_device():
    packed, plain = engine(1, parallel=PACKED), engine(1, parallel=AROUND)
    kept = sum(x.addressable_shards[0].data.nbytes for x in packed.state.ring_errors.values())
    assert packed.program.table.bytes_by_role()["other"][1] == kept > 0
    assert "other" not in plain.program.table.bytes_by_role()


def test_the_errors_of_a_device_are_its_own():
    run = engine(1, parallel=PACKED)
    for x in jax.tree.leaves(run.state.ring_errors):
        assert {shard.data.shape[0] for shard in x.addressable_shards} == {1}
