"""Rollouts against `engine.generate` of another checkout and transformers' `generate`.

    python benchmarks/rollout.py [--before CHECKOUT] [--transformers PYTHON] [--rounds 5] [--json]

64 prompts of 8 to 64 tokens. The model's logits are small, so that each token ends an answer with
a probability of 1/32: answers are geometric with mean 32, and of at most 256 tokens. All read the
same folder, draw with temperature 1 on the same cores, and run in turns, in processes of their own.
Reported are medians of the useful tokens per second, those up to and with an end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, MOST, MEAN, VOCAB = 64, 256, 32, 4096
ENDS = [*range(VOCAB // MEAN)]
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
}
BOUNDS = {"before": 2.0, "transformers": 1.5}  # of the tokens per second


def prompts() -> list[list[int]]:
    import random

    draws = random.Random(0)
    lengths = [draws.randint(8, 64) for _ in range(PROMPTS)]
    return [[draws.randrange(len(ENDS), VOCAB) for _ in range(n)] for n in lengths]


def engine_of(folder: str) -> Any:
    import jax

    import jaxspeed

    jaxspeed.simulate(1)
    config = {
        "model": {"pretrained": folder},
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }
    return jaxspeed.initialize(config=config, devices=jax.devices()[:1])


def rolled_out(folder: str) -> Any:
    engine = engine_of(folder)

    def run(seed: int) -> int:
        result = engine.rollout(prompts(), MOST, stop_tokens=ENDS, seed=seed, step=0)
        return sum(len(row.tokens) for row in result.completions)

    return run


def generated(folder: str) -> Any:
    engine = engine_of(folder)

    def run(seed: int) -> int:
        options = {"temperature": 1.0, "stop_tokens": ENDS, "seed": seed}
        rows = engine.generate(prompts(), MOST, **options)
        return sum(len(row.tokens) + (row.ended_by == "end") for row in rows)

    return run


def by_transformers(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = prompts()
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])

    @torch.no_grad()
    def run(seed: int) -> int:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output = model.generate(
            ids, attention_mask=mask, max_new_tokens=MOST, eos_token_id=ENDS, pad_token_id=0,
            **options,
        )  # fmt: skip
        total = 0
        for row in output[:, width:].tolist():
            end = next((i for i, token in enumerate(row) if token in ENDS), len(row) - 1)
            total += end + 1
        return total

    return run


KINDS = {"rollout": rolled_out, "before": generated, "transformers": by_transformers}


def serve(kind: str, folder: str) -> None:
    """Answer each seed on the standard input by the tokens and the seconds of a run."""
    run = KINDS[kind](folder)
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = run(int(line))
        print(json.dumps([tokens, time.perf_counter() - start]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a checkout whose engine.generate is compared")
    parser.add_argument("--transformers", help="an interpreter that has transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return 0
    root = Path(__file__).resolve().parents[1]
    kinds = {"rollout": (sys.executable, root)}
    if options.before:
        kinds["before"] = sys.executable, Path(options.before).resolve()
    if options.transformers:
        kinds["transformers"] = options.transformers, root
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/model")
        processes = {
            kind: subprocess.Popen(
                [python, __file__, "--serve", kind, f"{folder}/model"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(checkout)},
            )
            for kind, (python, checkout) in kinds.items()
        }
        runs: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for seed in range(options.rounds + 2):
            for kind, process in processes.items():
                assert process.stdin and process.stdout
                print(seed, file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if seed > 1:  # the first ones compile
                    runs[kind].append(json.loads(answer))
        for process in processes.values():
            process.communicate()
    results: dict[str, Any] = {
        kind: {
            "tokens per second": statistics.median(tokens / s for tokens, s in rounds),
            "seconds": statistics.median(s for _, s in rounds),
            "tokens": statistics.median(tokens for tokens, _ in rounds),
        }
        for kind, rounds in runs.items()
    }
    speeds = {kind: result["tokens per second"] for kind, result in results.items()}
    ratios = {kind: speeds["rollout"] / speeds[kind] for kind in BOUNDS if kind in speeds}
    if options.json:
        print(json.dumps({**results, "ratios": ratios}, indent=1))
    else:
        for kind, result in results.items():
            print(f"{kind:<14}" + "  ".join(f"{value:.4g} {x}" for x, value in result.items()))
        print("  ".join(f"{ratio:.2f} times {kind}" for kind, ratio in ratios.items()))
    return int(any(ratio < BOUNDS[kind] for kind, ratio in ratios.items()))


def save(folder: str) -> None:
    """Write the model that all read."""
    import jax

    import jaxspeed

    config = {
        "model": {"family": "llama", "config": MODEL},
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }
    jaxspeed.initialize(config=config, devices=jax.devices()[:1]).save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
