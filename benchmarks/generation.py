"""Text with a key-value cache against the same text without one, where each token recomputes all.

    python benchmarks/generation.py [--rounds 5] [--tokens 256] [--only zero3 ...] [--json]

The model is that of configs/tiny.yaml, on one device and on eight simulated ones. Rounds alternate
between the two paths, compiled before; both make the same greedy tokens. The path without a cache
pads to powers of two. Reported are the medians of wall and of CPU seconds, and of their ratios.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax

import jaxspeed

BOUND = 0.2  # of the CPU time of the path without a cache, on one device
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"mesh": {"tensor": 2}}),
    "zero3": (8, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}}),
}
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def measured(name: str, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of both paths."""
    from jaxspeed.generation import Generator, Request, Sampling

    devices, sections = SETTINGS[name]
    config = {
        "model": {"family": "llama", "config": MODEL},
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        **sections,
    }
    engine = jaxspeed.initialize(config=config, devices=jax.devices()[:devices])
    request = Request([[100, 101, 102, 32]], tokens, Sampling(0))
    paths = {"cached": Generator(engine.program), "recomputed": Generator(engine.program, False)}
    texts, seconds = {}, {f"{path} {kind}": [] for path in paths for kind in ("wall", "cpu")}
    for number in range(rounds + 1):
        for path, generator in paths.items():
            wall, cpu = time.perf_counter(), time.process_time()
            texts[path] = generator.start(engine.state, request).finish()
            if number:  # the first one compiles
                seconds[f"{path} wall"].append(time.perf_counter() - wall)
                seconds[f"{path} cpu"].append(time.process_time() - cpu)
    assert texts["cached"] == texts["recomputed"]
    found = {which: statistics.median(each) for which, each in seconds.items()}
    for kind in ("wall", "cpu"):
        both = zip(seconds[f"cached {kind}"], seconds[f"recomputed {kind}"], strict=True)
        found[f"ratio {kind}"] = statistics.median(a / b for a, b in both)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    jaxspeed.simulate(8)
    found = {name: measured(name, given.tokens, given.rounds) for name in given.only}
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for name, each in found.items():
            shown = "  ".join(f"{which} {value:.3g}" for which, value in each.items())
            print(f"{name:<8}{shown}")
    return int("one" in found and found["one"]["ratio cpu"] > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
