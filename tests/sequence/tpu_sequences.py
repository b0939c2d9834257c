"""Attention over the `seq` axis, compiled for a TPU topology in a child process."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import hlo
from jaxspeed.communication import ring_bytes
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.mask import Mask
from jaxspeed.ops.sequence_attention import SequenceForm, over_sequence

SEQ, HEADS, KV_HEADS, HEAD_DIM = 8192, 8, 2, 128


def compile_kind(
    devices: list[jax.Device],
    kind: str,
    layout: str = "contiguous",
    window: int | None = None,
    documents: bool = False,
) -> dict[str, Any]:
    """What the forward and backward pass in bf16 sends, and the bytes that it needs."""
    mesh = Mesh(np.array(devices[:8]).reshape(8), ("seq",), axis_types=(AxisType.Auto,))
    ulysses = 4 if kind == "both" else 1
    how = SequenceForm(kind, layout, ulysses)  # type: ignore[arg-type]
    form = AttentionForm(HEAD_DIM**-0.5, Mask(True, window), segments=documents)
    run = functools.partial(over_sequence, form, how, lambda q, *others: q)

    def both(ids: jax.Array, d_out: jax.Array, *arrays: jax.Array) -> Any:
        def attend(*arrays: jax.Array) -> jax.Array:
            return run(*arrays, *(ids, ids) if documents else ())

        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(d_out)

    place = NamedSharding(mesh, P(None, "seq"))
    q, k = (
        jax.ShapeDtypeStruct((1, SEQ, n, HEAD_DIM), jnp.bfloat16, sharding=place)
        for n in (HEADS, KV_HEADS)
    )
    ids = jax.ShapeDtypeStruct((1, SEQ), jnp.int32, sharding=place)
    with jax.set_mesh(mesh):
        compiled = jax.jit(both, out_shardings=(place,) * 4).lower(ids, q, q, k, k).compile()
    text = compiled.as_text()
    found = hlo.collectives(text, mesh)
    sizes = compiled.memory_analysis()
    return {
        "sent": sum(map(ring_bytes, found)),
        "kinds": sorted({c.kind for c in found}),
        "kernels": text.count("tpu_custom_call"),
        "peak": sizes.peak_memory_in_bytes,
    }
