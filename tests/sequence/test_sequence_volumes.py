"""What attention over the `seq` axis sends, and how it divides the work."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import hlo
from jaxspeed.communication import ring_bytes
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.mask import Mask
from jaxspeed.ops.sequence_attention import SequenceForm, over_sequence
from tests.ops.meshes import simulated_mesh
from tests.support.covering import covering

SEQ, HEADS, HEAD_DIM = 64, 8, 4


def sent(how, parts, kv_heads, tensor=1):
    """Numbers that a device sends, (forward, forward and backward), and the kinds of collectives."""
    mesh = simulated_mesh(seq=parts, tensor=tensor)
    form = AttentionForm(0.5, Mask(True, None))

    def body(q, k, v):
        return q

    attend = functools.partial(over_sequence, form, how, body)

    def both(d_out, *arrays):
        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(d_out)

    place = NamedSharding(mesh, P(None, "seq", "tensor"))
    of_keys = place if kv_heads % tensor == 0 else NamedSharding(mesh, P(None, "seq"))
    q, k = (
        jax.ShapeDtypeStruct((1, SEQ, n, HEAD_DIM), jnp.float32, sharding=where)
        for n, where in ((HEADS, place), (kv_heads, of_keys))
    )
    found = []
    with jax.set_mesh(mesh):
        for program, args, outs in ((attend, (q, k, k), place), (both, (q, q, k, k), None)):
            if outs is None:
                outs = (place, place, of_keys, of_keys)
            text = jax.jit(program, out_shardings=outs).lower(*args).compile().as_text()
            found.append([c for c in hlo.collectives(text, mesh) if "seq" in c.axes])
    return [sum(Fraction(ring_bytes(c)) / 4 for c in each) for each in found], {
        c.kind for c in found[0]
    }


CASES = [
    (kind, layout, parts, kv_heads)
    for kind in ("gather", "ring", "ulysses")
    for layout in ("contiguous", "zigzag")
    for parts in (2, 4, 8)
    for kv_heads in (8, 2, 1)
]
DEFAULT = [
    ("gather", "contiguous", 4, 2),
    ("ring", "contiguous", 4, 2),
    ("ring", "zigzag", 8, 1),
    ("ulysses", "contiguous", 4, 8),
    ("ulysses", "contiguous", 4, 2),
]


@pytest.mark.parametrize("kind, layout, parts, kv_heads", covering(CASES, DEFAULT))
def test_a_device_sends_what_the_formulas_say(kind, layout, parts, kv_heads):
    (forward, both), kinds = sent(SequenceForm(kind, layout), parts, kv_heads)
    numbers, share = SEQ * HEADS * HEAD_DIM, Fraction(parts - 1, parts)
    if kind == "ulysses":
        g = Fraction(max(kv_heads, parts), HEADS)
        assert forward == (2 + 2 * g) * numbers / parts * share
        assert both == 2 * forward
        assert kinds == {"all-to-all"}
    else:
        g = Fraction(kv_heads, HEADS)
        assert forward == 2 * g * numbers * share
        assert both == 3 * forward, "keys and values again, and their gradients"
        assert kinds == {"all-gather" if kind == "gather" else "collective-permute"}
