"""Steps of jaxspeed, plain JAX and torch.compile on one GPU, at the same work.

    python benchmarks/gpu_peers.py [--minutes 8] [--rounds 2] [--steps 20] [--only gpt2 ...]
        [--systems jaxspeed ...] [--torch-python PYTHON] [--torch-attention cudnn] [--json]
    python benchmarks/gpu_peers.py --profile [--only gpt2] [--systems jaxspeed]

GPT-2 of 124 million parameters, GPT-2 XL and the Llama of 1.2 billion, as `gpu_step.py` has them:
bf16 with fp32 parameters and moments, AdamW, clipping at a norm of 1, and the same activations
recomputed. All start from jaxspeed's initial weights, on the same batches of random tokens: the
losses of the first steps are printed side by side.

    jaxspeed    the shipped model and the public interface
    plain JAX   hand-written: a scan over the layers, `jax.nn.dot_product_attention` by cuDNN, Optax
    torch       `torch.compile` and `scaled_dot_product_attention`, in a bf16 copy of the parameters
                that each step makes in its graph, with fused AdamW. Its logits are rounded to bf16,
                where the others keep them in fp32. Of more than 24 layers a block is compiled once,
                for all of them: a graph of the entire model takes minutes to compile.

Each is a process of its own, one at a time, and the rounds go through all of them in turn, every
other one backwards. A step is timed as training runs it, without a wait for each loss, and once
more with one. Compiled programs are cached for the later rounds. What does not fit into the minutes
is said by name.

--profile traces steps of the systems in JAX, and prints a table of time by kind of kernel.
--device cpu runs the same with tiny models in fp32, to test this program where there is no GPU.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers_work import FORMULA, Step, Work, batches, flops_per_token, save_weights

NO_GPU = "needs an NVIDIA GPU and jaxspeed[cuda]"
SYSTEMS = ("jaxspeed", "plain JAX", "torch")
WARM_UP = 5  # steps, whose losses are compared
PROFILED = 5  # steps
MOST_IN_ONE_GRAPH = 24  # layers that torch compiles as one


# -- the work --------------------------------------------------------------------------------------


def configs(device: str) -> dict[str, Any]:
    """The configs of jaxspeed by the names of the cases."""
    import gpu_step

    if device == "cuda":
        return {name: gpu_step.CASES[name] for name in ("gpt2", "gpt2-xl", "llama")}
    sizes = {"vocab_size": 96, "num_hidden_layers": 3}
    gpt2 = {"family": "gpt2", "preset": "tiny", "config": sizes | {"max_position_embeddings": 32}}
    llama = {"family": "llama", "preset": "tiny", "config": sizes}
    attention = {"parallel": {"remat": "attention"}}
    # A rate and a decay at which losses of the first steps depend on all that the optimizer does.
    tiny = {
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1.0}},
    }
    return {
        "gpt2": gpu_step.case(gpt2, 32, 4, **tiny),
        "gpt2-xl": gpu_step.case(gpt2, 32, 2, **tiny, **attention),
        "llama": gpu_step.case(llama, 32, 4, **tiny, **attention),
    }


def work_of(config: Any) -> Work:
    """The same work, as the peers are told of it."""
    from jaxspeed import models

    model = config["model"]
    family = model["family"]
    sizes = models.build(family, model.get("preset"), model["config"]).config
    gpt2 = family == "gpt2"
    return Work(
        family=family,
        layers=sizes.num_hidden_layers,
        width=sizes.hidden_size,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads or sizes.num_attention_heads,
        hidden=sizes.intermediate_size or 4 * sizes.hidden_size,
        vocab=sizes.vocab_size,
        seq=config["data"]["seq_len"],
        batch=config["train_micro_batch_size_per_gpu"],
        eps=sizes.layer_norm_epsilon if gpt2 else sizes.rms_norm_eps,
        theta=Work.theta if gpt2 else sizes.rope_theta,
        rate=config["optimizer"]["params"]["lr"],
        decay=config["optimizer"]["params"]["weight_decay"],
        clip=config["gradient_clipping"],
        bf16=config["bf16"]["enabled"],
        remat=config.get("parallel", {}).get("remat", "none"),
    )


# -- a run, in a process of its own ----------------------------------------------------------------


def jaxspeed_step(config: Any, weights: str) -> Step:
    import jaxspeed

    engine = jaxspeed.initialize(config=config)
    if not os.path.exists(weights):
        save_weights(weights, engine.parameters)
    return lambda tokens: engine.train_batch({"tokens": tokens})["loss"]


def step_of(args: argparse.Namespace, work: Work) -> tuple[Step, str]:
    """The step of a system, and the device's kind."""
    if args.run == "torch":
        import torch
        from peers_torch import torch_device_step

        kind = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        step = torch_device_step(
            args.weights, work, args.device, args.torch_compile, args.torch_attention
        )
        return step, kind
    import jax
    from peers_jax import plain_jax_step

    kind = jax.devices()[0].device_kind
    if args.run == "jaxspeed":
        return jaxspeed_step(json.loads(args.config), args.weights), kind
    attention = "cudnn" if args.device == "cuda" else None
    return plain_jax_step(args.weights, work, scanned=True, attention=attention), kind


def what_is_missing(args: argparse.Namespace) -> str | None:
    needed = ("torch", "numpy", "safetensors") if args.run == "torch" else ()
    for name in needed:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed for {sys.executable}"
    if args.run == "torch":
        import torch

        if args.device == "cuda" and not torch.cuda.is_available():
            return f"torch {torch.__version__} of {sys.executable} has no GPU"
        return None
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError):  # the first without JAX's CUDA plugin
        return NO_GPU
    return None


def run_here(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps, and the first losses."""
    if missing := what_is_missing(args):
        return {"failed": missing}
    work, begun = Work.from_json(args.work), time.perf_counter()
    step, kind = step_of(args, work)
    given = [tokens for tokens, _ in zip(batches(work), range(WARM_UP))]
    losses = [float(step(given[0]))]
    first = time.perf_counter() - begun
    losses += [float(step(tokens)) for tokens in given[1:]]
    found: dict[str, Any] = {"device": kind, "losses": losses, "first_step_seconds": first}
    if args.profile:
        from kernel_kinds import profiled

        return found | {"profile": profiled(lambda i: step(given[i % WARM_UP]), PROFILED)}
    begun = time.perf_counter()
    for i in range(args.steps):
        loss = step(given[i % WARM_UP])
    float(loss)
    found["step_seconds"] = (time.perf_counter() - begun) / args.steps
    waited = []
    for i in range(args.steps):
        begun = time.perf_counter()
        float(step(given[i % WARM_UP]))
        waited.append(time.perf_counter() - begun)
    return found | {"waited_seconds": statistics.median(waited)}


def run_apart(
    system: str, config: Any, work: Work, weights: str, args: argparse.Namespace, patience: float
) -> dict[str, Any]:
    """One run of a system in a process of its own."""
    torch = system == "torch"
    compiled = args.torch_compile
    if compiled is None:
        compiled = "whole" if work.layers <= MOST_IN_ONE_GRAPH else "blocks"
    command = [args.torch_python if torch else sys.executable, __file__, "--run", system]
    command += ["--device", args.device, "--steps", str(args.steps), "--weights", weights]
    command += ["--config", json.dumps(config), "--work", work.to_json()]
    command += ["--torch-compile", compiled, "--torch-attention", args.torch_attention]
    command += ["--profile"] if args.profile else []
    folder = os.path.dirname(weights)
    environment = os.environ | {
        "JAX_PLATFORMS": args.device,
        "JAX_TRACEBACK_FILTERING": "off",  # the last line of what fails is its message
        "JAX_COMPILATION_CACHE_DIR": os.path.join(folder, "jax"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "torch"),
    }
    if torch and args.torch_python != sys.executable:
        environment.pop("PYTHONPATH", None)  # packages of another interpreter
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=patience
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within the {patience:.0f} s that were left"}
    except OSError as error:
        return {"failed": str(error)}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(lines[-1])


# -- the report ------------------------------------------------------------------------------------


def report(name: str, work: Work, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of a case's runs by system, and the losses of its first steps."""
    from jaxspeed.hardware.chip import peak_flops

    what = f"{work.family}, {work.batch} x {work.seq} tokens, remat {work.remat}"
    kind = next(iter(runs.values()))[0]["device"]
    print(f"\n{name}: {what}; {'bf16' if work.bf16 else 'fp32'} on {kind}\n")
    print("| system | ms a step | tokens/s | MFU | waited for, ms | first step, s | rounds |")
    print("|---|---|---|---|---|---|---|")
    peak = peak_flops(kind)
    for system, found in runs.items():
        each = sorted(run["step_seconds"] for run in found)
        seconds = statistics.median(each)
        rate = work.batch * work.seq / seconds
        spread = f"{1e3 * seconds:.1f} ({1e3 * each[0]:.1f} to {1e3 * each[-1]:.1f})"
        mfu = "" if peak is None else f"{rate * flops_per_token(work) / peak:.1%}"
        waited = 1e3 * statistics.median(run["waited_seconds"] for run in found)
        first = " then ".join(f"{run['first_step_seconds']:.1f}" for run in found)
        row = (system, spread, f"{rate:,.0f}", mfu, f"{waited:.1f}", first, str(len(found)))
        print(f"| {' | '.join(row)} |")
    print(f"\n| loss of step | {' | '.join(runs)} |")
    print("|---|" + "---|" * len(runs))
    losses = [found[0]["losses"] for found in runs.values()]
    for i, values in enumerate(zip(*losses, strict=True)):
        print(f"| {i + 1} | {' | '.join(f'{value:.6f}' for value in values)} |")
    print(f"\nlargest relative difference of those losses: {largest_difference(losses):.1e}")


def largest_difference(losses: list[list[float]]) -> float:
    """Of the losses of any two systems in one step, relative to the smaller."""
    return max(max(each) / min(each) - 1 for each in zip(*losses, strict=True))


def rows_of_profile(system: str, found: dict[str, Any]) -> None:
    from kernel_kinds import table

    print(f"\n{system} on {found['device']}, of {PROFILED} traced steps")
    print(table(found["profile"]))


# -- all runs --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = ("gpt2", "gpt2-xl", "llama")
    parser.add_argument("--only", nargs="+", choices=names, help="cases")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="timed ones per run, twice")
    parser.add_argument("--torch-python", default=sys.executable, help="the interpreter with torch")
    parser.add_argument("--torch-compile", choices=("whole", "blocks", "none"))
    parser.add_argument(
        "--torch-attention", choices=("default", "cudnn", "flash"), default="default",
        help="the kernel that torch is to prefer",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="time by kind of kernel, instead")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="every run, as a line")
    for hidden in ("--run", "--weights", "--work", "--config"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run_here(args)), flush=True)
        sys.stderr.flush()
        os._exit(0)  # without what frameworks do at their end
    chosen = args.only or (("gpt2",) if args.profile else names)
    systems = args.systems or (("jaxspeed",) if args.profile else SYSTEMS)
    if args.profile:
        systems = [system for system in systems if system != "torch"]
        args.rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        measure({name: configs(args.device)[name] for name in chosen}, systems, args, Path(folder))


def measure(cases: dict[str, Any], systems: Any, args: argparse.Namespace, folder: Path) -> None:
    """Run the rounds within the minutes, and print what was found."""
    end = time.monotonic() + 60 * args.minutes
    works = {name: work_of(config) for name, config in cases.items()}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in cases}
    failed: dict[tuple[str, str], str] = {}
    late = []
    for number in range(args.rounds):
        for name, config in cases.items():
            weights = str(folder / f"{name}.safetensors")
            ordered = list(systems if number % 2 == 0 else reversed(systems))
            if not os.path.exists(weights):  # jaxspeed's first run writes them
                ordered = ["jaxspeed", *(each for each in ordered if each != "jaxspeed")]
            for system in ordered:
                if (name, system) in failed:
                    continue
                called, left = f"round {number + 1}: {name}, {system}", end - time.monotonic()
                known = runs[name].get(system)
                if left < (1.1 * known[-1]["wall_seconds"] if known else 1):
                    late.append(called)
                    continue
                begun = time.monotonic()
                found = run_apart(system, config, works[name], weights, args, left)
                found["wall_seconds"] = time.monotonic() - begun
                if found.get("failed") == NO_GPU:
                    print(f"benchmarks/gpu_peers.py: {NO_GPU}")
                    return
                if args.json:
                    print(json.dumps({"case": name, "system": system, **found}), flush=True)
                if "failed" in found:
                    failed[name, system] = f"{called}: {found['failed']}"
                    print(failed[name, system], file=sys.stderr, flush=True)
                    continue
                print(f"{called}: {found['wall_seconds']:.0f} s", file=sys.stderr, flush=True)
                if args.profile:
                    rows_of_profile(f"{name}, {system}", found)
                elif system in systems:
                    runs[name].setdefault(system, []).append(found)
    for name in cases:
        if runs[name]:
            in_order = {each: runs[name][each] for each in systems if each in runs[name]}
            report(name, works[name], in_order)
    if any(runs.values()):
        print(f"\n{FORMULA}")
    for line in failed.values():
        print(f"failed: {line}")
    if late:
        print(f"not measured, as {args.minutes:g} minutes were over: {'; '.join(late)}")


if __name__ == "__main__":
    main()
