"""Collective matmul: the same numbers as the plain matmul, and what each form communicates.

The reference is `jnp.einsum` on one device and JAX's own derivative of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.communication import Communication
from jaxspeed.hlo import collectives
from jaxspeed.tensor_parallel import collective_matmul
from jaxspeed.tensor_parallel.collective_matmul import RingMatmul, ring_columns, ring_row
from tests.support.topology import run_on_topology

EMBED, HEADS, HEAD, MLP = 12, 8, 3, 16


def contracting(x_dims: tuple[int, ...], w_dims: tuple[int, ...], dtype: Any = None) -> Any:
    """A `dot_general` with its parameters, as a traced program has it."""
    return lambda x, w: lax.dot_general(
        x, w, ((x_dims, w_dims), ((), ())), preferred_element_type=dtype
    )


INTO_HEADS = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=1, x_sharded=None, y_sharded=2)
INTO_MLP = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=1, x_sharded=None, y_sharded=2)
TRANSPOSED = RingMatmul(contracting((2,), (1,)), 1, 1, w_sharded=0, x_sharded=None, y_sharded=2)
OUT_OF_HEADS = RingMatmul(
    contracting((2, 3), (0, 1)), 1, 1, w_sharded=0, x_sharded=2, y_sharded=None
)
OUT_OF_MLP = RingMatmul(contracting((2,), (0,)), 1, 1, w_sharded=0, x_sharded=2, y_sharded=None)


class Form(NamedTuple):
    columns: Callable[..., list[jax.Array]]
    row: Callable[..., jax.Array]


def ring(bidirectional: bool) -> Form:
    return Form(
        lambda x, ws, ps: ring_columns(x, ws, ps, bidirectional=bidirectional),
        lambda h, w, p: ring_row(h, w, p, bidirectional=bidirectional),
    )


PLAIN = Form(lambda x, ws, ps: [p.bind(x, w) for p, w in zip(ps, ws)], lambda h, w, p: p.bind(h, w))


def block(form: Form, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Three head weights that share x, and their output; one sharded on its first dim, and back."""
    q, k, v = form.columns(x, [w["q"], w["k"], w["v"]], [INTO_HEADS] * 3)
    x = x + form.row(jnp.tanh(q * k) + v, w["o"], OUT_OF_HEADS)
    up, gate = form.columns(jnp.sin(x), [w["up"], w["gate"]], [INTO_MLP, TRANSPOSED])
    return x + form.row(jnp.tanh(up) * gate, w["down"], OUT_OF_MLP)


SHAPES = {
    "q": ((EMBED, HEADS, HEAD), P(None, "tensor")),
    "k": ((EMBED, HEADS, HEAD), P(None, "tensor")),
    "v": ((EMBED, HEADS, HEAD), P(None, "tensor")),
    "o": ((HEADS, HEAD, EMBED), P("tensor")),
    "up": ((EMBED, MLP), P(None, "tensor")),
    "gate": ((MLP, EMBED), P("tensor")),
    "down": ((MLP, EMBED), P("tensor")),
}


def mesh_of(data: int, tensor: int) -> Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def example(batch: int = 4, seq: int = 16, layers: int | None = None) -> tuple[Any, Any]:
    stack = () if layers is None else (layers,)
    weights = {
        name: 0.1 * normal(i, stack + shape) for i, (name, (shape, _)) in enumerate(SHAPES.items())
    }
    return weights, normal(99, (batch, seq, EMBED))


def placed(mesh: Mesh, weights: Any, x: Any) -> tuple[Any, Any]:
    """Weights sharded over tensor; x over data and, along the sequence, tensor."""
    stack = (None,) * (weights["q"].ndim - 3)
    weights = {
        name: jax.device_put(w, NamedSharding(mesh, P(*stack, *SHAPES[name][1])))
        for name, w in weights.items()
    }
    return weights, jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))


def loss_of(apply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: jnp.sum(jnp.sin(apply(w, x)))


def assert_equal_trees(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(b).max()) or 1.0
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


def reference(apply: Callable[..., jax.Array], weights: Any, x: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss_of(apply), (0, 1)))(weights, x)


# -- the same numbers -----------------------------------------------------------------------------


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("data", "tensor", "bidirectional"),
    [
        (2, 4, False),
        pytest.param(1, 8, True, marks=FULL),
        pytest.param(4, 2, True, marks=FULL),
        pytest.param(4, 2, False, marks=FULL),
        pytest.param(2, 4, True, marks=FULL),
        pytest.param(1, 8, False, marks=FULL),
    ],
)
def test_a_block_equals_plain_matmuls(data, tensor, bidirectional):
    weights, x = example()
    mesh = mesh_of(data, tensor)
    loss = loss_of(lambda w, x: block(ring(bidirectional), x, w))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed(mesh, weights, x))
    assert_equal_trees(found, reference(lambda w, x: block(PLAIN, x, w), weights, x))


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_step_of_the_ring_that_is_dropped_is_missed(dropped, monkeypatch):
    """The comparison above is one that fails: a chunk that stays where it was changes the loss."""
    real, calls = lax.ppermute, []

    def one_stays(x, axis, pairs):
        calls.append(pairs)
        return x if len(calls) == dropped + 1 else real(x, axis, pairs)

    monkeypatch.setattr(collective_matmul.lax, "ppermute", one_stays)
    weights, x = example()
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        found = jax.jit(loss_of(lambda w, x: block(ring(False), x, w)))(*placed(mesh, weights, x))
    expected, _ = reference(lambda w, x: block(PLAIN, x, w), weights, x)
    assert calls and abs(float(found - expected)) > 1e-3


ANY_SHAPE = given(
    tensor=st.sampled_from([2, 4, 8]),
    batch=st.sampled_from([8, 16]),
    chunk=st.integers(1, 3),
    embed=st.integers(1, 5),
    free=st.integers(1, 3),
    bidirectional=st.booleans(),
    seq_first=st.booleans(),
)


@settings(max_examples=2)
@ANY_SHAPE
def test_any_shape_equals_einsum(**shape):
    check_shape(**shape)


@pytest.mark.full
@settings(max_examples=60)
@ANY_SHAPE
def test_many_shapes_equal_einsum(**shape):
    check_shape(**shape)


def check_shape(tensor, batch, chunk, embed, free, bidirectional, seq_first):
    """[batch, seq, embed] or [seq, batch, embed], in and out of a weight of any size."""
    mesh = mesh_of(8 // tensor, tensor)
    seq, width = 2 * chunk * tensor, free * tensor
    at = 0 if seq_first else 1
    column = RingMatmul(contracting((2,), (0,)), at, at, w_sharded=1, x_sharded=None, y_sharded=2)
    row = RingMatmul(contracting((2,), (0,)), at, at, w_sharded=0, x_sharded=2, y_sharded=None)
    x = normal(0, (seq, batch, embed) if seq_first else (batch, seq, embed))
    w, u = normal(1, (embed, width)), normal(2, (width, embed))

    def around(x, w, u):
        (y,) = ring_columns(x, [w], [column], bidirectional=bidirectional)
        return jnp.sum(jnp.sin(ring_row(jnp.tanh(y), u, row, bidirectional=bidirectional)))

    def plain(x, w, u):
        h = jnp.tanh(jnp.einsum("abe,em->abm", x, w))
        return jnp.sum(jnp.sin(jnp.einsum("abm,me->abe", h, u)))

    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(around, (0, 1, 2)))(x, w, u)
    expected = jax.value_and_grad(plain, (0, 1, 2))(x, w, u)
    assert_equal_trees(found[1], expected[1])
    # The sines cancel: their sum is rounded in proportion to their number, not to itself.
    np.testing.assert_allclose(found[0], expected[0], atol=1e-7 * x.size)


@pytest.mark.full  # as the engine calls it, test_parity_tensor.py has it
@pytest.mark.parametrize(("checkpoint", "bidirectional"), [(False, False), (True, True)])
def test_inside_a_scan_over_layers_and_a_checkpoint(checkpoint, bidirectional):
    weights, x = example(layers=3)

    def stack(form, keep):
        def layers(weights, x):
            body = lambda x, w: (block(form, x, w), None)  # noqa: E731
            return lax.scan(body if keep else jax.checkpoint(body), x, weights)[0]

        return layers

    mesh = mesh_of(2, 4)
    loss = loss_of(stack(ring(bidirectional), not checkpoint))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(*placed(mesh, weights, x))
    assert_equal_trees(found, reference(stack(PLAIN, True), weights, x))


@pytest.mark.default_cases("inside-False")
@pytest.mark.parametrize(
    ("derivative", "bidirectional"),
    [("inside", False), ("outside", True)],
)
def test_inside_a_shard_map_over_data(derivative, bidirectional):
    """As the accumulation of partial gradients runs it: manual over data, with its own samples."""
    weights, x = example()
    loss = loss_of(lambda w, x: block(ring(bidirectional), x, w))

    def each_rank(function, out_specs):
        return jax.shard_map(
            function,
            in_specs=(P(), P("data")),
            out_specs=out_specs,
            axis_names={"data"},
            check_vma=False,
        )

    def inside(weights, x):
        def rank(weights, x):
            value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(weights, x)
            return jax.tree.map(lambda leaf: leaf[None], (value, dw)), dx

        (value, dw), dx = each_rank(rank, (P("data"), P("data")))(weights, x)
        return jnp.sum(value), (jax.tree.map(lambda leaf: leaf.sum(0), dw), dx)

    def outside(weights, x):
        total = lambda w, x: each_rank(lambda w, x: loss(w, x)[None], P("data"))(w, x).sum()  # noqa: E731
        return jax.value_and_grad(total, (0, 1))(weights, x)

    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        step = {"inside": inside, "outside": outside}[derivative]
        found = jax.jit(step)(*placed(mesh, weights, x))
    assert_equal_trees(found, reference(lambda w, x: block(PLAIN, x, w), weights, x))


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.default_cases("float32")
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_bf16_matmuls_keep_their_dtypes_and_are_as_exact_as_plain_ones(preferred):
    """Against fp32 of the same bf16 values, with e the error of one rounding to bf16:

    columns are rounded once. A row, and the gradient of a column's x, is T partial matmuls, which
    are rounded, e in all, and T - 1 sums of 2, 3 ... T of them, e sqrt(k / T) each: for independent
    roundings e sqrt(1 + (T + 2) (T - 1) / 2T). One that prefers fp32 is summed in fp32.
    """
    x, w = normal(0, (2, 64, 32), jnp.bfloat16), normal(1, (32, 32), jnp.bfloat16)
    row = RingMatmul(
        contracting((2,), (0,), preferred), 1, 1, w_sharded=0, x_sharded=2, y_sharded=None
    )
    column = RingMatmul(
        contracting((2,), (0,), preferred), 1, 1, w_sharded=1, x_sharded=None, y_sharded=2
    )
    mesh = mesh_of(1, 8)

    def both(form):
        def apply(x, w):
            (y,) = form.columns(x, [w], [column])
            z = form.row(x, w, row)
            return (y.astype(jnp.float32) ** 2).sum() + (z.astype(jnp.float32) ** 2).sum(), (y, z)

        return lambda x, w: jax.value_and_grad(apply, (0, 1), has_aux=True)(x, w)

    exact = jax.jit(both(PLAIN))(x.astype(jnp.float32), w.astype(jnp.float32))
    plain = jax.jit(both(PLAIN))(x, w)
    with jax.set_mesh(mesh):
        found = jax.jit(both(ring(False)))(x, w)
    types = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(tree)]  # noqa: E731
    assert types(found) == types(plain)

    def error(tree):
        return [
            float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
            for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(exact))
        ]

    size = 8
    rounded = (1 + (size + 2) * (size - 1) / (2 * size)) ** 0.5
    for ours, theirs in zip(error(found), error(plain), strict=True):
        assert ours <= 1.2 * rounded * theirs + 1e-6
    if preferred is not None:
        assert_equal_trees(found[0][1], exact[0][1], 1e-6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_row_is_added_up_in_the_order_that_it_says(bidirectional):
    """Device d contributes values[d]; in fp32 a sum of these depends on its order."""
    values = np.array([1e8, 1, -1e8, 3, 1e7, -1, -1e7, 5], np.float32)
    with jax.set_mesh(mesh_of(1, 8)):
        h = jnp.ones((1, 16, 8), jnp.float32)
        y = jax.jit(lambda h, w: ring_row(h, w, OUT_OF_MLP, bidirectional=bidirectional))(
            h, values[:, None]
        )
    for device in range(8):
        for half, direction in enumerate((1, -1 if bidirectional else 1)):
            total = np.float32(0)
            for hop in range(1, 9):
                total += values[(device + direction * hop) % 8]
            assert y[0, 2 * device + half, 0] == total


# -- what is communicated -------------------------------------------------------------------------


def compiled_collectives(step: Callable[..., Any], mesh: Mesh) -> list[Communication]:
    with jax.set_mesh(mesh):
        lowered = jax.jit(step).lower(*placed(mesh, *example()))
        return collectives(lowered.compile().as_text() or "", mesh)


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_forward_pass_holds_permutes_over_tensor_alone(bidirectional):
    """Two columns and two rows: T - 1 messages each, or twice as many halves."""
    mesh = mesh_of(2, 4)
    found = compiled_collectives(lambda w, x: block(ring(bidirectional), x, w), mesh)
    assert {c.kind for c in found} == {"collective-permute"}
    assert {c.axes for c in found} == {("tensor",)}
    assert len(found) == 4 * 3 * (2 if bidirectional else 1)
    chunk = 2 * (16 // 4) * EMBED * 4  # 2 samples a data rank
    assert sum(c.bytes for c in found) == 4 * 3 * chunk


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_backward_pass_adds_the_sums_of_weight_gradients_over_data(bidirectional):
    """Columns: their forward ring, dx, and x again. Rows: theirs, and dy, which serves dh and dW.

    Over data only dW is summed, in one all-reduce for each weight's full shard.
    """
    mesh = mesh_of(2, 4)
    loss = loss_of(lambda w, x: block(ring(bidirectional), x, w))
    found = compiled_collectives(jax.grad(loss, (0, 1)), mesh)
    over_tensor = [c for c in found if c.axes == ("tensor",)]
    assert {c.kind for c in over_tensor} == {"collective-permute"}
    chunk = 2 * (16 // 4) * EMBED * 4
    messages = 2 * 3 + 2 * 2  # of 2 columns and 2 rows; the last row's matmul is not needed
    assert sum(c.bytes for c in over_tensor) == (messages * 3) * chunk
    others = [c for c in found if c.axes != ("tensor",)]
    assert {(c.kind, c.axes) for c in others} == {("all-reduce", ("data",))}
    shards = sum(int(np.prod(shape)) // 4 for shape, _ in SHAPES.values())
    assert sum(c.elements for c in others) == shards


def test_what_is_saved_for_the_backward_pass_is_the_argument_itself():
    weights, x = example()
    mesh = mesh_of(2, 4)

    def pullback(x, w, u):
        y, pull = jax.vjp(lambda x, w: ring_columns(x, [w], [INTO_HEADS]), x, w)
        _, pull_row = jax.vjp(lambda h, u: ring_row(h, u, OUT_OF_HEADS), y[0], u)
        return pull, pull_row

    weights, x = placed(mesh, weights, x)
    with jax.set_mesh(mesh):
        columns, row = jax.jit(pullback)(x, weights["q"], weights["o"])
    kept = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves((columns, row)) if leaf.ndim}
    assert kept.keys() == {
        x.shape,
        (4, 16, HEADS, HEAD),
        (EMBED, HEADS, HEAD),
        (HEADS, HEAD, EMBED),
    }
    assert kept[x.shape].shard_shape(x.shape) == (2, 4, EMBED)
    assert kept[4, 16, HEADS, HEAD].shard_shape((4, 16, HEADS, HEAD)) == (2, 16, HEADS // 4, HEAD)


# -- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq", "bidirectional"), [(10, False), (12, True)])
def test_an_indivisible_sequence_is_refused_with_the_numbers(seq, bidirectional):
    weights, x = example(seq=seq)
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(ValueError, match=rf"{seq}.*ring of 4"):
        jax.eval_shape(lambda w, x: block(ring(bidirectional), x, w), weights, x)


# -- compiled for TPUs that are not here ----------------------------------------------------------


@pytest.fixture(scope="module")
def tpu() -> dict[str, Any]:
    return run_on_topology("tests.ring_reduction.ring_programs:compile_all", "v5e:2x4")


@pytest.mark.sampled
def test_no_matmul_waits_for_the_accumulator_that_it_is_added_to(tpu):
    """Fused with the sum, it could not begin before the permute has arrived."""
    assert tpu["products_that_wait"] == []


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_every_message_overlaps_with_a_matmul(tpu, kind):
    assert tpu[kind] == {"count": 3, "covered": 3}


@pytest.mark.sampled
def test_a_stack_saves_the_sharded_activation(tpu):
    """Each further layer costs its x, sharded along the sequence, and its h, as its weights."""
    grown = (tpu["temp_bytes"]["32"] - tpu["temp_bytes"]["16"]) / 16
    assert grown == pytest.approx(tpu["saved_bytes_a_layer"], rel=0.02)
