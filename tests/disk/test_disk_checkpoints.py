"""Checkpoints of state on a disk: in the format of any other, saved and restored in both ways."""

import errno
import os
import threading
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxspeed.disk.disk_array import in_memory
from jaxspeed.errors import CheckpointError, DiskError
from jaxspeed.placement.memory_kinds import on_device
from tests.disk.disk_models import assert_same_state, batch_of, engine, program, values_of

BF16 = {"bf16": {"enabled": True}}
EMA = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.9}}
EIGHT_BIT = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}, "width": 72}
ON_EIGHT = {"stage": 2, "mesh": {"data": 2}}
TENSOR = {"stage": 3, "mesh": {"data": 2, "tensor": 2}}


def trained(made, steps=2):
    started = engine(made)
    for step in range(steps):
        started.train_batch(batch_of(made.batch.train, step))
    return started


def logical(started):
    """Parameters and averages by path, and moments, without padding."""
    made, state = started.program, started.state
    values = {f"params/{path}": np.asarray(x) for path, x in started.parameters.items()}
    if state.ema:
        values |= {f"ema/{path}": np.asarray(x) for path, x in started.ema_parameters.items()}
    decode = jax.jit(lambda opt: made.layout.logical(on_device(opt)))
    opt = decode(in_memory(state.opt))
    pairs = zip(made.layout.places, jax.tree.leaves(opt), strict=True)
    return values | {f"opt/{path}": np.asarray(x) for path, x in pairs}


def assert_restored(ours, theirs):
    ours, theirs = logical(ours), logical(theirs)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)


@pytest.mark.default_cases("into the tier")
@pytest.mark.parametrize(
    ("saved", "loaded", "more"),
    [
        pytest.param(("cpu", TENSOR), ("nvme", ON_EIGHT), EMA | BF16, id="into the tier"),
        pytest.param(("nvme", TENSOR), ("none", ON_EIGHT), EMA | BF16, id="out of the tier"),
        pytest.param(("nvme", {}), ("nvme", TENSOR), EMA | BF16, id="onto another mesh"),
        pytest.param(("nvme", ON_EIGHT), ("nvme", {}), {}, id="fp32"),
        pytest.param(("nvme", ON_EIGHT), ("cpu", {}), EIGHT_BIT, id="8 bits"),
        pytest.param(("none", {}), ("nvme", ON_EIGHT), EIGHT_BIT, id="8 bits into the tier"),
    ],
)
def test_checkpoints_are_restored_into_and_out_of_the_tier(tmp_path, saved, loaded, more):
    first = trained(program(saved[0], tmp_path / "a", **saved[1], **more))
    first.save_checkpoint(tmp_path / "checkpoints")
    first.wait()
    other = engine(program(loaded[0], tmp_path / "b", **loaded[1], **more))
    tag, _ = other.load_checkpoint(tmp_path / "checkpoints")
    assert tag is not None
    assert_restored(other, first)


def test_a_run_resumes_bitwise_from_a_save_beside_the_next_step(tmp_path, monkeypatch):
    made = program("nvme", tmp_path / "a", bucket=40, **BF16, **EMA)
    first, read_all = trained(made), made.update.tier.read_all

    def late():
        time.sleep(0.3)
        yield from read_all()

    monkeypatch.setattr(made.update.tier, "read_all", late)
    first.save_checkpoint(tmp_path / "checkpoints")
    for step in range(2, 4):
        first.train_batch(batch_of(made.batch.train, step))
    first.wait()
    again = engine(program("nvme", tmp_path / "b", bucket=40, **BF16, **EMA))
    again.load_checkpoint(tmp_path / "checkpoints")
    assert int(again.state.step) == 2
    for step in range(2, 4):
        again.train_batch(batch_of(made.batch.train, step))
    assert_same_state(again.state, first.state)


def test_an_update_waits_for_a_checkpoint_that_is_being_written(tmp_path):
    made = program("nvme", tmp_path, **BF16)
    started = trained(made)
    hold, before = made.update.tier.hold(int(started.state.step)), values_of(started.state.opt)
    step = threading.Thread(
        target=started.train_batch, args=[batch_of(made.batch.train, 2)], daemon=True
    )
    step.start()
    step.join(0.5)
    assert step.is_alive()
    name = "opt/0/mu/table"
    np.testing.assert_array_equal(
        np.asarray(made.update.tier.arrays[name]), by_name(made, before)[name]
    )
    hold.close()
    step.join()
    assert made.update.tier.last.waiting > 0.3


def by_name(made, values):
    return dict(zip((f"opt/{path}" for path in made.layout.places), values, strict=True))


def test_a_bad_disk_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    made = program("nvme", tmp_path / "a", **BF16)
    started = trained(made)
    started.save_checkpoint(tmp_path / "checkpoints")
    started.wait()

    def broken(handle, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    started.save_checkpoint(tmp_path / "checkpoints", tag="bad")
    with pytest.raises((CheckpointError, DiskError), match="EIO"):
        started.wait()
    monkeypatch.undo()
    started.train_batch(batch_of(made.batch.train, 2))  # the hold has ended
    tag, _ = started.load_checkpoint(tmp_path / "checkpoints")
    assert tag == "step-00000002"


def test_orbax_reads_what_was_written_bucket_by_bucket(tmp_path):
    made = program("nvme", tmp_path / "a", **TENSOR, **BF16)
    started = trained(made)
    tag = started.save_checkpoint(tmp_path / "checkpoints")
    started.wait()
    at = SingleDeviceSharding(jax.devices()[0])
    with ocp.PyTreeCheckpointer() as orbax:
        folder = tmp_path / "checkpoints" / tag / "arrays"
        names = orbax.metadata(folder).item_metadata.tree
        how = {name: ocp.ArrayRestoreArgs(sharding=at) for name in names}
        read = orbax.restore(folder, restore_args=how)
    for path, x in started.parameters.items():
        full = tuple(map(slice, x.shape))
        np.testing.assert_array_equal(np.asarray(read[f"params/{path}"])[full], np.asarray(x))
