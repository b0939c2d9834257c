"""What is known of Hugging Face's model types: fields of configs, unknown types, the list."""

import dataclasses
import json
from collections.abc import Mapping

import pytest
from jaxspeed.models import (
    FAMILIES,
    HF_FAMILIES,
    MODEL_TYPES,
    WITH_IMAGES,
    family,
    from_pretrained,
    hf_form,
)

import jaxspeed
from jaxspeed.cli.main import main
from jaxspeed.interop.config_fields import NEUTRAL
from tests.interop import folders

pytestmark = pytest.mark.fast
PRESETS = [(name, preset) for name in HF_FAMILIES for preset in family(name).PRESETS]


class Recorded(Mapping):
    """A config.json, and which of its fields are read."""

    def __init__(self, values):
        self.values_, self.read = values, set()

    def __getitem__(self, name):
        self.read.add(name)
        return self.values_[name]

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)

    def get(self, name, default=None):
        self.read.add(name)
        return self.values_.get(name, default)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_config_comes_back_and_all_that_is_read_of_it_is_declared(name, preset):
    form, config = hf_form(name), family(name).PRESETS[preset]
    written = json.loads(json.dumps(form.write_config(config)))
    assert MODEL_TYPES[written["model_type"]] == name
    again = form.read_config(written)
    assert json.loads(json.dumps(form.write_config(again))) == written
    for field in dataclasses.fields(config):
        before, after = getattr(config, field.name), getattr(again, field.name)
        if field.name in getattr(config, "PARTS", ()):
            parts = {f.name for f in dataclasses.fields(before)}
            same = {n for n in parts if getattr(before, n) in (getattr(after, n), None)}
            assert same == parts
            continue
        assert before in (after, None), field.name  # None: written as the value that it stands for
    declared = {field.theirs for field in form.FIELDS} | NEUTRAL
    for missing in (None, *written):
        values = Recorded({n: value for n, value in written.items() if n != missing})
        try:
            form.read_config(values)
        except (jaxspeed.PretrainedError, KeyError, ValueError):
            assert missing is not None
        assert values.read <= declared, missing


UNKNOWN = {
    "model_type": "llama4",
    "architectures": ["Llama4ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "router_jitter_noise": None,
    "is_encoder_decoder": False,
    "add_cross_attention": True,
    "use_mup": True,
    "output_router_logits": False,
    "rope_scaling": None,
    "attn_temperature_tuning": True,
    "hidden_activation": "relu6",
    "vocab_size": 128,
}


def test_an_unknown_type_lists_what_no_family_supports(tmp_path):
    folders.folder(tmp_path, UNKNOWN, folders.llama_tensors())
    with pytest.raises(jaxspeed.PretrainedError) as found:
        from_pretrained(tmp_path)
    text = str(found.value)
    assert "model_type 'llama4' is of no known family: known are gpt2, llama, " in text
    assert "did you mean" not in text  # it has fields of its own, so it is no typo
    _, _, listed = text.partition("Fields of its config that no family supports:\n")
    assert [line.strip() for line in listed.splitlines()] == [
        "interleave_moe_layer_step = 1",
        "add_cross_attention = True",
        "use_mup = True",
        "attn_temperature_tuning = True",
        "hidden_activation = 'relu6'",
    ]


def test_an_unknown_type_of_known_fields_lists_none(tmp_path):
    folders.folder(tmp_path, folders.LLAMA | {"model_type": "lama"}, folders.llama_tensors())
    with pytest.raises(jaxspeed.PretrainedError, match="no family supports: none"):
        from_pretrained(tmp_path)


def test_report_lists_families_with_their_types_and_presets(capsys):
    assert main(["report", "--models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == FAMILIES.keys()
    types = {kind for each in found.values() for kind in each["model_types"]}
    assert types == {*MODEL_TYPES, *WITH_IMAGES}
    assert found["glm4"]["model_types"] == ["glm", "glm4"]
    assert "phi4" in found["phi3"]["presets"]
    assert main(["report", "--models"]) == 0
    assert "model_types: llama, mistral, qwen2, qwen3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "family", "architecture"),
    [(None, "llama", "Mistral"), ("ministral3", "ministral", "Ministral3")],
)
def test_a_mistral_with_images_has_the_language_model_that_it_names(
    tmp_path, kind, family, architecture
):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    rope = yarn | ({"llama_4_scaling_beta": 0.1, "max_position_embeddings": 64} if kind else {})
    text = folders.LLAMA | {"model_type": kind, "rope_parameters": rope, "architectures": None}
    del text["rope_theta"]
    tensors = {f"language_model.{n}": x for n, x in folders.llama_tensors().items()}
    outer = {"model_type": "mistral3", "text_config": text}
    found = from_pretrained(folders.folder(tmp_path, outer, tensors))
    assert type(found.config).__module__ == f"jaxspeed.models.{family}"
    assert found.weights.folder.config["architectures"] == [f"{architecture}ForCausalLM"]
    assert found.weights.folder.tensors.keys() == folders.llama_tensors().keys()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers has 2 numbers for 3 layers"),
        (
            "smollm3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "no_rope_layers": [1, 1, 0],
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            r"layers \[0\] have a sliding window; only that .* without a rotation, \[2\]",
        ),
        ("ministral", {"layer_types": ["full_attention"]}, "3 of sliding_attention and full"),
        ("ministral3", {}, "rope_parameters:\n  llama_4_scaling_beta is missing"),
        ("glm4", {"partial_rotary_factor": 1.5}, "6 of the 4 dims of a head"),
        ("glm", {"partial_rotary_factor": "half"}, "config.json"),
        ("phi3", {"partial_rotary_factor": 0.25}, "1 of the 4 dims of a head are rotated"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu_pytorch_tanh' or"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ("gpt_neox", {"hidden_act": "relu"}, "only 'gelu' is"),
        ("cohere2", {"hidden_act": "gelu"}, "only 'silu' is"),
        ("starcoder2", {"hidden_act": "gelu"}, "only 'gelu_pytorch_tanh' or 'gelu_new' is"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; 1, or 2 with"),
        ("falcon", {"activation": "relu"}, "only 'gelu' is"),
        (
            "bert",
            {"position_embedding_type": "relative_key", "is_decoder": True},
            "'relative_key'; only 'absolute' is supported\n  is_decoder is True; only False",
        ),
        (
            "bert",
            {
                "architectures": ["BertForTokenClassification"],
                "hidden_act": "gelu",
                "tie_word_embeddings": True,
            },
            "BertForTokenClassification is not supported; BertForMaskedLM and",
        ),
        (
            "granite",
            {"architectures": ["GraniteForSequenceClassification"]},
            "those of gpt2, llama, mis",
        ),
        (
            "llama",
            {
                "architectures": ["LlamaForSequenceClassification"],
                "problem_type": "multi_label_classification",
                "hidden_act": "relu",
            },
            "hidden_act is 'relu'; only 'silu' is supported\n  problem_type is 'multi_label",
        ),
        (
            "qwen3",
            {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": "two"},
            "num_labels is 'two', which is not an integer",
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e4},
                    "sliding_attention": {"rope_theta": 1e5},
                }
            },
            "local and global layers must be equal",
        ),
    ],
)
def test_what_a_family_lacks_is_an_error(tmp_path, kind, fields, message):
    act = "gelu_pytorch_tanh" if kind == "gemma" else "silu"
    config = folders.LLAMA | {"model_type": kind, "head_dim": 4, "rms_norm_eps": 1e-5}
    folders.folder(tmp_path, config | {"hidden_act": act} | fields, {})
    with pytest.raises(jaxspeed.PretrainedError, match=message):
        from_pretrained(tmp_path)
