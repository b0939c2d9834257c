"""What an equation's bodies are said to be is what the equation runs: its results come of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

from jaxspeed.jaxpr.evaluate import as_function, evaluate, run_equation
from jaxspeed.jaxpr.traverse import (
    bodies,
    called,
    is_var,
    open_jaxpr,
    runs,
    sliceable_bodies,
    transparent_bodies,
    with_functions,
    with_jaxpr,
)

SIZE, LENGTH = 3, 4


def equation(fn, *args):
    """The equation of a function that runs a program, the values of its operands, its results."""
    closed = jax.make_jaxpr(fn)(*args)
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [env[v] if is_var(v) else v.val for v in eqn.invars]
        results = run_equation(closed.jaxpr, eqn, env.__getitem__)
        if bodies(eqn):
            return eqn, values, results
        env.update(zip(eqn.outvars, results, strict=True))
    raise AssertionError("it runs no program")


def custom_jvp(a, b):
    f = jax.custom_jvp(lambda a, b: (b, a * b))
    f.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return f(a, b)


def custom_vjp(a, b):
    f = jax.custom_vjp(lambda a, b: (b, a * b))
    f.defvjp(lambda a, b: (f(a, b), None), lambda _, cts: cts)
    return f(a, b)


def scanned(a, b):
    """With a constant, two carries of which one is exchanged, and two stacked results."""
    xs = jnp.arange(LENGTH * SIZE, dtype=jnp.float32).reshape(LENGTH, SIZE)
    return lax.scan(lambda c, x: ((c[1], c[0] + x * b), (x + b, c[1] * b)), (a, a + 1), xs)


def looped(a, b):
    """With a constant of its condition, and two of its body."""
    limit, step = b.sum() * 10, b + 1
    return lax.while_loop(lambda c: c[0].sum() < limit, lambda c: (c[1] + step, c[0] + b), (a, b))


def chosen(a, b):
    return lax.switch(1, [lambda a, b: (a, b), lambda a, b: (b - a, a * 2)], a, b)


def run(body, values):
    return as_function(body.jaxpr, body.consts)(*values[body.first :])


def run_scan(body, values):
    consts, carry = values[: body.num_consts], values[body.num_consts :][: body.num_carry]
    ys = []
    for i in range(body.trips):
        slices = [x[i] for x in values[body.num_consts + body.num_carry :]]
        outs = as_function(body.jaxpr, body.consts)(*consts, *carry, *slices)
        carry, made = outs[: body.num_carry], outs[body.num_carry :]
        ys.append(made)
    return [*carry, *map(jnp.stack, zip(*ys, strict=True))]


def run_while(eqn, body, values):
    given = values[body.first :]
    consts, carry = given[: body.num_consts], given[body.num_consts :]
    assert len(carry) == body.num_carry
    condition, _ = open_jaxpr(eqn.params["cond_jaxpr"])
    while as_function(condition)(*values[: body.first], *carry)[0]:
        carry = as_function(body.jaxpr, body.consts)(*consts, *carry)
    return carry


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: jax.jit(lambda a, b: (b, a + 2 * b))(a, b),
        lambda a, b: jax.checkpoint(lambda a, b: (b, jnp.sin(a) * b))(a, b),
        custom_jvp,
        custom_vjp,
        scanned,
        looped,
        chosen,
    ],
)
def test_running_the_body_is_running_the_equation(fn):
    a, b = (jnp.arange(SIZE, dtype=jnp.float32) + i for i in (1, 2))
    eqn, values, results = equation(fn, a, b)
    found = bodies(eqn)
    assert [len(body.jaxpr.invars) for body in found] == [len(body.operands) for body in found]
    assert all(body.operands == eqn.invars[body.first :] for body in found)
    name = eqn.primitive.name
    if name == "scan":
        outs = run_scan(found[0], values)
    elif name == "while":
        outs = run_while(eqn, found[0], values)
    else:
        outs = run(found[int(values[0]) if name == "cond" else 0], values)
    for mine, theirs in zip(outs, results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert [b.jaxpr for b in transparent_bodies(eqn)] == [b.jaxpr for b in found]
    sliceable = name not in ("while", "custom_jvp_call", "custom_vjp_call")
    assert bool(sliceable_bodies(eqn)) == sliceable


def test_a_manual_region_has_the_axes_over_which_it_came_to_be_manual():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data")

    def fn(x):
        return jax.shard_map(
            jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}
        )(x)

    (eqn,) = jax.make_jaxpr(fn)(jnp.ones(8)).jaxpr.eqns
    (body,) = bodies(eqn)
    assert body.manual == (("data", 4),)
    assert body.jaxpr.invars[0].aval.shape == (2,)
    assert not transparent_bodies(eqn) and not sliceable_bodies(eqn)


def test_kernels_and_what_combines_two_elements_are_no_bodies():
    def doubled(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def kernel(x):
        return pl.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def combined(x):
        return lax.reduce(x, 0.0, lambda a, b: a + b * 2, (0,))

    for fn in (kernel, combined):
        (eqn,) = jax.make_jaxpr(fn)(jnp.ones(8)).jaxpr.eqns
        assert bodies(eqn) == []
        assert runs(eqn, ["mul"])


def test_runs_looks_into_conditions_too():
    def fn(x):
        return lax.while_loop(lambda x: jnp.sin(x) < 5, lambda x: x + 1, x)

    (eqn,) = jax.make_jaxpr(fn)(1.0).jaxpr.eqns
    assert runs(eqn, ["sin"]) and runs(eqn, ["add"]) and not runs(eqn, ["cos"])


@pytest.mark.parametrize("fn", [scanned, looped, chosen, custom_jvp])
def test_functions_are_replaced_where_they_are_held(fn):
    a, b = (jnp.arange(SIZE, dtype=jnp.float32) + i for i in (1, 2))
    eqn, _, _ = equation(fn, a, b)
    assert with_functions(eqn, lambda closed: closed) is eqn
    first = with_functions(eqn, lambda closed: with_jaxpr(closed, open_jaxpr(closed)[0].replace()))
    assert first is not eqn
    assert [str(x.jaxpr) for x in bodies(first)] == [str(x.jaxpr) for x in bodies(eqn)]


def test_what_calls_are_said_to_run_is_inlined_in_evaluation():
    def fn(x):
        return jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)(x)

    closed = jax.make_jaxpr(fn)(1.0)
    (eqn,) = closed.jaxpr.eqns
    assert open_jaxpr(called(eqn))[0] is bodies(eqn)[0].jaxpr
    assert not runs(
        jax.make_jaxpr(lambda x: evaluate(closed.jaxpr, (), [x]))(1.0).jaxpr.eqns[0], ["jit"]
    )
    np.testing.assert_allclose(evaluate(closed.jaxpr, (), [1.0])[0], fn(1.0), rtol=1e-6)
