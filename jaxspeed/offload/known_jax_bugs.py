"""Bugs of JAX and XLA that affect offload, by version and platform.

One row per bug: symptom, platforms and versions. A row is removed with support for its versions.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxspeed.errors import ConfigError


@dataclass(frozen=True)
class KnownBug:
    """A bug in offload on some platforms, in a half-open range of jaxlib releases.

    Attributes:
      platforms: names of JAX platforms.
      since: the first affected release.
      until: the first fixed release.
      symptom: its effect, as a verb phrase whose subject is XLA.
      source: the upstream report.
    """

    platforms: tuple[str, ...]
    since: tuple[int, ...]
    until: tuple[int, ...]
    symptom: str
    source: str

    def affects(self, platform: str, version: tuple[int, ...]) -> bool:
        return platform in self.platforms and self.since <= version < self.until


KNOWN_BUGS = (
    # An index into host memory that is a function of a loop's counter is replaced by the counter:
    # the backward pass of a scan reads residuals in the wrong order, with no error. Weights,
    # gradients and moments are streamed with such indices too.
    KnownBug(
        ("cuda", "gpu"),
        (0, 11, 0),
        (0, 11, 1),
        "reads host memory in the wrong order inside of loops, and gradients are silently wrong",
        "https://github.com/openxla/xla/pull/46231",
    ),
)


def refuse_known_bugs(keys: Iterable[str], platform: str, version: str) -> None:
    """Raise ConfigError where offload would compute wrong numbers.

    Args:
      keys: the config keys that place arrays in host memory.
      platform: platform of the devices.
      version: version of jaxlib.
    """
    named = ", ".join(keys)
    for bug in KNOWN_BUGS:
        if named and bug.affects(platform, _numbers(version)):
            before, after = (".".join(map(str, v)) for v in (bug.since, bug.until))
            raise ConfigError(
                f"{named}: with jaxlib {version}, XLA {bug.symptom} on {platform} "
                f"({bug.source}). jaxlib before {before}, or {after} and later, is correct"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """0.11.0.dev3 as (0, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# -- size of a backend's pool of pinned host memory ------------------------------------------------

GPU_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_GPU_DEFAULT = 64


def pinned_limit(platform: str, environment: Mapping[str, str]) -> int | None:
    """Bytes of a process's pool of pinned host memory; None where it is unbounded.

    JAX's CUDA client reads the variable when it starts, in units of 2^30 bytes.
    """
    if platform not in ("gpu", "cuda"):
        return None
    value = environment.get(GPU_LIMIT, "")
    return (int(value) if value.isdigit() else _GPU_DEFAULT) << 30
