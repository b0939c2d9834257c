"""A bad model, loss, optimizer or mesh gives one error of our own that says what would do."""

from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ConfigError, JaxspeedError, ModelError, PlacementError
from tests.engine import tiny
from tests.engine.tiny import Linen, Listed, apply_pair, init_pair, squared_error
from tests.support.covering import covering


class NoParameters(nnx.Module):
    def __init__(self, rngs):
        pass

    def __call__(self, x):
        return x


class Integers(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jnp.zeros(3, jnp.int32))

    def __call__(self, x):
        return x


def breaks(*args):
    raise RuntimeError("the user's own words")


def start(model=Listed, loss_fn=squared_error, **given):
    config = tiny.config(**given.pop("config", {}))
    return jaxspeed.initialize(model, loss_fn, config, **given)


BAD_MODELS = {
    "a built module": (Listed(nnx.Rngs(0)), "built Listed; pass its factory"),
    "a number": (3, "model is a int"),
    "a family's name": ("gpt2", "model is a str"),
    "a factory of a dict": (lambda rngs: {"a": 1}, "returned a dict; it must return an nnx.Module"),
    "a factory of nothing": (lambda rngs: None, "returned a NoneType"),
    "a factory of a Linen module": (lambda rngs: Linen(), "returned a Linen"),
    "a factory without rngs": (lambda: Listed(nnx.Rngs(0)), r"called as factory\(rngs\)"),
    "a factory that raises": (breaks, "raised RuntimeError .*: the user's own words"),
    "a Linen class": (Linen, r"pass a Linen module: Linen\(...\)"),
    "three things": ((1, 2, 3), r"a pair \(init, apply\)"),
    "half a pair": ((init_pair, 3), r"a pair \(init, apply\)"),
    "a list as a pair": ([init_pair, apply_pair], "model is a list"),
    "an init without a key": ((dict, 3), r"a pair \(init, apply\)"),
    "an init that takes nothing": ((lambda: None, apply_pair), r"init\(key\) raised TypeError"),
    "an init that takes a batch": ((lambda key, x: {}, apply_pair), "example_batch=..."),
    "an empty pair": ((lambda key: {}, apply_pair), "no floating parameters"),
    "text among parameters": ((lambda key: {"a": "b"}, apply_pair), "init returned a str at a"),
    "floats among parameters": ((lambda key: {"a": [1.0]}, apply_pair), "a float at a/0"),
    "one path twice": (
        (lambda key: {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, apply_pair),
        "two leaves with one path",
    ),
    "no parameters": (NoParameters, "no floating parameters"),
    "integer parameters": (Integers, "no floating parameters"),
    "a Linen module without a batch": (Linen(), "example_batch=..."),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_the_error_of_a_bad_model_says_what_would_work(case):
    model, message = BAD_MODELS[case]
    with pytest.raises(ModelError, match=message):
        start(model)


def test_no_model_at_all_names_both_ways_to_give_one():
    with pytest.raises(ModelError, match=r"initialize\(model=.*family"):
        start(None)


@pytest.mark.parametrize("example", [{"x": "text"}, {"x": [1.0, 2.0]}, {}, 3])
def test_a_bad_example_batch_is_named_so(example):
    with pytest.raises(JaxspeedError, match="example_batch"):
        start(Linen(), example_batch=example)


def test_a_linen_loss_that_never_calls_the_model_is_refused():
    with pytest.raises(ModelError, match="never called the model"):
        start(Linen(), lambda model, batch: batch["x"].sum(), example_batch=tiny.batch())


def total(model, batch):
    return model(batch["x"]).sum()


BAD_LOSSES = {
    "a vector": (lambda m, b: m(b["x"])[:, 0], r"shape \(8,\); it must be a scalar"),
    "an integer": (lambda m, b: jnp.int32(3), "dtype int32; it must be floating"),
    "a truth value": (lambda m, b: total(m, b) > 0, "dtype bool"),
    "a complex number": (lambda m, b: total(m, b) + 1j, "dtype complex64"),
    "None": (lambda m, b: None, "returned None; it may return"),
    "text": (lambda m, b: "text", "returned a str"),
    "an object": (lambda m, b: object(), "returned a object"),
    "a dict": (lambda m, b: {"loss": total(m, b)}, "returned a dict"),
    "four numbers": (lambda m, b: (1.0, 2.0, 3.0, 4.0), "returned a tuple of 4"),
    "a vector as auxiliary term": (
        lambda m, b: (total(m, b), 8, m(b["x"])),
        r"an auxiliary term of shape \(8, 1\)",
    ),
    "a vector of weights": (lambda m, b: (total(m, b), m(b["x"])), "a weight of shape"),
    "a vector as metric": (lambda m, b: (total(m, b), {"a": m(b["x"])}), "'a' has shape"),
    "text as metric": (lambda m, b: (total(m, b), {"a": "text"}), "'a' is a str"),
    "None as metric": (lambda m, b: (total(m, b), {"a": None}), "'a' is None"),
    "a dict as metric": (lambda m, b: (total(m, b), {"a": {"b": 1.0}}), "'a' is a dict"),
    "a metric named loss": (lambda m, b: (total(m, b), {"loss": 1.0}), "give it another"),
    "not of the model": (lambda m, b: b["x"].sum(), "does not depend on any trained parameter"),
    "one argument": (lambda m: 0.0, "takes 1 positional argument"),
    "a Python float": (lambda m, b: float(total(m, b)), "raised ConcretizationTypeError"),
    "an if": (lambda m, b: total(m, b) if total(m, b) > 0 else 0.0, "boolean conversion"),
    "a missing entry": (lambda m, b: m(b["z"]).sum(), r"raised KeyError .*'z'.*\['x'\] float32"),
    "one that raises": (breaks, "raised RuntimeError .*: the user's own words"),
}


BY_TURNS = [(case, 3 * (i % 2)) for i, case in enumerate(BAD_LOSSES)]


@pytest.mark.parametrize(("case", "stage"), covering(product(BAD_LOSSES, [0, 3]), BY_TURNS))
def test_the_error_of_a_bad_loss_lists_what_it_may_return(case, stage):
    loss_fn, message = BAD_LOSSES[case]
    program = jaxspeed.train.build_program(
        jaxspeed.Config.load(tiny.config(stage)), Listed, loss_fn
    )
    with pytest.raises(ModelError, match=message):
        program.step.lower(program.state, program.abstract_batch(tiny.batch()))


@pytest.mark.parametrize("loss_fn", [None, 3, "mse"])
def test_a_loss_that_cannot_be_called_is_refused_at_the_start(loss_fn):
    with pytest.raises(ModelError, match="loss_fn is"):
        start(Listed, loss_fn)


def test_the_users_own_error_is_the_cause_and_its_line_is_named():
    with pytest.raises(ModelError, match=r"test_bad_models.py, line \d+") as told:
        start(breaks)
    assert isinstance(told.value.__cause__, RuntimeError)
    line = breaks.__code__.co_firstlineno + 1
    assert f"line {line}" in str(told.value)


BAD_OPTIMIZERS = {
    "twice": ({}, optax.sgd(0.1), "given twice"),
    "text": ({"optimizer": None}, "sgd", "takes an Optax transformation"),
    "a function": ({"optimizer": None}, optax.sgd, "takes an Optax transformation"),
    "a class": ({"optimizer": None}, nnx.Optimizer, "takes an Optax transformation"),
    "none": ({"optimizer": None}, None, "optimizer: missing"),
    "a schedule of the config": (
        {
            "optimizer": None,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
        },
        optax.sgd(0.1),
        "a schedule belongs to the optimizer",
    ),
}


@pytest.mark.parametrize("case", BAD_OPTIMIZERS)
def test_a_bad_optimizer_is_refused(case):
    config, optimizer, message = BAD_OPTIMIZERS[case]
    with pytest.raises(ConfigError, match=message):
        start(config=config, optimizer=optimizer)


def test_an_optimizer_that_breaks_is_named():
    def update(grads, state, params, *, value):  # which no one gives it
        return grads, state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ModelError, match=r"optimizer.update\(.*missing .* 'value'"):
        start(config={"optimizer": None}, optimizer=optimizer)


@pytest.mark.parametrize("trainable", [lambda path: False, nnx.LoRAParam, [nnx.LoRAParam], []])
def test_a_model_of_which_nothing_is_trained_is_refused(trainable):
    with pytest.raises(ModelError, match=r"no trained parameters .10 floating ones, all frozen"):
        start(trainable=trainable)


def test_a_pattern_of_no_parameter_names_the_nearest(caplog):
    with pytest.raises(ModelError, match=r"'haed/\*\*' covers no parameter.* nearest: head/"):
        start(trainable="haed/**")
    start(trainable=["input/**", "haed/**"])
    assert "'haed/**' covers no parameter of this model; nearest: head/" in caplog.text


@pytest.mark.parametrize("trainable", [3, [3], {"blocks": True}])
def test_a_trainable_that_is_no_filter_is_refused(trainable):
    with pytest.raises(ModelError, match="path patterns, a function of the path, or a Variable"):
        start(trainable=trainable)


BAD_DEVICES = {
    "empty": (lambda d: [], "devices is empty"),
    "twice": (lambda d: [d[0], d[1], d[0]], "cpu:0 2 times"),
    "a count": (lambda d: 4, "devices is a int"),
    "a name": (lambda d: "cpu", "devices is a str"),
    "names": (lambda d: ["cpu:0"], "devices holds a str"),
}


@pytest.mark.parametrize("case", BAD_DEVICES)
def test_bad_devices_are_refused(case):
    devices, message = BAD_DEVICES[case]
    with pytest.raises(PlacementError, match=message):
        start(devices=devices(jax.devices()))


BAD_MESHES = {
    "three of eight": ({"data": 3}, PlacementError, r"exactly 3 devices.* 8.*devices\(\)\[:3\]"),
    "two of eight": ({"data": 2}, PlacementError, r"exactly 2 devices, but there are 8"),
    "sixteen of eight": ({"data": 8, "tensor": 2}, PlacementError, "16 devices, but there are 8"),
    "tensor too large": ({"tensor": 16}, PlacementError, "multiple of 16 devices .16, 32, 48"),
    "tensor that does not divide": ({"tensor": 3}, PlacementError, "multiple of 3 devices"),
    "two free axes": ({"data": -1, "tensor": -1}, ConfigError, "At most one axis may be -1"),
    "zero": ({"data": 0}, ConfigError, "mesh.data: found 0"),
    "negative": ({"data": -2}, ConfigError, "mesh.data: found -2"),
    "half": ({"data": 1.5}, ConfigError, "mesh.data: found 1.5"),
    "text": ({"data": "two"}, ConfigError, "integer number of devices"),
    "null": ({"data": None}, ConfigError, "mesh.data: found null"),
    "a list": ([1, 2], ConfigError, "mesh: found the list"),
    "an unknown axis": ({"dta": 2}, ConfigError, 'Did you mean "data"'),
    "stages that do not divide": ({"pipe": 3}, PlacementError, "multiple of 3 devices"),
    "seq that does not divide": ({"seq": 3}, PlacementError, "multiple of 3 devices"),
    "expert": (
        {"expert": 2},
        ConfigError,
        "mesh.expert is 2, and no parameter has a dim",
    ),
}


@pytest.mark.parametrize("case", BAD_MESHES)
def test_the_error_of_a_bad_mesh_says_what_would_fit(case):
    mesh, kind, message = BAD_MESHES[case]
    with pytest.raises(kind, match=message):
        start(config={"mesh": mesh})


def test_a_batch_triple_that_does_not_hold_says_the_equation_with_the_device_count():
    triple = {"train_batch_size": 12, "gradient_accumulation_steps": 1}
    with pytest.raises(ConfigError, match=r"12 = .* 1 x .* 1 x data-parallel size 8"):
        start(config=triple)


def test_too_few_micro_batches_for_a_pipeline_say_how_many_would_do():
    few = {"mesh": {"pipe": 4}, "gradient_accumulation_steps": 2}
    message = r"2 micro-batches for 4 pipeline stages.* gradient_accumulation_steps 4"
    with pytest.raises(ConfigError, match=message):
        start(config=few)


def test_numpy_arrays_do_as_parameters_of_a_pair():
    def init(key):
        return {"w": np.ones((tiny.FEATURES, 1), np.float32)}

    engine = start((init, lambda params, x: x @ params["w"]))
    assert np.isfinite(engine.train_batch(tiny.batch())["loss"])


def test_a_parameter_may_be_named_seed():
    def init(key):
        return {"seed": jnp.ones((tiny.FEATURES, 1))}

    engine = start((init, lambda params, x: x @ params["seed"]))
    before = np.asarray(engine.parameters["seed"])
    engine.train_batch(tiny.batch())
    assert before.shape == (tiny.FEATURES, 1)
    assert (np.asarray(engine.parameters["seed"]) != before).any()


def test_a_linen_parameter_may_be_named_seed():
    class Seeded(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("seed", nn.initializers.ones, (tiny.FEATURES, 1))

    engine = start(Seeded(), example_batch=tiny.batch())
    assert np.isfinite(engine.train_batch(tiny.batch())["loss"])


BAD_KEPT = {
    "text in a Variable": (lambda: nnx.Param("text"), "stores a str at kept"),
    "nothing in a Variable": (lambda: nnx.Param(None), "stores a NoneType at kept"),
    "a list in a Variable": (lambda: nnx.Param([1.0]), "stores a list at kept"),
    "an array of text": (lambda: np.array(["text"]), "stores a <U4 at kept"),
    "a list of NumPy arrays": (lambda: [np.ones(2)], "Found data on value of type"),
}


@pytest.mark.parametrize("case", BAD_KEPT)
def test_what_a_module_may_not_keep_is_named_with_its_place(case):
    kept, message = BAD_KEPT[case]

    class Keeps(Listed):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.kept = kept()

    with pytest.raises(ModelError, match=message):
        start(Keeps)


def test_a_parameter_may_be_a_python_number():
    class Scaled(Listed):
        def __init__(self, rngs):
            super().__init__(rngs, layers=1)
            self.scale = nnx.Param(2.0)

        def __call__(self, x):
            return super().__call__(x) * self.scale[...]

    engine = start(Scaled)
    engine.train_batch(tiny.batch())
    assert float(engine.parameters["scale"]) != 2.0
