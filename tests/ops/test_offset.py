"""Kernels with an offset: queries against parts of the keys, merged by their log-sum-exps."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops import mosaic_gpu, row_blocks, splash, triton
from jaxspeed.ops.mask import Mask, Segments
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.support.covering import covering

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
}


def merged(kernel, q, k, v, d_out, ids, positions, edges, mask, soft_cap, **more):
    """(out, dq, dk, dv) of queries at these positions, from one call for each part of the keys."""
    form = {"mask": mask, "scale": SCALE, "soft_cap": soft_cap} | more

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
            kernel.forward(q, k, v, segments, offset=offset, **form)
            for k, v, segments, offset in calls
        ]
        sums = jax.nn.logsumexp(jnp.stack([s for _, s in found]), axis=0)
        out = sum(
            out.astype(jnp.float32) * jnp.exp(s - sums).swapaxes(1, 2)[..., None]
            for out, s in found
        ).astype(q.dtype)
        d_q, d_k, d_v = zip(
            *(
                kernel.backward(q, k, v, segments, out, sums, d_out, offset=offset, **form)
                for k, v, segments, offset in calls
            ),
            strict=True,
        )
        wide = sum(x.astype(jnp.float32) for x in d_q)
        return found, (out, wide, jnp.concatenate(d_k, axis=1), jnp.concatenate(d_v, axis=1))

    return run(q, k, v, d_out, ids, jnp.int32(positions.start))


def errors(kernel, split, *, causal=True, window=None, ids=None, soft_cap=None, **more):
    """Of the merged result and gradients, relative to the formula's largest."""
    positions, edges = SPLITS[split]
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
    d_out = jnp.where(sees[..., None, None], d_out, 0)
    mask = Mask(causal, window)
    every = None if ids is None else jnp.asarray(ids)
    calls, found = merged(kernel, q, k, v, d_out, every, positions, edges, mask, soft_cap, **more)
    for (low, high), (out, sums) in zip(itertools.pairwise(edges), calls, strict=True):
        assert not np.isnan(sums).any() and np.isfinite(np.asarray(out, np.float32)).all()
        blind = np.broadcast_to(~dense[:, :, low:high].any(-1)[:, None], sums.shape)
        assert (np.asarray(sums)[blind] < -1e29).all() and np.isfinite(sums[~blind]).all()
    wanted = attention_and_gradients(
        q, k, v, d_out, np.where(sees[..., None], dense, True), SCALE, soft_cap
    )
    out, *gradients = (np.asarray(x).astype(np.float64) for x in found)
    out, wanted_out = (np.where(sees[..., None, None], x, 0) for x in (out, wanted[0]))
    pairs = zip((out, *gradients), (wanted_out, *wanted[1:]), strict=True)
    return [np.abs(x - y).max() / max(1, np.abs(y).max()) for x, y in pairs]


CASES = covering(
    list(itertools.product(FORMS, SPLITS)),
    [
        ("causal", "the second of three shards"),
        ("window, narrow", "the last shard, fewer keys"),
        ("documents with a window and soft cap", "the second of three shards"),
        ("documents both ways", "the first shard, all keys"),
    ],
)


@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_blocks_of_rows(form, split, monkeypatch):
    monkeypatch.setattr(row_blocks, "LARGEST", 50)
    assert max(errors(row_blocks, split, **FORMS[form])) < 1e-6


def test_blocks_of_rows_in_narrow_types(monkeypatch):
    monkeypatch.setattr(row_blocks, "LARGEST", 50)
    run = functools.partial(errors, row_blocks, "the second of three shards", **DOCUMENTS)
    assert max(run(dtype="bfloat16")) < 4 * 2.0**-9


@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_splash(form, split):
    assert max(errors(splash, split, **FORMS[form], interpret=True)) < 2e-6


@pytest.mark.parametrize(("form", "split"), CASES)
def test_parts_of_the_keys_by_triton(form, split):
    assert max(errors(triton, split, **FORMS[form], interpret=True)) < 1e-6


@pytest.mark.parametrize(
    ("form", "split"),
    covering(
        list(itertools.product(FORMS, SPLITS)),
        [("documents with a window and soft cap", "the last shard, fewer keys")],
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
    form = {"mask": Mask(True, None), "scale": 1.0, "offset": offset}
    start = time.process_time()
    jax.eval_shape(functools.partial(splash.forward, **form), x, x, x, None)
    jax.eval_shape(functools.partial(splash.backward, **form), x, x, x, None, x, sums, x)
    assert time.process_time() - start < 10
