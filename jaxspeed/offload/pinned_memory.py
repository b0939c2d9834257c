"""Size of a backend's pool of pinned host memory."""

from collections.abc import Mapping

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
