"""A vocabulary that devices share: the chunked cross-entropy and lookups equal the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.ops import embed, linear_cross_entropy
from tests.ops.cross_entropy_reference import IGNORED, assert_near, problem, reference
from tests.ops.meshes import simulated_mesh
from tests.support.covering import examples


def on_mesh(mesh, function, *args, cut=()):
    """`function(*args)` compiled for a mesh; `cut` are the args whose first dim is a vocabulary."""
    parts = mesh.shape["tensor"]

    def placed(i, x):
        over = "tensor" if i in cut and x.shape[0] % parts == 0 else None
        return jax.device_put(x, NamedSharding(mesh, P(over)))

    with jax.set_mesh(mesh):
        return jax.jit(function)(*(placed(i, x) for i, x in enumerate(args)))


# -- cross-entropy --------------------------------------------------------------------------------


@settings(max_examples=examples(4, 8), deadline=None)
@given(
    parts=st.sampled_from([2, 4, 8]),
    vocab=st.integers(2, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    z_loss=st.sampled_from([0.0, 1e-2]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    soft_cap=st.sampled_from([None, 2.5]),
    bias=st.booleans(),
    embed_vocab=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_vocabulary_over_any_devices_equals_the_formula(
    parts, vocab, chunk, z_loss, label_smoothing, soft_cap, bias, embed_vocab, seed
):
    """Vocabularies that devices do not divide, chunks that do not divide a device's part, and parts
    that have no row at all."""
    hidden, weight, biases, targets = problem(vocab, batch=4, seed=seed)
    biases = biases if bias else 0 * biases
    options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "soft_cap": soft_cap}

    def loss(hidden, weight, biases):
        return linear_cross_entropy(
            hidden,
            weight.T if embed_vocab else weight,
            targets,
            bias=biases if bias else None,
            chunk=chunk,
            weight_layout="embed_vocab" if embed_vocab else "vocab_embed",
            **options,
        )

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    mesh = simulated_mesh(data=8 // parts, tensor=parts)
    (total, count), gradients = on_mesh(mesh, run, hidden, weight, biases, cut=(1, 2))
    wanted_total, wanted_count, *wanted = reference(hidden, weight, biases, targets, **options)
    if not bias:
        wanted[2] = 0 * wanted[2]
    assert count == wanted_count
    assert_near(total, wanted_total, scale=1)
    for x, y in zip(gradients, wanted):
        assert_near(x, y, scale=1)


@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize("target", [13, 14, 15, -1])
def test_a_target_in_the_padding_or_beyond_is_not_silent(target, chunk):
    """13 rows over four devices are four each: 13 to 15 would be padding of the last one."""
    hidden, weight, _, targets = problem(13, batch=4)
    targets[0, 0] = target
    mesh = simulated_mesh(data=2, tensor=4)
    total, count = on_mesh(
        mesh, lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk), hidden, weight
    )
    assert np.isnan(total) and count == np.sum(targets != IGNORED)


@pytest.mark.parametrize("chunk", [2, None])
def test_logits_of_one_device_far_above_the_others_neither_overflow_nor_vanish(chunk):
    """Maxima of the devices' parts hundreds apart; the last part is padding alone."""
    hidden = np.ones((1, 2, 1), np.float32)
    weight = np.array([-500.0, -400, 0, 1, 300, 301], np.float32)[:, None]
    targets = np.array([[1, 5]])
    mesh = simulated_mesh(tensor=4)
    gradients = on_mesh(
        mesh,
        jax.grad(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], (0, 1)),
        hidden,
        weight,
    )
    _, _, *wanted = reference(hidden, weight, np.zeros(6), targets, z_loss=0, label_smoothing=0)
    np.testing.assert_allclose(gradients[0], wanted[0], atol=701 * 1e-6)  # a sum of p_v 301
    assert_near(gradients[1], wanted[1])


def test_inside_a_region_that_is_manual_over_data():
    """As gradients that are reduced once a step are taken: each rank its own samples."""
    hidden, weight, bias, targets = problem(13, batch=4)
    mesh = simulated_mesh(data=2, tensor=4)

    def local(hidden, weight, targets):
        loss = lambda w: linear_cross_entropy(hidden, w, targets, chunk=2)[0]  # noqa: E731
        total, gradient = jax.value_and_grad(loss)(weight)
        return total[None], gradient[None]

    run = jax.shard_map(
        local,
        in_specs=(P("data"), P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    totals, gradients = on_mesh(mesh, run, hidden, weight, targets)
    wanted, _, _, wanted_gradient, _ = reference(
        hidden, weight, 0 * bias, targets, z_loss=0, label_smoothing=0
    )
    assert_near(totals.sum(), wanted)
    assert_near(gradients.sum(0), wanted_gradient)


def test_bf16_gradients_are_summed_in_fp32_over_chunks():
    """Sixty-four chunks on each of two devices; over the two they are summed as they are sent."""
    hidden, weight, bias, targets = problem(2048, embed=32, batch=4, seq=8)
    hidden, weight = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    mesh = simulated_mesh(data=4, tensor=2)
    run = jax.value_and_grad(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk=16), (0, 1), has_aux=True
    )
    (total, _), gradients = on_mesh(mesh, run, hidden, weight, cut=(1,))
    wanted_total, _, *wanted = reference(
        hidden, weight, 0 * bias, targets, z_loss=0.0, label_smoothing=0.0
    )
    assert total.dtype == jnp.float32
    assert_near(total, wanted_total)
    for gradient, exact in zip(gradients, wanted):
        assert gradient.dtype == jnp.bfloat16
        assert_near(gradient, exact, 3 * 2.0**-9)  # the logits' gradient, two parts, the result


# -- lookups --------------------------------------------------------------------------------------


@settings(max_examples=examples(3, 6), deadline=None)
@given(parts=st.sampled_from([2, 4, 8]), vocab=st.integers(3, 40), seed=st.integers(0, 99))
def test_lookups_in_shared_rows_equal_plain_ones(parts, vocab, seed):
    """The rows of a vocabulary that was padded to be cut, and ids that are outside of it."""
    rng = np.random.default_rng(seed)
    stored = np.zeros((-(-vocab // parts) * parts, 6), np.float32)
    stored[:vocab] = rng.normal(size=(vocab, 6))
    ids = rng.integers(0, vocab, (8, 5))
    outside = np.array([vocab, vocab + 1, -1])
    weights = rng.normal(size=(8, 5, 6)).astype(np.float32)

    def run(stored, ids, outside):
        rows = lambda table: embed(table[:vocab], ids)  # noqa: E731
        found, pullback = jax.vjp(rows, stored)
        return found, embed(stored[:vocab], outside), pullback(weights)[0]

    mesh = simulated_mesh(data=8 // parts, tensor=parts)
    found, nothing, gradient = on_mesh(mesh, run, stored, ids, outside, cut=(0,))
    np.testing.assert_array_equal(found, stored[ids])
    assert np.isnan(nothing).all()
    wanted = np.zeros(stored.shape, np.float64)
    np.add.at(wanted, ids, weights)
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)
