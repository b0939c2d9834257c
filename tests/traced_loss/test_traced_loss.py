"""A traced loss is used again where all that it depends on is the same, and nowhere else."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.rows import Precision
from jaxspeed.placement.table import build_table
from jaxspeed.planner.trace.traced_step import as_on
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.user_models import adapt_model
from tests.engine import tiny
from tests.traced_loss.test_trace_counts import counted


def objective(loss_fn: Any = tiny.squared_error, model: Any = tiny.Listed) -> MicroBatchLoss:
    adapted = adapt_model(model, loss_fn)
    table = build_table(adapted.leaves, build_mesh({}, jax.devices()[:1]))
    return MicroBatchLoss(adapted, loss_fn, table, None)


def rest(samples: int = 4, **more: Any) -> Any:
    batch = {
        "x": jax.ShapeDtypeStruct((samples, tiny.FEATURES), "float32"),
        "y": jax.ShapeDtypeStruct((samples,), "float32"),
    }
    index = jax.ShapeDtypeStruct((), "int32")
    return {}, {**batch, **more}, index, index


ARRAYS = ({}, jax.tree.map(jnp.asarray, tiny.batch(4)), jnp.int32(3), jnp.asarray(1))


def test_the_same_is_traced_once():
    loss_fn, calls = counted(tiny.squared_error)
    traced = objective(loss_fn)
    first = traced.trace(rest(), True)
    assert traced.trace(rest(), True) is first
    assert traced.trace(ARRAYS, True) is first, "arrays are read for their shapes"
    assert len(calls) == 1


def test_units_are_chosen_once():
    traced = objective()
    assert traced.trace(rest(), True).units is traced.trace(rest(), True).units


MESH = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
PARTLY = jax.sharding.AbstractMesh(
    (2, 2), ("data", "tensor"), axis_types=(AxisType.Manual, AxisType.Auto)
)
CONTEXTS: dict[str, Any] = {
    "a mesh": lambda: jax.sharding.use_abstract_mesh(MESH),
    "a mesh with manual axes": lambda: jax.sharding.use_abstract_mesh(PARTLY),
    "x64": lambda: jax.enable_x64(True),
    "precision of products": lambda: jax.default_matmul_precision("float32"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "threefry": lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
    "implementation of keys": lambda: jax.default_prng_impl("rbg"),
    "typed keys": lambda: jax.enable_custom_prng(True),
    "the platform's kernels": lambda: as_on("cuda"),
}
REST = {
    "shape": rest(8),
    "dtype": rest(y=jax.ShapeDtypeStruct((4,), "bfloat16")),
    "weak type": rest(y=jax.ShapeDtypeStruct((4,), "float32", weak_type=True)),
    "tree of the batch": rest(z=jax.ShapeDtypeStruct((), "float32")),
}


@pytest.mark.parametrize("what", [*CONTEXTS, *REST, "mode"])
def test_what_a_trace_depends_on_makes_another(what):
    loss_fn, calls = counted(tiny.squared_error)
    traced = objective(loss_fn)
    first = traced.trace(rest(), True)
    with CONTEXTS.get(what, nullcontext)():
        other = traced.trace(REST.get(what, rest()), what != "mode")
    assert other is not first and len(calls) == 2
    assert traced.trace(rest(), True) is first and len(calls) == 2


class Offset(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(tiny.FEATURES, 1, rngs=rngs)
        self.offset = nnx.BatchStat(jnp.zeros(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + self.offset[...].sum()


def test_the_shapes_of_variables_are_part_of_it():
    traced = objective(model=Offset)
    ones, twos = ({"offset": jax.ShapeDtypeStruct((n,), "float32")} for n in (1, 2))
    first = traced.trace((ones, *rest()[1:]), True)
    assert traced.trace((twos, *rest()[1:]), True) is not first
    assert traced.trace((ones, *rest()[1:]), True) is first


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_parameters_and_batch_are_traced_as_layers_read_them(dtype):
    adapted = adapt_model(tiny.Listed, tiny.squared_error)
    mesh = build_mesh({}, jax.devices()[:1])
    table = build_table(adapted.leaves, mesh, precision=Precision(compute=dtype))
    traced = MicroBatchLoss(adapted, tiny.squared_error, table, dtype).trace(rest(), True)
    wanted = {jnp.dtype(dtype or "float32")}
    assert {v.aval.dtype for v in traced.parameters.values()} == wanted
    assert {v.aval.dtype for v in traced.batch} == wanted


def test_a_loss_is_traced_for_the_manual_axes_around_it():
    seen = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(dict(free_axes()))
        return tiny.squared_error(model, batch)

    traced = objective(loss)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def local(x: jax.Array) -> jax.Array:
        traced.trace(rest(), True)
        traced.trace(rest(), True)
        return x

    for axes in ({"data"}, {"data", "tensor"}):
        spec = PartitionSpec("data")
        run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)
        jax.eval_shape(run, jnp.zeros(2))
    assert seen == [{"tensor": 2}, {}]


def test_no_tracer_outlives_its_trace():
    """The second step would compute with a tracer of the first."""
    around: list[Any] = []

    def loss(model: Any, batch: Any) -> Any:
        total, weight = tiny.squared_error(model, batch)
        return total * around[-1], weight

    traced = objective(loss)
    values, _ = traced.model.init(0)

    def step(factor: jax.Array) -> jax.Array:
        around.append(factor)
        found, _ = traced(values, {}, ARRAYS[1], 0, 0, True)
        return found.total

    once, twice = jax.jit(step)(1.0), jax.jit(lambda x: step(x))(2.0)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)


def test_a_trace_holds_no_tracer():
    traced = objective()
    held = []

    def step(batch: Any) -> Any:
        held.append(traced.trace(({}, batch, jnp.int32(0), jnp.int32(0)), True))
        return batch

    with jax.checking_leaks():
        jax.jit(step)(ARRAYS[1])
    closed = held[0].closed
    jax.core.eval_jaxpr(
        closed.jaxpr, closed.consts, *traced.model.init(0)[0].values(), *jax.tree.leaves(ARRAYS)
    )


def test_another_exchange_is_the_same_loss_and_another_loss_is_not():
    loss_fn, calls = counted(tiny.squared_error)
    traced = objective(loss_fn)
    first = traced.trace(rest(), True)
    assert traced.with_exchange(None).trace(rest(), True) is first

    other = dataclasses.replace(traced, loss_fn=lambda model, batch: model(batch["x"]).sum())
    assert not other.trace(rest(), True).is_sum and first.is_sum
    assert len(calls) == 1
