"""Every kernel equals the formula, values and gradients, on one device and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.errors import ModelError
from jaxspeed.ops import attention, gpu, splash
from jaxspeed.ops.attention import plain, repeated_for_sharding
from jaxspeed.ops.mask import KernelCall, Mask, Segments
from jaxspeed.ops.per_device import over_batch_and_heads
from jaxspeed.ops.two_passes import in_two_passes, with_narrow_values, with_sinks
from tests.ops import score_buffers
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.ops.meshes import simulated_mesh
from tests.support.covering import covering
from tests.support.topology import run_on_topology

# Unit roundoff u. Fp32: 256-term sums and exp cost a few u each, 16 u in all. Narrow types round
# the shares, the scaled query, the scores' gradient and the result, each by at most u: 4 u.
TOLERANCE = {"float32": 16 * 2.0**-24, "bfloat16": 4 * 2.0**-9, "float16": 4 * 2.0**-11}

CASES = {
    "causal": {"causal": True},
    "both ways": {"causal": False},
    "window": {"causal": True, "window": 17},
    "window both ways": {"causal": False, "window": 17},
    "window in segments, grouped": {"causal": True, "window": 40, "segments": True, "kv_heads": 2},
    "segments both ways, one key head": {"causal": False, "segments": True, "kv_heads": 1},
    "soft cap, grouped": {"causal": True, "soft_cap": 1.5, "kv_heads": 2},
    "sinks": {"causal": True, "sinks": True},
    "narrow values": {"causal": True, "sinks": True, "kv_heads": 2, "value_dim": 24},
    "all at once": {
        "causal": True, "window": 40, "segments": True, "kv_heads": 2, "soft_cap": 1.5,
        "sinks": True,
    },
}  # fmt: skip


def inputs(*, batch=2, seq=64, heads=4, kv_heads=4, head_dim=32, dtype="float32"):
    """q, k, v and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, seq, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def some_segments(batch, seq):
    cuts = np.random.default_rng(1).random((batch, seq)) < 4 / seq
    return jnp.asarray(np.cumsum(cuts, axis=1), jnp.int32)


def some_sinks(heads=4):
    return jnp.linspace(-1.0, 3.0, heads)


def with_gradients(f, q, k, v, d_out, *sinks):
    out, pullback = jax.vjp(f, q, k, v, *sinks)
    return (out, *pullback(d_out))


def assert_close(found, wanted, tolerance):
    assert len(found) == len(wanted)
    for name, x, y in zip(("out", "dq", "dk", "dv", "d sinks"), found, wanted):
        x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.2e}"


@functools.cache
def case(name, dtype, seq=64):
    """(arguments, Segments or None, options of attention, the reference's out and gradients)."""
    options = {"window": None} | CASES[name]
    q, k, v, d_out = inputs(kv_heads=options.pop("kv_heads", 4), dtype=dtype, seq=seq)
    dims = options.pop("value_dim", None)
    args = q, k, v[..., :dims], d_out[..., :dims]
    ids = some_segments(2, seq) if options.pop("segments", False) else None
    sinks = [some_sinks()] if options.pop("sinks", False) else []
    dense = seen(seq, seq, causal=options["causal"], window=options["window"], segments=ids)
    more = (options.get("soft_cap"), *sinks)
    wanted = attention_and_gradients(*args, dense, 32**-0.5, *more)
    return (*args, *sinks), None if ids is None else Segments(ids, ids), options, wanted


def run(name, dtype, seq=64, **more):
    """(what `attention` and its gradients are, what they should be)."""
    args, segments, options, wanted = case(name, dtype, seq)

    def f(q, k, v, sinks=None):
        ids = None if segments is None else segments.q
        return attention(q, k, v, sinks=sinks, segment_ids=ids, **options, **more)

    return jax.jit(functools.partial(with_gradients, f))(*args), wanted


@pytest.mark.default_cases("window-float32", "causal-float16", every=10)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_the_formula(name, dtype):
    found, wanted = run(name, dtype)
    assert all(x.dtype == dtype for x in found[:4])
    assert_close(found, wanted, TOLERANCE[dtype])


@pytest.mark.default_cases(
    "float32-window in segments, grouped-of heads",
    "float16-causal-of samples",
    "float16-window in segments, grouped-of heads",
    "float16-window in segments, grouped-of samples",
)
@pytest.mark.parametrize("each", [False, True], ids=["of heads", "of samples"])
@pytest.mark.parametrize("name", ["causal", "window in segments, grouped"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bias_is_added_to_the_scores(name, each, dtype):
    (q, k, v, d_out), segments, options, _ = case(name, dtype)
    shape = (2, 4, 64, 64) if each else (4, 64, 64)
    bias = jax.random.normal(jax.random.key(1), shape)
    ids = None if segments is None else segments.q
    f = functools.partial(attention, segment_ids=ids, **options)

    def biased(q, k, v, bias):
        return f(q, k, v, bias=bias)

    dense = seen(64, 64, causal=True, window=options["window"], segments=ids)
    wanted = attention_and_gradients(q, k, v, d_out, dense, 32**-0.5, bias=bias)
    found = jax.jit(functools.partial(with_gradients, biased))(q, k, v, d_out, bias)
    assert_close(found, wanted, TOLERANCE[dtype])


def test_attention_in_fp64_is_fp64_throughout():
    with jax.enable_x64(True):
        args = inputs(seq=32, kv_heads=2, dtype="float64")
        dense = seen(32, 32, causal=True, window=9, segments=None)
        found = with_gradients(functools.partial(attention, window=9), *args)
        assert_close(found, attention_and_gradients(*args, dense, 32**-0.5), 1e-14)


@pytest.mark.default_cases("both ways", "window both ways")
@pytest.mark.parametrize(
    "name",
    covering(
        list(CASES), ["causal", "both ways", "window both ways", "narrow values", "all at once"]
    ),
)
def test_blocks_of_rows_equal_the_formula(name):
    """300 tokens are four blocks, with a window of 17 most of them without most keys."""
    found, wanted = run(name, "float32", seq=300, implementation="row_blocks")
    assert_close(found, wanted, TOLERANCE["float32"])


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [100, 420])
def test_blocks_of_rows_with_fewer_or_more_keys(keys):
    q, _, _, d_out = inputs(seq=300)
    _, k, v, _ = inputs(seq=keys)
    found, wanted = (
        with_gradients(functools.partial(attention, implementation=each), q, k, v, d_out)
        for each in ("row_blocks", "plain")
    )
    assert_close(found, wanted, TOLERANCE["float32"])


def test_cpu_has_blocks_of_rows_where_other_platforms_have_kernels():
    """256 queries in four causal blocks: no array of 256 x 256 scores."""
    q, k, v, d_out = inputs(seq=256)
    found = jax.jit(functools.partial(with_gradients, attention)).lower(q, k, v, d_out).compile()
    assert ",256,256]" not in found.as_text()
    assert " pad(" not in found.as_text()  # the gradients of keys are added without zeros around
    low = [x.astype(jnp.bfloat16) for x in (q, k, v, d_out)]
    found = jax.jit(functools.partial(with_gradients, attention)).lower(*low).compile()
    assert ",256,256]" in found.as_text()


@pytest.mark.default_cases("causal-bfloat16")
@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(
        [
            ("causal", "float32"),
            ("causal", "bfloat16"),
            ("window in segments, grouped", "float32"),
            ("segments both ways, one key head", "float32"),
            ("soft cap, grouped", "float32"),
            ("sinks", "float32"),
            ("narrow values", "float32"),
            ("all at once", "float32"),
        ],
        [("causal", "bfloat16"), ("narrow values", "float32"), ("all at once", "float32")],
    ),
)
def test_splash_in_interpret_mode_equals_the_formula(name, dtype):
    """384 tokens are three blocks of 128, some of them wholly hidden."""
    args, segments, options, wanted = case(name, dtype, seq=384)
    mask = Mask(options["causal"], options["window"])
    call = KernelCall(mask, 32**-0.5, options.get("soft_cap"), interpret=True)
    passes = (functools.partial(p, call) for p in (splash.forward, splash.backward))
    attend = in_two_passes(*with_sinks(*with_narrow_values(*passes)))

    def f(q, k, v, sinks=None):
        return attend(q, k, v, segments, sinks)

    assert_close(with_gradients(f, *args), wanted, TOLERANCE[dtype])


def kernel_calls(platform, **kwargs):
    """How many TPU kernels the program for `platform` has, traced on this CPU."""
    *args, _ = inputs(**{"seq": 128} | kwargs)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v).astype(jnp.float32) ** 2)

    lowered = jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("@tpu_custom_call")


def test_the_platform_that_is_lowered_for_picks_the_kernel():
    assert kernel_calls("tpu") >= 2  # forward and backward; equal kernels may share a function
    assert kernel_calls("cpu") == 0
    with gpu.assumed():
        assert kernel_calls("cuda") == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        ("v5e:2x2", "float32"),
        pytest.param("v5e:2x2", "bfloat16", marks=pytest.mark.full),
        # libtpu compiles no bf16 matmul in a kernel for v2 and v3
        pytest.param("v3:2x2", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_no_array_on_a_tpu_is_as_large_as_the_scores(topology, dtype):
    found = run_on_topology("tests.ops.score_buffers:on_tpu", topology, dtype=dtype)
    assert found.pop("plain") and not any(found.values()), found


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", score_buffers.FORMS)
def test_nor_on_a_gpu(name, dtype, capability):
    with gpu.assumed(capability):
        assert bool(score_buffers.on_cuda(name, dtype)) == (name == "plain")


def test_a_gpu_without_kernels_materializes_the_scores():
    with gpu.assumed((7, 0)):
        assert score_buffers.on_cuda("window", "bfloat16")


@pytest.mark.parametrize("kwargs", [{"seq": 200}, {"seq": 64}, {"dtype": "float16"}])
def test_what_splash_cannot_take_goes_to_the_plain_kernel(kwargs):
    assert kernel_calls("tpu", **kwargs) == 0


# What is cut over what: (mesh axes, batch, heads, key heads).
MESHES = {
    "batch and heads": ({"replica": 2, "data": 2, "tensor": 2}, 4, 4, 2),
    "fewer key heads than devices": ({"data": 2, "tensor": 4}, 2, 4, 2),
    "heads that do not divide": ({"data": 2, "tensor": 4}, 2, 3, 3),
    "a batch that only replicas divide": ({"replica": 2, "data": 4}, 2, 2, 2),
    "axes that cut nothing": ({"pipe": 2, "data": 2, "expert": 2}, 2, 2, 1),
}


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("inside", [(), ("replica", "data")])
@pytest.mark.parametrize("name", MESHES)
def test_a_kernel_on_a_mesh_equals_the_plain_one(name, inside):
    """`inside` axes are manual already: attention is called within a shard_map over them."""
    sizes, batch, heads, kv_heads = MESHES[name]
    mesh = simulated_mesh(**sizes)
    if inside and batch % (sizes.get("replica", 1) * sizes.get("data", 1)):
        pytest.skip("an outer shard_map needs a batch that divides")
    args = inputs(batch=batch, seq=16, heads=heads, kv_heads=kv_heads, head_dim=8)
    ids = some_segments(batch, 16)
    options = {"mask": Mask(True, None), "scale": 0.3}

    def local(q, k, v, d_out, ids):
        def f(q, k, v):
            k, v = repeated_for_sharding(q, k, v)
            return over_batch_and_heads(plain, q, k, v, Segments(ids, ids), **options)

        return with_gradients(f, q, k, v, d_out)

    everywhere = P(("replica", "data"))
    step = local
    if inside:
        step = jax.shard_map(
            local,
            in_specs=everywhere,
            out_specs=everywhere,
            axis_names=set(inside),
            check_vma=False,
        )
    with jax.set_mesh(mesh):
        spec = everywhere if inside else P()
        placed = jax.device_put((*args, ids), NamedSharding(mesh, spec))
        found = jax.jit(step)(*placed)
    dense = seen(16, 16, causal=True, window=None, segments=ids)
    assert_close(found, attention_and_gradients(*args, dense, 0.3), TOLERANCE["float32"])


def test_each_device_attends_to_its_own_part_alone():
    shapes = []

    def spy(q, k, v, segments):
        shapes.append((q.shape, k.shape, segments.q.shape))
        return q

    q, k, v, _ = inputs(batch=4, seq=16, heads=4, kv_heads=1)
    ids = some_segments(4, 16)
    with jax.set_mesh(simulated_mesh(replica=2, data=2, tensor=2)):

        def run(q, k, v):
            return over_batch_and_heads(spy, q, *repeated_for_sharding(q, k, v), Segments(ids, ids))

        jax.jit(run)(q, k, v)
    assert shapes == [((1, 16, 2, 32), (1, 16, 1, 32), (1, 16))]


def test_inside_a_checked_shard_map_attention_is_plain_with_a_warning():
    q, k, v, d_out = inputs(seq=128)
    f = functools.partial(with_gradients, attention)
    cut = P("data")
    with jax.set_mesh(simulated_mesh(data=2)):
        run = jax.jit(jax.shard_map(f, in_specs=cut, out_specs=cut, axis_names={"data"}))
        with pytest.warns(UserWarning, match="check_vma=False"):
            found = run(q, k, v, d_out)
    assert_close(found, case("causal", "float32", seq=128)[3], TOLERANCE["float32"])


BAD = {
    "ranks": ({"q": (2, 8, 16)}, {}, "batch, seq, heads, head_dim"),
    "key heads": ({"k": (2, 8, 3, 16), "v": (2, 8, 3, 16)}, {}, "3 key heads"),
    "head_dim": ({"k": (2, 8, 4, 8), "v": (2, 8, 4, 8)}, {}, "head_dim must be equal"),
    "wide values": ({"v": (2, 8, 4, 24)}, {}, "of which v may have fewer dims"),
    "segments": ({}, {"segment_ids": np.zeros((2, 7), int)}, r"\(2, 7\), should be \(2, 8\)"),
    "lone kv segments": ({}, {"kv_segment_ids": np.zeros((2, 8), int)}, "without segment_ids"),
    "window": ({}, {"window": 0}, "window is 0"),
    "sinks": ({}, {"sinks": np.zeros(2)}, r"sinks is \(2,\), should be \(4,\)"),
    "soft cap": ({}, {"soft_cap": 1.0, "implementation": "cudnn"}, "cudnn has no soft cap"),
    "bias": ({}, {"bias": np.zeros((4, 8, 7))}, r"bias is \(4, 8, 7\), should be \(4, 8, 8\)"),
    "no bias": ({}, {"bias": np.zeros((4, 8, 8)), "implementation": "splash"}, "splash has no bia"),
    "kernel": ({}, {"implementation": "flash"}, "'flash' is none of"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_do_not_fit_are_refused(name):
    shapes, options, message = BAD[name]
    q, k, v = (jnp.zeros(shapes.get(x, (2, 8, 4, 16))) for x in "qkv")
    with pytest.raises(ModelError, match=message):
        attention(q, k, v, **options)
