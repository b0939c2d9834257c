"""Matmuls of wide units: the same numbers, one weight (or a part of it) gathered at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxspeed
from jaxspeed.zero3 import EvalContext, ShardedParam, choose_units, product_vjp, run_segmented
from jaxspeed.zero3.residual_policy import ResidualPolicy
from tests.support.awkward import AWKWARD, Plain, UnlikeBlocks
from tests.support.covering import covering
from tests.zero3.test_units import Sliced, Split, assert_same, double_precision
from tests.zero3.test_units_gathers import equations

__all__ = ["double_precision"]  # a fixture

DEVICES, SAMPLES, WIDTH, HIDDEN, DEPTH = 8, 16, 32, 256, 3
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


RECOMPUTED = ResidualPolicy()


@pytest.fixture
def always(monkeypatch):
    """Every matmul with a weight of its own is one that pays."""
    monkeypatch.setattr(product_vjp, "ROWS", 0)
    monkeypatch.setattr(product_vjp, "INPUTS", 0)


@pytest.mark.default_cases("UnlikeBlocks")
@pytest.mark.parametrize(
    "model", covering(AWKWARD, (Plain, UnlikeBlocks)), ids=lambda model: model.__name__
)
@pytest.mark.usefixtures("always")
def test_no_number_changes_in_awkward_models(model):
    split = Split(model)
    plain = jax.jit(jax.value_and_grad(split.loss, has_aux=True))
    sliced = Sliced(split, ResidualPolicy())
    leaves, rest, x = sliced.arguments()
    assert_same(plain(split.leaves, rest, x), jax.jit(sliced.gradients())(leaves, rest, x))


@jaxspeed.unit
def block(params: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ params["up"]) @ (2 * params["down"])


def loss(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = block(layer, x)
    return jnp.mean(x**2)


class Wide:
    """Blocks of a matmul whose weight may be divided, and one whose weight is scaled before."""

    def __init__(self, residuals: ResidualPolicy | None = RECOMPUTED) -> None:
        keys = jax.random.split(jax.random.key(0), 2 * DEPTH)
        weights = [jax.random.normal(k, (WIDTH, HIDDEN), jnp.float64) / WIDTH for k in keys]
        self.params = [
            {"up": a, "down": b.T} for a, b in zip(weights[:DEPTH], weights[DEPTH:], strict=True)
        ]
        self.x = jax.random.normal(jax.random.key(1), (SAMPLES, WIDTH), jnp.float64)
        leaves, self.tree = jax.tree.flatten(self.params)
        self.closed = jax.make_jaxpr(lambda p, x: loss(jax.tree.unflatten(self.tree, p), x))(
            leaves, self.x
        )
        variables = self.closed.jaxpr.invars[: len(leaves)]
        gathered = NamedSharding(MESH, PartitionSpec())
        sharded = NamedSharding(MESH, PartitionSpec("data"))
        self.storage = {
            v: ShardedParam(v.aval.shape, v.aval.dtype, gathered, sharded) for v in variables
        }
        units = choose_units(self.closed.jaxpr, variables)
        self.context = EvalContext(units, residuals=residuals)

    def loss(self, params: Any, x: jax.Array) -> jax.Array:
        args = [*jax.tree.leaves(params), x]
        return run_segmented(
            self.closed.jaxpr, self.closed.consts, args, self.storage, self.context
        )[0]

    def gathers(self) -> list[tuple[int, ...]]:
        """Shapes of the gathered weights in a program of the gradients."""
        program = jax.make_jaxpr(jax.grad(self.loss))(self.params, self.x).jaxpr
        found = [e for e, _ in equations(program) if e.primitive.name == "sharding_constraint"]
        return [e.outvars[0].aval.shape for e in found if e.params["sharding"].is_fully_replicated]


@pytest.mark.sampled
@pytest.mark.usefixtures("always")
def test_no_number_changes():
    wide = Wide()
    expected = jax.jit(jax.grad(loss, (0, 1)))(wide.params, wide.x)
    found = jax.jit(jax.grad(wide.loss, (0, 1)))(wide.params, wide.x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 1e-13 * jnp.max(jnp.abs(a))


@pytest.mark.usefixtures("always")
def test_a_weight_larger_than_the_activations_is_gathered_in_parts():
    """256 x 32 numbers against 2 x 256 of the larger activation: 16 parts."""
    gathers = Wide().gathers()
    parts = WIDTH * HIDDEN // (SAMPLES // DEVICES * HIDDEN)
    assert gathers.count((WIDTH, HIDDEN // parts)) == 3 * parts * DEPTH, "and recomputed"
    assert gathers.count((HIDDEN, WIDTH)) == 2 * DEPTH, "what is scaled before is not divided"


def test_it_has_to_pay(monkeypatch):
    wide = Wide()
    assert wide.gathers().count((WIDTH, HIDDEN)) == 2 * DEPTH, "a few rows"
    monkeypatch.setattr(product_vjp, "ROWS", SAMPLES // DEVICES)
    assert Wide(None).gathers().count((WIDTH, HIDDEN)) == 2 * DEPTH, "nothing is recomputed"
    assert wide.gathers().count((WIDTH, HIDDEN)) == 0
    monkeypatch.setattr(product_vjp, "INPUTS", 10**9)
    assert wide.gathers().count((WIDTH, HIDDEN)) == 2 * DEPTH, "small weights"
