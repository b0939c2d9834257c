"""Tokens per second on a CPU, of jaxspeed and its peers at the same work.

    pip install -e '.[bench]'
    python benchmarks/peers_cpu.py [--cores 2] [--rounds 5] [--steps 10] [--only jaxspeed ...]

All train one GPT-2 (6 x 384, 6 heads, a tied head, vocabulary 8192) in fp32 with AdamW on 8 x 256
tokens a step, without clipping or dropout, from the same weights on the same batches: the losses of
the first steps are compared. Each is a process of its own on the same cores (with several ranks, a
group of processes), and the rounds are interleaved. A step is timed until its loss is on the host.
Reported are the medians of the rounds, which are medians of their steps, and their range.

`jaxspeed train` restarts itself with glibc's setting for huge pages; jaxspeed's processes have it
here too. --huge-pages all | none gives it to the peers as well, or to none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

LAYERS, WIDTH, HEADS, VOCAB, SEQ, BATCH = 6, 384, 6, 8192, 256, 8
RATE, DECAY, EPS = 1e-3, 0.1, 1e-5
WARM_UP = 4
COMPARED = 3  # losses of the first steps
Step = Callable[[Any], float]  # from a batch [batch, seq + 1] to its loss


def batches() -> Iterator[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, VOCAB, (BATCH, SEQ + 1), dtype=np.int32)


# -- JAX -------------------------------------------------------------------------------------------


def jaxspeed_step(
    weights: str, devices: int, unroll: int | bool = True, stage: int = 0, parts: int = 1
) -> Step:
    """The shipped model and the public interface."""
    import jaxspeed
    from jaxspeed import models

    jaxspeed.simulate(devices)
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQ,
        "unroll": unroll,
    }
    built = models.build("gpt2", None, sizes)
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
        "parallel": {"batch_parts": parts},
        "run": {"compilation_cache": False},
    }
    engine = jaxspeed.initialize(model=built.factory, loss_fn=built.loss, config=config)
    if not os.path.exists(weights):
        save_weights(weights, engine.state.params)
    return lambda tokens: float(engine.train_batch({"tokens": tokens})["loss"])


def save_weights(file: str, params: Any) -> None:
    """jaxspeed's initial weights, from which all others start too."""
    import numpy as np

    np.savez(file, **{path.replace("/", "."): np.asarray(value) for path, value in params.items()})


def plain_jax_step(weights: str) -> Step:
    """Hand-written JAX and Optax, as a careful user writes them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    def norm(x: Any, p: Any, name: str) -> Any:
        x = x - jnp.mean(x, -1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)
        return x * p[f"{name}.scale"] + p[f"{name}.bias"]

    def linear(x: Any, p: Any, name: str) -> Any:
        kernel, bias = p[f"{name}.kernel"], p[f"{name}.bias"]
        return jnp.tensordot(x, kernel, kernel.ndim - bias.ndim) + bias

    def block(x: Any, p: Any) -> Any:
        h = norm(x, p, "attn_norm")
        q, k, v = (linear(h, p, f"attn.{name}_proj") for name in "qkv")
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended, p, "attn.o_proj")
        up = linear(norm(x, p, "mlp_norm"), p, "mlp.up")
        return x + linear(jax.nn.gelu(up, approximate=True), p, "mlp.down")

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed.table"][tokens[:, :-1]] + params["positions.table"]
        for i in range(LAYERS):
            inner = {k.removeprefix("blocks."): v[i] for k, v in params.items() if "blocks." in k}
            x = block(x, inner)
        logits = norm(x, params, "norm") @ params["embed.table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tx = optax.adamw(RATE, weight_decay=DECAY)

    def step(state: Any, tokens: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {path: jnp.asarray(value) for path, value in np.load(weights).items()}
    state = [(params, tx.init(params))]
    jitted = jax.jit(step, donate_argnums=0)

    def run(tokens: Any) -> float:
        state[0], value = jitted(state[0], tokens)
        return float(value)

    return run


# -- torch -----------------------------------------------------------------------------------------


def torch_model(weights: str) -> Any:
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm = nn.LayerNorm(WIDTH, eps=EPS)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)  # in one product, as nanoGPT has it
            self.out = nn.Linear(WIDTH, WIDTH)
            self.mlp_norm = nn.LayerNorm(WIDTH, eps=EPS)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.attn_norm(x)).split(WIDTH, -1)
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            up = self.up(self.mlp_norm(x))
            return x + self.down(functional.gelu(up, approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.positions = nn.Embedding(SEQ, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH, eps=EPS)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embed(tokens) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.embed.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model, w = GPT2(), {k: torch.from_numpy(v) for k, v in np.load(weights).items()}

    def norm(to: Any, name: str, i: Any = ...) -> None:
        to.weight.copy_(w[f"{name}.scale"][i])
        to.bias.copy_(w[f"{name}.bias"][i])

    def linear(to: Any, i: int, *names: str) -> None:
        kernels = [w[f"blocks.{name}.kernel"][i].reshape(to.in_features, -1) for name in names]
        biases = [w[f"blocks.{name}.bias"][i].flatten() for name in names]
        to.weight.copy_(torch.cat(kernels, 1).T)
        to.bias.copy_(torch.cat(biases))

    with torch.no_grad():
        model.embed.weight.copy_(w["embed.table"])
        model.positions.weight.copy_(w["positions.table"])
        norm(model.norm, "norm")
        for i, block in enumerate(model.blocks):
            norm(block.attn_norm, "blocks.attn_norm", i)
            norm(block.mlp_norm, "blocks.mlp_norm", i)
            linear(block.qkv, i, *(f"attn.{name}_proj" for name in "qkv"))
            linear(block.out, i, "attn.o_proj")
            linear(block.up, i, "mlp.up")
            linear(block.down, i, "mlp.down")
    return model


def torch_step(
    weights: str,
    threads: int,
    compiled: bool = False,
    sharding: str | None = None,
    fused: bool = True,
) -> Step:
    """One rank of torch; without `sharding` the only one."""
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    model = torch_model(weights)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if sharding == "deepspeed":
        return deepspeed_step(model, rank, ranks)
    if sharding:
        distributed.init_process_group("gloo")
    if sharding == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    called = torch.nn.parallel.DistributedDataParallel(model) if sharding == "ddp" else model
    called = torch.compile(called) if compiled else called
    options = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, **options)

    def step(tokens: Any) -> float:
        inputs, targets = torch_batch(tokens, rank, ranks)
        loss = called(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_of(loss, ranks)

    return step


def deepspeed_step(model: Any, rank: int, ranks: int) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_batch_size": BATCH,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True},
        },
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(tokens: Any) -> float:
        inputs, targets = torch_batch(tokens, rank, ranks)
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return mean_of(loss, ranks)

    return step


def torch_batch(tokens: Any, rank: int, ranks: int) -> Any:
    import torch

    own = torch.from_numpy(tokens).long().chunk(ranks)[rank]
    return own[:, :-1], own[:, 1:]


def mean_of(loss: Any, ranks: int) -> float:
    from torch import distributed

    loss = loss.detach()
    if ranks > 1:
        distributed.all_reduce(loss)
    return float(loss) / ranks


# -- runs ------------------------------------------------------------------------------------------


def competitors(cores: int) -> dict[str, tuple[int, Callable[[str], Step]]]:
    """By name: processes, and the step of each."""
    n = cores
    one: dict[str, Callable[[str], Step]] = {
        "jaxspeed, 1 device": lambda w: jaxspeed_step(w, 1),
        "jaxspeed, 1 device, 2 parts": lambda w: jaxspeed_step(w, 1, parts=2),
        "jaxspeed, 1 device, scanned": lambda w: jaxspeed_step(w, 1, unroll=1),
        "plain JAX and Optax": plain_jax_step,
        "torch": lambda w: torch_step(w, n),
        "torch, compiled": lambda w: torch_step(w, n, compiled=True),
    }
    if n == 1:
        return {name: (1, make) for name, make in one.items()}
    several: dict[str, Callable[[str], Step]] = {
        f"torch DDP, {n} processes": lambda w: torch_step(w, 1, sharding="ddp"),
        f"torch DDP, {n} processes, compiled": lambda w: torch_step(w, 1, True, "ddp"),
        f"torch FSDP2, {n} processes": lambda w: torch_step(w, 1, sharding="fsdp2"),
        f"DeepSpeed ZeRO 1, {n} processes": lambda w: torch_step(w, 1, sharding="deepspeed"),
    }
    one |= {
        f"jaxspeed, {n} devices": lambda w: jaxspeed_step(w, n),
        f"jaxspeed, {n} devices, scanned": lambda w: jaxspeed_step(w, n, unroll=1),
        f"jaxspeed, {n} devices, ZeRO 1": lambda w: jaxspeed_step(w, n, stage=1),
    }
    found = {name: (1, make) for name, make in one.items()}
    return found | {name: (n, make) for name, make in several.items()}


def run_here(make: Callable[[str], Step], weights: str, steps: int) -> None:
    """Print the seconds of each step, and the first losses."""
    step, seconds, losses = make(weights), [], []
    for tokens, _ in zip(batches(), range(WARM_UP + steps)):
        start = time.perf_counter()
        losses.append(step(tokens))
        seconds.append(time.perf_counter() - start)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": seconds[WARM_UP:], "losses": losses[:COMPARED]}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without the teardown of process groups, which may wait for each other


def run_apart(name: str, processes: int, weights: str, arguments: Any, port: int) -> Any:
    """One run in processes of its own; None if it fails."""
    command = [sys.executable, __file__, "--run", name, "--weights", weights]
    command += ["--cores", str(arguments.cores), "--steps", str(arguments.steps)]
    group = []
    for rank in range(processes):
        environment = os.environ | {
            # DeepSpeed compiles its communication with the ninja that pip installed.
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": str(arguments.cores // processes),
            "DS_ACCELERATOR": "cpu",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **huge_pages(name, arguments.huge_pages),
        }
        if processes == 1:  # jaxspeed would join the others
            for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(key)
        pipe = subprocess.PIPE
        group.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    outputs = [each.communicate() for each in group]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith('{"seconds"')]
    if not lines:
        last = (outputs[0][1].strip().splitlines() or ["no message"])[-1]
        print(f"{name}: failed: {last}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def huge_pages(name: str, whose: str) -> dict[str, str]:
    asks = whose == "all" or (whose == "jaxspeed" and name.startswith("jaxspeed"))
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1" if asks else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=2, help="the first of those allowed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed ones per run")
    parser.add_argument("--only", nargs="+", default=[], help="names that contain one of these")
    parser.add_argument("--huge-pages", choices=("jaxspeed", "all", "none"), default="jaxspeed")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    every = competitors(arguments.cores)
    if arguments.run:
        run_here(every[arguments.run][1], arguments.weights, arguments.steps)
    chosen = {
        name: processes
        for name, (processes, _) in every.items()
        if not arguments.only or any(part in name for part in arguments.only)
    }
    rates: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights.npz")
        first = argparse.Namespace(cores=arguments.cores, steps=0, huge_pages="none")
        run_apart("jaxspeed, 1 device", 1, weights, first, 0)
        for number in range(arguments.rounds):
            for i, (name, processes) in enumerate(chosen.items()):
                port = 20000 + (os.getpid() + 101 * number + i) % 20000
                found = run_apart(name, processes, weights, arguments, port)
                if found is None:
                    continue
                rate = BATCH * SEQ / statistics.median(found["seconds"])
                rates.setdefault(name, []).append(rate)
                losses[name] = found["losses"]
                print(f"round {number + 1}: {name}: {rate:.0f}", file=sys.stderr, flush=True)
    report(rates, losses)


def report(rates: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    reference = next(iter(losses.values()))
    print(f"\n| tokens/s, median of {max(map(len, rates.values()))} rounds | | range | losses |")
    print("|---|---|---|---|")
    for name, found in sorted(rates.items(), key=lambda pair: -statistics.median(pair[1])):
        off = max(abs(a - b) / b for a, b in zip(losses[name], reference, strict=True))
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        print(f"| {name} | {statistics.median(found):,.0f} | {spread} | within {off:.0e} |")
    ours = max((statistics.median(r) for n, r in rates.items() if "jaxspeed" in n), default=0)
    theirs = [
        statistics.median(r) for n, r in rates.items() if n.startswith(("torch", "DeepSpeed"))
    ]
    if ours and theirs:
        print(f"\nthe best jaxspeed is {ours / max(theirs):.2f}x the best of torch and DeepSpeed")


if __name__ == "__main__":
    main()
