"""Constraints at shard boundaries: those inserted into a traced program, and no others."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.placement.mesh import build_mesh
from jaxspeed.tensor_parallel import ActivationLayout, with_boundary_constraints
from tests.support.covering import covering

SAMPLES, SEQ, EMBED, MLP = 4, 8, 16, 32
SPECS = {"up": P(None, "tensor"), "down": P("tensor", None), "scale": P(None)}
SHARDED = ActivationLayout(sequence_parallel=True)
RING = ActivationLayout(sequence_parallel=True, overlap="ring")


def params() -> dict[str, jax.Array]:
    a, b = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(a, (EMBED, MLP)) / 4,
        "down": jax.random.normal(b, (MLP, EMBED)) / 6,
        "scale": jnp.ones(EMBED),
    }


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (SAMPLES, SEQ, EMBED))


def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.silu((x * p["scale"]) @ p["up"]) @ p["down"]


def plain(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(block(p, x) ** 2)


def scanned(p: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, _: (block(p, x), None), x, length=3)
    return jnp.mean(x**2)


def checkpointed(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.checkpoint(block)(p, jax.jit(block)(p, x)) ** 2)


def branched(p: Any, x: jax.Array) -> jax.Array:
    y = jax.lax.cond(x[0, 0, 0] > 0, lambda: block(p, x), lambda: 2 * block(p, 2 * x))
    return jnp.mean(y**2)


def looped(p: Any, x: jax.Array) -> jax.Array:
    frozen = jax.tree.map(jax.lax.stop_gradient, p)
    y = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, block(frozen, c[1])), (0, x))
    return jnp.mean(block(p, jax.lax.stop_gradient(y[1])) ** 2)


def two_from_one(p: Any, x: jax.Array) -> jax.Array:
    """A second weight of the same activation, made from the parameter only after the first."""
    h = jnp.tanh(x @ p["up"])
    late = jnp.sin(p["up"])
    return jnp.mean(((h * (x @ late)) @ p["down"]) ** 2)


def turned(p: Any, x: jax.Array) -> jax.Array:
    """The weight first, and a matmul of three dims."""
    h = jnp.einsum("em,bse->mbs", p["up"], x)
    return jnp.mean(jnp.einsum("mbs,me->bse", jnp.tanh(h), p["down"]) ** 2)


PROGRAMS = (plain, scanned, checkpointed, branched, looped, two_from_one, turned)
LAYOUTS = {"replicated": ActivationLayout(), "sharded": SHARDED, "ring": RING}


def written(loss: Any, layout: ActivationLayout, mesh: Any) -> tuple[Any, Any]:
    """(the program with its boundary constraints, the tree of its arguments)."""
    values, x = params(), inputs()
    closed = jax.make_jaxpr(loss)(values, x)
    names = sorted(values)
    parameters = dict(zip(names, closed.jaxpr.invars, strict=False))
    specs = {name: SPECS[name] for name in names}
    batch = closed.jaxpr.invars[len(names) :]
    jaxpr = with_boundary_constraints(closed.jaxpr, parameters, batch, specs, mesh, layout)
    return jex.ClosedJaxpr(jaxpr, closed.consts), [*(values[n] for n in names), x]


# Each program is tested with one layout, the first with all.
@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize(
    ("loss", "layout"),
    covering(
        itertools.product(PROGRAMS, LAYOUTS),
        [(plain, layout) for layout in LAYOUTS]
        + [(loss, [*LAYOUTS][i % len(LAYOUTS)]) for i, loss in enumerate(PROGRAMS) if i],
    ),
)
def test_what_is_written_changes_no_number(loss, layout):
    mesh = build_mesh({"data": 2, "tensor": 4})

    def run(*args: Any) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program, _ = written(loss, LAYOUTS[layout], mesh)
            return jex.jaxpr_as_fun(program)(*args)[0]

    args = written(loss, ActivationLayout(), build_mesh({}))[1]
    at = [NamedSharding(mesh, SPECS[name]) for name in sorted(SPECS)]
    placed = [*jax.device_put(args[:-1], at), jax.device_put(args[-1], NamedSharding(mesh, P()))]
    both = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3)))
    value, grads = both(*placed)
    plain_value, (by_name, to_x) = jax.value_and_grad(loss, argnums=(0, 1))(params(), inputs())
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    for got, want in zip(grads, [*(by_name[n] for n in sorted(by_name)), to_x], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def specs_in(jaxpr: Any) -> list[Any]:
    """The spec of every constraint, in order, those of nested functions included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append(eqn.params["sharding"].spec)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += specs_in(inner)
    return found


RANKS = ("data",)  # of more than one device
WHOLE, KEPT = P(RANKS, None, None), P(RANKS, "tensor", None)


def of_gradient(loss: Any, layout: ActivationLayout) -> list[Any]:
    mesh = build_mesh({"data": 2, "tensor": 4})
    program, args = written(loss, layout, mesh)
    gradient = jax.grad(lambda *a: jex.jaxpr_as_fun(program)(*a)[0], argnums=(0, 1, 2, 3))
    return specs_in(jax.make_jaxpr(gradient)(*args).jaxpr)


def test_a_block_has_constraints_on_its_sums_and_no_others():
    # The row's sum, as it leaves; backward what comes to it, and the column's sum.
    assert of_gradient(plain, ActivationLayout()) == [WHOLE, WHOLE, WHOLE, WHOLE]


def test_sequence_parallel_activations_are_saved_sharded():
    assert of_gradient(plain, SHARDED) == [
        WHOLE,  # the column's input, gathered
        KEPT,  # ... and what is kept of it
        WHOLE,  # the row's sum
        KEPT,  # ... as it leaves
        WHOLE,  # backward: what comes to the row
        KEPT,  # and the column's sum
    ]


def test_matmuls_of_one_activation_gather_it_once():
    assert of_gradient(two_from_one, SHARDED).count(KEPT) == of_gradient(plain, SHARDED).count(KEPT)


def test_matmuls_in_two_units_are_not_merged():
    """Else the second unit's weights would be gathered, and live, with the first one's."""
    mesh = build_mesh({"data": 2, "tensor": 4})
    closed = jax.make_jaxpr(two_from_one)(params(), inputs())
    names = sorted(params())
    parameters = dict(zip(names, closed.jaxpr.invars, strict=False))
    matmuls = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    counts = []
    for unit_of in (lambda eqn: 0, matmuls.index):
        jaxpr = with_boundary_constraints(
            closed.jaxpr,
            parameters,
            closed.jaxpr.invars[len(names) :],
            SPECS,
            mesh,
            SHARDED,
            unit_of,
        )
        counts.append(sum(e.primitive.name == "custom_vjp_call" for e in jaxpr.eqns))
    assert counts[1] == counts[0] + 1


def test_a_program_with_nothing_sharded_is_unchanged():
    mesh = build_mesh({"tensor": 8})
    closed = jax.make_jaxpr(plain)(params(), inputs())
    parameters = dict(zip(sorted(params()), closed.jaxpr.invars, strict=False))
    specs = dict.fromkeys(parameters, P())
    found = with_boundary_constraints(closed.jaxpr, parameters, [], specs, mesh, SHARDED)
    assert str(found) == str(closed.jaxpr)
