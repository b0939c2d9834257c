"""The leaves that are not finite are flagged."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.engine.diagnose import nonfinite_flags
from jaxspeed.placement.paths import flat_with_paths


def tree(**bad):
    leaves = {
        "blocks": [{"kernel": jnp.ones((2, 3))}, {"kernel": jnp.ones((2, 3), jnp.bfloat16)}],
        "count": jnp.array([1, 2]),
        "key": jax.random.key(0),
        "scale": jnp.ones(()),
    }
    if "block" in bad:
        leaves["blocks"][1]["kernel"] = jnp.ones((2, 3), jnp.bfloat16).at[1, 2].set(bad["block"])
    if "scale" in bad:
        leaves["scale"] = jnp.asarray(bad["scale"])
    return leaves


def flagged(tree):
    flags = jax.jit(nonfinite_flags)(tree)
    return [path for path, bad in flat_with_paths(flags).items() if bad]


def test_a_finite_tree_has_none():
    assert flagged(tree()) == []


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_bad_element_is_enough(value):
    assert flagged(tree(block=value)) == ["blocks/1/kernel"]


def test_several_are_in_the_order_of_the_tree():
    assert flagged(tree(block=jnp.nan, scale=jnp.nan)) == ["blocks/1/kernel", "scale"]


def test_the_largest_finite_number_is_finite():
    assert flagged({"x": jnp.finfo(jnp.float32).max}) == []
