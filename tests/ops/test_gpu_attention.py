"""GPUs' kernels: the own ones interpreted, and what cuDNN is given for packed documents."""

import functools
import itertools
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.ops import attention, cudnn, gpu, mosaic_gpu, triton
from jaxspeed.ops.mask import KernelCall, Mask, Segments
from jaxspeed.ops.score_blocks import ScoreBlocks
from jaxspeed.ops.two_passes import in_two_passes, with_sinks
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.support.covering import covering

BLACKWELL, HOPPER, AMPERE = (10, 0), (9, 0), (8, 0)


def random_arrays(batch, seq, kv_seq, heads, kv_heads, head_dim, dtype):
    shapes = [(batch, n, h, head_dim) for n, h in ((seq, heads), (kv_seq, kv_heads))]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, shapes[i], dtype) for k, i in zip(keys, (0, 1, 1, 0))]


def errors(kernel=triton, *, seq, heads, kv_heads, head_dim, causal, window, segments, **more):
    """Of the result and the gradients of q, k, v (and sinks), relative to the formula's largest."""
    kv_seq, dtype = more.get("kv_seq", seq), more.get("dtype", "float32")
    batch = more.get("batch", 2)
    args = random_arrays(batch, seq, kv_seq, heads, kv_heads, head_dim, dtype)
    sinks = [jnp.linspace(-1.0, 3.0, heads)] if more.get("sinks") else []
    soft_cap = more.get("soft_cap")
    segments = None if segments is None else segments[:batch]
    dense = seen(seq, kv_seq, causal=causal, window=window, segments=segments)
    scale = more.get("scale", 0.3)
    wanted = attention_and_gradients(*args, dense, scale, soft_cap, *sinks)
    call = KernelCall(Mask(causal, window), scale, soft_cap, interpret=True)
    passes = (functools.partial(p, call) for p in (kernel.forward, kernel.backward))
    attend = in_two_passes(*with_sinks(*passes))
    ids = None if segments is None else Segments(jnp.asarray(segments), jnp.asarray(segments))
    *qkv, d_out = args
    out, pullback = jax.vjp(lambda q, k, v, s=None: attend(q, k, v, ids, s), *qkv, *sinks)
    found = (out, *pullback(d_out))
    assert [x.dtype for x in found[:4]] == [dtype] * 4
    pairs = [(np.asarray(x).astype(np.float64), y) for x, y in zip(found, wanted, strict=True)]
    return [np.abs(x - y).max() / max(1, np.abs(y).max()) for x, y in pairs]


def interpreted(kernel):
    """A pass of a kernel, interpreted whatever its call says."""
    return lambda call, *args, **more: kernel(replace(call, interpret=True), *args, **more)


def runs(seq, ids):
    """[2, seq], from (id, length) of its runs, repeated; the second row is shifted."""
    row = np.resize(np.concatenate([np.full(length, name) for name, length in ids]), seq)
    return np.stack([row, np.roll(row, 7)]).astype(np.int32)


LONG = {"seq": 200, "heads": 4, "kv_heads": 2, "head_dim": 32, "causal": True, "window": None}
PACKED = LONG | {"segments": runs(200, [(1, 70), (2, 25), (3, 105)])}
FORMS = {
    "causal, incomplete blocks": LONG | {"segments": None},
    "documents": PACKED,
    "documents with a window, soft cap and sinks": PACKED
    | {"window": 40, "soft_cap": 1.5, "sinks": True},
    "ids that come again, both ways": PACKED
    | {"causal": False, "segments": runs(200, [(5, 30), (2, 50), (5, 40)])},
    "window both ways, more keys": LONG
    | {"causal": False, "window": 33, "segments": None, "kv_seq": 300},
    "head_dim that is no power of 2": LONG | {"head_dim": 20, "segments": None},
}


@pytest.mark.default_cases("ids that come again, both ways")
@pytest.mark.parametrize(
    "name",
    covering(
        list(FORMS),
        ["documents with a window, soft cap and sinks", "ids that come again, both ways"],
    ),
)
def test_triton_equals_the_formula(name):
    assert max(errors(**FORMS[name])) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 4 * 2.0**-9), ("float16", 4 * 2.0**-11)])
def test_triton_in_narrow_types(dtype, bound):
    assert max(errors(**PACKED, dtype=dtype)) < bound


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    st.integers(16, 160),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]),
    st.sampled_from([8, 16, 40]),
    st.booleans(),
    st.none() | st.integers(1, 170),
    st.none() | st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 90)), min_size=1, max_size=9),
    st.none() | st.sampled_from([0.5, 30.0]),
)
def test_triton_equals_the_formula_for_any_shape(
    seq, heads, head_dim, causal, window, ids, soft_cap
):
    form = {"seq": seq, "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    segments = None if ids is None else runs(seq, ids)
    more = {"window": window, "segments": segments, "soft_cap": soft_cap}
    assert max(errors(**form, **more, causal=causal)) < 1e-5


MOSAIC_FORMS = {
    name: FORMS[name] | {"heads": 2, "kv_heads": 1, "batch": 1 + (name == "documents")}
    for name in FORMS
    if name != "head_dim that is no power of 2"
} | {
    "documents, heads of 72, not grouped": PACKED
    | {"heads": 1, "kv_heads": 1, "head_dim": 72, "scale": 0.1, "batch": 1},
    "both ways, full blocks": LONG
    | {"seq": 384, "heads": 1, "kv_heads": 1, "head_dim": 64, "causal": False, "segments": None}
    | {"scale": 0.1, "batch": 1},
}


@pytest.mark.parametrize(
    "name", covering(list(MOSAIC_FORMS), ["documents with a window, soft cap and sinks"])
)
def test_mosaic_gpu_equals_the_formula(name):
    assert max(errors(mosaic_gpu, **MOSAIC_FORMS[name])) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 4 * 2.0**-9), ("float16", 4 * 2.0**-11)])
def test_mosaic_gpu_in_narrow_types(dtype, bound):
    form = MOSAIC_FORMS["documents with a window, soft cap and sinks"] | {"sinks": False}
    assert max(errors(mosaic_gpu, **form, dtype=dtype)) < bound


@pytest.mark.sampled
@given(
    st.booleans(),
    st.none() | st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([(16, 32), (32, 16)]),
)
def test_only_blocks_in_which_every_key_is_seen_have_no_mask(causal, window, seq, kv_seq, sides):
    mask = Mask(causal, window)
    blocks = ScoreBlocks(mask, 1.0, None, seq, kv_seq, *sides)
    wide = [n * side for n, side in zip((blocks.blocks_q, blocks.blocks_k), sides)]
    shown = np.array(mask.dense(*wide)) & (np.arange(wide[1]) < kv_seq)
    tiles = shown.reshape(blocks.blocks_q, sides[0], blocks.blocks_k, sides[1])
    rows = blocks.rows_of(np.arange(blocks.blocks_q)[:, None])
    hides = blocks.hides(rows, blocks.columns_of(np.arange(blocks.blocks_k)))
    assert (~tiles.all((1, 3)) == np.asarray(hides)).all()


@pytest.mark.sampled
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 300), st.integers(0, 2**31))
def test_no_block_is_left_out_in_which_ids_are_equal(q_blocks, k_blocks, names, seed):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(-names, names + 1, (1, 16 * n)) for n in (q_blocks, k_blocks)]
    q, kv = (jnp.asarray(x, jnp.int32) for x in ids)
    blocks = ScoreBlocks(Mask(False, None), 1.0, None, q.size, kv.size, 16, 16)
    pairs = (ids[0][0][:, None] == ids[1][0]).reshape(q_blocks, 16, k_blocks, 16).any((1, 3))
    for (first, stop), visible in (
        (blocks.seen_by_queries(Segments(q, kv)), pairs),
        (blocks.seen_by_keys(Segments(q, kv)), pairs.T),
    ):
        for i, row in enumerate(visible):
            assert all(first[0, i] <= j < stop[0, i] for j in np.flatnonzero(row))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_of_packed_documents_only_blocks_with_a_visible_score_are_computed(lengths):
    ids = runs(112, [*enumerate(lengths)])[:1] if sum(lengths) >= 112 else None
    if ids is None:
        return
    blocks = ScoreBlocks(Mask(False, None), 1.0, None, 112, 112, 16, 16)
    both = Segments(jnp.asarray(ids), jnp.asarray(ids))
    pairs = (ids[0][:, None] == ids[0]).reshape(7, 16, 7, 16).any((1, 3))
    first, stop = (np.asarray(x)[0] for x in blocks.seen_by_queries(both))
    assert first.tolist() == pairs.argmax(1).tolist()
    assert stop.tolist() == (7 - pairs[:, ::-1].argmax(1)).tolist()


# -- cuDNN -----------------------------------------------------------------------------------------


def documents_of(row):
    """[(start, length, id)] of the runs of a row, from the definition."""
    edges = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    return [(a, b - a, int(row[a])) for a, b in itertools.pairwise(edges)]


rows = st.lists(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 9) | st.integers(30, 200)),
        min_size=1,
        max_size=8,
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.sampled
@settings(deadline=None)
@given(rows, st.sampled_from([64, 200]), st.booleans())
def test_documents_are_the_runs_of_ids(given_rows, seq, same_keys):
    ids = np.stack(
        [
            np.resize(np.concatenate([np.full(n, name) for name, n in row]), seq)
            for row in given_rows
        ]
    ).astype(np.int32)
    keys = ids if same_keys else ids + 1
    found = cudnn.PackedDocuments.of(Segments(jnp.asarray(ids), jnp.asarray(keys)))
    wanted = [documents_of(row) for row in ids]
    fit = all(
        len(row) <= cudnn.MOST_DOCUMENTS and len({name for *_, name in row}) == len(row)
        for row in wanted
    )
    assert bool(found.fit) == (fit and same_keys)
    if not fit:
        return
    for i, row in enumerate(wanted):
        more = [-1] * (cudnn.MOST_DOCUMENTS - len(row))
        assert found.starts[i].tolist() == [start for start, *_ in row] + more
        assert found.lengths[i].tolist() == [length for _, length, _ in row] + more
        assert found.offsets[i].tolist() == [*found.starts[i].tolist(), -1]

    # Sums of cuDNN's layout, [documents of the batch in order, heads, place in the document].
    sums = np.random.default_rng(0).normal(size=(len(ids), 2, seq)).astype(np.float32)
    packed = np.asarray(found.by_document(jnp.asarray(sums)))
    assert packed.shape == (len(ids) * cudnn.MOST_DOCUMENTS, 2, seq)
    numbered = [(i, start, length) for i, row in enumerate(wanted) for start, length, _ in row]
    for number, (i, start, length) in enumerate(numbered):
        assert (packed[number, :, :length] == sums[i, :, start : start + length]).all()
    assert (np.asarray(found.by_token(jnp.asarray(packed))) == sums).all()


def lowered(capability, head_dim=64, dtype="bfloat16", **options):
    """The gradients of a packed attention, for a GPU that is not here."""
    q, k = (jax.ShapeDtypeStruct((2, 256, h, head_dim), dtype) for h in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def gradients(q, k, v, ids):
        attend = functools.partial(attention, segment_ids=ids, **options)
        return jax.vjp(attend, q, k, v)[1](q)

    with gpu.assumed(capability):
        traced = jax.jit(gradients).trace(q, k, k, ids)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


CALL = re.compile(
    r'custom_call @"?__cudnn\$fmhaSoftmax(Backward)?"?\([^)]*\)'
    r'.*?backend_config = "(.*?)", .*?: \((.*)\) ->'
)


def cudnn_calls(text):
    """{is backward: (types of the operands, configuration)}."""
    return {
        bool(back): (types.split(", "), json.loads(found.replace("\\22", '"')))
        for back, found, types in CALL.findall(text)
    }


@pytest.mark.default_cases("True-100", "False-None")
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 100), (False, None)])
def test_cudnn_is_given_documents_by_offsets(causal, window):
    found = cudnn_calls(lowered(HOPPER, causal=causal, window=window))
    assert set(found) == {False, True}
    most = cudnn.MOST_DOCUMENTS
    lengths, offsets = f"tensor<2x{most}xi32>", f"tensor<2x{most + 1}xi32>"
    # As many key heads as query heads: jax 0.10.2 gets the offsets of fewer wrong.
    wide, sums = "tensor<2x256x4x64xbf16>", f"tensor<{2 * most}x4x256xf32>"
    packed = [lengths, lengths, offsets, offsets]
    assert found[False][0] == [wide] * 3 + packed
    assert found[True][0] == [wide] * 3 + [sums, wide, wide] + packed
    for _, config in found.values():
        config = config["cudnn_fmha_backend_config"]
        assert config["mask_type"] == ("PADDING_CAUSAL" if causal else "PADDING")
        assert config["max_seg_per_batch"] == most
        assert config["sliding_window_length"] == (window or 0)


@pytest.mark.default_cases(
    "capability3-options3-calls3",
    "capability4-options4-calls4",
    "capability5-options5-calls5",
    "capability6-options6-calls6",
    "capability7-options7-calls7",
)
@pytest.mark.parametrize(
    ("capability", "options", "calls"),
    [
        (HOPPER, {}, ("cudnn", "mosaic_gpu")),
        pytest.param(HOPPER, {"soft_cap": 5.0}, ("mosaic_gpu",), marks=pytest.mark.full),
        pytest.param(
            *(HOPPER, {"causal": False, "window": 9, "head_dim": 128}, ("mosaic_gpu",)),
            marks=pytest.mark.full,
        ),
        (HOPPER, {"head_dim": 256}, ("triton",)),
        (HOPPER, {"dtype": "float32"}, ("triton",)),
        (BLACKWELL, {"soft_cap": 5.0}, ("triton",)),
        (AMPERE, {}, ("triton",)),
        ((7, 0), {}, ()),
    ],
)
def test_packed_documents_have_the_kernels_of_the_gpu(capability, options, calls):
    text = lowered(capability, **options)
    marks = {
        "cudnn": "__cudnn$fmha",
        "mosaic_gpu": "mosaic_gpu_v2",
        "triton": "__gpu$xla.gpu.triton",
    }
    assert tuple(name for name, mark in marks.items() if mark in text) == calls


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_a_jax_without_a_backend_for_triton_materializes_the_scores(capability, monkeypatch):
    monkeypatch.setattr(triton, "_has_backend", lambda: False)
    text = lowered(capability, head_dim=256)
    assert "custom_call @__" not in text and "tensor<2x2x2x256x256xf32>" in text


def test_more_elements_than_32_bits_count_go_to_triton():
    """A device's: attention of a global batch may have more."""
    call = KernelCall(Mask(True, None), 1.0)
    for batch, conds in ((2**13, 1), (2**14, 0)):
        x = jax.ShapeDtypeStruct((batch, 1024, 1, 128), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((batch, 1024), jnp.int32)
        run = functools.partial(cudnn.forward, call)
        with gpu.assumed(HOPPER):
            assert cudnn.supports(x, x, x, Segments(ids, ids), call.mask)
            traced = jax.make_jaxpr(run)(x, x, x, Segments(ids, ids))
        assert sum(eqn.primitive.name == "cond" for eqn in traced.eqns) == conds


def packed_by_formula(documents, q, k, v, mask, scale):
    """In place of cuDNN: plain attention within the documents that it is given.

    With its residual, sums of each document from 0 on, where behind a document's end is garbage.
    """

    @jax.custom_vjp
    def attend(q, k, v):
        return run(q, k, v)[0]

    def run(q, k, v):
        starts, lengths = (np.asarray(x) for x in (documents.starts, documents.lengths))
        q, k, v = (np.asarray(x) for x in (q, k, v))
        out = np.zeros_like(q)
        sums = np.full((starts.size, q.shape[2], q.shape[1]), np.nan, np.float32)
        number = 0
        for i, row in enumerate(starts):
            for start, length in zip(row, lengths[i]):
                if start < 0:
                    continue
                at = slice(start, start + length)
                shown = np.asarray(mask.dense(int(length), int(length)))
                scores = scale * np.einsum("qhd,khd->hqk", q[i, at], k[i, at])
                shares = np.exp(np.where(shown, scores, -np.inf))
                total = shares.sum(-1)
                out[i, at] = np.einsum("hqk,khd->qhd", shares / total[..., None], v[i, at])
                sums[number, :, :length] = np.log(total)
                number += 1
        return jnp.asarray(out), jnp.asarray(sums)

    def forward(q, k, v):
        out, sums = run(q, k, v)
        return out, (q, k, v, out, sums)

    def backward(saved, d):
        *qkv, out, sums = (np.asarray(x) for x in saved)
        assert np.allclose(out, run(*qkv)[0])
        wanted = np.asarray(run(*qkv)[1])
        valid = ~np.isnan(wanted)
        assert np.allclose(sums[valid], wanted[valid], atol=1e-5) and np.isfinite(sums).all()
        ids = np.asarray(documents.document)
        dense = seen(d.shape[1], d.shape[1], causal=mask.causal, window=mask.window, segments=ids)
        found = attention_and_gradients(*qkv, d, dense, scale)
        return tuple(jnp.asarray(x, jnp.float32) for x in found[1:])

    attend.defvjp(forward, backward)
    return attend(q, k, v)


@pytest.mark.default_cases("ids1")
@pytest.mark.parametrize("ids", [[(1, 30), (2, 50), (3, 20), (0, 28)], [(1, 30), (2, 50), (1, 48)]])
def test_both_passes_of_packed_documents_equal_the_formula(ids, monkeypatch):
    """With cuDNN's part by a formula, and for ids that come again with Triton's."""
    given_to_cudnn = []

    def instead(*args, **form):
        given_to_cudnn.append(args)
        return packed_by_formula(*args, **form)

    monkeypatch.setattr(cudnn, "_packed", instead)
    for name in ("forward", "backward"):
        monkeypatch.setattr(triton, name, interpreted(getattr(triton, name)))
    monkeypatch.setattr(
        jax.lax, "cond", lambda on, yes, no, *args: (yes if bool(on) else no)(*args)
    )
    segments = runs(128, ids)
    segments[1] = segments[0]
    q, k, v, d = random_arrays(2, 128, 128, 4, 2, 16, "float32")
    both = Segments(jnp.asarray(segments), jnp.asarray(segments))
    call = KernelCall(Mask(True, 40), 0.3)
    passes = (functools.partial(p, call) for p in (cudnn.forward, cudnn.backward))
    attend = in_two_passes(*with_sinks(*passes))
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, both, None), q, k, v)
    dense = seen(128, 128, causal=True, window=40, segments=segments)
    wanted = attention_and_gradients(q, k, v, d, dense, 0.3)
    for x, y in zip((out, *pullback(d)), wanted, strict=True):
        assert np.linalg.norm(x - y) < 1e-6 * np.linalg.norm(y)
    assert bool(given_to_cudnn) == (len({name for name, _ in ids}) == len(ids))
