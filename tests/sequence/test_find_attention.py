"""Attention in a model's own code: recognized with the right form, and with the same numbers.

Each way to write attention is compared with itself, rewritten: its own program (1e-6), and the form
alone, computed by `by_form` below, which reads nothing else of the call (1e-5).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.jaxpr.evaluate import as_function, run_equation
from jaxspeed.jaxpr.traverse import bodies, is_var
from jaxspeed.ops.attention_call import AttentionForm, attention_call, body_of
from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel import LowProducts, with_attention_calls
from jaxspeed.traced_loss.autocast import Autocast, lowers, with_autocast

B, S, H, G, D = 2, 7, 4, 2, 8
FULL, CAUSAL = Mask(False, None), Mask(True, None)
SCALE = D**-0.5
Array = jax.Array


def normal(*shape: int, seed: int = 0) -> Array:
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape)


Q, K, V = (normal(B, S, H, D, seed=i) for i in range(3))
KG, VG = K[:, :, :G], V[:, :, :G]
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 3, 3, 3]])
REAL = jnp.array([[False, True, True, True, True, True, False], [True] * 4 + [False] * 3])


def calls(jaxpr: Any) -> list[Any]:
    """The attention calls of a program, at any depth."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "attention_call":
            found.append(eqn)
        else:
            found += [e for body in bodies(eqn) for e in calls(body.jaxpr)]
    return found


def by_form(form: AttentionForm, q: Array, k: Array, v: Array, *ids: Array) -> Array:
    """What a form says, in fp32."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x.astype(jnp.float32), groups, 2) for x in (k, v))
    scores = form.scale * jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k)
    if form.soft_cap is not None:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    seen = np.ones((q.shape[1], k.shape[1]), bool)
    if form.mask.causal:
        seen &= j <= i
    if form.mask.window is not None:
        seen &= abs(i - j) < form.mask.window
    visible = jnp.asarray(seen)[None, None]
    if form.segments:
        visible = visible & (ids[0][:, None, :, None] == ids[1][:, None, None])
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores, 0)), 0)
    some = visible.any(-1, keepdims=True)
    mean = 1 / k.shape[1] if form.blind == "mean" else jnp.nan
    shares = jnp.where(some, weights / jnp.where(some, weights.sum(-1, keepdims=True), 1), mean)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).astype(q.dtype)


def run_by_forms(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """A program whose calls at the top are computed from their forms."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "attention_call":
            values = [by_form(eqn.params["form"], *(env[v] for v in eqn.invars))]
        else:
            values = run_equation(jaxpr, eqn, env.__getitem__)
        env.update(zip(eqn.outvars, values, strict=True))
    return [env[v] if is_var(v) else v.val for v in jaxpr.outvars]


def rewritten(function: Any, *args: Any) -> tuple[Any, Any, list[Any], Any]:
    """(program, program with calls, calls, what is left alone)."""
    closed = jax.make_jaxpr(function)(*args)
    made, left = with_attention_calls(closed)
    return closed, made, calls(made), left


def with_gradients(function: Any, args: Any) -> list[Any]:
    real = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def loss(*args: Any) -> Any:
        outs = function(*args)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in outs), outs

    return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, real, has_aux=True))(*args))


def check_equal(closed: Any, made: Any, args: Any) -> None:
    """The values and gradients of a program are those of the one before."""
    expected = with_gradients(as_function(closed.jaxpr, closed.consts), args)
    for x, y in zip(expected, with_gradients(as_function(made, closed.consts), args), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-6 * np.nanmax(np.abs(x), initial=1e-9))


def recognized(function: Any, *args: Any, forms: bool = True) -> AttentionForm:
    """The form of the one attention of a function, whose numbers are those of before."""
    closed, made, found, left = rewritten(function, *args)
    assert not left
    (call,) = found
    check_equal(closed, made, args)
    form = call.params["form"]
    if forms and form.rows is None:
        tolerance = 1e-5 if call.outvars[0].aval.dtype == jnp.float32 else 2e-2
        expected = as_function(closed.jaxpr, closed.consts)(*args)
        for x, y in zip(expected, run_by_forms(made, closed.consts, args), strict=True):
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            np.testing.assert_allclose(y, x, rtol=tolerance, atol=tolerance)
    return form


def form(scale: float = SCALE, mask: Mask = FULL, **more: Any) -> AttentionForm:
    return AttentionForm(pytest.approx(scale, rel=2e-3), mask, **more)


# -- ways to write attention -----------------------------------------------------------------------


def tril(n: int = S) -> Array:
    return jnp.tril(jnp.ones((n, n), bool))


def plain(q, k, v, mask=None, bias=None, fill=-jnp.inf):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(D)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, fill)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def shares_of(q, k):
    return jax.nn.softmax(scores_of(q, k))


def with_casts(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q @ k.swapaxes(-1, -2) * SCALE).astype(jnp.float32)
    scores = scores + jnp.triu(jnp.full((S, S), -jnp.inf), 1)
    return (jax.nn.softmax(scores).astype(v.dtype) @ v).transpose(0, 2, 1, 3).reshape(B, S, H * D)


def normalized_after(q, k, v):
    q = q.reshape(B, S, G, H // G, D) * SCALE
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k)
    scores = jnp.where(jnp.arange(S)[:, None] >= jnp.arange(S), 30 * jnp.tanh(scores / 30), -1e30)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("bgrqk,bkgd->bqgrd", e, v)
    return (out / e.sum(-1).transpose(0, 3, 1, 2)[..., None]).reshape(B, S, H * D)


def no_maximum(q, k, v):
    e = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", SCALE * q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", e * (1 / e.sum(-1, keepdims=True)), v)


def one_head(q, k, v):
    return jax.nn.softmax(jnp.where(tril(), SCALE * q @ k.T, -1e9)) @ v


def keys_first(q, k, v):
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q) * SCALE
    shares = jax.nn.softmax(jnp.where(tril().T, scores, -1e9), axis=-2)
    return jnp.einsum("bkhd,bhkq->bqhd", v, shares)


def own_softmax(q, k, v):
    @jax.jit
    def shares(scores):
        e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        return e / e.sum(-1, keepdims=True)

    scores = jax.jit(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE)(q, k)
    mask = jax.jit(tril)()
    return jnp.einsum("bhqk,bkhd->bqhd", shares(jnp.where(mask, scores, -1e9)), v)


@jax.custom_jvp
def softmax_with_derivative(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@softmax_with_derivative.defjvp
def _(primals, tangents):
    y = softmax_with_derivative(*primals)
    return y, y * (tangents[0] - (y * tangents[0]).sum(-1, keepdims=True))


def custom_softmax(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax_with_derivative(scores), v)


def dot_product(**more):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **more)


GROUPED, EQUAL = (Q, KG, VG), (Q, K, V)
LOW = tuple(x.astype(jnp.bfloat16) for x in EQUAL)
WAYS = {
    "full": (plain, EQUAL, form()),
    "where": (lambda q, k, v: plain(q, k, v, tril()), EQUAL, form(mask=CAUSAL)),
    "numpy": (
        lambda q, k, v: plain(q, k, v, np.tril(np.ones((S, S), bool))[None, None], fill=-1e9),
        EQUAL,
        form(mask=CAUSAL),
    ),
    "numpy bias": (
        lambda q, k, v: plain(q, k, v, bias=np.triu(np.full((S, S), -1e9, np.float32), 1)),
        EQUAL,
        form(mask=CAUSAL),
    ),
    "casts": (with_casts, LOW, form(mask=CAUSAL)),
    "normalized after": (normalized_after, GROUPED, form(1, CAUSAL, soft_cap=30.0)),
    "no maximum": (no_maximum, EQUAL, form(1)),
    "repeated": (
        lambda q, k, v: plain(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), tril()),
        GROUPED,
        form(mask=CAUSAL),
    ),
    "vmapped": (
        jax.vmap(jax.vmap(one_head, in_axes=1, out_axes=1)), EQUAL, form(1, CAUSAL),
    ),
    "single head": (
        jax.vmap(one_head), tuple(x[:, :, 0] for x in EQUAL), form(1, CAUSAL),
    ),
    "keys first": (keys_first, EQUAL, form(mask=CAUSAL)),
    "own softmax": (own_softmax, EQUAL, form(mask=CAUSAL)),
    "custom derivative": (custom_softmax, EQUAL, form(1)),
    "window": (dot_product(is_causal=True, local_window_size=(2, 0)), GROUPED,
               form(mask=Mask(True, 3))),
    "both sides": (dot_product(local_window_size=2), GROUPED, form(mask=Mask(False, 3))),
    "lengths": (
        dot_product(key_value_seq_lengths=jnp.array([3, 5])),
        GROUPED,
        form(segments=True, blind="mean"),
    ),
    "segments": (
        lambda q, k, v, ids: plain(
            q, k, v, tril() & (ids[:, None, :, None] == ids[:, None, None]), fill=-1e9
        ),
        (*EQUAL, SEGMENTS),
        form(mask=CAUSAL, segments=True),
    ),
    "segments without padding": (
        lambda q, k, v, ids: plain(
            q, k, v,
            (ids[:, None, :, None] == ids[:, None, None]) & (ids != 0)[:, None, None],
            fill=jnp.finfo(jnp.float32).min,
        ),
        (*EQUAL, SEGMENTS),
        form(segments=True, blind="mean"),
    ),
    "padding bias": (
        lambda q, k, v, real: plain(
            q, k, v, bias=(1 - real[:, None, None].astype(jnp.float32)) * -1e9
        ),
        (*EQUAL, REAL),
        form(segments=True, blind="mean"),
    ),
    "causal padding": (
        lambda q, k, v, real: plain(q, k, v, tril() & real[:, None, None], fill=-1e9),
        (*EQUAL, REAL),
        form(mask=CAUSAL, segments=True, blind="mean"),
    ),
}  # fmt: skip


@pytest.mark.default_cases(every=10)
@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_write_attention_is_recognized(name: str) -> None:
    function, args, expected = WAYS[name]
    found = recognized(function, *args)
    assert found == expected


def test_key_heads_are_those_before_their_repetition() -> None:
    function, args, _ = WAYS["repeated"]
    (call,) = rewritten(function, *args)[2]
    assert [v.aval.shape for v in call.invars] == [Q.shape, KG.shape, VG.shape]


def test_blind_queries_of_an_infinite_fill_are_nan() -> None:
    def function(q: Array, k: Array, v: Array, real: Array) -> Array:
        return plain(q, k, v, tril() & real[:, None, None])

    args = (*EQUAL, REAL)
    closed, made, (call,), _ = rewritten(function, *args)
    assert call.params["form"].blind == "nan"
    (expected,) = as_function(closed.jaxpr, closed.consts)(*args)
    (found,) = run_by_forms(made, closed.consts, args)
    assert np.isnan(expected[0, 0]).all() and np.isnan(found[0, 0]).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bias", "by_kernel"), [(-1e4, False), (-1e6, False), (-1e9, True)])
def test_blind_queries_of_a_small_bias_keep_the_differences_of_their_scores(bias, by_kernel):
    def function(q: Array, k: Array, v: Array, real: Array) -> Array:
        return plain(q, k, v, bias=(1 - real[:, None, None].astype(jnp.float32)) * bias)

    found = recognized(function, *EQUAL, REAL & jnp.array([[True], [False]]))
    assert (found.rows is None) == by_kernel


# -- only their own programs describe these --------------------------------------------------------


def alibi(q, k, v):
    slopes = jnp.arange(1.0, H + 1)[:, None, None]
    return plain(q, k, v, tril(), -jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S)) * slopes)


def relative(q, k, v, table):
    distance = jnp.arange(S)[:, None] - jnp.arange(S) + S
    return plain(q, k, v, bias=table[distance].transpose(2, 0, 1))


def with_sinks(q, k, v, sinks):
    scores = jnp.where(tril(), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, H, S, 1))
    shares = jax.nn.softmax(jnp.concatenate([scores, column], -1))
    return jnp.einsum("bhqk,bkhd->bqhd", shares[..., :-1], v)


GENERAL = {
    "alibi": (alibi, EQUAL),
    "relative": (relative, (*EQUAL, normal(2 * S, H))),
    "sinks": (with_sinks, (*EQUAL, normal(H))),
    "bias": (lambda q, k, v, b: plain(q, k, v, tril(), b), (*EQUAL, normal(1, H, S, S))),
    "any mask": (
        lambda q, k, v, m: plain(q, k, v, m, fill=-1e9),
        (*EQUAL, normal(B, 1, S, S) > 0),
    ),
    "later than the next": (
        lambda q, k, v: plain(q, k, v, jnp.arange(S)[:, None] + 1 >= jnp.arange(S)), EQUAL,
    ),
    "reversed": (lambda q, k, v: plain(q, k, v, tril().T), EQUAL),
    "prefix": (lambda q, k, v: plain(q, k, v, tril() | (jnp.arange(S) < 3)), EQUAL),
    "window of unequal sides": (dot_product(local_window_size=(2, 1)), EQUAL),
    "heads differ": (
        lambda q, k, v, r: plain(q, k, v, r, fill=-1e9), (*EQUAL, normal(1, H, 1, S) > -1),
    ),
    "learned scale": (
        lambda q, k, v, s: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores_of(q, k) * s), v),
        (*EQUAL, normal(1)[0]),
    ),
}  # fmt: skip


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("name", GENERAL)
def test_other_attention_keeps_its_program(name: str) -> None:
    function, args = GENERAL[name]
    assert recognized(function, *args).rows is not None


def test_the_operands_of_a_general_form_are_small() -> None:
    """Biases and masks of all queries and keys are computed within, from what they depend on."""
    for name in ("alibi", "relative", "prefix"):
        function, args = GENERAL[name]
        (call,) = rewritten(function, *args)[2]
        for v, row in zip(call.invars[3:], call.params["form"].rows, strict=True):
            assert v.aval.shape.count(S) <= 1
            assert row is None or v.aval.shape[row] == S


# -- modules, layers and precision -----------------------------------------------------------------


def test_modules_of_linen_and_nnx() -> None:
    x = normal(B, S, 16)
    module = nn.MultiHeadDotProductAttention(H)
    params = module.init(jax.random.key(0), x)

    def linen(x: Array, real: Array) -> Array:
        mask = nn.combine_masks(nn.make_causal_mask(real), nn.make_attention_mask(real, real))
        return module.apply(params, x, mask=mask)

    expected = form(1, CAUSAL, segments=True, blind="mean")
    assert recognized(linen, x, REAL) == expected
    own = nnx.MultiHeadAttention(H, 16, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(own)

    def of_nnx(x: Array) -> Array:
        return nnx.merge(graph, state)(x, mask=nnx.make_causal_mask(x[..., 0]))

    assert recognized(of_nnx, x).mask == CAUSAL


def test_cross_attention_of_an_encoder_and_a_decoder() -> None:
    def function(x: Array, y: Array, real: Array) -> Array:
        x = x + plain(x, x, x, real[:, None, None], fill=-1e9)
        y = y + plain(y, y, y, tril(5), fill=-1e9)
        return y + plain(y, x, x, real[:, None, None], fill=-1e9)

    args = (Q, Q[:, :5], REAL)
    closed, made, found, left = rewritten(function, *args)
    assert not left
    check_equal(closed, made, args)
    forms = [call.params["form"] for call in found]
    assert [f.mask for f in forms] == [FULL, CAUSAL, FULL]
    assert [f.segments for f in forms] == [True, False, True]
    assert [v.aval.shape[1] for v in found[2].invars] == [5, S, S, 5, S]


def test_layers_in_a_scan_and_under_checkpoints_read_a_mask_from_outside() -> None:
    def function(q: Array, k: Array, v: Array) -> Array:
        mask = tril()

        @jax.checkpoint
        def layer(x: Array, scale: Array) -> Array:
            return x + plain(x * scale, k, v, mask, fill=-1e9)

        return jax.lax.scan(lambda x, s: (layer(x, s), None), q, jnp.arange(1.0, 3))[0]

    assert recognized(function, *EQUAL, forms=False) == form(mask=CAUSAL)


def test_layers_in_a_scan_read_segments_from_outside() -> None:
    """The mask is made once, before the layers: its ids become an operand of the loop."""

    def function(q: Array, k: Array, v: Array, ids: Array) -> Array:
        mask = (tril() & (ids[:, :, None] == ids[:, None]))[:, None]

        def layer(x: Array, scale: Array) -> Array:
            return x + jax.checkpoint(lambda x: plain(x * scale, k, v, mask, fill=-1e9))(x)

        return jax.lax.scan(lambda x, s: (layer(x, s), None), q, jnp.arange(1.0, 3))[0]

    args = (*EQUAL, SEGMENTS)
    assert recognized(function, *args, forms=False) == form(mask=CAUSAL, segments=True)
    (call,) = rewritten(function, *args)[2]
    assert [v.aval.shape for v in call.invars[3:]] == [(B, S)] * 2


def test_calls_of_ops_are_left_as_they_are() -> None:
    def function(q: Array, k: Array, v: Array) -> Array:
        return attention_call(AttentionForm(SCALE, FULL), plain, q, k, v)

    closed = jax.make_jaxpr(function)(*EQUAL)
    assert with_attention_calls(closed)[0] is closed.jaxpr


def test_operands_have_the_dtype_of_automatic_mixed_precision() -> None:
    low = LowProducts(jnp.bfloat16, lambda eqn: True, lambda closed: closed)
    closed = jax.make_jaxpr(plain)(*EQUAL)
    made, _ = with_attention_calls(closed, low)
    (call,) = calls(made)
    assert {v.aval.dtype for v in (*call.invars, *call.outvars)} == {jnp.dtype(jnp.bfloat16)}
    rounded = [x.astype(jnp.bfloat16) for x in EQUAL]
    expected = plain(*(x.astype(jnp.float32) for x in rounded)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(body_of(call)(*rounded), expected)


def test_mixed_precision_computes_what_it_does_without_calls() -> None:
    autocast = Autocast(jnp.bfloat16)
    low = LowProducts(
        jnp.bfloat16,
        lambda eqn: lowers(eqn, autocast),
        lambda closed: with_autocast(closed, autocast, {}),
    )

    def function(x: Array, w: Array) -> Array:
        q, k, v = jnp.split(jnp.einsum("bshd,de->bshe", x, w), 3, -1)
        return plain(q, k, v, tril(), fill=-1e9)

    args = (Q, normal(D, 3 * D))
    closed = jax.make_jaxpr(function)(*args)
    made, _ = with_attention_calls(closed, low)
    assert len(calls(made)) == 1
    expected, found = (
        as_function(each.jaxpr, each.consts)(*args)[0]
        for each in (
            with_autocast(closed, autocast, {}),
            with_autocast(closed.replace(jaxpr=made), autocast, {}),
        )
    )
    np.testing.assert_array_equal(found, expected)
    assert np.abs(expected - function(*args)).max() > 1e-3  # the precision is lower indeed


# -- left alone ------------------------------------------------------------------------------------


def dropout(q, k, v):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (B, H, S, S))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, shares_of(q, k) / 0.9, 0), v)


def read_elsewhere(q, k, v):
    shares = shares_of(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v), shares.mean()


def across(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.cumsum(shares_of(q, k), -1), v)


def heads_mixed(q, k, v):
    shares = jnp.einsum("bhqk,hg->bgqk", shares_of(q, k), jnp.ones((H, H)))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


LEFT = {
    "dropout on the probabilities": dropout,
    "the probabilities are read elsewhere": read_elsewhere,
    "an operation across positions between the products (cumsum)": across,
    "a product between those with the keys and with the values": heads_mixed,
}


@pytest.mark.parametrize("reason", LEFT)
def test_left_alone_with_the_reason_and_the_line(reason: str) -> None:
    _, _, found, (left,) = rewritten(LEFT[reason], *EQUAL)
    assert not found
    assert left.reason == reason
    assert "test_find_attention.py" in left.where


def test_returned_probabilities_are_left_alone() -> None:
    def function(q: Array, k: Array, v: Array) -> Any:
        shares = shares_of(q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v), shares

    closed, made, _, (left,) = rewritten(function, *EQUAL)
    assert made is closed.jaxpr
    assert left.reason == "the probabilities are read elsewhere"


def test_a_softmax_of_what_attention_returns_is_no_other_attention() -> None:
    """As of a router behind it, whose shares multiply a matrix."""

    def routed(x: Array, w: Array) -> Array:
        scores = x @ x.swapaxes(1, 2) + jnp.where(jnp.tri(S, dtype=bool), 0, -1e9)
        y = x + jax.nn.softmax(scores * SCALE) @ x
        return (y + jax.nn.softmax(y)) @ w

    x, w = normal(B, S, D), normal(D, D)
    closed = jax.make_jaxpr(routed)(x, w)
    jaxpr, _ = with_attention_calls(closed)
    assert len(calls(jaxpr)) == 1
    (y,) = as_function(jaxpr, closed.consts)(x, w)
    np.testing.assert_allclose(y, routed(x, w), rtol=1e-5, atol=1e-5)


def test_other_softmaxes_are_neither_recognized_nor_reported() -> None:
    def cross_entropy(x: Array, w: Array) -> Array:
        return -jax.nn.log_softmax(x @ w)[..., 0].mean()

    def router(x: Array, w: Array, experts: Array) -> Array:
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
        return jnp.einsum("bsk,bskd->bsd", gates, experts[chosen])

    def mixture(x: Array, w: Array, experts: Array) -> Array:
        outs = jnp.einsum("bsd,edf->bsef", x, experts)
        return jnp.einsum("bse,bsef->bsf", jax.nn.softmax(x @ w), outs)

    x, w = normal(B, S, D), normal(D, 3)
    for function, args in (
        (cross_entropy, (x, w)),
        (router, (x, w, normal(3, D))),
        (mixture, (x, w, normal(3, D, D))),
    ):
        closed, made, _, left = rewritten(function, *args)
        assert made is closed.jaxpr
        assert not left


# -- masks -----------------------------------------------------------------------------------------

ROW, COLUMN = jnp.arange(S)[:, None], jnp.arange(S)
CONDITIONS = {
    "ge": lambda c, ids: ROW + c >= COLUMN,
    "gt": lambda c, ids: ROW + c > COLUMN,
    "near": lambda c, ids: jnp.abs(ROW - COLUMN) < c,
    "far": lambda c, ids: jnp.abs(COLUMN - ROW) >= c,
    "window": lambda c, ids: c >= ROW - COLUMN,
    "same": lambda c, ids: ids[:, :, None] == ids[:, None],
    "keys": lambda c, ids: (c < ids)[:, None],
    "queries": lambda c, ids: (ids != c)[:, :, None],
    "chunks": lambda c, ids: ROW // 3 == COLUMN // 3,
    "table": lambda c, ids: np.tri(S, S, c, dtype=bool),
    "square": lambda c, ids: (COLUMN - c) * (COLUMN - c) > ROW,
}


def combined(names: list[tuple[str, int, bool]]) -> Any:
    def mask(ids: Array) -> Array:
        made = jnp.ones((1, S, S), bool)
        for name, c, inverted in names:
            one = jnp.asarray(CONDITIONS[name](c, ids))
            made = made & (~one if inverted else one)
        return jnp.broadcast_to(made, (B, S, S))

    return mask


def check_mask(names: list[tuple[str, int, bool]]) -> bool:
    """Whether a kernel form is claimed; if so, its mask is that of the model."""
    mask = combined(names)

    def function(q: Array, k: Array, v: Array, ids: Array) -> Array:
        return plain(q, k, v, mask(ids)[:, None], fill=-1e9)

    args = (*(x[:, :, :1, :2] for x in EQUAL), SEGMENTS)
    closed, made, (call,), _ = rewritten(function, *args)
    form = call.params["form"]
    if form.rows is not None:
        return False
    ids = [np.zeros((B, S))] * 2
    if form.segments:
        ids = as_function(made.replace(outvars=call.invars[3:]), closed.consts)(*args)
    queries, keys = map(np.asarray, ids)
    seen = np.asarray(form.mask.dense(S, S)) & (queries[:, :, None] == keys[:, None])
    np.testing.assert_array_equal(seen, mask(SEGMENTS), err_msg=str(names))
    assert form.blind == "mean" or seen.any(-1).all(), names
    return True


def test_which_single_conditions_kernels_take() -> None:
    taken = {
        (name, c, inverted)
        for name in CONDITIONS
        for c in (-1, 0, 1, 2)
        for inverted in (False, True)
        if check_mask([(name, c, inverted)])
    }
    of_ids = {(name, c, False) for name in ("same", "chunks") for c in (-1, 0, 1, 2)}
    of_one = {(n, c, i) for n in ("keys", "queries") for c in (-1, 0, 1, 2) for i in (False, True)}
    causal = {("ge", 0, False), ("gt", 1, False), ("table", 0, False), ("window", -1, True)}
    near = {("near", c, False) for c in (1, 2)} | {("far", c, True) for c in (1, 2)}
    assert taken - {t for t in taken if t[0] in ("near", "far") and t[1] < 1} == (
        of_ids | of_one | causal | near
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(CONDITIONS)), st.integers(-2, 4), st.booleans()),
        min_size=2,
        max_size=3,
    )
)
def test_the_mask_of_a_kernel_form_is_that_of_the_model(names: list[Any]) -> None:
    check_mask(names)
