"""Balance: losses, counts and bias updates equal the dense reference, and are proved per sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.jaxpr.sample_independence import Analysis
from jaxspeed.jaxpr.sample_values import SampleKind, free, samples
from jaxspeed.ops import moe
from tests.moe import dense_reference
from tests.ops.meshes import simulated_mesh

LAYERS, BATCH, SEQ, EMBED, EXPERTS = 3, 4, 6, 5, 8
ROUTERS = {
    "softmax": {"k": 2},
    "limited sigmoid": {
        "k": 3,
        "scores": "sigmoid",
        "renormalize": True,
        "groups": 4,
        "limited_groups": 2,
        "group_score": "top2",
        "bias": jnp.linspace(-0.2, 0.2, EXPERTS),
    },
    "capacity": {"k": 2, "scores": "softmax_of_top", "capacity_factor": 0.5, "min_capacity": 1},
}


def model(x, routers, options):
    """(x, balance) after a scan over mixture layers whose carry is both, numbered as traced."""

    def layer(carry, xs):
        x, balance = carry
        number, router = xs
        routing = moe.route(x, router, **options)
        return (jnp.tanh(x + routing.weights.sum(-1, keepdims=True)),
                balance.with_layer(number, routing)), None  # fmt: skip

    start = x, moe.Balance.zeros(len(x), LAYERS, EXPERTS)
    return jax.lax.scan(layer, start, (jnp.arange(LAYERS), routers))[0]


def reference(x, routers, options):
    """The routings of all layers."""
    routings = []
    for router in routers:
        routings.append(dense_reference.routed(x, router, **options))
        x = jnp.tanh(x + routings[-1].combine.sum(-1, keepdims=True))
    return routings


def inputs(seed=0, batch=BATCH):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, SEQ, EMBED)) + np.eye(EMBED)[0]
    return jnp.asarray(x, jnp.float32), jnp.asarray(
        rng.normal(size=(LAYERS, EMBED, EXPERTS)), jnp.float32
    )


def assert_near(found, wanted, tolerance=1e-5):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


LOSSES = {
    "switch": (lambda b, k: b.switch_loss(k), dense_reference.switch_loss),
    "sequence": (lambda b, k: b.sequence_loss(k), dense_reference.sequence_loss),
    "z": (lambda b, k: b.z_loss(), lambda routings, k: dense_reference.z_loss(routings)),
}


@pytest.mark.default_cases(every=8)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("router", ROUTERS)
def test_each_loss_and_its_gradient_equal_the_reference(router, loss):
    x, routers = inputs()
    options, (ours, theirs) = ROUTERS[router], LOSSES[loss]
    assert min(r.margin.min() for r in reference(x, routers, options)) > 1e-5
    found, grads = jax.jit(
        jax.value_and_grad(lambda x, w: ours(model(x, w, options)[1], options["k"]), (0, 1))
    )(x, routers)
    wanted, right = jax.value_and_grad(
        lambda x, w: theirs(reference(x, w, options), options["k"]), (0, 1)
    )(x, routers)
    assert_near(found, wanted)
    jax.tree.map(assert_near, grads, right)


def test_balanced_layers_have_a_loss_of_one_each_and_metrics_of_one():
    counts = jnp.full((BATCH, LAYERS, EXPERTS), 6, jnp.int32)  # 24 tokens with k = 2
    even = moe.Balance(
        counts,
        jnp.full(counts.shape, 3.0),
        jnp.full((BATCH, LAYERS), 4.0),
        counts[:, :, None],
        jnp.full((BATCH, LAYERS), 12, jnp.int32),
    )
    assert_near([even.switch_loss(2), even.sequence_loss(2), even.z_loss()], [3, 3, 12])
    metrics = even.metrics()
    wanted = {"expert_load": 1, "expert_entropy": 1, "dropped_share": 0.25, "router_z": 4}
    assert metrics.keys() == wanted.keys()
    assert_near([*metrics.values()], [wanted[name] for name in metrics])


def test_metrics_of_an_unbalanced_load():
    """Of two layers: one expert of four has all tokens, and two have half each."""
    counts = jnp.asarray([[[8, 0, 0, 0], [4, 4, 0, 0]]], jnp.int32)
    zeros = moe.Balance.zeros(1, 2, 4)
    metrics = zeros._replace(counts=counts).metrics()
    assert_near([metrics["expert_load"], metrics["expert_entropy"]], [3, 0.25])


def test_totals_are_the_references_counts():
    x, routers = inputs()
    for options in ROUTERS.values():
        _, balance = model(x, routers, options)
        wanted = [dense_reference.counts(r) for r in reference(x, routers, options)]
        assert balance.total().dtype == jnp.int32
        np.testing.assert_array_equal(balance.total(), wanted)


# -- meshes ----------------------------------------------------------------------------------------


@pytest.mark.default_cases("sizes1", "sizes2")
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 8}, {"data": 4, "tensor": 2}])
def test_counts_and_bias_updates_are_bitwise_equal_on_every_mesh(sizes):
    x, routers = inputs(batch=8)
    options = ROUTERS["limited sigmoid"]
    assert min(r.margin.min() for r in reference(x, routers, options)) > 1e-5

    def update(x, routers):
        total = model(x, routers, options)[1].total()
        return total, moe.updated_bias(jnp.zeros((LAYERS, EXPERTS)), total, 1e-3)

    wanted = jax.jit(update)(x, routers)
    mesh = simulated_mesh(**sizes)
    with jax.set_mesh(mesh):
        found = jax.jit(update)(jax.device_put(x, NamedSharding(mesh, P("data"))), routers)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_counts_are_the_same_of_one_batch_and_of_its_micro_batches():
    x, routers = inputs(batch=8)
    for options in ROUTERS.values():
        full = model(x, routers, options)[1].total()
        parts = sum(model(x[i : i + 2], routers, options)[1].total() for i in range(0, 8, 2))
        np.testing.assert_array_equal(full, parts)


# -- bias updates ----------------------------------------------------------------------------------


@settings(max_examples=30)
@given(counts=st.lists(st.integers(0, 2**27), min_size=EXPERTS, max_size=EXPERTS))
def test_the_bias_moves_by_the_exact_sign_of_the_difference_to_the_mean(counts):
    bias = jnp.linspace(-1, 1, EXPERTS)
    found = moe.updated_bias(bias, jnp.asarray(counts, jnp.int32), 1e-3)
    wanted = dense_reference.updated_bias(bias, counts, 1e-3)
    np.testing.assert_array_equal(found, wanted)


def test_experts_with_the_mean_keep_their_bias_and_layers_are_apart():
    counts = jnp.asarray([[3, 3, 3], [1, 2, 3], [1, 1, 3], [2**24 + 1, 2**24, 2**24 - 1]])
    found = moe.updated_bias(jnp.zeros((4, 3)), counts, 0.5)
    assert found.tolist() == [[0, 0, 0], [0.5, 0, -0.5], [0.5, 0.5, -0.5], [-0.5, 0, 0.5]]


# -- sample independence ---------------------------------------------------------------------------


def kinds(function):
    """The kind of each result of a function of (x, routers), by traces of 4 and 8 samples."""

    def traced(count):
        x, routers = inputs(batch=count)
        return jax.make_jaxpr(function, return_shape=True)(x, routers)

    (one, shape), (two, _) = traced(4), traced(8)
    analysis = Analysis((4, 8), frozenset({"data"}))
    constants = map(analysis.constant, one.consts, two.consts)
    found = analysis.run(one.jaxpr, two.jaxpr, [*constants, samples(), free(3)])
    return jax.tree.unflatten(jax.tree.structure(shape), found)


@pytest.mark.parametrize("router", ROUTERS)
def test_statistics_are_proved_to_be_of_one_sample_each(router):
    """In a scan whose carry they are; a layer's number is traced."""
    options = ROUTERS[router]
    x, balance = kinds(lambda x, routers: model(x, routers, options))
    drops = options.get("capacity_factor") is not None
    for value in (x, *balance[:-1], *([balance.dropped] if drops else [])):
        assert (value.kind, value.dim) == (SampleKind.SAMPLES, 0), value.why
    assert drops or balance.dropped.kind is SampleKind.FREE  # no sample has any


@pytest.mark.parametrize("router", ROUTERS)
def test_losses_are_proved_to_be_sums_over_samples_except_for_the_switch_loss(router):
    options = ROUTERS[router]

    def losses(x, routers):
        balance, k = model(x, routers, options)[1], options["k"]
        return [balance.total(), balance.z_loss(), balance.sequence_loss(k)], balance.switch_loss(k)

    sums, mixes = kinds(losses)
    assert [x.kind for x in sums] == [SampleKind.SUM] * 3, [x.why for x in sums]
    assert [x.extent for x in sums] == [1, 0, 0]  # the losses are means over samples
    assert mixes.kind is SampleKind.MIXED
