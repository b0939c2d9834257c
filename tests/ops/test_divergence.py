"""The divergence of two heads by token equals plain JAX in fp64, and never holds all logits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import hlo
from jaxspeed.errors import ModelError
from jaxspeed.ops import linear_divergence
from tests.ops.cross_entropy_reference import assert_near
from tests.ops.meshes import simulated_mesh
from tests.support.covering import examples


def problem(vocab, embeds=(12, 7), batch=2, seq=6, seed=0, scale=0.5):
    """(hidden, head) of the student and of a teacher of another width, and what is counted."""
    rng = np.random.default_rng(seed)
    arrays = []
    for embed in embeds:
        arrays.append(rng.normal(size=(batch, seq, embed)).astype(np.float32))
        arrays.append((scale * rng.normal(size=(vocab, embed))).astype(np.float32))
    return arrays, rng.random((batch, seq)) < 0.7


def plain(beta, temperature, caps, hidden, head, teacher_hidden, teacher_head):
    """(divergence, entropy of the student) from the softmaxes of all logits."""

    def log_softmax(hidden, head, cap):
        logits = hidden @ head.T
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / temperature)

    log_s = log_softmax(hidden, head, caps[0])
    log_t = log_softmax(teacher_hidden, teacher_head, caps[1])
    entropy = -jnp.sum(jnp.exp(log_s) * log_s, -1)
    if beta in (0, 1):
        p, q = (log_t, log_s) if beta == 0 else (log_s, log_t)
        return jnp.sum(jnp.exp(p) * (p - q), -1), entropy
    log_m = jnp.log((1 - beta) * jnp.exp(log_s) + beta * jnp.exp(log_t))
    of_teacher = jnp.sum(jnp.exp(log_t) * (log_t - log_m), -1)
    of_student = jnp.sum(jnp.exp(log_s) * (log_s - log_m), -1)
    return beta * of_teacher + (1 - beta) * of_student, entropy


def slopes(function, slope):
    """A function's values, and its gradients with `slope` as that of the divergence."""

    def weighted(*args):
        divergence, entropy = function(*args)
        return jnp.sum(slope * divergence) + jnp.sum(jax.lax.stop_gradient(entropy)), (
            divergence,
            entropy,
        )

    return jax.jit(jax.grad(weighted, (0, 1), has_aux=True))


@settings(max_examples=examples(2, 12), deadline=None)
@example(tensor=2, seq=2, vocab=37, chunk=7, beta=0.1, temperature=0.7, caps=(None, 2.5), seed=1)
@example(tensor=2, seq=1, vocab=16, chunk=3, beta=1.0, temperature=2.0, caps=(None, None), seed=2)
@example(tensor=1, seq=2, vocab=16, chunk=None, beta=0, temperature=1.0, caps=(3.0, None), seed=3)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    seq=st.sampled_from([1, 2]),
    vocab=st.integers(2, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    beta=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    caps=st.tuples(st.sampled_from([None, 2.5]), st.sampled_from([None, 4.0])),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_plain_jax(
    tensor, seq, vocab, chunk, beta, temperature, caps, seed
):
    """Over shards and chunks of vocabularies that these do not divide, and shards without a row."""
    arrays, counted = problem(vocab, seed=seed)
    slope = np.random.default_rng(seed).normal(size=counted.shape)
    with jax.enable_x64(True):
        exact = functools.partial(plain, beta, temperature, caps)
        gradients, values = slopes(exact, slope * counted)(*(np.float64(x) for x in arrays))
    mesh = simulated_mesh(seq=seq, tensor=tensor)
    shard = "tensor" if vocab % tensor == 0 else None
    places = [NamedSharding(mesh, s) for s in (P(None, "seq"), P(shard))] * 2
    ours = functools.partial(
        linear_divergence,
        beta=beta,
        temperature=temperature,
        counted=counted,
        student_soft_cap=caps[0],
        teacher_soft_cap=caps[1],
        chunk=chunk,
    )
    with jax.set_mesh(mesh):
        found_gradients, found = slopes(ours, np.float32(slope))(
            *map(jax.device_put, arrays, places)
        )
    for x, y in zip(found, values):
        assert_near(x, np.where(counted, y, 0), scale=1)
    for x, y in zip(found_gradients, gradients):
        assert x.dtype == jnp.float32
        assert_near(x, np.asarray(y), scale=1)


@pytest.mark.parametrize(("tensor", "chunk"), [(1, None), (1, 1), (4, 1)])
@pytest.mark.parametrize("beta", [0, 0.1, 1])
def test_probabilities_that_underflow_give_finite_divergences(tensor, chunk, beta):
    """Logits hundreds apart, each model certain of another token; the last shard has no row."""
    logits = np.array([-500, 300, 301, 0, 0, 300.5]), np.array([400, -300, 0.5, 0, 1, 399])
    arrays = []
    for x in logits:
        arrays += [np.ones((1, 1, 1), np.float32), np.float32(x[:, None])]
    with jax.enable_x64(True):
        exact = plain_of_extremes(beta, *logits)
    with jax.set_mesh(simulated_mesh(tensor=tensor)):
        run = functools.partial(linear_divergence, beta=beta, chunk=chunk)
        (_, gradient), (divergence, _) = slopes(run, 1.0)(*arrays)
    np.testing.assert_allclose(divergence[0, 0], exact[0], rtol=1e-6)
    # An error of 700 nats' rounding, times a probability.
    np.testing.assert_allclose(gradient[:, 0], exact[1], rtol=1e-6, atol=700 * 2.0**-24)


def plain_of_extremes(beta, student, teacher):
    """(divergence, its gradient by the student's logits) in fp64, by logarithms alone."""

    def divergence(student):
        log_s, log_t = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
        s, t = jnp.exp(log_s), jnp.exp(log_t)
        if beta == 0:
            return jnp.sum(t * (log_t - log_s))
        if beta == 1:
            return jnp.sum(s * (log_s - log_t))
        log_m = jnp.logaddexp(log_s + np.log(1 - beta), log_t + np.log(beta))
        return jnp.sum(beta * t * (log_t - log_m) + (1 - beta) * s * (log_s - log_m))

    return tuple(map(np.asarray, jax.value_and_grad(divergence)(jnp.asarray(student))))


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_equal_heads_have_no_divergence_and_no_gradient(beta):
    (hidden, head, *_), _ = problem(20)
    run = functools.partial(linear_divergence, beta=beta, chunk=8)
    gradients, (divergence, _) = slopes(run, 1.0)(hidden, head, hidden, head)
    for x in (divergence, *gradients):
        np.testing.assert_allclose(x, 0, atol=2e-6)


def test_tokens_that_do_not_count_are_zero_without_gradient_and_a_teacher_has_none():
    arrays, counted = problem(20)

    def total(*arrays):
        found = linear_divergence(*arrays, counted=counted, chunk=8, beta=0.5)
        return sum(map(jnp.sum, found)), found

    gradients, found = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))(*arrays)
    for x in found:
        np.testing.assert_array_equal(x != 0, counted)
    np.testing.assert_array_equal(np.any(gradients[0], -1), counted)
    assert np.any(gradients[1]) and not np.any(gradients[2]) and not np.any(gradients[3])


def test_bf16_operands_give_fp32_divergences_and_gradients_summed_in_fp32():
    """Sixty-four chunks: in bf16 their sum would be off by more than an element's rounding."""
    arrays, _ = problem(1024, embeds=(32, 16))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    with jax.enable_x64(True):
        exact, values = slopes(functools.partial(plain, 0.5, 1.0, (None, None)), 1.0)(
            *(np.float64(x) for x in arrays)
        )
    run = functools.partial(linear_divergence, beta=0.5, chunk=16)
    gradients, found = slopes(run, 1.0)(*arrays)
    for x, y in zip(found, values):
        assert x.dtype == jnp.float32
        assert_near(x, np.asarray(y))
    for x, y in zip(gradients, exact):
        assert x.dtype == jnp.bfloat16
        assert_near(x, np.asarray(y), 2 * 2.0**-9)  # the logits' gradient, and the result


def compiled_step(arrays, counted, mesh, places, **options):
    def loss(hidden, head, *teacher):
        found = linear_divergence(hidden, head, *teacher, counted=counted, **options)
        return jnp.sum(found.divergence), jnp.sum(found.entropy)

    with jax.set_mesh(mesh):
        placed = map(jax.device_put, arrays, places)
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(*placed).compile()


def test_no_array_is_as_large_as_the_logits():
    vocab, tokens, chunk = 1024, 512, 128
    arrays, counted = problem(vocab, embeds=(16, 24), batch=1, seq=tokens)
    mesh = simulated_mesh()
    step = compiled_step(
        arrays, counted, mesh, [NamedSharding(mesh, P())] * 4, beta=0.5, chunk=chunk
    )
    sizes = [np.prod([int(n) for n in shape]) for shape in hlo_shapes(step.as_text())]
    assert max(sizes) == tokens * chunk
    assert step.memory_analysis().temp_size_in_bytes < 4 * tokens * vocab


def hlo_shapes(text):
    return [m.split(",") for m in re.findall(r"f32\[([\d,]+)\]", text)]


@pytest.mark.parametrize("chunk", [5, None])
def test_devices_exchange_once_more_than_for_the_cross_entropy(chunk):
    """A maximum and a sum for both heads, in one all-reduce the divergence, and a gradient."""
    arrays, counted = problem(40)
    mesh = simulated_mesh(tensor=2)
    places = [NamedSharding(mesh, s) for s in (P(), P("tensor"))] * 2
    step = compiled_step(arrays, counted, mesh, places, beta=0.5, chunk=chunk)
    kinds = [c.kind for c in hlo.collectives(step.as_text(), mesh)]
    assert kinds == ["all-reduce"] * 4


def test_the_backward_pass_multiplies_with_each_head_once_again():
    """Two passes in the forward direction, one in the other, and none that is dead."""
    arrays, counted = problem(40)
    mesh = simulated_mesh()
    step = compiled_step(arrays, counted, mesh, [NamedSharding(mesh, P())] * 4, beta=0.5, chunk=8)
    forward = 2 * counted.size * 40 * (12 + 7)
    wanted = 3 * forward + 2 * 2 * counted.size * 40 * 12
    assert hlo.cost(step.as_text()).flops == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_weight": np.zeros((19, 7))}, "vocabulary of 20, and the teacher of 19"),
        ({"teacher_hidden": np.zeros((2, 6, 12))}, "they should be"),
        ({"beta": 1.5}, "beta is 1.5"),
        ({"temperature": 0.0}, "temperature 0"),
    ],
)
def test_what_does_not_match_is_refused(change, message):
    arrays, _ = problem(20)
    names = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
    with pytest.raises(ModelError, match=message):
        linear_divergence(**(dict(zip(names, arrays)) | change))
