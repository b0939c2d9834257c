"""From `initialize` to the end of the first step, cold: the engine against a hand-written program.

    python benchmarks/first_step.py [--rounds 3] [--layers 24] [--only zero3 ...] [--json]
    python benchmarks/first_step.py --factory my_module:case

The model is a list of unrolled transformer blocks of width 32, or that of `case()`, which returns
(model, loss_fn, batch) as `initialize` takes them: a factory of an `nnx.Module` or a Linen module,
a loss of (model, batch), and 16 samples. The yardstick is a plain program for one device, its
initialization included: the parameters of nnx are created outside of jit, those of Linen in one,
and one jitted step holds the loss, its gradients and AdamW. Each run is a process of its own on
eight simulated devices, without a compilation cache; rounds alternate between plain and engine.
Reported are the medians in seconds of wall and CPU time, and of the ratios of each round. CPU time
is that of all threads; it depends less on other load.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx

WIDTH, HEADS, VOCAB, SAMPLES, SEQ = 32, 4, 128, 16, 32
ENGINES: dict[str, dict[str, Any]] = {
    "zero0": {},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "tensor": {"mesh": {"tensor": 2}},
    "remat": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "parallel": {"remat": "full"},
    },
    "pipe": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
}
BOUNDS = {name: 3.0 if name == "pipe" else 2.0 for name in ENGINES}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        q, k, v = (
            each(h).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)
            for each in (self.query, self.key, self.value)
        )
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: Any, batch: Any) -> jax.Array:
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return losses.mean()


Case = tuple[Any, Callable[[Any, Any], Any], Any]  # model, loss_fn, batch


def case_of(name: str | None, layers: int) -> Case:
    """The case that a `module:function` makes, or the unrolled blocks."""
    if name is not None:
        sys.path.insert(0, os.getcwd())
        module, _, function = name.partition(":")
        made: Case = getattr(importlib.import_module(module), function)()
        return made
    tokens = np.random.default_rng(0).integers(0, VOCAB, (SAMPLES, SEQ + 1))
    return lambda rngs: Decoder(layers, rngs), loss, {"tokens": tokens.astype(np.int32)}


class Applied:
    """A Linen module with its variables, called as the loss calls it; `rest` is what it changes."""

    def __init__(self, module: linen.Module, variables: Any = None) -> None:
        self.module, self.variables, self.rest = module, variables, {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
        if self.variables is None:
            out, self.rest = self.module.init_with_output(rngs, *args, **options)
        else:
            mutable = [name for name in self.variables if name != "params"]
            out, self.rest = self.module.apply(
                self.variables, *args, rngs=rngs, mutable=mutable, **options
            )
        return out


def created(model: Any, loss_fn: Callable[[Any, Any], Any], batch: Any) -> tuple[Any, Any, Any]:
    """(parameters, other variables, the loss as a function of both and a batch)."""
    if isinstance(model, linen.Module):

        @jax.jit
        def create(batch: Any) -> Any:
            loss_fn(applied := Applied(model), batch)
            return linen.meta.unbox(applied.rest)

        found = create(batch)
        rest = {name: x for name, x in found.items() if name != "params" and jax.tree.leaves(x)}

        def value(params: Any, rest: Any, batch: Any) -> Any:
            applied = Applied(model, {"params": params, **rest})
            return loss_fn(applied, batch), applied.rest

        return found["params"], rest, value
    graph, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)

    def of_nnx(params: Any, rest: Any, batch: Any) -> Any:
        module = nnx.merge(graph, params, rest, copy=True)
        found = loss_fn(module, batch)
        return found, nnx.split(module, nnx.Param, ...)[2]

    return params, rest, of_nnx


def plain(case: Case) -> Callable[[], float]:
    """The hand-written program: what has to be done before and in the first step."""
    model, loss_fn, batch = case

    def run() -> float:
        params, rest, value = created(model, loss_fn, batch)
        tx = optax.adamw(1e-3)

        @jax.jit
        def step(params: Any, rest: Any, state: Any, batch: Any) -> Any:
            of_params = jax.value_and_grad(value, has_aux=True)
            (first, rest), grads = of_params(params, rest, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), rest, state, first

        return float(step(params, rest, tx.init(params), batch)[-1])

    return run


def engine(case: Case, config: dict[str, Any]) -> Callable[[], float]:
    import jaxspeed

    model, loss_fn, batch = case
    full = {
        "train_batch_size": len(jax.tree.leaves(batch)[0]),
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-4}},
        "run": {"compilation_cache": False},
        **config,
    }

    def run() -> float:
        made = jaxspeed.initialize(model, loss_fn, config=full, example_batch=batch)
        return float(made.train_batch(batch)["loss"])

    return run


def measure(name: str, case: Case) -> dict[str, Any]:
    """Wall and CPU seconds, in this process; or why the engine refuses the case."""
    from jaxspeed.errors import JaxspeedError

    jax.config.update("jax_enable_compilation_cache", False)
    jax.devices()
    run = plain(case) if name == "plain" else engine(case, ENGINES[name])
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        first = run()
    except JaxspeedError as error:
        return {"refused": str(error).partition("\n")[0]}
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "loss": first,
    }


def in_a_process(name: str, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, *options]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--factory", metavar="MODULE:FUNCTION", help="instead of the blocks")
    parser.add_argument("--only", nargs="*", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, case_of(args.factory, args.layers))))
        return
    options = ["--layers", str(args.layers)]
    options += ["--factory", args.factory] if args.factory else []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("plain", *args.only)}
    for _ in range(args.rounds):
        for name, found in runs.items():
            if not (found and "refused" in found[0]):
                found.append(in_a_process(name, options))
    result: dict[str, Any] = {}
    for name, found in runs.items():
        if "refused" in found[0]:
            result[name] = found[0]
            continue
        pairs = list(zip(found, runs["plain"], strict=True))
        result[name] = {
            "wall": statistics.median(each["wall"] for each in found),
            "cpu": statistics.median(each["cpu"] for each in found),
            "ratio": statistics.median(a["wall"] / b["wall"] for a, b in pairs),
            "cpu_ratio": statistics.median(a["cpu"] / b["cpu"] for a, b in pairs),
            "loss": found[0]["loss"],
        }
    if args.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        if "refused" in row:
            print(f"{name:8} refused: {row['refused']}")
            continue
        bound = f" (at most {BOUNDS[name]})" if name in BOUNDS else ""
        print(
            f"{name:8} {row['wall']:6.1f} s, CPU {row['cpu']:6.1f} s, {row['ratio']:.2f} times "
            f"plain{bound}, {row['cpu_ratio']:.2f} in CPU time, loss {row['loss']:.4f}"
        )


if __name__ == "__main__":
    main()
