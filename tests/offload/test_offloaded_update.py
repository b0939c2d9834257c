"""The update of state in host memory equals the resident one, for any sharding and slices.

Both are given the same gradients and state. An optimizer's operations are the same on a slice as on
the full array; the compiler may contract a product and a sum in one and not in the other, so
numbers differ by 2 units in the last place of the larger summand.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxspeed
from jaxspeed.errors import ConfigError
from jaxspeed.offload.streaming import StreamedArray, StreamPlan, choose_stream_plan
from jaxspeed.offload.update_device import ON_DEVICE
from jaxspeed.placement.rows import HOST, Offload
from jaxspeed.traced_loss.accumulate import Sums
from jaxspeed.train import build
from jaxspeed.train.build import build_program
from tests.support.covering import covering, examples

OWN = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "adam with L2": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}
FOREIGN = {
    "optax.adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5), weight_decay=0.1),
    "optax.lamb": optax.lamb(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "traces": optax.chain(optax.trace(0.9), optax.clip(0.1), optax.scale(-1e-2)),
    "amsgrad": optax.amsgrad(1e-2),
}


def of_gradients(function):
    """A step of `function(gradient)`, with a state as large as the parameters."""
    step = optax.stateless(lambda grads, params: jax.tree.map(function, grads))
    return optax.chain(optax.trace(0.9), step, optax.scale(-1e-2))


# What it makes of zeros is not zero, so padding must not be given to it.
FOREIGN["moves zeros"] = of_gradients(lambda g: g + 1)
FOREIGN["by position"] = of_gradients(
    lambda g: g * jnp.linspace(1, 2, g.shape[0]).reshape(-1, *[1] * (g.ndim - 1))
)
MESHES = ({"data": 1}, {"data": 2}, {"data": 2, "tensor": 2}, {"replica": 2, "data": 2})


def program(shapes, mesh, stage, optimizer, offload, bf16=False, where="device", **sections):
    def init(key):
        keys = jax.random.split(key, len(shapes))
        return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}

    def apply(params, x):
        return sum(jnp.sum(p) for p in params.values()) * x

    count = int(np.prod(list(mesh.values())))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu" if offload else "none", "where": where},
        },
        "bf16": {"enabled": bf16},
        "mesh": mesh,
        "parallel": {
            "logical_axes": {
                n: ["layers", *[None] * (len(s) - 1)]
                for n, s in shapes.items()
                if n.startswith("stack")
            }
            | {"table": ["vocab", None]}
        },
        **sections,
    }
    own = OWN.get(optimizer)
    return build_program(
        jaxspeed.Config.load({**config, **({"optimizer": own} if own else {})}),
        (init, apply),
        lambda model, batch: jnp.mean(model(batch)),
        optimizer=None if own else FOREIGN.get(optimizer, optimizer),
        devices=jax.devices()[:count],
    )


def with_moments(made, state):
    """The state with moments as of many steps, the same wherever they wait."""
    rng, leaves = np.random.default_rng(7), []
    for leaf, (shape, stored, at, _) in zip(
        jax.tree.leaves(state.opt), made.layout.places.values(), strict=True
    ):
        if shape and jnp.issubdtype(leaf.dtype, jnp.floating):
            values = np.abs(rng.normal(size=shape)).astype(leaf.dtype)
            values = np.pad(values, [(0, b - a) for a, b in zip(shape, stored, strict=True)])
            leaf = jax.device_put(values, made.table.sharding(at))
        leaves.append(leaf)
    opt = jax.tree.unflatten(jax.tree.structure(state.opt), leaves)
    return dataclasses.replace(state, opt=opt)


def updated(made, steps=1, seed=0, infinite=False):
    """The state after some updates by given gradients."""
    state = with_moments(made, made.init(0))

    @functools.partial(jax.jit, out_shardings=made.shardings, donate_argnums=0)
    def update(state, grads):
        grads = {
            path: jnp.pad(g, [(0, b - a) for a, b in zip(g.shape, made.table[path].shape(r))])
            for path, g in grads.items()
            if (r := made.table[path].grad)
        }
        grads = {
            path: jax.device_put(g, made.table.sharding(made.table[path].grad))
            for path, g in grads.items()
        }
        one = jnp.ones(())
        return made.update(state, Sums(grads, one, one, {}), state.variables)[0]

    for step in range(steps):
        rng = np.random.default_rng(seed + step)
        grads = {r.path: rng.normal(size=r.leaf.shape).astype(np.float32) for r in made.table}
        if infinite and step == 1:
            next(iter(grads.values())).flat[0] = np.inf
        state = update(state, grads)
    return state


def assert_equal(ours, theirs, before, units):
    for a, b, old in zip(*map(jax.tree.leaves, (ours, theirs, before)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            continue
        a, b, old = (np.asarray(x, np.float64) for x in (a, b, old))
        size = np.maximum(np.abs(b), np.abs(old)).astype(np.float32)
        assert np.all(np.abs(a - b) <= units * np.spacing(size))


shapes = st.builds(
    lambda layers, rows, columns, table: {
        "stack/w": (layers, rows, columns),
        "stack/b": (layers, columns),
        "table": (table, rows),
        "scale": (columns,),
    },
    *(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 40)),
)


@settings(max_examples=examples(3, 12), deadline=None)
@given(
    shapes=shapes,
    mesh=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    optimizer=st.sampled_from([*OWN, *FOREIGN]),
    bf16=st.booleans(),
    where=st.sampled_from(["device", "host"]),
)
def test_streamed_as_resident(shapes, mesh, stage, optimizer, bf16, where):
    assert_streamed_as_resident(shapes, mesh, stage, optimizer, bf16, where)


@pytest.mark.default_cases("by position-device")
@pytest.mark.parametrize(
    ("optimizer", "where"),
    covering(
        itertools.product(["moves zeros", "by position"], ["device", "host"]),
        [("moves zeros", "host"), ("by position", "device")],
    ),
)
def test_padding_stays_zero_and_positions_are_those_of_the_full_array(optimizer, where):
    shapes = {"table": (29, 7), "other": (31, 7), "stack/w": (3, 9, 7)}
    assert_streamed_as_resident(shapes, {"data": 2}, 3, optimizer, False, where)


def assert_streamed_as_resident(shapes, mesh, stage, optimizer, bf16, where):
    case = (shapes, mesh, stage, optimizer)
    streamed, resident = (program(*case, offload, bf16, where) for offload in (True, False))
    before = with_moments(resident, resident.init(0))
    ours, theirs = updated(streamed), updated(resident)
    for part in ("opt", "ema", "step", "skipped"):
        a, b, old = (getattr(x, part) for x in (ours, theirs, before))
        assert_equal(a, b, old, 2)
    for row in streamed.table:
        a = (ours.master if row.master else ours.params)[row.path]
        other = resident.table[row.path]
        b, old = ((x.master if other.master else x.params)[row.path] for x in (theirs, before))
        assert_equal(a, b, old, 2)


@pytest.mark.default_cases("adamw-0-device-True")
@pytest.mark.parametrize(
    ("optimizer", "stage", "where", "bf16"),
    covering(
        [
            (*which, where, bf16)
            for which in (("adamw", 0), ("lamb", 2), ("factored", 3))
            for where in ("device", "host")
            for bf16 in (False, True)
        ],
        [
            ("adamw", 0, "device", True),
            ("lamb", 2, "host", True),
            ("factored", 3, "device", False),
        ],
    ),
)
def test_gradients_and_parameters_may_be_offloaded_too(monkeypatch, optimizer, stage, where, bf16):
    shapes = {"stack/w": (5, 6, 3), "stack/b": (5, 3), "table": (17, 6), "scale": (3,)}
    case = (shapes, {"data": 2}, stage, optimizer)
    theirs = updated(program(*case, False, bf16))
    everything = Offload(optimizer=1.0, param=True)
    monkeypatch.setattr(build, "offload_of", lambda config: everything)
    made = program(*case, True, bf16, where)
    ours = updated(made)
    kept = {x.sharding.memory_kind for x in jax.tree.leaves((ours.params, ours.master))}
    assert kept == {"pinned_host"} == {row.grad.memory_kind for row in made.table}
    for row in made.table:
        a = (ours.master if row.master else ours.params)[row.path]
        b = (theirs.master or theirs.params)[row.path]
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        read = np.asarray(ours.params[row.path]), np.asarray(a).astype(row.read.dtype)
        full = tuple(map(slice, row.leaf.shape))
        np.testing.assert_array_equal(read[0][full], read[1][full])


@pytest.mark.default_cases("lamb-host", "factored-device")
@pytest.mark.parametrize(
    ("optimizer", "where"),
    covering(
        itertools.product(["adamw", "lamb", "factored"], ["device", "host"]),
        [("adamw", "device"), ("lamb", "host"), ("factored", "device")],
    ),
)
def test_a_step_that_is_skipped_changes_nothing_in_host_memory(optimizer, where):
    shapes = {"stack/w": (4, 6, 6), "table": (9, 6)}
    made = program(shapes, {"data": 2}, 2, optimizer, True, where=where)
    one, two = updated(made, 1), updated(made, 2, infinite=True)
    assert int(two.skipped) == 1
    for part in ("params", "master", "opt"):
        for a, b in zip(*(jax.tree.leaves(getattr(x, part)) for x in (one, two)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


MIXING = {
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "many steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "if finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", MIXING)
def test_an_optimizer_that_mixes_parameters_is_refused(name):
    with pytest.raises(ConfigError, match=r"offload_optimizer.*gradient_clipping"):
        program({"table": (4, 4), "b": (4,)}, {"data": 1}, 0, MIXING[name], True)


def test_elementwise_updates_are_streamed_and_an_unstacked_matrix_is_not():
    shapes = {"stack/w": (6, 8, 8), "stack/b": (6, 8), "table": (50, 8), "scale": (8,)}
    adam, lamb = (
        program(shapes, {"data": 1}, 0, name, True).update.streamed for name in ("adamw", "lamb")
    )
    plans = {
        kind: {r.path: each.plan(r, each.layouts(r)) for r in each.table}
        for kind, each in (("adam", adam), ("lamb", lamb))
    }
    assert plans["adam"]["stack/w"].slice_shape((6, 8, 8)) == (1, 8, 8)
    assert plans["adam"]["table"].slice_shape((50, 8)) == (8, 8)
    assert plans["lamb"]["stack/w"].slice_shape((6, 8, 8)) == (1, 8, 8)
    assert plans["lamb"]["table"] is None


@pytest.mark.parametrize(
    ("shape", "rows"), [((6144, 1536), 1536), ((32000, 96), 7936), ((4000, 96), 992)]
)
def test_what_a_device_could_hold_is_four_slices(monkeypatch, shape, rows):
    """XLA:TPU leaves no loop of two, and stores narrow arrays with their long dim minor."""
    monkeypatch.setattr(type(jax.devices()[0]), "platform", "tpu", raising=False)
    at = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    layout = StreamedArray(shape, at)
    plan = choose_stream_plan({"x": layout}, layout, range(2), most=shape[0] * shape[1])
    assert plan == StreamPlan(0, num_shards=1, size=shape[0], rows=rows)


def test_an_unsliced_array_is_not_reshaped_in_host_memory():
    """XLA:GPU compiles no reshape of a full array there ("Bitcast cannot have different memory
    spaces"): a vector over several devices is one slice."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    at = NamedSharding(mesh, PartitionSpec("data"), memory_kind=HOST)
    layout, plan = StreamedArray((64,), at), StreamPlan(0, num_shards=4, size=16, rows=16)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=at)

    def there_and_back(x):
        return plan.write(x, layout, 0, 2 * plan.fetch(x, layout, 0, 16, ON_DEVICE), ON_DEVICE)

    names = [eqn.primitive.name for eqn in jax.make_jaxpr(there_and_back)(x).eqns]
    assert "reshape" not in names
    assert names.count("device_put") == 2
