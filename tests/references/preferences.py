"""TRL's trainers of preferences: their tokens, and the loss, metrics and gradients of a batch.

`trainer` is a key of TRAINERS. A folder has a model in float32 and its tokenizer, `options` are
arguments of the trainer's config, and records are rows of its data set. A column `row`, the
record's index, tells which records are left.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
import trl.experimental.cpo
import trl.experimental.orpo
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

TRAINERS = {
    "dpo": (trl.DPOConfig, trl.DPOTrainer),
    "kto": (trl.KTOConfig, trl.KTOTrainer),
    "reward": (trl.RewardConfig, trl.RewardTrainer),
    "cpo": (trl.experimental.cpo.CPOConfig, trl.experimental.cpo.CPOTrainer),
    "orpo": (trl.experimental.orpo.ORPOConfig, trl.experimental.orpo.ORPOTrainer),
}
# Of a row of the prepared data: (prompt, completion) by side; of a reward model there is no prompt.
SIDES = {
    "dpo": [("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")],
    "kto": [("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids")],
    "reward": [(None, "chosen_ids"), (None, "rejected_ids")],
}
Records = list[dict[str, Any]]


def _model(trainer: str, folder: str) -> Any:
    plain: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if trainer == "reward":
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **plain)
    return AutoModelForCausalLM.from_pretrained(folder, **plain)


def _trainer(
    trainer: str,
    folder: str,
    records: Records,
    options: dict[str, Any],
    reference: str | None = None,
    adapter: str | None = None,
    template: str | None = None,
) -> Any:
    config_class, trainer_class = TRAINERS[trainer]
    size = len(records) * (2 if trainer == "kto" and "chosen" in records[0] else 1)
    plain = {
        "output_dir": str(Path(tempfile.gettempdir()) / "trl"),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": size,
        "train_sampling_strategy": "sequential",
    }
    model, second = _model(trainer, folder), {}
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    elif trainer in ("dpo", "kto"):
        second["ref_model"] = _model(trainer, reference or folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return trainer_class(
        model=model,
        args=config_class(**plain | options),
        train_dataset=Dataset.from_list([{**x, "row": i} for i, x in enumerate(records)]),
        processing_class=tokenizer,
        **second,
    )


def prepared(
    trainer: str,
    folder: str,
    records: Records,
    options: dict[str, Any],
    template: str | None = None,
) -> list[dict[str, Any]]:
    """Of each pair that is left: row, label if it has one, and (tokens, mask) of both sides.

    The mask is 1 at a completion's tokens. The sides are as they are in a batch, so truncated.
    """
    made = _trainer(trainer, folder, records, options, template=template)
    (batch,) = made.get_train_dataloader()
    found = []
    for i, row in enumerate(made.train_dataset):
        sides = [(t[i], m[i]) for t, m in _rows(trainer, batch)]
        found.append({"row": row["row"], "sides": [_without_padding(*side) for side in sides]})
        if "label" in row:
            found[-1]["label"] = row["label"]
        for (prompt, completion), (tokens, _) in zip(SIDES.get(trainer, ()), found[-1]["sides"]):
            full = [*(row[prompt] if prompt else ()), *row[completion]]
            cut = full[-len(tokens) :] if options.get("truncation_mode") == "keep_end" else full
            assert cut[: len(tokens)] == tokens
    return found


def _rows(trainer: str, batch: Any) -> list[tuple[Any, Any]]:
    """(tokens, mask) [pairs, seq] of either side, the mask -1 at padding."""
    if trainer in ("cpo", "orpo"):
        return [
            _masked(batch[f"{side}_input_ids"], labels != -100, batch[f"{side}_attention_mask"])
            for side in ("chosen", "rejected")
            for labels in [batch[f"{side}_labels"]]
        ]
    if trainer == "kto":
        return [
            _masked(*(batch[f"{side}{name}"] for name in
                      ("input_ids", "completion_mask", "attention_mask")))
            for side in ("", "KL_")
            if f"{side}input_ids" in batch
        ]  # fmt: skip
    tokens, attention = batch["input_ids"], batch["attention_mask"]
    mask = batch.get("completion_mask", attention)
    return list(zip(*(x.chunk(2) for x in _masked(tokens, mask, attention))))


def _masked(tokens: Any, mask: Any, attention: Any) -> tuple[Any, Any]:
    return tokens, torch.where(attention == 0, -1, mask.long())


def _without_padding(tokens: Any, mask: Any) -> tuple[list[int], list[int]]:
    return tokens[mask >= 0].tolist(), mask[mask >= 0].tolist()


def steps(
    trainer: str,
    folder: str,
    records: Records,
    cases: list[dict[str, Any]],
    reference: str | None = None,
    gradients: list[int] = (),
) -> list[dict[str, Any]]:
    """The step of all records under each case's options: loss and metrics.

    Those whose index is in `gradients` have the gradients by parameter, and the first has the
    log-probabilities of both sides' completions, by token.
    """
    found = []
    for i, options in enumerate(cases):
        made = _trainer(trainer, folder, records, options, reference)
        (batch,) = made.get_train_dataloader()
        made.model.train()
        loss = made.compute_loss(made.model, dict(batch))
        if i in gradients:
            loss.backward()
        metrics = made._stored_metrics if trainer in ("cpo", "orpo") else made._metrics
        step = {"loss": loss.item(), "metrics": {k: x[-1] for k, x in metrics["train"].items()}}
        if i in gradients:
            step["gradients"] = {name: p.grad for name, p in made.model.named_parameters()}
        if i == 0:
            step["sides"] = [
                [_without_padding(*side) for side in zip(tokens, mask)]
                for tokens, mask in _rows(trainer, batch)
            ]
        if i == 0 and trainer != "reward":
            step["logprobs"] = [_logprobs(made.model, *x) for x in _rows(trainer, batch)]
            if hasattr(made, "ref_model"):
                step["reference"] = [_logprobs(made.ref_model, *x) for x in _rows(trainer, batch)]
        found.append(step)
    return found


@torch.no_grad()
def _logprobs(model: Any, tokens: Any, mask: Any) -> Any:
    """Log-probabilities [pairs, seq - 1] of completions, by TRL's own head where it has one."""
    arguments = {"input_ids": tokens, "attention_mask": (mask >= 0).long(), "use_cache": False}
    labels = torch.where(mask == 1, tokens, -100)
    if "_fused_forward" in getattr(model.forward, "__qualname__", ""):
        return model(**arguments, labels=labels, fused_lm_head=True).log_probs
    logprobs = model(**arguments).logits[:, :-1].log_softmax(-1)
    picked = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.where(mask[:, 1:] == 1, picked, 0)


def trained(
    trainer: str,
    folder: str,
    records: Records,
    options: dict[str, Any],
    adapter: str | None = None,
) -> dict[str, Any]:
    """SGD of constant rate over the records in their order: the steps' logs, what was trained.

    The reference is the model as it is read, or a copy of the adapter as it is read.
    """
    sgd = {
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    made = _trainer(trainer, folder, records, sgd | options, adapter=adapter)
    made.train()
    parameters = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    logs = [log for log in made.state.log_history if "loss" in log]
    return {"logs": logs, "parameters": parameters}
