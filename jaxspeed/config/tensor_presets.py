"""What `tensor_parallel.preset_model` names: which modules of a family are cut how.

By the names that a family's modules usually have, in Flax, in Hugging Face's code and here. What is
fused into one weight (GPT-2's `c_attn`) is in no preset: a cut in contiguous parts would not cut
its queries, keys and values alike. Then the projection that reads them stays whole as well.
"""

from types import MappingProxyType

_QUERIES = ("q_proj", "query")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
_OUTPUTS = ("o_proj", "out_proj", "out")
_EMBEDDINGS = ("embed_tokens", "embed")
_HEADS = ("lm_head", "head")

Table = tuple[tuple[str, str, str | None], ...]  # (pattern, type, logical name of the dim)


def _table(columns: tuple[str, ...], rows: tuple[str, ...], vocabulary: tuple[str, ...]) -> Table:
    return (
        *((name, "column", None) for name in (*_QUERIES, *columns)),
        *((name, "column", "kv_heads") for name in _KEYS_AND_VALUES),
        *((name, "row", None) for name in (*_OUTPUTS, *rows)),
        *((name, "vocabulary", None) for name in vocabulary),
    )


PRESETS = MappingProxyType(
    {
        "gpt2": _table(
            ("**/mlp/c_fc", "fc1", "fc_in", "up_proj", "up"),
            ("**/mlp/c_proj", "fc2", "fc_out", "down_proj", "down"),
            ("wte", *_EMBEDDINGS, *_HEADS),
        ),
        "llama": _table(
            ("gate_proj", "up_proj", "gate", "up"),
            ("down_proj", "down"),
            (*_EMBEDDINGS, *_HEADS),
        ),
        "vit": _table(
            ("**/intermediate/dense", "fc1", "up_proj", "up"),
            ("**/output/dense", "fc2", "down_proj", "down"),
            (),
        ),
    }
)

# Families whose modules have the names of another.
ALIASES = MappingProxyType(
    {
        "gpt3": "gpt2",
        "llama2": "llama",
        "llama3": "llama",
        "mistral": "llama",
        "qwen2": "llama",
    }
)

# Names that DeepSpeed knows, and why there is no preset for them.
_FUSED = "its attention, or its MLP, is one fused weight, and presets cut none of those"
_EXPERTS = "the expert axis is not built"
UNBUILT = MappingProxyType(
    {
        "bloom": _FUSED,
        "chatglm": _FUSED,
        "phi3": _FUSED,
        "mixtral": _EXPERTS,
        "deepseek_v2": _EXPERTS,
    }
)


def canonical_preset(name: str) -> str | None:
    """The preset that a user means: GPT-2, gpt2 and gpt_2 are one."""
    plain = name.lower().translate(str.maketrans("", "", "-_ "))
    plain = ALIASES.get(plain, plain)
    return plain if plain in PRESETS else None
