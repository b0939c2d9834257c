"""What an engine offers besides steps, with state on a disk: it works, or is refused by name."""

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.disk.disk_array import DiskArray
from jaxspeed.interop.export_values import StateValues
from jaxspeed.offload import disk_buckets
from tests.disk.disk_models import batch_of, engine, program

BF16 = {"bf16": {"enabled": True}}
EMA = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.9}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Engines of the same steps, with state on a disk and in memory."""
    folder = tmp_path_factory.mktemp("disk")
    more = {"stage": 2, "mesh": {"data": 2}, **BF16, **EMA}
    engines = [engine(program(at, folder, **more)) for at in ("nvme", "none")]
    for started in engines:
        started.train_batch(batch_of(started.program.batch.train))
    return engines


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        np.testing.assert_allclose(np.asarray(x), np.asarray(theirs[path]), rtol=1e-5, atol=1e-6)


def test_the_state_shows_what_is_on_the_disk(pair):
    ours, theirs = pair
    state = ours.state
    assert all(isinstance(x, DiskArray) for x in (*state.master.values(), *state.ema.values()))
    table, in_memory = state.master["table"], theirs.state.master["table"]
    assert (table.shape, table.dtype) == (in_memory.shape, in_memory.dtype)
    assert table.sharding.spec == in_memory.sharding.spec
    np.testing.assert_allclose(np.asarray(table), in_memory, rtol=1e-5)


def test_parameters_and_averages_are_read_from_the_disk_and_replaced(pair):
    ours, theirs = pair
    assert_close(ours.parameters, theirs.parameters)
    assert_close(ours.ema_parameters, theirs.ema_parameters)
    before = np.asarray(ours.parameters["scale"])
    for started in pair:
        started.parameters = {"scale": 2 * before}
    np.testing.assert_array_equal(np.asarray(ours.parameters["scale"]), 2 * before)
    batch = batch_of(ours.program.batch.train, 1)
    np.testing.assert_allclose(
        ours.train_batch(batch)["loss"], theirs.train_batch(batch)["loss"], rtol=1e-5
    )
    assert_close(ours.parameters, theirs.parameters)


def test_check_diagnose_and_the_compiled_step_work_from_the_disk(pair):
    ours, _ = pair
    batch = batch_of(ours.program.batch.train, 2)
    step = int(ours.state.step)
    report = ours.check(batch)
    assert report.ok, str(report)
    assert "finite" in str(ours.diagnose(batch))
    compiled = ours.compiled(batch)
    assert compiled.phase == "gradients" and [*compiled.on_host] == ["update on disk"]
    ours.eval_batch(batch)
    assert int(ours.train_batch(batch)["skipped_steps"]) == 0 and int(ours.state.step) == step + 1


def test_an_export_reads_parameter_by_parameter(pair):
    ours, _ = pair
    values = StateValues(ours.program, ours.state)
    for path, x in ours.parameters.items():
        full = np.zeros(x.shape, np.float32)
        for index, block in values.blocks(path):
            full[index] = block
        np.testing.assert_array_equal(full, np.asarray(x))


def test_engine_step_is_refused_since_a_step_waits_for_the_host(pair):
    with pytest.raises(jaxspeed.JaxspeedError, match="gradients, update on disk, settle"):
        _ = pair[0].step


def test_a_group_size_of_0_is_the_largest_bucket(tmp_path):
    sizes = {size: program("nvme", tmp_path, bucket=size, **BF16) for size in (0, 50, 1 << 30)}
    counts = {size: len(made.update.tier.buckets) for size, made in sizes.items()}
    assert counts[0] == counts[1 << 30] < counts[50]


def test_equal_slices_share_a_compiled_update(tmp_path):
    made = program("nvme", tmp_path, bucket=50, **BF16)
    started = engine(made)
    started.train_batch(batch_of(made.batch.train))
    update = next(p for p in made.phases if p.name == "update on disk").function
    slices = {
        tuple((p.path, p.rows and p.rows.count) for p in b.pieces) for b in made.update.tier.buckets
    }
    assert len(update._compiled) == len(slices) < len(made.update.tier.buckets)


def test_buckets_are_bounded_and_hold_each_value_once(tmp_path):
    made = program("nvme", tmp_path, bucket=50, mesh={"data": 2}, stage=1, **BF16, **EMA)
    tier = made.update.tier
    assert tier.buckets == disk_buckets.disk_buckets(made.update.streamed)
    stored = {}
    for bucket in tier.buckets:
        end = 0
        for piece in bucket.pieces:
            for x in piece.arrays:
                assert x.offset == end and x.nbytes % 4096 == 0
                end += x.nbytes
                stored[x.name] = stored.get(x.name, 0) + len(x.shards) * x.shard_bytes
        assert end == bucket.nbytes
        masters = sum(
            int(np.prod(x.shard_shape))
            for p in bucket.pieces
            for x in p.arrays
            if x.name[:6] == "params"
        )
        assert masters <= 50
    for name, x in tier.arrays.items():
        assert stored[name] == int(np.prod(x.shape)) * x.dtype.itemsize
    starts = [bucket.offset for bucket in tier.buckets]
    assert starts == [*np.cumsum([0, *(b.nbytes for b in tier.buckets)])[:-1]]
    assert jax.tree.leaves(made.state.master) == []


def test_metrics_have_the_seconds_of_each_kind_of_work(pair):
    ours, theirs = pair
    metrics = ours.train_batch(batch_of(ours.program.batch.train, 3))
    names = [f"disk_{kind}_seconds" for kind in ("read", "compute", "write")]
    assert all(0 < metrics[name] <= metrics["disk_seconds"] for name in names)
    assert sum(float(metrics[name]) for name in names) > float(metrics["disk_seconds"]) / 2
    assert "disk_seconds" not in theirs.train_batch(batch_of(theirs.program.batch.train, 3))
