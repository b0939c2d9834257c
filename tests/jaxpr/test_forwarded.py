"""`forwarded` tells what a traced program returns as it came, through jits, loops and branches."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxspeed.jaxpr.traverse import forwarded

SIZE = 3


def places(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [None if v is None else jaxpr.invars.index(v) for v in forwarded(jaxpr)]


def vectors(count):
    return [jnp.arange(SIZE, dtype=jnp.float32) + i for i in range(count)]


def test_inputs_are_found_in_any_order():
    a, b = vectors(2)
    assert places(lambda a, b: (b, a + 1, a, jnp.ones(3)), a, b) == [1, None, 0, None]


def test_through_jit_and_checkpoint():
    a, b = vectors(2)
    inner = jax.jit(lambda a, b: (a, b * 2))
    assert places(lambda a, b: jax.checkpoint(inner)(b, a), a, b) == [1, None]


def test_through_a_custom_derivative():
    @jax.custom_jvp
    def f(a, b):
        return a, a * b

    f.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    assert places(f, *vectors(2)) == [0, None]


def test_a_scan_forwards_its_carry_and_its_slices():
    def body(carry, x):
        same, counted = carry
        return (same, counted + 1), (x, x + same, same)

    def run(same, counted, xs):
        return lax.scan(body, (same, counted), xs)

    args = (*vectors(2), jnp.ones((4, SIZE)))
    assert places(run, *args) == [0, None, 2, None, None]


def test_transpositions_that_cancel_are_seen_through_a_scan():
    def run(xs, ys):
        _, same = lax.scan(lambda c, x: (c, x), 0.0, xs.transpose(2, 0, 1))
        return same.transpose(1, 2, 0), same.transpose(2, 1, 0), ys.T, ys.T.T

    args = (jnp.ones((2, 2, 2)), jnp.ones((2, 2)))
    assert places(run, *args) == [0, None, None, 1]


def test_a_scan_that_exchanges_its_carry_forwards_nothing():
    def run(a, b):
        return lax.scan(lambda carry, _: (carry[::-1], None), (a, b), length=3)[0]

    assert places(run, *vectors(2)) == [None, None]


def test_a_while_forwards_what_its_body_leaves():
    def run(a, b):
        return lax.while_loop(
            lambda c: c[1][0] < 5, lambda c: (c[0], c[1] + c[0][0] + b[0]), (a, b)
        )

    assert places(run, *vectors(2)) == [0, None]


def test_a_cond_forwards_what_all_its_branches_do():
    def run(p, a, b):
        return lax.cond(p, lambda a, b: (a, b), lambda a, b: (a, a), a, b)

    assert places(run, True, *vectors(2)) == [1, None]


OPERATIONS = {
    "swap": lambda a, b: (b, a),
    "first": lambda a, b: (a, a + b),
    "change": lambda a, b: (a * 2, b),
    "neither": lambda a, b: (a + b, a - b),
}
WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda a, b: lax.scan(lambda c, _: (f(*c), None), (a, b), length=1)[0],
    "cond": lambda f: lambda a, b: lax.cond(a[0] < 1e9, f, f, a, b),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(WRAPPERS)), st.sampled_from(sorted(OPERATIONS)))))
def test_what_is_found_is_what_comes_out(steps):
    """Whatever `forwarded` names has the bits of that input, for random inputs."""

    def run(a, b):
        for wrapper, name in steps:
            a, b = WRAPPERS[wrapper](OPERATIONS[name])(a, b)
        return a, b

    args = [np.array(x) for x in np.random.default_rng(0).normal(size=(2, SIZE))]
    args = [x.astype(np.float32) for x in args]
    for place, out in zip(places(run, *args), run(*args), strict=True):
        if place is not None:
            np.testing.assert_array_equal(out, args[place])
    if not any(wrapper == "scan" for wrapper, _ in steps):  # whose carry may not change its place
        names = [name for _, name in steps]
        where: list = [0, 1]
        for name in names:
            where = {
                "swap": where[::-1],
                "first": [where[0], None],
                "change": [None, where[1]],
                "neither": [None, None],
            }[name]
        assert places(run, *args) == where
