"""The chunked cross-entropy equals the formula in fp64, and never holds what it must not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from jaxspeed.errors import ModelError
from jaxspeed.ops import cross_entropy, linear_cross_entropy
from jaxspeed.ops.vocabulary_parallel import AUTO_CHUNK, chunks_of
from tests.ops.cross_entropy_reference import IGNORED, assert_near, problem, reference
from tests.support.covering import examples


@settings(max_examples=examples(6, 15), deadline=None)
@given(
    vocab=st.integers(2, 24),
    chunk=st.one_of(st.none(), st.integers(1, 26)),
    z_loss=st.sampled_from([0.0, 1e-2]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    soft_cap=st.sampled_from([None, 2.5]),
    embed_vocab=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_chunking_equals_the_formula(
    vocab, chunk, z_loss, label_smoothing, soft_cap, embed_vocab, seed
):
    hidden, weight, bias, targets = problem(vocab, seed=seed)
    options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "soft_cap": soft_cap}

    def loss(hidden, weight, bias):
        layout = "embed_vocab" if embed_vocab else "vocab_embed"
        return linear_cross_entropy(
            hidden,
            weight.T if embed_vocab else weight,
            targets,
            bias=bias,
            chunk=chunk,
            weight_layout=layout,
            **options,
        )

    slope = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (total, count), gradients = slope(hidden, weight, bias)
    wanted_total, wanted_count, *wanted = reference(hidden, weight, bias, targets, **options)
    assert count == wanted_count
    assert_near(total, wanted_total)
    for x, y in zip(gradients, wanted):
        assert_near(x, y, scale=1)  # sums over tokens of numbers of order one, which may cancel


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1}])
def test_plain_cross_entropy_equals_the_formula(options):
    hidden, weight, bias, targets = problem(17)
    total, count = cross_entropy(hidden @ weight.T + bias, targets, **options)
    options = {"z_loss": 0.0, "label_smoothing": 0.0} | options
    wanted_total, wanted_count, *_ = reference(hidden, weight, bias, targets, **options)
    assert count == wanted_count
    assert_near(total, wanted_total)


def test_logits_far_apart_neither_overflow_nor_vanish():
    """Chunks whose maxima are hundreds apart, rising and falling: exp of them is inf or 0."""
    for order in (1, -1):
        hidden = np.ones((1, 1, 1), np.float32)
        weight = np.array([[-500.0], [0.0], [300.0], [301.0]], np.float32)[::order]
        targets = np.array([[1]])
        gradients = jax.grad(
            lambda h, w, t=targets: linear_cross_entropy(h, w, t, chunk=1)[0], (0, 1)
        )(hidden, weight)
        zeros = np.zeros(4)
        _, _, *wanted = reference(hidden, weight, zeros, targets, z_loss=0, label_smoothing=0)
        np.testing.assert_allclose(gradients[0], wanted[0], atol=301 * 1e-6)  # a sum of p_v 301
        assert_near(gradients[1], wanted[1])


@pytest.mark.parametrize("chunk", [4, None])
def test_a_batch_that_counts_nothing_is_zero_with_zero_gradients(chunk):
    hidden, weight, _, targets = problem(10)
    nothing = np.full_like(targets, IGNORED)
    (total, count), gradients = jax.value_and_grad(
        lambda h, w: linear_cross_entropy(h, w, nothing, chunk=chunk), (0, 1), has_aux=True
    )(hidden, weight)
    assert total == 0 and count == 0
    assert all(not np.any(g) for g in gradients)


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("target", [10, -1])
def test_a_target_outside_the_vocabulary_is_not_silent(target, chunk):
    hidden, weight, _, targets = problem(10)
    targets[0, 0] = target
    assert np.isnan(linear_cross_entropy(hidden, weight, targets, chunk=chunk)[0])


def test_bf16_is_summed_in_fp32_and_gradients_keep_their_dtype():
    """Sixty-four chunks: summed in bf16, the gradient of `hidden` would be off by 64 roundings."""
    hidden, weight, bias, targets = problem(1024, embed=32, batch=2, seq=16)
    hidden, weight = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    (total, _), gradients = jax.value_and_grad(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk=16), (0, 1), has_aux=True
    )(hidden, weight)
    wanted_total, _, *wanted = reference(
        hidden, weight, 0 * bias, targets, z_loss=0.0, label_smoothing=0.0
    )
    assert total.dtype == jnp.float32
    assert_near(total, wanted_total)  # products of bf16 are exact in fp32
    for gradient, exact in zip(gradients, wanted):
        assert gradient.dtype == jnp.bfloat16
        assert_near(gradient, exact, 2 * 2.0**-9)  # the logits' gradient and the result, rounded


def variables(jaxpr):
    """Every intermediate array of a program, bodies of loops included."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from variables(inner)


def test_no_array_is_as_large_as_the_logits_nor_the_head_but_its_gradient():
    vocab, embed, tokens, chunk = 1024, 16, 512, 128
    hidden, weight, _, targets = problem(vocab, embed=embed, batch=1, seq=tokens)
    program = jax.make_jaxpr(
        jax.grad(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], (0, 1))
    )(hidden, weight)
    sizes = [a.size for a in variables(program.jaxpr) if a.size > tokens * chunk]
    assert sizes == [], "larger than one chunk of logits"
    compiled = jax.jit(
        jax.grad(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk)[0], (0, 1))
    )
    temporary = compiled.lower(hidden, weight).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * tokens * vocab, "XLA holds the logits after all"


def test_the_head_goes_into_the_scan_in_chunks_and_nowhere_else():
    """ZeRO 3 gathers a chunk inside the loop: any other use would gather the head."""
    hidden, weight, _, targets = problem(64)
    program = jax.make_jaxpr(lambda w: linear_cross_entropy(hidden, w, targets, chunk=16)[0])(
        weight
    ).jaxpr
    (reshape,) = [e for e in program.eqns if program.invars[0] in e.invars]
    assert reshape.primitive.name == "reshape"
    (scan,) = [e for e in program.eqns if reshape.outvars[0] in e.invars]
    assert scan.primitive.name == "scan"
    assert reshape.outvars[0].aval.shape == (4, 16, 12)


@given(vocab=st.integers(1, 300_000))
def test_chunks_cover_the_vocabulary_with_little_padding(vocab):
    count, size = chunks_of(vocab)
    assert size <= AUTO_CHUNK
    assert (count - 1) * size < vocab <= count * size
    assert count * size - vocab < 128 * count


def test_published_vocabularies_have_even_chunks():
    assert chunks_of(128256) == (16, 8016)  # Llama 3
    assert chunks_of(50304) == (8, 6288)  # GPT-2, as often padded
    assert chunks_of(50257) == (7, 7296)  # GPT-2: 29 x 1733 divides, but too finely
    assert chunks_of(256) == (1, 256)


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, _, targets = problem(10)
    with pytest.raises(ModelError, match=r"should be \(3, 5, 12\)"):
        linear_cross_entropy(hidden[:, :4], weight, targets)
    with pytest.raises(ModelError, match="chunk is 0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(ModelError, match="weight_layout 'vocab'"):
        linear_cross_entropy(hidden, weight, targets, weight_layout="vocab")
