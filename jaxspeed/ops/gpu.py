"""The GPU for which attention is traced: one of this machine, or an absent one of a plan."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import jax

Capability = tuple[int, int]
CUDNN_VERSION = 91300  # assumed: in the CUDA wheels that jaxspeed[cuda] installs
NEWEST: Capability = (10, 0)
_assumed: ContextVar[Capability | None] = ContextVar("assumed", default=None)


def assumption() -> Capability | None:
    """The compute capability that is assumed: attention is traced differently then."""
    return _assumed.get()


def is_meant() -> bool:
    """Whether the program that is traced is for a GPU, as far as is known."""
    return _assumed.get() is not None or jax.default_backend() == "gpu"


def has_major(number: int) -> bool:
    """Whether the GPU is of this generation; an unknown GPU is not."""
    known = _known()
    return known is not None and known[0] == number


def is_at_least(needed: Capability) -> bool:
    """Whether the GPU has this compute capability; an unknown GPU does."""
    known = _known()
    return known is None or known >= needed


def _known() -> Capability | None:
    known = _assumed.get()
    if known is None and jax.default_backend() == "gpu":
        known = _number(jax.local_devices()[0].compute_capability)
    return known


def miscompiles_masks() -> bool:
    """Whether the installed CUDA's ptxas miscompiles masks of Mosaic GPU's kernels.

    JAX's own attention of this kind refuses causal masks with 12.8.0 to 12.9.0 (jax 0.11.2,
    0.12.0). An absent CUDA is assumed to be newer.
    """
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return False
    return cuda_versions is not None and 12080 <= cuda_versions.cuda_runtime_get_version() < 12091


def cudnn_version() -> int:
    """The installed or assumed version; RuntimeError if there is none."""
    checks = _checks()
    if checks is None:
        raise RuntimeError("jax has no cuDNN attention")
    return int(checks.check_cudnn_version())


@contextmanager
def assumed(capability: Capability | None = None) -> Iterator[None]:
    """Context in which attention is traced for a GPU that is absent, with its cuDNN.

    JAX checks the installed cuDNN's version and the device's compute capability before it traces
    cuDNN's attention (`jax._src.cudnn`), and asks for the device when it lowers a Triton kernel
    (`jax._src.pallas.triton.gpu_info`; both in jax 0.11.2 and 0.12.0.1). If the first has changed,
    another kernel is traced. Mosaic GPU's kernels it lowers for Hopper where there is no GPU.
    Without a capability that of an outer context stays, or it is the newest.
    """
    capability = capability or _assumed.get() or NEWEST
    token = _assumed.set(capability)
    with ExitStack() as restored:
        restored.callback(_assumed.reset, token)
        if (checks := _checks()) is not None:
            _replace(restored, checks, "check_cudnn_version", _version)
            _replace(restored, checks, "check_compute_capability", _is_at_least)
        if (info := _device_info()) is not None:
            major, minor = capability
            assumed_info = info.GpuInfo(
                gpu_version=None,
                arch_name=f"{major}.{minor}",
                compute_capability=10 * major + minor,
            )
            _replace(restored, info, "get_gpu_info", lambda: assumed_info)
        yield


def _replace(restored: ExitStack, module: Any, name: str, value: Any) -> None:
    restored.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _device_info() -> Any:
    """JAX's module with the device of Triton's kernels; None if it has changed."""
    try:
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
    except ImportError:
        return None
    return gpu_info if hasattr(gpu_info, "get_gpu_info") else None


def _checks() -> Any:
    """JAX's module with the checks; None if it has changed."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as checks
    except ImportError:
        return None
    names = ("check_cudnn_version", "check_compute_capability")
    return checks if all(hasattr(checks, name) for name in names) else None


def _version() -> int:
    return CUDNN_VERSION


def _is_at_least(needed: str) -> bool:
    number = _number(needed)
    return number is None or is_at_least(number)


def _number(written: str) -> Capability | None:
    """Of `9.0`; None if it is of another vendor."""
    version = re.fullmatch(r"(\d+)\.(\d+)", written)
    return (int(version[1]), int(version[2])) if version else None
