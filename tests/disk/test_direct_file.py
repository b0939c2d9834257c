"""A preallocated file: what is written is read, and each failure is a DiskError that names it."""

import errno
import os
import re
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from jaxspeed.disk.direct_file import ALIGNMENT, DirectFile, aligned, aligned_buffer
from jaxspeed.errors import DiskError

pytestmark = pytest.mark.fast

CHUNK = 8 << 20


@pytest.fixture
def file(tmp_path):
    opened = DirectFile(tmp_path / "state", 4 * CHUNK)
    yield opened
    opened.close()


def filled(nbytes, seed=0):
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return buffer


def test_regions_are_read_as_they_were_written(file):
    first, second = filled(ALIGNMENT), filled(2 * CHUNK + 3 * ALIGNMENT, 1)
    offset = 4 * CHUNK - second.nbytes
    writes = [file.write(ALIGNMENT, first), file.write(offset, second)]
    for write in writes:
        start, end = write.wait()
        assert start < end
    for at, values in ((ALIGNMENT, first), (offset, second)):
        again = aligned_buffer(values.nbytes)
        file.read(at, again).wait()
        np.testing.assert_array_equal(again, values)
    untouched = filled(ALIGNMENT, 2)
    file.read(0, untouched).wait()
    assert not untouched.any()


def test_the_disk_gives_the_bytes_before_anything_is_written(tmp_path):
    path = tmp_path / "state"
    DirectFile(path, CHUNK).close()
    status = path.stat()
    assert status.st_size == CHUNK and 512 * status.st_blocks >= CHUNK
    assert status.st_mode & 0o777 == 0o600


def test_the_page_cache_is_bypassed_where_the_file_system_can(file, tmp_path):
    try:
        os.close(os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("a file system without O_DIRECT")
    assert file.is_direct


def test_buffers_are_aligned_and_keep_their_pages():
    for nbytes in (1, ALIGNMENT, CHUNK + 1):
        buffer = aligned_buffer(nbytes)
        assert buffer.ctypes.data % ALIGNMENT == 0 and buffer.nbytes == nbytes
        assert buffer.flags.writeable and not buffer.any()
    assert [*map(aligned, (0, 1, ALIGNMENT, ALIGNMENT + 1))] == [0, 4096, 4096, 8192]


def test_a_full_disk_is_found_before_the_first_step(tmp_path):
    folder = tmp_path / "disk" / "run"
    folder.mkdir(parents=True)
    with pytest.raises(DiskError, match=re.escape(f"{folder.parent}: the optimizer's state needs")):
        DirectFile(folder / "state", 1 << 60)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_disk_names_the_file_the_bytes_and_the_remedy(file, monkeypatch, call):
    def broken(handle, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    start = {"preadv": file.read, "pwritev": file.write}[call]
    doing = {"preadv": "reading", "pwritev": "writing"}[call]
    expected = rf"{doing} 4,096 bytes at 8,192 failed: .*\(EIO\).*newest checkpoint"
    with pytest.raises(DiskError, match=expected):
        start(8192, aligned_buffer(4096)).wait()


def test_a_failure_waits_for_the_other_chunks(file, monkeypatch):
    finished, last = threading.Event(), os.preadv

    def first_fails(handle, buffers, offset):
        if offset == 0:
            raise OSError(errno.EIO, "failed")
        finished.wait(0.05)
        finished.set()
        return last(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", first_fails)
    with pytest.raises(DiskError):
        file.read(0, aligned_buffer(2 * CHUNK)).wait()
    assert finished.is_set()


def test_an_interrupted_wait_ends_after_the_transfer(file, monkeypatch):
    """Its buffer is used for another transfer from then on."""
    finished, real = threading.Event(), os.preadv

    def slow(handle, buffers, offset):
        finished.wait(0.1)
        finished.set()
        return real(handle, buffers, offset)

    def interrupted(future, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slow)
    transfer = file.read(0, aligned_buffer(4096))
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    assert finished.is_set()


def test_a_call_that_transfers_less_goes_on(file, monkeypatch):
    write = os.pwritev

    def half(handle, buffers, offset):
        (buffer,) = buffers
        return write(handle, [buffer[: max(ALIGNMENT, len(buffer) // 2 // 4096 * 4096)]], offset)

    monkeypatch.setattr(os, "pwritev", half)
    values, again = filled(CHUNK), aligned_buffer(CHUNK)
    file.write(0, values).wait()
    file.read(0, again).wait()
    np.testing.assert_array_equal(again, values)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_transfer_that_ends_early_is_named(file, monkeypatch, call):
    monkeypatch.setattr(os, call, lambda handle, buffers, offset: 0)
    start = {"preadv": file.read, "pwritev": file.write}[call]
    with pytest.raises(DiskError, match="ended after 0: the file is shorter"):
        start(0, aligned_buffer(4096)).wait()


def test_a_truncated_file_is_named(file):
    os.truncate(file.path, ALIGNMENT)
    with pytest.raises(DiskError, match="was changed by another process"):
        file.refuse_changed()
    with pytest.raises(DiskError, match="ended after"):
        file.read(0, aligned_buffer(2 * ALIGNMENT)).wait()


def test_a_file_that_another_writes_to_is_named(file):
    file.write(0, filled(ALIGNMENT)).wait()
    file.seal()
    file.refuse_changed()
    with open(file.path, "r+b") as other:
        other.write(b"x")
    with pytest.raises(DiskError, match="was changed by another process"):
        file.refuse_changed()
