"""The oldest JAX that jaxspeed supports, and versions of JAX and XLA that are known to be faulty.

One row per bug: platforms, versions, symptom and source. A row whose versions all are older than
`FLOOR` stays: it says why an installation that bypasses pip's check is refused.
"""

import contextlib
import importlib.metadata
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxspeed.errors import ConfigError

Numbers = tuple[int, ...]

# What jaxspeed does instead of the uses of JAX that are affected.
AVOIDED = {
    "explicit axes": "jaxspeed has no such axes",
    "ragged exchanges": "jaxspeed pads what it exchanges there",
    "rows": "jaxspeed masks such rows",
    "windows": "in jaxspeed each device computes its own positions of these",
}
FLOOR: Numbers = (0, 11, 2)  # of jax and jaxlib
_GPU = ("cuda", "gpu")


@dataclass(frozen=True)
class KnownBug:
    """A bug on some platforms, in a half-open range of releases.

    Attributes:
      platforms: names of JAX platforms.
      since: the first affected release, or the oldest in which it was seen.
      until: the first release in which it is fixed; None where no release is.
      symptom: its effect, as a verb phrase whose subject is XLA.
      source: the upstream report, or where none is known the source that is at fault.
      affects: everything, or the config keys that offload to host memory, or only a use of JAX that
        jaxspeed does without (`AVOIDED`): such a bug is shown, and refuses nothing.
      package: the package whose releases are meant.
    """

    platforms: tuple[str, ...]
    since: Numbers
    until: Numbers | None
    symptom: str
    source: str
    affects: Literal[
        "everything", "offload", "explicit axes", "ragged exchanges", "rows", "windows"
    ] = "everything"
    package: Literal["jaxlib", "libtpu"] = "jaxlib"

    def is_in(self, versions: Mapping[str, str]) -> bool:
        """Whether one of these installed versions has it."""
        version = versions.get(self.package)
        if version is None or numbers(version) < self.since:
            return False
        return self.until is None or numbers(version) < self.until


KNOWN_BUGS = (
    KnownBug(
        ("cpu",),
        (0, 10, 2),
        (0, 11, 0),
        "computes wrong numbers after row 32,768 of a vmapped matrix-vector product whose squares "
        "are summed",
        "https://github.com/jax-ml/jax/issues/39103",
    ),
    # The all-reduce over an axis that shards the embedding's rows and the tokens comes after each
    # device has taken its rows. Only with an embedding that is reduced over another explicit axis:
    # jaxspeed's axes are automatic, and with those the gradient is right. Upstream the issue is
    # closed, and jax 0.11.2 and 0.12.0.1 are wrong.
    KnownBug(
        ("cpu", *_GPU, "tpu"),
        (0, 10, 2),
        None,
        "adds gradients of other tokens to an embedding whose rows and whose tokens are sharded "
        "over one explicit mesh axis",
        "https://github.com/openxla/xla/issues/42481",
        affects="explicit axes",
    ),
    # An index into host memory that is a function of a loop's counter is replaced by the counter:
    # the backward pass of a scan reads residuals in the wrong order, with no error. Weights,
    # gradients and moments are streamed with such indices too.
    KnownBug(
        _GPU,
        (0, 11, 0),
        (0, 11, 1),
        "reads host memory in the wrong order inside of loops, and gradients are silently wrong",
        "https://github.com/openxla/xla/pull/46231",
        affects="offload",
    ),
    KnownBug(
        ("cpu",),
        (0, 11, 1),
        (0, 11, 2),
        "rewrites an entire array for each update of less than 256 bytes in a loop, which takes "
        "thousands of times as long",
        "https://github.com/jax-ml/jax/issues/40101",
    ),
    KnownBug(
        ("cpu",),
        (0, 10, 2),
        None,
        "does not compile a ragged all-to-all",
        "https://github.com/jax-ml/jax/issues/34755",
        affects="ragged exchanges",
    ),
    # Where a device has many experts the first backward pass is NaN, of finite operands. With
    # --xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true, or without the latency-hiding
    # scheduler, it was right. On the GPU that is at hand here it has not been seen.
    KnownBug(
        _GPU,
        (0, 11, 0),
        None,
        "corrupts gradients of a ragged all-to-all in the first backward pass",
        "https://github.com/marin-community/marin/issues/8077",
        affects="ragged exchanges",
    ),
    # It needs more GPUs than are at hand here.
    KnownBug(
        _GPU,
        (0, 11, 0),
        None,
        "crashes in a ragged all-to-all of more than 32 devices of one NVLink domain",
        "https://github.com/openxla/xla/issues/47283",
        affects="ragged exchanges",
    ),
    # Its grid has the tiles of groups alone. It masks the rows of groups that it has to skip.
    KnownBug(
        ("tpu",),
        (0, 10, 2),
        None,
        "leaves rows behind the last group of megablox' grouped products uninitialized",
        "https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/tpu/megablox/gmm.py",
        affects="rows",
    ),
    # The all-reduce of a scatter is moved out of the loop that adds the scatters up, but the loop
    # still drops, on all devices but the first, what the iterations before have added. jaxspeed's
    # own loop over micro-batches is none of these: it takes a running mean.
    KnownBug(
        ("tpu",),
        (0, 0, 42),
        (0, 0, 50),
        "loses gradients of an embedding that a loop looks up, on several devices",
        "https://github.com/openxla/xla/issues/49143",
        package="libtpu",
    ),
    # With one further axis of 2 it is twice the gradient. Kernels of one position, and inputs that
    # the batch alone shards, are right; grouped convolutions are wrong with those too.
    KnownBug(
        ("cpu", *_GPU, "tpu"),
        (0, 11, 2),
        None,
        "multiplies the gradient of a convolution's kernel, where its positions are sharded, by "
        "the size of each mesh axis that shards neither batch nor positions",
        "https://github.com/openxla/xla/blob/main/xla/service/spmd/convolution_handler.cc",
        affects="windows",
    ),
    KnownBug(
        ("cpu", *_GPU, "tpu"),
        (0, 11, 2),
        None,
        "computes wrong gradients of overlapping maxima (max pooling) of sharded positions",
        "https://github.com/openxla/xla/blob/main/xla/service/spmd/spmd_partitioner.cc",
        affects="windows",
    ),
)


def refuse_known_bugs(
    platform: str,
    versions: Mapping[str, str],
    offload: Collection[str] = (),
) -> None:
    """Raise ConfigError where JAX is too old, or would compute wrong numbers.

    It compares versions, and computes nothing.

    Args:
      platform: platform of the devices.
      versions: installed versions by package, of `installed()`.
      offload: the config keys that place arrays in host memory.
    """
    problems = list(_too_old(versions))
    for bug in KNOWN_BUGS:
        if platform not in bug.platforms or not bug.is_in(versions):
            continue
        if bug.affects == "everything" or (bug.affects == "offload" and offload):
            keys = f"{', '.join(offload)}: " if bug.affects == "offload" else ""
            problems.append(f"{keys}{_shown(bug, platform, versions)}")
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_old_jax(versions: Mapping[str, str]) -> None:
    """Raise ConfigError where JAX is older than `FLOOR`, before what needs a newer one."""
    if problems := list(_too_old(versions)):
        raise ConfigError("\n".join(problems))


def installed(platform: str = "") -> dict[str, str]:
    """Versions of the packages that matter on a platform."""
    import jax

    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__}
    if platform == "tpu":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["libtpu"] = importlib.metadata.version("libtpu")
    return versions


def numbers(version: str) -> Numbers:
    """0.11.0.dev3 as (0, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _too_old(versions: Mapping[str, str]) -> Iterator[str]:
    for package in ("jax", "jaxlib"):
        if numbers(versions[package]) < FLOOR:
            version = versions[package]
            yield f"jaxspeed needs {package} {_text(FLOOR)} or newer; {version} is installed"


def _shown(bug: KnownBug, platform: str, versions: Mapping[str, str]) -> str:
    right = f"{bug.package} before {_text(bug.since)}"
    if bug.until is not None:
        right = f"{right}, or {_text(bug.until)} and later,"
    return (
        f"with {bug.package} {versions[bug.package]}, XLA {bug.symptom} on {platform} "
        f"({bug.source}). {right} is correct"
    )


def _text(version: Numbers) -> str:
    return ".".join(map(str, version))
