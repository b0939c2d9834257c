"""Run by `run_on_topology`, in a process that has libtpu: JAX's own answers to compare with."""

from typing import Any

import numpy as np

from tests.planner import jobs


def read_of_small(devices: Any) -> dict[str, Any]:
    from jaxspeed.hlo import report

    program, batch = jobs.small(devices)
    compiled = program.step.lower(program.state, program.abstract_batch(batch)).compile()
    memory, found = compiled.memory_analysis(), report(compiled, program.mesh)
    sizes = ("argument", "temp", "output")
    return {
        "bytes": [getattr(memory, f"{name}_size_in_bytes") for name in sizes],
        "collectives": [[one.kind, one.bytes, one.runs] for one in found.collectives or ()],
        "flops": found.flops,
    }


def laid_out(devices: Any, asked: list[Any]) -> list[Any]:
    """Of each (topology, options, mesh) the places of libtpu's own devices; None if refused."""
    from jax.experimental import topologies

    from jaxspeed.errors import PlacementError
    from jaxspeed.placement.mesh import build_mesh

    found = []
    for name, options, sizes in asked:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        try:
            mesh = build_mesh(sizes, described.devices).devices.flat
        except PlacementError:
            found.append(None)
        else:
            found.append([[getattr(device, "slice_index", 0), *device.coords] for device in mesh])
    return found


def slices_along(devices: Any, name: str, asked: list[dict[str, int]]) -> list[dict[str, int]]:
    """Over how many slices each axis of a mesh on two of them goes."""
    from jax.experimental import topologies

    from jaxspeed.placement.mesh import build_mesh

    described = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=2)
    return [_spread(build_mesh(sizes, described.devices)) for sizes in asked]


def _spread(mesh: Any) -> dict[str, int]:
    which = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    spread = {}
    for dim, axis in enumerate(mesh.axis_names):
        rows = np.moveaxis(which, dim, -1).reshape(-1, which.shape[dim])
        spread[axis] = max(len(set(row)) for row in rows)
    return spread
