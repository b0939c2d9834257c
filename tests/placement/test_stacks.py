"""Which parameters are a model's repeated blocks, and how many stages can share them."""

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.config import match
from jaxspeed.errors import PlacementError
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.stacks import Stack, find_stack, refuse_stages, with_stages

pytestmark = pytest.mark.fast


def leaf(path: str, *shape: int, names: tuple[str | None, ...] = (), **more) -> Leaf:
    return Leaf(path, shape, jnp.float32, names, **more)


def block(prefix: str, width: int = 8, **more) -> list[Leaf]:
    return [
        leaf(f"{prefix}/up/kernel", width, 2 * width, **more),
        leaf(f"{prefix}/up/bias", 2 * width, **more),
    ]


def stacked(prefix: str, layers: int, width: int = 8) -> list[Leaf]:
    return [
        leaf(f"{prefix}/up/kernel", layers, width, 2 * width, names=("layers", "embed", "mlp")),
        leaf(f"{prefix}/up/bias", layers, 2 * width, names=("layers", "mlp")),
    ]


EMBEDDING = leaf("embed/table", 100, 8, names=("vocab", "embed"))


# -- which one ------------------------------------------------------------------------------------


def test_stacked_blocks_are_the_module_all_of_whose_parameters_have_layers():
    stack = find_stack([EMBEDDING, *stacked("decoder/blocks", 6), leaf("head", 8)])
    assert stack.layers == 6 and stack.stacked
    assert stack.leaves == {
        "decoder/blocks/up/kernel": ("decoder/blocks/up/kernel",),
        "decoder/blocks/up/bias": ("decoder/blocks/up/bias",),
    }


@pytest.mark.parametrize("member", ["blocks/{}", "{}", "model/Block_{}", "h{}"])
def test_the_like_members_of_a_list_are_found_by_their_numbers(member):
    leaves = [EMBEDDING, *(x for i in range(12) for x in block(member.format(i)))]
    stack = find_stack(sorted(leaves, key=lambda x: x.path))  # 10 comes before 2
    assert stack.layers == 12 and not stack.stacked
    kernels = next(paths for name, paths in stack.leaves.items() if name.endswith("up/kernel"))
    assert kernels == tuple(f"{member.format(i)}/up/kernel" for i in range(12))


def test_arrays_may_be_a_list_themselves():
    leaves = [leaf(f"layers/{i}", 8, 8) for i in range(3)]
    assert find_stack(leaves).leaves == {"layers/*": ("layers/0", "layers/1", "layers/2")}
    assert find_stack([leaf("mlp/w1", 8, 8), leaf("mlp/w2", 8, 8)]) is None


def test_a_member_that_is_other_than_its_neighbours_ends_the_run():
    """Two small blocks, three wide ones: another width, other names or another dtype."""
    wide = [x for i in range(2, 5) for x in block(f"blocks/{i}", 16)]
    leaves = [*block("blocks/0"), *block("blocks/1"), *wide]
    assert find_stack(leaves).leaves["blocks/*/up/bias"] == tuple(
        f"blocks/{i}/up/bias" for i in (2, 3, 4)
    )
    alike = [*block("blocks/0"), *block("blocks/1"), *block("blocks/2", trainable=False)]
    assert find_stack(alike).layers == 3  # stages divide their layers where some are frozen
    named = [leaf("b/0/w", 8, names=("mlp",)), leaf("b/1/w", 8), leaf("b/2/w", 8)]
    assert find_stack(named).leaves == {"b/*/w": ("b/1/w", "b/2/w")}


def test_of_several_stacks_the_one_with_most_bytes_is_shared_by_the_stages():
    leaves = [*stacked("encoder", 12, 4), *stacked("decoder", 3, 16), *block("tail/0")]
    assert find_stack(leaves).layers == 3


def test_patterns_say_which_list():
    large = [x for i in range(4) for x in block(f"blocks/{i}", 16)]
    small = [x for i in range(3) for x in block(f"heads/{i}")]
    assert find_stack([*large, *small]).layers == 4
    assert find_stack([*large, *small], ["heads/*"], match).layers == 3
    assert find_stack([*large, *small], ["tails/*"], match) is None


def test_where_nothing_repeats_there_is_no_stack():
    assert find_stack([EMBEDDING, *block("blocks/0"), *block("blocks/1", 16)]) is None


# -- sharded over pipe ----------------------------------------------------------------------------


def test_the_first_dim_is_cut_where_a_stage_has_neighbouring_layers():
    leaves = [*stacked("blocks", 6), *stacked("small", 6, 2)]
    stack = find_stack(leaves)
    names = {x.path: x.names for x in with_stages(leaves, stack)}
    assert names["blocks/up/kernel"] == ("stages", "embed", "mlp")
    assert names["small/up/kernel"] == ("layers", "embed", "mlp")


@pytest.mark.parametrize(
    "leaves, chunks",
    [(stacked("blocks", 6), 2), ([*block("blocks/0"), *block("blocks/1")], 1)],
    ids=["chunks", "list"],
)
def test_other_stacks_keep_the_names_of_their_dims(leaves, chunks):
    found = find_stack(leaves)
    stack = Stack(found.layers, found.leaves, chunks)
    assert not stack.in_place
    assert with_stages(leaves, stack) == tuple(leaves)


# -- how many stages ------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(2, 40), st.integers(1, 6))
def test_stages_are_refused_where_there_are_more_chunks_than_layers(layers, stages, chunks):
    stack = Stack(layers, {"blocks/w": ("blocks/w",)}, chunks)
    if stages * chunks <= layers:
        refuse_stages(stack, stages, chunks)
        return
    with pytest.raises(
        PlacementError, match=f"need {stages * chunks} layers.* has {layers} blocks"
    ):
        refuse_stages(stack, stages, chunks)


@pytest.mark.parametrize(
    "layers, stages, chunks, works",
    [
        (3, 4, 1, "Would work: mesh.pipe up to 3"),
        (6, 4, 2, "mesh.pipe up to 3, or a parallel.pipeline_schedule without chunks"),
        (
            9,
            4,
            3,
            "Would work: mesh.pipe up to 3, or parallel.pipeline_chunks up to 2, or a "
            "parallel.pipeline_schedule without chunks",
        ),
        (2, 4, 2, "2 cannot form a pipeline"),
    ],
)
def test_what_is_refused_is_told_with_what_works(layers, stages, chunks, works):
    with pytest.raises(PlacementError) as refused:
        refuse_stages(Stack(layers, {"blocks/w": ("blocks/w",)}, chunks), stages, chunks)
    assert str(refused.value).endswith(works)


def test_a_model_without_repeated_blocks_is_told_what_is_needed():
    with pytest.raises(PlacementError) as refused:
        refuse_stages(None, 4, 1)
    for said in ("4 stages", '"layers"', "list", "parallel.units", "jaxspeed.PipelineModule"):
        assert said in str(refused.value)
