"""Arrays as large as all scores, in what attention compiles to for a platform that is not here."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.ops import attention

SEQ = 2048
FORMS = {
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"with_sinks": True},
    "window": {"window": 300},
    "segments": {"with_segments": True},
    "all at once": {"soft_cap": 5.0, "with_sinks": True, "window": 300, "with_segments": True},
    "plain": {"implementation": "plain"},
}


def gradients(dtype, with_sinks=False, with_segments=False, **options):
    """(the gradients of an attention, shapes of its arguments)."""
    x = jax.ShapeDtypeStruct((1, SEQ, 2, 128), dtype)
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)

    def loss(q, k, v, sinks, ids):
        sinks, ids = sinks if with_sinks else None, ids if with_segments else None
        out = attention(q, k, v, sinks=sinks, segment_ids=ids, **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2, 3) if with_sinks else (0, 1, 2)), (x, x, x, sinks, ids)


def of_scores(text):
    """The arrays of SEQ x SEQ or more, in HLO or StableHLO."""
    shapes = re.findall(r"\[([\d,]+)\]|<((?:\d+x)+)\w+>", text)
    dims = [[int(n) for n in re.findall(r"\d+", hlo or stable)] for hlo, stable in shapes]
    return [shape for shape in dims if shape.count(SEQ) > 1]


def on_tpu(devices, dtype):
    """{form: arrays as large as the scores} in programs that are compiled for one TPU."""
    mesh = jax.sharding.Mesh(devices[:1], "data")
    found = {}
    for name, options in FORMS.items():
        run, shapes = gradients(dtype, **options)
        at = NamedSharding(mesh, PartitionSpec())
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x in shapes]
        with jax.set_mesh(mesh):  # its devices' kind chooses the kernel's dtype
            found[name] = of_scores(jax.jit(run).lower(*placed).compile().as_text())
    return found


def on_cuda(name, dtype):
    """The same, in a program that is lowered for CUDA."""
    run, shapes = gradients(dtype, **FORMS[name])
    return of_scores(jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())
