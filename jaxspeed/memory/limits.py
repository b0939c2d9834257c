"""How much host memory a backend pins for its devices."""

from collections.abc import Mapping

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
