"""Training on two ranks by DeepSpeed and by torch's FSDP2, stopped, saved, and continued.

Each rank is a process of this file: `python torch_runs.py REQUEST.json RANK PORT`.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS = 2


def trained(
    folder: str, kind: str, batches: list[list[list[int]]], saved_at: int, **options: Any
) -> dict[str, Any]:
    """Train a small Llama and save it in `folder`.

    Args:
      kind: deepspeed, pipeline, or dcp.
      batches: the tokens of each step, of all ranks.
      saved_at: number of the steps before the checkpoint.
      options: the model's `sizes`, the `config` of DeepSpeed or the arguments of AdamW;
        `deepspeed`: the folder of another version; `flat`: keys as torchtitan has them; `exported`:
        a folder to continue from at the step `position`; `universal`: convert the checkpoint.

    Returns:
      The losses of all steps, and the parameters and moments that were saved, by their names.
    """
    there = Path(folder)
    there.mkdir(parents=True, exist_ok=True)
    request = {"folder": folder, "kind": kind, "batches": batches, "saved_at": saved_at, **options}
    (there / "request.json").write_text(json.dumps(request))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = dict(os.environ)
    if options.get("deepspeed"):
        env["PYTHONPATH"] = options["deepspeed"]
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(there / "request.json"), str(rank), str(port)],
            env=env,
            cwd=there,
            stdout=(there / f"rank{rank}.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]
    try:
        codes = [child.wait(600) for child in ranks]
    finally:
        for child in ranks:
            child.kill()
    if any(codes):
        logs = (f"rank {r}:\n{(there / f'rank{r}.log').read_text()[-3000:]}" for r in range(RANKS))
        raise RuntimeError(f"exit codes {codes}\n" + "\n".join(logs))
    answer: dict[str, Any] = json.loads((there / "losses.json").read_text())
    from safetensors.torch import load_file

    if options.get("universal"):
        folders = ["--input_folder", there / "saved", "--output_folder", there / "universal"]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders]
        command += ["--inject_missing_state"]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    truth = [load_file(path) for path in sorted(there.glob("truth*.safetensors"))]
    return {**answer, "values": {name: x for part in truth for name, x in part.items()}}


def _deepspeed(request: dict[str, Any], rank: int) -> tuple[list[float], Any]:
    import deepspeed
    import torch

    config, pipeline = request["config"], request["kind"] == "pipeline"
    model = _model(request)
    if pipeline:
        model = _as_pipeline(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step, batch in enumerate(request["batches"]):
        if step == request["saved_at"]:
            engine.save_checkpoint(request["folder"], tag="saved")
            _truth(request, rank, _deepspeed_values(engine))
        ids = torch.tensor(batch)
        if pipeline:
            loss = engine.train_batch(iter([(ids, ids)] * engine.gradient_accumulation_steps()))
            losses.append(float(loss))
            continue
        share = ids.chunk(RANKS)[rank]
        loss = engine(share, labels=share).loss
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss))
    return losses, engine


def _deepspeed_values(engine: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    values = {}
    for name, param in engine.module.named_parameters():
        values[name] = safe_get_full_fp32_param(param)
        if values[name] is None:  # no ZeRO: the optimizer has the parameters themselves
            state = engine.optimizer.state[param]
            values[name] = param.detach()
            values |= {f"{name}|{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"{name}|{key}"] = safe_get_full_optimizer_state(param, key)
    return values


def _dcp(request: dict[str, Any], rank: int) -> tuple[list[float], Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.fsdp import fully_shard

    model = _model(request)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    arguments = request["config"]
    optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    begun = request.get("position", 0)
    warmup = lambda step: max(0, begun + step - 1) / 20  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    flat = states.StateDictOptions(flatten_optimizer_state_dict=bool(request.get("flat")))
    if exported := request.get("exported"):
        params = states.get_model_state_dict(model)
        for param in model.parameters():  # a state to load into
            param.grad = torch.zeros_like(param)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = arguments["lr"]
        options = states.StateDictOptions(flatten_optimizer_state_dict=True)
        moments = states.get_optimizer_state_dict(model, optimizer, options=options)
        tensors = {k: x for k, x in moments.items() if isinstance(x, torch.Tensor)}
        both = {**params, **tensors}
        dcp.load(both, storage_reader=dcp.HuggingFaceStorageReader(exported))
        states.set_model_state_dict(model, {name: both[name] for name in params})
        moments |= {name: both[name] for name in tensors}
        states.set_optimizer_state_dict(model, optimizer, moments, options=options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
    losses = []
    for step, batch in enumerate(request["batches"]):
        if step == request["saved_at"]:
            model_state, optimizer_state = states.get_state_dict(model, optimizer, options=flat)
            content = {"model": model_state, "optim": optimizer_state}
            if request.get("flat"):  # as torchtitan
                content = {**model_state, **optimizer_state}
            content["lr_scheduler"] = scheduler.state_dict()
            content["train_state"] = {"step": torch.tensor(step), "ntokens_seen": 12345}
            dcp.save(content, checkpoint_id=f"{request['folder']}/saved")
            values = {}
            for name, param in model.named_parameters():
                values[name] = param.full_tensor().detach()
                for key in ("exp_avg", "exp_avg_sq"):
                    values[f"{name}|{key}"] = optimizer.state[param][key].full_tensor()
            _truth(request, rank, values)
        share = torch.tensor(batch).chunk(RANKS)[rank]
        loss = model(share, labels=share).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
    return losses, model


def _model(request: dict[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(request.get("seed", 0))
    return LlamaForCausalLM(LlamaConfig(**request["sizes"]))


def _as_pipeline(model: Any) -> Any:
    import torch
    from deepspeed.pipe import PipelineModule

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = model.model.embed_tokens.weight

        def forward(self, ids: Any) -> Any:
            return torch.nn.functional.embedding(ids, self.weight)

    class Block(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            positions = torch.arange(x.shape[1])[None]
            rotary = model.model.rotary_emb(x, positions)
            out = self.layer(x, position_embeddings=rotary, attention_mask=None)
            return out[0] if isinstance(out, tuple) else out

    def loss(logits: Any, ids: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    blocks = [Block(layer) for layer in model.model.layers]
    layers = [Embedding(), *blocks, model.model.norm, model.lm_head]
    return PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")


def _mean(loss: Any) -> float:
    import torch

    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    return float(mean) / RANKS


def _truth(request: dict[str, Any], rank: int, values: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    if rank == 0 or request["kind"] == "pipeline":
        copies = {name: x.detach().clone().contiguous() for name, x in values.items()}
        save_file(copies, Path(request["folder"]) / f"truth{rank}.safetensors")


def main() -> None:
    request, rank, port = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    import torch

    torch.set_num_threads(1)
    if request["kind"] == "dcp":
        torch.distributed.init_process_group("gloo")
        losses, _ = _dcp(request, rank)
    else:
        import deepspeed

        deepspeed.init_distributed("gloo")
        losses, _ = _deepspeed(request, rank)
    torch.distributed.barrier()
    if rank == 0:
        used = sys.modules.get("deepspeed", torch)
        answer = {"losses": losses, "version": used.__version__}
        (Path(request["folder"]) / "losses.json").write_text(json.dumps(answer))
    os._exit(0)  # DeepSpeed's and Gloo's threads may outlive the interpreter


if __name__ == "__main__":
    main()
