"""The repeated blocks are found in a traced loss, however it was written; else a reason is given.

Each model here is a few lines of plain JAX, so that what is found can be held to what was written.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed import unit
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.inline_calls import with_calls_inlined
from jaxspeed.pipeline.repeated_blocks import BlockInputs, BlockWeights
from jaxspeed.pipeline.scanned_stack import scanned_blocks
from jaxspeed.pipeline.unrolled_stack import unrolled_blocks

WIDTH, LAYERS, SAMPLES = 3, 4, 2
X = np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 2
B = np.random.default_rng(2).normal(size=(LAYERS, WIDTH)).astype(np.float32)


def blocks_of_scan(fn, *more, stack=("w",)):
    """`fn(*stacked, *more)`, whose stacked arguments come first and are named."""
    closed = jax.make_jaxpr(fn)(*[{"w": W, "b": B}[name] for name in stack], *more)
    own = closed.jaxpr.invars[: len(stack)]
    return scanned_blocks(
        with_calls_inlined(closed.jaxpr, set(own)), dict(zip(own, stack, strict=True))
    )


def blocks_of_list(fn, *more, names=("w", "b")):
    """`fn([{w, b}, ...], *more)`: each layer has arrays of its own."""
    layers = [{"w": w, "b": b} for w, b in zip(W, B, strict=True)]
    closed = jax.make_jaxpr(fn)([{n: p[n] for n in names} for p in layers], *more)
    count = len(names)
    own = closed.jaxpr.invars[: LAYERS * count]
    order = sorted(names)  # as JAX flattens a dict
    stack = {name: [own[i * count + n] for i in range(LAYERS)] for n, name in enumerate(order)}
    return unrolled_blocks(with_calls_inlined(closed.jaxpr, set(own)), stack)


def applied(blocks, carry, shared=(), per_layer=()):
    """The body, layer by layer; `per_layer` has [layers, ...] of each."""
    for i in range(blocks.layers):
        pairs = zip(blocks.per_layer, per_layer, strict=True)
        own = [r.cast(x[i]) if isinstance(r, BlockWeights) else x[i] for r, x in pairs]
        carry = as_function(blocks.body)(*shared, *carry, *own)
    return carry


# -- a scan ---------------------------------------------------------------------------------------


def scan_loss(w, x):
    y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x * 2, w)
    return jnp.sum(y**2)


def by_hand(x, w=W):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return x


def test_a_scan_along_the_stack_is_its_blocks():
    found = blocks_of_scan(scan_loss, X)
    assert (found.layers, found.per_layer) == (LAYERS, (BlockWeights("w"),))
    assert (len(found.carry), len(found.results), found.shared) == (1, 1, ())
    (y,) = applied(found, [2 * X], per_layer=[W])
    np.testing.assert_allclose(y, by_hand(2 * X), rtol=1e-6)


def test_a_scan_inside_calls_of_calls_is_found():
    found = blocks_of_scan(jax.jit(lambda w, x: jax.jit(scan_loss)(w, x) + 1), X)
    assert found.layers == LAYERS
    (y,) = applied(found, [2 * X], per_layer=[W])
    np.testing.assert_allclose(y, by_hand(2 * X), rtol=1e-6)


def test_a_cast_before_the_scan_goes_with_the_weights():
    found = blocks_of_scan(
        lambda w, x: scan_loss(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)), X
    )
    (own,) = found.per_layer
    assert own.name == "w" and own.cast(jnp.float32(1)).dtype == jnp.bfloat16
    assert not any(e in own.casts for e in found.others)


def test_what_a_scan_closes_over_is_shared_and_what_it_walks_along_is_per_layer():
    def loss(w, b, x, bias, rates):
        def body(carry, layer):
            x, total = carry
            w, b, rate = layer
            x = jnp.tanh(x @ w + b + bias) * rate
            return (x, total + jnp.sum(x)), None

        (x, total), _ = jax.lax.scan(body, (x, 0.0), (w, b, rates))
        return jnp.sum(x**2) + total

    bias, rates = jnp.ones(WIDTH), jnp.arange(1.0, LAYERS + 1)
    found = blocks_of_scan(loss, X, bias, rates, stack=("w", "b"))
    assert (len(found.shared), len(found.carry), len(found.results)) == (1, 2, 2)
    assert [r.name for r in found.per_layer[:2]] == ["w", "b"]
    assert isinstance(found.per_layer[2], BlockInputs) and len(found.per_layer[2].atoms) == 1
    x, total = applied(found, [X, jnp.float32(0)], [bias], [W, B, rates])
    wanted = loss(W, B, X, bias, rates)
    np.testing.assert_allclose(jnp.sum(x**2) + total, wanted, rtol=1e-6)


def test_what_nobody_reads_of_every_block_is_left_out():
    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x)), x, w)
        return jnp.sum(y)

    found = blocks_of_scan(loss, X)
    assert len(found.body.outvars) == len(found.results) == 1


def test_an_unrolled_scan_stays_unrolled_as_far_as_there_are_layers():
    def loss(w, x, unroll):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, unroll=unroll)
        return jnp.sum(y)

    assert blocks_of_scan(lambda w, x: loss(w, x, 2), X).unroll == 2
    assert blocks_of_scan(lambda w, x: loss(w, x, True), X).unroll == LAYERS


def collects(w, x):
    y, every = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x)), x, w)
    return jnp.sum(y) + jnp.sum(every)


def reads_the_stack(w, x):
    return scan_loss(w, x) + jnp.sum(w**2)


def walks_twice(w, x):
    return scan_loss(w, x) + scan_loss(w, 2 * x)


def walks_back(w, x):
    y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, reverse=True)
    return jnp.sum(y)


def closes_over_the_stack(w, x):
    y, _ = jax.lax.scan(lambda x, i: (jnp.tanh(x @ w[i]), None), x, jnp.arange(LAYERS))
    return jnp.sum(y)


def does_not_read(w, x):
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (collects, "reads a per-layer output of the scan"),
        (reads_the_stack, "is read by a .* outside of a scan"),
        (walks_twice, "scanned 2 times"),
        (walks_back, "runs from the last layer to the first"),
        (closes_over_the_stack, "reads the weights of all blocks"),
        (does_not_read, "does not read the stacked blocks"),
    ],
)
def test_a_scan_that_cannot_be_split_is_refused_with_the_reason(loss, reason):
    with pytest.raises(ModelError, match=reason):
        blocks_of_scan(loss, X)


# -- a list ---------------------------------------------------------------------------------------


@unit
def block(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def list_loss(layers, x):
    x = x * 2
    for p in layers:
        x = block(p, x)
    return jnp.sum(x**2)


def list_by_hand(x):
    for w, b in zip(W, B, strict=True):
        x = jnp.tanh(x @ w + b)
    return x


def test_blocks_that_follow_each_other_are_found():
    found = blocks_of_list(list_loss, X)
    assert {r.name for r in found.per_layer} == {"w", "b"}
    assert (found.layers, found.shared, len(found.carry)) == (LAYERS, (), 1)
    own = [{"w": W, "b": B}[r.name] for r in found.per_layer]
    (y,) = applied(found, [2 * X], per_layer=own)
    np.testing.assert_allclose(y, list_by_hand(2 * X), rtol=1e-6)


@pytest.mark.parametrize(
    "step",
    [
        lambda y, x: jnp.sin(y),
        lambda y, x: x + 0.5 * y,
        lambda y, x: jax.nn.relu(jax.nn.standardize(y)),
    ],
    ids=["an activation", "a residual", "several calls"],
)
def test_computation_between_blocks_belongs_to_the_block_before_it(step):
    def loss(layers, x):
        x = 2 * x
        for p in layers:
            x = step(block(p, x), x)
        return jnp.sum(x**2)

    found = blocks_of_list(loss, X)
    own = [{"w": W, "b": B}[r.name] for r in found.per_layer]
    (y,) = applied(found, [2 * X], per_layer=own)
    x = 2 * X
    for w, b in zip(W, B, strict=True):
        x = step(jnp.tanh(x @ w + b), x)
    np.testing.assert_allclose(y, x, rtol=1e-5)


def test_blocks_inside_a_jit_are_found():
    found = blocks_of_list(jax.jit(list_loss), X)
    own = [{"w": W, "b": B}[r.name] for r in found.per_layer]
    (y,) = applied(found, [2 * X], per_layer=own)
    np.testing.assert_allclose(y, list_by_hand(2 * X), rtol=1e-6)


def test_blocks_under_checkpoint_are_found():
    def loss(layers, x):
        for p in layers:
            x = jax.checkpoint(block)(p, x)
        return jnp.sum(x)

    found = blocks_of_list(loss, X)
    own = [{"w": W, "b": B}[r.name] for r in found.per_layer]
    (y,) = applied(found, [X], per_layer=own)
    np.testing.assert_allclose(y, list_by_hand(X), rtol=1e-6)


def test_what_all_blocks_read_is_shared_and_what_each_reads_is_per_layer():
    @unit
    def block(p, x, bias, rate):
        return jnp.tanh(x @ p["w"] + p["b"] + bias) * rate

    def loss(layers, x, bias, rates):
        for i, p in enumerate(layers):
            x = block(p, x, bias, rates[i])
        return jnp.sum(x)

    bias, rates = jnp.ones(WIDTH), jnp.arange(1.0, LAYERS + 1)
    found = blocks_of_list(loss, X, bias, rates)
    rows = [r for r in found.per_layer if isinstance(r, BlockInputs)]
    assert len(found.shared) == 1 and [len(r.atoms) for r in rows] == [LAYERS]
    own = [
        rates if isinstance(r, BlockInputs) else {"w": W, "b": B}[r.name] for r in found.per_layer
    ]
    (y,) = applied(found, [X], [bias], own)
    np.testing.assert_allclose(
        jnp.sum(y),
        loss([{"w": w, "b": b} for w, b in zip(W, B, strict=True)], X, bias, rates),
        rtol=1e-5,
    )


def test_a_carry_of_several_arrays_keeps_their_order():
    @unit
    def block(p, x, total):
        y = jnp.tanh(x @ p["w"] + p["b"])
        return y, total + jnp.sum(y)

    def loss(layers, x):
        total = jnp.mean(x)
        for p in layers:
            x, total = block(p, x, total)
        return total + 3 * jnp.sum(x)

    found = blocks_of_list(loss, X)
    own = [{"w": W, "b": B}[r.name] for r in found.per_layer]
    by_shape = {v.aval.shape: i for i, v in enumerate(found.carry)}
    assert by_shape.keys() == {(), X.shape}
    start = [X if v.aval.shape else jnp.mean(X) for v in found.carry]
    outs = applied(found, start, per_layer=own)
    shapes = [v.aval.shape for v in found.results]
    total, x = outs[shapes.index(())], outs[shapes.index(X.shape)]
    layers = [{"w": w, "b": b} for w, b in zip(W, B, strict=True)]
    np.testing.assert_allclose(total + 3 * jnp.sum(x), loss(layers, X), rtol=1e-5)


@unit
def other_block(p, x):
    return jax.nn.relu(x @ p["w"] + p["b"])


def unlike(layers, x):
    for i, p in enumerate(layers):
        x = block(p, x) if i % 2 else other_block(p, x)
    return jnp.sum(x)


@unit
def short_block(p, x):
    return x * p["b"]


def last_is_short(layers, x):
    for p in layers[:-1]:
        x = block(p, x)
    return jnp.sum(short_block(layers[-1], x))


def between(layers, x):
    for p in layers[:-1]:
        x = jnp.sin(block(p, x))
    return jnp.sum(block(layers[-1], x))


def every_output(layers, x):
    total = 0.0
    for p in layers:
        x = block(p, x)
        total = total + jnp.sum(x)
    return total


def reads_twice(layers, x):
    for p in [*layers, *layers]:
        x = block(p, x)
    return jnp.sum(x)


def unused(layers, x):
    for p in layers[:-1]:
        x = block(p, x)
    return jnp.sum(x)


def side_by_side(layers, x):
    return sum(jnp.sum(block(p, x)) for p in layers)


def backwards(layers, x):
    for p in layers[::-1]:
        x = block(p, x)
    return jnp.sum(x)


def out_of_order(layers, x):
    for i in (0, 1, 3, 2):
        x = block(layers[i], x)
    return jnp.sum(x)


def two_streams(layers, x):
    y = 2 * x
    for p, q in zip(layers[::2], layers[1::2], strict=True):
        x, y = block(p, x), block(q, y)
    return jnp.sum(x * y)


@unit
def gated_block(p, x, gate):
    return jnp.tanh(x @ p["w"] + p["b"]) * gate


def gated_by_itself(layers, x):
    x = gated_block(layers[0], x, 2 * x)
    for p in layers[1:]:
        x = gated_block(p, x, x)
    return jnp.sum(x)


def all_at_once(layers, x):
    return list_loss(layers, x) + jnp.sum(jnp.stack([p["w"] for p in layers]) ** 2)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (unlike, "block 1 of 4 computes something else than block 0"),
        (last_is_short, "block 3 of 4 computes something else than block 0"),
        (between, "computation between two of them has to be part of a block"),
        (every_output, "an output of block 0 is read outside of the next block"),
        (reads_twice, "an output of block 0 is read outside of the next block"),
        (unused, "does not read block 3 of 4"),
        (side_by_side, "block 1 reads no output of block 0"),
        (backwards, "block 0 reads an output of block 1.* reverse the list"),
        (out_of_order, "block 2 reads no output of block 1"),
        (two_streams, "block 1 reads no output of block 0"),
        (gated_by_itself, "the first block has two inputs"),
        (all_at_once, "reads the parameters of several blocks at once"),
    ],
)
def test_a_list_that_cannot_be_split_is_refused_with_the_reason(loss, reason):
    with pytest.raises(ModelError, match=f"^mesh.pipe: .*{reason}"):
        blocks_of_list(loss, X)


# -- blocks that differ in numbers ----------------------------------------------------------------


def layers_of_list():
    return [{"w": w, "b": b} for w, b in zip(W, B, strict=True)]


def rows_of(found):
    """[layers] of each input that is not the same for all blocks and no parameter."""
    made = {e.outvars[0]: e.invars[0].val for e in found.others if e.primitive.name == "copy"}
    rows = [r for r in found.per_layer if isinstance(r, BlockInputs)]
    return [np.asarray([made[v] for v in r.atoms]) for r in rows]


def run_list(found, carry):
    rows = iter(rows_of(found))
    weights = {"w": W, "b": B}
    own = [weights[r.name] if isinstance(r, BlockWeights) else next(rows) for r in found.per_layer]
    return applied(found, carry, per_layer=own)


def scale(y, x, number):
    return y * number + x


def scaled_plainly(p, x, i):
    return scale(jnp.tanh(x @ p["w"] + p["b"]), 0.5 * x, i + 0.25)


def scaled_in_jits(p, x, i):
    """A number inside of a jit inside of a jit; the one that all have stays where it is."""
    y = jnp.tanh(x @ p["w"] + p["b"])
    inner = jax.jit(lambda y, x: scale(y, 0.5 * x, i + 0.25))
    return jax.jit(lambda y, x: inner(y, x))(y, x)


def scaled_in_checkpoint(p, x, i):
    return jax.checkpoint(lambda p, x: scaled_in_jits(p, x, i))(p, x)


def scaled_twice(p, x, i):
    """One jit that is called twice shares its variables."""
    scaled = jax.jit(lambda x: x * (i + 0.25))
    return scaled(scaled(jnp.tanh(x @ p["w"] + p["b"]))) / (i + 0.25) + 0.5 * x


SCALED = (scaled_plainly, scaled_in_jits, scaled_in_checkpoint, scaled_twice)


@pytest.mark.parametrize("fn", SCALED)
def test_a_number_in_which_blocks_differ_is_one_a_layer(fn):
    def loss(layers, x):
        for i, p in enumerate(layers):
            x = unit(lambda p, x, i=i: fn(p, x, i))(p, x)
        return jnp.sum(x)

    found = blocks_of_list(loss, X)
    assert found.shared == ()
    for numbers in rows_of(found):
        np.testing.assert_allclose(numbers, np.arange(LAYERS) + 0.25)
    (y,) = run_list(found, [X])
    np.testing.assert_allclose(jnp.sum(y), loss(layers_of_list(), X), rtol=1e-5)


def test_a_number_that_all_blocks_have_stays_in_the_block():
    found = blocks_of_list(list_loss_with(lambda p, x: block(p, x) * 0.5), X)
    assert rows_of(found) == [] and "0.5" in str(found.body)


def list_loss_with(fn, carry=lambda x: x):
    def loss(layers, x):
        for p in layers:
            x = unit(fn)(p, x)
        return jnp.sum(x)

    return loss


def summing(p, x, total):
    y = jnp.tanh(x @ p["w"] + p["b"])
    return y, total + jnp.sum(y) * total + jnp.sum(y)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint, jax.jit])
def test_a_carry_may_start_from_a_number(wrap):
    def loss(layers, x):
        total = 0.5
        for p in layers:
            x, total = wrap(unit(summing))(p, x, total)
        return total + 3 * jnp.sum(x)

    found = blocks_of_list(loss, X)
    assert sorted(v.aval.shape for v in found.carry) == [(), X.shape]
    assert found.per_layer and not rows_of(found)
    copied = [e for e in found.others if e.primitive.name == "copy"]
    assert [float(e.invars[0].val) for e in copied] == [0.5]
    assert set(copied[0].outvars) < set(found.carry)
    outs = run_list(found, [X if v.aval.shape else jnp.float32(0.5) for v in found.carry])
    shapes = [v.aval.shape for v in found.results]
    total, x = outs[shapes.index(())], outs[shapes.index(X.shape)]
    np.testing.assert_allclose(total + 3 * jnp.sum(x), loss(layers_of_list(), X), rtol=1e-5)


def test_two_carries_may_start_from_one_array():
    @unit
    def step(p, x, rest):
        return jnp.tanh(x @ p["w"] + p["b"]) + rest, rest * x

    def loss(layers, x):
        rest = x
        for p in layers:
            x, rest = step(p, x, rest)
        return jnp.sum(x * rest)

    found = blocks_of_list(loss, X)
    assert len(found.carry) == 2 and found.carry[0] is found.carry[1]
    x, rest = run_list(found, [X, X])
    np.testing.assert_allclose(jnp.sum(x * rest), loss(layers_of_list(), X), rtol=1e-4)


def test_a_setting_that_is_no_number_to_read_makes_another_computation():
    def loss(layers, x):
        for i, p in enumerate(layers):
            x = unit(lambda p, x, i=i: block(p, x) ** (2 if i == 2 else 3))(p, x)
        return jnp.sum(x)

    with pytest.raises(ModelError, match=r"block 2 of 4 computes .* than block 0 \("):
        blocks_of_list(loss, X)
