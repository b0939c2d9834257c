"""Names of dims by path pattern, for models that give none."""

import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.placement import Leaf
from jaxspeed.placement.rules import check_patterns, with_names

pytestmark = pytest.mark.fast

LEAVES = (
    Leaf("blocks/0/up/kernel", (8, 32), "float32"),
    Leaf("blocks/0/up/bias", (32,), "float32"),
    Leaf("head/kernel", (8, 64), "float32", ("embed", "vocab")),
)


def test_a_leaf_without_names_takes_those_of_the_first_pattern_that_covers_it() -> None:
    named = with_names(LEAVES, {"**/up/kernel": ["embed", "mlp"], "kernel": [None, "other"]})
    assert [leaf.names for leaf in named] == [("embed", "mlp"), (), ("embed", "vocab")]


def test_a_stack_without_other_names_takes_them_and_stays_a_stack() -> None:
    stacks = (
        Leaf("blocks/0/kernel", (4, 8, 32), "float32", ("layers", None, None)),
        Leaf("blocks/1/kernel", (4, 8, 32), "float32", ("layers", "embed", None)),
    )
    named = with_names(stacks, {"kernel": [None, "embed", "mlp"]})
    assert [leaf.names for leaf in named] == [("layers", "embed", "mlp"), stacks[1].names]


def test_a_pattern_with_another_number_of_names_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1 names to blocks/0/up/kernel, which has 2 dims"):
        with_names(LEAVES, {"**/up": ["mlp"]})


def test_an_ellipsis_stands_for_any_number_of_dims() -> None:
    leaves = (
        Leaf("conv/kernel", (3, 3, 8, 16), "float32"),
        Leaf("dense/kernel", (8, 16), "float32"),
        Leaf("row/kernel", (16,), "float32"),
    )
    named = with_names(leaves, {"kernel": ["...", "mlp"]})
    assert [leaf.names for leaf in named] == [(None, None, None, "mlp"), (None, "mlp"), ("mlp",)]
    assert with_names(leaves[:1], {"kernel": ["a", "...", "b"]})[0].names == ("a", None, None, "b")


@pytest.mark.parametrize("names", [["a", "b", "...", "c"], ["...", "..."]])
def test_an_ellipsis_that_cannot_be_filled_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="stands for any number of dims"):
        with_names(LEAVES[:1], {"kernel": names})


def test_a_pattern_that_covers_nothing_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups: 'nothing' .* blocks/0/up/kernel"):
        check_patterns("optimizer.groups", ["up", "nothing"], [leaf.path for leaf in LEAVES])
