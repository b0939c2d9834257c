"""Rewards and rollout functions of runs in tests, and a config of such a run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 32,
}


def early(completion_ids: Any, wanted: Any, log_extra: Any, log_metric: Any, **_: Any) -> list[Any]:
    """A reward that a model without training can have: how near tokens are to a number."""
    log_extra("wanted", wanted)
    log_extra("step", wanted)  # what the run says of completions and steps stays
    log_metric("distance", sum(map(len, completion_ids)))
    log_metric("reward", 99.0)
    log_metric("loss", 99.0)
    return [
        -sum(abs(token - number) for token in ids) / (256 * len(ids)) - len(ids)
        for ids, number in zip(completion_ids, wanted, strict=True)
    ]


def low(completion_ids: Any, **_: Any) -> list[float]:
    return [-sum(ids) / len(ids) for ids in completion_ids]


def sleeps(completion_ids: Any, wanted: Any, **_: Any) -> list[float]:
    if wanted[0] == 30:
        time.sleep(600)
    return [float(len(ids)) for ids in completion_ids]


def waits(completion_ids: Any, wanted: Any, trainer_state: Any, **_: Any) -> list[float]:
    """The request to stop comes while rewards of the third step are computed."""
    if trainer_state.global_step == 2:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    return [float(len(ids)) for ids in completion_ids]


def turns(prompts: Any, trainer: Any) -> dict[str, Any]:
    """Two turns of the model, and between them a token of a tool."""
    tokenizer = trainer.processing_class
    ids = [tokenizer.encode(f"longer than data {prompt}").tolist() for prompt in prompts]
    sampling = {"seed": 3, "step": trainer.state.global_step, "temperature": 1.0}
    first = trainer.engine.rollout(ids, 2, tokenizer=tokenizer, **sampling).completions
    then = [[*row, *said.tokens, 7] for row, said in zip(ids, first, strict=True)]
    second = trainer.engine.rollout(then, 2, tokenizer=tokenizer, **sampling).completions
    both = [*zip(first, second, strict=True)]
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a.tokens, 7, *b.tokens] for a, b in both],
        "logprobs": [[*a.logprobs, 0.0, *b.logprobs] for a, b in both],
        "env_mask": [[1] * len(a.tokens) + [0] + [1] * len(b.tokens) for a, b in both],
    }


def write(folder: Path, objective: dict[str, Any], **sections: Any) -> Path:
    """A file of prompts and a config in the folder; keys of sections are laid over its own."""
    prompts = folder / "prompts.jsonl"
    texts = [f"{'ab' * (1 + i % 3)}{i}" for i in range(24)]
    records = [json.dumps({"prompt": x, "wanted": 10 * i}) for i, x in enumerate(texts)]
    prompts.write_text("\n".join(records) + "\n")
    config: dict[str, Any] = {
        "run": {"devices": "cpu:8", "steps": 6, "checkpoint_every": 3, "sample_tokens": 0},
        "model": {"family": "llama", "config": MODEL},
        "objective": {
            "type": "grpo",
            "rewards": "tests.run.rewarded:early",
            "num_generations": 4,
            "max_completion_length": 6,
            **objective,
        },
        "data": {"source": "jsonl", "path": str(prompts), "tokenizer": "bytes", "held_out": 0.2},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    config["run"]["output"] = str(folder / "run")
    config["objective"] = {k: x for k, x in config["objective"].items() if x is not None}
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values} if isinstance(values, dict) else values
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path
