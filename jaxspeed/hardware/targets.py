"""Plan targets: parse `cpu:8`, `h100:64/8`, `2x v5p:4x4x4` into chip, count and topology."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jaxspeed.config.elastic import divisors
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.known_chips import Chip, chip_named, chips_of

_FORM = re.compile(
    r"\s*(?:(?P<slices>\d+)\s*x\s*)?(?P<chip>[A-Za-z][\w.-]*)"
    r"(?::(?P<shape>\d+(?:x\d+)*))?(?:/(?P<node>\d+))?\s*"
)
MOST_DEVICES = 65536  # simulating more takes over a minute


@dataclass(frozen=True)
class Target:
    """Devices of one kind and their network.

    Attributes:
      chip: the kind of device.
      count: total number of devices.
      topology: the torus of chips of a slice; () if there is none.
      slices: number of tori, joined by the slower network.
      node: devices that share the fast network, or, for TPUs, a host.
    """

    chip: Chip
    count: int
    topology: tuple[int, ...] = ()
    slices: int = 1
    node: int = 0

    def __str__(self) -> str:
        if self.topology:
            slices = f"{self.slices}x " if self.slices > 1 else ""
            return f"{slices}{self.chip.name}:{'x'.join(map(str, self.topology))}"
        node = f"/{self.node}" if self.node != min(self.chip.node, self.count) else ""
        return f"{self.chip.name}:{self.count}{node}"

    @property
    def slice_count(self) -> int:
        """Devices of one slice."""
        return self.count // self.slices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dim of the torus has wraparound links.

        Of 3D tori optical switches join the ends of full cubes of 4 x 4 x 4 chips; of 2D tori a dim
        wraps around if it is as long as the pod's (https://jax-ml.github.io/scaling-book/tpus).
        """
        if len(self.topology) == 3:
            cubes = all(size % 4 == 0 for size in self.topology)
            return (cubes,) * 3
        return tuple(size == most for size, most in zip(self.topology, self.chip.pod))


def target_of(written: str, chips: Mapping[str, Chip] | None = None) -> Target:
    """Parse a target.

    Raises:
      ConfigError: with targets that would work.
    """
    chips = chips_of() if chips is None else chips
    match = _FORM.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        raise ConfigError(
            f'target: cannot read "{written}". Needs CHIP:COUNT like h100:64 or cpu:8, for TPUs '
            "CHIP:TORUS like v5p:4x4x8 or 2x v5p:4x4x4"
        )
    chip = chip_named(match["chip"], chips)
    shape = tuple(map(int, (match["shape"] or "1").split("x")))
    slices = int(match["slices"] or 1)
    if min(*shape, slices, 1) < 1:
        raise ConfigError(f'target: "{written}" has a size of zero; each must be at least 1')
    if chip.torus_dims:
        target = _tori(chip, shape, slices, match)
    else:
        target = _switched(chip, shape, slices, match)
    if target.count > MOST_DEVICES:
        raise ConfigError(
            f'target: "{written}" is {target.count} devices; a plan is for at most {MOST_DEVICES}'
        )
    return target


def _tori(chip: Chip, shape: tuple[int, ...], slices: int, match: re.Match[str]) -> Target:
    written = match[0].strip()
    if match["node"]:
        raise ConfigError(
            f'target: "{written}": devices per node are for GPUs only; a TPU slice is its torus'
        )
    dims, chips = chip.torus_dims, math.prod(shape)
    if len(shape) != dims or not match["shape"]:
        some = list(_like(chip, chips))[:4] if match["shape"] else []
        works = f"{chips} chips are {', '.join(some)}" if some else f"for example {_smallest(chip)}"
        raise ConfigError(f'target: "{written}": {chip.name} needs a torus of {dims} dims: {works}')
    if not _fits_pod(chip, shape):
        pod = "x".join(map(str, chip.pod))
        raise ConfigError(
            f'target: "{written}": the largest torus of {chip.name} is {pod} '
            f"({math.prod(chip.pod)} chips); for several slices write 2x {chip.name}:{pod}"
        )
    if not _full_hosts(shape):
        some = list(_like(chip, chips))[:4] or list(_like(chip, 4 * math.ceil(chips / 4)))[:4]
        raise ConfigError(
            f'target: "{written}": hosts have 2x2 chips, so the first two dims must be even '
            f"(or the slice is part of one host); {', '.join(some)} would do"
        )
    count = chips * chip.per_chip
    return Target(chip, count * slices, shape, slices, min(chip.node, count))


def _switched(chip: Chip, shape: tuple[int, ...], slices: int, match: re.Match[str]) -> Target:
    written = match[0].strip()
    if len(shape) > 1 or slices > 1 or not match["shape"]:
        count = math.prod(shape) * slices
        raise ConfigError(
            f'target: "{written}": the number of {chip.name} is one number, as in '
            f"{chip.name}:{count if match['shape'] else 8}"
            + ("" if chip.platform == "cpu" else f", then devices per node: /{chip.node}")
        )
    count = shape[0]
    node = int(match["node"] or min(chip.node, count))
    if node < 1 or (count % node and count > node):
        works = [str(n) for n in range(1, count + 1) if count % n == 0 and n <= 72]
        raise ConfigError(
            f'target: "{written}": {count} devices are not divisible into nodes of {node}; '
            f"nodes of {', '.join(works)} would do"
        )
    if chip == chips_of()["cpu"]:  # the built-in row, whose figures are nominal
        chip = replace(chip, memory=memory_of_machine() // count)
    return Target(chip, count, (), 1, min(node, count))


def memory_of_machine() -> int:
    """Memory of this machine in bytes, which simulated devices share."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fits_pod(chip: Chip, shape: tuple[int, ...]) -> bool:
    if len(shape) == 3:  # optical switches join cubes in any shape
        return math.prod(shape) <= math.prod(chip.pod)
    return all(size <= most for size, most in zip(sorted(shape), sorted(chip.pod)))


def _full_hosts(shape: tuple[int, ...]) -> bool:
    """Whether a slice uses full hosts of 2 x 2 chips, or is one or two chips of one."""
    within = math.prod(shape) <= 2 and all(size == 1 for size in shape[2:])
    return within or all(size % 2 == 0 for size in shape[:2])


def _like(chip: Chip, chips: int) -> Iterator[str]:
    """Targets of this number of chips, the most cubic first."""
    shapes = [
        shape
        for shape in factorizations(chips, chip.torus_dims)
        if _fits_pod(chip, shape) and _full_hosts(shape)
    ]
    for shape in sorted(shapes, key=lambda shape: (max(shape), shape)):
        yield f"{chip.name}:{'x'.join(map(str, shape))}"


def factorizations(count: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All shapes of so many dims with so many elements, the first dims smallest first."""
    if dims == 1:
        yield (count,)
        return
    for first in divisors(count):
        yield from ((first, *rest) for rest in factorizations(count // first, dims - 1))


def _smallest(chip: Chip) -> str:
    return f"{chip.name}:{'x'.join(['2', '2', '1'][: chip.torus_dims])}"
