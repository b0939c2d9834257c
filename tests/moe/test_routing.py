"""Routers of all kinds equal the dense reference: choices, weights, statistics and gradients."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.errors import ModelError
from jaxspeed.hlo.collectives import collectives
from jaxspeed.ops import moe
from tests.moe import dense_reference
from tests.ops.meshes import simulated_mesh
from tests.support.covering import examples

MARGIN = 1e-5  # of scores; where it is less, a rounding may choose another expert
EMBED = 6


def tokens_and_router(experts, batch=2, seq=7, seed=0, spread=0.0):
    """(x, router): with a spread, the first experts are chosen more often, and some never."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, seq, EMBED)).astype(np.float32)
    x[..., 0] = 1
    router = rng.normal(size=(EMBED, experts)).astype(np.float32)
    router[0] -= spread * np.arange(experts)
    return jnp.asarray(x), jnp.asarray(router)


def dense(routing, experts):
    """The combine weights [batch, seq, experts]; a dropped pair has none."""
    chosen = routing.experts[..., None] == jnp.arange(experts)
    return jnp.sum(jnp.where(chosen, routing.weights[..., None], 0), axis=2)


def assert_near(found, wanted, tolerance=1e-5):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted) + 1e-30


@st.composite
def routers(draw):
    """(experts, the keywords of a router)."""
    groups, size = draw(st.sampled_from([(1, 12), (2, 6), (4, 3), (6, 2), (12, 1)]))
    limited = draw(st.one_of(st.none(), st.integers(1, groups)))
    k = draw(st.integers(1, size * (limited or groups)))
    return groups * size, {
        "k": k,
        "scores": draw(st.sampled_from(["softmax", "sigmoid", "softmax_of_top"])),
        "renormalize": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "logit_bias": draw(st.booleans()),
        "groups": groups,
        "limited_groups": limited,
        "group_score": draw(st.sampled_from(["max", "top2"] if size > 1 else ["max"])),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "capacity_factor": draw(st.sampled_from([None, 0.0, 0.6, 1.0, 1.25])),
        "min_capacity": draw(st.sampled_from([1, 4])),
    }


@settings(max_examples=examples(2, 100))
@given(router=routers(), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 1.0, 3.0]))
def test_any_router_equals_the_dense_reference(router, seed, spread):
    """Also gradients, and with experts that no token, or every token, chooses."""
    experts, options = router
    x, weight = tokens_and_router(experts, seed=seed, spread=spread)
    rng = np.random.default_rng(seed)
    for name in ("bias", "logit_bias"):
        vector = jnp.asarray(rng.normal(size=experts), jnp.float32)
        options[name] = vector if options[name] else None
    assume(dense_reference.routed(x, weight, **options).margin.min() > MARGIN)
    slopes = [rng.normal(size=shape) for shape in [(2, 7, experts), (2, experts), (2,)]]

    def summed(combine, probabilities, z):
        return sum(jnp.sum(a * b) for a, b in zip(slopes, (combine, probabilities, z), strict=True))

    def ours(x, weight, vectors):
        routing = moe.route(x, weight, **options | vectors)
        return summed(dense(routing, experts), routing.probabilities, routing.z), routing

    def theirs(x, weight, vectors):
        routing = dense_reference.routed(x, weight, **options | vectors)
        return summed(routing.combine, routing.shares.sum(1), routing.z.sum(1)), routing

    vectors = {name: options[name] for name in ("bias", "logit_bias") if options[name] is not None}
    (_, found), grads = jax.value_and_grad(ours, (0, 1, 2), has_aux=True)(x, weight, vectors)
    (_, wanted), right = jax.value_and_grad(theirs, (0, 1, 2), has_aux=True)(x, weight, vectors)

    assert found.experts.dtype == found.counts.dtype == found.dropped.dtype == jnp.int32
    assert {found.weights.dtype, found.probabilities.dtype, found.z.dtype} == {jnp.float32.dtype}
    np.testing.assert_array_equal(dense(found, experts) != 0, wanted.taken & (wanted.combine != 0))
    np.testing.assert_array_equal(found.counts, wanted.chosen.sum(1))
    np.testing.assert_array_equal(found.dropped, (wanted.chosen & ~wanted.taken).sum((1, 2)))
    np.testing.assert_array_equal((found.experts == experts).sum((1, 2)), found.dropped)
    assert_near(dense(found, experts), wanted.combine)
    assert_near(found.probabilities, wanted.shares.sum(1))
    assert_near(found.z, wanted.z.sum(1))
    jax.tree.map(assert_near, grads, right)
    assert not np.any(grads[2].get("bias", 0))  # it only selects


def test_of_equal_scores_the_lowest_experts_are_chosen():
    """Also of equal groups. All values are exact."""
    x, weight = jnp.ones((1, 2, 2)), jnp.asarray([[1.0, 2, 1, 2, 2, 1, 2, 2], [1.0] * 8])
    for scores in ("softmax", "sigmoid", "softmax_of_top"):
        found = moe.route(x, weight, k=3, scores=scores)
        assert found.experts.tolist() == [[[1, 3, 4]] * 2]
        limited = {"groups": 4, "limited_groups": 2}
        found = moe.route(x, weight, k=2, scores=scores, **limited)
        assert found.experts.tolist() == [[[1, 3]] * 2]
        found = moe.route(x, weight, k=2, scores=scores, group_score="top2", **limited)
        assert found.experts.tolist() == [[[1, 6]] * 2]


def test_a_group_that_is_not_chosen_has_no_expert_even_where_scores_are_negative():
    """With a bias, scores of chosen groups can be below 0."""
    x, weight = tokens_and_router(8, seed=1)
    options = {"scores": "sigmoid", "groups": 4, "limited_groups": 1, "group_score": "top2"}
    found = moe.route(x, weight, k=2, bias=jnp.full(8, -5.0), **options)
    groups = np.asarray(found.experts) // 2
    assert (groups[..., 0] == groups[..., 1]).all()
    plain = moe.route(x, weight, k=2, **options)
    np.testing.assert_array_equal(found.experts, plain.experts)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_renormalized_scores_that_underflow_have_weights_and_gradients(scores):
    """s_i / sum(s) is (1/4, 3/4) for these logits, however small the scores are."""
    x = jnp.ones((1, 1, 1))
    router = jnp.asarray([[-200.0, -200.0 + np.log(3.0), -300.0, 0.0]])
    bias = jnp.asarray([5.0, 5.0, 0.0, 0.0])

    def routed(router):
        options = {"scores": scores, "renormalize": True, "bias": bias}
        return moe.route(x, router, k=2, **options).weights

    found, slope = routed(router), jax.grad(lambda w: routed(w)[0, 0, 0])(router)
    assert_near(found, [[[0.25, 0.75]]])
    assert_near(slope, [[3 / 16, -3 / 16, 0, 0]])


@pytest.mark.parametrize("value", [0.0, -np.inf, np.nan, np.inf])
def test_a_token_never_chooses_an_expert_twice(value):
    """Also where scores are not finite: what sorts tokens by their experts relies on it."""
    x = jnp.full((1, 3, EMBED), value)
    for options in ({}, {"groups": 4, "limited_groups": 2, "group_score": "top2"}):
        for scores in ("softmax", "sigmoid", "softmax_of_top"):
            found = moe.route(x, jnp.ones((EMBED, 8)), k=4, scores=scores, **options)
            assert (np.diff(np.sort(found.experts, -1), axis=-1) > 0).all()
            assert found.counts.sum() == 12 and found.experts.max() < 8


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_top"])
def test_logits_that_are_not_finite_are_not_hidden(scores, renormalize, value):
    """Of one expert: all others have finite logits, and could be chosen in its place."""
    x, router = tokens_and_router(8)
    router = router.at[0, 5].set(value)  # x is 1 there
    found = moe.route(x, router, k=2, scores=scores, renormalize=renormalize)
    finite = np.isfinite(found.weights).all(-1)
    if (scores, value) == ("sigmoid", np.inf):
        assert finite.all()  # its score is 1
    else:
        assert not finite.any()


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_top"])
def test_tokens_of_16_bits_are_routed_in_fp32(scores):
    """Bitwise as the same tokens in fp32, weights of 16 bits too."""
    x, weight = (a.astype(jnp.bfloat16) for a in tokens_and_router(8, seq=64))
    found = moe.route(x, weight, k=2, scores=scores, renormalize=True)
    wide = moe.route(x.astype(jnp.float32), weight.astype(jnp.float32), k=2, scores=scores,
                     renormalize=True)  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, found, wide)
    assert found.weights.dtype == jnp.float32


def test_the_product_asks_for_the_highest_precision():
    """TPUs and GPUs multiply fp32 operands with fewer bits by default."""
    x, weight = tokens_and_router(8)
    program = jax.make_jaxpr(lambda x, weight: moe.route(x, weight, k=2))(x, weight)
    (product,) = (e for e in program.eqns if e.primitive.name == "dot_general")
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


# -- capacity --------------------------------------------------------------------------------------


@given(
    experts=st.integers(1, 16),
    tokens=st.integers(1, 300),
    k=st.integers(1, 8),
    hundredths=st.integers(1, 400),
    least=st.integers(0, 8),
)
def test_the_capacity_is_the_formula_of_the_decimal_factor(experts, tokens, k, hundredths, least):
    found = moe.capacity_of(experts, tokens, k=k, factor=hundredths / 100, min_capacity=least)
    assert found == max(least, math.ceil(Fraction(k * hundredths * tokens, 100 * experts)))


def test_a_capacity_is_no_rounding_above_the_formula():
    assert math.ceil(0.07 * 100) == 8
    assert moe.capacity_of(1, 100, k=1, factor=0.07) == 7


def test_an_expert_takes_its_first_tokens_of_each_sample():
    """All tokens choose expert 0 of 4: with a capacity of 3, the first three of each sample."""
    x, weight = tokens_and_router(4, batch=3, seq=6, spread=1000.0)
    found = moe.route(x, weight, k=1, capacity_factor=2.0, min_capacity=1)  # 2 x 6 / 4
    assert found.experts[..., 0].tolist() == [[0, 0, 0, 4, 4, 4]] * 3
    assert found.dropped.tolist() == [3] * 3
    assert found.counts.tolist() == [[6, 0, 0, 0]] * 3
    assert (found.weights[:, 3:] == 0).all() and (found.weights[:, :3] > 0.9).all()


@pytest.fixture(scope="module")
def dropped_by_reference():
    """(tokens, router, options, taken pairs), with margins above MARGIN."""
    x, weight = tokens_and_router(8, batch=8, seq=16, seed=3, spread=0.3)
    options = {"k": 2, "renormalize": True, "capacity_factor": 1.0, "min_capacity": 2}
    wanted = dense_reference.routed(x, weight, **options)
    assert wanted.margin.min() > MARGIN
    assert (wanted.chosen & ~wanted.taken).sum() > 20
    return x, weight, options, np.asarray(wanted.taken)


@pytest.mark.default_cases("2-1", "4-1", "1-2")
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2)])
def test_the_same_tokens_are_dropped_on_every_mesh(dropped_by_reference, data, tensor):
    """Samples are sharded over data, and with a tensor axis their positions over it."""
    x, weight, options, taken = dropped_by_reference
    mesh = simulated_mesh(data=data, tensor=tensor)
    x = jax.device_put(x, NamedSharding(mesh, P("data", "tensor" if tensor > 1 else None)))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x, weight: moe.route(x, weight, **options))(x, weight)
    np.testing.assert_array_equal(np.asarray(dense(found, 8)) != 0, taken)
    np.testing.assert_array_equal(found.counts, moe.route(*dropped_by_reference[:2], k=2).counts)


@pytest.mark.default_cases("None-sizes0", "None-sizes1")
@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"data": 2, "expert": 4}])
@pytest.mark.parametrize("limited", [None, 2])
def test_devices_route_their_own_samples(sizes, limited):
    """The sum of the router's gradient over samples is all that is communicated."""
    x, weight = tokens_and_router(8, batch=8)
    mesh = simulated_mesh(**sizes)
    x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
    weight = jax.device_put(weight, NamedSharding(mesh, P()))
    options = {"groups": 4, "limited_groups": limited, "group_score": "top2"}

    def loss(weight, x):
        routing = moe.route(x, weight, k=2, capacity_factor=1.0, **options)
        per_sample = jnp.sum(routing.weights**2, axis=(1, 2)) + routing.z
        return jnp.sum(per_sample + jnp.sum(routing.probabilities**2, -1)), routing

    def collectives_of(function):
        with jax.set_mesh(mesh):
            return collectives(jax.jit(function).lower(weight, x).compile().as_text(), mesh)

    assert not collectives_of(lambda weight, x: loss(weight, x)[1])
    found = collectives_of(lambda weight, x: jax.grad(loss, has_aux=True)(weight, x)[0])
    assert [(each.kind, each.bytes) for each in found] == [("all-reduce", weight.nbytes)]


# -- rematerialization -----------------------------------------------------------------------------


def test_the_decision_can_be_saved():
    """With its name saved, the backward pass chooses no experts again."""
    x, weight = tokens_and_router(8)

    def loss(policy):
        routed = jax.checkpoint(lambda x: moe.route(x, weight, k=2).weights, policy=policy)
        return lambda x: jnp.sum(jnp.sin(routed(x)))

    def choices(policy):
        return str(jax.make_jaxpr(jax.grad(loss(policy)))(x)).count("argmax")

    saved = jax.checkpoint_policies.save_only_these_names("router_experts")
    assert choices(None) - choices(saved) == 2  # k
    assert_near(jax.grad(loss(saved))(x), jax.grad(loss(None))(x), 0)


# -- bad input -------------------------------------------------------------------------------------


BAD = {
    "k above the experts": ({"k": 9}, "k = 9 of 8 experts"),
    "no k": ({"k": 0}, "k = 0 of 8 experts"),
    "groups that do not divide": ({"k": 2, "groups": 3}, r"one of \[1, 2, 4, 8\]"),
    "more limited groups than groups": (
        {"k": 2, "groups": 4, "limited_groups": 5},
        "limited_groups is 5 of 4 groups",
    ),
    "limited groups with fewer experts than k": (
        {"k": 5, "groups": 4, "limited_groups": 2},
        "limited_groups is at least 3",
    ),
    "two best of groups of one": (
        {"k": 2, "groups": 8, "limited_groups": 2, "group_score": "top2"},
        "group_score is 'max'",
    ),
    "a capacity that drops everything": (
        {"k": 2, "capacity_factor": 0.0, "min_capacity": 0},
        "drop all tokens",
    ),
    "a negative capacity": ({"k": 2, "capacity_factor": -1.0}, "capacity_factor is -1.0"),
    "unknown scores": ({"k": 2, "scores": "tanh"}, "'tanh' is not 'softmax'"),
    "an unknown group score": ({"k": 2, "group_score": "mean"}, "'mean' is neither"),
    "a bias of another size": ({"k": 2, "bias": jnp.zeros(7)}, r"bias .* \(7,\), should be \(8,\)"),
    "a logit bias of another size": ({"k": 2, "logit_bias": jnp.zeros((1, 8))}, "should be"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_no_router_can_have_are_one_error(case):
    options, message = BAD[case]
    x, weight = tokens_and_router(8)
    with pytest.raises(ModelError, match=message):
        moe.route(x, weight, **options)


@pytest.mark.parametrize("shape", [(4, 8), (EMBED,), (1, EMBED, 8)])
def test_a_router_that_does_not_fit_the_tokens_is_an_error(shape):
    x, _ = tokens_and_router(8)
    with pytest.raises(ModelError, match="does not fit tokens"):
        moe.route(x, jnp.zeros(shape), k=1)
    with pytest.raises(ModelError, match="does not fit tokens"):
        moe.route(x[0], jnp.zeros((EMBED, 8)), k=1)
