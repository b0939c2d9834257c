"""Flops of kernels in the time estimate: what masks leave of attention, all of another grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from jaxspeed.hardware.targets import target_of
from jaxspeed.ops import attention
from jaxspeed.ops.mask import Mask
from jaxspeed.planner.trace.op_cost import KERNELS, _kernel, _used
from jaxspeed.planner.trace.trace_ir import all_ops, open_program
from jaxspeed.planner.trace.traced_step import as_on

BATCH, HEADS, DIM = 2, 4, 64
MASKS = [(True, None), (False, None), (True, 300), (False, 300), (True, 1)]
MESH = dict.fromkeys(("pipe", "replica", "data", "seq", "expert", "tensor"), 1)


@given(
    st.booleans(),
    st.none() | st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_blocks_are_those_in_which_the_dense_mask_has_any(causal, window, seq, keys, rows, columns):
    mask = Mask(causal, window)
    dense = np.array(mask.dense(seq, keys))
    blocks = [
        dense[i : i + rows, j : j + columns].any()
        for i in range(0, seq, rows)
        for j in range(0, keys, columns)
    ]
    assert mask.blocks(seq, keys, rows, columns) == (sum(blocks), len(blocks))
    assert mask.share(seq, keys) == pytest.approx(dense.mean())


def kernels(platform, fn, *args, capability=None):
    with as_on(platform, capability):
        closed = jax.make_jaxpr(fn)(*args)
    ops = all_ops(open_program(closed, platform))
    return [op for op in ops if op.name.startswith(KERNELS)]


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_a_tpus_attention_counts_the_blocks_that_are_computed(causal, window, heads):
    seq, block = 2048, 512
    assert seq // block == HEADS  # the case of fewer heads tells one dim of the grid from another
    q = jax.ShapeDtypeStruct((BATCH, seq, heads, DIM), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, causal=causal, window=window).astype(jnp.float32).sum()

    found = kernels("tpu", jax.grad(loss, (0, 1, 2)), q, q, q)
    dense = np.array(Mask(causal, window).dense(seq, seq))
    tiles = dense.reshape(seq // block, block, seq // block, block).any((1, 3)).sum()
    one = 2 * BATCH * heads * tiles * block * block * DIM  # one product of all of these blocks
    # Forward: scores and result. Backward: three products for dq, four for dk and dv.
    assert sorted(_kernel(op, MESH) / one for op in found) == [2, 3, 4]


@pytest.mark.parametrize(("causal", "window"), [m for m in MASKS if m[0] or m[1] is None])
def test_a_gpus_attention_counts_the_scores_that_the_mask_leaves(causal, window):
    seq = 2048
    q = jax.ShapeDtypeStruct((BATCH, seq, HEADS, DIM), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, causal=causal, window=window).astype(jnp.float32).sum()

    found = kernels("cuda", jax.grad(loss, (0, 1, 2)), q, q, q)
    seen = np.array(Mask(causal, window).dense(seq, seq)).sum()
    one = 2 * BATCH * HEADS * seen * DIM
    assert sorted(_kernel(op, MESH) / one for op in found) == pytest.approx([2, 5])


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_triton_counts_the_blocks_that_are_computed(causal, window):
    """Of packed documents as many: what they hide depends on the data."""
    seq, sides = 2048, {"forward": (128, 64), "backward": (64, 64)}
    q = jax.ShapeDtypeStruct((BATCH, seq, HEADS, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((BATCH, seq, HEADS // 2, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((BATCH, seq), jnp.int32)

    def loss(q, k, v, ids):
        out = attention(q, k, v, causal=causal, window=window, segment_ids=ids)
        return out.astype(jnp.float32).sum()

    found = kernels("cuda", jax.grad(loss, (0, 1, 2)), q, k, k, ids, capability=(8, 0))
    dense = np.array(Mask(causal, window).dense(seq, seq))
    one = {}
    for name, (rows, columns) in sides.items():
        tiles = dense.reshape(seq // rows, rows, seq // columns, columns).any((1, 3)).sum()
        one[name] = 2 * BATCH * HEADS * tiles * rows * columns * 128
    # Forward: scores and result. Backward: three products for dq, four for dk and dv.
    wanted = [2 * one["forward"], 3 * one["backward"], 4 * one["backward"]]
    assert sorted(_kernel(op, MESH) for op in found) == sorted(wanted)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_mosaic_gpu_counts_the_blocks_that_are_computed(head_dim):
    seq, other = 2048, 64
    q = jax.ShapeDtypeStruct((BATCH, seq, HEADS, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((BATCH, seq, HEADS // 2, head_dim), jnp.bfloat16)

    def loss(q, k, v):
        return attention(q, k, v, soft_cap=5.0, window=300).astype(jnp.float32).sum()

    found = kernels("cuda", jax.grad(loss, (0, 1, 2)), q, k, k, capability=(9, 0))
    dense = np.array(Mask(True, 300).dense(seq, seq))
    # Forward: scores and result. Backward: three products for dq, four for dk and dv.
    wanted = [
        products
        * (2 * BATCH * HEADS * head_dim * rows * columns)
        * dense.reshape(seq // rows, rows, seq // columns, columns).any((1, 3)).sum()
        for products, rows, columns in ((2, 128, 128), (3, 128, other), (4, other, 128))
    ]
    assert sorted(_kernel(op, MESH) for op in found) == sorted(wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_count_as_one_document_by_cudnn(causal):
    """The kernel for documents that cuDNN cannot take is not part of the estimate."""
    seq = 2048
    q = jax.ShapeDtypeStruct((BATCH, seq, HEADS, DIM), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((BATCH, seq, HEADS // 2, DIM), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((BATCH, seq), jnp.int32)

    def loss(q, k, v, ids):
        out = attention(q, k, v, causal=causal, segment_ids=ids)
        return out.astype(jnp.float32).sum()

    found = kernels("cuda", jax.grad(loss, (0, 1, 2)), q, k, k, ids, capability=(9, 0))
    one = 2 * BATCH * HEADS * np.array(Mask(causal, None).dense(seq, seq)).sum() * DIM
    assert sorted(_kernel(op, MESH) / one for op in found) == pytest.approx([2, 5])


def test_any_other_kernel_counts_its_entire_grid():
    def product(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def multiply(x, y):
        return pl.pallas_call(
            product,
            grid=(4,),
            in_specs=[pl.BlockSpec((32, 64), lambda i: (i, 0)), pl.BlockSpec((64, 128))],
            out_specs=pl.BlockSpec((32, 128), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        )(x, y)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((128, 64), (64, 128))]
    (op,) = kernels("tpu", multiply, *shapes)
    assert _kernel(op, MESH) == 2 * 128 * 64 * 128


def test_a_gpus_product_takes_full_waves_of_tiles():
    cores = 132
    assert _used(12 * 128, 11 * 256, 512, 1, cores) == 1  # a tile for each core
    # One tile more is a second wave: twice as many tiles of half the size take 3 of 2 waves.
    assert _used(19 * 128, 7 * 256, 1024, 1, cores) == pytest.approx(0.9 * 266 / (3 * 132))
    # Parts of a deep product fill the last wave better.
    assert _used(19 * 128, 7 * 256, 8192, 1, cores) == pytest.approx(0.9 * 8 * 133 / (9 * 132))
    assert _used(12 * 128, 11 * 256, 96, 1, cores) == 0.75  # steps of 64 along the depth
    assert _used(64, 64, 512, 1, cores) < 0.01
    assert _used(16384, 14336, 4096, 1, cores) > 0.97
    assert _used(128, 256, 512, 12 * 11, cores) == 1  # a batch of products


def test_cores_that_send_do_not_compute():
    chip = target_of("h100:8").chip
    assert 1 - chip.reached["concurrent"] == pytest.approx(20 / 132)
    assert target_of("v5p:2x2x1").chip.reached["concurrent"] == 1
