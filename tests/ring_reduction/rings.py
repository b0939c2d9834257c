"""Run a ring's per-device code on simulated devices; reference sums in its order in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.ring_reduction import WIRES, Levels, Ranks, Ring

AXES = ("replica", "data")


def levels_of(nodes, size, directions="both", wire="none", unrolled=True):
    inner = Ring("data", size, directions, unrolled)
    return Levels(inner, Ring("replica", nodes, directions, unrolled), WIRES[wire])


def mesh_of(levels):
    nodes, size = levels.outer.size, levels.inner.size
    devices = jax.devices()[: nodes * size]
    return jax.make_mesh((nodes, size), AXES, devices=devices, axis_types=(AxisType.Auto,) * 2)


def program(levels, per_device):
    """`per_device(x, ranks)` of arrays [nodes, size, ...], jitted; its results come back so too."""

    def device(x):
        ranks = Ranks(jax.lax.axis_index("data"), jax.lax.axis_index("replica"))
        out = per_device(x[0, 0], ranks)
        return jax.tree.map(lambda y: y[None, None], out)

    mesh = mesh_of(levels)
    run = jax.shard_map(device, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES), check_vma=False)
    return jax.jit(run, in_shardings=NamedSharding(mesh, P(*AXES)))


def numbers(levels, length, dtype=np.float32, seed=0):
    """[nodes, size, chunks, length], other ones on each device."""
    nodes, size = levels.outer.size, levels.inner.size
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(nodes, size, size, length)) * 10.0 ** rng.integers(-3, 3, (size, length))
    return np.array(jnp.asarray(x, dtype))


def in_ring_order(x, chunk, direction=1):
    """The sum over ranks of x [N, ...] in the order of a ring, of the chunk of this number."""
    size = len(x)
    order = [(chunk + direction * (k + 1)) % size for k in range(size)]
    total = x[order[0]]
    for rank in order[1:]:
        total = total + x[rank]
    return total


def both_ways(x, chunk, forward_half):
    """The same, with the first half summed forward and the rest backward; x [N, length]."""
    half = x.shape[1] - x.shape[1] // 2 if forward_half is None else forward_half
    parts = in_ring_order(x[:, :half], chunk), in_ring_order(x[:, half:], chunk, -1)
    return np.concatenate(parts)
