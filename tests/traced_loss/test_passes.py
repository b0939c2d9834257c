"""A pass that is not the package's: it acts alike on every mesh, and later passes respect it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

import jaxspeed
from jaxspeed.jaxpr.rewriter import Rewriter
from jaxspeed.jaxpr.traverse import as_product, bodies, product_of
from jaxspeed.jaxpr.weight_uses import joint_origin, weight_uses
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.tensor_parallel import REPLICATED
from jaxspeed.traced_loss import passes
from jaxspeed.traced_loss.loss_program import LossProgram
from tests.support.covering import covering

WIDTH, HIDDEN, LAYERS, SAMPLES, LR = 8, 16, 4, 32, 0.005
FACTOR = 1.75


def init(key, hidden=(HIDDEN,) * LAYERS):
    keys = jax.random.split(key, 2 * LAYERS)
    shapes = [shape for size in hidden for shape in ((WIDTH, size), (size, WIDTH))]
    made = iter([jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)])
    layers = [{"up": next(made), "down": next(made)} for _ in range(LAYERS)]
    return {"layers": layers, "out": jnp.ones((WIDTH, 1))}


def layer(p, x, factor=1.0):
    return x + jnp.tanh(x @ p["up"]) @ p["down"] * factor


def apply(params, x):
    for p in params["layers"]:
        x = jaxspeed.unit(layer)(p, x)
    return x @ params["out"]


def loss(model, batch):
    error = jnp.square(model(batch["x"])[:, 0] - batch["y"])
    return error.sum(), jnp.asarray(error.size, error.dtype)


def batch(seed):
    x = np.random.default_rng(seed).normal(size=(SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def scaled(matmul):
    """A function with a derivative of its own: passes cannot see what it is."""

    @jax.custom_vjp
    def function(a, b):
        return FACTOR * matmul(a, b)

    def backward(operands, ct):
        return jax.vjp(matmul, *operands)[1](FACTOR * ct)

    function.defvjp(lambda a, b: (function(a, b), (a, b)), backward)
    return function


class ScaleDown(Rewriter):
    """Scales the products of the weights named `down`; a state is a value's weights."""

    def __init__(self):
        super().__init__()
        self.rules = {"dot_general": self.product}

    def constant(self, atom):
        return frozenset()

    def derived(self, states, out):
        return joint_origin(states)

    def product(self, program, eqn):
        of_weights = [program.state(v) for v in eqn.invars]
        if any(path.endswith("down") for paths in of_weights if paths for path in paths):
            function = as_product(scaled(lambda a, b: eqn.primitive.bind(a, b, **eqn.params)))
            operands = [program.atom(v) for v in eqn.invars]
            program.replace(eqn.outvars, program.splice(function, operands, eqn))
        else:
            program.emit(eqn)
        return [None]


def scale_down(program, context):
    names = {v: frozenset([path]) for path, v in program.parameters.items()}
    jaxpr = program.closed.jaxpr
    return program.rewritten(ScaleDown().run(jaxpr, [names.get(v) for v in jaxpr.invars]))


@pytest.fixture
def with_the_pass(monkeypatch):
    monkeypatch.setattr(passes, "AFTER_SPLIT", (scale_down, *passes.AFTER_SPLIT))


def unlike(key):
    """Layers of several sizes, which are unlike stages."""
    return init(key, range(HIDDEN, HIDDEN + LAYERS))


def losses_of(factor, init=init, steps=3):
    """Plain Optax on one device, the factor in the model."""

    def forward(params, batch):
        x = batch["x"]
        for p in params["layers"]:
            x = layer(p, x, factor)
        total, weight = loss(lambda x: x, {**batch, "x": x @ params["out"]})
        return total / weight

    optimizer = optax.sgd(LR)
    params = jax.jit(init)(jax.random.key(3))
    state, found = optimizer.init(params), []
    for seed in range(steps):
        value, grads = jax.jit(jax.value_and_grad(forward))(params, batch(seed))
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        found.append(float(value))
    return found


def engine(stage, accumulation=1, init=init, **sections):
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": 3},
        **sections,
    }
    return jaxspeed.initialize((init, apply), loss, config, optax.sgd(LR), example_batch=batch(0))


MESHES = {
    "data": {},
    "tensor 2": {"mesh": {"tensor": 2}},
    "pipe 2": {"mesh": {"pipe": 2}, "accumulation": 4},
    "pipe 2, tensor 2": {"mesh": {"pipe": 2, "tensor": 2}, "accumulation": 4},
    "pipe 2, unlike": {"mesh": {"pipe": 2}, "accumulation": 4, "init": unlike},
    "remat": {"parallel": {"remat": "full"}},
}
POINTS = [p for p in itertools.product(range(4), MESHES) if p[0] < 2 or "unlike" not in p[1]]
ALWAYS = [(3, "data"), (1, "tensor 2"), (0, "pipe 2"), (1, "pipe 2, unlike")]


@pytest.mark.default_cases("3-data")
@pytest.mark.parametrize(("stage", "mesh"), covering(POINTS, ALWAYS))
def test_a_pass_acts_alike_on_every_mesh(stage, mesh, with_the_pass):
    run, model = engine(stage, **MESHES[mesh]), MESHES[mesh].get("init", init)
    ours = [float(run.train_batch(batch(seed))["loss"]) for seed in range(3)]
    np.testing.assert_allclose(ours, losses_of(FACTOR, model), rtol=1e-5)
    assert abs(ours[-1] - losses_of(1.0, model)[-1]) > 0.01 * ours[-1]


def program_of_a_layer():
    params = {"up": jnp.ones((WIDTH, HIDDEN)), "down": jnp.ones((HIDDEN, WIDTH))}
    closed = jax.make_jaxpr(layer)(params, jnp.ones((SAMPLES, WIDTH)))
    down, up, x = closed.jaxpr.invars
    return LossProgram(closed, {"up": up, "down": down}, [x], None)


def count(jaxpr, name):
    inner = (body.jaxpr for eqn in jaxpr.eqns for body in bodies(eqn))
    return sum(e.primitive.name == name for e in jaxpr.eqns) + sum(count(j, name) for j in inner)


def test_a_marked_product_is_one_to_later_passes():
    plain, mesh = program_of_a_layer(), build_mesh({"data": 4, "tensor": 2})
    specs = {"up": P(None, "tensor"), "down": P("tensor", None)}
    context = passes.PartContext(mesh, specs, REPLICATED, None)
    marked = scale_down(plain, context)
    assert count(marked.closed.jaxpr, "custom_vjp_call") == 1
    found = [passes.boundaries(program, context).closed.jaxpr for program in (plain, marked)]
    constraints = [count(jaxpr, "sharding_constraint") for jaxpr in found]
    assert constraints[0] == constraints[1] > 0
    of_weights = [
        [(use.weights, use.is_product) for use in weight_uses(p.closed.jaxpr, names_of(p))[0]]
        for p in (plain, marked)
    ]
    assert of_weights[0] == of_weights[1] == [({"up"}, True), ({"down"}, True)]


def names_of(program):
    return {v: path for path, v in program.parameters.items()}


# -- the rewriter ----------------------------------------------------------------------------------


class SinToCos(Rewriter[None]):
    def __init__(self):
        super().__init__()
        self.rules = {"sin": self.sin}

    def sin(self, program, eqn):
        program.replace(
            eqn.outvars, program.splice(jnp.cos, [program.atom(v) for v in eqn.invars], eqn)
        )
        return [None]


class InBothPasses(SinToCos):
    custom_derivatives = True


def with_own_derivative(x):
    f = jax.custom_vjp(lambda x: jnp.sin(x) * 2)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * jnp.sin(x),))
    return f(x)


INNER = {
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), c), x, length=3),
    "jit": lambda f: lambda x: jax.jit(f)(x) + jax.jit(f)(2 * x),
    "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: 2 * f(x), x),
    "while": lambda f: lambda x: jax.lax.while_loop(lambda x: x[0] < 0.5, lambda x: f(x) + 1, x),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("name", INNER)
def test_rules_apply_in_inner_programs(name):
    x = jnp.linspace(-1.0, 1.0, 3)
    closed = jax.make_jaxpr(INNER[name](jnp.sin))(x)
    made = jex.jaxpr_as_fun(jex.ClosedJaxpr(SinToCos().run(closed.jaxpr), closed.consts))(x)
    wanted = jax.tree.leaves(INNER[name](jnp.cos)(x))
    for ours, plain in zip(made, wanted, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_a_function_that_is_called_twice_is_rewritten_once():
    one = jax.jit(jnp.sin)
    jaxpr = SinToCos().run(jax.make_jaxpr(lambda x: one(x) + one(2 * x))(1.0).jaxpr)
    first, second = (e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "jit")
    assert first is second and "cos" in str(first) and "sin" not in str(first)


def test_what_no_rule_changes_is_the_same_object():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.tanh)(x))(1.0).jaxpr
    assert SinToCos().run(jaxpr) is jaxpr


@pytest.mark.parametrize(("rewriter", "value", "slope"), [
    (SinToCos, 2 * np.sin(1), np.sin(1)),
    (InBothPasses, 2 * np.cos(1), np.cos(1)),
])  # fmt: skip
def test_custom_derivatives_are_entered_where_a_pass_says_so(rewriter, value, slope):
    closed = jax.make_jaxpr(with_own_derivative)(1.0)
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(rewriter().run(closed.jaxpr), closed.consts))
    ours = jax.value_and_grad(lambda x: run(x)[0])(1.0)
    np.testing.assert_allclose(ours, (value, slope), rtol=1e-6)


def test_new_equations_keep_scopes():
    def function(x):
        with jax.named_scope("block"):
            return jax.jit(lambda x: jnp.sin(x))(jnp.sin(x))

    jaxpr = SinToCos().run(jax.make_jaxpr(function)(1.0).jaxpr)
    assert [str(e.source_info.name_stack) for e in jaxpr.eqns] == ["block", "block"]


def test_a_product_within_a_mark_is_found():
    closed = jax.make_jaxpr(as_product(scaled(jnp.matmul)))(jnp.ones((2, 3)), jnp.ones((3, 4)))
    (eqn,) = closed.jaxpr.eqns
    product = product_of(eqn)
    assert product is not None and product.primitive.name == "dot_general"
    assert product_of(jax.make_jaxpr(jax.jit(jnp.matmul))(*closed.in_avals).jaxpr.eqns[0]) is None
