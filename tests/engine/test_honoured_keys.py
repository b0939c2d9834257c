"""Twelve configs as people write them: every key with the verdict `honoured` is seen in the run.

Each trains the tiny GPT-2 for five steps on 8 devices, those of `make test` a model of four
parameters, which compiles in a third of the time. `SEEN` has, for a key, what shows its
effect: array bytes, dtypes, memory kinds, learning rates, loss scales, log lines, files; and where
a number follows a formula, that the formula with another value of this key does not give it.
"""

import json
import logging
import math
import re
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed.config import explain_config
from tests.optim.test_lr_schedules import one_cycle
from tests.train.test_program_keys import equations

STEPS, SEQ, DEVICES = 5, 32, 8


def adam(**params):
    return {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.8, 0.95], "eps": 1e-3} | params}


CONFIGS = {
    "fp32, warm-up": {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 2,
        "gradient_clipping": 0.2,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3}
            | {"adam_w_mode": False},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 8e-3, "warmup_num_steps": 4}
            | {"warmup_type": "log"},
        },
    },
    "ZeRO-1, decay": {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": adam(weight_decay=0.3),
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 8e-3, "warmup_num_steps": 2}
            | {"total_num_steps": 5, "warmup_type": "linear"},
        },
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 1},
    },
    "ZeRO-2, a rising scale": {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
        | {"loss_scale_window": 2},
        "optimizer": adam(weight_decay=0.3),
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True},
    },
    "ZeRO-2, a falling scale": {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 3}
        | {"loss_scale_window": 100, "min_loss_scale": 2**39},
        "optimizer": adam(),
        "zero_optimization": {"stage": 2},
    },
    "a static scale": {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 128},
        "optimizer": adam(weight_decay=0.3),
        "zero_optimization": {"stage": 1},
    },
    "ZeRO-3": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": adam(weight_decay=0.3),
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_min_ratio": 0.1}
            | {"cos_min_ratio": 0.2, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    },
    "ZeRO-3, offload": {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": adam(weight_decay=0.3),
        "gradient_clipping": 0.3,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    },
    "ZeRO-2, offload": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": adam(),
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "SGD": {
        "train_batch_size": 8,
        "steps_per_print": 3,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.7}},
        "zero_optimization": {"stage": 1},
    },
    "an elastic batch, a cycle": {
        "elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 32}
        | {"micro_batch_sizes": [1, 2, 3, 7], "min_gpus": 2, "max_gpus": 16},
        "optimizer": adam(),
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_momentum": False}
            | {"cycle_first_step_size": 2, "cycle_second_step_size": 1}
            | {"decay_lr_rate": 0.25, "decay_step_size": 1},
        },
    },
    "stages and tensor": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "mesh": {"data": 2},
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 2},
        "optimizer": adam(weight_decay=0.3),
    },
    "files": {
        "train_batch_size": 8,
        "optimizer": adam(),
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "{tmp}/flops.txt"},
        "comms_logger": {"enabled": True, "prof_all": True},
        "tensorboard": {"enabled": True, "output_path": "{tmp}/events", "job_name": "one"},
        "csv_monitor": {"enabled": True, "output_path": "{tmp}/csv", "job_name": "two"},
    },
}
QUICK = ("fp32, warm-up", "ZeRO-3, offload", "ZeRO-2, a falling scale")


class Small(nnx.Module):
    """A language model; its gradients are large."""

    def __init__(self, rngs):
        wide = nnx.initializers.normal(1.0)
        self.table = nnx.Embed(256, 64, embedding_init=wide, rngs=rngs)
        self.between = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        return 4 * self.head(x + jnp.tanh(self.between(x)))


def small_loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return losses.sum(), jnp.float32(losses.size)


MODELS = {
    "GPT-2": (lambda rngs: gpt2.build(gpt2.PRESETS["tiny"], rngs), gpt2.loss),
    "small": (Small, small_loss),
}


@dataclass
class Run:
    config: dict
    folder: object
    metrics: list = field(default_factory=list)  # of each step, as numbers
    log: str = ""
    shapes: set = field(default_factory=set)  # of tokens, as the loss was traced with
    program: object = None
    states: list = field(default_factory=list)  # before each step, and after the last
    refused: bool = False  # whether a batch of another size is

    def key(self, path, default=None):
        node = self.config
        for name in path.split("."):
            node = node.get(name, {}) if isinstance(node, dict) else {}
        return default if node == {} else node

    def values(self, name):
        return [metrics[name] for metrics in self.metrics]

    @property
    def rows(self):
        """Samples of a step, over all devices."""
        return round(self.metrics[-1]["weight"] / SEQ)

    @property
    def ranks(self):
        """Those that share a batch."""
        other = self.key("pipeline.stages", 1) * self.key("tensor_parallel.autotp_size", 1)
        return DEVICES // other

    def updated(self, step):
        """{path: fp32 array} that is updated, as it is before this step."""
        state = self.states[step]
        return flat(state.master if state.master else state.params)

    def moment(self, name, step):
        trees = jax.tree_util.tree_leaves_with_path(self.states[step].opt)
        found = {jax.tree_util.keystr(path): np.asarray(x) for path, x in trees}
        return {
            "/".join(re.findall(r"'([^']+)'", path.split(name, 1)[1])): x
            for path, x in found.items()
            if f".{name}[" in path
        }


def flat(tree):
    return {path: np.asarray(x) for path, x in tree.items()}


def run_of(config, model, folder, caplog):
    factory, loss_fn = MODELS[model]
    config = json.loads(json.dumps(config).replace("{tmp}", str(folder)))
    run = Run(config, folder)
    caplog.set_level(logging.INFO, "jaxspeed")

    def loss(model, batch):
        run.shapes.add(batch["tokens"].shape)
        return loss_fn(model, batch)

    engine = jaxspeed.initialize(factory, loss, config=config)
    run.program = engine.program
    rows = engine.program.batch.train
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        run.states.append(jax.tree.map(copied, engine.state))
        tokens = rng.integers(0, 256, (rows, SEQ + 1)).astype(np.int32)
        run.metrics.append({k: float(v) for k, v in engine.train_batch({"tokens": tokens}).items()})
    run.states.append(engine.state)
    try:
        engine.train_batch({"tokens": tokens[:-1]})
    except jaxspeed.JaxspeedError:
        run.refused = True
    engine.close()
    run.log = caplog.text
    return run


def copied(x):
    """Its numbers; the step donates the buffers."""
    return np.array(x)


# -- what shows the effect of a key ---------------------------------------------------------------


def seen_batch(run):
    micro = run.key("train_micro_batch_size_per_gpu")
    accumulation = run.key("gradient_accumulation_steps", 1)
    total = run.key("train_batch_size") or micro * accumulation * run.ranks
    micro = micro or total // accumulation // run.ranks
    assert run.rows == total and run.refused
    # The loss is traced with the micro-batch of all ranks, or of one.
    assert run.shapes and run.shapes <= {(micro * n, SEQ + 1) for n in (1, run.ranks)}


def seen_elastic_batch(run):
    """DeepSpeed's candidates are micro-batches times a highly composite number, below the bound.

    It takes that with the most device counts from 2 to 16, and of those the largest.
    """
    micros, composites = run.key("elasticity.micro_batch_sizes"), (1, 2, 4, 6, 12, 24)
    batches = {m * max(n for n in composites if m * n <= 32) for m in micros}

    def counts(batch):
        return sum(any(batch % (m * n) == 0 for m in micros) for n in range(2, 17))

    assert run.rows == 24 == max(batches, key=lambda batch: (counts(batch), batch))
    assert run.refused and run.shapes <= {(3 * n, SEQ + 1) for n in (1, DEVICES)}


def seen_mesh(run):
    assert math.prod(run.program.mesh.shape.values()) == DEVICES
    matrices = {path: x for path, x in run.states[-1].params.items() if x.ndim == 3}
    assert matrices  # of the blocks, along whose first dim are the layers
    for x in matrices.values():
        assert x.sharding.shard_shape(x.shape)[0] == x.shape[0] // run.key("pipeline.stages")
        assert local_fraction(x) == run.ranks / DEVICES


def seen_accumulation_dtype(run):
    """The carry of the loop over micro-batches has the gradients of the largest parameter."""
    tokens = jax.ShapeDtypeStruct((run.rows, SEQ + 1), np.int32)
    traced = run.program.step.trace(run.program.state, {"tokens": tokens}).jaxpr
    loops = [
        eqn
        for eqn in equations(traced)
        if eqn.primitive.name == "scan"
        and eqn.params["length"] == run.key("gradient_accumulation_steps")
    ]
    largest = max(x.size for x in run.states[-1].params.values())
    summed = {x.aval.dtype for eqn in loops for x in eqn.outvars if x.aval.size == largest}
    assert summed == {np.dtype(run.key("data_types.grad_accum_dtype").replace("bf", "bfloat"))}


def seen_precision(run, dtype):
    params, master = run.states[-1].params, run.states[-1].master
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(master)} == {np.dtype("float32")}


def local_fraction(x):
    return math.prod(x.sharding.shard_shape(x.shape)) / x.size


def seen_stage(run):
    stage, state = run.key("zero_optimization.stage", 0), run.states[-1]
    updated = {path: x for path, x in (state.master or state.params).items() if x.size > 1000}
    moments = [x for x in jax.tree.leaves(state.opt) if x.size > 1000]
    assert updated and moments
    for x in [*updated.values()] * bool(state.master) + moments:
        assert local_fraction(x) == (1 / DEVICES if stage else 1)
    large = [x for x in jax.tree.leaves(state.params) if x.size > 5000]
    # In mixed precision stage 3 stores none on the devices: masters are gathered.
    assert {local_fraction(x) for x in large} <= {1 / DEVICES if stage == 3 else 1}
    assert large or stage == 3


def seen_threshold(run):
    threshold = run.key("zero_optimization.stage3_param_persistence_threshold")
    for x in run.states[-1].params.values():
        assert (local_fraction(x) == 1) == (x.size < threshold), (x.shape, threshold)


def seen_offload(run, what):
    state = run.states[-1]
    trees = {"offload_optimizer": (state.master or {}, state.opt), "offload_param": (state.params,)}
    arrays = [x for x in jax.tree.leaves(trees[what]) if x.ndim]
    assert arrays and {x.sharding.memory_kind for x in arrays} == {"pinned_host"}
    if run.key("zero_optimization.offload_param") is None:
        assert {x.sharding.memory_kind for x in state.params.values()} == {"device"}


def seen_clipping(run):
    limit = run.key("gradient_clipping")
    assert min(run.values("grad_norm")) > limit  # or nothing would be seen
    assert run.values("grad_norm_clipped") == pytest.approx([limit] * STEPS, rel=1e-3)
    # And it is the clipped gradient that is used.
    gradient = gradient_of(run, betas(run)[0])
    if not run.key("optimizer.params.adam_w_mode", True):  # it holds the decay too
        decay, params = run.key("optimizer.params.weight_decay"), run.updated(STEPS - 1)
        gradient = {p: g - decay * params[p] for p, g in gradient.items()}
    assert norm(gradient) == pytest.approx(limit, rel=1e-2)


def norm(tree):
    return math.sqrt(sum(float(np.square(x.astype(np.float64)).sum()) for x in tree.values()))


def betas(run):
    return run.key("optimizer.params.betas", [0.9, 0.999])


def gradient_of(run, b1, step=STEPS - 1):
    """The gradient of a step, from the moments before and after it."""
    if run.key("optimizer.type") == "SGD":
        momentum = run.key("optimizer.params.momentum")
        before, after = (run.moment("trace", t) for t in (step, step + 1))
        return {p: after[p] - momentum * before[p] for p in after}
    before, after = (run.moment("mu", t) for t in (step, step + 1))
    return {p: (after[p] - b1 * before[p]) / (1 - b1) for p in after}


def residual(run, **changed):
    """How far an update is from the optimizer's formula with these hyperparameters."""
    params = {"weight_decay": 0.0} | run.key("optimizer.params") | changed
    step = STEPS - 1
    lr = changed.get("lr", run.metrics[step]["lr"])
    p0, p1 = run.updated(step), run.updated(step + 1)
    if changed.get("type", run.key("optimizer.type")) == "SGD":
        g, trace = gradient_of(run, None), run.moment("trace", step)
        expected = {p: p0[p] - lr * (g[p] + params["momentum"] * trace[p]) for p in p0}
        size = norm(g) / run.metrics[step]["grad_norm_clipped"] - 1  # a wrong momentum shows here
    else:
        (b1, b2), eps = params["betas"], params["eps"]
        decoupled = params.get("adam_w_mode", True)
        m, v, v0 = run.moment("mu", step + 1), run.moment("nu", step + 1), run.moment("nu", step)
        g = gradient_of(run, b1)
        size = max(  # a wrong beta shows here
            np.abs(v[p] - b2 * v0[p] - (1 - b2) * g[p] ** 2).max() / v[p].max() for p in p0
        )
        rate = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)
        expected = {}
        for p, x in p0.items():
            update = m[p] / rate[0] / (np.sqrt(v[p] / rate[1]) + eps)
            update = update + (params["weight_decay"] * x if decoupled else 0)
            expected[p] = x - lr * update
        if not decoupled:  # then the decay is in the gradient, which is clipped before
            plain = norm({p: g[p] - params["weight_decay"] * p0[p] for p in p0})
            size = max(size, abs(plain / run.metrics[step]["grad_norm_clipped"] - 1))
    moved = max(np.abs(p1[p] - p0[p]).max() for p in p0)
    return max(size, max(np.abs(expected[p] - p1[p]).max() for p in p0) / moved)


OTHER = {
    "lr": 1.0,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "adam_w_mode": True,
    "type": "SGD",
}


def seen_in_update(run, name):
    if any(run.values("skipped")):
        assert all(run.values("skipped"))  # nothing was updated
        for path, x in run.updated(0).items():
            assert (run.updated(STEPS)[path] == x).all()
        return
    assert residual(run) < 2e-3
    if name == "betas":
        b1, b2 = betas(run)
        assert residual(run, betas=[0.9, b2]) > 0.02 and residual(run, betas=[b1, 0.999]) > 0.02
    elif name == "type":
        moments = "trace" if run.key("optimizer.type") == "SGD" else "nu"
        assert run.moment(moments, STEPS)
    elif not (name == "lr" and run.key("scheduler")) and run.key(f"optimizer.params.{name}"):
        assert residual(run, **{name: OTHER[name]}) > 0.02


def learning_rates(run, **changed):
    """DeepSpeed's formulas; the scheduler's k is -1 at the first step, 0 at the second."""
    given = run.key("scheduler.params") | changed
    kind, base = run.key("scheduler.type"), run.key("optimizer.params.lr")
    low, high = given.get("warmup_min_lr", 0.0), given.get("warmup_max_lr", base)
    if kind == "OneCycle":
        steps = given["cycle_first_step_size"], given["cycle_second_step_size"]
        decay = given["decay_lr_rate"], given["decay_step_size"]
        return one_cycle(STEPS, *steps, given["cycle_min_lr"], given["cycle_max_lr"], decay=decay)[
            0
        ]
    warmup, total = given["warmup_num_steps"], given.get("total_num_steps")
    rates = []
    for k in range(-1, STEPS - 1):
        if given["warmup_type"] == "linear":
            gamma = max(0, k) / warmup
        else:
            gamma = math.log(max(1, k + 1)) / math.log(warmup)
        if k >= warmup and kind == "WarmupLR":
            gamma = 1.0
        if k >= warmup and kind == "WarmupDecayLR":
            gamma = max(0.0, (total - k) / max(1.0, total - warmup))
        if kind != "WarmupCosineLR":
            rates.append(low + (high - low) * gamma)
            continue
        least, end = given["warmup_min_ratio"], given["cos_min_ratio"]
        at = min(1.0, (k - warmup + 1) / (total - warmup))
        fall = end + (1 - end) * (1 + math.cos(math.pi * at)) / 2
        rates.append(base * (fall if k >= warmup else least + (1 - least) * gamma) * (k >= 0))
    return rates


def seen_in_rate(run, name):
    assert run.values("lr") == pytest.approx(learning_rates(run), rel=1e-5)
    if name != "type":
        warmup = run.key("scheduler.params.warmup_type")
        other = {
            "warmup_type": "linear" if warmup == "log" else "log",
            "warmup_num_steps": 3,
            "total_num_steps": 50,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 2,
            "decay_step_size": 3,
        }.get(name, 0.5)
        assert run.values("lr") != pytest.approx(learning_rates(run, **{name: other}), rel=1e-3)


def scales(run, **changed):
    """DeepSpeed's DynamicLossScaler.update_scale, driven by the overflows of the run."""
    fp16 = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    fp16 |= {"min_loss_scale": 1} | run.key("fp16") | changed
    if fp16["loss_scale"]:
        return [float(fp16["loss_scale"])] * STEPS
    scale, left = 2.0 ** fp16["initial_scale_power"], fp16["hysteresis"]
    last_overflow, found = -1, []
    for iteration, overflow in enumerate(run.values("skipped")):
        found.append(scale)
        stable = iteration - last_overflow - 1
        if overflow:
            if fp16["hysteresis"] == 1 or left == 1:
                scale = max(scale / 2, fp16["min_loss_scale"])
            else:
                left -= 1
            last_overflow = iteration
        elif stable > 0 and stable % fp16["loss_scale_window"] == 0:
            scale, left = 2 * scale, fp16["hysteresis"]
    return found


def seen_in_scale(run, name):
    assert run.values("loss_scale") == scales(run)
    rises = not any(run.values("skipped"))
    other = {"loss_scale": 3, "initial_scale_power": 9, "hysteresis": 2, "min_loss_scale": 1}
    if name == "loss_scale_window" and rises:
        assert scales(run, loss_scale_window=100) != scales(run)
    elif name in other:
        assert scales(run, **{name: other[name]}) != scales(run)


def seen_lines(run):
    every = run.key("steps_per_print")
    printed = [int(n) for n in re.findall(r"step (\d+): loss", run.log)]
    assert printed[: STEPS // every] == list(range(every, STEPS + 1, every))


def seen_tensorboard(run):
    folder = run.folder / "events" / "one"
    assert any(path.stat().st_size > 100 for path in folder.glob("events.out*"))


def seen_csv(run):
    lines = (run.folder / "csv" / "two" / "loss.csv").read_text().splitlines()
    assert lines[0] == "step,loss" and [int(line.split(",")[0]) for line in lines[1:]] == [
        1,
        2,
        3,
        4,
        5,
    ]


def seen_profile(run):
    text = (run.folder / "flops.txt").read_text()
    assert text.startswith("flops profiler: step 2") and "batch size per device 1\n" in text
    # Of a sample: the kernels of both layers and the head, and two products of attention.
    sizes = gpt2.PRESETS["tiny"]
    width, layers = sizes.hidden_size, sizes.num_hidden_layers
    forward = 2 * SEQ * (12 * layers * width**2 + sizes.vocab_size * width)
    forward += layers * 2 * 2 * SEQ * SEQ * width
    for times, name in ((1, "fwd flops"), (3, "fwd\\+bwd flops")):
        found = re.search(rf"{name} per device.* ([\d.]+) MFLOPs", text)
        assert float(found[1]) == pytest.approx(times * forward / 1e6, rel=5e-3)


def seen_collectives(run):
    """At stage 0 each gradient is summed over data once: 4 bytes for each element at least."""
    (table,) = re.findall(r"comms logger: step 1\n(.*(?:\n .*)+)", run.log)
    kilobytes = [float(x) for x in re.findall(r"all-reduce +data .* ([\d.]+) kB", table)]
    elements = sum(x.size for x in jax.tree.leaves(run.states[-1].params))
    assert 4 * elements / 1e3 * 0.98 < sum(kilobytes) < 1.2 * 4 * elements / 1e3


SEEN = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        seen_batch,
    ),
    **{
        f"elasticity.{name}": seen_elastic_batch
        for name in (
            *("enabled", "version", "max_train_batch_size", "micro_batch_sizes"),
            *("min_gpus", "max_gpus"),
        )
    },
    # A first beta that is cycled does not give the updates that are seen.
    "scheduler.params.cycle_momentum": lambda run: seen_in_update(run, "betas"),
    **dict.fromkeys(("mesh.data", "pipeline.stages", "tensor_parallel.autotp_size"), seen_mesh),
    "data_types.grad_accum_dtype": seen_accumulation_dtype,
    "bf16.enabled": lambda run: seen_precision(run, "bfloat16"),
    "fp16.enabled": lambda run: seen_precision(run, "float16"),
    "zero_optimization.stage": seen_stage,
    "zero_optimization.stage3_param_persistence_threshold": seen_threshold,
    "zero_optimization.offload_optimizer.device": lambda run: seen_offload(
        run, "offload_optimizer"
    ),
    "zero_optimization.offload_param.device": lambda run: seen_offload(run, "offload_param"),
    "gradient_clipping": seen_clipping,
    "steps_per_print": seen_lines,
    **{
        f"fp16.{name}": lambda run, name=name: seen_in_scale(run, name)
        for name in (
            *("loss_scale", "initial_scale_power", "loss_scale_window"),
            *("hysteresis", "min_loss_scale"),
        )
    },
    "optimizer.type": lambda run: seen_in_update(run, "type"),
    **{
        f"optimizer.params.{name}": lambda run, name=name: seen_in_update(run, name)
        for name in ("lr", "betas", "eps", "weight_decay", "momentum", "adam_w_mode")
    },
    **{
        f"scheduler.{name}": lambda run, name=name: seen_in_rate(run, name.removeprefix("params."))
        for name in (
            *("type", "params.warmup_min_lr", "params.warmup_max_lr", "params.warmup_type"),
            *("params.warmup_num_steps", "params.total_num_steps"),
            *("params.warmup_min_ratio", "params.cos_min_ratio", "params.cycle_min_lr"),
            *("params.cycle_max_lr", "params.cycle_first_step_size", "params.decay_lr_rate"),
            *("params.cycle_second_step_size", "params.decay_step_size"),
        )
    },
    **{
        f"flops_profiler.{name}": seen_profile
        for name in ("enabled", "profile_step", "output_file")
    },
    **{f"comms_logger.{name}": seen_collectives for name in ("enabled", "prof_all")},
    **{f"tensorboard.{name}": seen_tensorboard for name in ("enabled", "output_path", "job_name")},
    **{f"csv_monitor.{name}": seen_csv for name in ("enabled", "output_path", "job_name")},
}


@pytest.mark.default_cases("fp32, warm-up")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CONFIGS],
)
def test_every_honoured_key_is_seen_in_the_run(name, tmp_path, caplog):
    config = CONFIGS[name]
    given = [row for row in explain_config(config) if not row.sentence.startswith("Not set.")]
    honoured = [row.key for row in given if row.verdict == "honoured"]
    assert {row.verdict for row in given} <= {"honoured", "approximated", "harmless", "ignored"}
    assert set(honoured) <= set(SEEN)
    run = run_of(config, "small" if name in QUICK else "GPT-2", tmp_path, caplog)
    unseen = []
    for key in honoured:
        try:
            SEEN[key](run)
        except AssertionError as error:
            unseen.append(f"{key}: {error}")
    assert honoured and not unseen, "\n".join(unseen)
