"""A traced loss, split into before, stages and after, computes what the unsplit one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed import unit
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.pipeline.split_loss import split_loss

WIDTH, SAMPLES = 3, 2


@unit
def block(w, x, bias, rate):
    return x + rate * jnp.tanh(x @ w + bias)


def scanned(ws, head, x, bias):
    rates = jnp.linspace(1.0, 0.5, len(ws))
    x = x * 2
    y, _ = jax.lax.scan(lambda x, own: (block(own[0], x, bias, own[1]), None), x, (ws, rates))
    return jnp.sum((y @ head) ** 2) + jnp.sum(x)


def listed(ws, head, x, bias):
    rates = jnp.linspace(1.0, 0.5, len(ws))
    x = start = x * 2
    for i, w in enumerate(ws):
        x = block(w, x, bias, rates[i])
    return jnp.sum((x @ head) ** 2) + jnp.sum(start)


def values(layers):
    rng = np.random.default_rng(layers)
    shapes = (layers, WIDTH, WIDTH), (WIDTH, WIDTH), (SAMPLES, WIDTH), (WIDTH,)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def split(form, layers):
    """(parts, the values of their inputs, the weights of all layers, the unsplit loss)."""
    ws, *rest = values(layers)
    given = (ws, *rest) if form is scanned else (list(ws), *rest)
    closed = jax.make_jaxpr(form)(*given)
    count = 1 if form is scanned else layers
    parts = split_loss(closed, {"w": closed.jaxpr.invars[:count]})
    return parts, [*closed.consts, *jax.tree.leaves(given)], ws, form(*given)


def composed(parts, inputs, ws, chunk):
    """The parts one after the other, the stack in chunks of so many layers, the last one padded."""
    carry = as_function(parts.before)(*inputs)
    context = [inputs[i] for i in parts.context_reads]
    padded = len(ws) % chunk != 0
    ws = np.concatenate([ws, np.full((-len(ws) % chunk, WIDTH, WIDTH), np.nan, np.float32)])
    for first in range(0, len(ws), chunk):
        own = {"w": ws[first : first + chunk]}
        carry = parts.stage(chunk, own, context, first, carry, padded=padded)
    return as_function(parts.after)(*inputs, *carry)[0]


@settings(max_examples=12)
@given(st.sampled_from([scanned, listed]), st.integers(2, 6), st.integers(1, 6))
def test_the_parts_in_order_compute_the_loss(form, layers, chunk):
    parts, inputs, ws, loss = split(form, layers)
    assert (parts.layers, parts.names, len(parts.carry)) == (layers, ["w"], 1)
    np.testing.assert_allclose(composed(parts, inputs, ws, chunk), loss, rtol=1e-5)


@pytest.mark.parametrize("form", [scanned, listed])
def test_a_padded_layer_has_no_gradient_and_lets_all_others_through(form):
    """Even with NaN weights: gradients through a padding layer are selected away."""
    parts, inputs, ws, _ = split(form, 3)
    context = [inputs[i] for i in parts.context_reads]
    ws = np.concatenate([ws, np.full((1, WIDTH, WIDTH), np.nan, np.float32)])
    carry = as_function(parts.before)(*inputs)

    def loss(rows, padded, ws, carry):
        out = parts.stage(rows, {"w": ws}, context, 0, [carry], padded=padded)
        return jnp.sum(out[0] ** 2)

    ours = jax.grad(lambda *a: loss(4, True, *a), argnums=(0, 1))(ws, carry[0])
    wanted = jax.grad(lambda *a: loss(3, False, *a), argnums=(0, 1))(ws[:3], carry[0])
    np.testing.assert_allclose(ours[0][:3], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], wanted[1], rtol=1e-6)


def test_each_part_reads_only_what_it_needs():
    parts, inputs, _, _ = split(scanned, 3)
    from_start = as_function(parts.before)
    only_x = [x if i == len(inputs) - 2 else np.full_like(x, np.nan) for i, x in enumerate(inputs)]
    np.testing.assert_array_equal(from_start(*only_x)[0], 2 * inputs[-2])
    assert len(inputs) - 2 not in parts.context_reads, "x goes from block to block"


def test_what_is_read_in_two_blocks_is_refused():
    def twice(ws, head, x, bias):
        return scanned(ws, head, x, bias) + scanned(ws, head, 2 * x, bias)

    closed = jax.make_jaxpr(twice)(*values(3))
    with pytest.raises(ModelError, match="2 times"):
        split_loss(closed, {"w": closed.jaxpr.invars[:1]})
