"""What the section `lora` adapts and trains, and what is wrong with one."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.adapters.adapter import leaves_with_adapters
from jaxspeed.adapters.choose_adapters import choose_adapters, usual_dims
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.optim import PathGroup
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.trainable import ALL_TRAINED, TrainRule

pytestmark = pytest.mark.fast


def leaf(path, **dims):
    return Leaf(path, tuple(dims.values()), jnp.float32, tuple(dims))


LEAVES = [
    leaf("embed/table", vocab=32, embed=8),
    leaf("blocks/attn/q_proj/kernel", layers=3, embed=8, heads=2, head_dim=4),
    leaf("blocks/attn/q_proj/bias", layers=3, heads=2, head_dim=4),
    leaf("blocks/attn/o_proj/kernel", layers=3, heads=2, head_dim=4, embed=8),
    leaf("blocks/mlp/up/kernel", layers=3, embed=8, mlp=16),
    leaf("blocks/mlp/up/bias", layers=3, mlp=16),
    leaf("blocks/norm/scale", layers=3, embed=8),
    leaf("blocks/experts/down", layers=3, experts=4, mlp=16, embed=8),
    Leaf("tower/0/dense/kernel", (8, 8), jnp.float32),
    Leaf("tower/0/dense/bias", (8,), jnp.float32),
    Leaf("tower/1/dense/kernel", (8, 8), jnp.float32),
    Leaf("tower/1/conv/kernel", (3, 3, 8, 8), jnp.float32),
    leaf("head/kernel", embed=8, vocab=32),
]
Q, OUT, UP, DOWN = (LEAVES[i].path for i in (1, 3, 4, 7))
TOWER = ("tower/0/dense/kernel", "tower/1/dense/kernel")
LINEAR = {Q, OUT, UP, DOWN, *TOWER}


def chosen(uses=None, **lora):
    section = Config(train_batch_size=8, lora=lora).lora
    return choose_adapters(section, LEAVES, uses)


@pytest.mark.parametrize(
    "lora, paths",
    [
        ({}, LINEAR),
        ({"target_modules": "all-linear"}, LINEAR),
        ({"target_modules": ["q_proj"]}, {Q}),
        ({"target_modules": ["attn.q_proj", "dense"]}, {Q, *TOWER}),
        ({"target_modules": ["blocks/attn/*"]}, {Q, OUT}),
        ({"target_modules": ["embed", "head", "conv"]}, {
            "embed/table", "head/kernel", "tower/1/conv/kernel",
        }),
        ({"exclude_modules": ["blocks.attn.q_proj", "tower"]}, {OUT, UP, DOWN}),
        ({"target_parameters": ["experts.down"]}, {DOWN}),
        ({"target_parameters": ["experts.down"], "target_modules": ["up"]}, {DOWN, UP}),
        ({"layers_to_transform": 1}, {Q, OUT, UP, DOWN, TOWER[1]}),
        ({"modules_to_save": ["q_proj"]}, LINEAR - {Q}),
    ],
)  # fmt: skip
def test_weights_are_chosen_by_names_and_patterns(lora, paths):
    assert {*chosen(**lora).adapters} == paths


def test_names_that_the_model_has_nowhere_are_those_of_another_library():
    there = {
        UP: [(i, f"model.layers.{i}.mlp.up_proj") for i in range(3)],
        DOWN: [(i, f"model.layers.{i}.mlp.experts.down_proj") for i in range(3)],
        "embed/table": [(None, "model.embed_tokens"), (None, "lm_head")],
        Q: [(i, f"model.layers.{i}.self_attn.up") for i in range(3)],  # ours is another one
    }

    def chosen(**lora):
        section = Config(train_batch_size=8, lora=lora).lora
        return choose_adapters(section, LEAVES, None, other_names=lambda shapes: there)

    found = chosen(
        target_modules=["up_proj", "o_proj", "layers.1.mlp.experts.down_proj"],
        rank_pattern={"layers.2.mlp.up_proj": 2},
        alpha_pattern={"mlp.up_proj": 4},
        modules_to_save=["lm_head"],
    )
    ranks = {path: adapter.ranks for path, adapter in found.adapters.items()}
    assert ranks == {UP: (8, 8, 2), OUT: (8,), DOWN: (0, 8, 0)}
    assert found.adapters[UP].scales == (0.5, 0.5, 2) and found.trained == {"embed/table"}
    assert chosen(target_modules=["up"]).adapters.keys() == {UP}
    assert chosen(target_parameters=["experts.down_proj"]).adapters.keys() == {DOWN}
    assert chosen(exclude_modules=["up_proj"]).adapters.keys() == LINEAR - {UP}
    with pytest.raises(ConfigError, match=r"'up_projj' names nothing .*model.layers.mlp.up_proj"):
        chosen(target_modules=["up_projj"])


def test_roles_of_dims_are_those_of_flaxs_layers_or_of_the_traced_loss():
    found = chosen(target_modules=["*"]).adapters
    assert found[Q].dims == WeightDims((0,), (1,), (2, 3), "product")
    assert found[OUT].dims == WeightDims((0,), (1, 2), (3,), "product")
    assert found[DOWN].dims == WeightDims((0, 1), (2,), (3,), "product")
    assert found["embed/table"].dims == WeightDims((), (0,), (1,), "lookup")
    assert found["tower/1/conv/kernel"].dims == WeightDims((), (0, 1, 2), (3,), "convolution")
    other = WeightDims((), (1,), (0,), "product")
    traced = chosen({TOWER[0]: [other]}).adapters
    assert {*traced} == {TOWER[0]} and traced[TOWER[0]].dims == other
    query = Leaf("attention/query/kernel", (8, 2, 4), jnp.float32)  # Flax's, without names
    out = Leaf("attention/out/kernel", (2, 4, 8), jnp.float32)
    assert usual_dims(query) == WeightDims((), (0,), (1, 2), "product")
    assert usual_dims(out) == WeightDims((), (0, 1), (2,), "product")
    assert found[Q].is_assumed and not traced[TOWER[0]].is_assumed


def test_leaves_have_the_weights_names_and_lead_with_the_stacked_dims():
    (q,) = (leaf for leaf in LEAVES if leaf.path == Q)
    a, b, magnitude = chosen(r=2, target_modules=["q_proj"], use_dora=True).adapters[Q].leaves(q)
    assert (a.path, a.shape, a.names) == (f"lora/{Q}/A", (3, 8, 2), ("layers", "embed", None))
    assert (b.path, b.shape) == (f"lora/{Q}/B", (3, 2, 2, 4))
    assert b.names == ("layers", None, "heads", "head_dim")
    assert (magnitude.shape, magnitude.names) == ((3, 2, 4), ("layers", "heads", "head_dim"))


def test_ranks_and_scales_are_those_of_the_config():
    def of(path, **lora):
        adapter = chosen(**lora).adapters[path]
        return adapter.ranks, adapter.scales

    assert of(Q) == ((8,), (1.0,))
    assert of(Q, r=2, lora_alpha=6) == ((2,), (3.0,))
    assert of(Q, r=4, lora_alpha=6, use_rslora=True) == ((4,), (3.0,))
    assert of(Q, r=4, rank_pattern={"q_proj": 2}) == ((2,), (4.0,))
    assert of(OUT, r=4, rank_pattern={"q_proj": 2}) == ((4,), (2.0,))
    assert of(Q, r=4, alpha_pattern={"attn.q_proj": 2}) == ((4,), (0.5,))
    ranks, scales = of(Q, r=2, rank_pattern={"blocks[1:]/attn": 4}, use_rslora=True)
    assert ranks == (2, 4, 4) and scales == (8 / math.sqrt(2), 4.0, 4.0)
    ranks, _ = of(Q, r=2, layers_to_transform=[0, 2])
    assert ranks == (2, 0, 2)
    ranks, _ = of(Q, r=2, target_modules=["blocks[1]/attn"])
    assert ranks == (0, 2, 0)


def test_what_is_trained_beside_the_adapters():
    q, up, dense = "blocks/attn/q_proj/bias", "blocks/mlp/up/bias", "tower/0/dense/bias"
    assert chosen().trained == frozenset()
    assert chosen(bias="all").trained == {q, up, dense}
    assert chosen(bias="lora_only", target_modules=["up"]).trained == {up}
    assert chosen(modules_to_save=["head", "norm"]).trained == {"head/kernel", "blocks/norm/scale"}


def test_dropout_and_dora_are_the_adapters():
    (adapter, *_) = chosen(lora_dropout=0.25, use_dora=True).adapters.values()
    assert (adapter.dropout, adapter.dora) == (0.25, True)


@pytest.mark.parametrize(
    "lora, said",
    [
        (
            {"target_modules": ["q_porj"]},
            r"lora.target_modules: 'q_porj' names nothing .* nearest: blocks.attn.q_proj",
        ),
        ({"target_modules": ["scale"]}, "'scale' names nothing that this can be for"),
        ({"exclude_modules": ["k_proj"]}, r"lora.exclude_modules: 'k_proj' names nothing"),
        ({"target_parameters": ["experts.gate"]}, r"lora.target_parameters: 'experts.gate'"),
        ({"modules_to_save": ["score"]}, r"lora.modules_to_save: 'score' names nothing"),
        (
            {"modules_to_save": ["blocks[1:]/mlp"]},
            "lora.modules_to_save: names 2 of the 3 layers of blocks/mlp/up/kernel",
        ),
        ({"rank_pattern": {"k_proj": 2}}, r"lora.rank_pattern: 'k_proj' names nothing"),
        ({"alpha_pattern": {"k_proj": 2}}, r"lora.alpha_pattern: 'k_proj' names nothing"),
        ({"r": 9}, r"lora.r: rank 9 is above 8, the smaller dim of blocks/attn/q_proj/kernel"),
        ({"layers_to_transform": [1, 7]}, r"lora.layers_to_transform: found 7, .* has 3 layers"),
        ({"target_modules": ["a//b"]}, r"lora.target_modules: found 'a//b'. Needs a pattern"),
        (
            {"exclude_modules": ["*"]},
            r"lora: no weight of this model is adapted; .* blocks.attn.q_proj",
        ),
    ],
)
def test_a_wrong_section_is_one_error(lora, said):
    with pytest.raises(ConfigError, match=said):
        chosen(**lora)


def test_all_that_is_wrong_comes_in_one_error():
    with pytest.raises(ConfigError) as caught:
        chosen(target_modules=["a_proj", "q_proj"], modules_to_save=["score"], r=100)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "lora.modules_to_save",
        "lora.target_modules",
        "lora.r",
    ]


def test_a_group_of_frozen_weights_is_warned_of(caplog):
    """A pattern that was written for the weights covers none of their adapters."""
    found = chosen(target_modules=["up"])
    leaves = leaves_with_adapters([replace(x, trainable=False) for x in LEAVES], found.adapters)
    groups = [PathGroup("blocks/mlp/**", 2.0), PathGroup("lora/blocks[1:]/**", 0.5)]
    TrainRule(ALL_TRAINED.selection, groups).check(leaves)
    (said,) = caplog.messages
    assert said == (
        "optimizer.groups: 'blocks/mlp/**' covers nothing that is trained, and does nothing; "
        "its adapters are 'lora/blocks/mlp/**'"
    )


class Saved:
    """Adapters of rank 4 and alpha 8 of two modules, beside a trained head."""

    def settings(self, shapes):
        return {"r": 4, "lora_alpha": 8, "use_rslora": False, "modules_to_save": ["head/kernel"]}

    def ranks(self, shapes):
        return {path: (np.full(3, 4), np.full(3, 8.0)) for path in (Q, UP)}


def test_a_saved_adapter_says_what_is_adapted_and_keys_may_say_the_same():
    def of(**keys):
        section = Config(train_batch_size=8, lora={"adapter": "saved", **keys}).lora
        return choose_adapters(section, LEAVES, None, Saved())

    found = of()
    assert {*found.adapters} == {Q, UP} and found.trained == {"head/kernel"}
    assert found.adapters[Q].ranks == (4,) and found.section.r == 4
    same = {"target_modules": ["q_proj", "mlp.up"], "modules_to_save": ["head"], "r": 4}
    assert of(**same).adapters == found.adapters
    for keys, said in (
        ({"r": 2}, r"lora.adapter: saved has its own settings, and lora.r is 2; remove it"),
        (
            {"target_modules": ["q_proj"]},
            rf"lora.adapter: what saved adapts and trains \(of {UP}\) is not what "
            "lora.target_modules names; remove it",
        ),
        ({"rank_pattern": {"up": 2}, "target_modules": ["up", "q_proj"]}, rf"\(of {UP}\).* them"),
        ({"modules_to_save": ["norm"]}, r"\(of blocks/norm/scale, head/kernel\)"),
        ({"target_modules": ["q_porj"]}, "is not what lora.target_modules names"),
    ):
        with pytest.raises(ConfigError, match=said):
            of(**keys)


def test_a_saved_adapter_of_experts_has_no_dropout():
    """As a fresh one: `target_parameters` exclude it."""

    class Experts(Saved):
        def ranks(self, shapes):
            return {path: (np.full(size, 4), np.full(size, 8.0)) for path, size in SIZES.items()}

    SIZES = {UP: (3,), DOWN: (3, 4)}

    def of(**keys):
        section = Config(train_batch_size=8, lora={"adapter": "saved", **keys}).lora
        return choose_adapters(section, LEAVES, None, Experts())

    assert {*of().adapters} == {UP, DOWN}
    with pytest.raises(ConfigError, match=rf"lora_dropout: found 0.1, .*experts \({DOWN}\)"):
        of(lora_dropout=0.1)


def test_dora_of_experts_that_peft_cannot_have_is_warned_of(caplog):
    section = Config(train_batch_size=8, lora={"use_dora": True}).lora
    names = {DOWN: [(None, "layers.0.experts.down_proj")], Q: [(None, "layers.0.q_proj")]}
    choose_adapters(section, LEAVES, None, other_names=lambda shapes: names)
    (said,) = caplog.messages
    assert f"({DOWN})" in said and "lora.exclude_modules" in said
    caplog.clear()
    choose_adapters(section, LEAVES, None, other_names=lambda shapes: {})
    excluded = section.model_copy(update={"exclude_modules": ["down"]})
    choose_adapters(excluded, LEAVES, None, other_names=lambda shapes: names)
    assert not caplog.messages


def test_biases_of_the_adapted_layers_alone_are_trained(caplog):
    bias = "blocks/mlp/up/bias"
    found = chosen(bias="lora_only", target_modules=["up", "dense"], layers_to_transform=[1])
    assert found.trained == {bias}
    assert found.layers == {bias: [False, True, False]}
    found = chosen(bias="lora_only", target_modules=["up"])
    assert found.trained == {bias} and not found.layers
    found = chosen(bias="all", target_modules=["up"], layers_to_transform=[1])
    assert len(found.trained) == 3 and not found.layers
    assert not caplog.messages
    chosen(bias="lora_only", target_modules=["o_proj"])
    (said,) = caplog.messages
    assert said == "lora.bias is 'lora_only', and no parameter of an adapted module is a bias"


@pytest.mark.parametrize(
    "sections, said",
    [
        ({"lora": {"target_parameters": ["a"], "lora_dropout": 0.1}}, "lora.lora_dropout: found 0"),
        ({"lora": {"target_parameters": ["a"], "use_dora": True}}, "lora.use_dora: found true"),
        ({"lora": {}, "trainable": ["**"]}, "trainable: found set, with lora"),
        ({"lora": {"target_modules": "q_proj"}}, '"all-linear" or a list of module names'),
        ({"lora": {"init_lora_weights": "pissa"}}, 'true, false or "gaussian"'),
        ({"lora": {"lora_dropout": 1}}, "lora.lora_dropout: found 1. Needs .* less than 1"),
        ({"lora": {"rank": 8}}, 'lora.rank: found an unknown key, set to 8. Did you mean "r"'),
        ({"lora": {"lora_alfa": 8}}, 'Did you mean "lora_alpha"'),
        ({"lora": {"dropout": 0.1}}, 'Did you mean "lora_dropout"'),
        ({"lora": {"lora_aplha": 8}}, 'Did you mean "lora_alpha"'),
    ],
)
def test_keys_that_exclude_each_other_are_problems_of_the_config(sections, said):
    with pytest.raises(ConfigError, match=said):
        Config(train_batch_size=8, **sections)
