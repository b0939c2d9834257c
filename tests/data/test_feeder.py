"""Batches on the devices, read ahead."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.data import Feeder, placer
from jaxspeed.data.samples import ALL, ArrayRows
from jaxspeed.data.split import Split
from jaxspeed.errors import DataError
from tests.data.corpora import opened

BATCH = 16


class Numbered(ArrayRows):
    """Samples that hold their own number, and remember which were read."""

    def __init__(self, n=50, fails_at=None, wait=0.0):
        super().__init__({"x": np.arange(n, dtype=np.int32), "y": np.ones((n, 3), np.float32)})
        self.seen, self.fails_at, self.wait = [], fails_at, wait

    def read(self, ids, positions=ALL):
        time.sleep(self.wait)
        if len(ids):
            self.seen.append(ids.tolist())
            if self.fails_at is not None and len(self.seen) > self.fails_at:
                raise DataError("the disk is gone")
        return super().read(ids, positions)


def split(**how):
    return Split([Numbered(**how)], seed=0, shuffle=True)


def on_mesh(shape=(4, 2)):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor"))
    at = NamedSharding(mesh, PartitionSpec("data"))
    return lambda batch: jax.tree.map(lambda _: at, batch)


def whole(read):
    return read(slice(None))


def test_batches_come_in_order_from_any_step_and_lie_where_they_should():
    s = split()
    with Feeder(s, BATCH, placer(on_mesh(), BATCH), start_step=3) as feeder:
        for step in range(3, 9):
            batch, samples = next(feeder)
            assert samples == BATCH
            assert np.asarray(batch["x"]).tolist() == s.sample_ids(step, BATCH).tolist()
            assert batch["x"].sharding.spec == PartitionSpec("data")
            assert {shard.data.shape for shard in batch["y"].addressable_shards} == {(4, 3)}


def test_tokens_are_counted_where_there_are_tokens():
    c = opened({"source": "synthetic"})
    with Feeder(c.train, BATCH, whole) as feeder:
        assert next(feeder)[1] == BATCH * 16


def test_a_process_reads_the_rows_of_its_own_devices_only():
    """As on a process that has the last two of four data ranks."""

    class Half:
        def addressable_devices_indices_map(self, shape):
            return {d: (slice(8 + 4 * d, 12 + 4 * d), *[slice(None)] * (len(shape) - 1))
                    for d in range(2)}  # fmt: skip

    s = split()
    asked = []

    def read(rows, positions):
        asked.append(rows)
        return s.batch(0, BATCH, rows, positions)

    with pytest.raises(Exception):  # noqa: B017  no real sharding: it goes no further than reading
        placer(lambda batch: dict.fromkeys(batch, Half()), BATCH)(read)
    assert asked[-1].tolist() == list(range(8, 16))


def test_no_more_is_read_ahead_than_asked_for():
    s = split()
    with Feeder(s, BATCH, whole, prefetch=3) as feeder:
        next(feeder)
        time.sleep(0.3)
        assert len(s.parts[0].seen) in (4, 5)  # three that wait, one more in the thread's hand


def test_what_goes_wrong_in_the_thread_is_raised_after_the_batches_before_it():
    feeder = Feeder(split(fails_at=2), BATCH, whole)
    next(feeder), next(feeder)
    for _ in range(2):  # and again: it does not hang
        with pytest.raises(DataError, match="the disk is gone"):
            next(feeder)
    feeder.close()


def test_the_time_that_the_consumer_waits_is_measured():
    with Feeder(split(wait=0.1), BATCH, whole) as feeder:
        next(feeder)
        next(feeder)
        assert 0.1 < feeder.wait_seconds < 2
        time.sleep(0.5)
        before = feeder.wait_seconds
        next(feeder)
        assert feeder.wait_seconds - before < 0.05


def test_closing_ends_the_thread_and_whoever_waits():
    feeder = Feeder(split(), BATCH, whole)
    next(feeder)
    feeder.close()
    feeder.close()
    assert not [t for t in threading.enumerate() if t is feeder._thread]
    with pytest.raises(StopIteration):
        next(feeder)
    waiting = Feeder(split(wait=0.5), BATCH, whole)
    closer = threading.Timer(0.1, waiting.close)
    closer.start()
    with pytest.raises(StopIteration):
        next(waiting)
    closer.join()


def test_a_read_that_never_ends_does_not_keep_close_from_returning():
    stuck = threading.Event()
    feeder = Feeder(split(), BATCH, lambda read: stuck.wait())
    start = time.perf_counter()
    feeder.close(seconds=0.2)
    assert time.perf_counter() - start < 1
    stuck.set()


def test_fewer_samples_than_a_batch_are_refused():
    with pytest.raises(DataError, match="7 training samples, but a batch has 16"):
        Feeder(split(n=7), BATCH, whole)


INTERRUPTED = """
import signal, threading, numpy as np
from jaxspeed.data import Feeder
from jaxspeed.data.samples import ArrayRows
from jaxspeed.data.split import Split
feeder = Feeder(Split([ArrayRows({"x": np.arange(64)})], seed=0, shuffle=True), 4,
                lambda read: threading.Event().wait())
# Where the tests run in the background, a shell may have them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
print("waiting", flush=True)
try:
    next(feeder)
except KeyboardInterrupt:
    feeder.close(0.5)
    print("interrupted")
"""


def test_an_interrupt_reaches_who_waits_for_a_batch():
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert child.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=20)[0] == "interrupted\n" and child.returncode == 0
