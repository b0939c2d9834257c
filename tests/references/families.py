"""transformers' models: made, saved, run, and compared with those in a folder.

A case is (configuration class without "Config", model class, fields of the configuration).
"""

import copy
import functools
import json
import warnings
from typing import Any

import torch
import transformers

Case = tuple[str, str, dict[str, Any]]
Tensors = dict[str, torch.Tensor]


def _model(case: Case) -> Any:
    return _cached_model(json.dumps(case))


@functools.cache
def _cached_model(case: str) -> Any:
    """With random weights."""
    configuration, name, fields = json.loads(case)
    torch.manual_seed(0)
    fields = {"attn_implementation": "eager", **fields}
    config = getattr(transformers, f"{configuration}Config")(**fields)
    model = getattr(transformers, name)(config).eval()
    if not getattr(model.config, "scale_decoder_outputs", True):  # T5 1.1, tied in memory
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False
    for name, parameter in model.named_parameters():
        # Neither zeros nor ones.
        if name.endswith("bias") or parameter.ndim == 1 or not parameter.any():
            mean = parameter.detach().mean().round()
            torch.nn.init.normal_(parameter, float(mean), 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    return model


def save(case: Case, folder: str) -> None:
    _model(case).save_pretrained(folder)


def save_config(configuration: str, fields: dict[str, Any], folder: str) -> None:
    getattr(transformers, f"{configuration}Config")(**fields).save_pretrained(folder)


@torch.no_grad()
def logits(case: Case, arguments: Tensors) -> torch.Tensor:
    return _model(case)(**arguments).logits


def logits_loss_and_gradients(case: Case, arguments: Tensors, folder: str) -> dict[str, Any]:
    """Gradients go into a folder, because names in files are not always those in memory."""
    model = _model(case)
    model.zero_grad()
    out = model(**arguments)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.save_pretrained(folder, state_dict=gradients)
    return {"logits": out.logits, "loss": out.loss.item()}


@torch.no_grad()
def image_features(case: Case, arguments: Tensors) -> torch.Tensor:
    """[tokens of all images, embed]."""
    return torch.cat(list(_model(case).get_image_features(**arguments).pooler_output))


@torch.no_grad()
def logits_with_adapter(case: Case, folder: str, arguments: Tensors) -> dict[str, Any]:
    """Of a copy of the model with PEFT's adapter, and what PEFT warns of."""
    import peft

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(_model(case)), folder).eval()
    told = [str(warning.message) for warning in caught if "adapter keys" in str(warning.message)]
    return {"logits": adapted(**arguments).logits, "warnings": told}


@torch.no_grad()
def greedy_tokens_of_images(
    case: Case, prompts: list[list[int]], images: list[Tensors], count: int
) -> list[list[int]]:
    """What follows each prompt with its images."""
    return [
        _model(case).generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1,
            pad_token_id=0, **arguments,
        )[0, len(prompt) :].tolist()
        for prompt, arguments in zip(prompts, images)
    ]  # fmt: skip


@torch.no_grad()
def greedy_tokens(
    case: Case, prompts: list[list[int]], count: int, rules: dict[str, float]
) -> list[list[int]]:
    """What follows each prompt."""
    return [
        _model(case).generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1,
            pad_token_id=0, **rules,
        )[0, 1 if case[0] == "T5" else len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip


def unseen_biases(case: Case) -> list[torch.Tensor]:
    """Of each layer: an encoder's key bias, that of an output beside a feed-forward."""
    model = _model(case)
    if case[0] == "ViT":
        return [layer.attention.k_proj.bias for layer in model.vit.layers]
    if case[0] == "Bert":
        return [layer.attention.self.key.bias for layer in model.bert.encoder.layer]
    if case[0] == "Falcon":
        return [layer.self_attention.dense.bias for layer in model.transformer.h]
    return [layer.attention.dense.bias for layer in model.gpt_neox.layers]


@torch.no_grad()
def differences(case: Case, folder: str, arguments: Tensors) -> list[str]:
    """What is not bitwise the same in the model that is read from a folder."""
    model = _model(case)
    attention = model.config._attn_implementation
    again = type(model).from_pretrained(folder, attn_implementation=attention).eval()
    found = _differing(model.state_dict(), again.state_dict())
    same = torch.equal(again(**arguments).logits, model(**arguments).logits)
    return found if same else [*found, "logits"]


def _differing(before: Tensors, after: Tensors) -> list[str]:
    """Names of tensors that are in one of them, or whose dtype or value differs."""
    found = sorted(before.keys() ^ after.keys())
    for name in sorted(before.keys() & after.keys()):
        x, y = before[name], after[name]
        if x.dtype != y.dtype or not torch.equal(x, y):
            found.append(name)
    return found


@functools.cache
def _cached_with_images(fields: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma3Config(**json.loads(fields))
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def save_with_images(fields: dict[str, Any], folder: str) -> None:
    """A Gemma 3 with a vision tower."""
    _cached_with_images(json.dumps(fields)).save_pretrained(folder)


@torch.no_grad()
def language_model_of(fields: dict[str, Any], folder: str, tokens: torch.Tensor) -> dict[str, Any]:
    """Logits of the model of `save_with_images`; its language model against that in a folder."""
    model = _cached_with_images(json.dumps(fields))
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return {
        "class": type(again).__name__,
        "differences": _differing(
            model.model.language_model.state_dict(), again.model.state_dict()
        ),
        "logits": model(input_ids=tokens).logits,
    }


@torch.no_grad()
def logits_with(case: Case, weights: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model with these weights."""
    configuration, name, fields = case
    model = getattr(transformers, name)(getattr(transformers, f"{configuration}Config")(**fields))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("attn.bias" in name or "masked_bias" in name for name in missing)
    return model.eval()(tokens).logits


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales).float()
