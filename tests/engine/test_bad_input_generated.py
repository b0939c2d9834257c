"""Whatever is given as mesh, batch or model: it works, or JaxspeedError says why. Never another."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import event, given, settings
from hypothesis import strategies as st

import jaxspeed
from jaxspeed import JaxspeedError
from jaxspeed.axes import AXES
from jaxspeed.placement.mesh import build_mesh
from tests.engine import tiny
from tests.engine.tiny import FEATURES, HIDDEN, Linen, Listed, squared_error
from tests.support.covering import examples


def outcome(call):
    """What became of it; any error but ours fails the test by itself."""
    try:
        result = call()
    except JaxspeedError as error:
        assert len(str(error)) > 20
        assert "Traceback" not in str(error)
        event(f"refused: {type(error).__name__}")
        return None
    event("works")
    return result


sizes = st.one_of(st.integers(-3, 17), st.sampled_from([1, 2, 4, 8, -1]), st.just(2.0))
odd = st.one_of(st.none(), st.text(max_size=3), st.booleans(), st.just(float("nan")), st.just([]))
meshes = st.dictionaries(
    st.one_of(st.sampled_from(list(AXES)), st.text(max_size=4)), st.one_of(sizes, odd), max_size=4
)


@settings(max_examples=150)
@given(mesh=meshes, count=st.integers(1, 8))
def test_any_mesh_fits_its_devices_or_is_refused(mesh, count):
    given = tiny.config(mesh=mesh)
    config = outcome(lambda: jaxspeed.Config.load(given))
    if config is None:
        return
    built = outcome(lambda: build_mesh(config.mesh.model_dump(), jax.devices()[:count]))
    if built is not None:
        assert built.size == math.prod(built.shape.values()) == count
        named = {axis: size for axis, size in mesh.items() if not axis.startswith("_")}  # comments
        assert all(size in (-1, built.shape[axis]) for axis, size in named.items())


@settings(max_examples=150)
@given(
    axes=st.dictionaries(st.sampled_from(("data", "replica", "tensor")), sizes, max_size=3),
    count=st.integers(1, 8),
)
def test_a_refused_mesh_would_be_accepted_as_its_message_says(axes, count):
    """The mesh of the message's own suggestion fits."""
    config = outcome(lambda: jaxspeed.Config.load(tiny.config(mesh=axes)))
    if config is None:
        return
    asked = config.mesh.model_dump()
    try:
        build_mesh(asked, jax.devices()[:count])
    except JaxspeedError as error:
        fixed = math.prod(n for n in asked.values() if n != -1)
        assert f"there are {count}" in str(error)
        if fixed <= len(jax.devices()):
            build_mesh(asked, jax.devices()[:fixed])


shapes = st.lists(st.sampled_from([0, 1, 4, 7, FEATURES, 16]), max_size=3).map(tuple)
kinds = ["f4", "f8", "f2", "i4", "u1", "?", "c8", "O", "U2", "M8[s]", "m8[s]", "V4"]
arrays = st.builds(np.zeros, shapes, st.sampled_from(kinds))
entries = st.one_of(arrays, st.none(), st.text(max_size=2), st.floats(), st.integers(), st.binary())
keys = st.one_of(st.sampled_from("xyz"), st.integers(0, 1))
batches = st.one_of(
    entries,
    st.dictionaries(keys, entries, max_size=3),
    st.fixed_dictionaries({"x": entries, "y": entries}),
    st.lists(entries, max_size=3),
)


@pytest.fixture(scope="module")
def engine():
    return tiny.engine()


@pytest.mark.parametrize("call", ["train_batch", "eval_batch"])
@settings(max_examples=60)
@given(batch=batches)
def test_any_batch_is_taken_or_refused(engine, call, batch):
    metrics = outcome(lambda: getattr(engine, call)(batch))
    if metrics is not None:
        assert jnp.shape(metrics["loss"]) == ()


class Odd(nnx.Module):
    """A module that may keep what a module should not."""

    def __init__(self, rngs, kept, shape, dtype):
        self.kept = kept
        self.weight = nnx.Param(jnp.zeros(shape, dtype))

    def __call__(self, x):
        return x @ self.weight[...]


def odd_module(kept, shape, dtype):
    return lambda rngs: Odd(rngs, kept(), shape, dtype)


BUILT = Listed(nnx.Rngs(0))
kept = st.sampled_from(
    [
        lambda: None,
        lambda: "text",
        lambda: jnp.ones(2),
        lambda: np.ones(2),
        lambda: np.array(["text"]),
        lambda: [jnp.ones(2)],
        lambda: {"a": np.ones(2)},
        lambda: BUILT,
        lambda: nnx.Param("text"),
        lambda: nnx.Param(None),
        lambda: nnx.Param(1.0),
        lambda: nnx.Param([1.0]),
        object,
    ]
)
modules = st.builds(
    odd_module, kept, shapes, st.sampled_from([jnp.float32, jnp.int32, jnp.complex64, jnp.bfloat16])
)
trees = st.recursive(
    st.one_of(arrays, st.floats(), st.text(max_size=2), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "b/c"]), inner)
    ),
    max_leaves=3,
)
applies = st.sampled_from(
    [lambda params, x: x @ params["a"], lambda params, x: x, lambda params: 0.0]
)
pairs = st.tuples(trees.map(lambda tree: lambda key: tree), applies)
models = st.one_of(
    modules,
    pairs,
    st.sampled_from([BUILT, lambda rngs: BUILT, Linen, Linen(), nnx.Module, nnx.Rngs, jnp.sin]),
    entries,
)
losses = st.sampled_from(
    [
        squared_error,
        lambda model, batch: model(batch["x"]).sum(),
        lambda model, batch: (model(batch["x"]).sum(), {"a": 1}),
        lambda model, batch: model,
        lambda model, batch: model(batch["x"]).tolist(),
        lambda model: model,
        None,
        0.0,
    ]
)


@settings(max_examples=60)
@given(model=models, loss_fn=losses, stage=st.integers(0, 3), example=st.sampled_from([None, 1]))
def test_any_model_is_traced_or_refused(model, loss_fn, stage, example):
    """As far as the compiler: that is where a bad model would show, if nothing has seen it."""
    good = tiny.batch()

    def lowered():
        program = jaxspeed.train.build_program(
            jaxspeed.Config.load(tiny.config(stage)),
            model,
            loss_fn,
            example_batch=good if example else None,
        )
        jax.eval_shape(program.init, 0)
        return program.step.lower(program.state, program.abstract_batch(good))

    outcome(lowered)


@settings(max_examples=examples(12, 40))
@given(
    rows=st.sampled_from([1, 3, FEATURES, HIDDEN]),
    columns=st.sampled_from([1, 3, FEATURES]),
    stage=st.integers(0, 3),
)
def test_a_good_model_of_any_shape_is_never_refused(rows, columns, stage):
    """The other side: what is right in NumPy is right here, whether or not dims divide."""

    def init(key):
        return {"a": jnp.ones((FEATURES, rows)), "b": jnp.ones((rows, columns))}

    def apply(params, x):
        return x @ params["a"] @ params["b"]

    program = jaxspeed.train.build_program(
        jaxspeed.Config.load(tiny.config(stage)), (init, apply), squared_error
    )
    program.step.lower(program.state, program.abstract_batch(tiny.batch()))
