"""Bugs of JAX and XLA that affect offload, by version and platform.

One row a fault: what it does, where, and where not. A row goes when its versions do.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxspeed.errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """What host memory meets on some platforms, from one release of jax until before another.

    Attributes:
      platforms: as devices name theirs.
      since: the first release that has it.
      until: the first that has it no more.
      what: it does.
      source: where it is told.
    """

    platforms: tuple[str, ...]
    since: tuple[int, ...]
    until: tuple[int, ...]
    what: str
    source: str

    def meets(self, platform: str, version: tuple[int, ...]) -> bool:
        return platform in self.platforms and self.since <= version < self.until


FAULTS = (
    # An index into host memory that is a function of a loop's counter is taken for the counter: the
    # backward pass of a scan reads what was saved in the wrong order, with no error. Seen for saved
    # activations; weights, gradients and moments are walked by such indices too.
    Fault(
        ("cuda", "gpu"),
        (0, 11, 0),
        (0, 11, 1),
        "reads host memory in the wrong order inside of loops, and gradients are silently wrong",
        "https://github.com/openxla/xla/pull/46231",
    ),
)


def refuse_faults(asked: Iterable[str], platform: str, version: str) -> None:
    """ConfigError where offload would compute wrong numbers.

    Args:
      asked: the keys of the config that put something into host memory.
      platform: of the devices.
      version: of jaxlib.
    """
    keys = ", ".join(asked)
    for fault in FAULTS:
        if keys and fault.meets(platform, _numbers(version)):
            before, after = (".".join(map(str, v)) for v in (fault.since, fault.until))
            raise ConfigError(
                f"{keys}: with jaxlib {version}, XLA {fault.what} on {platform} "
                f"({fault.source}). jaxlib before {before}, or {after} and later, is right"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """0.11.0.dev3 as (0, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# -- how much host memory a backend pins for its devices ------------------------------------------

GPU_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_GPU_DEFAULT = 64


def pinned_limit(platform: str, environment: Mapping[str, str]) -> int | None:
    """Bytes of the pool of pinned memory that a process has for its devices, where it is bounded.

    JAX's CUDA client reads the variable when it starts, in units of 2^30 bytes.
    """
    if platform not in ("gpu", "cuda"):
        return None
    said = environment.get(GPU_LIMIT, "")
    return (int(said) if said.isdigit() else _GPU_DEFAULT) << 30
