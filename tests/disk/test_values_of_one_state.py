"""The values on a disk are those of one state: no other is saved, continued from, or read."""

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.errors import DiskError
from tests.disk.disk_models import assert_same_state, batch_of, engine, program, values_of

BF16 = {"bf16": {"enabled": True}}
EMA = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.9}}


@pytest.fixture
def started(tmp_path):
    made = program("nvme", tmp_path / "disk", **BF16, **EMA)
    started = engine(made)
    step(started)
    return started


def step(started):
    return started.train_batch(batch_of(started.program.batch.train, int(started.state.step)))


def test_averages_as_parameters_leave_the_masters_as_they_are(started):
    before = values_of(started.state)
    averaged = started.averaged
    for path, average in started.ema_parameters.items():
        np.testing.assert_array_equal(np.asarray(averaged.master[path]), average)
        np.testing.assert_array_equal(averaged.params[path], average.astype(jnp.bfloat16))
    for a, b in zip(values_of(started.state), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_interrupted_step_is_neither_saved_nor_continued_from(started, tmp_path):
    started.save_checkpoint(tmp_path / "saved")
    started.wait()
    expected = [float(step(started)["loss"]) for _ in range(2)]
    started.load_checkpoint(tmp_path / "saved")
    tier = started.program.update.tier
    tier.update(1, lambda bucket, stored: stored)  # and what follows it in a step does not happen
    with pytest.raises(DiskError, match="is of step 2, not of step 1: a step was interrupted"):
        started.save_checkpoint(tmp_path / "saved")
    with pytest.raises(DiskError, match="is of step 2, not of step 1"):
        step(started)
    started.load_checkpoint(tmp_path / "saved")
    assert [float(step(started)["loss"]) for _ in range(2)] == expected


def test_an_earlier_state_is_refused(started):
    earlier = jax.tree.map(jnp.copy, started.state)
    step(started)
    with pytest.raises(DiskError, match="is of step 2, not of step 1"):
        started.state = earlier
    step(started)


def test_another_state_of_the_same_program_ends_the_first(started):
    started.program.init(1)
    with pytest.raises(DiskError, match="another state of the same program has replaced it"):
        step(started)


def test_a_file_that_was_changed_is_neither_saved_nor_read(started, tmp_path):
    started.save_checkpoint(tmp_path / "saved")
    started.wait()
    expected = values_of(started.state)
    with open(started.program.update.tier.folder / "state", "r+b") as other:
        other.write(b"x")
    for use in (
        lambda: started.save_checkpoint(tmp_path / "saved", tag="changed"),
        lambda: started.parameters,
        lambda: step(started),
    ):
        with pytest.raises(DiskError, match="was changed by another process"):
            use()
    started.load_checkpoint(tmp_path / "saved")
    for a, b in zip(values_of(started.state), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_are_replaced_once_a_checkpoint_is_written(started):
    tier, value = started.program.update.tier, np.full(7, 3.0, np.float32)
    before = np.asarray(started.state.master["odd"])
    hold = tier.hold(1)
    replaced = threading.Thread(target=setattr, args=(started, "parameters", {"odd": value}))
    replaced.start()
    replaced.join(0.3)
    assert replaced.is_alive()
    np.testing.assert_array_equal(np.asarray(started.state.master["odd"]), before)
    hold.close()
    replaced.join()
    np.testing.assert_array_equal(np.asarray(started.state.master["odd"]), value)


def test_parameters_that_are_replaced_in_part_are_lost(started, tmp_path, monkeypatch):
    calls, real = [], os.pwritev

    def broken(handle, buffers, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(DiskError, match="EIO"):
        started.parameters = {"table": 2 * np.asarray(started.state.master["table"])}
    monkeypatch.undo()
    with pytest.raises(DiskError, match="was lost earlier"):
        started.save_checkpoint(tmp_path / "saved")
    with pytest.raises(DiskError, match="was lost earlier"):
        started.eval_batch(batch_of(started.program.batch.train))
    started.close()


def test_a_restore_that_fails_is_lost_until_one_succeeds(started, tmp_path, monkeypatch):
    started.save_checkpoint(tmp_path / "saved")
    started.wait()
    expected = values_of(started.state)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(DiskError, match="ended after"):
        started.load_checkpoint(tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(DiskError, match="was lost earlier"):
        step(started)
    started.load_checkpoint(tmp_path / "saved")
    for a, b in zip(values_of(started.state), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_full_disk_is_named_before_the_first_step(tmp_path, monkeypatch):
    def full(handle, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = program("nvme", tmp_path, **BF16)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=f"needs {made.update.tier.nbytes:,} bytes there, and"):
        made.init(0)
    monkeypatch.undo()
    step(engine(made))


def test_a_closed_engine_gives_the_disk_back(started):
    tier = started.program.update.tier
    folder = tier.folder
    started.close()
    assert not folder.exists()
    with pytest.raises(DiskError, match="its engine was closed"):
        _ = started.parameters
    other = engine(started.program)
    fresh = engine(program("nvme", folder.parent / "other", **BF16, **EMA))
    assert_same_state(other.state, fresh.state)


def test_a_relative_folder_is_that_of_the_time_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = program("nvme", "state", **BF16)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    made.init(0)
    assert made.update.tier.folder.parent == tmp_path / "state"


def test_a_check_that_would_fill_the_memory_is_refused(started, monkeypatch):
    from jaxspeed.engine import check

    monkeypatch.setattr(check.Path, "read_text", lambda *_: "MemAvailable:       1 kB\n")
    with pytest.raises(Exception, match="check fewer layers"):
        started.check(batch_of(started.program.batch.train))
