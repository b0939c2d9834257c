"""Which equations become loops over tiles, of functions traced here, and that numbers are equal."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed import hlo, ops
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.slicing import renamed
from jaxspeed.jaxpr.traverse import Literal, bodies
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.sequence_parallel.settings import SequenceTiles
from jaxspeed.sequence_parallel.tile_sequence import in_sequence_tiles
from tests.support.covering import covering

EMBED, WIDE, VOCAB, SEQ, BATCH = 8, 32, 48, 30, 2


def weights(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    shapes = {"up": (EMBED, WIDE), "gate": (EMBED, WIDE), "down": (WIDE, EMBED)}
    shapes |= {"head": (VOCAB, EMBED), "scale": (EMBED,), "time": (4, EMBED, EMBED)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    found = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(k, shape).astype(dtype) / 2 for (name, shape), k in found}


def inputs(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (BATCH, SEQ, EMBED)).astype(dtype)
    return {"x": x, "y": jax.random.randint(jax.random.key(2), (BATCH, SEQ), 0, VOCAB)}


def relu(w: Any, b: Any) -> Any:
    return (jax.nn.relu(b["x"] @ w["up"]) @ w["down"]).sum()


@ops.saves_inputs
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def gated(w: Any, b: Any) -> Any:
    """With derivatives of their own in 16 bits, and a sum for the norm's scale."""
    x = ops.rms_norm(b["x"], w["scale"])
    out = swiglu(x @ w["gate"], x @ w["up"]) @ w["down"]
    return jnp.sum(jnp.square(out.astype(jnp.float32)))


def checkpointed(w: Any, b: Any) -> Any:
    layer = jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"])
    return layer(w, layer(w, b["x"])).sum()


def full_logits(w: Any, b: Any) -> Any:
    logits = jax.nn.log_softmax(b["x"] @ w["head"].T)
    return -jnp.take_along_axis(logits, b["y"][..., None], -1).sum()


def chunked_loss(w: Any, b: Any) -> Any:
    total, count = ops.linear_cross_entropy(b["x"], w["head"], b["y"], chunk=24)
    return total / count


def chunked_logprobs(w: Any, b: Any) -> Any:
    asked = {"entropy": True, "is_top": True, "mean_logit": True}
    found = ops.token_logprobs(b["x"], w["head"], b["y"], chunk=24, temperature=0.7, **asked)
    values = (found.logprobs, found.entropy, found.mean_logit)
    return sum(jnp.where(found.is_top, 2 * x, x).sum() for x in values)


def masked(w: Any, b: Any) -> Any:
    hidden = jnp.where(b["y"][..., None] > 3, b["x"] @ w["up"], 0.5)
    return (hidden.reshape(BATCH, SEQ, 4, 8).swapaxes(1, 2).reshape(BATCH, 4, -1) ** 2).sum()


PLACES = np.linspace(0.5, 1.5, SEQ, dtype=np.float32)[:, None]


def with_constant(w: Any, b: Any) -> Any:
    """Per token, by an array of all tokens that is a constant of an equation."""
    traced = jax.make_jaxpr(lambda x, places: x * places)(b["x"], PLACES).jaxpr
    x, places = traced.invars
    names = {places: Literal(PLACES, places.aval)}
    eqns = [eqn.replace(invars=renamed(eqn.invars, names)) for eqn in traced.eqns]
    placed = as_function(traced.replace(invars=[x], eqns=eqns))
    hidden = jax.jit(placed)(jnp.tanh(b["x"] @ w["up"]) @ w["down"])[0]
    return jnp.square(jnp.tanh(hidden @ w["up"]) @ w["down"]).sum()


def of_pairs(w: Any, b: Any) -> Any:
    """The larger ones of two tokens, in a dim of half as many."""
    hidden = jnp.tanh(b["x"] @ w["up"]) @ w["down"]
    return jnp.square(hidden.reshape(BATCH, SEQ // 2, 2, EMBED).max(2)).sum()


PER_TOKEN = [relu, gated, checkpointed, full_logits, chunked_loss, chunked_logprobs, masked]
PER_TOKEN += [with_constant, of_pairs]


def convolved(w: Any, b: Any) -> Any:
    x = lax.conv_general_dilated(
        b["x"], w["time"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.tanh(x).sum()


def cumulated(w: Any, b: Any) -> Any:
    return jnp.cumsum(jnp.cumsum(jnp.tanh(b["x"] @ w["up"]), 1) @ w["down"], 1).sum()


def over_time(w: Any, b: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w["time"][0] + x)
        return h, h @ w["up"]

    _, out = lax.scan(step, b["x"][:, 0], b["x"].swapaxes(0, 1))
    return (out @ w["down"]).sum()


def attended(w: Any, b: Any) -> Any:
    x = b["x"]
    hidden = jnp.tanh(x @ w["up"]) @ w["down"]
    scores = jax.nn.softmax(jnp.einsum("bqe,bke->bqk", hidden, x))
    return (jnp.tanh(jnp.einsum("bqk,bke->bqe", scores, x) @ w["gate"]) @ w["down"]).sum()


def normed_over_tokens(w: Any, b: Any) -> Any:
    hidden = b["x"] @ w["up"]
    return (((hidden - hidden.mean(1, keepdims=True)) @ w["down"]) ** 2).sum()


@jax.custom_vjp
def normalized_gradient(x: jax.Array) -> jax.Array:
    """The identity, whose gradient is divided by its norm over all tokens."""
    return x


normalized_gradient.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct**2)),))


@jax.custom_vjp
def scaled_gradient(x: jax.Array) -> jax.Array:
    """The identity, whose gradient is scaled by a norm that the forward pass saves."""
    return x


scaled_gradient.defvjp(lambda x: (x, jnp.sqrt(jnp.sum(x**2))), lambda norm, ct: (ct / norm,))


def normed_in_gradient(w: Any, b: Any) -> Any:
    hidden = normalized_gradient(b["x"] @ w["up"])
    return jnp.square(jnp.tanh(hidden) @ w["down"]).sum()


def normed_by_saved(w: Any, b: Any) -> Any:
    hidden = scaled_gradient(b["x"] @ w["up"])
    return jnp.square(jnp.tanh(hidden) @ w["down"]).sum()


# -- writes at indices of all tokens ---------------------------------------------------------------

PLACE = 17  # in the third tile of four


@jax.custom_vjp
def kept_but_one(x: jax.Array) -> jax.Array:
    """The sine, without the gradient of one token."""
    return jnp.sin(x)


kept_but_one.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, ct: ((ct * jnp.cos(x)).at[:, PLACE].multiply(0),)
)
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda x, b: x.at[:, PLACE].set(0.5),
    "set of a value": lambda x, b: x.at[:, b["y"][0, 0] % SEQ].set(0.5),
    "set of each sample": lambda x, b: jax.vmap(lambda x, i: x.at[i].set(0))(x, b["y"][:, 0] % SEQ),
    "add": lambda x, b: x.at[:, 9:13].add(1.0),
    "multiply": lambda x, b: x.at[:, ::3].multiply(2.0),
    "max": lambda x, b: x.at[:, jnp.array([1, PLACE])].max(0.3),
    "update": lambda x, b: lax.dynamic_update_slice(x, 2 * x[:, :3], (0, PLACE, 0)),
    "mask": lambda x, b: x * jnp.zeros((BATCH, SEQ, 1)).at[:, 5:19].set(1),
    "of features": lambda x, b: jnp.put_along_axis(
        x, (b["y"] % EMBED)[..., None], 0.0, axis=-1, inplace=False
    ),
    "in a loop": lambda x, b: lax.fori_loop(0, 5, lambda i, x: x.at[:, 2 * i].add(1.0), x),
    "in a checkpoint": lambda x, b: jax.checkpoint(lambda x: jnp.sin(x).at[:, PLACE].set(0))(x),
    "in a gradient": lambda x, b: kept_but_one(x),
}


def written(kind: str) -> Callable[..., Any]:
    def loss(w: Any, b: Any) -> Any:
        hidden = WRITES[kind](jnp.tanh(b["x"] @ w["up"]) @ w["down"], b)
        return jnp.square(jnp.tanh(hidden @ w["gate"]) @ w["down"]).sum()

    loss.__name__ = f"written_{kind.replace(' ', '_')}"
    return loss


WRITING = {kind: written(kind) for kind in WRITES}


def written_per_token(w: Any, b: Any) -> Any:
    """At an index of features, of each token its own."""
    write = jax.vmap(jax.vmap(lambda x, i: x.at[i].multiply(2.0)))
    hidden = write(jnp.tanh(b["x"] @ w["up"]), b["y"] % WIDE).at[..., 3].set(0)
    return jnp.square(hidden @ w["down"]).sum()


MIXING = [convolved, cumulated, over_time, attended, normed_over_tokens]
MIXING += [normed_in_gradient, normed_by_saved, *WRITING.values()]


def tiled(
    loss: Callable[..., Any],
    w: Any,
    b: Any,
    tiles: Any = 4,
    kept: tuple[str, ...] = (),
    mesh: Any = None,
) -> tuple[Callable[..., Any], Any, Any]:
    """A loss in tiles, and its program before and after."""
    closed = jax.make_jaxpr(loss)(w, b)
    names, invars = sorted(w), closed.jaxpr.invars
    parameters = dict(zip(names, invars, strict=False))
    mesh = build_mesh({}, jax.devices()[:1]) if mesh is None else mesh
    jaxpr = in_sequence_tiles(
        closed.jaxpr, parameters, invars[len(w) :], {}, mesh, lambda e: None,
        SequenceTiles(tiles, kept),
    )  # fmt: skip
    function = as_function(jaxpr, closed.consts)
    return lambda *args: function(*jax.tree.leaves(args))[0], closed.jaxpr, jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body.jaxpr)


def error(x: Any, exact: Any) -> float:
    """The largest difference, relative to the largest number."""
    x, exact = (np.asarray(v, np.float32) for v in (x, exact))
    return float(np.abs(x - exact).max() / np.abs(exact).max())


POINTS = [
    (loss, dtype)
    for loss in (*PER_TOKEN, written_per_token, *MIXING)
    for dtype in (jnp.float32, jnp.bfloat16)
]
ALWAYS = [(relu, jnp.float32), (gated, jnp.bfloat16), (chunked_loss, jnp.bfloat16)]
ALWAYS += [(with_constant, jnp.float32), (of_pairs, jnp.float32), (normed_in_gradient, jnp.float32)]
ALWAYS += [(normed_by_saved, jnp.float32)]
DEFAULT = ("set", "multiply", "update", "mask", "of features", "in a gradient")
ALWAYS += [(WRITING[kind], jnp.float32) for kind in DEFAULT]


@pytest.mark.default_cases(
    "with_constant-float32",
    "of_pairs-float32",
    "normed_in_gradient-float32",
    "normed_by_saved-float32",
)
@pytest.mark.parametrize(("loss", "dtype"), covering(POINTS, ALWAYS))
def test_values_and_gradients_are_those_of_the_function(loss: Any, dtype: Any) -> None:
    w, b = weights(dtype), inputs(dtype)

    def run(function: Any) -> Any:
        return jax.jit(lambda w, x: jax.value_and_grad(function, (0, 1))(w, x))

    def with_targets(function: Any) -> Any:
        return lambda w, x: function(w, {"x": x, "y": b["y"]})

    expected = run(with_targets(loss))(w, b["x"])
    ours = run(with_targets(tiled(loss, w, b)[0]))(w, b["x"])
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        if np.any(np.asarray(y)):
            assert error(x, y) < (1e-6 if dtype == jnp.float32 else 0.03)


def tied(w: Any, b: Any) -> Any:
    """Two products of one weight."""
    hidden = jnp.tanh(b["x"] @ w["up"])
    return jnp.sum(jnp.einsum("bse,de->bsd", hidden, w["up"]) ** 2)


def read_otherwise(w: Any, b: Any) -> Any:
    """Weights in a product that has no samples, and a weight of which each sample has its own."""
    hidden = jnp.tanh(b["x"] @ w["up"]) + b["x"].mean(0) @ w["up"]
    own = jnp.einsum("b,ed->bed", b["x"][:, 0, 0], w["down"])
    return jnp.sum(jnp.tanh(jnp.einsum("bse,bed->bsd", hidden, own)) ** 2)


@pytest.mark.default_cases("relu", "tied")
@pytest.mark.parametrize("loss", [relu, gated, tied, read_otherwise, chunked_loss])
def test_gradients_are_equal_where_samples_and_tokens_are_sharded(loss: Any) -> None:
    """And those of weights which products alone read are reduced once, not in each of 4 tiles."""
    mesh = build_mesh({"data": 2, "seq": 3}, jax.devices()[:6])
    w, b = weights(), inputs()
    places = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "seq"))
    expected = jax.jit(jax.value_and_grad(loss))(w, b)
    given = jax.device_put(w, places[0]), jax.device_put(b, places[1])
    with jax.set_mesh(mesh):
        found, _, _ = tiled(loss, w, b, mesh=mesh)
        step = jax.jit(jax.value_and_grad(found), out_shardings=places[0]).lower(*given).compile()
    for ours, theirs in zip(jax.tree.leaves(step(*given)), jax.tree.leaves(expected), strict=True):
        if np.any(np.asarray(theirs)):
            assert error(ours, theirs) < 2e-6
    reduced = [c for c in hlo.collectives(step.as_text(), mesh) if c.kind == "all-reduce"]
    once = sum(x.nbytes for name, x in w.items() if name in REDUCED_ONCE.get(loss, ()))
    if once:
        assert sum(c.payload for c in reduced) < 1.2 * once + 4 * w["scale"].nbytes


REDUCED_ONCE = {relu: ("up", "down"), gated: ("gate", "up", "down"), tied: ("up",)}


PER_TOKEN_WIDE = (relu, gated, checkpointed, full_logits, chunked_loss, chunked_logprobs)
PER_TOKEN_WIDE += (written_per_token,)


@pytest.mark.parametrize("loss", PER_TOKEN_WIDE)
def test_nothing_wide_has_all_tokens(loss: Any) -> None:
    """In the gradient's program; 4 tiles of 30 tokens have 8 or 6."""

    def wide(jaxpr: Any) -> set[tuple[int, ...]]:
        shapes = {v.aval.shape for eqn in equations(jaxpr) for v in eqn.outvars}
        return {s for s in shapes if np.prod(s) >= BATCH * SEQ * 2 * EMBED}

    w, b = weights(), inputs()
    found, _, _ = tiled(loss, w, b)
    assert wide(jax.make_jaxpr(jax.grad(loss))(w, b).jaxpr)
    assert not wide(jax.make_jaxpr(jax.grad(found))(w, b).jaxpr)


@pytest.mark.parametrize("loss", [convolved, over_time])
def test_what_mixes_tokens_is_unchanged(loss: Any) -> None:
    _, before, after = tiled(loss, weights(), inputs())
    kinds = ("conv_general_dilated", "scan")
    assert any(eqn.primitive.name in kinds for eqn in after.eqns if eqn in before.eqns)


def test_short_sequences_are_unchanged() -> None:
    for number in ("auto", 1):
        _, before, after = tiled(relu, weights(), inputs(), number)
        assert after is before


def test_gradients_of_weights_are_summed_in_fp32() -> None:
    """Of 30 tiles: in 16 bits a sum of as many terms would lose their last digits."""
    w, b = weights(jnp.bfloat16), inputs(jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (w, {"x": b["x"]}))
    exact = jax.grad(relu)(*wide)["down"]
    ours, once = (jax.grad(f)(w, b)["down"] for f in (tiled(relu, w, b, 30)[0], relu))

    assert error(ours, exact) <= 1.5 * error(once, exact)


def test_a_name_that_a_policy_saves_ends_a_group() -> None:
    def named(w: Any, b: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(b["x"] @ w["up"]), "hidden")
        return (jnp.tanh(hidden @ w["gate"].T) @ w["up"]).sum()

    outer = [
        [e.primitive.name for e in tiled(named, weights(), inputs(), 4, kept)[2].eqns]
        for kept in ((), ("hidden",))
    ]
    assert "name" not in outer[0] and "name" in outer[1]
