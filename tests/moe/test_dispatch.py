"""A mixture equals the dense one on meshes with an expert axis, whatever the load of experts."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

from jaxspeed import ops
from jaxspeed.ops.moe import dispatch
from jaxspeed.ops.moe import grouped_products as products
from jaxspeed.ops.moe.dispatch import pair_rows, pairs_of_parts, rounds_of
from tests.moe.mixture_cases import (
    BATCH,
    EMBED,
    EXPERTS,
    LOADS,
    K,
    case,
    dense_layer,
    errors,
    layer,
    routing_of,
    with_gradients,
)
from tests.ops.meshes import simulated_mesh

MESHES = {
    "one device": {},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "expert 4 x tensor 2": {"expert": 4, "tensor": 2},
    "data 2 x expert 2": {"data": 2, "expert": 2},
    "seq 2 x expert 2": {"seq": 2, "expert": 2},
}
MORE_MESHES = {
    "expert 2": {"expert": 2},
    "expert 8": {"expert": 8},
    "replica 2 x data 2 x expert 2": {"replica": 2, "data": 2, "expert": 2},
    "data 2 x expert 2 x tensor 2": {"data": 2, "expert": 2, "tensor": 2},
    "pipe 2 x expert 2 x tensor 2": {"pipe": 2, "expert": 2, "tensor": 2},
}
dense = with_gradients(dense_layer)
EVEN = 6  # tokens of a sample that a sequence axis divides


@functools.cache
def compiled(mesh: str):
    """The package's layer on a mesh: one program for all loads."""
    run = with_gradients(layer)
    devices = simulated_mesh(**(MESHES | MORE_MESHES)[mesh])

    def on_mesh(given):
        with jax.set_mesh(devices):
            return run(given)

    return on_mesh


@pytest.mark.default_cases(every=7)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.full) for mesh in MORE_MESHES)]
)
def test_outputs_and_gradients_are_those_of_the_dense_mixture(mesh, load):
    given = case(load)
    assert max(errors(compiled(mesh)(given), dense(given)).values()) < 1e-5


@pytest.mark.default_cases("sizes0")
@pytest.mark.parametrize("sizes", [{"seq": 4}, {"data": 2, "seq": 2, "expert": 2}])
def test_each_device_of_a_sequence_computes_its_positions(sizes):
    """Of all samples in place; a program for one device has a share of the rows of experts."""
    given, mesh, made = case("skewed", 8, 12), simulated_mesh(**sizes), []

    def run(given):
        def feed_forward(rows):
            made.append(rows.values.shape)
            hidden = jax.nn.silu(rows.product(given.gate)) * rows.product(given.up)
            return rows.product(given.down, hidden * rows.weights)

        routing = routing_of(given.chosen, given.combine)
        return ops.moe.mixture(given.x, routing, feed_forward)

    with jax.set_mesh(mesh):
        found = with_gradients(layer)(given)
        compiled = jax.jit(run).lower(given).compile()
    assert max(errors(found, dense(given)).values()) < 1e-5
    shards = int(np.prod([*sizes.values()]))
    pairs, slack = 8 * 12 * K // shards, 1.25 if "expert" in sizes else 1
    assert made[0][1:3] == (shards, pairs * slack)
    assert not re.search(rf"all-gather.*f32\[(8,12|96|192),{EMBED}\]", compiled.as_text())


@pytest.mark.full
@pytest.mark.parametrize("batch, seq", [(3, 5), (1, 1)])
def test_samples_that_the_mesh_does_not_divide(batch, seq):
    given = case("skewed", batch, seq)
    assert max(errors(compiled("data 2 x expert 2")(given), dense(given)).values()) < 1e-5


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """The definition of `ragged_all_to_all`, by all-gathers and slices."""
    own = jax.lax.axis_index(axis_name)
    given = (operand, input_offsets, send_sizes, output_offsets)
    rows, first, sizes, there = (jax.lax.all_gather(x, axis_name) for x in given)
    for source in range(len(rows)):
        number = jnp.arange(len(output)) - there[source, own]
        sent = (number >= 0) & (number < sizes[source, own])
        found = jnp.take(rows[source], first[source, own] + number, axis=0, mode="clip")
        output = jnp.where(sent[:, None], found, output)
        recv_sizes = recv_sizes.at[source].add(-sizes[source, own])
    # Sizes that do not agree would be undefined behaviour.
    return jnp.where(jnp.all(recv_sizes == 0), output, jnp.nan)


@pytest.fixture(scope="module")
def ragged():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_all_to_all", emulated)
        patch.setattr(dispatch, "by_platform", lambda padded, ragged, *args: ragged(*args))
        run = with_gradients(layer)
        mesh = simulated_mesh(expert=4)

        def on_mesh(given):
            with jax.set_mesh(mesh):
                return run(given)

        on_mesh(case())
        yield on_mesh


@pytest.mark.parametrize("load", LOADS)
def test_the_ragged_form_equals_the_dense_mixture(ragged, load):
    """With the primitive, which CPUs have not, emulated."""
    given = case(load)
    assert max(errors(ragged(given), dense(given)).values()) < 1e-5


def expected_rounds(chosen, sizes):
    """ceil of the most rows from one device to another over what fits, with Python's loops."""
    groups, parts = sizes.get("expert", 1), sizes.get("seq", 1)
    shards = groups * sizes.get("data", 1) * sizes.get("replica", 1)
    samples, positions = len(chosen) // shards, EVEN // parts
    most = 0
    for shard, part, group in itertools.product(range(shards), range(parts), range(groups)):
        own = chosen[shard * samples : (shard + 1) * samples]
        own = own[:, part * positions : (part + 1) * positions]
        most = max(most, int(np.sum(own // (EXPERTS // groups) == group)))
    fits = -(-5 * samples * positions * K // (4 * groups))
    return max(1, -(-most // fits))


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"seq": 2, "expert": 2}])
def test_rounds_are_those_of_the_formula(load, sizes):
    """Those that are counted for metrics, and those that a layer runs."""
    given, ran = case(load, seq=EVEN), []

    def feed_forward(rows):
        jax.debug.callback(lambda x: ran.append(None), rows.values[0, 0, 0, 0])
        return rows.values

    @jax.jit
    def run(given):
        routing = routing_of(given.chosen, given.combine)
        y = ops.moe.mixture(given.x, routing, feed_forward)
        return y, rounds_of(pairs_of_parts(given.chosen, EXPERTS)[:, None], K, EVEN)

    with jax.set_mesh(simulated_mesh(**sizes)):
        _, counted = run(given)
    jax.effects_barrier()
    expected = expected_rounds(given.chosen, sizes)
    assert counted.tolist() == [expected]
    assert len(ran) == expected
    assert (load == "alike") <= (expected > 1)


def test_a_round_sends_a_quarter_more_rows_than_balanced_experts_need():
    assert pair_rows(64, 4) == 20
    assert pair_rows(10, 4) == 4  # 3.125
    assert pair_rows(10, 1) == 10


def test_experts_that_the_axis_does_not_divide():
    given = case()
    with (
        jax.set_mesh(simulated_mesh(expert=3)),
        pytest.raises(ops.moe.dispatch.ModelError, match="size 3 does not divide 8 experts"),
    ):
        jax.eval_shape(layer, given)


# -- what the tests above would not miss -----------------------------------------------------------


def scaled_gradients(monkeypatch):
    """The gradients of experts are multiplied by the size of the axis."""
    old = ad.primitive_transposes[products.grouped_product_p]

    def new(*args, layout, **params):
        of_values, of_weight, _ = old(*args, layout=layout, **params)
        return of_values, None if of_weight is None else layout.expert_shards * of_weight, None

    monkeypatch.setitem(ad.primitive_transposes, products.grouped_product_p, new)


def dropped_weights(monkeypatch):
    old = dispatch._Exchange.dispatch

    def new(self, *args):
        values, weights, bounds = old(self, *args)
        return values, jnp.ones_like(weights), bounds

    monkeypatch.setattr(dispatch._Exchange, "dispatch", new)


def neighbours_expert(monkeypatch):
    """One token goes to the expert behind its own."""
    old = dispatch._Exchange.plan

    def new(self, chosen):
        return old(self, chosen.at[0, 0, 0].set((chosen[0, 0, 0] + 1) % EXPERTS))

    monkeypatch.setattr(dispatch._Exchange, "plan", new)


def skipped_round(monkeypatch):
    old = dispatch._Exchange.__init__

    def new(self, *args):
        old(self, *args)
        self.most_rounds -= 1

    monkeypatch.setattr(dispatch._Exchange, "__init__", new)


MUTATIONS = {
    scaled_gradients: {"gate", "up", "down"},
    dropped_weights: {"y", "x", "gate", "up", "down", "combine"},
    neighbours_expert: {"y", "x", "gate", "up", "down", "combine"},
    skipped_round: {"y", "x", "gate", "up", "down", "combine"},
}


@pytest.mark.default_cases("skipped_round")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_a_mutation_is_seen(mutation, monkeypatch):
    mutation(monkeypatch)
    given = case("alike")
    with jax.set_mesh(simulated_mesh(expert=2)):
        found = errors(with_gradients(layer)(given), dense(given))
    assert {name for name, error in found.items() if error > 1e-3} == MUTATIONS[mutation]
    assert BATCH % 2 == 0
