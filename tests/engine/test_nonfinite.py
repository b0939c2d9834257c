"""The first leaf that is not finite is named by its path."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.engine.diagnose import first_nonfinite, nonfinite_flags


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


def test_a_finite_tree_has_none():
    assert first_nonfinite(tree()) is None


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_bad_element_is_enough(value):
    assert first_nonfinite(tree(block=value)) == "blocks/1/kernel"


def test_the_first_of_several_is_named():
    assert first_nonfinite(tree(block=jnp.nan, scale=jnp.nan)) == "blocks/1/kernel"
    assert first_nonfinite(tree(scale=jnp.inf)) == "scale"


def test_the_largest_finite_number_is_finite():
    assert first_nonfinite({"x": jnp.finfo(jnp.float32).max}) is None


def test_flags_work_inside_jit():
    flags = jax.jit(nonfinite_flags)(tree(scale=jnp.nan))
    assert bool(flags["scale"])
    assert not any(jax.tree.leaves(flags["blocks"]))
