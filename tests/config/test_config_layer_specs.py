"""Tensor sharding of weights: layer_specs in both forms, presets, regexes of torch's names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.config import Config, match
from jaxspeed.config.layer_specs import PRESETS
from jaxspeed.config.torch_names import path_patterns

pytestmark = pytest.mark.fast


def specs(given, **section):
    config = Config(
        tensor_parallel={"partition_config": {"layer_specs": given} | section.pop("more", {})}
        | section
    )
    return [(spec.pattern, spec.type, spec.dim) for spec in config.layer_specs]


def test_a_mapping_says_the_word_of_each_pattern_and_the_dim_where_it_must():
    given = {
        "**/up": "column",
        "blocks/*/down": {"type": "ROW", "dim": -2},
        "embed": "vocabulary",
        "router": {"type": "replicated"},
    }
    assert specs(given) == [
        ("**/up", "column", None),
        ("blocks/*/down", "row", -2),
        ("embed", "vocabulary", None),
        ("router", "replicated", None),
    ]


def test_deepspeeds_list_comes_to_the_same_specs():
    given = [
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.[qkv]_proj\.weight$"]},
        {"patterns": [r".*\.router$", "blocks/*/gate"], "partition_type": "skip"},
    ]
    assert specs(given) == [
        ("o_proj", "row", None),
        ("down_proj", "row", None),
        ("q_proj", "column", None),
        ("k_proj", "column", None),
        ("v_proj", "column", None),
        ("router", "replicated", None),
        ("blocks/*/gate", "replicated", None),
    ]


@pytest.mark.parametrize("given", [{"up": "row"}, [{"patterns": ["up"], "partition_type": "row"}]])
def test_layer_specs_come_before_the_presets_and_replace_it_where_it_is_switched_off(given):
    """DeepSpeed's merge_autotp_configs, and get_partition_config_object without it."""
    first, *others = specs(given, preset_model="llama")
    assert first == ("up", "row", None)
    assert ("up", "column", None) in others
    switched_off = {"use_default_specs": False}
    assert specs(given, preset_model="llama", more=switched_off) == [("up", "row", None)]


def test_a_preset_alone_is_the_presets_specs():
    config = Config(tensor_parallel={"preset_model": "llama"})
    assert {spec.pattern: spec.type for spec in config.layer_specs}["down_proj"] == "row"
    assert Config().layer_specs == ()


@pytest.mark.parametrize(
    ("word", "preset"),
    [
        ("gpt2", "gpt2"),
        ("GPT-2", "gpt2"),
        ("gpt_2", "gpt2"),
        ("gpt3", "gpt2"),
        ("Llama", "llama"),
        ("llama-3", "llama"),
        ("llama2", "llama"),
        ("qwen2", "llama"),
        ("ViT", "vit"),
    ],
)
def test_presets_have_the_names_that_users_write(word, preset):
    given = Config(tensor_parallel={"preset_model": word}).layer_specs
    assert [spec.pattern for spec in given] == [pattern for pattern, _, _ in PRESETS[preset]]


# DeepSpeed's own AutoTPPresets for families whose weights are not fused, by torch's names.
DEEPSPEED_LLAMA = {
    "model.layers.0.self_attn.o_proj.weight": "row",
    "model.layers.0.self_attn.q_proj.weight": "column",
    "model.layers.0.self_attn.k_proj.weight": "column",
    "model.layers.0.self_attn.v_proj.weight": "column",
    "model.layers.0.mlp.down_proj.weight": "row",
    "model.layers.0.mlp.up_proj.weight": "column",
    "model.layers.0.mlp.gate_proj.weight": "column",
}


@pytest.mark.parametrize("preset", ["llama", "qwen2"])
def test_a_preset_says_of_each_weight_what_deepspeeds_says(preset):
    given = Config(tensor_parallel={"preset_model": preset}).layer_specs
    for name, word in DEEPSPEED_LLAMA.items():
        path = name.removesuffix("weight").replace(".", "/") + "kernel"
        assert next(spec.type for spec in given if match(spec.pattern, path)) == word


REGEXES = {
    r".*\.o_proj\.weight$": ["o_proj"],
    r".*\.o_proj$": ["o_proj"],
    r".*\.o_proj": ["o_proj"],
    r".*o_proj": ["*o_proj"],
    r".*o_proj.*": ["*o_proj*"],
    r"lm_head": ["lm_head"],
    r"^model\.layers\.\d+\.mlp\.w[13]\.weight$": [
        "model/layers/*/mlp/w1",
        "model/layers/*/mlp/w3",
    ],
    r".*\.experts\.[0-9]+\.w[1-3]$": ["**/experts/*/w1", "**/experts/*/w2", "**/experts/*/w3"],
    r".*\.layers\.[^.]+\.attn\.out": ["**/layers/*/attn/out"],
    r".*\.experts\..*\.w1\.weight$": ["**/experts/**/w1"],
    r".*\.mlp\.(?:up|gate)_proj\.weight$": ["**/mlp/up_proj", "**/mlp/gate_proj"],
    r".*\.(q_a|kv_a_proj_with_mqa)(\.weight|\.bias)$": [
        "q_a",
        "**/q_a/bias",
        "kv_a_proj_with_mqa",
        "**/kv_a_proj_with_mqa/bias",
    ],
    r".*\.query\-key": ["query-key"],
    r".*self_attn.o_proj.weight": ["**/*self_attn/o_proj"],
    r".*": ["**"],
}  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_of_torchs_names_becomes_path_patterns(regex):
    assert path_patterns(regex) == REGEXES[regex]


@pytest.mark.parametrize(
    "regex",
    [r".*attn.*proj$", r"(?!a)b", r"a{2}", r"q?_proj", r".*\.w\d", r"a\b", "(a", "[^q]_proj", "a$b",
     "(" * 5000, "[0-9]" * 4, "", "**", r".*\.", "[+-/]x", "a|", "é"],
)  # fmt: skip
def test_what_no_path_pattern_says_is_not_translated(regex):
    assert path_patterns(regex) is None


NAME = st.sampled_from(["q_proj", "k_proj", "up", "gate", "w1", "layers", "3", "attn"])
PIECE = st.sampled_from(
    [r"[qk]_proj", r"(up|gate)", r"\d+", r"w[12]", "attn", "layers", r"[^.]+", ".*"]
)


@given(st.lists(PIECE, min_size=1, max_size=4), st.lists(NAME, min_size=1, max_size=5))
def test_the_path_patterns_cover_what_the_regex_matches(pieces, names):
    """As DeepSpeed does, `re.match` on the parameter's name."""
    regex = r".*\." + r"\.".join(pieces) + r"\.weight$"
    patterns = path_patterns(regex)
    name, path = ".".join(["model", *names, "weight"]), "/".join(["model", *names, "kernel"])
    if re.match(regex, name):
        assert patterns is not None
        assert any(match(pattern, path) for pattern in patterns)


@given(st.text(alphabet=r"abq_.*+?|()[]^$\-d0-9/", max_size=12))
def test_any_regex_is_translated_or_is_not(regex):
    assert path_patterns(regex) != []


@pytest.mark.parametrize(
    ("parallel", "tensor_parallel", "overlap"),
    [
        ({}, {}, "auto"),
        ({}, {"tp_overlap_comm": True}, "auto"),
        ({"sequence_parallel_activations": True}, {}, "auto"),
        ({"sequence_parallel_activations": True}, {"tp_overlap_comm": True}, "ring"),
        (
            {"sequence_parallel_activations": True, "tensor_overlap": "ring_both_ways"},
            {"tp_overlap_comm": True},
            "ring_both_ways",
        ),
        ({"tensor_overlap": "NONE"}, {}, "none"),
    ],
)
def test_the_words_for_overlap_come_to_one(parallel, tensor_parallel, overlap):
    assert Config(parallel=parallel, tensor_parallel=tensor_parallel).tensor_overlap == overlap
