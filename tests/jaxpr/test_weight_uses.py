"""Which equation reads which weight: by its own equations, and through inner programs."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.jaxpr.frames import Frame
from jaxspeed.jaxpr.weight_uses import Origins, of_inputs, weight_uses

pytestmark = pytest.mark.fast

SIZE = 3
A, B = (jnp.ones((SIZE, SIZE)) for _ in range(2))
X = jnp.ones(SIZE)


def uses(function):
    """{primitive: (weights, whether it is a product)} of the equations that use weights a, b."""
    jaxpr = jax.make_jaxpr(function)(A, B, X).jaxpr
    found, derived = weight_uses(jaxpr, dict(zip(jaxpr.invars, "ab", strict=False)))
    names = [e.primitive.name for e in jaxpr.eqns] + ["result"]
    by_name = {names[use.position]: ("".join(sorted(use.weights)), use.is_product) for use in found}
    return by_name, {names[i]: "".join(sorted(weights)) for i, weights in derived.items()}


MASK = jnp.tri(SIZE)


@pytest.mark.parametrize(
    ("function", "wanted", "derived"),
    [
        (lambda a, b, x: x @ a.T, {"dot_general": ("a", True)}, {"transpose": "a"}),
        (lambda a, b, x: x @ (a + b), {"dot_general": ("ab", True)}, {"add": "ab"}),
        (lambda a, b, x: x @ (a * MASK), {"dot_general": ("a", True)}, {"mul": "a"}),
        (lambda a, b, x: x * a[0], {"mul": ("a", False)}, {"slice": "a", "squeeze": "a"}),
        (lambda a, b, x: (b.T, x), {"result": ("b", False)}, {"transpose": "b"}),
        (lambda a, b, x: x + 1, {}, {}),
    ],
)
def test_uses_of_weights_are_what_reads_them_beside_other_values(function, wanted, derived):
    found, of_weights = uses(function)
    assert found == wanted
    assert {name: of_weights[name] for name in derived} == derived


def test_what_a_product_reads_beside_its_weight():
    jaxpr = jax.make_jaxpr(lambda a, x: x @ a)(A, X).jaxpr
    (use,), _ = weight_uses(jaxpr, {jaxpr.invars[0]: "a"})
    assert use.beside == (jaxpr.invars[1],) and use.position == 0


def of_results(function):
    jaxpr = jax.make_jaxpr(function)(A, B, X).jaxpr
    frame, weights = Frame(jaxpr), Origins()
    weights.run(frame, of_inputs(jaxpr, dict(zip(jaxpr.invars, "ab", strict=False))))
    found = (weights.of(frame, v) for v in jaxpr.outvars)
    return [None if x is None else "".join(sorted(x)) for x in found]


def pair(a, b, x):
    return a.T, a + b, a @ x, jnp.zeros(2)


@jax.custom_jvp
def custom(a, b, x):
    return pair(a, b, x)


custom.defjvp(lambda primals, tangents: (custom(*primals), pair(*tangents)))


@pytest.mark.parametrize("call", [pair, jax.jit(pair), jax.checkpoint(pair), custom])
def test_each_result_of_a_call_has_the_weights_that_it_is_computed_from(call):
    assert of_results(call) == ["a", "ab", None, ""]


def test_a_loop_reads_weights_slices_them_and_changes_what_it_carries():
    def loop(a, b, x):
        def trip(carry, row):
            return carry + b, (row * 2, b.sum())

        return jax.lax.scan(trip, a, a)

    assert of_results(loop) == [None, "a", "b"]


def test_a_result_of_branches_is_of_the_weights_of_all():
    def branches(a, b, x):
        return jax.lax.cond(x[0] > 0, lambda: (a, a), lambda: (b, a + x))

    assert of_results(branches) == ["ab", None]
