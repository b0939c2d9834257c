"""A function of a traced program has a frame once per call, with the runs of its loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspeed.jaxpr.frames import Frame

pytestmark = pytest.mark.fast

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def test_frames_of_loops_run_once_a_trip():
    def nested(x):
        inner = jax.jit(lambda c: lax.fori_loop(0, 5, lambda i, c: jnp.sin(c), c))
        return lax.scan(lambda c, _: (inner(c), None), x, length=4)[0]

    frames = [*Frame(jax.make_jaxpr(nested)(X).jaxpr).walk()]
    assert [frame.times for frame in frames] == [1, 4, 4, 20]
    assert [frame.in_loop for frame in frames] == [False, True, False, True]


def test_a_shared_trace_has_a_frame_for_each_call():
    shared = jax.jit(jnp.tanh)
    top = Frame(jax.make_jaxpr(lambda x: shared(shared(x)))(X).jaxpr)
    _, first, second = top.walk()
    assert first.jaxpr is second.jaxpr and first is not second
    names = [(f is top, position, eqn.primitive.name) for f, position, eqn in top.equations()]
    assert names == [(True, 0, "jit"), (True, 1, "jit"), (False, 0, "tanh"), (False, 0, "tanh")]


def test_of_branches_each_is_a_frame_and_of_a_while_the_body():
    def chosen(x):
        x = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        return lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, x)

    jaxpr = jax.make_jaxpr(chosen)(X).jaxpr
    top = Frame(jaxpr)
    inner = {jaxpr.eqns[i].primitive.name: frames for i, frames in top.inner.items()}
    assert [frame.jaxpr.eqns[0].primitive.name for frame in inner["cond"]] == ["cos", "sin"]
    (body,) = inner["while"]
    assert body.times == 1 and body.condition.eqns[-1].primitive.name == "lt"
