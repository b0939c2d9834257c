"""Initialization in small programs equals one program, and a layer more compiles nothing more."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import monitoring
from jax.sharding import NamedSharding, PartitionSpec

import jaxspeed
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.placement.xla_options import init_options
from jaxspeed.train_state.staged_init import compile_beside, staged_init

WIDTH = 48  # a square of it is above what is computed again for each result
SPLITS = 13  # a program for each result would have more than four times the equations of one


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def of_flax(layers):
    def fresh(seed):
        rngs = nnx.Rngs(jax.random.key(seed))
        return nnx.state(nnx.List([Layer(rngs) for _ in range(layers)])).to_pure_dict()

    return fresh


def keys_split_in_turn(seed):
    key, found = jax.random.key(seed), []
    for _ in range(SPLITS):
        key, own = jax.random.split(key)
        found.append(jax.random.normal(own, (WIDTH, WIDTH)))
    return found


def of_one_array(seed):
    """Two results of one large array, one of a small one, and results that are inputs or equal."""
    key = jax.random.key(seed)
    large = jax.random.normal(key, (4 * WIDTH, WIDTH))
    small = jax.random.uniform(key, (8,))
    return large[:WIDTH], large[WIDTH:], small, small, seed, jnp.int32(3) + 4, small * large[0, 0]


def at_once(seed):
    keys = jax.random.split(jax.random.key(seed), 6)
    return jax.vmap(lambda key: jax.random.normal(key, (WIDTH, WIDTH)))(keys), keys


def with_constants(seed):
    """Equal programs but for the arrays that they read."""
    key = jax.random.key(seed)
    tables = [np.full((WIDTH, WIDTH), i, np.float32) for i in range(3)]
    return [jax.jit(lambda x, t=t: x * t)(jax.random.normal(key, (WIDTH, WIDTH))) for t in tables]


def placed(shape):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axes = ("data",) if shape.ndim and shape.shape[0] % 8 == 0 else ()
    return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.mark.default_cases("of_one_array", "at_once", "with_constants")
@pytest.mark.parametrize(
    "function", [of_flax(3), keys_split_in_turn, of_one_array, at_once, with_constants]
)
def test_every_result_is_that_of_one_program(function):
    at = jax.tree.map(placed, jax.eval_shape(function, 0))
    ours = staged_init(function, at, 7)
    one = jax.jit(function, out_shardings=at)(7)
    for a, b, place in zip(*map(jax.tree.leaves, (ours, one, at)), strict=True):
        assert a.sharding.is_equivalent_to(place, a.ndim)
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), 1)


def test_random_numbers_are_bitwise_those_at_the_highest_level_of_optimization():
    def drawn(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        truncated = jax.random.truncated_normal(keys[1], -2, 2, (512, WIDTH))
        uniform = jax.random.uniform(keys[2], (WIDTH,))
        return jax.random.normal(keys[0], (512, WIDTH)) * 0.02, truncated, uniform

    at = jax.tree.map(placed, jax.eval_shape(drawn, 0))
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        one = jax.jit(drawn, out_shardings=at)(3)
        assert init_options(at[0])
        jax.tree.map(np.testing.assert_array_equal, staged_init(drawn, at, 3), one)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    assert not init_options(at[0])


@pytest.mark.parametrize("slow", [False, True])
def test_what_takes_long_to_compile_leaves_time_for_other_work(slow):
    callers, begun = [], threading.Event()

    class Lowered:
        def compile(self):
            return "compiled" if not slow or begun.wait(60) else "not begun"

    def meanwhile():
        callers.append(threading.current_thread())
        begun.set()

    assert compile_beside(Lowered(), meanwhile) == "compiled"
    assert callers == [threading.current_thread()] * slow


@pytest.mark.sampled
def test_a_chain_to_host_memory_passes_by_group(monkeypatch):
    from jaxspeed.train_state import staged_init as module

    sizes = []

    def noted(jaxpr, *consts):
        sizes.append(len(jaxpr.outvars))
        return as_function(jaxpr, *consts)

    monkeypatch.setattr(module, "as_function", noted)
    monkeypatch.setattr(module, "_HOST_BYTES", 3 * WIDTH * WIDTH * 4 // 8)
    shapes = jax.eval_shape(keys_split_in_turn, 0)
    at = [placed(x).with_memory_kind("pinned_host") for x in shapes]
    found = staged_init(keys_split_in_turn, at, 7)
    assert sizes == [3] * 4 + [1]
    for a, b in zip(found, jax.jit(keys_split_in_turn)(7), strict=True):
        np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), 1)


def test_an_equal_call_later_compiles_nothing(monkeypatch):
    from jaxspeed.train_state import staged_init as module

    compiled = []
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(
        module, "as_function", lambda jaxpr: compiled.append(jaxpr) or as_function(jaxpr)
    )

    def scaled(by):
        return lambda seed: by * jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH))

    def with_table(table):
        return lambda seed: jax.jit(lambda x: x * table)(scaled(1)(seed))

    table = np.ones((WIDTH, WIDTH), np.float32)
    functions = [*map(scaled, (1, 1, 2)), *map(with_table, (table, 2 * table))]
    at = placed(jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32))
    one, again, two, *tables = (staged_init(function, at, 7) for function in functions)
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(2 * np.asarray(one), two)
    np.testing.assert_array_equal(tables, [one, two])
    assert len(compiled) == 4  # all but the second
    staged_init(scaled(2), at, 8)
    staged_init(scaled(2), placed(jax.ShapeDtypeStruct((1,), jnp.float32)), 7)
    assert len(compiled) == 5  # of another placement


def programs_compiled(layers):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer.down(jnp.tanh(layer.up(x)))
            return x

    compiled = []

    def on_event(event, _, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name"))

    monitoring.register_event_duration_secs_listener(on_event)
    engine = jaxspeed.initialize(
        Net,
        lambda model, batch: jnp.mean(model(batch) ** 2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        },
    )
    count = len(compiled)
    monitoring.unregister_event_duration_listener(on_event)
    plain = Net(nnx.Rngs(jax.random.key(engine.config.run.seed)))
    for path, value in nnx.to_flat_state(nnx.state(plain, nnx.Param)):
        stored = engine.state.params["/".join(map(str, path))]
        np.testing.assert_array_max_ulp(np.asarray(stored), np.asarray(value[...]), 1)
    return count


def test_more_layers_compile_no_more_programs_and_begin_as_flax_does():
    few = programs_compiled(2)
    assert programs_compiled(9) <= few
