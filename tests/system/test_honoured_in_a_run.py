"""Ten configs of different features train the tiny GPT-2, and each honoured key is seen in the run.

What is seen: sizes, dtypes, memory kinds, learning rates, loss scales, norms, log lines, files. A
key whose effect has no number of its own is seen against the same run with another value.
"""

import copy
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import explain_config

STEPS, SEQ = 5, 16
MODEL = {
    "model": {
        "family": "gpt2",
        "preset": "tiny",
        "config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
                   "vocab_size": 96, "max_position_embeddings": SEQ},
    },
    "data": {"seq_len": SEQ},
}  # fmt: skip
ADAM = {"type": "AdamW", "params": {"lr": 2e-3}}
FULL_ADAM = {
    "type": "AdamW",
    "params": {"lr": 2e-3, "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.5},
}

CONFIGS = {
    "batch triple, AdamW, clipping": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.01,
        "optimizer": FULL_ADAM,
    },
    "fp16, ZeRO 2": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "fp16": {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2,
        },
        "zero_optimization": {"stage": 2},
    },
    "fp16 with a fixed scale, ZeRO 1": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "fp16": {"enabled": True, "loss_scale": 64},
        "zero_optimization": {"stage": 1},
    },
    "ZeRO 3, offload": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
    "WarmupDecayLR": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 2,
                "total_num_steps": 6, "warmup_type": "linear",
            },
        },
    },
    "OneCycle": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 4},
        },
    },
    "elasticity": {
        "optimizer": ADAM,
        "elasticity": {"enabled": True, "max_train_batch_size": 50, "micro_batch_sizes": [1, 2]},
    },
    "reports": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "csv_monitor": {"enabled": True, "output_path": "FOLDER", "job_name": "job"},
        "flops_profiler": {"enabled": True, "profile_step": 3, "output_file": "FOLDER/flops.txt"},
        "comms_logger": {"enabled": True},
    },
    "sums of gradients in bf16": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
    },
    "tensor parallelism and stages": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": ADAM,
        "tensor_parallel": {"autotp_size": 2},
        "pipeline": {"stages": 2},
        "data_parallel_size": 2,
        "zero_optimization": {"stage": 1},
    },
}  # fmt: skip


def trained(config):
    """The engine after some steps, with their metrics and log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("jaxspeed")
    log.addHandler(handler)
    engine = jaxspeed.initialize(config=MODEL | config)
    rng = np.random.default_rng(0)
    metrics = []
    try:
        for _ in range(STEPS):
            tokens = rng.integers(0, 96, (engine.program.batch.train, SEQ + 1), dtype=np.int32)
            found = engine.train_batch({"tokens": tokens})
            metrics.append({name: float(value) for name, value in found.items()})
        parameters = {path: np.asarray(x, np.float32) for path, x in engine.parameters.items()}
        engine.close()
    finally:
        log.removeHandler(handler)
    return SimpleNamespace(engine=engine, metrics=metrics, lines=lines, parameters=parameters)


def with_value(config, path, value):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = config
    for part in parents:
        node = node[part]
    node[last] = value
    return config


def another(path, value):
    """The parameters are others with another value of the key."""

    def seen(run, config):
        other = trained(with_value(config, path, value)).parameters
        return any(not np.allclose(x, other[name], atol=1e-6) for name, x in run.parameters.items())

    return seen


def lrs(run):
    return [found["lr"] for found in run.metrics]


def scales(run):
    return [found["loss_scale"] for found in run.metrics]


def rows(run, role):
    return [getattr(row, role) for row in run.engine.program.table if getattr(row, role)]


def logged(text):
    return lambda run, config: any(text in line for line in run.lines)


def is_sharded(placement):
    return any("data" in str(entry) for entry in placement.spec)


def decay(run, config):
    """min + (max - min) k / W for k < W, then linearly to 0 at the end; k = step - 1."""
    expected = []
    for step in range(STEPS):
        k = step - 1
        gamma = max(0, k) / 2 if k < 2 else (6 - k) / (6 - 2)
        expected.append(1e-4 + (1e-3 - 1e-4) * gamma)
    return np.allclose(lrs(run), expected, rtol=1e-5)


def cycle(run, config):
    """Up from the least to the largest rate in 4 steps."""
    return np.allclose(lrs(run), 1e-4 + 9e-4 * np.arange(STEPS) / 4, rtol=1e-5)


def batch(name):
    return lambda run, config: (
        getattr(run.engine.program.batch, name)
        == {
            "train": config.get("train_batch_size"),
            "micro": config.get("train_micro_batch_size_per_gpu"),
            "accumulation": config.get("gradient_accumulation_steps"),
        }[name]
    )


def stage(run, config):
    level = config["zero_optimization"]["stage"]
    roles = {"opt": 1, "grad": 2}
    sharded = {role: any(map(is_sharded, rows(run, role))) for role in roles}
    return all(sharded[role] == (level >= least) for role, least in roles.items())


def summed(run, config):
    mean = trained(config | {"gradient_allreduce_op": "mean"})
    ratio = run.metrics[0]["grad_norm"] / mean.metrics[0]["grad_norm"]
    return math.isclose(ratio, run.engine.program.mesh.shape["data"], rel_tol=0.02)


def csv_lines(run, config):
    path = Path(config["csv_monitor"]["output_path"]) / "job" / "loss.csv"
    return len(path.read_text().splitlines()) == STEPS + 1


def profile(run, config):
    text = Path(config["flops_profiler"]["output_file"]).read_text()
    return text.startswith("flops profiler: step 3\n") and "flops per device" in text


def persistent(run, config):
    small = [row for row in run.engine.program.table if math.prod(row.leaf.shape) < 100]
    large = [row for row in run.engine.program.table if math.prod(row.leaf.shape) >= 4096]
    on_device = all(row.param.memory_kind == "device" for row in small)
    return bool(small) and on_device and all(is_sharded(row.param) for row in large)


def in_host(role):
    return lambda run, config: "pinned_host" in {p.memory_kind for p in rows(run, role)}


def dtype(role, name):
    return lambda run, config: name in {np.dtype(p.dtype).name for p in rows(run, role)}


def axis(name):
    return lambda run, config: run.engine.program.mesh.shape[name] == 2


def elastic(run, config):
    """48 = 24 x 2 of at most 50, with 8 ranks: 6 samples a rank in micro-batches of 2."""
    found = run.engine.program.batch
    return (found.train, found.micro, found.accumulation) == (48, 2, 3)


def clipped(run, config):
    limit = config["gradient_clipping"]
    norms = [(m["grad_norm"], m["grad_norm_clipped"]) for m in run.metrics]
    if limit == 0:
        return all(math.isclose(before, after) for before, after in norms)
    return all(before > limit and after <= limit * 1.001 for before, after in norms)


def rate(run, config):
    return math.isclose(lrs(run)[-1], 2e-3, rel_tol=1e-5)


EVIDENCE = {
    "train_batch_size": batch("train"),
    "train_micro_batch_size_per_gpu": batch("micro"),
    "gradient_accumulation_steps": batch("accumulation"),
    "gradient_clipping": clipped,
    "gradient_allreduce_op": summed,
    "optimizer.type": lambda run, config: any("/mu/" in p or "mu" in p for p in opt_paths(run)),
    "optimizer.params.lr": rate,
    "optimizer.params.betas": another("optimizer.params.betas", [0.9, 0.999]),
    "optimizer.params.eps": another("optimizer.params.eps", 1e-8),
    "optimizer.params.weight_decay": another("optimizer.params.weight_decay", 0.0),
    "fp16.enabled": dtype("param", "float16"),
    "fp16.loss_scale": lambda run, config: (
        set(scales(run)) == {64} if config["fp16"]["loss_scale"] else len(set(scales(run))) > 1
    ),
    "fp16.initial_scale_power": lambda run, config: scales(run)[0] == 2**8,
    # The first doubling is after window + 1 clean steps.
    "fp16.loss_scale_window": lambda run, config: scales(run)[-1] == 2**9,
    "bf16.enabled": lambda run, config: (
        run.engine.config.compute_dtype == "bf16"
        and np.dtype(run.engine.program.objective.compute_dtype).name == "bfloat16"
    ),
    "data_types.grad_accum_dtype": dtype("grad", "bfloat16"),
    "zero_optimization.stage": stage,
    "zero_optimization.stage3_param_persistence_threshold": persistent,
    "zero_optimization.offload_optimizer.device": in_host("opt"),
    "zero_optimization.offload_param.device": in_host("param"),
    "scheduler.type": lambda run, config: (
        decay if config["scheduler"]["type"] == "WarmupDecayLR" else cycle
    )(run, config),
    **dict.fromkeys(
        [f"scheduler.params.{key}" for key in CONFIGS["WarmupDecayLR"]["scheduler"]["params"]],
        decay,
    ),
    **dict.fromkeys(
        [f"scheduler.params.{key}" for key in CONFIGS["OneCycle"]["scheduler"]["params"]], cycle
    ),
    "elasticity.enabled": elastic,
    "elasticity.max_train_batch_size": elastic,
    "elasticity.micro_batch_sizes": elastic,
    "steps_per_print": lambda run, config: (
        [line.partition(":")[0] for line in run.lines if ": loss " in line] == ["step 2", "step 4"]
    ),
    "wall_clock_breakdown": logged(" ms per step (median of "),
    "memory_breakdown": lambda run, config: any(
        "of live arrays" in line or "in use, peak" in line for line in run.lines
    ),
    "dump_state": lambda run, config: any(line.startswith("config: ") for line in run.lines),
    "csv_monitor.enabled": csv_lines,
    "csv_monitor.output_path": csv_lines,
    "csv_monitor.job_name": csv_lines,
    "flops_profiler.enabled": profile,
    "flops_profiler.profile_step": profile,
    "flops_profiler.output_file": profile,
    "comms_logger.enabled": logged("comms logger: step 1"),
    "tensor_parallel.autotp_size": axis("tensor"),
    "pipeline.stages": axis("pipe"),
    "data_parallel_size": axis("data"),
}


def opt_paths(run):
    return [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(run.engine.state.opt)
    ]


def test_there_are_ten_configs():
    assert len(CONFIGS) == 10


@pytest.mark.parametrize(
    "name",
    [
        name if number in (1, 3) else pytest.param(name, marks=pytest.mark.full)
        for number, name in enumerate(CONFIGS)
    ],
)
def test_each_honoured_key_is_seen_in_the_run(name, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="jaxspeed")
    config = json_with(CONFIGS[name], str(tmp_path))
    honoured = [
        row.key
        for row in explain_config(config)
        if row.verdict == "honoured" and "Not set" not in row.sentence
    ]
    assert honoured
    run = trained(config)
    assert all(math.isfinite(found["loss"]) for found in run.metrics)
    unseen = [path for path in honoured if not EVIDENCE[path](run, config)]
    assert unseen == []


def json_with(node, folder):
    """The config with the test's folder in its paths."""
    if isinstance(node, dict):
        return {key: json_with(value, folder) for key, value in node.items()}
    return node.replace("FOLDER", folder) if isinstance(node, str) else node
