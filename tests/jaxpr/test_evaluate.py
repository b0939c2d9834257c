"""Evaluation of traced programs, and the garbage collector while they are traced."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.jaxpr.evaluate import evaluate
from jaxspeed.jaxpr.paused_collector import paused_collector


@jax.jit
def inner(x, y):
    return jnp.sin(x) * 2, y


def outer(x, y):
    with jax.named_scope("first"):
        a = jnp.exp(x) + y
    b, same = inner(a, y)
    return b - a, same, a, jnp.split(b, 2)[1] * 3.0


ARGS = tuple(np.linspace(*ends, 6, dtype=np.float32) for ends in ((-1, 1), (2, 3)))


def closed():
    return jax.make_jaxpr(outer)(*ARGS)


def test_a_program_computes_what_its_function_does_and_keeps_scopes():
    program = closed()
    again = jax.make_jaxpr(lambda *args: evaluate(program.jaxpr, program.consts, args))(*ARGS)
    for found, expected in zip(jax.core.eval_jaxpr(again.jaxpr, again.consts, *ARGS), outer(*ARGS)):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert "inner" not in str(again)  # inlined
    names = [str(eqn.source_info.name_stack) for eqn in again.jaxpr.eqns]
    assert any("first" in name for name in names)


def test_what_an_inlined_call_returns_unchanged_stays_the_same_object():
    program, y = closed(), jnp.asarray(ARGS[1])
    assert evaluate(program.jaxpr, program.consts, [jnp.asarray(ARGS[0]), y])[1] is y


def test_a_replaced_result_is_what_later_equations_read():
    program = closed()
    replaced = program.jaxpr.outvars[2]
    seen = []

    def zeros(variable, value):
        seen.append(variable)
        return jnp.zeros_like(value)

    found = evaluate(program.jaxpr, program.consts, ARGS, zeros, [replaced])
    assert seen == [replaced]
    assert not np.any(found[0]) and not np.any(found[2]) and not np.any(found[3])


def test_without_a_list_each_result_is_replaced_in_inlined_calls_too():
    program = closed()
    seen = []

    def note(variable, value):
        seen.append(variable)
        return value

    evaluate(program.jaxpr, program.consts, ARGS, note, None)
    assert {v for eqn in program.jaxpr.eqns for v in eqn.outvars} < set(seen)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_left_as_it_was(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), paused_collector():
            assert not gc.isenabled()
            with paused_collector():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
