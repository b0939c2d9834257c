"""Flops against the formulas of products, bytes against XLA where it counts them right."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.hlo import cost
from tests.hlo.hlo_programs import array, compiled_text, mesh_of, zero2

M, K, N = 24, 48, 40


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops(function, *args):
    return cost(compiled_text(function, *args)).flops


def test_a_product_is_2mnk():
    assert flops(jnp.matmul, ones(M, K), ones(K, N)) == 2 * M * N * K


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_in_every_precision(dtype):
    assert flops(jnp.matmul, ones(M, K, dtype=dtype), ones(K, N, dtype=dtype)) == 2 * M * N * K


def test_batch_dims_multiply():
    got = flops(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), ones(2, 8, 3, 16), ones(2, 9, 3, 16)
    )
    assert got == 2 * (2 * 3) * 8 * 9 * 16


def test_gradients_cost_two_products_more():
    def loss(w, x):
        return jnp.sin(x @ w).sum()

    assert flops(jax.grad(loss, (0, 1)), ones(K, N), ones(M, K)) == 3 * 2 * M * N * K


def test_scans_multiply():
    def scanned(w, x):
        return lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0]

    assert flops(scanned, ones(6, K, K), ones(M, K)) == 6 * 2 * M * K * K

    def nested(w, x):
        return lax.scan(lambda h, _: (scanned(w, h), None), x, None, length=5)[0]

    assert flops(nested, ones(6, K, K), ones(M, K)) == 5 * 6 * 2 * M * K * K


def test_xlas_own_count_forgets_the_loop():
    """The reason for counting here; when this fails, XLA's figure can be used."""

    def scanned(w, x):
        return lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0]

    compiled = jax.jit(scanned).lower(ones(6, K, K), ones(M, K)).compile()
    assert compiled.cost_analysis()["flops"] < 2 * 2 * M * K * K


@pytest.mark.parametrize(("policy", "forwards"), [(None, 1), ("everything", 1), ("nothing", 2)])
def test_recomputation_is_paid_for(policy, forwards):
    """A gradient is 3 products a layer; a layer that is recomputed 4."""

    def layer(h, wi):
        return jnp.tanh(h @ wi), None

    if policy is not None:
        layer = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, f"{policy}_saveable"))

    def loss(w, x):
        return (lax.scan(layer, x, w)[0] ** 2).sum()

    got = flops(jax.grad(loss), ones(6, K, K), ones(M, K))
    # The gradient of the input of the first layer is computed and thrown away inside the scan.
    assert got == (forwards + 2) * 6 * 2 * M * K * K


@pytest.mark.parametrize(
    ("stride", "padding", "side"), [(1, "VALID", 6), (2, "VALID", 3), (1, "SAME", 8)]
)
def test_a_convolution_is_a_product_at_each_position(stride, padding, side):
    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    got = flops(convolve, ones(2, 8, 8, 5), ones(3, 3, 5, 7))
    # SAME pads by one: of 8 x 3 positions a dim, the two that fall on padding multiply nothing.
    pairs = side * 3 - (2 if padding == "SAME" else 0)
    assert got == 2 * 2 * 5 * 7 * pairs**2


def test_grouped_convolutions_see_only_their_group():
    def convolve(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1,),
            "VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=4,
        )

    assert flops(convolve, ones(2, 10, 8), ones(3, 2, 16)) == 2 * 2 * (10 - 2) * 3 * 2 * 16


def test_flops_are_those_of_one_device(mesh):
    text = compiled_text(
        jnp.matmul,
        array(mesh, (8 * M, K), P(("replica", "data"))),
        array(mesh, (K, 8 * N), P(None, "tensor")),
    )
    assert cost(text).flops == 2 * (8 * M) * K * (8 * N) // mesh.size


def test_an_accumulating_step_costs_its_micro_batches():
    mesh = mesh_of(jax.devices(), data=4, tensor=2)
    got = cost(zero2(mesh, layers=4, micro_batches=3, width=128)).flops
    rows, cols = 64 // 4, 128 // 2  # batch over data 4, width over tensor 2
    assert got == 3 * 4 * 3 * 2 * rows * 128 * cols


def test_bytes_equal_xlas_where_there_is_no_loop():
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    weights = [ones(256, 256)] * 4
    compiled = jax.jit(jax.grad(loss)).lower(weights, ones(64, 256)).compile()
    theirs = compiled.cost_analysis()["bytes accessed"]
    assert cost(compiled.as_text()).bytes_accessed == pytest.approx(theirs, rel=1e-3)


def test_bytes_of_a_scan_grow_with_its_turns_by_slices_of_the_stack():
    """Each turn reads one layer's weights, not the stack of all."""

    def scanned(w, x):
        return lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0]

    def accessed(layers):
        text = compiled_text(scanned, ones(layers, 256, 256), ones(8, 256))
        return cost(text).bytes_accessed

    weight, activation = 256 * 256 * 4, 8 * 256 * 4
    per_layer = (accessed(32) - accessed(16)) / 16
    # The slice is read, may be copied (written and read again), and is read by the product.
    assert weight <= per_layer <= 3 * weight + 20 * activation


def test_a_stacked_result_is_written_a_row_a_turn():
    """Twice the turns access twice the bytes: the stack that grows is updated in place."""

    def stacked(x, turns):
        def turn(h, _):
            return jnp.sin(h), jnp.cos(h)

        return lax.scan(turn, x, None, length=turns)[1]

    def accessed(turns):
        text = compiled_text(lambda x: stacked(x, turns), ones(64, 256))
        return cost(text).bytes_accessed

    row = 64 * 256 * 4
    assert accessed(64) - accessed(32) < 32 * 20 * row


KERNEL = (
    "HloModule m\n\n"
    "ENTRY %e (x: f32[8,4], y: f32[4,6]) -> f32[8,6] {{\n"
    "  %x = f32[8,4]{{1,0}} parameter(0)\n"
    "  %y = f32[4,6]{{1,0}} parameter(1)\n"
    "  %k = (f32[8,6]{{1,0}}, s8[64]{{0}}) custom-call(%x, %y), {attributes}\n"
    "  ROOT %r = f32[8,6]{{1,0}} get-tuple-element(%k), index=0\n"
    "}}\n"
)


def test_the_dims_of_a_gpu_librarys_matmul_are_in_its_config():
    config = (
        'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
        '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    counted = cost(KERNEL.format(attributes=config))
    assert (counted.flops, counted.uncounted) == (2 * 8 * 6 * 4, ())


def test_a_kernel_of_unknown_flops_is_named():
    counted = cost(KERNEL.format(attributes='custom_call_target="tpu_custom_call"'))
    assert (counted.flops, counted.uncounted) == (0, ("tpu_custom_call",))
