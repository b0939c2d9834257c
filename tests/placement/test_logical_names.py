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


def test_a_pattern_that_covers_nothing_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.groups: 'nothing' .* blocks/0/up/kernel"):
        check_patterns("optimizer.groups", ["up", "nothing"], [leaf.path for leaf in LEAVES])
