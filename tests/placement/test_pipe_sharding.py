"""Sharding of a stack over pipe: its layers, or other dims where it is not stored in place."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.rows import ROLES, Leaf, Precision
from jaxspeed.placement.stacks import find_stack, with_stages
from jaxspeed.placement.table import PlacementTable, build_table

pytestmark = pytest.mark.fast

MIXED = Precision(compute=jnp.bfloat16)
SHAPES = {"kernel": (16, 64), "bias": (64,), "scale": ()}
NAMES = {"kernel": ("embed", "mlp"), "bias": ("mlp",), "scale": ()}
LAYERS = 8


def leaf(path: str, shape: tuple[int, ...], names: tuple[str | None, ...]) -> Leaf:
    return Leaf(path, shape, jnp.float32, names)


def stacked(prefix: str, shapes=SHAPES, names=NAMES) -> list[Leaf]:
    return [
        leaf(f"{prefix}/{n}", (LAYERS, *shape), ("layers", *names[n]))
        for n, shape in shapes.items()
    ]


def listed(prefix: str, shapes=SHAPES, names=NAMES) -> list[Leaf]:
    numbers = range(LAYERS)
    return [
        leaf(f"{prefix}/{i}/{n}", shape, names[n]) for i in numbers for n, shape in shapes.items()
    ]


MESH = {"pipe": 2, "data": 2, "tensor": 2}
HEAD = leaf("head", (64, 16), ("mlp", "embed"))
FORMS = {"chunks": (stacked, 2), "list": (listed, 1), "list in chunks": (listed, 2)}


def table(leaves: list[Leaf], mesh: dict[str, int], stage: int, chunks: int = 1) -> PlacementTable:
    stack = find_stack(leaves)
    stack = replace(stack, chunks=chunks)
    devices = jax.devices()[: math.prod(mesh.values())]
    return build_table(
        with_stages(leaves, stack),
        build_mesh(mesh, devices),
        stage=stage,
        precision=MIXED,
        stack=stack,
    )


def placements(row):
    return {role: p for role in ROLES if (p := getattr(row, role)) is not None}


def axes(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def a_device_has(made: PlacementTable, row, placement) -> int:
    return math.prod(made.sharding(placement).shard_shape(row.shape(placement)))


# -- stacks that stages do not hold as they are stored --------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_all_that_is_stored_is_cut_over_pipe_and_the_layers_are_not(form, stage):
    """At every stage, also 0: a device holds 1 / pipe of the blocks."""
    make, chunks = FORMS[form]
    made = table([*make("blocks"), HEAD], {"pipe": 4, "data": 2}, stage, chunks)
    for row in made:
        for role, placement in placements(row).items():
            shards = 2 if "data" in str(placement.spec) else 1
            if row.path == "head" or row.path.endswith("scale"):
                assert "pipe" not in str(placement.spec)
            else:
                shards *= 4
                assert chunks == 1 or make is listed or placement.spec[0] is None, role
            assert a_device_has(made, row, placement) * shards == math.prod(row.leaf.shape)
        assert "pipe" not in str(row.read.spec)
        assert row.gathered or row.path == "head" or row.path.endswith("scale")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_cuts_another_dim_than_pipe_where_it_can(stage):
    """Even one that is sharded over tensor: then what is published is gathered over data alone."""
    kernel = {"down": (64, 16)}
    made = table([*stacked("blocks", kernel, {"down": ("embed", "mlp")}), HEAD], MESH, stage, 2)
    assert tuple(made["blocks/down"].opt.spec) == (None, "pipe", ("tensor", "data"))


def test_pipe_shards_inside_of_data_where_they_share_a_dim():
    """Then what the stages exchange of a data rank's part is no other rank's."""
    made = table([*listed("blocks"), HEAD], MESH, 3)
    assert tuple(made["blocks/0/bias"].opt.spec) == (("tensor", "data", "pipe"),)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from([{"pipe": 2}, {"pipe": 4, "data": 2}, MESH]),
    st.integers(0, 3),
    st.booleans(),
)
def test_shapes_that_do_not_divide_are_padded_to_what_is_cut(shape, mesh, stage, in_list):
    """Each role has the shape that its sharding needs; the model's shape is what layers read."""
    shapes, names = {"w": tuple(shape)}, {"w": (None,) * len(shape)}
    make = listed if in_list else stacked
    made = table(make("blocks", shapes, names), mesh, stage, 1 if in_list else 2)
    for row in made:
        assert row.shape(row.read) == row.leaf.shape
        for placement in placements(row).values():
            stored = row.shape(placement)
            made.sharding(placement).shard_shape(stored)  # raises where it does not divide
            assert "pipe" in str(placement.spec)
            for size, full, entry in zip(stored, row.leaf.shape, placement.spec, strict=True):
                shards = math.prod(mesh[a] for a in axes(entry))
                least = math.prod(mesh[a] for a in axes(entry)) * -(-full // shards)
                assert size >= full if entry else size == full
                assert size - least < math.prod(mesh.values())
        gathered = zip(
            row.read.spec, row.source.spec, row.source_shape, row.leaf.shape, strict=True
        )
        assert all(n == size for read, stored_as, n, size in gathered if read == stored_as)


@pytest.mark.parametrize("form", FORMS)
def test_the_layers_of_another_stack_stay_whole(form):
    make, chunks = FORMS[form]
    small = {"kernel": (2, 4)}
    leaves = [*make("blocks"), *stacked("small", small, {"kernel": (None, None)})]
    made = table(leaves, {"pipe": 2}, 1, chunks)
    assert all("pipe" not in str(p.spec) for p in placements(made["small/kernel"]).values())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("form", [*FORMS, "neighbours"])
def test_a_vocabulary_of_each_block_is_its_stages_alone(form, stage):
    make, chunks = {**FORMS, "neighbours": (stacked, 1)}[form]
    leaves = make("blocks", {"table": (10, 16)}, {"table": ("vocab", "embed")})
    made = table([*leaves, leaf("table", (10, 16), ("vocab", "embed"))], MESH, stage, chunks)
    assert made["table"].read.spec[0] == ("pipe", "tensor")
    assert made["table"].shape(made["table"].source) == (12, 16)
    assert made["table"].source_shape == (10, 16)
    for row in made:
        if row.path != "table":
            assert row.read.spec[-2:] == ("tensor", None)
            assert [*jax.tree.leaves(tuple(row.source.spec))].count("pipe") == 1


def test_the_table_tells_why():
    printed = str(table([*stacked("blocks"), HEAD], {"pipe": 2, "data": 2}, 1, 2))
    assert "sharded over pipe for storage" in printed


# -- stacks that they do --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stack_of_neighbouring_layers_is_cut_along_them(stage):
    """ZeRO shards within a stage, never the layers: one scalar per layer is not sharded."""
    made = table([*stacked("blocks"), HEAD], {"pipe": 2, "data": 4}, stage)
    for row in made:
        if row.path != "head":
            for placement in [row.read, *placements(row).values()]:
                assert placement.spec[0] == "pipe"
    assert "data" not in str(made["blocks/scale"].opt.spec)
    assert ("data" in str(made["blocks/kernel"].opt.spec)) == (stage >= 1)
