"""The `expert_parallel` section: DeepSpeed's AutoEP."""

from typing import Any

from jaxspeed.config.types import Coercing, Count, Flag
from jaxspeed.config.verdicts import harmless, honoured, refused

_OFF = ("expert_parallel.enabled", (False,))
_FINDS = (
    "Finds the experts of torch modules; here they are the dims that are named `experts`, by the "
    "model or by parallel.logical_axes."
)
_GROUPED = "Products are grouped by expert on every platform, as jaxspeed.ops.moe chooses."


def _of_the_router(default: Any, instead: str, *off: Any) -> Any:
    return refused(
        default, f"The model has its router, and the config does not change it: {instead}.", *off
    )


class ExpertParallel(Coercing):
    """DeepSpeed's AutoEP: experts over devices."""

    enabled: Flag = honoured(False, "With autoep_size it sets mesh.expert.")
    autoep_size: Count = honoured(1, "The size of mesh.expert.", unless=_OFF)
    preset_model: Any = harmless(None, _FINDS)
    moe_layer_pattern: Any = harmless(None, _FINDS)
    expert_pattern: Any = harmless(None, _FINDS)
    router_pattern: Any = harmless(None, _FINDS)
    expert_w1: Any = harmless(None, _FINDS)
    expert_w2: Any = harmless(None, _FINDS)
    expert_w3: Any = harmless(None, _FINDS)
    num_experts_attr: Any = harmless(None, _FINDS)
    top_k_attr: Any = harmless(None, _FINDS)
    has_shared_experts: Any = harmless(None, _FINDS)
    shared_experts_pattern: Any = harmless(None, _FINDS)
    use_grouped_mm: Flag = harmless(True, _GROUPED)
    grouped_mm_backend: Any = harmless("auto", _GROUPED)
    top_k: Any = _of_the_router("auto", "model.config.num_experts_per_tok sets it")
    score_func: Any = _of_the_router("auto", "model.config.sigmoid_scores sets it for DeepSeek")
    score_apply: Any = _of_the_router("auto", "weights multiply the experts' results", "post")
    route_norm: Any = _of_the_router(None, "model.config.norm_topk_prob sets it")
    route_scale: Any = _of_the_router(1.0, "model.config.routed_scaling_factor sets it")
    routed_scaling_factor: Any = _of_the_router(
        "auto", "model.config.routed_scaling_factor sets it"
    )
    num_expert_groups: Any = _of_the_router(None, "model.config.num_groups sets it")
    num_limited_groups: Any = _of_the_router(None, "model.config.num_limited_groups sets it")
    load_balance_coeff: Any = _of_the_router(
        0.001, "model.config.bias_update_rate sets it for DeepSeek", None
    )
