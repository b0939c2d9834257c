"""Log-probabilities by token equal plain JAX in fp64, and never hold all logits."""

import functools

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
from jaxspeed.ops import linear_cross_entropy, token_logprobs
from jaxspeed.ops.vocabulary_parallel import NO_THRESHOLD
from tests.ops.cross_entropy_reference import IGNORED, assert_near, problem
from tests.ops.meshes import simulated_mesh
from tests.ops.test_cross_entropy import variables
from tests.support.covering import examples

ALL = {"entropy": True, "is_top": True, "mean_logit": True}


def plain(hidden, weight, bias, targets, *, temperature=1.0, soft_cap=None, most=None):
    """(log-probability, entropy, mean logit), each 0 for ignored tokens; and the argmax.

    Of the softmax of the `most` largest logits and the target's.
    """
    logits = hidden @ weight.T + bias
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    scaled = logits / temperature
    if most is not None:
        is_target = jnp.arange(len(weight)) == targets[..., None]
        scaled = jnp.where((ranks(logits) < most) | is_target, scaled, -jnp.inf)
    log_p = jax.nn.log_softmax(scaled)
    own = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.where(log_p > -jnp.inf, log_p, 0), -1)
    counted = targets != IGNORED
    values = own, entropy, jnp.mean(logits / temperature, -1)
    return tuple(jnp.where(counted, x, 0) for x in values), jnp.argmax(logits, -1)


def ranks(logits):
    """The place of each logit among those of its token, from the largest on."""
    return jnp.argsort(jnp.argsort(-logits, -1), -1)


def midway(logits, most):
    """How far below the largest logit the middle between the last kept and the next one is."""
    ordered = -np.sort(-np.asarray(logits), -1)
    if most >= ordered.shape[-1]:
        return np.full(ordered.shape[:-1], NO_THRESHOLD)
    return ordered[..., 0] - (ordered[..., most - 1] + ordered[..., most]) / 2


def slopes(function, slope):
    """A function's values, rest and gradients, with `slope` [3, ...] as the values' gradient."""

    def weighted(*args):
        values, rest = function(*args)
        return sum(jnp.sum(s * v) for s, v in zip(slope, values)), (values, rest)

    def run(*args):
        gradients, found = jax.grad(weighted, (0, 1, 2), has_aux=True)(*args)
        return *found, gradients

    return jax.jit(run)


def ours(targets, **options):
    def run(hidden, weight, bias):
        found = token_logprobs(hidden, weight, targets, bias=bias, **ALL, **options)
        return (found.logprobs, found.entropy, found.mean_logit), found.is_top

    return run


@settings(max_examples=examples(2, 12), deadline=None)
@example(
    tensor=2,
    seq=2,
    vocab=37,
    chunk=7,
    temperature=0.7,
    as_array=True,
    soft_cap=None,
    seed=1,
    most=5,
)
@example(
    tensor=1,
    seq=1,
    vocab=16,
    chunk=None,
    temperature=0.7,
    as_array=0,
    soft_cap=2.5,
    seed=2,
    most=5,
)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    seq=st.sampled_from([1, 2]),
    vocab=st.integers(2, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    as_array=st.booleans(),
    soft_cap=st.sampled_from([None, 2.5]),
    seed=st.integers(0, 99),
    most=st.sampled_from([None, 1, 5, 40]),
)
def test_values_and_gradients_equal_plain_jax(
    tensor, seq, vocab, chunk, temperature, as_array, soft_cap, seed, most
):
    """Over shards and chunks of vocabularies that these do not divide, and shards without a row."""
    *arrays, targets = problem(vocab, batch=2, seq=6, seed=seed)
    slope = np.random.default_rng(seed).normal(size=(3, *targets.shape))
    with jax.enable_x64(True):
        reference = functools.partial(plain, targets=targets, temperature=temperature, most=most)
        wide = [np.asarray(x, np.float64) for x in arrays]
        values, argmax, gradients = slopes(functools.partial(reference, soft_cap=soft_cap), slope)(
            *wide
        )
    mesh = simulated_mesh(seq=seq, tensor=tensor)
    shard = "tensor" if vocab % tensor == 0 else None
    places = [NamedSharding(mesh, s) for s in (P(None, "seq"), P(shard), P(shard))]
    options = {"soft_cap": soft_cap, "chunk": chunk}
    if most is not None:
        logits = wide[0] @ wide[1].T + wide[2]
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        options["thresholds"] = np.float32(midway(logits / temperature, most))
    options["temperature"] = jnp.float32(temperature) if as_array else temperature
    with jax.set_mesh(mesh):
        run = slopes(
            ours(targets, **options),
            np.float32(slope),
        )
        found, is_top, found_gradients = run(*map(jax.device_put, arrays, places))
    np.testing.assert_array_equal(is_top, np.asarray(argmax) == targets)
    for x, y in zip((*found, *found_gradients), (*values, *gradients)):
        assert x.dtype == jnp.float32
        assert_near(x, np.asarray(y), scale=1)


@pytest.mark.parametrize(("tensor", "chunk"), [(1, None), (1, 2), (4, 2)])
def test_the_first_of_equal_logits_is_the_top(tensor, chunk):
    """In a chunk, in chunks, and over shards of which the last has no row."""
    logits = np.array([0, 2, 1, 2, 2, 0.0], np.float32)[:, None]
    targets = np.arange(6)[None]
    with jax.set_mesh(simulated_mesh(tensor=tensor)):
        top = jax.jit(lambda h, w: token_logprobs(h, w, targets, chunk=chunk, is_top=True).is_top)(
            np.ones((1, 6, 1), np.float32), logits
        )
    assert top.tolist() == [[False, True, False, False, False, False]]


@pytest.mark.parametrize(("tensor", "chunk"), [(1, None), (1, 1), (4, 1)])
def test_logits_far_apart_and_excluded_ones_have_finite_entropies(tensor, chunk):
    """Of logits whose distances overflow exp, and of -inf; the last shard has no row."""
    weight = np.array([-500, 300, 301, 0, 0, 300.5], np.float32)[:, None]
    bias = np.array([0, 0, 0, -np.inf, 0, 0], np.float32)
    targets = np.array([[1, 2]])
    with jax.set_mesh(simulated_mesh(tensor=tensor)):
        entropy, gradient = jax.jit(
            jax.value_and_grad(
                lambda w: token_logprobs(
                    jnp.ones((1, 2, 1)), w, targets, bias=bias, chunk=chunk, entropy=True
                ).entropy.sum()
            )
        )(weight)
    p = np.exp(np.array([-1.0, 0, -0.5]))
    p /= p.sum()
    exact = -np.sum(p * np.log(p))
    wanted = np.zeros(6)
    wanted[[1, 2, 5]] = -2 * p * (np.log(p) + exact)
    assert_near(entropy, 2 * exact)
    assert_near(gradient[:, 0], wanted, scale=1)


@pytest.mark.parametrize("chunk", [4, None])
def test_ignored_targets_give_zero_and_unknown_ones_nan(chunk):
    hidden, weight, _, _ = problem(10, batch=1, seq=4)
    targets = np.array([[3, IGNORED, 10, -1]])

    def total(hidden):
        found = token_logprobs(hidden, weight, targets, chunk=chunk, **ALL)
        return sum(map(jnp.sum, found)), found

    gradient, found = jax.jit(jax.grad(total, has_aux=True))(hidden)
    assert np.isnan(found.logprobs).tolist() == [[False, False, True, True]]
    assert np.all(np.isfinite(found.entropy)) and not np.any(found.is_top[0, 1:])
    assert found.logprobs[0, 1] == found.entropy[0, 1] == found.mean_logit[0, 1] == 0
    assert np.any(gradient, axis=-1).tolist() == [[True, False, True, True]]


def test_what_is_not_requested_is_none_and_a_temperature_has_no_gradient():
    hidden, weight, _, targets = problem(10)
    found = token_logprobs(hidden, weight, targets)
    assert found[1:] == (None, None, None) and found.logprobs.shape == targets.shape
    slope = jax.grad(
        lambda t: token_logprobs(hidden, weight, targets, temperature=t, chunk=4).logprobs.sum()
    )
    assert slope(2.0) == 0


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), np.ones(3)])
def test_a_temperature_that_is_no_divisor_is_refused(temperature):
    hidden, weight, _, targets = problem(10)
    with pytest.raises(ModelError, match="temperature"):
        token_logprobs(hidden, weight, targets, temperature=temperature)


def test_no_array_is_as_large_as_the_logits():
    vocab, embed, tokens, chunk = 1024, 16, 512, 128
    hidden, weight, _, targets = problem(vocab, embed=embed, batch=1, seq=tokens)

    def loss(hidden, weight):
        found = token_logprobs(hidden, weight, targets, chunk=chunk, temperature=0.7, **ALL)
        return jnp.sum(jnp.square(found.logprobs) + found.entropy + found.mean_logit), found.is_top

    step = jax.grad(loss, (0, 1), has_aux=True)
    program = jax.make_jaxpr(step)(hidden, weight)
    assert max(a.size for a in variables(program.jaxpr)) == tokens * chunk
    compiled = jax.jit(step).lower(hidden, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * tokens * vocab


@pytest.mark.parametrize("chunk", [5, None])
def test_devices_exchange_as_often_as_for_the_cross_entropy(chunk):
    """A maximum and, in one all-reduce, the sums, whatever is requested; and a gradient."""
    hidden, weight, _, targets = problem(40, batch=2, seq=6)
    mesh = simulated_mesh(tensor=2)
    places = NamedSharding(mesh, P()), NamedSharding(mesh, P("tensor"))

    def exchanged(loss):
        with jax.set_mesh(mesh):
            step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            text = step.lower(*map(jax.device_put, (hidden, weight), places)).compile().as_text()
        return sorted((c.kind, c.axes) for c in hlo.collectives(text, mesh))

    def logprobs(hidden, weight):
        found = token_logprobs(hidden, weight, targets, chunk=chunk, **ALL)
        return jnp.sum(found.logprobs + found.entropy + found.mean_logit), found.is_top

    wanted = exchanged(lambda h, w: linear_cross_entropy(h, w, targets, chunk=chunk))
    assert exchanged(logprobs) == wanted
    assert [kind for kind, _ in wanted] == ["all-reduce"] * 3
