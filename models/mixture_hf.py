"""What mixtures have in common in Hugging Face's files: tensors of experts, the router's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspeed.interop.mapping import TensorRule

from .decoder_hf import OURS
from .mixture import MixtureSizes

# Of an expert: gate, up and down.
EXPERTS = ("gate_proj", "up_proj", "down_proj")
# What the gates and ups of all experts of a layer are named in transformers 5's own form.
FUSED_EXPERTS = ".experts.gate_up_proj"
_OURS = ("w_gate", "w_up", "w_down")


def read_balance(values: Mapping[str, Any]) -> dict[str, Any]:
    """The coefficient of the auxiliary loss, which has one only where it is asked for."""
    used = values.get("output_router_logits")
    return {"router_aux_loss_coef": values.get("router_aux_loss_coef", 0.001) if used else 0.0}


def write_balance(config: MixtureSizes) -> dict[str, Any]:
    coefficient = config.router_aux_loss_coef
    return {"router_aux_loss_coef": coefficient, "output_router_logits": coefficient > 0}


def expert_rules(
    theirs: str, names: tuple[str, str, str], first: int = 0, scale: float = 1.0
) -> list[TensorRule]:
    """Those of router and experts, in a tensor each.

    Args:
      theirs: the name of the module.
      names: of an expert's gate, up and down.
      first: the number of the first layer with experts.
      scale: of the down matrices in the files.
    """
    start = {"layer": first}
    return [
        *(
            TensorRule(
                f"{theirs}.experts.{{expert}}.{name}.weight",
                f"{OURS}/mlp/{ours}",
                "out in -> layer expert in out",
                first=start,
                scale=scale if ours == "w_down" else 1.0,
            )
            for name, ours in zip(names, _OURS, strict=True)
        ),
        _router(f"{theirs}.gate", start),
    ]


def fused_expert_rules(theirs: str, first: int = 0, scale: float = 1.0) -> list[TensorRule]:
    """Those of router and experts as transformers 5 has them in memory: all experts in a tensor."""
    start = {"layer": first}
    return [
        TensorRule(
            f"{theirs}.experts.gate_up_proj",
            (f"{OURS}/mlp/w_gate", f"{OURS}/mlp/w_up"),
            "expert (part out) in -> layer expert in out",
            first=start,
        ),
        TensorRule(
            f"{theirs}.experts.down_proj",
            f"{OURS}/mlp/w_down",
            "expert out in -> layer expert in out",
            first=start,
            scale=scale,
        ),
        _router(f"{theirs}.gate", start),
    ]


def _router(theirs: str, start: Mapping[str, int]) -> TensorRule:
    return TensorRule(
        f"{theirs}.weight", f"{OURS}/mlp/router", "expert embed -> layer embed expert", first=start
    )
