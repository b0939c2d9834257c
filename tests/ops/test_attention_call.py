"""An attention call: one equation, whose program defines its value and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.ops.attention_call import AttentionForm, attention_call, body_of, form_of
from jaxspeed.ops.mask import Mask

FORM = AttentionForm(0.5, Mask(True, None))


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def test_a_call_is_its_program_under_all_transformations() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(key, (2, 8, 2, 4)) for key in keys]

    def call(*operands: jax.Array) -> jax.Array:
        return attention_call(FORM, plain, *operands)

    jaxpr = jax.make_jaxpr(call)(*operands)
    (eqn,) = jaxpr.jaxpr.eqns
    assert form_of(eqn) == FORM
    assert len(bodies(eqn)) == 1
    want = plain(*operands)
    for value in (call(*operands), jax.jit(call)(*operands), body_of(eqn)(*operands)):
        np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)

    def total(fn, *operands):  # type: ignore[no-untyped-def]
        return jnp.sum(jnp.sin(fn(*operands)))

    got = jax.jit(jax.grad(lambda *a: total(call, *a), (0, 1, 2)))(*operands)
    expected = jax.grad(lambda *a: total(plain, *a), (0, 1, 2))(*operands)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    stacked = [x[None] for x in operands]
    np.testing.assert_allclose(jax.vmap(call)(*stacked)[0], want, rtol=1e-6, atol=1e-6)
