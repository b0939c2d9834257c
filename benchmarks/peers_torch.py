"""The steps of torch, its DDP and FSDP2, and DeepSpeed for `peers_cpu.py`."""

import os
from typing import Any

from peers_work import BATCH, DECAY, EPS, HEADS, LAYERS, RATE, SEQ, VOCAB, WIDTH, Step


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
