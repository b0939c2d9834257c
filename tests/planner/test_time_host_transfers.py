"""Host transfers, counted from traced programs; against compiled ones in tests/system."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from jaxspeed.offload.transfer_report import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.planner.time import device_flops, host_transfers
from jaxspeed.planner.trace import Step, TracedPhase
from jaxspeed.planner.trace.trace_ir import open_program
from jaxspeed.train.phases import BATCH, METRICS, STATE

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host
SIZES = {"pipe": 1, "data": 4, "tensor": 2}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(1, 4, 2), tuple(SIZES))


def waiting(mesh, shape, *spec, dtype=jnp.float32):
    at = NamedSharding(mesh, P(*spec), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=at)


def here(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def step_of(function, *args, state=()):
    """The step of a function whose first arguments, and results, are the state of these paths."""
    scope = open_program(jax.jit(function).trace(*args).jaxpr, "cpu")
    program = SimpleNamespace(mesh=SimpleNamespace(shape=SIZES), table=())
    others = len(args) - len(state)
    phase = TracedPhase(
        program,
        "step",
        SIZES,
        "cpu",
        scope,
        ins=[*[STATE] * len(state), *[BATCH] * others],
        outs=[*[STATE] * len(state), *[METRICS] * (len(scope.outs) - len(state))],
        paths=[(DictKey(name),) for name in [*state, *["batch"] * others]],
        specs=[x.sharding.spec for x in args],
        in_host=[in_host(x.sharding) for x in args],
    )
    return Step(program, None, (phase,))


def of(function, *args, state=()):
    return host_transfers(step_of(function, *args, state=state))


def test_a_loop_over_layers_moves_each_once_and_a_device_its_shard(mesh):
    def forward(weights, x):
        def layer(h, w):
            return h @ jax.device_put(w, DEVICE), None

        return weights, jax.lax.scan(layer, x, weights)[0]

    weights = waiting(mesh, (6, 32, 32), None, "data", "tensor")
    step = step_of(forward, weights, here(mesh, (8, 32)), state=["params/w"])
    found = host_transfers(step)
    assert found.to_device == {PARAMETERS: 6 * 32 * 32 * 4 // 8}
    assert found.fetched == {"params/w": 6 * 32 * 32 * 4 // 8}
    assert found.to_host == found.stored == {}
    assert device_flops(step.phases[0].scope, SIZES) == 6 * 2 * 8 * 32 * 32 / 8


def test_loops_in_loops_multiply(mesh):
    def forward(weights, x):
        def micro(h, _):
            return jax.lax.scan(lambda h, w: (h + jax.device_put(w, DEVICE), None), h, weights)

        return weights, jax.lax.scan(lambda h, n: (micro(h, n)[0], None), x, None, length=3)[0]

    found = of(forward, waiting(mesh, (5, 16)), here(mesh, (16,)), state=["params/w"])
    assert found.to_device == {PARAMETERS: 3 * 5 * 16 * 4}


def test_an_array_updated_in_a_loop_leaves_as_it_came(mesh):
    at = NamedSharding(mesh, P(None, "data"), memory_kind="pinned_host")

    def update(moments):
        def body(i, m):
            piece = jax.device_put(
                jax.lax.dynamic_slice_in_dim(m, i, 1), at.with_memory_kind("device")
            )
            return jax.lax.dynamic_update_slice_in_dim(m, jax.device_put(0.9 * piece, at), i, 0)

        return jax.lax.fori_loop(0, 6, body, moments)

    found = of(update, waiting(mesh, (6, 64), None, "data"), state=["opt/mu"])
    assert found.to_device == found.to_host == {OPTIMIZER: 6 * 64 * 4 // 4}
    assert found.fetched == found.stored == {"opt/mu": 6 * 64 * 4 // 4}


def test_an_array_replaced_as_a_whole_leaves_as_it_came(mesh):
    at = NamedSharding(mesh, P("data"), memory_kind="pinned_host")

    def update(moments):
        return jax.device_put(0.9 * jax.device_put(moments, at.with_memory_kind("device")), at)

    found = of(update, waiting(mesh, (64,), "data"), state=["opt/mu"])
    assert found.fetched == found.stored == {"opt/mu": 64 * 4 // 4}


def test_a_number_of_a_sharded_array_is_sent_whole(mesh):
    def first(moments):
        return moments, jax.device_put(moments[0], DEVICE) + 1

    found = of(first, waiting(mesh, (64,), "data"), state=["opt/mu"])
    assert found.fetched == {"opt/mu": 4}


def test_what_nobody_reads_is_not_fetched(mesh):
    """A compiler drops it: a backward pass fetches no bias."""

    def forward(weights, x):
        def layer(h, w):
            return h + 1, jax.device_put(w, DEVICE)

        return weights, jax.lax.scan(layer, x, weights)[0]

    assert of(forward, waiting(mesh, (6, 64)), here(mesh, (64,)), state=["params/w"]).bytes == 0


def test_what_reaches_the_next_state_by_itself_is_a_gradient_and_else_an_activation(mesh):
    def moved(x):
        return jax.device_put(jax.device_put(jnp.sin(x), HOST), DEVICE)

    state, x = here(mesh, (8, 8), "data"), here(mesh, (8, 8), "data")
    for step, kind in (
        (lambda w, x: w - moved(x), GRADIENTS),
        (lambda w, x: w - moved(x).T @ x, ACTIVATIONS),
    ):
        found = of(step, state, x, state=["params/w"])
        assert found.to_device == found.to_host == {kind: 8 * 8 * 4 // 4}


def test_activations_that_are_sharded_over_tensor_too_move_less(mesh):
    """Also where the program says so of what they are made of, and not of themselves."""
    at = NamedSharding(mesh, P(P.UNCONSTRAINED, "tensor"))

    def there(x):
        x = jax.lax.with_sharding_constraint(x, at)
        return jax.device_put(x, HOST), jax.device_put(jnp.sin(x), HOST)

    assert of(there, here(mesh, (8, 16), "data")).to_host == {ACTIVATIONS: 2 * 8 * 16 * 4 // 8}


def test_what_one_shard_does_is_what_its_device_does(mesh):
    def there(x):
        return jax.device_put(x, HOST)

    mapped = jax.shard_map(
        there, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    found = of(mapped, here(mesh, (8, 16), "data"))
    assert found.to_host == {ACTIVATIONS: 2 * 16 * 4}


@pytest.mark.parametrize("largest_first", [True, False])
def test_of_branches_the_one_that_transfers_most_counts(mesh, largest_first):
    def either(weights, flag):
        def fetch(w):
            return jax.device_put(w, DEVICE).sum()

        branches = [fetch, lambda w: fetch(w[:1])]
        return weights, jax.lax.cond(flag, *branches[:: 1 if largest_first else -1], weights)

    found = of(either, waiting(mesh, (6, 64)), here(mesh, ()), state=["params/w"])
    assert found.to_device == {PARAMETERS: 6 * 64 * 4}
