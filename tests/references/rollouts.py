"""TRL's trainers of rewards on recorded rollouts: losses, metrics, advantages and gradients."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import split_tensor_dict

SLICES = 2  # steps of a rollout


def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def _reward(name: str, values: list[float | None]) -> Any:
    def reward(**_: Any) -> list[float | None]:
        return values

    reward.__name__ = name
    return reward


def _trainer(kind: str, folder: str, rollout: dict[str, Any], options: dict[str, Any]) -> Any:
    """A trainer that samples these completions."""
    rows = len(rollout["completions"])
    config, trainer = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[kind]
    plain = {
        "output_dir": str(Path(tempfile.gettempdir()) / "trl"),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "per_device_train_batch_size": rows // SLICES,
        "steps_per_generation": SLICES,
        "num_generations": rollout["size"],
    }
    corrects = {
        key.removeprefix("vllm_"): options[key] for key in options if key.startswith("vllm_")
    }
    rewards = [_reward(name, values) for name, values in rollout["rewards"].items()]
    recorded = {
        "prompt_ids": rollout["prompts"],
        "completion_ids": rollout["completions"],
        "logprobs": rollout["logprobs"],
    }
    more: dict[str, Any] = {}
    if kind == "grpo":
        if rollout["masks"] is not None:
            recorded["env_mask"] = rollout["masks"]
        more["rollout_func"] = lambda prompts, trainer: dict(recorded)
    made = trainer(
        model=_model(folder),
        reward_funcs=rewards,
        args=config(**plain | options),
        train_dataset=Dataset.from_list([{"prompt": "it is"}] * rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **more,
    )
    if kind == "rloo":
        made._tokenize_prompts = lambda prompts: (rollout["prompts"], None, {})
        made._generate_single_turn = lambda *_: rollout["completions"]
    elif corrects:  # made for vLLM, whose log-probabilities are the recorded ones
        made.use_vllm, made._last_loaded_step = True, made.state.global_step
    made.current_gradient_accumulation_steps = 1
    return made


def steps(
    kind: str,
    sampler: str,
    model: str,
    reference: str,
    rollout: dict[str, Any],
    cases: list[dict[str, Any]],
    gradients: list[int] = (),
) -> list[dict[str, Any]]:
    """The steps of a rollout under each case's options, of completions that `sampler` sampled.

    Args:
      rollout: prompts and completions (ids), logprobs (None where there is none), masks of the
        model's tokens or None, rewards by name, and the size of a group.
      gradients: of which cases the sum of the steps' gradients is returned.
    """
    weights = _model(model).state_dict()
    results = []
    for i, options in enumerate(cases):
        made = _trainer(kind, sampler, rollout, options)
        if made.beta:
            made.ref_model.load_state_dict(_model(reference).state_dict())
        made.model.train()
        rows = [{"prompt": "it is"} for _ in rollout["completions"]]
        inputs = made._generate_and_score_completions(rows)
        made.model.load_state_dict(weights)
        losses = [made._compute_loss(made.model, x) for x in split_tensor_dict(inputs, SLICES)]
        result = {
            "losses": [loss.item() for loss in losses],
            "advantages": inputs["advantages"],
            "metrics": {name: list(x) for name, x in made._metrics["train"].items()},
        }
        if i in gradients:
            sum(losses).backward()
            result["gradients"] = {name: p.grad for name, p in made.model.named_parameters()}
        results.append(result)
    return results
