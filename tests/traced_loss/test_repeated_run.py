"""What repeats in a list of layers: found as the definition says, stacked, and scanned."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jaxspeed.models.layers import Linear, normal, stacked

from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.user_models.repeated_run import Run, find_run, scan_run, stacked_run

DEPTH, WIDTH = 4, 6
LABELS = st.lists(st.sampled_from([0, 1, 2, None]), max_size=14)
REPEATING = st.builds(
    lambda before, unit, times, after: before + unit * times + after,
    LABELS,
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=4),
    st.integers(2, 4),
    LABELS,
)


def by_definition(labels, holds):
    """Of all (start, period, repeats) that repeat: most items, shortest period, first."""
    found = []
    n = len(labels)
    for start, period, repeats in itertools.product(range(n), range(1, n + 1), range(2, n + 1)):
        items = labels[start : start + period * repeats]
        if start + period * repeats > n or None in items:
            continue
        repeating = items == items[:period] * repeats
        if repeating and any(holds[start : start + period]):
            found.append(Run(start, period, repeats))
    return min(found, key=lambda r: (-r.period * r.repeats, r.period, r.start), default=None)


@given(st.one_of(LABELS, REPEATING), st.sets(st.sampled_from([0, 1, 2])))
def test_the_run_is_the_one_of_the_definition(labels, holding):
    holds = [label in holding for label in labels]
    assert find_run(labels, holds) == by_definition(labels, holds)


@pytest.mark.parametrize(
    "text, run",
    [
        ("eAAAAn", Run(1, 1, 4)),
        ("eABABABh", Run(1, 2, 3)),
        ("AAeBBBn", Run(3, 1, 3)),  # the longer of two
        ("ABABA", Run(0, 2, 2)),  # the first of two that cover four
        ("eABC", None),
        ("A", None),
        ("", None),
        ("AAB" * 2, Run(0, 3, 2)),  # covers more than AA
        ("eA_A_A_", Run(1, 2, 3)),  # a function in each repeat
        ("A____", None),  # functions alone
    ],
)
def test_the_run_of(text, run):
    labels = [ord(c) for c in text]
    assert find_run(labels, [c != "_" for c in text]) == run


class Layer(nnx.Module):
    """Named and unnamed dims, dropout, statistics, and an array without a Variable."""

    def __init__(self, rngs):
        self.up = Linear({"embed": WIDTH}, {"mlp": 8}, init=normal(0.3), rngs=rngs)
        self.down = nnx.Linear(8, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.scale = nnx.data(jnp.arange(1.0, WIDTH + 1))

    def __call__(self, x):
        return x + self.drop(self.norm(self.down(jnp.tanh(self.up(x))))) * self.scale


def built_both_ways(seed=0):
    """(the stack, the list that a loop builds, what the streams draw next) of one seed."""
    rngs, others = nnx.Rngs(seed), nnx.Rngs(seed)
    stack = stacked_run(lambda rngs, i: Layer(rngs), DEPTH, rngs)
    layers = [Layer(others) for _ in range(DEPTH)]
    return stack, layers, (rngs.params(), others.params())


def values(module):
    def plain(leaf):
        x = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        return np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )

    return {path: plain(v) for path, v in nnx.to_flat_state(nnx.split(module)[1])}


def assert_stack_equals_list(stack, layers):
    of_layers = [values(layer) for layer in layers]
    found = values(stack)
    assert found.keys() == of_layers[0].keys()
    for path, x in found.items():
        wanted = np.stack([layer[path] for layer in of_layers])
        np.testing.assert_allclose(x, wanted, rtol=1e-6, atol=1e-6, err_msg=str(path))


def test_a_stack_holds_what_a_loop_builds():
    stack, layers, _ = built_both_ways()
    assert_stack_equals_list(stack, layers)


def test_the_streams_go_on_as_after_the_loop():
    _, _, (ours, theirs) = built_both_ways()
    assert ours == theirs


def test_a_stack_is_made_under_jit_as_outside():
    stack, _, _ = built_both_ways()
    made = jax.jit(lambda: nnx.split(stacked_run(lambda r, i: Layer(r), DEPTH, nnx.Rngs(0)))[1])()
    assert_stack_equals_list(nnx.merge(nnx.split(stack)[0], made), built_both_ways()[1])


def test_a_stack_has_the_names_that_the_families_stacks_have():
    stack, _, _ = built_both_ways()
    families = stacked(lambda rngs: Layer(rngs), DEPTH, nnx.Rngs(0))
    ours, theirs = (dict(nnx.to_flat_state(nnx.split(m)[1])) for m in (stack, families))
    for path, theirs_at in theirs.items():
        if not isinstance(theirs_at, nnx.Variable):
            continue
        assert ours[path].shape == theirs_at.shape
        names = ours[path].get_metadata()["logical_axes"]
        unnamed = ("layers", *[None] * (theirs_at.ndim - 1))
        assert names == theirs_at.get_metadata().get("logical_axes", unnamed), path
    assert ours["up", "kernel"].get_metadata()["logical_axes"] == ("layers", "embed", "mlp")


def test_names_that_flax_keeps_as_out_sharding_are_taken_on():
    init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", None))
    with nnx.use_eager_sharding(False):
        stack = stacked_run(
            lambda rngs, i: nnx.Linear(2, 2, kernel_init=init, rngs=rngs), 3, nnx.Rngs(0)
        )
    assert stack.kernel.get_metadata()["logical_axes"] == ("layers", "embed", None)
    assert stack.bias.get_metadata()["logical_axes"] == ("layers", None)


def test_a_scan_gives_what_the_loop_gives_dropout_and_statistics_included():
    stack, layers, _ = built_both_ways()
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    for _ in range(2):  # the second time from the counters and statistics of the first
        y = x
        for layer in layers:
            y = layer(y)
        np.testing.assert_allclose(scan_run(stack, x, DEPTH), y, rtol=1e-5, atol=1e-5)
    assert_stack_equals_list(stack, layers)


def test_the_scan_is_over_the_stacked_parameters_themselves():
    stack, _, _ = built_both_ways()
    graph, params, rest = nnx.split(stack, nnx.Param, ...)
    x = jnp.ones((2, WIDTH))

    def through(params, x):
        return scan_run(nnx.merge(graph, params, rest, copy=True), x, DEPTH)

    jaxpr = jax.make_jaxpr(through)(params, x)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == DEPTH)
    count = len(jax.tree.leaves(params))
    consts, carry = consts_and_carry(scan)
    assert set(jaxpr.jaxpr.invars[:count]) <= set(scan.invars[consts + carry :])
    assert carry == 1


class Halving(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Linear(3, 3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + x.shape[0])
        return self.mix(x[::2])


def test_layers_that_change_the_shape_on_their_way_are_called_in_turn():
    rngs = nnx.Rngs(0)
    stack = stacked_run(lambda rngs, i: Halving(rngs), 3, rngs)
    layers = [Halving(r) for r in [nnx.Rngs(0)] for _ in range(3)]
    x = y = jax.random.normal(jax.random.key(1), (16, 3))
    for layer in layers:
        y = layer(y)
    np.testing.assert_allclose(scan_run(stack, x, 3), y, rtol=1e-6)
    np.testing.assert_array_equal(stack.calls.get_value(), [16, 8, 4])


def test_a_tuple_is_carried_as_a_tuple():
    class Add(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, inputs):
            x, mask = inputs
            return self.mix(x) * mask, mask

    stack = stacked_run(lambda rngs, i: Add(rngs), 3, nnx.Rngs(0))
    rngs = nnx.Rngs(0)
    layers = [Add(rngs) for _ in range(3)]
    given = out = (jnp.ones((2, 3)), jnp.array([[1.0], [0.0]]))
    for layer in layers:
        out = layer(out)
    for ours, theirs in zip(scan_run(stack, given, 3), out, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
