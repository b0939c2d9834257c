"""PEFT's adapters of transformers' models: made, saved, loaded and run.

A case is that of `families`; the options are arguments of `LoraConfig`.
"""

import copy
from typing import Any

import families
import peft
import torch
import transformers

Tensors = dict[str, torch.Tensor]


def _adapted(case: families.Case, options: dict[str, Any], base: str) -> Any:
    """A model with adapters, of which all that is trained is random."""
    model = copy.deepcopy(families._model(case))
    model.name_or_path = base
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            scale = 1.0 if "magnitude" in name else 0.1
            change = torch.randn_like(parameter) * 0.1
            parameter.data = parameter.data * scale + change.abs() * (scale == 1) + change
    return adapted.eval()


@torch.no_grad()
def save(
    case: families.Case, options: dict[str, Any], base: str, folder: str, arguments: Tensors
) -> torch.Tensor:
    """Save random adapters as PEFT does; their logits."""
    adapted = _adapted(case, options, base)
    adapted.save_pretrained(folder)
    return adapted(**arguments).logits


@torch.no_grad()
def loaded(base: str, folder: str, arguments: Tensors, again: str) -> torch.Tensor:
    """The logits of a folder's adapters of a base, which are saved once more."""
    model = _base(base)
    adapted = peft.PeftModel.from_pretrained(model, folder).eval()
    adapted.save_pretrained(again)
    return adapted(**arguments).logits


@torch.no_grad()
def logits(base: str, arguments: Tensors) -> torch.Tensor:
    return _base(base)(**arguments).logits


def _base(folder: str) -> Any:
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures
    model = getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    return model.float().eval()


@torch.no_grad()
def parameters(base: str, folder: str | None) -> Tensors:
    """The parameters of a base, with the adapters of a folder merged into them."""
    model = _base(base)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    return dict(model.state_dict())


@torch.no_grad()
def scores(
    folder: str, tokens: torch.Tensor, adapter: str | None = None, pad: int | None = None
) -> torch.Tensor:
    """The scores of a classifier of sequences in a folder, or of an adapter with a new one."""
    if adapter is None:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
        model.config.pad_token_id = pad
    return model.float().eval()(input_ids=tokens).logits
