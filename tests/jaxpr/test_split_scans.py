"""A program with an input in parts computes what it did, and scans only over parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.split_scans import in_parts
from jaxspeed.jaxpr.traverse import bodies

LAYERS, WIDTH = 6, 4
SIZES = [
    (2, 2, 2),
    pytest.param((5, 1), marks=pytest.mark.full),
    pytest.param((1, 1, 4), marks=pytest.mark.full),
]


def block(x, w):
    return jnp.tanh(x @ w), x.sum()


def plain(w, x):
    return jax.lax.scan(block, x, w)[0]


def backwards_with_outputs(w, x):
    x, sums = jax.lax.scan(block, x, w, reverse=True)
    return x * sums[:2].sum() + sums[-1]


def cast_and_transposed(w, x):
    w = jnp.transpose(w, (0, 2, 1)).astype(jnp.bfloat16).astype(jnp.float32)
    return jax.lax.scan(block, x, w, unroll=2)[0]


def moved_and_back(w, x):
    w = jnp.moveaxis(jnp.moveaxis(w, 0, 2), 2, 0)
    return jax.lax.scan(block, x, w)[0]


def in_a_jit_and_a_checkpoint(w, x):
    return jax.jit(jax.checkpoint(plain))(w, x)


def by_number(w, x):
    for i in range(LAYERS):
        x = block(x, w[i])[0]
    return jax.lax.scan(block, x, w[2:4])[0]


def with_another_stack(w, x):
    scales = jnp.arange(1.0, LAYERS + 1) / LAYERS
    x, sums = jax.lax.scan(lambda x, each: block(x * each[1], each[0]), x, (w, scales))
    return jax.lax.scan(lambda x, each: block(x + each[1], each[0]), x, (w, sums))[0]


def all_at_once(w, x):
    return plain(w, x) + jnp.sum(w**2)


CASES = [
    plain, backwards_with_outputs, cast_and_transposed, moved_and_back, in_a_jit_and_a_checkpoint,
    by_number, with_another_stack, all_at_once,
]  # fmt: skip


def reads_of_all(jaxpr):
    """The scans over all layers, and the concatenations of all."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == LAYERS:
            yield eqn
        if eqn.primitive.name == "concatenate" and eqn.outvars[0].aval.ndim == 3:
            yield eqn
        for body in bodies(eqn):
            yield from reads_of_all(body.jaxpr)


@pytest.mark.default_cases(
    "cast_and_transposed-sizes0",
    "moved_and_back-sizes0",
    "in_a_jit_and_a_checkpoint-sizes0",
    "all_at_once-sizes0",
)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_program_as_it_was(function, sizes):
    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (2, WIDTH))
    closed = jax.make_jaxpr(function)(w, x)
    stack, _ = closed.jaxpr.invars
    jaxpr, parts = in_parts(closed.jaxpr, {stack: sizes})
    assert [v.aval.shape[0] for v in parts[stack]] == list(sizes)
    run = as_function(jaxpr, closed.consts)
    given = jnp.split(w, np.cumsum(sizes)[:-1])

    def loss(given, x):
        return run(*given, x)[0].sum()

    wanted, grads = jax.value_and_grad(lambda w: function(w, x).sum())(w)
    value, of_parts = jax.value_and_grad(loss)(given, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(jnp.concatenate(of_parts), grads, rtol=1e-5, atol=1e-6)
    if function is not all_at_once:
        assert [*reads_of_all(jaxpr)] == [] or function is by_number


def test_a_scan_before_the_first_differentiated_part_saves_nothing():
    w = jnp.zeros((LAYERS, WIDTH, WIDTH))
    x = jnp.zeros((2, WIDTH))
    closed = jax.make_jaxpr(plain)(w, x)
    jaxpr, _ = in_parts(closed.jaxpr, {closed.jaxpr.invars[0]: (4, 2)})
    run = as_function(jaxpr, closed.consts)
    step = jax.make_jaxpr(jax.grad(lambda last, first: run(first, last, x)[0].sum()))(w[4:], w[:4])
    scans = [eqn for eqn in step.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [(e.params["length"], e.params["reverse"]) for e in scans] == [
        (4, False), (2, False), (2, True),
    ]  # fmt: skip
    assert [v.aval.shape for v in scans[0].outvars] == [(2, WIDTH), (4,)]  # its own results
