"""Automatic mixed precision of traced losses, operation by operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxspeed
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.ops import attention, moe
from jaxspeed.traced_loss.autocast import Autocast, autocast_function
from tests.engine import tiny
from tests.support import reference
from tests.support.strict_models import CASES
from tests.support.topology import run_on_topology

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
LR, STEPS = 1e-2, 20
TOLERANCE = 2e-2  # relative, of a loss: a few of bf16's eps, 2^-8


def engine_of(case, **config):
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": LR}},
        "gradient_clipping": 0,
        **config,
    }
    return jaxspeed.initialize(
        config=config, model=case.model, loss_fn=case.loss, example_batch=case.batch
    )


def losses_of(engine, case, steps=STEPS):
    return [float(engine.train_batch(case.batch)["loss"]) for _ in range(steps)]


@functools.cache
def plain_losses(name):
    """The losses of plain Optax in fp32."""
    case = CASES[name]
    if isinstance(case.model, type):
        model = reference.NnxReference(case.model)
    else:
        model = reference.LinenReference(case.model, case.batch["x"])
    return reference.train(model, case.loss, [case.batch] * STEPS, optax.adam(LR)).losses


# -- models that bf16 breaks -----------------------------------------------------------------------


# That of a decoder's cache trains with the settings.
DEFAULT = ("strict operations", "stage 1, accumulation")


def some(names):
    """Parameters of which a default run takes a covering set."""
    return [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", some(CASES))
def test_a_model_with_dtypes_of_its_own_trains_as_in_fp32(name):
    found = losses_of(engine_of(CASES[name], **AUTOCAST), CASES[name])
    np.testing.assert_allclose(found, plain_losses(name), rtol=TOLERANCE, atol=1e-3)
    assert found[-1] < found[0]


@pytest.mark.default_cases("an LSTM's carry", "batch norm in a scan", "strict operations")
@pytest.mark.parametrize("name", CASES)
def test_under_plain_bf16_it_fails_and_the_error_has_the_lines_to_write(name):
    with pytest.raises(ModelError) as error:
        losses_of(engine_of(CASES[name], bf16={"enabled": True}), CASES[name], 1)
    assert '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}' in str(error.value)


def test_an_error_in_any_dtype_does_not_propose_autocast():
    def broken(model, batch):
        return CASES["an LSTM's carry"].loss(model, {**batch, "x": batch["x"][:, :, 1:]})

    case = CASES["an LSTM's carry"]._replace(loss=broken)
    with pytest.raises(ModelError) as error:
        losses_of(engine_of(case, bf16={"enabled": True}), case, 1)
    assert "autocast" not in str(error.value)


SETTINGS = {
    "stage 1, accumulation": {
        "zero_optimization": {"stage": 1},
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "mesh": {"data": 4, "replica": 1, "tensor": 2},
    },
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage 3, remat": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "parallel": {"remat": "full", "units": ["Linear"]},
    },
    "offloaded optimizer": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("setting", some(SETTINGS))
def test_it_composes_with_sharding_accumulation_remat_and_offload(setting):
    case = CASES["a decoder's cache"]
    engine = engine_of(case, **AUTOCAST, **SETTINGS[setting])
    before = float(engine.eval_batch(case.batch)["loss"])
    report = engine.check(case.batch)
    assert report.ok, report
    found = losses_of(engine, case, 5)
    np.testing.assert_allclose(found, plain_losses("a decoder's cache")[:5], rtol=TOLERANCE)
    np.testing.assert_allclose(before, found[0], rtol=1e-3)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.sampled
def test_it_composes_with_pipeline_stages():
    case = CASES["batch norm in a scan"]._replace(model=Stack)
    pipe = {"mesh": {"data": 4, "pipe": 2}, "gradient_accumulation_steps": 2}
    engine = engine_of(case, **AUTOCAST, **pipe, zero_optimization={"stage": 1})
    plain = reference.train(
        reference.NnxReference(Stack), case.loss, [case.batch] * 5, optax.adam(LR)
    )
    np.testing.assert_allclose(losses_of(engine, case, 5), plain.losses, rtol=TOLERANCE)
    assert products_of(traced(engine, case)) == {(BF16, BF16, BF16)}


def test_masters_and_moments_stay_fp32():
    case = CASES["an LSTM's carry"]
    state = engine_of(case, **AUTOCAST).state
    real = [x for x in jax.tree.leaves((state.params, state.master, state.opt)) if x.ndim]
    assert {x.dtype for x in real} == {FP32}


def test_fp16_scales_the_loss_dynamically():
    case = CASES["strict operations"]
    engine = engine_of(case, torch_autocast={"enabled": True, "dtype": "float16"})
    large = {**case.batch, "y": case.batch["y"] * 1e4}
    first = float(engine.state.loss_scale.scale)
    for _ in range(3):
        metrics = engine.train_batch(large)
    assert first == 2.0**16
    assert int(metrics["skipped_steps"]) > 0 and float(engine.state.loss_scale.scale) < first


# -- the compiled program --------------------------------------------------------------------------


def products_of(jaxpr):
    """The dtypes of each product's (operand, operand, result), at any depth."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.add(tuple(v.aval.dtype for v in (*eqn.invars, *eqn.outvars)))
        for body in bodies(eqn):
            found |= products_of(body.jaxpr)
    return found


def traced(engine, case):
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch)
    index = jnp.int32(0)
    rest = (dict(engine.program.model.variables), batch, index, index)
    return engine.program.traced_loss.trace(rest, train=True).closed.jaxpr


@pytest.mark.default_cases(
    "an LSTM's carry", "a decoder's cache", "batch norm in a scan", "strict operations"
)
@pytest.mark.parametrize("name", CASES)
def test_every_product_of_both_passes_is_in_the_low_dtype(name):
    engine = engine_of(CASES[name], **AUTOCAST)
    batch = engine.program.abstract_batch(CASES[name].batch)
    step = engine.program.step.trace(engine.program.state, batch).jaxpr
    assert products_of(step.jaxpr) == {(BF16, BF16, BF16)}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_tpu_program_multiplies_in_the_low_dtype(name):
    operands = run_on_topology("tests.system.tpu:autocast", "v5e:2x4", name=name)
    assert operands and {tuple(pair) for pair in operands} == {("bf16", "bf16")}


def test_stage_3_gathers_and_reduces_safe_modules_in_the_low_dtype(caplog):
    case = CASES["a decoder's cache"]
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    low = {"qkv/kernel", "qkv/bias", "out/kernel", "out/bias", "head/kernel"}

    def read_low(modules):
        autocast = {**AUTOCAST["torch_autocast"], "lower_precision_safe_modules": modules}
        engine = engine_of(case, torch_autocast=autocast, **zero)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch)
        rest = (dict(engine.program.model.variables), batch, jnp.int32(0), jnp.int32(0))
        program = engine.program.traced_loss.trace(rest, train=True)
        return {path for path, v in program.parameters.items() if v.aval.dtype == BF16}

    assert read_low(None) == low  # norms and the embedding are read in fp32
    assert read_low(["torch.nn.Linear"]) == low
    assert read_low(["head"]) == {"head/kernel"}
    with caplog.at_level("WARNING", logger="jaxspeed"):
        assert read_low(["torch.nn.Conv2d"]) == set()
    assert "calls no module of torch.nn.Conv2d" in caplog.text


def test_safe_modules_that_the_model_does_not_have_are_named(caplog):
    case = CASES["a decoder's cache"]

    def trained(*modules):
        autocast = {**AUTOCAST["torch_autocast"], "lower_precision_safe_modules": list(modules)}
        return losses_of(engine_of(case, torch_autocast=autocast), case, 1)

    with pytest.raises(ConfigError, match=r"'haed' is no class or path .* nearest: head"):
        trained("haed")
    with caplog.at_level("WARNING", logger="jaxspeed"):
        trained("head", "Linaer", "torch.nn.Conv2d")
    assert caplog.text.count("'Linaer' is no class or path") == 1
    assert "nearest: Linear" in caplog.text and "Conv2d" not in caplog.text


# -- the table -------------------------------------------------------------------------------------


def rewritten(function, *args, full=frozenset()):
    run = autocast_function(
        lambda params, *args: function(*params.values(), *args), Autocast(BF16, full)
    )
    return jax.make_jaxpr(run)(*args)


def dtypes(function, *arrays, full=frozenset(), params=None):
    """{primitive: dtype of its result} of a rewritten function of fp32 arrays."""
    closed = rewritten(function, params or {}, *arrays, full=full)

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != "convert_element_type":
                yield eqn.primitive.name, eqn.outvars[0].aval.dtype
            for body in bodies(eqn):
                yield from walk(body.jaxpr)

    return dict(walk(closed.jaxpr)), closed


X = jnp.ones((4, 4))


def test_products_are_lowered_and_results_keep_their_type():
    found, closed = dtypes(lambda x: x @ x, X)
    assert found["dot_general"] == BF16
    assert closed.out_avals[0].dtype == FP32


@pytest.mark.parametrize("function", [jnp.tanh, jnp.transpose, lambda y: y + y, jax.nn.sigmoid])
def test_arithmetic_of_a_product_stays_low(function):
    found, _ = dtypes(lambda x: function(x @ x), X)
    assert set(found.values()) == {BF16}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jnp.exp, "exp"),
        (jnp.sum, "reduce_sum"),
        (jnp.square, "square"),
        (lambda y: jnp.cumsum(y, 0), "cumsum"),
        (jnp.log, "log"),
        (jax.nn.softmax, "sub"),  # the maximum is subtracted in fp32
    ],
)
def test_sums_and_steep_functions_keep_fp32(function, name):
    found, _ = dtypes(lambda x: function(x @ x), X)
    assert found["dot_general"] == BF16 and found[name] == FP32


def test_mixed_operands_are_promoted():
    found, _ = dtypes(lambda x: x @ x + x, X)
    assert found["add"] == FP32


def test_a_bias_does_not_widen_its_result_but_a_table_does():
    vector, _ = dtypes(lambda b, x: x @ x + b, X, params={"b": X[0]})
    table, _ = dtypes(lambda b, x: x @ x + b, X, params={"b": X})
    assert vector["add"] == BF16 and table["add"] == FP32


def test_products_of_weights_in_full_precision_keep_fp32():
    found, _ = dtypes(lambda w, x: x @ w.T, X, params={"w": X}, full=frozenset({"w"}))
    assert found["dot_general"] == FP32


def test_a_product_that_asks_for_the_highest_precision_keeps_fp32():
    found, _ = dtypes(lambda x: jnp.matmul(x, x, precision=lax.Precision.HIGHEST), X)
    assert found["dot_general"] == FP32


@pytest.mark.parametrize("of_all", [None, "default", "high", "highest"])
def test_a_precision_that_is_set_for_all_products_lowers_them(of_all):
    """It is no wish of the model's; one above it, of a single product, is."""
    with jax.default_matmul_precision(of_all):
        found, _ = dtypes(lambda x: x @ x, X)
        exact, _ = dtypes(lambda x: jnp.matmul(x, x, precision=lax.Precision.HIGHEST), X)
    assert found["dot_general"] == BF16
    assert exact["dot_general"] == (BF16 if of_all == "highest" else FP32)


@pytest.mark.default_cases(
    "None-sigmoid", "None-softmax_of_top", "high-softmax", "high-sigmoid", "high-softmax_of_top"
)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_top"])
@pytest.mark.parametrize("of_all", [None, "high"])
def test_routers_are_computed_in_fp32(scores, of_all):
    """Bitwise as without autocast, from tokens in the low dtype."""
    x, weight = jax.random.normal(jax.random.key(0), (2, 4, 8, 8))

    def route(parameters, x):
        tokens = x @ jnp.eye(8)  # a product of exact results, in bf16
        return moe.route(tokens, parameters["w"], k=2, scores=scores, renormalize=True)

    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    with jax.default_matmul_precision(of_all):
        found = autocast_function(route, Autocast(BF16))({"w": weight[0]}, x)
        wanted = route({"w": weight[0]}, x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_model_all_of_whose_products_keep_fp32_is_noted(caplog):
    def made(precision):
        def factory(rngs):
            return nnx.Linear(tiny.FEATURES, 1, precision=precision, rngs=rngs)

        tiny.engine(factory, torch_autocast={"enabled": True, "dtype": "bfloat16"}).compiled(
            tiny.batch()
        )
        return "torch_autocast has no effect" in caplog.text

    assert not made(None)
    assert made(lax.Precision.HIGHEST)


def test_products_of_other_dtypes_are_as_they_are():
    with jax.enable_x64(True):
        found, _ = dtypes(lambda x: x @ x, X.astype(jnp.float64))
        assert found["dot_general"] == jnp.float64


KEY = jax.random.key(0)


def noise(key):
    """Drawn in a scan, as an RNN that samples does."""
    return jax.random.normal(key, X.shape)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, _: (c @ c, c.sum()), x, None, 3),
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x),
        lambda x: lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, x),
        lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x))(x),
        lambda x: jax.jit(lambda x: x @ x)(x),
        lambda x: lax.scan(lambda c, key: (c, c @ c * noise(key)), x, jax.random.split(KEY, 3)),
    ],
)
def test_inner_programs_keep_the_types_of_their_boundaries(function):
    closed = rewritten(function, {}, X)
    assert closed.out_avals == jax.make_jaxpr(function)(X).out_avals
    found = jax.tree.leaves(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, 0.3 * X))
    for ours, plain in zip(found, jax.tree.leaves(function(0.3 * X)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=3e-2)


def test_both_passes_of_a_custom_derivative_are_lowered():
    @jax.custom_vjp
    def product(x, w, n):
        return x @ w

    def forward(x, w, n):
        return x @ w, (x, w)

    def backward(saved, d):  # twice the gradient, to see that it is this function
        x, w = saved
        return 2 * (d @ w.T), 2 * (x.T @ d), None

    product.defvjp(forward, backward)
    run = autocast_function(lambda p, x: product(x, p["w"], 3).sum(), Autocast(BF16))
    grads = jax.grad(run)
    assert products_of(jax.make_jaxpr(grads)({"w": X}, X).jaxpr) == {(BF16, BF16, BF16)}
    np.testing.assert_allclose(grads({"w": X}, X)["w"], 2 * 4 * X, rtol=1e-2)


def test_attention_takes_low_operands():
    q = jax.random.normal(jax.random.key(0), (2, 8, 2, 4))

    def loss(model, batch):
        return model(batch["x"]).astype(FP32).sum()

    case = CASES["an LSTM's carry"]._replace(
        model=Attention, loss=loss, batch={"x": np.tile(q, (4, 1, 1, 1))}
    )
    jaxpr = traced(engine_of(case, **AUTOCAST), case)
    assert products_of(jaxpr) == {(BF16, BF16, BF16), (BF16, BF16, FP32)}


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        assert x.dtype == FP32
        out = attention(x * self.scale, x, x)
        assert out.dtype == FP32
        return out
