"""Classes of dims: those that can be sharded together, and no others."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxspeed.tensor_parallel import propagate_dims


def propagated(fn, *shapes):
    """The classes of a function's program; all inputs are parameters `0`, `1`, ..."""
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(fn)(*given).jaxpr
    return propagate_dims(jaxpr, {str(i): v for i, v in enumerate(jaxpr.invars)})


def dims_of(fn, *shapes):
    """(nodes of each input, nodes of the first output, their classes)."""
    found = propagated(fn, *shapes)
    inputs = [found.parameters[str(i)] for i in range(len(shapes))]
    return inputs, found.top.of(found.top.jaxpr.outvars[0]), found.classes


def tied(fn, *shapes):
    """{(input, its dim, dim of the output)} that are one class."""
    inputs, output, classes = dims_of(fn, *shapes)
    return {
        (i, d, e)
        for i, nodes in enumerate(inputs)
        for d, a in enumerate(nodes)
        for e, b in enumerate(output)
        if classes.same(a, b)
    }


# -- moving numbers about -------------------------------------------------------------------------


@st.composite
def movements(draw):
    """A shape, and a list of reshapes and transposes of it."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=2, max_size=5))
    shape, steps = tuple(primes), []
    current = shape
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(current)))))
            steps.append(("transpose", order))
            current = tuple(current[d] for d in order)
        else:
            left, sizes = math.prod(current), []
            while left > 1:
                divisors = [n for n in range(2, left + 1) if left % n == 0]
                sizes.append(draw(st.sampled_from(divisors)))
                left //= sizes[-1]
            current = tuple(sizes) or (1,)
            steps.append(("reshape", current))
    return shape, steps


def moved(x, steps):
    for name, argument in steps:
        x = x.transpose(argument) if name == "transpose" else x.reshape(argument)
    return x


@given(movements())
def test_a_part_of_a_tied_dim_is_the_same_part_after_any_movement(case):
    """Each number is marked with the part that it is in; in the result each part has one mark."""
    shape, steps = case
    (nodes,), output, classes = dims_of(lambda x: moved(x, steps), shape)
    for dim, a in enumerate(nodes):
        for out_dim, b in enumerate(output):
            if not classes.same(a, b):
                continue
            common = classes.common_size(a)
            for parts in (n for n in range(2, common + 1) if common % n == 0):
                part = np.arange(shape[dim]) * parts // shape[dim]
                marks = np.broadcast_to(
                    part.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape
                )
                result = np.moveaxis(moved(marks, steps), out_dim, 0)
                expected = np.arange(len(result)) * parts // len(result)
                assert (expected == result.reshape(len(result), -1).T).all()


def test_merged_heads_have_at_most_as_many_shards_as_heads():
    (nodes,), output, classes = dims_of(lambda x: x.reshape(5, 12, 64), (5, 768))
    assert classes.same(nodes[1], output[1]) and not classes.same(nodes[1], output[2])
    assert classes.common_size(nodes[1]) == 12


def test_fewer_key_heads_bound_the_shards_of_the_queries():
    def grouped(q, k):  # q [seq, 8, 4], k [seq, 2, 4]
        return jnp.einsum("tkgd,skd->kgts", q.reshape(-1, 2, 4, 4), k)

    (q, k), _, classes = dims_of(grouped, (3, 8, 4), (3, 2, 4))
    assert classes.same(q[1], k[1])
    assert classes.common_size(q[1]) == 2


# -- what ties and what does not ------------------------------------------------------------------

ALONG = {
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "sort": lambda x: lax.sort(x, dimension=1),
    "rev": lambda x: x[:, ::-1],
    "slice": lambda x: x[:, 2:],
    "shifted by padding": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))),
    "concatenate": lambda x: jnp.concatenate([x, x], axis=1),
    "roll": lambda x: jnp.roll(x, 1, axis=1),
    "softmax scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
}


@pytest.mark.parametrize("name", ALONG)
def test_an_operation_along_a_dim_ends_it_and_leaves_the_others(name):
    assert tied(ALONG[name], (6, 8)) == {(0, 0, 0)}


def test_a_callback_may_do_anything():
    def fn(x):
        return jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct((6, 8), jnp.float32), x)

    assert tied(fn, (6, 8)) == set()


def test_a_matmul_ties_its_contracted_dims_and_propagates_the_others():
    fn = lambda x, w: x @ w  # noqa: E731
    (x, w), _, classes = dims_of(fn, (5, 6), (6, 8))
    assert classes.same(x[1], w[0])
    assert tied(fn, (5, 6), (6, 8)) == {(0, 0, 0), (1, 1, 1)}


def convolution(groups, x, k):
    return lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_groups_of_channels_are_not_split(groups):
    """With one group input and output channels are different dims; else both shard by groups."""
    shapes = (2, 4, 4, 8), (3, 3, 8 // groups, 16)
    (x, k), out, classes = dims_of(lambda x, k: convolution(groups, x, k), *shapes)
    assert classes.same(k[3], out[3])
    assert not any(classes.same(x[d], out[d]) for d in (1, 2))
    if groups == 1:
        assert classes.same(x[3], k[2]) and not classes.same(x[3], out[3])
    else:
        assert classes.same(x[3], out[3])
        assert classes.common_size(x[3]) == math.gcd(groups, 8)


@pytest.mark.parametrize("groups, parts", [(4, 2), (4, 4), (8, 8)])
def test_a_grouped_convolution_of_a_part_is_that_part(groups, parts):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 4, 8)).astype(np.float32)
    k = rng.normal(size=(3, 3, 8 // groups, 16)).astype(np.float32)
    expected = np.split(np.asarray(convolution(groups, x, k)), parts, axis=3)
    for part, xs, ks in zip(expected, np.split(x, parts, 3), np.split(k, parts, 3), strict=True):
        np.testing.assert_allclose(part, convolution(groups // parts, xs, ks), rtol=1e-5, atol=1e-5)


def test_a_lookup_ends_the_rows_and_passes_on_the_columns():
    ids = jnp.array([[1, 2, 3]])
    assert tied(lambda table: table[ids], (7, 5)) == {(0, 1, 2)}


# -- functions in functions -----------------------------------------------------------------------


def turned(x):
    return jnp.sin(x).T


turned_jvp = jax.custom_jvp(turned)
turned_jvp.defjvp(lambda x, t: (turned(*x), turned(*t)))
turned_vjp = jax.custom_vjp(turned)
turned_vjp.defvjp(lambda x: (turned(x), None), lambda _, g: (g.T,))

CALLED = {
    "jit": jax.jit(turned),
    "checkpoint": jax.checkpoint(turned),
    "cond": lambda x: lax.cond(True, turned, lambda x: jnp.cos(x).T, x),
    "custom_jvp": turned_jvp,
    "custom_vjp": turned_vjp,
    "scan": lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0].T,
    "while": lambda x: lax.fori_loop(0, 3, lambda _, c: c + 1, x).T,
}


@pytest.mark.parametrize("name", CALLED)
def test_dims_go_through_every_call(name):
    assert tied(CALLED[name], (4, 6)) == {(0, 0, 1), (0, 1, 0)}


def test_a_loop_that_turns_what_it_carries_ties_both_dims():
    (x,), _, classes = dims_of(lambda x: lax.fori_loop(0, 3, lambda _, c: c.T, x), (4, 4))
    assert classes.same(x[0], x[1])


def test_layers_that_share_a_function_do_not_share_their_dims():
    act = jax.jit(jnp.tanh)
    (a, b), _, classes = dims_of(lambda a, b: (act(a), act(b)), (4, 6), (4, 6))
    assert not classes.same(a[1], b[1])


def test_what_is_scanned_over_is_no_dim_of_the_body():
    def run(x, stack):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]

    (x, stack), out, classes = dims_of(run, (3, 8), (5, 8, 8))
    assert not any(classes.same(stack[0], n) for n in (*stack[1:], *x, *out))
    assert classes.same(stack[1], stack[2])  # what is made is read by the next layer


def test_it_is_known_where_a_dim_ends_and_begins():
    top = propagated(lambda x: jnp.cumsum(x, axis=1) + x[:, :1], (4, 6)).top
    by_name = {top.jaxpr.eqns[i].primitive.name: i for i in range(len(top.jaxpr.eqns))}
    frame, at = next(
        (frame, i)
        for frame in top.walk()
        for i, eqn in enumerate(frame.jaxpr.eqns)
        if eqn.primitive.name == "cumsum"
    )
    assert frame.ended[at] == [(0, 1)] and frame.began[at] == [(0, 1)]
    assert top.ended[by_name["slice"]] == [(0, 1)]


def test_the_samples_of_all_of_a_batch_are_one_class():
    def loss(w, x, y):
        return (x @ w).mean() + y.mean()  # where they never meet

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 2), (8, 3), (8, 2))]
    jaxpr = jax.make_jaxpr(loss)(*shapes).jaxpr
    found = propagate_dims(jaxpr, {"w": jaxpr.invars[0]}, jaxpr.invars[1:])
    x, y = (found.top.of(v) for v in jaxpr.invars[1:])
    assert found.classes.same(x[0], y[0]) and found.classes.same(found.samples, x[0])
