"""The steps of torch, its DDP and FSDP2, and DeepSpeed for `peers_cpu.py` and `gpu_peers.py`."""

import contextlib
import functools
import os
from typing import Any

from peers_work import Step, Work

# The forward passes of torch's fused attention, whose results `remat: attention` saves.
FUSED = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def torch_model(weights: str, work: Work, device: str = "cpu") -> Any:
    """The module, from (tokens, targets) to their mean loss, with fp32 parameters."""
    import torch
    from safetensors.torch import load_file
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    gpt2 = work.family == "gpt2"
    dtype = torch.bfloat16 if work.bf16 else torch.float32
    query, key = work.heads * work.head_dim, work.kv_heads * work.head_dim
    grouped = {} if work.heads == work.kv_heads else {"enable_gqa": True}
    how: dict[str, Any] = {"use_reentrant": False}
    if work.remat == "attention":
        how["context_fn"] = functools.partial(attention_saved, fused_attention())

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(work.width))
            self.bias = nn.Parameter(torch.zeros(work.width)) if gpt2 else None

    class Linear(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(outputs, inputs))
            self.bias = nn.Parameter(torch.empty(outputs)) if gpt2 else None

    def cast(module: Any) -> dict[str, Any]:
        """The parameters in the dtype of the computation."""
        return {name: p.to(dtype) for name, p in module.named_parameters()}

    def norm(x: Any, w: Any, name: str) -> Any:
        # In fp32, and its result as x.
        scale = w[f"{name}.scale"].float()
        if gpt2:
            bias = w[f"{name}.bias"].float()
            wide = functional.layer_norm(x.float(), (work.width,), scale, bias, work.eps)
        else:
            wide = functional.rms_norm(x.float(), (work.width,), scale, work.eps)
        return wide.to(x.dtype)

    def linear(x: Any, w: Any, name: str) -> Any:
        return functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def rotate(x: Any, cos: Any, sin: Any) -> Any:  # [batch, heads, seq, head_dim]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def computed(x: Any, cos: Any, sin: Any, w: dict[str, Any]) -> Any:
        parts = linear(norm(x, w, "attn_norm"), w, "qkv").split((query, key, key), -1)
        q, k, v = (y.unflatten(-1, (-1, work.head_dim)).transpose(1, 2) for y in parts)
        if not gpt2:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        x = x + linear(attended.transpose(1, 2).flatten(2), w, "out")
        h = norm(x, w, "mlp_norm")
        up = linear(h, w, "up")
        if gpt2:
            hidden = functional.gelu(up, approximate="tanh")
        else:
            hidden = functional.silu(linear(h, w, "gate")) * up
        return x + linear(hidden, w, "down")

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm = Norm()
            self.qkv = Linear(work.width, query + 2 * key)  # in one product, as nanoGPT has it
            self.out = Linear(query, work.width)
            self.mlp_norm = Norm()
            self.gate = None if gpt2 else Linear(work.width, work.hidden)
            self.up = Linear(work.width, work.hidden)
            self.down = Linear(work.hidden, work.width)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            w = cast(self)  # once, not again where the block is recomputed
            if work.remat == "none":
                return computed(x, cos, sin, w)
            return checkpoint(computed, x, cos, sin, w, **how)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(work.vocab, work.width)
            self.positions = nn.Embedding(work.seq, work.width) if gpt2 else None
            self.blocks = nn.ModuleList(Block() for _ in range(work.layers))
            self.norm = Norm()
            self.head = None if work.tied else nn.Linear(work.width, work.vocab, bias=False)
            turns = work.theta ** -(torch.arange(0, work.head_dim, 2) / work.head_dim)
            angles = torch.arange(work.seq)[:, None] * turns
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def embedded(self, tokens: Any) -> Any:
            x = functional.embedding(tokens, self.embed.weight.to(dtype))
            return x if self.positions is None else x + self.positions.weight.to(dtype)

        def loss(self, x: Any, targets: Any) -> Any:
            head = (self.embed if self.head is None else self.head).weight.to(dtype)
            w = {f"norm.{name}": p for name, p in cast(self.norm).items()}
            logits = functional.linear(norm(x, w, "norm"), head)
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embedded(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return self.loss(x, targets)

    with torch.device(device):
        model = Model()
    w = load_file(weights, device=device)

    def set_norm(to: Any, name: str, i: Any = ...) -> None:
        to.scale.copy_(w[f"{name}.scale"][i])
        if to.bias is not None:
            to.bias.copy_(w[f"{name}.bias"][i])

    def set_linear(to: Any, i: int, *names: str) -> None:
        inputs = to.weight.shape[1]
        kernels = [w[f"blocks.{name}.kernel"][i].reshape(inputs, -1) for name in names]
        to.weight.copy_(torch.cat(kernels, 1).T)
        if to.bias is not None:
            to.bias.copy_(torch.cat([w[f"blocks.{name}.bias"][i].flatten() for name in names]))

    with torch.no_grad():
        model.embed.weight.copy_(w["embed.table"])
        if model.positions is not None:
            model.positions.weight.copy_(w["positions.table"])
        if model.head is not None:
            model.head.weight.copy_(w["head.table"])
        set_norm(model.norm, "norm")
        for i, block in enumerate(model.blocks):
            set_norm(block.attn_norm, "blocks.attn_norm", i)
            set_norm(block.mlp_norm, "blocks.mlp_norm", i)
            set_linear(block.qkv, i, *(f"attn.{name}_proj" for name in "qkv"))
            set_linear(block.out, i, "attn.o_proj")
            set_linear(block.up, i, "mlp.up")
            set_linear(block.down, i, "mlp.down")
            if block.gate is not None:
                set_linear(block.gate, i, "mlp.gate")
    return model


def fused_attention() -> list[Any]:
    import torch

    ops = [getattr(torch.ops.aten, name, None) for name in FUSED]
    return [op.default for op in ops if op is not None]


def attention_saved(ops: list[Any]) -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(ops)


def torch_step(
    weights: str,
    work: Work,
    threads: int,
    compiled: bool = False,
    sharding: str | None = None,
    fused: bool = True,
) -> Step:
    """One rank of torch on a CPU; without `sharding` the only one."""
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    model = torch_model(weights, work)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if sharding == "deepspeed":
        return deepspeed_step(model, work, rank, ranks)
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
    optimizer = adamw(model, work, fused)

    def step(tokens: Any) -> Any:
        inputs, targets = torch_batch(tokens, rank, ranks)
        loss = called(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_of(loss, ranks)

    return step


def torch_device_step(
    weights: str, work: Work, device: str, compiled: str, attention: str = "default"
) -> Step:
    """torch on one device, which `float` of a loss waits for.

    Args:
      compiled: "whole", the model in one graph; "blocks", a block once for all of them, and what is
        around them, which compiles faster; or "none".
      attention: "default", torch's choice; or the kernel that it is to prefer: "cudnn", "flash".
    """
    import torch

    model = torch_model(weights, work, device)
    if compiled == "whole":
        model.compile()
    elif compiled == "blocks":
        model.embedded = torch.compile(model.embedded)
        model.loss = torch.compile(model.loss)
        for block in model.blocks:
            block.compile()
    optimizer = adamw(model, work, fused=True)

    def step(tokens: Any) -> Any:
        batch = torch.from_numpy(tokens).long().to(device, non_blocking=True)
        with preferred(attention):
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
        if work.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def preferred(attention: str) -> Any:
    """Context in which torch's fused attention prefers this kernel, and has the others left."""
    if attention == "default":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    first = kernels.pop(attention)
    return sdpa_kernel([first, *kernels.values()], set_priority=True)


def adamw(model: Any, work: Work, fused: bool) -> Any:
    import torch

    options = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(model.parameters(), lr=work.rate, weight_decay=work.decay, **options)


def deepspeed_step(model: Any, work: Work, rank: int, ranks: int) -> Step:
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_batch_size": work.batch,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": work.rate, "weight_decay": work.decay, "torch_adam": True},
        },
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(tokens: Any) -> Any:
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


def mean_of(loss: Any, ranks: int) -> Any:
    from torch import distributed

    loss = loss.detach()
    if ranks > 1:
        distributed.all_reduce(loss)
    return loss / ranks
