"""Small mixtures: one like Mixtral, one like DeepSeek-V3, and their batches of tokens."""

from typing import Any

import numpy as np

VOCAB = 64
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip

# Sections `model` of configs.
MIXTRAL: dict[str, Any] = {
    "family": "mixtral",
    "preset": "tiny",
    "config": {
        **_SIZES, "num_key_value_heads": 2, "intermediate_size": 32, "num_experts": 8,
        "router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001,
    },
}  # fmt: skip
# A token has 6 of 64 experts, from 4 of 8 groups, and a shared one; the first block is dense.
DEEPSEEK: dict[str, Any] = {
    "family": "deepseek",
    "preset": "tiny",
    "config": {
        **_SIZES, "num_hidden_layers": 3, "intermediate_size": 32, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "num_experts": 64, "num_experts_per_tok": 6, "num_groups": 8,
        "num_limited_groups": 4, "sequence_aux_loss_coef": 0.01,
    },
}  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK}


def tokens(samples: int, seq: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch."""
    drawn = np.random.default_rng(seed).integers(0, VOCAB, (samples, seq + 1))
    return {"tokens": drawn.astype(np.int32)}
