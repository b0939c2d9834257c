"""The choice between the own kernels for GPUs: Mosaic GPU's on Hopper, Triton's on the others."""

from __future__ import annotations

from types import ModuleType

import jax

from jaxspeed.ops import mosaic_gpu, triton


def supports(q: jax.Array, k: jax.Array) -> bool:
    """Whether one of the kernels supports these shapes and dtypes."""
    return mosaic_gpu.supports(q, k) or triton.supports(q, k)


def kernel(q: jax.Array, k: jax.Array) -> ModuleType:
    """The kernel for these shapes and dtypes."""
    return mosaic_gpu if mosaic_gpu.supports(q, k) else triton
