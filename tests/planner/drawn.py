"""Grids of configs drawn at random, to which nothing of the estimate is fitted.

`python -m tests.planner.drawn second` draws a grid from its seed and stores its configs in
tests/planner/drawn_second.json; `python -m tests.planner.compiling tpu second` (and `gpu`) adds
what the compilers say of them.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspeed.errors import JaxspeedError
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.time.torus import can_hold
from jaxspeed.planner.trace import read_step
from tests.planner.grid import CPU, Point, zero

SEEDS = {"second": 2023, "third": 3023, "fourth": 4023}  # chosen once, before anything was drawn
COUNT = {"second": 40, "third": 24, "fourth": 24}
# Up to 8 devices, as many as the tests simulate; twice in the list, twice as likely.
TPUS = ("v3:2x2", "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5p:2x2x1", "v5p:2x2x2", "v6e:2x2", "v6e:2x4")
GPUS = ("a100-80g:8", "h100:4", "h100:8", "h200:8")
FAMILIES = ("llama", "llama", "llama", "gpt2", "gpt2", "gemma", "mixer")
OPTIMIZERS = ("AdamW", "AdamW", "AdamW", "Lion", "SGD")


def file_of(grid: str) -> Path:
    return Path(__file__).with_name(f"drawn_{grid}.json")


def stored(grid: str) -> dict[str, Any]:
    """{name: target, seq, config, and the compiler's figures once it is compiled}."""
    return json.loads(file_of(grid).read_text())["points"]


def points(grid: str) -> Iterator[Point]:
    for name, each in stored(grid).items():
        yield Point(name, each["target"], each["config"], each["seq"])


def drawn(grid: str) -> Iterator[Point]:
    """The grid from its seed; configs that jaxspeed refuses are drawn again."""
    found, draws = 0, random.Random(SEEDS[grid])
    while found < COUNT[grid]:
        point = _draw(draws, f"{grid} {found:02}")
        if _is_accepted(point):
            found += 1
            yield point


def _is_accepted(point: Point) -> bool:
    target = target_of(point.target)
    try:
        program, batch = point.program(jax.devices())
        if not can_hold(target, dict(program.mesh.shape)):
            return False
        read_step(program, batch, target.chip.platform)
    except JaxspeedError:
        return False
    return True


def _draw(draws: random.Random, name: str) -> Point:
    target = draws.choice(TPUS if draws.random() < 0.75 else GPUS)
    family = draws.choice(FAMILIES)
    seq, model = _model(draws, family)
    mesh, micro_batches = {}, draws.choice((1, 1, 2, 4))
    if family != "mixer":
        mesh = {"tensor": draws.choice((1, 1, 2, 4)), "pipe": draws.choice((1, 1, 1, 2, 4))}
        if mesh["pipe"] > 1:
            micro_batches = draws.choice((4, 8))
    config = {
        "model": model,
        "mesh": mesh,
        "train_micro_batch_size_per_gpu": draws.choice((1, 2, 4, 8)),
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": draws.choice((0.0, 1.0)),
        "optimizer": {"type": draws.choice(OPTIMIZERS), "params": {"lr": 1e-4}},
        **draws.choice(({"bf16": {"enabled": True}},) * 5 + ({"fp16": {"enabled": True}}, {})),
    }
    stage = draws.choice((0, 1, 2, 3, 3))
    offload = draws.choice(("", "", "", "", "optimizer", "parameters", "activations"))
    host: dict[str, Any] = {}
    if offload in ("optimizer", "parameters") and stage:
        host["offload_optimizer"] = CPU
    if offload == "parameters" and stage == 3:
        host["offload_param"] = CPU
    if offload == "activations":
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    config["zero_optimization"] = zero(stage, **host)
    config["parallel"] = _parallel(draws, mesh)
    return Point(name, target, config, seq)


def _model(draws: random.Random, family: str) -> tuple[int, dict[str, Any]]:
    """(tokens of a sample, the config's model section)."""
    width, depth = draws.choice((512, 768, 1024, 1536, 2048)), draws.choice((4, 6, 8, 12, 16))
    seq = draws.choice((512, 960, 1024, 2048, 4096))
    if family == "mixer":
        sizes = {"width": width, "tokens": min(seq, 1024), "depth": depth}
        return 0, {"factory": "tests.planner.mixer:Mixer", "config": sizes}
    head = draws.choice((64, 128))
    heads = width // head
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "vocab_size": draws.choice((8192, 16384, 32000, 50304)),
        "max_position_embeddings": seq,
    }
    if family != "gpt2":
        sizes["num_key_value_heads"] = max(heads // draws.choice((1, 2, 4)), 1)
        sizes["intermediate_size"] = round(width * draws.choice((2.75, 3.5))) // 128 * 128
    if family == "gemma":
        sizes |= {"head_dim": head, "sliding_window": seq // 2}
    if depth <= 6 and draws.random() < 0.3:
        sizes["unroll"] = True
    return seq, {"family": family, "config": sizes}


def _parallel(draws: random.Random, mesh: dict[str, int]) -> dict[str, Any]:
    budget, every = draws.choice(("500 MB", "2 GB")), draws.choice((2, 3))
    remats = ("none", "none", "full", "full", "dots", "attention", {"budget": budget})
    found: dict[str, Any] = {"remat": draws.choice((*remats, {"every_n": every}))}
    if mesh.get("tensor", 1) > 1:
        found["sequence_parallel_activations"] = draws.choice((True, False))
    if mesh.get("pipe", 1) > 1:
        found["pipeline_schedule"] = draws.choice(("1f1b", "1f1b", "gpipe", "interleaved"))
        found["pipeline_recompute"] = draws.choice(("stage", "layers", "save"))
    return found


def _store(grid: str) -> None:
    found = {p.name: {"target": p.target, "seq": p.seq, "config": p.config} for p in drawn(grid)}
    file_of(grid).write_text(json.dumps({"seed": SEEDS[grid], "points": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(_store(sys.argv[1]))
