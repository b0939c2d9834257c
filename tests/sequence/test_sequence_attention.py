"""Attention over the `seq` axis equals plain attention on one device, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.errors import ModelError
from jaxspeed.hlo import collectives
from jaxspeed.ops import attention, attention_rows, gpu, sequence_passes, splash
from jaxspeed.ops.attention_call import AttentionForm, form_of
from jaxspeed.ops.mask import Mask
from jaxspeed.ops.sequence_attention import SequenceForm, over_sequence, refusal
from jaxspeed.ops.sequence_passes import DevicePasses, Keys, SequenceShards
from tests.ops.meshes import simulated_mesh
from tests.support.covering import covering

CAUSAL, FULL = Mask(True, None), Mask(False, None)
KINDS = {
    "gather": SequenceForm("gather"),
    "ulysses": SequenceForm("ulysses"),
    "ring": SequenceForm("ring"),
    "both": SequenceForm("both", ulysses=2),
    "zig-zag gather": SequenceForm("gather", "zigzag"),
    "zig-zag ulysses": SequenceForm("ulysses", "zigzag"),
    "zig-zag ring": SequenceForm("ring", "zigzag"),
    "zig-zag both": SequenceForm("both", "zigzag", ulysses=2),
}


def dense_mask(mask, positions, kv_positions):
    distance = positions[:, None] - kv_positions
    seen = jnp.ones(distance.shape, bool)
    if mask.causal:
        seen &= distance >= 0
    if mask.window is not None:
        seen &= abs(distance) < mask.window
    return seen


def dense(form, positions, kv_positions, q, k, v, *others):
    """The formula, of tokens at these positions."""
    ids = others[:2] if form.segments else None
    sinks = others[-1] if form.sinks else None
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = form.scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    if form.soft_cap is not None:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    seen = dense_mask(form.mask, positions, kv_positions)[None]
    if ids is not None:
        seen = seen & (ids[0][:, :, None] == ids[1][:, None])
    hidden = -jnp.inf if form.blind == "nan" else -1e30
    scores = jnp.where(seen[:, None], scores, hidden)
    if sinks is not None:
        more = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, more], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v, precision="highest")


def zigzag_order(length, parts):
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[r, 2 * parts - 1 - r]].reshape(-1) for r in range(parts)])


def documents(lengths, seq, batch=2):
    """Ids of documents of these lengths, other ones in each row."""
    row = np.resize(np.repeat(np.arange(len(lengths)), lengths), seq)
    return np.stack([np.roll(row, 5 * i) for i in range(batch)]).astype(np.int32)


CASES = {
    "causal": {},
    "full": {"mask": FULL},
    "window": {"mask": Mask(True, 11)},
    "wide window": {"mask": Mask(True, 40)},
    "window both ways": {"mask": Mask(False, 11)},
    "documents": {"documents": (7, 19, 3, 23, 12)},
    "documents both ways": {"mask": FULL, "documents": (7, 19, 3, 23, 12)},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "narrow values": {"v_dim": 4},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "all": {
        "mask": Mask(True, 21), "documents": (7, 19, 3, 23, 12), "soft_cap": 1.5, "sinks": True,
        "kv_heads": 2, "v_dim": 4,
    },
}  # fmt: skip


def given(
    *,
    mask=CAUSAL,
    documents_of=None,
    soft_cap=None,
    sinks=False,
    v_dim=8,
    kv_heads=8,
    seq=64,
    kv_seq=None,
    heads=8,
    batch=2,
    blind="undefined",
    dtype=jnp.float32,
    ids=None,
):
    kv_seq = kv_seq or seq
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (
        (batch, seq, heads, 8),
        (batch, kv_seq, kv_heads, 8),
        (batch, kv_seq, kv_heads, v_dim),
    )
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]
    if documents_of is not None:
        arrays += [jnp.asarray(documents(documents_of, n, batch)) for n in (seq, kv_seq)]
    if ids is not None:
        arrays += [jnp.asarray(x) for x in ids]
    if sinks:
        arrays.append(jax.random.normal(keys[3], (heads,), jnp.float32))
    d_out = jax.random.normal(keys[4], (batch, seq, heads, v_dim), dtype)
    form = AttentionForm(8**-0.5, mask, soft_cap, len(arrays) - sinks > 3, sinks, blind)
    return form, arrays, d_out


def with_gradients(attend, arrays, d_out):
    """(out, the gradients of q, k, v and sinks)"""
    inexact = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of_inexact(*floats):
        full = list(arrays)
        for i, x in zip(inexact, floats, strict=True):
            full[i] = x
        return attend(*full)

    out, pullback = jax.vjp(of_inexact, *(arrays[i] for i in inexact))
    return out, *pullback(d_out)


def sharded(form, how, arrays, d_out, mesh):
    """What devices compute, in the order of positions."""

    def body(q, k, *others):
        return dense(form, jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), q, k, *others)

    def ordered(x, back=False):
        if how.layout == "contiguous" or x.ndim < 2:
            return x
        places = zigzag_order(x.shape[1], mesh.shape["seq"])
        return x[:, np.argsort(places) if back else places]

    attend = functools.partial(over_sequence, form, how, body)
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(with_gradients, attend))(
            [ordered(x) for x in arrays], ordered(d_out)
        )
        jax.block_until_ready(found)
    return [ordered(x, back=True) for x in found]


def assert_equal(found, wanted, tolerance=1e-5):
    assert len(found) == len(wanted)
    for name, x, y in zip(("out", "dq", "dk", "dv", "d sinks"), found, wanted):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= tolerance, f"{name}: {error:.2e}"


@functools.cache
def case(name):
    options = dict(CASES[name])
    form, arrays, d_out = given(documents_of=options.pop("documents", None), **options)
    places = jnp.arange(arrays[0].shape[1])
    attend = functools.partial(dense, form, places, places)
    return form, arrays, d_out, jax.jit(functools.partial(with_gradients, attend))(arrays, d_out)


GRID = [
    (parts, tensor, kind, name)
    for parts, tensor in ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
    for kind in KINDS
    for name in CASES
    # Query heads have to divide by what exchanges them.
    if not ("ulysses" in kind and parts * tensor > 8)
]
DEFAULT = [
    (4, 1, "gather", "all"),
    (4, 2, "gather", "window both ways"),
    (8, 1, "gather", "sinks"),
    (4, 1, "ulysses", "all"),
    (4, 2, "ulysses", "one key head"),
    (8, 1, "ulysses", "documents"),
    (4, 1, "ring", "all"),
    (2, 2, "ring", "grouped"),
    (4, 1, "ring", "window"),
    (8, 1, "ring", "one key head"),
    (4, 1, "ring", "documents both ways"),
    (8, 1, "both", "causal"),
    (4, 2, "both", "all"),
    (4, 1, "zig-zag gather", "documents"),
    (4, 1, "zig-zag ring", "all"),
    (8, 1, "zig-zag ring", "documents"),
    (4, 2, "zig-zag ring", "causal"),
    (8, 1, "zig-zag both", "all"),
    (4, 1, "zig-zag ulysses", "narrow values"),
]


@pytest.mark.default_cases(every=19)
@pytest.mark.parametrize("parts, tensor, kind, name", covering(GRID, DEFAULT))
def test_values_and_gradients_equal_one_device(parts, tensor, kind, name):
    form, arrays, d_out, wanted = case(name)
    mesh = simulated_mesh(seq=parts, tensor=tensor, data=2 if parts * tensor < 8 else 1)
    assert_equal(sharded(form, KINDS[kind], arrays, d_out, mesh), wanted)


# -- rows that see no key, and lengths that the axis does not divide ------------------------------


@pytest.mark.default_cases("ulysses-mean", "ring-mean")
@pytest.mark.parametrize(
    "kind, blind",
    covering(
        [(kind, blind) for kind in KINDS for blind in ("mean", "nan")],
        [("ring", "mean"), ("zig-zag both", "nan"), ("gather", "nan"), ("ulysses", "mean")],
    ),
)
def test_queries_that_see_no_key_get_what_the_formula_gives(kind, blind):
    """Rows 0 to 9 of the first sample are of a document that has no key."""
    ids = np.zeros((2, 2, 64), np.int32)
    ids[0, 0, :10] = 1
    form, arrays, d_out = given(mask=FULL, ids=ids, blind=blind, kv_heads=2)
    mesh = simulated_mesh(seq=4)
    found = sharded(form, KINDS[kind], arrays, d_out, mesh)
    places = jnp.arange(64)
    wanted = with_gradients(functools.partial(dense, form, places, places), arrays, d_out)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=name)
        assert_equal([np.nan_to_num(x)], [np.nan_to_num(y)])
    assert np.isnan(np.asarray(found[0])).any() == (blind == "nan")


LENGTHS = {
    "causal": {"seq": 61},
    "full": {"seq": 61, "mask": FULL},
    "window both ways": {"seq": 61, "mask": Mask(False, 9)},
    "documents": {"seq": 61, "documents_of": (7, 19, 3, 23), "mask": FULL},
    "cross attention": {"seq": 61, "kv_seq": 37, "mask": FULL},
    "cross attention, even": {"seq": 64, "kv_seq": 32, "mask": FULL},
    "causal, fewer keys": {"seq": 61, "kv_seq": 37},
    "causal, more keys": {"seq": 37, "kv_seq": 61, "mask": Mask(True, 20)},
    "blind and uneven": {"seq": 61, "kv_seq": 37, "mask": Mask(True, 12), "blind": "mean"},
}


@pytest.mark.default_cases("ulysses-documents", "both-causal")
@pytest.mark.parametrize(
    "kind, name",
    covering(
        [(kind, name) for kind in KINDS if "zig-zag" not in kind for name in LENGTHS],
        [
            ("gather", "causal, more keys"),
            ("gather", "full"),
            ("ulysses", "documents"),
            ("ring", "cross attention"),
            ("ring", "blind and uneven"),
            ("both", "causal"),
        ],
    ),
)
def test_lengths_that_the_axis_does_not_divide(kind, name):
    form, arrays, d_out = given(**LENGTHS[name])
    found = sharded(form, KINDS[kind], arrays, d_out, simulated_mesh(seq=4))
    places = jnp.arange(arrays[0].shape[1]), jnp.arange(arrays[1].shape[1])
    wanted = with_gradients(functools.partial(dense, form, *places), arrays, d_out)
    if form.blind == "undefined":  # of queries behind the last key that they may see
        seen = dense_mask(form.mask, *places).any(1)
        if not seen.all():
            d_out = d_out * seen[:, None, None]
            found = sharded(form, KINDS[kind], arrays, d_out, simulated_mesh(seq=4))
            wanted = with_gradients(functools.partial(dense, form, *places), arrays, d_out)
            found[0], wanted = found[0][:, seen], (wanted[0][:, seen], *wanted[1:])
    assert_equal(found, wanted)


# -- programs that no kernel computes --------------------------------------------------------------


def general(q, k, v, bias, same, table):
    """A bias of heads, of positions' distances and of pairs, in the program's own way."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2)) / 3.0
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    scores = scores + bias - 0.1 * jnp.abs(distance)
    scores = jnp.where(same & (distance % 5 != 1), scores, -1e9) + table[None, None]
    shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, jnp.repeat(v, q.shape[2] // v.shape[2], 2))


@pytest.mark.sampled
@pytest.mark.parametrize("seq", covering([64, 61], [61]))
def test_a_general_program_runs_by_blocks_of_rows(seq, monkeypatch):
    monkeypatch.setattr(attention_rows, "MOST_SCORES", 2 * 8 * 64 * 6)
    monkeypatch.setattr(attention_rows, "FEWEST_ROWS", 4)
    _, (q, k, v), d_out = given(seq=seq, kv_heads=2)
    keys = jax.random.split(jax.random.key(1), 3)
    bias = jax.random.normal(keys[0], (1, 8, seq, seq))
    same = jax.random.bernoulli(keys[1], 0.7, (2, 1, seq, seq))
    table = jax.random.normal(keys[2], (seq, seq))
    form = AttentionForm(1.0, FULL, rows=(2, 2, 0))
    how = SequenceForm("gather")
    arrays = [q, k, v, bias, same, table]
    with jax.set_mesh(simulated_mesh(data=2, seq=4)):
        over = functools.partial(over_sequence, form, how, general)
        compiled = jax.jit(functools.partial(with_gradients, over)).lower(arrays, d_out).compile()
        found = compiled(arrays, d_out)
        exchanged = collectives(compiled.as_text(), simulated_mesh(data=2, seq=4))
    assert all(c.runs == 1 for c in exchanged), "gradients of keys are summed after the loop"
    wanted = with_gradients(general, arrays, d_out)
    for x, y in zip(found, wanted, strict=True):
        assert_equal([x], [y])


# -- what must not be left out of a ring -----------------------------------------------------------


def not_rescaled(patch):
    def merged(one, other):
        return other if one is None else (one[0] + other[0], jnp.logaddexp(one[1], other[1]))

    patch.setattr(sequence_passes, "_merged", merged)


def sending(change):
    """A mutation: `change(sent, x, hops)` arrives in place of what was sent."""

    def mutate(patch):
        send = SequenceShards.send
        patch.setattr(
            SequenceShards,
            "send",
            lambda self, x, hops=1: change(send(self, x, hops), x, hops),
        )

    return mutate


def without_ids(sent, x, hops):
    return sent._replace(ids=jnp.zeros_like(sent.ids)) if isinstance(x, Keys) else sent


def not_returned(place):
    def change(sent, x, hops):
        if hops > 0:
            return sent
        return tuple(jnp.zeros_like(s) if i == place else s for i, s in enumerate(sent))

    return change


def stale_key(patch):
    """In the backward pass the keys do not travel on."""
    backward, send, calls = DevicePasses._backward, SequenceShards.send, []

    def wrapped(self, *args):
        calls.append("backward")
        try:
            return backward(self, *args)
        finally:
            calls.clear()

    def stale(self, x, hops=1):
        return x if calls and isinstance(x, Keys) else send(self, x, hops)

    patch.setattr(DevicePasses, "_backward", wrapped)
    patch.setattr(SequenceShards, "send", stale)


MUTATIONS = {
    "not rescaled": not_rescaled,
    "ids dropped": sending(without_ids),
    "dK not returned": sending(not_returned(0)),
    "dV not returned": sending(not_returned(1)),
    "a stale key": stale_key,
}


@pytest.mark.parametrize("mutation", covering(MUTATIONS, ["ids dropped", "a stale key"]))
def test_a_ring_that_leaves_something_out_is_noticed(mutation, monkeypatch):
    form, arrays, d_out, wanted = case("documents both ways")
    MUTATIONS[mutation](monkeypatch)
    found = sharded(form, KINDS["ring"], arrays, d_out, simulated_mesh(seq=4))
    if mutation in ("dK not returned", "dV not returned", "a stale key"):
        assert_equal(found[:1], wanted[:1])  # of the backward pass alone
    with pytest.raises(AssertionError, match=r"e-0|e\+0"):
        assert_equal(found, wanted)


def test_what_cannot_run_is_refused_with_what_can():
    form = AttentionForm(1.0, CAUSAL)
    shape = {"seq": 64, "kv_seq": 64, "parts": 8}
    for kind in KINDS.values():
        assert refusal(form, kind, heads=8, **shape) is None
    assert "ring or gather, kind both with groups of 4" in refusal(
        form, KINDS["ulysses"], heads=12, **shape
    )
    assert "(2 on each device of tensor 4)" in refusal(
        form, KINDS["ulysses"], heads=8, tensor=4, **shape
    )
    assert "use contiguous" in refusal(form, KINDS["zig-zag ring"], heads=8, **shape | {"seq": 60})
    general_form = AttentionForm(1.0, CAUSAL, rows=(0,))
    assert "use gather or auto" in refusal(general_form, KINDS["ring"], heads=8, **shape)
    with (
        jax.set_mesh(simulated_mesh(seq=8)),
        pytest.raises(ModelError, match="attention over seq 8: 12 query heads"),
    ):
        q = jnp.zeros((1, 64, 12, 4))
        over_sequence(form, KINDS["ulysses"], lambda q, k, v: q, q, q, q)


def test_attention_is_one_equation_where_sequences_are_sharded():
    form, arrays, _ = given(documents_of=(7, 19), sinks=True, kv_heads=2)
    q, k, v, ids, _, sinks = arrays

    def attend(q, k, v):
        return attention(q, k, v, segment_ids=ids, sinks=sinks)

    with jax.set_mesh(simulated_mesh(seq=4)):
        traced = jax.make_jaxpr(attend)(q, k, v)
        out = jax.jit(attend)(q, k, v)
    assert [form_of(eqn) for eqn in traced.eqns] == [form]
    places = jnp.arange(64)
    assert_equal([out], [dense(form, places, places, *arrays)])
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(attend)(q, k, v).eqns}
    assert "attention_call" not in names


@pytest.mark.default_cases("gather")
@pytest.mark.parametrize("kind", covering(KINDS, ["zig-zag ring", "gather"]))
def test_narrow_types_lose_no_more_than_their_rounding(kind):
    form, arrays, d_out = given(dtype=jnp.bfloat16, documents_of=(7, 19, 3, 23), kv_heads=2)
    found = sharded(form, KINDS[kind], arrays, d_out, simulated_mesh(seq=4))
    assert all(x.dtype == jnp.bfloat16 for x in found)
    places = jnp.arange(64)
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    attend = functools.partial(dense, form, places, places)
    wanted = with_gradients(attend, wide, d_out.astype(jnp.float32))
    assert_equal(found, wanted, 4 * 2.0**-9)


KERNELS = [
    ("ring", CAUSAL, "tpu", "splash_mha"),
    ("gather", CAUSAL, "tpu", "splash_mha"),
    ("zig-zag ring", CAUSAL, "gpu", "dot_product_attention_fwd"),
    ("ulysses", CAUSAL, "gpu", "dot_product_attention_fwd"),
    ("gather", CAUSAL, "gpu", "pallas_call"),
    ("ring", Mask(True, 300), "gpu", "pallas_call"),
]


@pytest.mark.parametrize("kind, mask, platform, kernel", KERNELS)
def test_the_kernel_is_that_of_the_platform_for_which_it_is_traced(kind, mask, platform, kernel):
    form = AttentionForm(0.1, mask)
    q = jax.ShapeDtypeStruct((1, 2048, 8, 64), jnp.bfloat16)
    meant = splash.assumed(5) if platform == "tpu" else gpu.assumed((8, 0))
    with jax.set_mesh(simulated_mesh(seq=4)), meant:
        over = functools.partial(over_sequence, form, KINDS[kind], lambda q, k, v: q)
        traced = str(jax.make_jaxpr(functools.partial(with_gradients, over))([q, q, q], q))
    assert kernel in traced
    assert "platform_index" not in traced
