"""Estimates of training runs whose speed is published.

`python -m tests.planner.published NAME` estimates one, on as many simulated devices as it had, and
prints it as JSON; without a name all of them, as the table of docs/notes/plan-time.md.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LISTED = Path(__file__).with_name("published.yaml")
CHIPS = Path(__file__).with_name("published_chips.yaml")
ROOT = Path(__file__).resolve().parents[2]
GPT_VOCABULARY = 51200


@dataclass(frozen=True)
class Estimated:
    """A published run, and the estimate of it; mfu by one formula for both."""

    name: str
    published: float
    estimated: float
    step: float
    parts: dict[str, float]

    @property
    def apart(self) -> float:
        return self.estimated / self.published - 1


def listed() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(LISTED.read_text())["runs"]


def config_of(run: dict[str, Any]) -> dict[str, Any]:
    """The run as a config of jaxspeed."""
    target = _target(run)
    sizes = {axis: run["mesh"].get(axis, 1) for axis in ("tensor", "pipe")}
    ranks = target.count // (sizes["tensor"] * sizes["pipe"])
    accumulation = run["batch"] // (ranks * run["micro"])
    assert accumulation * ranks * run["micro"] == run["batch"], run
    family, own = ("gpt2", run["gpt"]) if "gpt" in run else ("llama", run["llama"])
    if family == "gpt2":
        own = {"vocab_size": GPT_VOCABULARY, "max_position_embeddings": run["seq"], **own}
    return {
        "model": {"family": family, "config": own},
        "mesh": run["mesh"],
        "train_micro_batch_size_per_gpu": run["micro"],
        "gradient_accumulation_steps": accumulation,
        run["half"]: {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": run["zero"]},
        "parallel": {"remat": run["remat"], **run.get("parallel", {})},
    }


def estimate(name: str) -> Estimated:
    """In a process with as many devices as the run had."""
    import jax
    import jax.numpy as jnp

    from jaxspeed.config import Config
    from jaxspeed.planner.time import time_of
    from jaxspeed.planner.trace.traced_step import as_on
    from jaxspeed.train.build import build_program
    from jaxspeed.user_models.config_model import resolve_model

    run = listed()[name]
    target = _target(run)
    config = Config.load(config_of(run))
    model, loss = resolve_model(config)
    batch = {"tokens": jax.ShapeDtypeStruct((run["batch"], run["seq"] + 1), jnp.int32)}
    # Before Ampere there is no kernel, and the scores are materialized.
    capability = target.chip.capability if run["attention"] == "kernel" else (7, 0)
    with as_on(target.chip.platform, capability):
        program = build_program(config, model, loss, devices=jax.devices()[: target.count])
        # What is traced is kept, and the estimate finds it.
        program.step.trace(program.state, program.abstract_batch(batch))
    time = time_of(program, batch, target)
    seconds = _seconds(run, target.count, time.model_flops)
    published = time.model_flops / (seconds * time.peak * target.count)
    parts = {n: getattr(time, n) for n in ("compute", "memory", "exchanged", "bubble")}
    return Estimated(name, published, time.mfu, time.step, parts)


def _seconds(run: dict[str, Any], devices: int, model_flops: float) -> float:
    """Of a step, as it is published."""
    said, tokens = run["published"], run["batch"] * run["seq"]
    if "seconds" in said:
        return said["seconds"]
    if "tokens" in said:
        return tokens / (said["tokens"] * devices)
    if "mfu" in said:
        peak = _target(run).chip.flops["bf16"]
        return model_flops / (said["mfu"] * peak * devices)
    if said["counts"] == "model":
        return model_flops / (said["tflops"] * 1e12 * devices)
    gpt, seq = run["gpt"], run["seq"]
    layers, width = gpt["num_hidden_layers"], gpt["hidden_size"]
    # Their equation 3: a forward pass, one to make activations again, and a backward pass.
    ends = seq / (6 * width) + GPT_VOCABULARY / (16 * layers * width)
    done = 96 * tokens * layers * width**2 * (1 + ends)
    return done / (said["tflops"] * 1e12 * devices)


def _target(run: dict[str, Any]) -> Any:
    from jaxspeed.hardware.known_chips import chips_of
    from jaxspeed.hardware.targets import target_of

    return target_of(run["target"], chips_of(CHIPS))


def in_child(name: str) -> Estimated:
    """With the devices that it takes."""
    count = _target(listed()[name]).count
    flags = f"--xla_force_host_platform_device_count={count}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.planner.published", name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Estimated(**json.loads(done.stdout.splitlines()[-1]))


def _table() -> None:
    print("| run | on | published | estimated | error | compute, memory, communication, bubble |")
    print("|---|---|---|---|---|---|")
    for name, run in listed().items():
        found = in_child(name)
        whole = sum(found.parts.values())
        shares = ", ".join(f"{part / whole:.0%}" for part in found.parts.values())
        print(
            f"| {name} | `{run['target']}` | {found.published:.1%} | {found.estimated:.1%} | "
            f"{found.apart:+.0%} | {shares} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(vars(estimate(sys.argv[1]))))
    else:
        _table()
