"""Presets have the published numbers of parameters, counted without making one."""

import math

import jax
import pytest
from flax import nnx

from jaxspeed import models

PUBLISHED = {
    ("gpt2", "gpt2"): 124_439_808,
    ("gpt2", "gpt2-medium"): 354_823_168,
    ("gpt2", "gpt2-large"): 774_030_080,
    ("gpt2", "gpt2-xl"): 1_557_611_200,
    ("llama", "llama3.2-1b"): 1_235_814_400,
    ("llama", "llama3.2-3b"): 3_212_749_824,
    ("llama", "llama3-8b"): 8_030_261_248,
    ("llama", "llama3-70b"): 70_553_706_496,
    ("llama", "llama3.1-8b"): 8_030_261_248,
    ("llama", "llama3.1-70b"): 70_553_706_496,
    ("gemma", "gemma2-2b"): 2_614_341_888,
    ("gemma", "gemma2-9b"): 9_241_705_984,
    ("gemma1", "gemma-2b"): 2_506_172_416,
    ("gemma1", "gemma-7b"): 8_537_680_896,
    ("phi3", "phi3-mini-4k"): 3_821_079_552,
    ("phi3", "phi4"): 14_659_507_200,
    ("phi3", "phi4-mini"): 3_836_021_760,
    ("granite", "granite3.3-2b"): 2_533_539_840,
    ("granite", "granite3.3-8b"): 8_170_864_640,
    ("smollm3", "smollm3-3b"): 3_075_098_624,
    ("ministral", "ministral-8b"): 8_019_808_256,
    ("olmo2", "olmo2-1b"): 1_484_916_736,
    ("olmo2", "olmo2-7b"): 7_298_617_344,
    ("olmo2", "olmo2-13b"): 13_716_198_400,
    ("glm4", "glm4-9b-chat"): 9_399_951_360,
    ("glm4", "glm4-9b-0414"): 9_400_279_040,
    ("olmo2", "olmo3-7b"): 7_298_011_136,
    ("cohere", "command-r"): 34_980_831_232,
    ("cohere", "command-r7b"): 8_028_033_024,
    ("starcoder2", "starcoder2-3b"): 3_030_371_328,
    ("starcoder2", "starcoder2-15b"): 15_957_889_024,
    ("exaone4", "exaone4-1.2b"): 1_279_391_488,
    ("exaone4", "exaone4-32b"): 32_003_216_384,
    ("seed_oss", "seed-oss-36b"): 36_151_104_512,
    ("arcee", "afm-4.5b"): 4_619_184_640,
    ("falcon", "falcon-7b"): 6_921_720_704,
    ("falcon", "falcon-40b"): 41_303_293_952,
    ("falcon", "falcon-rw-1b"): 1_311_625_216,
    ("gpt_neox", "pythia-1.4b"): 1_414_647_808,
    ("gpt_neox", "pythia-6.9b"): 6_857_302_016,
    ("mixtral", "mixtral-8x7b"): 46_702_792_704,
    ("mixtral", "mixtral-8x22b"): 140_620_634_112,
    ("mixtral", "qwen3-30b-a3b"): 30_532_122_624,
    ("mixtral", "qwen3-235b-a22b"): 235_093_634_560,
    ("deepseek", "deepseek-v2-lite"): 15_706_484_224,
    ("deepseek", "deepseek-v2"): 235_741_434_880,
    ("deepseek", "deepseek-v3"): 671_026_404_352,
    ("gpt_oss", "gpt-oss-20b"): 20_914_757_184,
    ("gpt_oss", "gpt-oss-120b"): 116_829_156_672,
    ("bert", "bert-base"): 109_514_298,
    ("bert", "bert-large"): 335_174_458,
    ("modernbert", "modernbert-base"): 149_655_232,
    ("modernbert", "modernbert-large"): 395_881_664,
    ("t5", "t5-small"): 60_506_624,
    ("t5", "t5-base"): 222_903_552,
    ("t5", "t5-large"): 737_668_096,
    ("t5", "t5-v1.1-base"): 247_577_856,
    ("t5", "t5-v1.1-large"): 783_150_080,
    ("vit", "vit-ti16"): 5_717_416,
    ("vit", "vit-s16"): 22_050_664,
    ("vit", "vit-b16"): 86_567_656,
    ("vit", "vit-l16"): 304_326_632,
    ("vit", "vit-h14"): 632_045_800,
}


def abstract(family, preset=None, **overrides):
    built = models.build(family, preset, overrides)
    return nnx.eval_shape(lambda: built.factory(nnx.Rngs(0)))


def count(family, preset):
    leaves = jax.tree.leaves(nnx.state(abstract(family, preset), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize(("family", "preset"), PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(family, preset):
    assert count(family, preset) == PUBLISHED[family, preset]


def test_gpt3_has_the_shape_of_its_paper():
    """12 L E^2 weights and 13 L E norms and biases, tokens and positions, the last norm."""
    wide, deep = 12288, 96
    embeddings = (50257 + 2048) * wide
    expected = 12 * deep * wide**2 + 13 * deep * wide + embeddings + 2 * wide
    assert count("gpt2", "gpt3-175b") == expected
    assert round(expected / 1e9) == 175


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_dim_of_every_parameter_is_named(family):
    known = {"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "pos", "patch"}
    known |= {"classes", "input", "experts", "router", "q_rank", "kv_rank", "frames"}
    for path, variable in nnx.to_flat_state(nnx.state(abstract(family, "tiny"), nnx.Param)):
        names = variable.get_metadata()["logical_axes"]
        assert len(names) == len(variable.shape), path
        assert {name.removeprefix("image_") for name in names} <= known, path
        stacks = {"blocks", "dense_blocks", "encoder", "decoder"}
        assert (names[0] == "layers") == (not stacks.isdisjoint(path)), path


def test_names_stand_at_the_dims_they_mean():
    model = abstract("llama", "tiny")
    sizes = {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
    sizes |= {"vocab": 256}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = variable.get_metadata()["logical_axes"]
        assert tuple(sizes[name] for name in names) == variable.shape, path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-2", "gpt2", {}), "unknown model family 'gpt-2': did you mean 'gpt2'"),
        (("gpt2", "gpt2-xxl", {}), "unknown preset 'gpt2-xxl': did you mean 'gpt2-xl'"),
        (("llama", "tiny", {"hidden": 1}), "unknown field of the llama config 'hidden'"),
        (("vit", "tiny", {"patch_size": 7}), "patch_size 7 does not divide image_size 32"),
        (
            ("llama", "tiny", {"rope_scaling": {"rope_type": "cubic"}}),
            "rope_type is 'cubic'; known are llama3",
        ),
        (
            ("gemma", "tiny", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}),
            "yarn needs original_max_position_embeddings",
        ),
        (
            ("gpt2", "tiny", {"num_attention_heads": 5}),
            "num_attention_heads 5 does not divide hidden_size 64",
        ),
        (
            ("llama", "tiny", {"num_key_value_heads": 3}),
            "heads 3 does not divide num_attention_heads 4",
        ),
    ],
)
def test_a_wrong_name_or_size_is_refused_with_what_would_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(*arguments)


def test_overrides_change_a_preset():
    config = models.build("llama", "tiny", {"rope_scaling": {"factor": 4.0}}).config
    assert config.rope_scaling.factor == 4.0
    assert config.hidden_size == 64


def test_a_number_that_is_no_size_may_be_zero():
    config = models.build("deepseek", "tiny", {"num_dense_layers": 0, "min_capacity": 0}).config
    assert (config.num_dense_layers, config.min_capacity) == (0, 0)
    with pytest.raises(ValueError, match=r"num_dense_layers of the .* is -1; it needs int$"):
        models.build("deepseek", "tiny", {"num_dense_layers": -1})


@pytest.mark.parametrize("heads", [0, -1])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "vit"])
def test_no_heads_are_refused(family, heads):
    with pytest.raises(
        ValueError, match=r"num_attention_heads of the .* config is -?[01]; it needs int of at "
    ):
        models.build(family, "tiny", {"num_attention_heads": heads})
