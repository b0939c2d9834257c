"""Simulated meshes with the names of the package's axes."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")


def simulated_mesh(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
