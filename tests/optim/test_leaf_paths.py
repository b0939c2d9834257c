"""Masks and groups go by a leaf's path, in any pytree."""

import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.optim import PathGroup, PathRules, build_optimizer, is_norm_or_bias
from jaxspeed.optim.norms_and_biases import map_with_path
from tests.optim.from_config import built


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_node_class
class Plain:
    """Registered without key paths: its children are numbered."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_path_names_dicts_lists_attributes_and_unnamed_children():
    tree = {"a": [0, {"b": 1}], "c": Pair(2, Plain(3, 4)), "d/e": 5}
    paths = jax.tree.leaves(map_with_path(lambda path, leaf: path, tree))
    assert paths == ["a/0", "a/1/b", "c/left", "c/right/0", "c/right/1", "d/e"]


@pytest.mark.parametrize(
    "path",
    [
        "blocks/attn/q_proj/bias",
        "blocks/3/mlp/up/bias",
        "dense/b",
        "mlp/b1",
        "attn/in_proj_bias",
        "lstm/bias_ih",
        "blocks/norm1/scale",
        "norm/gamma",
        "bn/beta",
        "blocks/ls1/gamma",
        "clip/logit_scale",
        "h/0/ln_1/weight",
        "ln_f/weight",
        "lnf/w",
        "final_norm/weight",
        "layers/input_layernorm/weight",
        "LayerNorm_0/scale",
        "RMSNorm_0/kernel",
        "BatchNorm_1/whatever",
        "norms/3/weight",
        "attn/q_norm/weight",
    ],
)
def test_norms_and_biases_are_known_by_path(path):
    assert is_norm_or_bias(path)


@pytest.mark.parametrize(
    "path",
    [
        "blocks/attn/q_proj/kernel",
        "embed/embedding",
        "lm_head/kernel",
        "dense/w",
        "mlp/w1",
        "scale_net/dense/kernel",
        "norm1/linear/kernel",
        "adaLN_modulation/1/kernel",
        "normal_head/kernel",
        "rel_bias/embedding",
        "normalizer/kernel",
        "lora/blocks/up/kernel/B",
        "lora/blocks/up/kernel/B/[0:2]",
        "0/1/2",
    ],
)
def test_other_leaves_are_not_taken_for_norms_or_biases(path):
    assert not is_norm_or_bias(path)


PARAMS = {
    "blocks": {"mlp": {"kernel": (3, 4, 4), "bias": (3, 4)}, "norm": {"scale": (3, 4)}},
    "embed": {"embedding": (5, 4)},
    "head": {"kernel": (4, 5)},
}


def ones():
    return jax.tree.map(jnp.ones, PARAMS, is_leaf=lambda x: isinstance(x, tuple))


def decrements(type_, params, **options):
    """How far each leaf falls in one update, by path: all parameters and gradients are 1."""
    optimizer = built(type_, params, **options).transform
    updates, _ = jax.jit(optimizer.update)(ones(), optimizer.init(ones()), ones())
    falls: dict[str, float] = {}

    def note(path, leaf):
        assert np.ptp(leaf) == 0
        falls[path] = round(-float(leaf.ravel()[0]), 6)

    map_with_path(note, updates)
    return falls


def fnmatch_path(pattern, path):
    return fnmatch.fnmatchcase(path, pattern)


def test_norms_and_biases_stay_out_of_the_decay_though_stacking_gives_them_two_dims():
    decayed, plain = 0.15, 0.1  # lr (1 + decay), lr
    assert decrements("SGD", {"lr": 0.1, "weight_decay": 0.5}, exclude_norms_and_biases=True) == {
        "blocks/mlp/kernel": decayed,
        "blocks/mlp/bias": plain,
        "blocks/norm/scale": plain,
        "embed/embedding": decayed,
        "head/kernel": decayed,
    }


def test_without_being_asked_all_leaves_decay():
    falls = decrements("SGD", {"lr": 0.1, "weight_decay": 0.5})
    assert set(falls.values()) == {0.15}


GROUPS = [
    {"pattern": "blocks/**/bias", "lr_factor": 2.0},
    {"pattern": "blocks/**", "lr_factor": 3.0, "weight_decay": 0.2},
    {"pattern": "embed/**", "frozen": True},
]


def test_the_first_group_that_matches_gives_factor_and_decay():
    assert decrements("SGD", {"lr": 0.1, "weight_decay": 0.5}, groups=GROUPS) == {
        "blocks/mlp/kernel": 0.36,
        "blocks/mlp/bias": 0.3,
        "blocks/norm/scale": 0.36,
        "embed/embedding": 0.0,
        "head/kernel": 0.15,
    }


def test_excluding_norms_is_stronger_than_a_group_that_names_their_layer():
    falls = decrements(
        "SGD", {"lr": 0.1, "weight_decay": 0.5}, groups=GROUPS, exclude_norms_and_biases=True
    )
    assert falls["blocks/norm/scale"] == 0.3
    assert falls["blocks/mlp/kernel"] == 0.36


@pytest.mark.default_cases("Adam", "AdamW", "Adagrad", "Lion", "Muon")
@pytest.mark.parametrize("type_", ["Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon"])
def test_every_optimizer_honours_a_groups_rate(type_):
    plain = decrements(type_, {"lr": 0.1})
    rates = [group | {"weight_decay": None} for group in GROUPS]
    grouped = decrements(type_, {"lr": 0.1}, groups=rates)
    factors = {"blocks/mlp/kernel": 3, "blocks/mlp/bias": 2, "blocks/norm/scale": 3}
    factors |= {"embed/embedding": 0, "head/kernel": 1}
    for path, factor in factors.items():
        assert plain[path] > 0
        assert grouped[path] == pytest.approx(factor * plain[path], rel=1e-4), path


@pytest.mark.parametrize("type_", ["Adam", "SGD", "Adagrad", "Lamb", "Lion", "Muon"])
def test_masked_leaves_are_passed_over(type_):
    """A frozen leaf that the caller has masked out has no state, and no update."""
    params = ones() | {"embed": {"embedding": optax.MaskedNode()}}
    optimizer = build_optimizer(type_, {"weight_decay": 0.1}, exclude_norms_and_biases=True)
    state = optimizer.init(params)
    updates, new_state = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert all(leaf.shape != (5, 4) for leaf in jax.tree.leaves(state))


def test_rules_tell_what_is_frozen():
    groups = [PathGroup("blocks/*bias"), PathGroup("embed/*", frozen=True)]
    rules = PathRules(groups, match=fnmatch_path)
    assert rules.frozen("embed/embedding") and not rules.frozen("head/kernel")


def test_groups_use_the_configs_patterns_by_default():
    optimizer = build_optimizer("SGD", {"lr": 0.1}, groups=[PathGroup("bias", lr_factor=0.5)])
    updates, _ = optimizer.update(ones(), optimizer.init(ones()), ones())
    np.testing.assert_allclose(updates["blocks"]["mlp"]["bias"], -0.05)
    np.testing.assert_allclose(updates["blocks"]["mlp"]["kernel"], -0.1)
