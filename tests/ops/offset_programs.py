"""Attention of a shard of queries against all keys, compiled for a TPU topology."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.ops import splash
from jaxspeed.ops.mask import KernelCall, Mask, Segments


def on_tpu(devices, length, causal, window, with_segments):
    """The kernels of both passes."""
    mesh = Mesh(np.array(devices), ("seq",))

    def passes(q, k, v, ids, d_out):
        offset = jax.lax.axis_index("seq") * q.shape[1]
        segments = None
        if with_segments:
            own = jax.lax.dynamic_slice_in_dim(ids, offset, q.shape[1], axis=1)
            segments = Segments(own, ids)
        call = KernelCall(Mask(causal, window), 1.0)
        out, sums = splash.forward(call, q, k, v, segments, offset=offset)
        return splash.backward(call, q, k, v, segments, out, sums, d_out, offset=offset)

    cut = P(None, "seq")
    specs = (cut, P(), P(), P(), cut)
    x = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    placed = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip((x, x, x, ids, x), specs)
    ]
    with jax.set_mesh(mesh):  # its devices' kind chooses the kernel's dtype
        run = jax.shard_map(passes, in_specs=specs, out_specs=(cut, P(), P()), check_vma=False)
        text = jax.jit(run).lower(*placed).compile().as_text()
    return re.findall(r"splash_mha_(\w+?)_", " ".join(re.findall(r"%?(splash_\w+)[.\d]* = ", text)))
