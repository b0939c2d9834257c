"""Measured speed of a disk, by the transfers that state on it needs."""

import time
from pathlib import Path
from typing import NamedTuple

from jaxspeed.disk.direct_file import ALIGNMENT, DirectFile, aligned_buffer
from jaxspeed.disk.scratch import Scratch
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.chip import amount

MEASURED_BYTES = 1 << 30
_BUFFER = 64 << 20


class DiskSpeed(NamedTuple):
    """Bytes a second."""

    read: float
    write: float
    both: float  # read and written together, while half of the transfers are reads
    is_direct: bool = True  # whether the page cache was bypassed


def measure_disk(
    path: str | Path, nbytes: int = MEASURED_BYTES, threads: int = 2, buffer: int = _BUFFER
) -> DiskSpeed:
    """Write, read, and do both at once, in a file of so many bytes, which is removed.

    Raises:
      DiskError: the path cannot be written to, or has not so many bytes free.
    """
    scratch = Scratch(path)
    file = DirectFile(scratch.folder / "speed", nbytes, threads)
    first, second = (
        aligned_buffer(min(buffer, nbytes // 2 // ALIGNMENT * ALIGNMENT)) for _ in "ab"
    )
    first[:] = 1  # not zeros, which a file system may store as holes
    step = first.nbytes
    offsets = range(0, nbytes - step + 1, step)

    try:
        moved = len(offsets) * step
        begin = time.perf_counter()
        for offset in offsets:
            file.write(offset, first).wait()
        written = time.perf_counter()
        for offset in offsets:
            file.read(offset, second).wait()
        read = time.perf_counter()
        half = len(offsets) // 2
        for low, high in zip(offsets[:half], offsets[half:]):
            both = file.read(low, second), file.write(high, first)
            for transfer in both:
                transfer.wait()
        end = time.perf_counter()
        is_direct = file.is_direct
    finally:
        file.close()
        scratch.close()
    return DiskSpeed(
        moved / (read - written),
        moved / (written - begin),
        2 * half * step / (end - read),
        is_direct,
    )


def disk_rate(written: str) -> float | None:
    """Bytes a second of `5GB/s`; None for an existing folder.

    Raises ConfigError for anything else.
    """
    rate = amount(written, "B/s")
    if rate or (rate is None and Path(written).is_dir()):
        return rate
    raise ConfigError(f"--disk {written}: needs a speed above 0, like 5GB/s, or an existing folder")
