"""What a unit does to its parameters, read from the traced program.

Gathers and scatters are the sharding constraints of the program of `value_and_grad`; an operand is
*tied* when an `optimization_barrier` made it (XLA keeps to one unit at a time because of these).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxspeed
from jaxspeed.jaxpr.module_scopes import scope
from jaxspeed.placement.rows import HOST
from jaxspeed.zero3 import (
    EvalContext,
    ShardedParam,
    choose_units,
    run_segmented,
    segment_vjp,
    sharded_param,
)

DEPTH, WIDTH, SAMPLES = 4, 16, 4
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
REPLICATED = NamedSharding(MESH, PartitionSpec())


def storage_of(leaf: Any, kind: str = "device") -> ShardedParam:
    """Sharded on the last dim."""
    spec = PartitionSpec(*[None] * (leaf.ndim - 1), "data")
    at = NamedSharding(MESH, spec, memory_kind=kind)
    return ShardedParam(leaf.shape, leaf.dtype, REPLICATED, at)


class Sharded:
    """A loss of (params, x) with its units gathering their own parameters."""

    def __init__(self, loss: Any, params: Any, x: Any, kind: str = "device") -> None:
        leaves, tree = jax.tree.flatten(params)
        closed = jax.make_jaxpr(lambda leaves, x: loss(jax.tree.unflatten(tree, leaves), x))(
            leaves, x
        )
        parameters = closed.jaxpr.invars[: len(leaves)]
        self.units = choose_units(closed.jaxpr, parameters)
        self.leaves, self.x = leaves, x
        storage = {v: storage_of(x, kind) for v, x in zip(parameters, leaves, strict=True)}

        def run(leaves: list[Any], x: Any) -> Any:
            args = [*leaves, x]
            return run_segmented(
                closed.jaxpr, closed.consts, args, storage, EvalContext(self.units)
            )[0]

        self.loss, self.gradients = run, jax.value_and_grad(run)

    def program(self) -> Any:
        return jax.make_jaxpr(self.gradients)(self.leaves, self.x).jaxpr


@jaxspeed.unit
def block(params, x):
    return x + jnp.tanh(x @ params["w"]) @ params["v"]


def pure_loss(params, x):
    for layer in params["layers"]:
        x = block(layer, x)
    return jnp.mean((x @ params["head"]) ** 2)


def recomputed_loss(params, x):
    """The layers share one cached trace."""
    for layer in params["layers"]:
        x = jax.checkpoint(block)(layer, x)
    return jnp.mean((x @ params["head"]) ** 2)


def jitted_loss(params, x):
    """So do these."""
    for layer in params["layers"]:
        x = jax.jit(block)(layer, x)
    return jnp.mean((x @ params["head"]) ** 2)


def scanned_loss(params, x):
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def pure_params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2 * DEPTH + 1)
    square = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    layers = [{"w": square[2 * i], "v": square[2 * i + 1]} for i in range(DEPTH)]
    return {"layers": layers, "head": square[-1]}


def stacked_params() -> dict[str, Any]:
    params = pure_params()
    return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (SAMPLES, WIDTH))


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(DEPTH):
            x = LinenBlock()(x)
        return nn.Dense(WIDTH)(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(2 * WIDTH)(x)))


def linen_loss(params, x):
    def name(next_fun, args, kwargs, context):
        with scope(type(context.module).__name__, "/".join(context.module.path)):
            return next_fun(*args, **kwargs)

    with nn.intercept_methods(name):
        return jnp.mean(LinenStack().apply({"params": params}, x) ** 2)


def linen_params() -> Any:
    return LinenStack().init(jax.random.key(0), inputs())["params"]


# -- reading a program ----------------------------------------------------------------------------


def equations(jaxpr: Any) -> list[tuple[Any, dict[Any, Any]]]:
    """Every equation, those of nested programs included, with who made each variable there."""
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found = [(eqn, makers) for eqn in jaxpr.eqns]
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += equations(inner)
    return found


def counts(jaxpr: Any) -> dict[str, int]:
    """How many gathers there are, how many stored shards are pinned and tied, how many scatters.

    A pinned shard is what a gather reads; any other constraint that cuts is a gradient's.
    """
    found = [(e, makers) for e, makers in equations(jaxpr) if is_constraint(e)]
    gathers = [eqn for eqn, _ in found if not any(eqn.params["sharding"].spec)]
    gathered = {eqn.invars[0] for eqn in gathers}
    cuts = [(eqn, makers) for eqn, makers in found if any(eqn.params["sharding"].spec)]
    pinned = [makers.get(e.invars[0]) for e, makers in cuts if e.outvars[0] in gathered]
    tied = [m for m in pinned if m is not None and m.primitive.name == "optimization_barrier"]
    return {
        "gathers": len(gathers),
        "tied shards": len(tied),
        "scatters": len(cuts) - len(pinned),
    }


def is_constraint(eqn: Any) -> bool:
    return eqn.primitive.name == "sharding_constraint"


def expected(weights: int) -> dict[str, int]:
    """A gather in each pass, from a shard that waits for the unit's input; one scatter."""
    return {"gathers": 2 * weights, "tied shards": 2 * weights, "scatters": weights}


def on_host(params: Any) -> Any:
    """Their shapes, in host memory."""
    at = NamedSharding(MESH, PartitionSpec(), memory_kind=HOST)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params)


# -- claims ---------------------------------------------------------------------------------------

MODELS = {
    "pure functions": (pure_loss, pure_params, "4 x block"),
    "pure functions, scanned": (scanned_loss, stacked_params, "4 x block"),
    "pure functions, recomputed": (recomputed_loss, pure_params, "4 x block"),
    "pure functions in jit": (jitted_loss, pure_params, "4 x block"),
    "Linen": (linen_loss, linen_params, "4 x LinenBlock"),
}


@pytest.mark.default_cases(
    "pure functions, scanned", "pure functions, recomputed", "pure functions in jit"
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_plain_jax(name):
    loss, make, units = MODELS[name]
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), make())
        x = inputs().astype(jnp.float64)
        sharded = Sharded(loss, params, x)
        assert str(sharded.units) == units
        value, grads = jax.jit(sharded.gradients)(sharded.leaves, x)
        plain_value, plain = jax.jit(jax.value_and_grad(loss))(params, x)
        assert abs(value - plain_value) < 1e-13 * plain_value
        for a, b in zip(jax.tree.leaves(plain), grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(a).max())


# A checkpoint's recomputation gathers once more in the traced program; XLA merges the two.
COUNTED = [name for name in MODELS if name != "pure functions, recomputed"]


@pytest.mark.parametrize("name", COUNTED)
def test_each_parameter_is_gathered_in_each_pass_and_scattered_once(name):
    loss, make, _ = MODELS[name]
    params = make()
    sharded = Sharded(loss, params, inputs())
    assert counts(sharded.program()) == expected(len(jax.tree.leaves(params)))


def test_a_gather_waits_for_the_input_of_its_unit():
    """In the forward pass each barrier of a unit takes the shards and the unit's own input."""
    program = Sharded(pure_loss, pure_params(), inputs()).program()
    barriers = [e for e, _ in equations(program) if e.primitive.name == "optimization_barrier"]
    shapes = [[tuple(v.aval.shape) for v in eqn.invars] for eqn in barriers]
    together = [s for s in shapes if s.count((WIDTH, WIDTH)) == 2 and (SAMPLES, WIDTH) in s]
    # Forward, backward, and once more between a unit's gradients and the next unit backward; none
    # follows the first unit, whose input has no gradient.
    assert len(together) == 3 * DEPTH - 1


def saved_full_weights(loss: Any, params: Any) -> int:
    """Number of residuals of a weight's shape that are not sharded."""
    sharded = Sharded(loss, params, inputs())
    leaves = [jax.device_put(leaf, storage_of(leaf).sharding) for leaf in sharded.leaves]
    _, pullback = jax.jit(lambda leaves, x: jax.vjp(lambda p: sharded.loss(p, x), leaves))(
        leaves, sharded.x
    )
    shapes = {leaf.shape for leaf in leaves}
    saved = [x for x in jax.tree.leaves(pullback) if getattr(x, "shape", None) in shapes]
    assert len(saved) >= len(leaves)  # the shards themselves
    return sum(x.is_fully_replicated for x in saved)


def test_no_gathered_parameter_is_a_residual():
    assert saved_full_weights(pure_loss, pure_params()) == 0


def test_a_gathered_parameter_as_residual_is_caught(monkeypatch):
    monkeypatch.setattr(segment_vjp, "_depends_only_on", lambda jaxpr, sources: set())
    assert saved_full_weights(pure_loss, pure_params()) > 0


@pytest.mark.parametrize("name", COUNTED)
def test_offloaded_shards_wait_on_the_device(name):
    """XLA:TPU compiles no barrier in host memory: without one, it gathered all layers at once."""
    loss, make, _ = MODELS[name]
    sharded = Sharded(loss, make(), inputs(), HOST)
    program = jax.make_jaxpr(sharded.gradients)(on_host(sharded.leaves), sharded.x).jaxpr
    assert counts(program) == expected(len(sharded.leaves))
    assert all(v.aval.memory_space == jax.memory.Space.Host for v in program.outvars[1:])
    barriers = [e for e, _ in equations(program) if e.primitive.name == "optimization_barrier"]
    operands = [v for eqn in barriers for v in eqn.invars]
    assert {v.aval.memory_space for v in operands} == {jax.memory.Space.Device}


MUTATIONS = {
    "the shard is not pinned": (sharded_param, "constrain", "unit.shard"),
    "the gather is dropped": (sharded_param, "constrain", "unit.gather"),
    "the gradient is not scattered": (sharded_param, "constrain", "unit.scatter"),
    "nothing is tied": (segment_vjp, "tie", None),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_dropped_part_of_a_gather_is_caught(monkeypatch, name, mutation):
    module, attribute, site = MUTATIONS[mutation]
    original = getattr(module, attribute)
    if attribute == "tie":
        broken = lambda first, second: (list(first), list(second))  # noqa: E731
    else:

        def broken(x, sharding, where):
            return x if where == site else original(x, sharding, where)

    monkeypatch.setattr(module, attribute, broken)
    loss, make, _ = MODELS[name]
    params = make()
    assert counts(Sharded(loss, params, inputs()).program()) != expected(
        len(jax.tree.leaves(params))
    )
