"""What passes over the traced loss do with the grouped products of a mixture."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.ops.attention import autocast_to
from jaxspeed.traced_loss.autocast import Autocast, with_autocast
from jaxspeed.zero3 import EvalContext, ShardedParam, choose_units, product_vjp, run_segmented
from jaxspeed.zero3.residual_policy import ResidualPolicy
from tests.moe.mixture_cases import Case, case, dense_layer, layer
from tests.ops.meshes import simulated_mesh
from tests.support.covering import covering

DEPTH = 2


@jaxspeed.unit
def block(params, x, given):
    gate, up, down = params
    return x + layer(Case(x, gate, up, down, given.combine, given.chosen))


@jaxspeed.unit
def dense_block(params, x, given):
    gate, up, down = params
    return x + dense_layer(Case(x, gate, up, down, given.combine, given.chosen))


def loss(params, x, given, block=block):
    for each in params:
        x = block(each, x, given)
    return jnp.mean(jnp.sin(x))


def all_equations(jaxpr, inside=()):
    """(equation, names of the primitives around it) of a program, nested ones included."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for body in bodies(eqn):
            yield from all_equations(body.jaxpr, (*inside, eqn.primitive.name))


class Stored:
    """Two blocks whose experts are stored sharded over data, and gathered by unit or product."""

    def __init__(self, mesh, given, monkeypatch, rows):
        monkeypatch.setattr(product_vjp, "ROWS", rows)
        monkeypatch.setattr(product_vjp, "INPUTS", 0)
        self.given, self.mesh = given, mesh
        self.params = [(given.gate + i, given.up, given.down) for i in range(DEPTH)]
        leaves, tree = jax.tree.flatten(self.params)
        with jax.set_mesh(mesh):
            self.closed = jax.make_jaxpr(lambda p, x: loss(jax.tree.unflatten(tree, p), x, given))(
                leaves, given.x
            )
        variables = self.closed.jaxpr.invars[: len(leaves)]
        gathered = NamedSharding(mesh, P("expert"))
        stored = NamedSharding(mesh, P("expert", "data"))
        self.storage = {
            v: ShardedParam(v.aval.shape, v.aval.dtype, gathered, stored) for v in variables
        }
        units = choose_units(self.closed.jaxpr, variables)
        self.context = EvalContext(units, residuals=ResidualPolicy())
        self.gathered = gathered

    def loss(self, params, x):
        args = [*jax.tree.leaves(params), x]
        closed = self.closed
        return run_segmented(closed.jaxpr, closed.consts, args, self.storage, self.context)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("load", "rows"),
    covering([("alike", 0), ("alike", 10**9), ("skewed", 0), ("skewed", 10**9)], [("alike", 0)]),
)
def test_stored_experts_are_gathered_without_changing_a_number(load, rows, monkeypatch):
    """With one round, and with several; `rows` is from where on a product gathers its own."""
    given = case(load)
    stored = Stored(simulated_mesh(data=2, expert=2), given, monkeypatch, rows)
    of_dense = jax.grad(functools.partial(loss, block=dense_block), (0, 1))
    expected = jax.jit(of_dense)(stored.params, given.x, given)
    with jax.set_mesh(stored.mesh):
        found = jax.jit(jax.grad(stored.loss, (0, 1)))(stored.params, given.x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 1e-5 * jnp.max(jnp.abs(a))


def test_each_product_gathers_its_own_experts(monkeypatch):
    """Outside of the further rounds three times: forward, recomputed, and backward."""
    given = case()
    stored = Stored(simulated_mesh(data=2, expert=2), given, monkeypatch, 0)
    with jax.set_mesh(stored.mesh):
        program = jax.make_jaxpr(jax.grad(stored.loss))(stored.params, given.x).jaxpr
    found = [
        (eqn.outvars[0].aval.size, inside)
        for eqn, inside in all_equations(program)
        if eqn.primitive.name == "sharding_constraint"
        and eqn.params["sharding"].is_equivalent_to(stored.gathered, 3)
    ]
    first = [size for size, inside in found if "cond" not in inside]
    assert sum(first) == 3 * DEPTH * sum(w.size for w in (given.gate, given.up, given.down))
    assert min(first) < given.gate.size, "one larger than its rows is divided"
    assert len(found) > len(first)


def test_a_recomputed_unit_recomputes_a_mixture_once(monkeypatch):
    """In its backward pass: the tokens travel once more, with what their gradients need."""
    given = case()
    stored = Stored(simulated_mesh(data=2, expert=2), given, monkeypatch, 10**9)
    with jax.set_mesh(stored.mesh):
        program = jax.make_jaxpr(jax.grad(stored.loss))(stored.params, given.x).jaxpr
    names = [e.primitive.name for e, inside in all_equations(program) if "cond" not in inside]
    # 3 of each of the forward and the recomputed pass, and 3 for gradients of rows.
    assert names.count("grouped_product") <= 9 * DEPTH
    assert names.count("grouped_gradient") == 3 * DEPTH


def test_mixed_precision_multiplies_and_sends_bf16():
    given = case()
    mesh = simulated_mesh(expert=2)
    with jax.set_mesh(mesh), autocast_to(jnp.bfloat16):
        closed = jax.make_jaxpr(lambda *parts: layer(Case(*parts, given.chosen)))(*given[:-1])
        made = with_autocast(closed, Autocast(jnp.bfloat16), {})
        found = list(all_equations(made.jaxpr))
        products = [e for e, _ in found if e.primitive.name == "grouped_product"]
        assert products
        assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars[:2])
        sent = [e.invars[0].aval for e, _ in found if e.primitive.name == "all_to_all"]
        wide = [x for x in sent if x.dtype == jnp.float32]
        assert all(x.shape[-1] == 1 for x in wide), "weights of the sum alone"
        assert any(x.dtype == jnp.bfloat16 and x.shape[-1] == given.x.shape[-1] for x in sent)
        (y,) = jax.jit(as_function(made.jaxpr, made.consts))(*given[:-1])
    expected = dense_layer(given)
    assert y.dtype == jnp.float32
    assert 1e-6 < np.max(np.abs(y - expected)) / np.max(np.abs(expected)) < 0.05
