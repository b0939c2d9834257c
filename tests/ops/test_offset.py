"""Kernels with an offset: queries against parts of the keys, merged by their log-sum-exps."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.ops import gpu, mosaic_gpu, row_blocks, splash, triton
from jaxspeed.ops.mask import KernelCall, Mask, Segments
from jaxspeed.ops.score_blocks import ScoreBlocks
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.support.covering import covering
from tests.support.topology import run_on_topology

LENGTH = 384  # tokens of a sequence, of which a device has a part as its queries
SCALE = 0.2


def packed(lengths):
    """[2, LENGTH] ids of documents of these lengths; the second row is shifted."""
    row = np.resize(np.repeat(np.arange(len(lengths)), lengths), LENGTH)
    return np.stack([row, np.roll(row, 7)]).astype(np.int32)


DOCUMENTS = {"ids": packed([70, 25, 105, 31, 153])}
FORMS = {
    "causal": {},
    "both ways": {"causal": False},
    "window, narrow": {"window": 17},
    "window both ways": {"causal": False, "window": 140},
    "documents": DOCUMENTS,
    "documents both ways": DOCUMENTS | {"causal": False},
    "documents with a window and soft cap": DOCUMENTS | {"window": 90, "soft_cap": 1.5},
}
# (the queries' positions, edges of the parts of the keys)
SPLITS = {
    "the second of three shards": (range(128, 256), (0, 128, 256, 384)),
    "the first shard, all keys": (range(128), (0, 384)),
    "the last shard, fewer keys": (range(256, 384), (0, 128)),
    "the second of two shards, all keys": (range(128, 256), (0, 256)),
}


SPLITS_OF_ALL = {"all queries, all keys": (range(384), (0, 384))}


def merged(kernel, q, k, v, d_out, ids, positions, edges, mask, soft_cap, **more):
    """(out, dq, dk, dv) of queries at these positions, from one call for each part of the keys."""
    call = KernelCall(mask, SCALE, soft_cap, **more)

    @jax.jit
    def run(q, k, v, d_out, ids, first):
        calls = []
        for low, high in itertools.pairwise(edges):
            part = slice(low, high)
            segments = None
            if ids is not None:
                of_queries = jax.lax.dynamic_slice_in_dim(ids, first, len(positions), axis=1)
                segments = Segments(of_queries, ids[:, part])
            calls.append((k[:, part], v[:, part], segments, first - low))
        found = [
            kernel.forward(call, q, k, v, segments, offset=offset)
            for k, v, segments, offset in calls
        ]
        sums = jax.nn.logsumexp(jnp.stack([s for _, s in found]), axis=0)
        out = sum(
            out.astype(jnp.float32) * jnp.exp(s - sums).swapaxes(1, 2)[..., None]
            for out, s in found
        ).astype(q.dtype)
        d_q, d_k, d_v = zip(
            *(
                kernel.backward(call, q, k, v, segments, out, sums, d_out, offset=offset)
                for k, v, segments, offset in calls
            ),
            strict=True,
        )
        wide = sum(x.astype(jnp.float32) for x in d_q)
        return found, (out, wide, jnp.concatenate(d_k, axis=1), jnp.concatenate(d_v, axis=1))

    return run(q, k, v, d_out, ids, jnp.int32(positions.start))


def errors(kernel, split, *, causal=True, window=None, ids=None, soft_cap=None, **more):
    """Of the merged result and gradients, relative to the formula's largest."""
    positions, edges = (SPLITS | SPLITS_OF_ALL)[split]
    dtype, heads, dims = more.pop("dtype", "float32"), (4, 2), more.pop("head_dim", 16)
    if "heads" in more:
        heads = more.pop("heads")
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, n, h, dims) for n, h in ((len(positions), heads[0]), (edges[-1], heads[1]))]
    q, k, v, d_out = (
        jax.random.normal(key, shapes[i], dtype) for key, i in zip(keys, (0, 1, 1, 0))
    )
    dense = seen(
        len(positions),
        edges[-1],
        causal=causal,
        window=window,
        segments=None if ids is None else ids[:, positions.start : positions.stop],
        kv_segments=None if ids is None else ids[:, : edges[-1]],
        offset=positions.start,
    )
    sees = np.broadcast_to(dense.any(-1), q.shape[:2])  # [batch, seq]
    mask = Mask(causal, window)
    every = None if ids is None else jnp.asarray(ids)
    calls, found = merged(kernel, q, k, v, d_out, every, positions, edges, mask, soft_cap, **more)
    for (low, high), (out, sums) in zip(itertools.pairwise(edges), calls, strict=True):
        assert not np.isnan(sums).any() and np.isfinite(np.asarray(out, np.float32)).all()
        blind = np.broadcast_to(~dense[:, :, low:high].any(-1)[:, None], sums.shape)
        assert (np.asarray(sums)[blind] < -1e29).all() and np.isfinite(sums[~blind]).all()
    # A query that sees no key adds nothing to the gradients.
    d_seen = np.where(sees[..., None, None], d_out, 0)
    shown = np.where(sees[..., None], dense, True)
    wanted = attention_and_gradients(q, k, v, d_seen, shown, SCALE, soft_cap)
    out, *gradients = (np.asarray(x).astype(np.float64) for x in found)
    out, wanted_out = (np.where(sees[..., None, None], x, 0) for x in (out, wanted[0]))
    pairs = zip((out, *gradients), (wanted_out, *wanted[1:]), strict=True)
    return [np.abs(x - y).max() / max(1, np.abs(y).max()) for x, y in pairs]


CASES = covering(
    list(itertools.product(FORMS, SPLITS)),
    [
        ("causal", "the second of three shards"),
        ("window both ways", "the last shard, fewer keys"),  # most queries see no key
        ("documents with a window and soft cap", "the second of three shards"),
        ("documents both ways", "the first shard, all keys"),
    ],
)


@pytest.mark.default_cases(
    "window both ways-the last shard, fewer keys", "documents both ways-the first shard, all keys"
)
@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_blocks_of_rows(form, split, monkeypatch):
    monkeypatch.setattr(row_blocks, "LARGEST", 50)
    assert max(errors(row_blocks, split, **FORMS[form])) < 1e-6


def test_blocks_of_rows_in_narrow_types(monkeypatch):
    monkeypatch.setattr(row_blocks, "LARGEST", 50)
    run = functools.partial(errors, row_blocks, "the second of three shards", **DOCUMENTS)
    assert max(run(dtype="bfloat16")) < 4 * 2.0**-9


@pytest.mark.default_cases("window both ways-the last shard, fewer keys")
@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_splash(form, split):
    assert max(errors(splash, split, **FORMS[form], interpret=True)) < 2e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    "form", covering([*FORMS], ["causal", "documents with a window and soft cap"])
)
def test_queries_in_pieces_by_splash(form, monkeypatch):
    """Of which tables fit in scalar memory: here those of one block of queries."""
    q, k, v, d_out = (jax.random.normal(jax.random.key(i), (1, 384, 2, 16)) for i in range(4))
    given = dict(FORMS[form])
    mask = Mask(given.get("causal", True), given.get("window"))
    call = KernelCall(mask, 0.25, given.get("soft_cap"), interpret=True)
    segments = Segments(*[jnp.asarray(given["ids"][:1])] * 2) if "ids" in given else None

    def passes():
        out, sums = splash.forward(call, q, k, v, segments)
        return out, sums, *splash.backward(call, q, k, v, segments, out, sums, d_out)

    expected = passes()
    monkeypatch.setattr(splash, "TABLES", 9)
    assert splash._Pieces.of(q, k, mask, None).count == 3
    for ours, theirs in zip(passes(), expected, strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-6
    split = "all queries, all keys"
    assert max(errors(splash, split, **FORMS[form], interpret=True)) < 2e-6


@pytest.mark.default_cases("window both ways-the last shard, fewer keys")
@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_triton(form, split):
    assert max(errors(triton, split, **FORMS[form], interpret=True)) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("form", "split"),
    covering(
        list(itertools.product(FORMS, SPLITS)),
        [("documents with a window and soft cap", "the second of two shards, all keys")],
    ),
)
def test_parts_of_the_keys_by_mosaic_gpu(form, split):
    assert max(errors(mosaic_gpu, split, **FORMS[form], heads=(2, 1), interpret=True)) < 1e-6


LENGTHS = [(640, 640), (384, 640), (640, 384), (3072, 1024)]


@pytest.mark.parametrize("sides", [None, (None, 0), (199, 0), (139, 139), (0, 0)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_tables_by_formula_equal_those_of_splash(lengths, sides):
    from jax.experimental.pallas.ops.tpu import splash_attention as own

    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), "float32") for n in lengths)
    causal, window = sides is not None and sides[1] == 0, None
    if sides is not None and sides[0] is not None:
        window = sides[0] + 1
    if sides == (0, 0):
        causal = False
    found = splash._tables(q, k, None, Mask(causal, window), None)
    found = found.kernel(False, attn_logits_soft_cap=None)
    mask = own.FullMask(lengths) if sides is None else own.LocalMask(lengths, sides, 0)
    given = {"block_sizes": found.kwargs["block_sizes"], "head_shards": 1, "q_seq_shards": 1}
    wanted = own.make_splash_mha(own.MultiHeadMask([mask] * 4), **given)
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        for field, x in getattr(wanted, name)._asdict().items():
            y = getattr(getattr(found, name), field)
            assert (x is None) == (y is None), (name, field)
            if x is not None:
                assert x.dtype == y.dtype and np.array_equal(x, y), (name, field)
    options = [{**each.kwargs, "mask_function": None} for each in (found, wanted)]
    assert options[0] == options[1]


@pytest.mark.parametrize("offset", [None, jnp.int32(2**19)])
def test_a_million_tokens_trace_in_seconds(offset):
    x = jax.ShapeDtypeStruct((1, 2**20, 1, 128), jnp.bfloat16)
    sums = jax.ShapeDtypeStruct((1, 1, 2**20), jnp.float32)
    call, start = KernelCall(Mask(True, None), 1.0), time.process_time()
    for kernel, more in ((splash.forward, ()), (splash.backward, (x, sums, x))):
        jax.eval_shape(functools.partial(kernel, call, offset=offset), x, x, x, None, *more)
    assert time.process_time() - start < 10


@pytest.mark.sampled
@settings(max_examples=12, deadline=None)
@given(
    st.booleans(),
    st.none() | st.integers(1, 900),
    st.sampled_from([(2, 5), (3, 2)]),
    st.integers(-700, 900),
    st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=6),
)
def test_steps_compute_what_is_seen_and_load_what_is_computed_next(
    causal, window, counts, offset, documents
):
    seq, kv_seq = (128 * n for n in counts)
    mask = Mask(causal, window)
    blocks = ScoreBlocks(mask, 1.0, None, seq, kv_seq, 128, 128)
    segments = None
    if documents is not None:
        ids = np.resize(np.repeat(np.arange(len(documents)), documents), seq + kv_seq)
        ids = np.sort(ids)  # documents in a row
        segments = Segments(jnp.asarray(ids[None, :seq]), jnp.asarray(ids[None, -kv_seq:]))
    tables = splash._Tables.of(blocks, jnp.int32(offset), segments)
    dense = seen(seq, kv_seq, causal=causal, window=window, segments=None, offset=offset)[0]
    tiles = dense.reshape(counts[0], 128, counts[1], 128)
    states = np.where(tiles.any((1, 3)), 2 - ~tiles.all((1, 3)), 0)
    if segments is not None:
        states *= np.asarray(blocks.overlap(segments))[0]
    computed = 0
    for of_keys, (loads, state) in enumerate((tables.by_queries, tables.by_keys)):
        loads, state = (np.asarray(x)[0].T if of_keys else np.asarray(x)[0] for x in (loads, state))
        found = np.zeros_like(states.T if of_keys else states)
        for row, (which, what) in enumerate(zip(loads, state, strict=True)):
            steps = np.flatnonzero(what)
            assert (np.diff(which[steps]) > 0).all()  # each block once
            found[row, which[steps]] = what[steps]
            if steps.size:
                later = [steps[steps >= step] for step in range(len(what))]
                nearest = [which[rest[0] if rest.size else steps[-1]] for rest in later]
                assert which.tolist() == nearest
            else:
                assert (which == 0).all()
        assert (found == (states.T if of_keys else states)).all()
        computed = max(computed, np.count_nonzero(found))
    assert computed <= tables.computed


@given(
    st.booleans(),
    st.none() | st.integers(1, 200),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(-150, 150),
)
def test_blocks_at_an_offset_are_counted(causal, window, lengths, sides, offset):
    mask = Mask(causal, window)
    dense = seen(*lengths, causal=causal, window=window, segments=None, offset=offset)[0]
    count = [-(-n // side) for n, side in zip(lengths, sides)]
    wide = np.zeros([n * side for n, side in zip(count, sides)], bool)
    wide[: lengths[0], : lengths[1]] = dense
    tiles = wide.reshape(count[0], sides[0], count[1], sides[1]).any((1, 3))
    assert mask.blocks(*lengths, *sides, offset) == (tiles.sum(), tiles.size)
    assert mask.blocks(*lengths, 1, 1, offset)[0] == dense.sum()
    assert tiles.sum(1).max() <= mask.most_beside(*sides, count[1])
    assert tiles.sum(0).max() <= mask.most_beside(*sides[::-1], count[0])


@pytest.mark.parametrize(
    ("causal", "window", "with_segments"),
    covering([(True, None, False), (True, 300, True), (False, None, True)], [(True, 300, True)]),
)
def test_a_shard_of_queries_compiles_for_a_tpu(causal, window, with_segments):
    """Its offset is the device's, so the tables are computed at run time."""
    form = {"causal": causal, "window": window, "with_segments": with_segments}
    found = run_on_topology("tests.ops.offset_programs:on_tpu", "v5e:2x2", length=2048, **form)
    assert sorted(found) == ["dkv", "dq", "fwd"]


@pytest.mark.full  # half a minute
def test_a_shard_of_a_million_tokens_compiles_for_a_tpu():
    """Tables of all its queries would have twice the bytes of a core's scalar memory."""
    form = {"causal": True, "window": None, "with_segments": True}
    found = run_on_topology("tests.ops.offset_programs:on_tpu", "v5e:2x2", length=2**20, **form)
    assert sorted(found) == ["dkv", "dq", "fwd"]


@pytest.mark.parametrize(
    ("kernel", "capability", "mark"),
    [(triton, (8, 0), "__gpu$xla.gpu.triton"), (mosaic_gpu, (9, 0), "mosaic_gpu_v2")],
)
def test_kernels_of_gpus_lower_with_an_offset(kernel, capability, mark):
    x, k = (jax.ShapeDtypeStruct((1, n, h, 64), jnp.bfloat16) for n, h in ((256, 2), (512, 1)))
    sums = jax.ShapeDtypeStruct((1, 2, 256), jnp.float32)
    ids = Segments(*(jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (256, 512)))

    def passes(q, k, ids, sums, offset):
        call = KernelCall(Mask(True, 300), 1.0)
        forward = kernel.forward(call, q, k, k, ids, offset=offset)
        return forward, kernel.backward(call, q, k, k, ids, q, sums, q, offset=offset)

    offset = jax.ShapeDtypeStruct((), jnp.int32)
    with gpu.assumed(capability):
        traced = jax.jit(passes).trace(x, k, ids, sums, offset)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count(mark) >= 3
