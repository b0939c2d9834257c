"""Figures of plans for tests of the page, in the form of `--json`; the numbers are made up."""

import copy
from typing import Any

from jaxspeed.hardware.targets import target_of
from jaxspeed.pipeline.schedule import Schedule, schedule
from jaxspeed.planner.time.torus import layout_of

AXES = ("pipe", "replica", "data", "seq", "expert", "tensor")
HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran=1'>\"&"
SCHEDULES = [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 4, 8, 3)]

GIB = 2**30


def component(name: str, size: int, lasting: bool, host: bool = False) -> dict[str, Any]:
    formula = f"2 x bf16[{size // 4}]"
    return {"name": name, "bytes": size, "formula": formula, "host": host, "lasting": lasting}


def exchange(kind: str, axes: list[str], what: str, link: str, seconds: float, exposed: float):
    return {
        "kind": kind,
        "axes": axes,
        "what": what,
        "link": link,
        "bytes": int(seconds * 45e9),
        "runs": 64,
        "seconds": seconds,
        "exposed": exposed,
        "formula": "64 x 2 x bf16[4096,14336] / 8",
    }


def candidate(i: int, name: str, size: float, seconds: float, fits: str, lost: str | None):
    return {
        "name": name,
        "set": {"mesh.tensor": 1 + i % 8, "zero_optimization.stage": i % 4, "bf16.enabled": True},
        "device_bytes": int(size * 1e9),
        "host_bytes": int(3e9) if i % 3 == 0 else 0,
        "seconds": seconds,
        "tokens_per_second": 524288 / seconds,
        "mfu": 0.9 / seconds,
        "fits": fits,
        "lost": lost,
        "compiled": {"device_bytes": int(size * 1.03e9), "fits": i == 1} if i < 2 else None,
    }


def searched() -> dict[str, Any]:
    found = []
    for i in range(60):
        size, seconds = 30 + (i * 37 % 83), 1.9 + 0.11 * i + (i * 13 % 7) / 10
        fits = "fits" if size < 70 else "tight" if size < 85 else "does not fit"
        lost = f"{size - 85} GB too much" if size >= 85 else f"{seconds / 1.9 - 1:.0%} slower"
        name = f"tensor {1 + i % 8}, ZeRO {i % 4}, micro {1 + i % 3}"
        found.append(candidate(i, name, size, seconds, fits, lost))
    found.sort(key=lambda each: each["seconds"])
    best = next(i for i, each in enumerate(found) if each["fits"] == "fits")
    found[best]["lost"] = None
    return {"global_batch": 64, "tried": 412, "seconds": 38.4, "candidates": found, "best": best}


def timed() -> dict[str, Any]:
    exchanges = [
        exchange("all-gather", ["data"], "parameters", "network", 0.41, 0.05),
        exchange("reduce-scatter", ["data"], "gradients", "network", 0.23, 0.11),
        exchange("all-reduce", ["tensor"], "activations", "links", 0.32, 0.32),
        exchange("to host", [], "optimizer", "host", 0.09, 0.0),
    ]
    return {
        "compute": 1.31,
        "memory": 0.12,
        "exchanges": exchanges,
        "bubble": 0.0,
        "step": 1.91,
        "devices": 64,
        "tokens": 131072,
        "unit": "tokens",
        "tokens_per_second": 131072 / 1.91,
        "run": {"tokens": 1e12, "device_hours": 1e12 / (131072 / 1.91) * 64 / 3600},
        "model_flops": 5.2e16,
        "mfu": 0.431,
        "formula": "6 x 8.03 billion parameters x 131,072 tokens + attention",
        "peak": 989.5e12,
    }


def gpus() -> dict[str, Any]:
    """64 GPUs of 80 GB, whose step does not fit; with time, search and advice."""
    components = [
        component("parameters", 9 * 10**9, True),
        component("optimizer", 21 * 10**9, True),
        component("batch", 65536, True),
        component("gradients", 22 * 10**9, False),
        component("saved activations", 36 * 10**9, False),
        component("logits", 8 * 10**9, False),
        component("optimizer", 11 * 10**9, True, host=True),
    ]
    device = sum(each["bytes"] for each in components if not each["host"])
    state = sum(each["bytes"] for each in components if each["lasting"] and not each["host"])
    single = {
        "set": {"parallel.remat": "full"},
        "frees": 30 * 10**9,
        "device_bytes": device - 30 * 10**9,
        "seconds": 2.31,
        "text": "recompute all activations but the input of each layer",
    }
    cheapest = {
        "set": {"zero_optimization.stage": 3, "train_micro_batch_size_per_gpu": 1},
        "device_bytes": 61 * 10**9,
        "seconds": 2.02,
        "slower": 0.058,
        "text": "shard the parameters too, with smaller micro-batches",
    }
    return {
        "model": {"name": "gpt3-175b", "parameters": 175_000_000_000, "dtype": "bf16"},
        "target": {
            "name": "h100:64",
            "chip": "h100",
            "count": 64,
            "topology": [],
            "slices": 1,
            "node": 8,
            "memory": 84942979072,
            "host_memory": 256 * GIB,
            "link": 450e9,
            "outside": 50e9,
            "host_link": 64e9,
            "wraps": [],
            "layout": {"data": {"network": 8}, "tensor": {"node": 8}},
        },
        "mesh": {"pipe": 1, "replica": 1, "data": 8, "seq": 1, "expert": 1, "tensor": 8},
        "devices": {"count": 64, "platform": "cuda", "kind": "NVIDIA H100", "simulated": False},
        "batch": {"train": 64, "micro": 1, "accumulation": 8},
        "stage": 2,
        "state": {},
        "memory": {
            "device": device,
            "state": state,
            "temporary": device - state,
            "host": 11 * 10**9,
            "components": components,
            "verdict": "does not fit",
        },
        "attention": None,
        "kept": None,
        "transfer": None,
        "server": None,
        "pipeline": None,
        "compiled": None,
        "outcome": None,
        "time": timed(),
        "advice": {"single": single, "cheapest": cheapest},
        "search": searched(),
    }


def without(*names: str) -> dict[str, Any]:
    """The same, some parts left out."""
    return {name: None if name in names else part for name, part in gpus().items()}


def named(name: str) -> dict[str, Any]:
    """The same, everything that a user can name called so."""
    found = copy.deepcopy(gpus())
    found["model"]["name"] = found["target"]["name"] = found["devices"]["kind"] = name
    for each in [*found["memory"]["components"], *found["search"]["candidates"]]:
        each["name"] = name
    found["advice"]["single"]["text"] = found["time"]["formula"] = name
    found["advice"]["single"]["set"] = {name: name}
    return found


def attending() -> dict[str, Any]:
    """The same, with the attention of a model over an axis of sequences."""
    why = "the least exposed time (ms forward per sample on h100: ulysses 1.3, ring 8.25, both 4.5)"
    of = "131072 queries of 32 heads, 131072 keys of 8 heads"
    runs = [
        {"layers": 32, "kind": "ulysses", "order": "contiguous", "why": why, "shapes": of},
        {
            "layers": None,
            "kind": "left to the compiler",
            "order": "",
            "why": "dropout on the probabilities",
            "shapes": "",
        },
    ]
    return {**gpus(), "attention": {"devices": 8, "runs": runs}}


def on_tpu(target: str = "v5p:16x16x16", **mesh: int) -> dict[str, Any]:
    """Figures of a plan for a torus."""
    found, where = gpus(), target_of(target)
    sizes = {**dict.fromkeys(AXES, 1), **mesh}
    found["mesh"] = sizes
    found["target"] |= {
        "name": target,
        "count": where.count,
        "topology": list(where.topology),
        "slices": where.slices,
        "wraps": list(where.wraps),
        "layout": layout_of(where, sizes),
    }
    found["devices"] |= {"count": where.count, "platform": "tpu"}
    return found


def piped(
    name: str = "1f1b", stages: int = 4, micro: int = 8, chunks: int = 1
) -> tuple[dict[str, Any], Schedule]:
    """Figures of a pipeline, and its schedule."""
    found, table = gpus(), schedule(name, stages, micro, chunks)
    names = ("live_bytes", "forward_bytes", "backward_bytes", "message_bytes", "shared_bytes")
    found["pipeline"] = {
        "schedule": name,
        "stages": stages,
        "chunks": chunks,
        "micro_batches": micro,
        "ticks": table.ticks,
        "bubble": table.bubble,
        "live_inputs": table.live_inputs,
        "layers_of_a_chunk": 2,
        **{key: 1000 * i for i, key in enumerate(names, start=1)},
        "work": table.runs(),
    }
    return found, table
