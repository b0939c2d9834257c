"""XLA's options for the programs of a mesh."""

import os

import jax
from jax.sharding import Mesh, Sharding

from jaxspeed.placement.mesh import simulated


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """XLA's options for the programs of a mesh.

    More simulated devices than cores do without YNNPACK: what it computes is set up when it first
    runs, for each device anew. The first step of 24 unrolled blocks on eight devices takes 1.9
    seconds of CPU time with it and 1.4 without, and later steps 1.0 with and without (jaxlib
    0.12.0.1).
    """
    return without_ynnpack(mesh) if mesh.size > (os.cpu_count() or 1) else {}


def without_ynnpack(mesh: Mesh) -> dict[str, str]:
    """XLA's options for programs of CPU devices without YNNPACK's kernels."""
    known = jax.__version_info__ < (0, 13)  # XLA refuses options that it does not know
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if known and simulated(mesh) else {}


def init_options(sharding: Sharding) -> dict[str, int]:
    """XLA's options for a program of initialization, with results of this sharding.

    LLVM's level 3, XLA:CPU's default, takes 1.3 times as long for random numbers as level 2, which
    makes the same ones, bitwise, as fast (jaxlib 0.11.2 and 0.12.0.1).
    """
    device: jax.Device = next(iter(sharding.device_set))
    default = not jax.config.read("jax_disable_most_optimizations")
    return {"xla_backend_optimization_level": 2} if default and device.platform == "cpu" else {}
