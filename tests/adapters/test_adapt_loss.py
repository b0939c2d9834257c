"""The pass of adapters: what it finds, what it merges, and the mistakes that a comparison sees.

`test_adapted_programs.py` has the numbers of programs of all forms.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxspeed.adapters import adapt_loss as adapting
from jaxspeed.adapters.adapter import Adapter
from jaxspeed.config import Config
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.train.build import build_program

X, IDS = (3, 4), np.array([1, 2, 6])


@jax.custom_vjp
def own_derivative(w, x):
    return x @ w


own_derivative.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))
layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))


def scanned(p, x, **how):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, p["w"], **how)[0]


def remat_in_scan(p, x):
    body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), w))
    return lax.scan(body, x, p["w"], reverse=True, unroll=3)[0]


def branches(p, x):
    two = (lambda w, x: x @ w), (lambda w, x: jnp.tanh(x @ w))
    return lax.cond(x.sum() > 0, *two, p["w"], x)


def experts(p, x):
    made = jnp.einsum("ti,eij->etj", x, p["w"])
    return jnp.einsum("te,etj->tj", jax.nn.softmax(x[:, :2]), jnp.tanh(made))


def convolved(p, x):
    numbers = ("NWC", "WIO", "NWC")
    x = x.reshape(3, 4, 1)
    return lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=numbers)


def returned(p, x):
    y, w = jax.checkpoint(lambda w, x: (jnp.tanh(x @ w), w))(p["w"], x)
    return y @ w


S, I, O = (0,), (1,), (2,)  # noqa: E741
# name: (the function, shapes of weights, the roles of w's dims that are found)
CASES = {
    "dense": (lambda p, x: jnp.tanh(x @ p["w"]), [(4, 5)], ((), (0,), (1,))),
    "transposed": (lambda p, x: jnp.tanh(x @ p["w"].T), [(5, 4)], ((), (1,), (0,))),
    "in a jit": (lambda p, x: jax.jit(lambda w, x: x @ w)(p["w"], x), [(4, 5)], ((), (0,), (1,))),
    "scanned": (scanned, [(3, 4, 4)], (S, I, O)),
    "scanned with remat": (remat_in_scan, [(3, 4, 4)], (S, I, O)),
    "scanned along dim 1": (
        lambda p, x: scanned({"w": p["w"].swapaxes(0, 1)}, x), [(4, 3, 4)], ((1,), (0,), (2,)),
    ),
    "indexed": (
        lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"][0]) @ p["w"][1]), [(2, 4, 4)], (S, I, O),
    ),
    "indexed by a loop": (
        lambda p, x: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ p["w"][i]), x),
        [(2, 4, 4)], (S, I, O),
    ),
    "heads": (lambda p, x: jnp.einsum("be,ehd->bhd", x, p["w"]), [(4, 2, 3)], ((), (0,), (1, 2))),
    "reshaped": (lambda p, x: x @ p["w"].reshape(4, 6), [(4, 2, 3)], ((), (0,), (1, 2))),
    "split in three": (
        lambda p, x: sum(x @ w * i for i, w in enumerate(jnp.split(p["w"], 3, 1), 1)),
        [(4, 6)], ((), (0,), (1,)),
    ),
    "split by a reshape": (
        lambda p, x: jnp.einsum("be,ekd->kbd", x, p["w"].reshape(4, 3, 2)),
        [(4, 6)], ((), (0,), (1,)),
    ),
    "looked up": (lambda p, x: p["w"][IDS], [(7, 4)], ((), (0,), (1,))),
    "tied": (lambda p, x: p["w"][IDS] @ p["w"].T, [(7, 4)], ((), (0,), (1,))),
    "branches": (branches, [(4, 4)], ((), (0,), (1,))),
    "convolved": (convolved, [(3, 1, 5)], ((), (0, 1), (2,))),
    "experts": (experts, [(2, 4, 4)], ((), (1,), (0, 2))),
    "returned by remat": (returned, [(4, 4)], ((), (0,), (1,))),
    "one trace for two weights": (
        lambda p, x: layer(p["v"], layer(p["w"], x)), [(4, 4), (4, 4)], ((), (0,), (1,)),
    ),
}  # fmt: skip
MERGED = {
    "normalized": lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)),
    "a derivative of its own": lambda p, x: own_derivative(p["w"], x),
    "carried": lambda p, x: lax.fori_loop(0, 2, lambda i, c: (c[0] @ c[1], 2 * c[1]), (x, p["w"]))[
        0
    ],
}


class Adapted:
    """A program and its adapters, with random values."""

    def __init__(self, function, shapes, roles=None, **settings):
        rng = np.random.default_rng(0)
        draw = lambda shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)  # noqa: E731
        self.x, self.weights = draw(X), {p: draw(s) for p, s in zip("wv", shapes)}
        self.function = function
        closed = self.traced(self.weights)
        names = dict(zip(closed.jaxpr.invars, self.weights))
        self.uses = adapting.weight_dims(closed.jaxpr, names)
        self.adapters = {}
        self.values = {}
        for path, w in self.weights.items():
            dims = WeightDims(*roles, "product") if roles else self.uses[path][0]
            given = {"ranks": (2,), "scales": (0.5,), **settings}
            self.adapters[path] = adapter = Adapter(path, w.shape, dims, **given)
            self.values |= adapter.initialized(jax.random.key(1), False, jnp.float32)
            if adapter.dora:
                first = adapter.magnitude(w, self.values)
                self.values[adapter.leaf("magnitude")] = first * (1 + draw(first.shape) / 4)

    def traced(self, values):
        def run(values):
            return self.function(values, self.x)

        return jax.make_jaxpr(run)(values)

    def made(self):
        both = {**self.weights, **self.values}
        closed = self.traced(both)
        parameters = dict(zip(sorted(both), closed.jaxpr.invars))
        return closed, adapting.adapt_loss(closed.jaxpr, parameters, self.adapters, None)

    def applied(self, closed, made, values):
        both = {**self.weights, **values}
        args = [both[path] for path in sorted(both)]
        return jax.core.eval_jaxpr(made.jaxpr, closed.consts, *args)[0]

    def merged(self, values):
        own = {p: self.adapters[p].merged(w, values) for p, w in self.weights.items()}
        return self.function(own, self.x)

    def differences(self):
        """The largest of values, and of gradients by leaf."""
        closed, made = self.made()
        weigh = lambda y: jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))  # noqa: E731
        applied = jax.jit(jax.value_and_grad(lambda v: weigh(self.applied(closed, made, v))))
        merged = jax.jit(jax.value_and_grad(lambda v: weigh(self.merged(v))))
        (a, ours), (b, theirs) = applied(self.values), merged(self.values)
        off = {p: float(np.abs(ours[p] - theirs[p]).max()) for p in theirs}
        return max(float(abs(a - b)), *off.values())


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("name", CASES)
def test_a_weights_roles_are_found_and_no_merged_weight_is_computed(name):
    function, shapes, roles = CASES[name]
    case = Adapted(function, shapes)
    dims = case.uses["w"][0]
    assert (dims.stack, dims.inputs, dims.outputs) == roles
    closed, made = case.made()
    assert made.merged == ()
    assert not any(inner_makes(made.jaxpr, w.shape, closed) for w in case.weights.values())


def inner_makes(jaxpr, shape, closed):
    """Whether a program adds arrays of a weight's shape: a merged weight."""
    return any(
        (eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == shape)
        or any(inner_makes(body.jaxpr, shape, closed) for body in bodies(eqn))
        for eqn in jaxpr.eqns
    )


def test_weights_that_share_a_trace_have_adapters_of_their_own():
    function, shapes, _ = CASES["one trace for two weights"]
    assert Adapted(function, shapes).differences() < 1e-5


@pytest.mark.parametrize("name", MERGED)
def test_other_reads_are_of_the_merged_weight_and_have_no_dropout(name):
    case = Adapted(MERGED[name], [(4, 4)], ((), (0,), (1,)))
    assert case.made()[1].merged == ("w",)
    dropped = dataclasses.replace(case.adapters["w"], dropout=0.1)
    case.adapters["w"] = dropped
    with pytest.raises(ModelError, match=r"lora_dropout: w is read otherwise than by a product"):
        case.made()


def test_a_merged_weight_is_seen():
    """`inner_makes` sees what it looks for."""
    case = Adapted(MERGED["normalized"], [(4, 4)], ((), (0,), (1,)))
    closed, made = case.made()
    assert inner_makes(made.jaxpr, (4, 4), closed)


def test_assumed_dims_that_the_loss_does_not_use_ask_for_an_example_batch():
    function, shapes, _ = CASES["transposed"]
    case = Adapted(function, shapes, ((), (0,), (1,)), is_assumed=True)
    with pytest.raises(ModelError, match=r"lora: w \(5, 4\) was taken .* example_batch"):
        case.made()


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class SharedTrace(nnx.Module):
    """Blocks that have one cached trace in common."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        run = jax.checkpoint(lambda block, x: block(x))
        for block in self.blocks:
            x = run(block, x)
        return x


@pytest.mark.parametrize("more", [{}, {"layers_to_transform": [1]}, {"rank_pattern": {"0.up": 1}}])
def test_units_are_those_of_the_model_without_adapters(more):
    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    batch = {"x": np.ones((8, 4), np.float32)}
    settings = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config = Config(**settings, lora={"r": 2, **more})
    program = build_program(
        config, SharedTrace, loss, example_batch=batch, devices=jax.devices()[:1]
    )
    with program.set_mesh():
        rest = (program.model.variables, batch, jnp.int32(0), jnp.int32(0))
        assert str(program.traced_loss.trace(rest, train=True).units) == "3 x Block"


def without_scale(adapter, dims, weight, parts, original=adapting._factors):
    factors, _ = original(adapter, dims, weight, parts)
    return factors, 1.0


def with_unscaled_gradient_of_a(adapter, dims, weight, parts, original=adapting._factors):
    factors, scale = original(adapter, dims, weight, parts)
    a = factors.a / scale - lax.stop_gradient(factors.a / scale - factors.a)
    return factors._replace(a=a), scale


def of_the_neighbour(self, program, view, *args, original=adapting._Walk.with_parts):
    view = original(self, program, view, *args)
    parts = dict(view.parts)
    (parts["a"],) = program.splice(lambda a: jnp.roll(a, 1, 0), [parts["a"]], None)
    return view._replace(parts=tuple(parts.items()))


@pytest.mark.parametrize(
    "where, name, wrong",
    [
        (adapting, "_factors", without_scale),
        (adapting, "_factors", with_unscaled_gradient_of_a),
        (adapting._Walk, "with_parts", of_the_neighbour),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_wrong_adapter_is_seen(monkeypatch, where, name, wrong):
    function, shapes, _ = CASES["scanned"]
    monkeypatch.setattr(where, name, wrong)
    assert Adapted(function, shapes).differences() > 1e-2
