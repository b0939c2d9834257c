"""Device mesh with the axes of `jaxspeed.axes`: sizes, validation and layout over links."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxspeed.axes import DATA, axis_names, spanning_order
from jaxspeed.errors import PlacementError
from jaxspeed.placement.paths import counted


def resolve_sizes(sizes: Mapping[str, int], device_count: int) -> dict[str, int]:
    """Size of each axis, with the one that is -1 filled in from the device count."""
    axes = axis_names()
    full = {axis: sizes.get(axis, -1 if axis == DATA else 1) for axis in axes}
    unknown = sorted(set(sizes) - set(axes))
    if unknown:
        raise PlacementError(f"mesh has no axis {unknown[0]!r}; its axes are {', '.join(axes)}")
    bad = [f"{axis}={size}" for axis, size in full.items() if size < 1 and size != -1]
    free = [axis for axis, size in full.items() if size == -1]
    if bad or len(free) > 1:
        what = f"got {', '.join(bad)}" if bad else f"{' and '.join(free)} are both -1"
        raise PlacementError(
            f"mesh: {what}; each axis is an integer from 1, and one may be -1 (the rest)"
        )
    fixed = math.prod(size for size in full.values() if size != -1)
    shape = ", ".join(f"{axis}={size}" for axis, size in full.items() if size != 1)
    if free:
        if device_count % fixed:
            counts = ", ".join(str(fixed * k) for k in range(1, 5))
            raise PlacementError(
                f"mesh: {shape} needs a multiple of {fixed} devices ({counts}, ...), "
                f"but there are {device_count}"
            )
        full[free[0]] = device_count // fixed
    elif fixed != device_count:
        hint = (
            f"pass devices=jax.devices()[:{fixed}], or let one axis be -1"
            if fixed < device_count
            else f"the sizes must multiply to {device_count}; -1 for one axis fills it in"
        )
        raise PlacementError(
            f"mesh: {shape or 'all axes 1'} is for exactly {counted(fixed, 'device')}, "
            f"but there are {device_count}: {hint}"
        )
    return full


def build_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with all axes over these devices (all of them by default).

    Axes are of type Auto: foreign code carries no sharding annotations, and Explicit axes would
    make its reshapes and matmuls errors.
    """
    devices = checked_devices(jax.devices() if devices is None else devices)
    full = resolve_sizes(sizes, len(devices))
    shape = tuple(full.values())
    try:
        return Mesh(laid_out(shape, devices), tuple(full), axis_types=(AxisType.Auto,) * len(full))
    except NotImplementedError as error:  # a physical torus that cannot hold this shape
        raise PlacementError(
            f"mesh: {dict(full)} cannot be laid out on these {len(devices)} "
            f"{devices[0].device_kind} devices: {str(error).splitlines()[0]}"
        ) from None


def laid_out(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arrange the devices as an array of this shape, so that axes run along links.

    Like `jax.make_mesh`, which refuses devices of several slices: a slower network joins those, so
    the axes that communicate least span them. An axis takes entire dims of a torus; only where the
    shape has no such layout, dims are split between axes, which then share their links.

    Raises:
      NotImplementedError: a torus cannot hold the shape.
    """
    slices = Counter(getattr(device, "slice_index", None) for device in devices)
    across = _across(shape, len(slices))
    within = [size // parts for size, parts in zip(shape, across)]
    if math.prod(across) != len(slices) or len(set(slices.values())) > 1:
        raise NotImplementedError(f"they are {len(slices)} slices of {sorted(slices.values())}")
    if len(slices) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def _across(shape: Sequence[int], slices: int) -> list[int]:
    """Over how many slices each axis spans: first the axes that communicate least."""
    sizes, parts = dict(zip(axis_names(), shape)), dict.fromkeys(axis_names(), 1)
    for axis in spanning_order():
        parts[axis] = math.gcd(sizes[axis], slices // math.prod(parts.values()))
    return list(parts.values())


def checked_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices as a list; PlacementError unless they are distinct JAX devices, at least one."""
    if not isinstance(devices, Iterable) or isinstance(devices, str):
        raise PlacementError(
            f"devices is a {type(devices).__name__}; it takes a sequence of JAX devices, as "
            "jax.devices()[:4]"
        )
    checked = list(devices)
    other = next((d for d in checked if not isinstance(d, jax.Device)), None)
    if other is not None:
        raise PlacementError(f"devices holds a {type(other).__name__}; it takes JAX devices")
    if not checked:
        raise PlacementError("devices is empty; leave it out to use all of jax.devices()")
    twice, count = Counter(checked).most_common(1)[0]
    if count > 1:
        raise PlacementError(f"devices holds {twice} {count} times; each may occur once")
    return checked


def simulated(mesh: Mesh) -> bool:
    """Whether the mesh is of CPU devices."""
    return mesh.devices.flat[0].platform == "cpu"


def in_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace the function with this mesh as the context mesh, which kernels read."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        # Through the empty mesh: one of another size than that around it is refused.
        empty, abstract = jax.sharding.AbstractMesh((), ()), mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(empty), jax.sharding.use_abstract_mesh(abstract):
            return function(*args)

    return traced
