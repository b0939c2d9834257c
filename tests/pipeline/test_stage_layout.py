"""Weights of a stack are sent to the stages that run them, and their gradients back."""

import math
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspeed.hlo.collectives import collectives
from jaxspeed.pipeline.stage_layout import StageLayout
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.rows import Leaf, Precision
from jaxspeed.placement.stacks import Stack, with_stages
from jaxspeed.placement.table import build_table

MIXED = Precision(compute=jnp.bfloat16)


@dataclass(frozen=True)
class Model:
    """Blocks with parameters of these shapes, stacked or in a list, and a head."""

    layers: int
    shapes: dict[str, tuple[int, ...]]
    names: dict[str, tuple[str | None, ...]]
    stacked: bool

    def leaves(self) -> list[Leaf]:
        head = Leaf("head", (6, 4), jnp.float32)
        return [head, *(leaf for name in self.shapes for leaf in self.block_leaves(name))]

    def block_leaves(self, name: str) -> list[Leaf]:
        shape, names = self.shapes[name], self.names[name]
        if self.stacked:
            shape, names = (self.layers, *shape), ("layers", *names)
        return [Leaf(path, shape, jnp.float32, names) for path in self.paths(name)]

    def paths(self, name: str) -> list[str]:
        numbers = range(self.layers)
        return [f"blocks/{name}"] if self.stacked else [f"blocks/{i}/{name}" for i in numbers]

    def layout(self, mesh: dict[str, int], chunks: int, stage: int, precision=MIXED):
        leaves = self.leaves()
        stack = Stack(self.layers, {n: tuple(self.paths(n)) for n in self.shapes}, chunks)
        devices = jax.devices()[: math.prod(mesh.values())]
        table = build_table(
            with_stages(leaves, stack),
            build_mesh(mesh, devices),
            stage=stage,
            precision=precision,
            stack=stack,
        )
        return StageLayout(table, chunks)

    def values(self) -> dict[str, np.ndarray]:
        """For each parameter of the blocks [layers, ...], numbers that bf16 holds."""
        drawn = np.random.default_rng(7)
        return {
            name: drawn.integers(1, 256, (self.layers, *shape)).astype(np.float32)
            for name, shape in self.shapes.items()
        }


def sources_of(model: Model, layout: StageLayout) -> dict[str, jax.Array]:
    """The model's values as a state stores them."""
    table = layout.table
    stored = {"head": np.ones((6, 4), np.float32)}
    for name, values in model.values().items():
        stored |= dict(zip(model.paths(name), [values] if model.stacked else values, strict=True))
    return {
        path: jax.device_put(
            padded(x, table[path].shape(table[path].source)).astype(table[path].source.dtype),
            table.sharding(table[path].source),
        )
        for path, x in stored.items()
    }


def padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape, x.dtype)
    out[tuple(map(slice, x.shape))] = x
    return out


def as_stages(values: np.ndarray, stages: int, chunks: int) -> np.ndarray:
    """[stages, chunks, rows, ...]: `rows` consecutive layers to each stage, chunk by chunk."""
    rows = math.ceil(len(values) / (stages * chunks))
    out = np.zeros((stages, chunks, rows, *values.shape[1:]), values.dtype)
    for layer, value in enumerate(values):
        run, row = divmod(layer, rows)
        chunk, stage = divmod(run, stages)
        out[stage, chunk, row] = value
    return out


@st.composite
def models(draw):
    """(a model with one parameter a block, a mesh, chunks, ZeRO's stage)."""
    stages = draw(st.sampled_from([2, 4]))
    data = draw(st.sampled_from([1, 2]))
    tensor = draw(st.sampled_from([1, 2])) if stages * data < 8 else 1
    chunks = draw(st.integers(1, 3))
    layers = stages * chunks + draw(st.integers(0, 5))
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    fitting = [d for d, n in enumerate(shape) if n % tensor == 0]
    cut = draw(st.sampled_from([None, *fitting]))
    names = tuple("mlp" if d == cut else None for d in range(len(shape)))
    model = Model(layers, {"w": shape}, {"w": names}, stacked=draw(st.booleans()))
    mesh = {"pipe": stages, "data": data, "tensor": tensor}
    return model, mesh, chunks, draw(st.integers(0, 3))


# Where the update wants more padding than the gradients have: 5 over pipe, then over data as well.
PADDED_TWICE = Model(5, {"w": (5,)}, {"w": (None,)}, stacked=False)


@pytest.mark.sampled
@given(models())
@example((PADDED_TWICE, {"pipe": 2, "data": 2, "tensor": 1}, 1, 1))
@settings(max_examples=25)
def test_each_stage_gets_its_layers_and_gradients_come_back_to_them(drawn):
    model, mesh, chunks, stage = drawn
    own = model.layout(mesh, chunks, stage)
    table, row, (name,) = own.table, own.row("w"), own.names()
    arranged = jax.jit(own.by_stage)(sources_of(model, own), 0)
    assert arranged.keys() == {"head", name}

    expected = as_stages(model.values()[name], mesh["pipe"], chunks)
    weights = arranged[name]
    in_place = model.stacked and chunks == 1
    assert weights.dtype == (row.source.dtype if in_place else row.read.dtype)
    exchanged = "pipe" in str(row.source.spec)  # a scalar is replicated over the stages
    if exchanged:
        assert {x.data.shape[0] for x in weights.addressable_shards} == {1}
    shape = (*expected.shape[:3], *own.source_shape(name))
    np.testing.assert_array_equal(np.asarray(weights, np.float32), padded(expected, shape))

    shape = (*expected.shape[:3], *own.gradient_shape(name))
    gradients = {"head": arranged["head"], name: jnp.asarray(padded(expected, shape))}
    back = jax.jit(own.by_path)(gradients, 0)
    values = model.values()[name]
    for path, value in zip(model.paths(name), [values] if model.stacked else values, strict=True):
        row, found = table[path], back.pop(path)
        assert found.dtype == row.grad.dtype
        if in_place:
            assert found.shape == row.shape(row.grad)
        else:
            assert found.shape == row.shape(row.opt)
            at = table.sharding(row.opt)
            assert not exchanged or found.sharding.is_equivalent_to(at, found.ndim)
        np.testing.assert_array_equal(found, padded(value, found.shape))
    assert back.keys() == {"head"}


# -- communication --------------------------------------------------------------------------------

SHAPES = {"kernel": (16, 32), "bias": (32,)}
NAMES = {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
FORMS = {"chunks": (True, 2), "list": (False, 1), "list in chunks": (False, 2)}
MESH = {"pipe": 2, "data": 2, "tensor": 2}


def communication(function, own: StageLayout, args: dict[str, jax.ShapeDtypeStruct]):
    step = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(function).lower(args, step).compile()
    return collectives(compiled.as_text(), own.table.mesh)


def abstract(model: Model, own: StageLayout) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for path, x in sources_of(model, own).items()
    }


@pytest.fixture(params=FORMS)
def model(request):
    stacked, chunks = FORMS[request.param]
    return Model(8, SHAPES, NAMES, stacked), chunks


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_are_exchanged_once_and_nothing_is_gathered(model, stage):
    model, chunks = model
    own = model.layout(MESH, chunks, stage)
    found = communication(own.by_stage, own, abstract(model, own))
    assert Counter(c.kind for c in found) == {"all-to-all": len(SHAPES)}
    cut = MESH["pipe"] * MESH["tensor"] * (MESH["data"] if stage == 3 else 1)
    sizes = sorted(8 * math.prod(shape) // cut for shape in SHAPES.values())
    assert sorted(c.elements for c in found) == sizes
    assert {c.axes for c in found} == {("pipe",)}


def test_weights_are_exchanged_in_the_dtype_that_layers_read(model):
    """In bf16, from fp32 masters. (XLA:CPU widens it: the lowered program is compared.)"""
    model, chunks = model
    own = model.layout(MESH, chunks, stage=3)
    asked = jax.jit(own.by_stage).lower(abstract(model, own), 0).as_text().splitlines()
    asked = [line for line in asked if "stablehlo.all_to_all" in line]
    assert len(asked) == len(SHAPES)
    assert all(line.rstrip().endswith("xbf16>") for line in asked)


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_are_exchanged_once_and_nothing_is_gathered(model, stage):
    model, chunks = model
    own = model.layout(MESH, chunks, stage)

    def arranged(name: str) -> jax.ShapeDtypeStruct:
        shape = (own.stages, own.chunks, own.rows, *own.gradient_shape(name))
        spec = jax.sharding.PartitionSpec("pipe", None, None, *own.spec(name, own.row(name).grad))
        at = jax.sharding.NamedSharding(own.table.mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)

    found = communication(own.by_path, own, {name: arranged(name) for name in own.names()})
    assert Counter(c.kind for c in found) == {"all-to-all": len(SHAPES)}
    cut = MESH["pipe"] * MESH["tensor"] * (MESH["data"] if stage else 1)
    sizes = sorted(8 * math.prod(shape) // cut for shape in SHAPES.values())
    assert sorted(c.elements for c in found) == sizes


def test_a_stack_stored_by_stage_needs_no_communication():
    model = Model(8, SHAPES, NAMES, stacked=True)
    own = model.layout(MESH, 1, 3)
    assert not communication(own.by_stage, own, abstract(model, own))
