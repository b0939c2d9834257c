"""Steps with state on a disk are those with the same buckets in memory, bitwise.

And an update is that of state in host memory, for the same gradients, within 2 units in the last
place: the compiler may contract a product and a sum in one program and not in the other.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.disk.disk_array import is_on_disk
from jaxspeed.errors import DiskError
from jaxspeed.placement.codec import PLAIN
from tests.disk.disk_models import (
    assert_same_state,
    batch_of,
    engine,
    program,
    values_of,
    with_buckets_in_memory,
)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}
EIGHT_BIT = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
EMA = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.9}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
MORE = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
TENSOR = {"data": 2, "tensor": 2}

# Pairs of stages, meshes, precisions, optimizers and what else changes an update.
CASES = {
    "0 one device": {"stage": 0, **BF16, **MORE},
    "0 fp32": {"stage": 0, "mesh": {"data": 2}, **MORE},
    "1 fp16 skipped": {"stage": 1, "mesh": {"data": 2}, **FP16},
    "2 tensor": {"stage": 2, "mesh": TENSOR, **BF16, **MORE},
    "3 tensor EMA": {"stage": 3, "mesh": TENSOR, **BF16, **EMA},
    "3 fp16 skipped": {"stage": 3, "mesh": {"data": 4}, **FP16, **MORE},
    "1 8 bits": {"stage": 1, "mesh": {"data": 2}, "width": 72, "bucket": 1000, **EIGHT_BIT, **BF16},
    "0 8 bits": {"stage": 0, "width": 72, "bucket": 1000, **EIGHT_BIT, **MORE},
    "0 Muon": {"stage": 0, "mesh": {"data": 2}, **MUON, **BF16, **MORE},
    "2 Muon": {"stage": 2, "mesh": {"data": 2}, **MUON},
    "3 Lion": {"stage": 3, "mesh": {"data": 2}, **LION, **MORE},
    "1 Lamb": {"stage": 1, "mesh": TENSOR, **LAMB, **BF16},
    "2 half": {"stage": 2, "mesh": {"data": 2}, "offload": {"ratio": 0.3}, **EMA, **BF16},
    "3 parameters in host memory": {
        "stage": 3,
        "mesh": {"data": 2},
        "zero": {"offload_param": {"device": "cpu"}},
        **BF16,
    },
    "1 on the host": {"stage": 1, "mesh": {"data": 2}, "offload": {"where": "host"}, **BF16},
}


@pytest.mark.default_cases("1 fp16 skipped", "3 tensor EMA")
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_same_buckets_in_memory(tmp_path, name):
    on_disk = program("nvme", tmp_path, **CASES[name])
    ours, theirs = engine(on_disk), engine(with_buckets_in_memory(on_disk))
    assert len(on_disk.update.tier.buckets) >= 4
    skipped = 0
    for step in range(10):
        batch = batch_of(on_disk.batch.train, step)
        a, b = ours.train_batch(batch), theirs.train_batch(batch)
        skipped += int(a["skipped"])
        for metric in ("loss", "grad_norm", "skipped"):
            np.testing.assert_array_equal(a[metric], b[metric])
    assert (0 < skipped < 10) == ("skipped" in name) and skipped in (0, int(ours.state.skipped))
    assert_same_state(ours.state, theirs.state)


def with_moments(made, state):
    """The state with moments as of many steps, the same wherever they are."""
    rng, opt = np.random.default_rng(7), made.layout.flat(state.opt)
    for path, leaf in made.layout.places.items():
        encoded = leaf.placement.codec != PLAIN
        if leaf.shape and jnp.issubdtype(leaf.placement.dtype, jnp.floating) and not encoded:
            values = np.abs(rng.normal(size=leaf.shape)).astype(leaf.placement.dtype)
            values = np.pad(values, [(0, b - a) for a, b in zip(leaf.shape, leaf.padded)])
            value = jax.device_put(values, made.table.sharding(leaf.placement))
            opt[path] = opt[path].write(value) if is_on_disk(opt[path]) else value
    return replace(state, opt=jax.tree.unflatten(made.layout.tree, opt.values()))


def updated(made, state, grads):
    """The state after an update by these gradients."""
    at = {path: made.table.sharding(made.table[path].grad) for path in grads}
    shapes = {path: made.table[path].shape(made.table[path].grad) for path in grads}
    sharded = {
        path: jax.device_put(
            np.pad(g, [(0, b - a) for a, b in zip(g.shape, shapes[path])]), at[path]
        )
        for path, g in grads.items()
    }
    from jaxspeed.traced_loss.accumulate import Sums

    one = jnp.ones(())
    sums = Sums(sharded, one, one, {})
    if made.update.tier is None:
        update = jax.jit(made.in_mesh(made.update), out_shardings=(made.shardings, None))
        return update(state, sums, state.variables)[0]
    reduced = jax.jit(made.in_mesh(made.update.reduced))(state, sums)
    _, buckets, settle = made.phases
    sums = sums._replace(grads=reduced.grads)
    state, seconds = buckets.function(state, sums, reduced)
    return settle.function(state, sums, state.variables, reduced._replace(grads={}), seconds)[0]


@pytest.mark.default_cases("3 tensor EMA")
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_state_in_host_memory(tmp_path, name):
    on_disk, in_host = (program(at, tmp_path, **CASES[name]) for at in ("nvme", "cpu"))
    rng, programs = np.random.default_rng(3), (on_disk, in_host)
    grads = {r.path: rng.normal(size=r.leaf.shape).astype(np.float32) for r in on_disk.table}
    states = [with_moments(made, made.init(0)) for made in programs]
    before = values_of(states[0])
    states = [updated(made, x, grads) for made, x in zip(programs, states)]
    for a, b, old in zip(*map(values_of, states), before, strict=True):
        if not jnp.issubdtype(a.dtype, jnp.floating):  # codes may be rounded to a neighbour
            difference = np.abs(a.astype(np.int64) - b.astype(np.int64))
            assert np.all(difference <= (a.dtype == np.uint8)) and np.mean(difference) < 0.01
            continue
        size = np.maximum.reduce([np.abs(b), np.abs(old), np.abs(b - old)])  # of the summands
        spacing = np.spacing(size.astype(np.float32)) * (1 if size.itemsize == 4 else 2**16)
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
        # The decoded moments add a product that may be contracted: 3 in one of 15,000 elements.
        assert np.all(difference <= (3 if "8 bits" in name else 2) * spacing)
        assert np.mean(difference > 2 * spacing) < 1e-3


def test_a_skipped_step_reads_and_writes_nothing(tmp_path):
    made = program("nvme", tmp_path, **FP16)
    ours = engine(made)
    before = (made.update.tier.folder / "state").stat()
    metrics = ours.train_batch(batch_of(made.batch.train))
    assert bool(metrics["skipped"]) and made.update.tier.last is None
    assert not metrics["disk_seconds"]
    after = (made.update.tier.folder / "state").stat()
    assert after.st_mtime_ns == before.st_mtime_ns


def test_the_state_is_in_a_folder_under_nvme_path(tmp_path):
    made = program("nvme", tmp_path, **BF16)
    assert not [*tmp_path.iterdir()]  # a plan leaves nothing
    state = made.init(0)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "state").stat().st_size == made.update.tier.nbytes
    assert set(state.master) == {row.path for row in made.table}
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert held <= 2 * sum(row.leaf.shape[0] * 400 for row in made.table)
    made.update.tier.close()
    assert not [*tmp_path.iterdir()]


def test_so_many_buffers_are_mapped(tmp_path):
    made = program("nvme", tmp_path, offload={"buffer_count": 3}, **BF16)
    made.init(0)
    tier = made.update.tier
    assert tier._free.qsize() == 3 == tier.options.buffers


def test_a_buffer_is_used_again_only_after_its_readers_are_done(tmp_path):
    """JAX's arrays on a CPU are views of the buffers: a slow reader sees what is read into them."""
    made = program("nvme", tmp_path, offload={"buffer_count": 3}, **BF16)
    state, tier = made.init(0), made.update.tier
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: y * 1.0 + 0.0 * i, x) + 1)
    expected = {name: np.asarray(x) + 1 for name, x in tier.arrays.items()}

    def compute(bucket, stored):
        return [{role: slow(x) for role, x in arrays.items()} for arrays in stored]

    for _ in range(3):
        tier.update(tier.step, compute)
        for name, x in tier.arrays.items():
            np.testing.assert_array_equal(np.asarray(x), expected[name])
            expected[name] = expected[name] + 1
    del state


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_failing_disk_ends_the_run_by_name_and_a_fresh_state_begins_another(
    tmp_path, monkeypatch, call
):
    import errno
    import os

    made = program("nvme", tmp_path, **BF16)
    ours, batch = engine(made), batch_of(made.batch.train)
    ours.train_batch(batch)
    calls, real = [], getattr(os, call)

    def broken(handle, buffers, offset):
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(DiskError, match=r"\(EIO\).*newest checkpoint restores"):
        ours.train_batch(batch)
    monkeypatch.undo()
    with pytest.raises(DiskError, match="was lost earlier"):
        ours.train_batch(batch)
    with pytest.raises(DiskError, match="was lost earlier"):
        _ = ours.parameters
    ours.reset()
    ours.train_batch(batch)
    assert made.update.tier._free.qsize() == 4  # no buffer was lost


def test_a_file_that_another_process_changes_is_named(tmp_path):
    made = program("nvme", tmp_path, **BF16)
    ours, batch = engine(made), batch_of(made.batch.train)
    ours.train_batch(batch)
    with open(made.update.tier.folder / "state", "r+b") as other:
        other.write(b"x")
    with pytest.raises(DiskError, match="was changed by another process"):
        ours.train_batch(batch)
