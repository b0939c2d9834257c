"""The zig-zag order of tokens in training: the same numbers, equal work, where it is refused."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxspeed
from jaxspeed import ops
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.sequence_parallel import SequenceSettings, shard_sequence
from jaxspeed.sequence_parallel.zigzag_proof import Along, OrderProof
from jaxspeed.traced_loss import passes
from jaxspeed.traced_loss.loss_program import LossProgram
from tests.sequence.programs import Sharded, assert_as_on_one_device, mesh_of, traced
from tests.sequence.score_work import work_of_devices
from tests.sequence.tiny_llama import assert_equal, batches, config, plain, trained
from tests.support.covering import covering

SAMPLES, SEQ, VOCAB, DIM, HEADS, LAYERS = 2, 32, 13, 16, 4, 2


class InZigzag(Sharded):
    """A loss with its sequences in zig-zag order."""

    def first_passes(self, program: LossProgram) -> LossProgram:
        context = passes.TraceContext(None, sequence=self.settings)
        program = passes.attention_calls(program, context)
        return passes.token_order(program, context)


def parameters(key_heads: int = HEADS) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / 4

    head_dim = DIM // HEADS
    return {
        "embed": normal(VOCAB, DIM),
        "q": normal(LAYERS, DIM, HEADS, head_dim),
        "kv": normal(LAYERS, 2, DIM, key_heads, head_dim),
        "out": normal(LAYERS, HEADS, head_dim, DIM),
        "up": normal(LAYERS, DIM, 2 * DIM),
        "down": normal(LAYERS, 2 * DIM, DIM),
        "places": normal(2 * SEQ, DIM),
        "taps": normal(LAYERS, 3, DIM),
    }


def attention(q: Any, k: Any, v: Any, ids: Any, causal: bool, window: int | None) -> jax.Array:
    """Softmax of masked scores, in plain JAX."""
    place = jnp.arange(q.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) if causal else jnp.ones_like(distance, bool)
    if window is not None:
        seen &= jnp.abs(distance) < window
    mask = seen[None]
    if ids is not None:
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


Mix = Callable[[jax.Array, jax.Array, int], jax.Array]  # (x, the layer's taps, its number)


def unmixed(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    return x


def dropped(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(5), number)
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.where(kept, x / 0.8, 0) + 0.1 * jax.random.normal(jax.random.key(6), x.shape)


def convolved(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    kernel = taps[:, None, :]
    numbers = ("NWC", "WIO", "NWC")
    form: Any = {"dimension_numbers": numbers, "feature_group_count": x.shape[2]}
    return x + lax.conv_general_dilated(x, kernel, (1,), [(2, 0)], **form)


def shifted(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    return x + taps[0] * jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def summed(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    return x + taps[0] * jnp.cumsum(x, 1)


def written(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    return x.at[:, 5].multiply(taps[0])


def updated(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    return lax.dynamic_update_slice(x, x[:, :2] * taps[0], (0, 5, 0))


def scanned(x: jax.Array, taps: jax.Array, number: int) -> jax.Array:
    def step(state: Any, now: Any) -> Any:
        state = 0.5 * state + now * taps[0]
        return state, state

    _, states = lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return x + states.swapaxes(0, 1)


def model(
    attend: Callable[..., jax.Array] | None = None,
    causal: bool = True,
    window: int | None = None,
    mix: Mix = unmixed,
    scan: bool = True,
    flat: bool = False,
) -> Callable[[Any, Any], jax.Array]:
    """A decoder of packed documents on tokens [batch, seq + 1], as its user would write it."""

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        all_ids = jnp.cumsum(batch["tokens"] == 0, axis=1)
        ids, weights = all_ids[:, :-1], (all_ids[:, 1:] == all_ids[:, :-1]).astype(jnp.float32)
        number = jnp.arange(SEQ)
        begins = jnp.concatenate([jnp.ones((SAMPLES, 1), bool), ids[:, 1:] != ids[:, :-1]], 1)
        in_document = number - lax.cummax(jnp.where(begins, number, 0), axis=1)
        x = params["embed"][inputs] + params["places"][in_document] + params["places"][SEQ:]
        angles = number[:, None] / 10.0 ** jnp.arange(DIM // HEADS // 2)

        def rotated(x: jax.Array) -> jax.Array:
            (a, b), angle = jnp.split(x, 2, -1), angles[:, None]
            cos, sin = jnp.cos(angle), jnp.sin(angle)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

        def layer(x: jax.Array, weights: Any) -> Any:
            own, i = weights
            q = rotated(jnp.einsum("bse,ehd->bshd", x, own["q"]))
            k, v = jnp.einsum("bse,kehd->kbshd", x, own["kv"])
            k = rotated(k)
            if attend is None:
                out = ops.attention(q, k, v, causal=causal, window=window, segment_ids=ids)
            else:
                out = attend(q, k, v, ids, causal, window)
            x = mix(x + jnp.einsum("bshd,hde->bse", out, own["out"]), own["taps"], i)
            return x + jax.nn.silu(x @ own["up"]) @ own["down"], None

        layers = {name: x for name, x in params.items() if name not in ("embed", "places")}
        if scan:
            x, _ = lax.scan(jax.checkpoint(layer), x, (layers, jnp.arange(LAYERS)))
        else:
            for i in range(LAYERS):
                own = {name: w[i] for name, w in layers.items()}
                x, _ = jax.jit(layer)(x, (own, i))
        if flat:  # samples and positions in one dim
            x, targets, weights = (
                y.reshape(SAMPLES * SEQ, *y.shape[2:]) for y in (x, targets, weights)
            )
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        of_target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return -jnp.sum(of_target * weights) / jnp.sum(weights)

    return loss


def tokens() -> dict[str, np.ndarray]:
    """Documents, which begin with token 0, across the borders of all shards."""
    drawn = np.random.default_rng(0).integers(1, VOCAB, (SAMPLES, SEQ + 1))
    drawn[np.random.default_rng(1).random(drawn.shape) < 0.1] = 0
    return {"tokens": drawn.astype(np.int32)}


def token_orders(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes of all arrays that are permuted, at any depth."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "token_order":
            found.append(eqn.invars[0].aval.shape)
        for body in bodies(eqn) if eqn.primitive.name != "attention_call" else ():
            found += token_orders(body.jaxpr)
    return found


def sharded(loss: Any, mesh: Any = None, key_heads: int = HEADS, **how: Any) -> InZigzag:
    settings = {"kind": "ring", "layout": "zigzag"} | how
    mesh = mesh or {"seq": 4}
    return InZigzag(loss, parameters(key_heads), tokens(), mesh_of(**mesh), **settings)


# -- the numbers -----------------------------------------------------------------------------------

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({}, {}),
    "ring of 2, 4 times the samples' axis": ({}, {"mesh": {"seq": 2, "data": 2}}),
    "window": ({"window": 9}, {}),
    "gather": ({"scan": False}, {"kind": "gather"}),
    "both": ({}, {"kind": "both", "mesh": {"seq": 8}}),
    "ulysses": ({}, {"kind": "ulysses"}),
    "fewer key heads": ({"scan": False}, {"key_heads": 1}),
    "no mask": ({"causal": False}, {}),
    "draws": ({"mix": dropped}, {}),
    "draws in calls": ({"mix": dropped, "scan": False}, {}),
    "flat": ({"flat": True}, {}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", covering([*CASES], ["ring", "both", "draws", "flat"]))
def test_the_numbers_are_those_of_one_device(case):
    of_model, how = CASES[case]
    found = sharded(model(**of_model), **how)
    expected = model(attention, **of_model)
    assert len(token_orders(found.traced.closed.jaxpr)) >= 5, "what enters the sequence"
    assert_as_on_one_device(found, expected)


def test_what_enters_the_sequence_is_permuted_once():
    """Tokens, targets, weights, ids, places, tables; nothing in a layer, no activation."""
    found = sharded(model())
    jaxpr = found.traced.closed.jaxpr
    shapes = token_orders(jaxpr)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert not [shape for body in bodies(scan) for shape in token_orders(body.jaxpr)]
    assert all(len(shape) < 3 for shape in shapes) and len(shapes) <= 8


def on_one_device(loss: Any, key_heads: int = HEADS, **how: Any) -> tuple[Any, list[jax.Array]]:
    """The program in zig-zag order, and its results on one device, with no sharding."""
    settings = SequenceSettings(**{"kind": "ring", "layout": "zigzag"} | how)
    params, batch = parameters(key_heads), tokens()
    with jax.set_mesh(mesh_of(seq=4)):
        program = traced(loss, params, batch, settings)
        context = passes.TraceContext(None, sequence=settings)
        program = passes.token_order(passes.attention_calls(program, context), context)
    closed = program.closed
    args = [*(params[path] for path in sorted(params)), *jax.tree.leaves(batch)]
    return closed.jaxpr, jax.jit(as_function(closed.jaxpr, closed.consts))(*args)


@pytest.mark.default_cases(every=6)
@pytest.mark.parametrize("case", CASES)
def test_the_program_is_the_same_in_zigzag_order(case):
    of_model, how = CASES[case]
    jaxpr, (found,) = on_one_device(model(**of_model), how.get("key_heads", HEADS))
    assert token_orders(jaxpr)
    expected = model(attention, **of_model)(parameters(how.get("key_heads", HEADS)), tokens())
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_results_with_tokens_come_out_in_their_order():
    def loss(of_tokens):
        def run(params, batch):
            x = params["embed"][batch["tokens"][:, :-1]]
            q = x.reshape(SAMPLES, SEQ, HEADS, -1)
            out = of_tokens(q).reshape(x.shape) * jnp.arange(SEQ)[:, None]
            return jnp.sum(out**2), out, jnp.max(out, 2), batch["tokens"]

        return run

    jaxpr, found = on_one_device(loss(lambda q: ops.attention(q, q, q)))
    assert token_orders(jaxpr)
    plainly = loss(lambda q: attention(q, q, q, None, True, None))
    for ours, theirs in zip(found, plainly(parameters(), tokens()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# -- where the order matters -----------------------------------------------------------------------


@pytest.mark.default_cases("convolved-", "shifted-", "summed-")
@pytest.mark.parametrize(
    ("mix", "text"),
    [
        (convolved, r"conv_general_dilated mixes tokens \(test_zigzag.py, line \d+\)"),
        (shifted, r"pad mixes tokens \(test_zigzag.py, line \d+\)"),
        (summed, r"cumsum mixes tokens \(test_zigzag.py, line \d+\)"),
        (scanned, r"scan mixes tokens \(test_zigzag.py, line \d+\)"),
        (written, r"scatter-mul mixes tokens \(test_zigzag.py, line \d+\)"),
        (updated, r"dynamic_update_slice mixes tokens \(test_zigzag.py, line \d+\)"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_model_that_mixes_tokens_stays_contiguous(mix, text, caplog):
    with pytest.raises(ConfigError, match=f"^parallel.sequence.layout zigzag: {text}: use cont"):
        sharded(model(mix=mix))
    passes._note_contiguous.cache_clear()
    with caplog.at_level(logging.INFO, "jaxspeed"):
        jaxpr, _ = on_one_device(model(mix=mix), layout="auto")
    assert not token_orders(jaxpr)
    (note,) = (r.getMessage() for r in caplog.records if "contiguous order" in r.getMessage())
    assert "mixes tokens (test_zigzag.py, line" in note


@pytest.mark.default_cases("shifted")
@pytest.mark.parametrize("mix", [convolved, shifted, summed])
def test_without_the_proof_the_loss_would_be_wrong(mix, monkeypatch):
    def trusting(self, frame, position):
        kind = prove(self, frame, position)
        eqn = frame.jaxpr.eqns[position]
        floats = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
        return Along.TOKEN if kind is Along.MIXES and floats else kind

    prove = OrderProof._kind
    monkeypatch.setattr(OrderProof, "_kind", trusting)
    jaxpr, (found,) = on_one_device(model(mix=mix))
    assert token_orders(jaxpr)
    expected = model(attention, mix=mix)(parameters(), tokens())
    assert abs(found - expected) > 1e-3 * abs(expected)


def general(q: jax.Array, x: jax.Array) -> jax.Array:
    """Attention with a bias by distance, which no kernel takes."""
    place = jnp.arange(SEQ)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, q) - jnp.abs(place[:, None] - place)
    scores = jnp.where(place[:, None] >= place, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)


def of_two(q: jax.Array, x: jax.Array) -> jax.Array:
    """Queries of the tokens, keys of pairs of tokens."""
    k = jnp.mean(q.reshape(SAMPLES, SEQ // 2, 2, HEADS, -1), 2)
    return ops.attention(q, k, k, causal=False)


def last(q: jax.Array, x: jax.Array) -> jax.Array:
    return ops.attention(q, q, q) * x[:, -1:, :1, None]


def reversed_(q: jax.Array, x: jax.Array) -> jax.Array:
    return ops.attention(q, q, q)[:, ::-1]


@jax.custom_vjp
def leaking(x: jax.Array) -> jax.Array:
    """Per token; its gradient, which is not its derivative, is of the next token."""
    return 2 * x


leaking.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * jnp.roll(ct, 1, 1),))


@jax.custom_vjp
def straight(x: jax.Array) -> jax.Array:
    """Per token in both passes."""
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


def through(function: Any) -> Any:
    def attend(q: jax.Array, x: jax.Array) -> jax.Array:
        return function(ops.attention(q, q, q))

    return attend


def branches(q: jax.Array, x: jax.Array) -> jax.Array:
    """A branch, and a loop whose number of trips depends on data, with tables of positions."""
    table = jnp.cos(jnp.arange(SEQ, dtype=jnp.float32))[:, None, None]
    q = lax.cond(jnp.sum(x) > 0, lambda q, t: q * t, lambda q, t: q + t, q, table)
    trips = jnp.int32(2) + (jnp.max(x) > 1e6)

    def trip(state: Any) -> Any:
        i, q = state
        return i + 1, q + ops.attention(q, q, q) * jnp.sin(jnp.arange(SEQ))[:, None, None]

    _, q = lax.while_loop(lambda state: state[0] < trips, trip, (0, q))
    return q


@pytest.mark.parametrize("attend", [branches, through(straight)])
def test_branches_loops_and_derivatives_of_tokens(attend):
    def loss(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        return jnp.sum(attend(x.reshape(SAMPLES, SEQ, HEADS, -1), x) ** 2)

    jaxpr, (found,) = on_one_device(loss)
    assert token_orders(jaxpr)
    np.testing.assert_allclose(found, loss(parameters(), tokens()), rtol=1e-6)


REASONS = [
    (through(leaking), "custom_vjp_call mixes tokens"),
    (general, "the mask or bias of attention is a general one"),
    (of_two, "attention of several sequences"),
    (last, "slice mixes tokens"),
    (reversed_, "rev mixes tokens"),
    (lambda q, x: q, "no attention over the sequence is known"),
]


@pytest.mark.parametrize(("attend", "text"), REASONS, ids=[text for _, text in REASONS])
def test_the_reason_is_named(attend, text):
    def loss(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        return jnp.sum(attend(x.reshape(SAMPLES, SEQ, HEADS, -1), x) ** 2)

    with pytest.raises(ConfigError, match=f"parallel.sequence.layout zigzag: {text}"):
        on_one_device(loss)


def test_chunks_must_divide_the_tokens():
    def loss(params, batch):
        x = params["embed"][batch["tokens"][:, :-5]]
        q = x.reshape(SAMPLES, SEQ - 4, HEADS, -1)
        return jnp.sum(ops.attention(q, q, q) ** 2)

    with pytest.raises(ConfigError, match="zig-zag has 8 chunks, which do not divide 28 tokens"):
        on_one_device(loss)


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.default_cases(
    "ring-auto-of_model0-True",
    "gather-auto-of_model1-True",
    "ring-auto-of_model4-False",
    "ulysses-auto-of_model5-False",
    "ulysses-zigzag-of_model6-True",
    "ring-contiguous-of_model7-False",
)
@pytest.mark.parametrize(
    ("kind", "layout", "of_model", "ordered"),
    [
        ("ring", "auto", {}, True),
        ("gather", "auto", {}, True),
        ("ring", "auto", {"window": 16}, True),
        ("ring", "auto", {"window": 8}, False),  # even in contiguous order, in fewer hops
        ("ring", "auto", {"causal": False}, False),
        ("ulysses", "auto", {}, False),
        ("ulysses", "zigzag", {}, True),
        ("ring", "contiguous", {}, False),
    ],
)
def test_auto_is_zigzag_where_it_divides_the_work_better(kind, layout, of_model, ordered):
    jaxpr, _ = on_one_device(model(**of_model), kind=kind, layout=layout)
    assert bool(token_orders(jaxpr)) == ordered


# -- work ------------------------------------------------------------------------------------------


@pytest.mark.default_cases("False-1.02-0.57")
@pytest.mark.parametrize(("documents", "most", "total"), [(False, 1.02, 0.57), (True, 1.9, 0.1)])
def test_work_in_training_is_even(documents, most, total, monkeypatch):
    """Of the forward passes of a program that trains; causal, then of documents."""
    length = 2048
    lengths = np.random.default_rng(0).integers(50, 400, 20)
    ids = np.resize(np.repeat(np.arange(20), lengths), length + 1)[None].astype(np.int32)

    def loss(params, batch):
        x = params["embed"][batch["tokens"][:, :-1]]
        of_segments = batch["ids"][:, :-1] if documents else None
        q = x[:, :, None]
        return jnp.sum(ops.attention(q, q, q, segment_ids=of_segments))

    batch = {"tokens": np.zeros((1, length + 1), np.int32), "ids": ids}
    params = {"embed": jnp.zeros((2, 4))}

    def run():
        found = InZigzag(loss, params, batch, mesh_of(seq=8), kind="ring")
        closed = found.program.closed
        with jax.set_mesh(found.mesh):
            args = jax.device_put([params["embed"], batch["ids"], batch["tokens"]])
            return jax.jit(as_function(closed.jaxpr, closed.consts))(*args)

    shares = work_of_devices(run, length, monkeypatch)
    assert total / 2 < shares.sum() <= total
    assert shares.max() <= most * shares.mean()


# -- the engine ------------------------------------------------------------------------------------


def orders_in_engine(layout: str, kind: str, **more: Any) -> list[tuple[int, ...]]:
    """What is permuted in the loss that an engine traces."""
    parallel = {"sequence": {"kind": kind, "layout": layout}}
    settings = config(1, mesh={"seq": 4}, parallel=parallel) | more
    program = jaxspeed.initialize(config=settings).program

    def trace(*rest):
        return program.traced_loss.trace(rest, train=True)

    batch, index = batches()[0], jnp.int32(0)
    found = program.in_mesh(trace)(program.model.variables, batch, index, index)
    return token_orders(found.closed.jaxpr)


@pytest.mark.parametrize(("layout", "kind"), [("contiguous", "ring"), ("zigzag", "ulysses")])
def test_the_config_says_the_order(layout, kind):
    assert bool(orders_in_engine(layout, kind)) == (layout == "zigzag")


@pytest.mark.sampled
def test_experts_take_tokens_in_any_order_but_first_come_first_served():
    def mixture(**sizes):
        return {"model": {"family": "mixtral", "preset": "tiny", "config": sizes}}

    assert len(orders_in_engine("zigzag", "ring", **mixture())) == 4
    with pytest.raises(ConfigError, match="layout zigzag: cumsum mixes tokens"):
        orders_in_engine("zigzag", "ring", **mixture(capacity_factor=1.0))


@pytest.mark.full
def test_mixtures_train_as_plain_jax_does():
    parallel = {"sequence": {"kind": "ring", "layout": "zigzag"}}
    settings = config(1, mesh={"seq": 4}, parallel=parallel)
    settings["model"] = {"family": "mixtral", "preset": "tiny"}
    _, run = trained(batches(), settings)
    assert_equal(run, plain(batches(), {}, "mixtral"))


ENGINE = [
    ("ring", "seq 4, data 2", 1, 2, "none"),
    ("ring", "seq 2, pipe 2", 1, 2, "none"),
    ("ring", "seq 2, tensor 2", 3, 1, "full"),
    ("both", "seq 8", 2, 1, "full"),
    ("gather", "seq 4, data 2", 0, 2, "none"),
    ("gather", "seq 2, pipe 2", 2, 2, "full"),
    ("ring", "seq 4, tensor 2", 0, 1, "none"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "accumulation", "remat"), covering(ENGINE, ENGINE[1:2])
)
def test_training_equals_plain_jax(kind, mesh, stage, accumulation, remat, caplog):
    sizes = {axis: int(size) for axis, size in (part.split() for part in mesh.split(", "))}
    parallel = {"sequence": {"kind": kind, "layout": "zigzag"}, "remat": remat}
    shard_sequence._note_form.cache_clear()
    with caplog.at_level(logging.INFO, "jaxspeed"):
        settings = config(stage, accumulation, mesh=sizes, parallel=parallel)
        _, run = trained(batches(), settings)
    assert_equal(run, plain(batches()))
    notes = [r.getMessage() for r in caplog.records if "attention (" in r.getMessage()]
    assert notes and all(", zigzag, because" in note for note in notes)
