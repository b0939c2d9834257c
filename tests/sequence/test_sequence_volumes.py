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
from tests.sequence import tpu_sequences
from tests.sequence.score_work import work_of_devices
from tests.support.covering import covering
from tests.support.topology import run_on_topology

SEQ, HEADS, HEAD_DIM = 64, 8, 4


def sent(how, parts, kv_heads, tensor=1):
    """Numbers a device sends (forward, forward and backward), and the kinds of collectives."""
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


@pytest.mark.default_cases("ulysses-contiguous-4-8")
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


@pytest.mark.parametrize(
    "group, layout, kv_heads",
    covering(
        [(g, order, n) for g in (2, 4) for order in ("contiguous", "zigzag") for n in (8, 2, 1)],
        [(4, "contiguous", 2)],
    ),
)
def test_both_send_what_the_formulas_of_both_say(group, layout, kv_heads):
    (forward, both), kinds = sent(SequenceForm("both", layout, group), 8, kv_heads)
    token, keys = SEQ * HEAD_DIM, max(kv_heads, group)
    exchanged = Fraction(2 * HEADS + 2 * keys, 8) * Fraction(group - 1, group) * token
    in_ring = Fraction(2 * keys, group) * Fraction(8 // group - 1, 8 // group) * token
    assert forward == exchanged + in_ring
    assert both == 2 * exchanged + 3 * in_ring
    assert kinds == {"all-to-all", "collective-permute"}


# -- work ------------------------------------------------------------------------------------------

LENGTH = 2048


def blocks_of_devices(how, monkeypatch, ids=None):
    """Blocks of the scores that each of 8 devices computes, as shares of the full square."""
    arrays = [jnp.zeros((1, LENGTH, 1, 1))] * 3 + ([] if ids is None else [ids, ids])
    form = AttentionForm(1.0, Mask(True, None), segments=ids is not None)
    with jax.set_mesh(simulated_mesh(seq=8)):
        over = functools.partial(over_sequence, form, how, lambda q, *_: q)
        return work_of_devices(lambda: jax.jit(over)(*arrays), LENGTH, monkeypatch)


@pytest.mark.default_cases("zigzag-1.02-gather", "contiguous-1.88-ring", "contiguous-1.88-gather")
@pytest.mark.parametrize("kind", ["ring", "gather"])
@pytest.mark.parametrize("layout, most", [("zigzag", 1.02), ("contiguous", 1.88)])
def test_zigzag_divides_causal_work_evenly(kind, layout, most, monkeypatch):
    shares = blocks_of_devices(SequenceForm(kind, layout), monkeypatch)
    assert shares.sum() <= 0.57
    assert shares.max() <= most * shares.mean()
    if layout == "contiguous":
        assert shares.max() >= 1.8 * shares.mean(), "the last device has almost all keys"


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_blocks_of_other_documents_are_skipped(kind, monkeypatch):
    lengths = np.random.default_rng(0).integers(50, 400, 20)
    ids = jnp.asarray(np.resize(np.repeat(np.arange(20), lengths), LENGTH)[None], jnp.int32)
    shares = blocks_of_devices(SequenceForm(kind), monkeypatch, ids)
    assert shares.sum() <= 0.1
    assert shares.max() <= 1.7 * shares.mean()


# -- a real compiler -------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "documents"),
    [("gather", False), ("ulysses", True), ("ring", True), ("both", False)],
)
def test_each_kind_compiles_for_a_tpu_with_its_kernel(kind, documents):
    function = "tests.sequence.tpu_sequences:compile_kind"
    found = run_on_topology(function, "v5e:2x4", kind=kind, documents=documents)
    square = HEADS * tpu_sequences.SEQ**2 // 8 * 4  # bytes of a device's scores in fp32
    assert found["kernels"] >= 2
    assert found["peak"] < square / 4
    kinds = {"gather": {"all-gather", "reduce-scatter"}, "ring": {"collective-permute"}}
    kinds |= {"ulysses": {"all-to-all"}, "both": {"all-to-all", "collective-permute"}}
    ids = {"all-gather"} if documents and kind == "ulysses" else set()
    assert set(found["kinds"]) == kinds[kind] | ids
