"""DeepSeek-V2 and V3 in Hugging Face's format, without the layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.config_fields import Field, Fixed, Read
from jaxspeed.interop.mapping import MappingTable, TensorRule

from .decoder_hf import (
    BLOCK,
    GATED,
    OURS,
    decoder_table,
    linear,
    read_sizes,
    size_fields,
    write_sizes,
)
from .deepseek import Config
from .mixture_hf import EXPERTS, FUSED_EXPERTS, expert_rules, fused_expert_rules

MODEL_TYPES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
_SCORES = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}

FIELDS = (
    *size_fields(num_key_value_heads=None, rms_norm_eps=1e-6, tie_word_embeddings=False),
    Field("q_lora_rank", "q_lora_rank", int, None),
    Field("kv_lora_rank", "kv_lora_rank", int, 512),
    Field("qk_nope_head_dim", "qk_nope_head_dim", int, 128),
    Field("qk_rope_head_dim", "qk_rope_head_dim", int, 64),
    Field("v_head_dim", "v_head_dim", int, 128),
    Field("attention_bias", "attention_bias", bool, False),
    Field("n_routed_experts", "num_experts"),
    Field("num_experts_per_tok", "num_experts_per_tok"),
    Field("moe_intermediate_size", "moe_intermediate_size"),
    Field("n_shared_experts", "num_shared_experts", least=0),
    Field("first_k_dense_replace", "num_dense_layers", int, 0, least=0),
    Field("norm_topk_prob", "norm_topk_prob", bool, False),
    Field("routed_scaling_factor", "routed_scaling_factor", float, 1.0),
    *map(Read, ("n_group", "topk_group", "topk_method", "scoring_func")),
    *map(Read, ("aux_loss_alpha", "seq_aux", "bias_update_rate", "output_router_logits")),
    # Layers that predict further tokens are not read; the others are of how a model is run.
    *map(Read, ("num_nextn_predict_layers", "ep_size", "qk_head_dim")),
    Fixed("hidden_act", ("silu",)),
    Fixed("moe_layer_freq", (1,)),
    Fixed("mlp_bias", (False,)),
    Fixed("rope_interleave", (True,)),
)


# What a config.json without these fields has in transformers. The other defaults are V2's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def read_config(values: Mapping[str, Any]) -> Config:
    kind = values["model_type"]
    values = {**_DEFAULTS[kind], **values}
    if values.get("n_shared_experts", 0) is None:  # as 0 in the models' own code
        values["n_shared_experts"] = 0
    found = read_sizes(values, FIELDS, 10000.0)
    method = values.get("topk_method") or _METHODS[kind][0]
    scores = values.get("scoring_func") or _SCORES[kind]
    if method not in _METHODS[kind] or scores != _SCORES[kind]:
        raise PretrainedError(
            f"config.json: topk_method is {method!r} and scoring_func {scores!r}; {kind} has "
            f"{' or '.join(map(repr, _METHODS[kind]))} and {_SCORES[kind]!r}"
        )
    if kind == "deepseek_v2" and found["norm_topk_prob"]:
        raise PretrainedError("config.json: norm_topk_prob of deepseek_v2 is not supported")
    grouped = method != "greedy"
    alpha, of_sequences = values.get("aux_loss_alpha") or 0.0, values.get("seq_aux", True)
    return Config(
        **found,
        sigmoid_scores=kind == "deepseek_v3",
        num_groups=(values.get("n_group") or 1) if grouped else 1,
        num_limited_groups=(values.get("topk_group") or 1) if grouped else 1,
        router_aux_loss_coef=0.0 if of_sequences else alpha,
        sequence_aux_loss_coef=alpha if of_sequences else 0.0,
        bias_update_rate=values.get("bias_update_rate", 0.0),  # a finished model's are fixed
    )


def write_config(config: Config) -> dict[str, Any]:
    c = config
    kind = "deepseek_v3" if c.sigmoid_scores else "deepseek_v2"
    if kind == "deepseek_v2" and c.norm_topk_prob:
        raise ValueError("Hugging Face's deepseek_v2 does not renormalize weights")
    if c.router_aux_loss_coef and c.sequence_aux_loss_coef:
        raise ValueError("Hugging Face's DeepSeek has one auxiliary loss")
    return {
        **write_sizes(kind, c, FIELDS),
        "head_dim": c.qk_rope_head_dim,
        "qk_head_dim": c.size_of_head,
        "n_group": c.num_groups,
        "topk_group": c.num_limited_groups,
        "topk_method": _METHODS[kind][-1] if c.num_groups > 1 else _METHODS[kind][0],
        "scoring_func": _SCORES[kind],
        "aux_loss_alpha": c.router_aux_loss_coef or c.sequence_aux_loss_coef,
        "seq_aux": not c.router_aux_loss_coef,
        "bias_update_rate": c.bias_update_rate,
        "num_nextn_predict_layers": 0,
    }


_HEADS = "(heads dim) rank -> layer rank heads dim"
_KV_DOWN = tuple(f"{OURS}/attn/{name}" for name in ("kv_down", "k_rotated"))
_IN_BLOCKS = [
    TensorRule(f"{BLOCK}.input_layernorm.weight", f"{OURS}/attn_norm/scale"),
    TensorRule(f"{BLOCK}.post_attention_layernorm.weight", f"{OURS}/mlp_norm/scale"),
    *linear("self_attn.q_a_proj", "attn/q_down", "rank embed -> layer embed rank"),
    TensorRule(f"{BLOCK}.self_attn.q_a_layernorm.weight", f"{OURS}/attn/q_norm/scale"),
    TensorRule(
        f"{BLOCK}.self_attn.kv_a_proj_with_mqa.weight",
        tuple(f"{name}/kernel" for name in _KV_DOWN),
        "(part out) embed -> layer embed out",
    ),
    TensorRule(
        f"{BLOCK}.self_attn.kv_a_proj_with_mqa.bias",
        tuple(f"{name}/bias" for name in _KV_DOWN),
        "(part out) -> layer out",
    ),
    TensorRule(f"{BLOCK}.self_attn.kv_a_layernorm.weight", f"{OURS}/attn/kv_norm/scale"),
    TensorRule(f"{BLOCK}.self_attn.kv_b_proj.weight", f"{OURS}/attn/kv_up/kernel", _HEADS),
    *linear("self_attn.o_proj", "attn/o_proj", "embed (heads dim) -> layer heads dim embed"),
]


def table(config: Config) -> MappingTable:
    made = _table(config, expert_rules(f"{BLOCK}.mlp", EXPERTS, config.num_dense_layers))
    return replace(made, memory=fused_table(config))


def fused_table(config: Config) -> MappingTable:
    """The table of a folder with the names that transformers 5 has in memory."""
    return _table(config, fused_expert_rules(f"{BLOCK}.mlp", config.num_dense_layers))


def _table(config: Config, experts: Sequence[TensorRule]) -> MappingTable:
    start = {"layer": config.num_dense_layers}
    q = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    in_blocks = [
        *_IN_BLOCKS,
        TensorRule(f"{BLOCK}.self_attn.{q}.weight", f"{OURS}/attn/q_up/kernel", _HEADS),
    ]

    def in_dense(rule: TensorRule) -> TensorRule:
        paths = (rule.paths,) if isinstance(rule.paths, str) else rule.paths
        return replace(rule, paths=tuple(f"dense_{path}" for path in paths))

    shared = [
        replace(
            rule,
            tensor=rule.tensor.replace(".mlp.", ".mlp.shared_experts."),
            paths=str(rule.paths).replace("/mlp/", "/mlp/shared/"),
            first=start,
        )
        for rule in GATED
    ]
    of_mixtures = [
        *(replace(rule, first=start) for rule in in_blocks),
        *shared,
        *experts,
    ]
    bias = TensorRule(f"{BLOCK}.mlp.gate.e_score_correction_bias", "expert_bias", first=start)
    rules = [*map(in_dense, [*in_blocks, *GATED]), *of_mixtures, bias]
    made = decoder_table(config, {}, rules)
    # The layer after the last one, which predicts the token after the next.
    further = f"model.layers.{config.num_hidden_layers}"
    own = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
    unread = [rule.tensor.replace(BLOCK, further) for rule in (*of_mixtures, bias)]
    unread += [f"{further}.{name}.weight" for name in own]
    if not config.num_shared_experts:  # transformers writes them without elements
        unread += [rule.tensor for rule in shared]
    variables = ("expert_bias",) if config.sigmoid_scores else ()
    return replace(made, ignored=[*made.ignored, *unread], variables=variables)


OTHER_TABLES = {FUSED_EXPERTS: fused_table}
