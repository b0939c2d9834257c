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


def held(devices: Any, asked: list[Any]) -> list[bool]:
    """Of each (topology, options, mesh) whether JAX lays it out on libtpu's own devices."""
    from jax.experimental import topologies

    from jaxspeed.errors import PlacementError
    from jaxspeed.placement.mesh import build_mesh

    found = []
    for name, options, sizes in asked:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        try:
            build_mesh(sizes, described.devices)
        except PlacementError:
            found.append(False)
        else:
            found.append(True)
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
