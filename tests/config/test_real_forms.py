"""Forms that real DeepSpeed configs have: each loads, or its verdict names the alternative.

What `fix_config` makes of a form is in its row. DeepSpeed 0.19.8 raises on what it removed.
"""

import random

import pytest

from jaxspeed.config import Config, examine, explain_config, fix_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

REMOVED = "Removed in DeepSpeed 0.19.8"
LR = {"lr": 1e-3}
ADAM = {"type": "AdamW", "params": LR}


def optimizer(name, beside=None, **params):
    return {"optimizer": {"type": name, "params": LR | params, **(beside or {})}}


def schedule(name, **params):
    return {"optimizer": ADAM, "scheduler": {"type": name, "params": params}}


def zero(**keys):
    return {"zero_optimization": {"stage": 3, **keys}}


def enabled(*sections):
    """A section with one in it, and so on, of which the last is enabled."""
    tree = {"enabled": True}
    for name in reversed(sections):
        tree = {name: tree}
    return tree


WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}
SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
         "min_loss_scale": 1}  # fmt: skip
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
OFF = {"enabled": False}
QUANTIZED = {"shared_parameters": OFF, "different_groups": {"wq1": {"params": {"start_bits": 8}}}}

# The form; the key with a problem, and what its message has; what `fix_config` makes of it.
REFUSED = {
    "1-bit Adam": (
        optimizer("OneBitAdam", freeze_step=400, cuda_aware=False, comm_backend_name="nccl"),
        "optimizer.type",
        f'{REMOVED}, and not built here: write "Adam"',
        optimizer("Adam"),
    ),
    "1-bit Lamb": (
        optimizer("OneBitLamb", max_coeff=1, freeze_step=400, coeff_beta=0.9),
        "optimizer.type",
        f'{REMOVED}, and not built here: write "Lamb"',
        optimizer("Lamb", max_coeff=1),
    ),
    "0/1 Adam": (
        optimizer("zerooneadam", var_freeze_step=400, local_step_clipper=16),
        "optimizer.type",
        f'{REMOVED}, and not built here: write "Adam"',
        optimizer("Adam"),
    ),
    "compression": (
        {"compression_training": {"weight_quantization": enabled("shared_parameters")}},
        "compression_training",
        REMOVED,
        {},
    ),
    "a scale of bf16": (
        {"bf16": {"enabled": True, **SCALE}},
        "bf16.loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale",
        "unknown keys, set to 0, 16, 1000, 2, 1. fp16 alone scales the loss",
        BF16,
    ),
    "data efficiency": (
        enabled("data_efficiency"),
        "data_efficiency",
        "A source of your own",
        {},
    ),
    "a part of data efficiency": (
        {"data_efficiency": {"enabled": True, **enabled("data_routing", "random_ltd")}},
        "data_efficiency",
        "Not built",
        {},
    ),
    "a curriculum": (enabled("curriculum_learning"), "curriculum_learning", REMOVED, {}),
    "layer drop": (enabled("progressive_layer_drop"), "progressive_layer_drop", REMOVED, {}),
    "Apex's level": (
        {"fp16": {"enabled": True, "opt_level": "O2"}},
        "fp16.opt_level",
        "Apex",
        FP16,
    ),
    "a scale's tolerance": (
        {"fp16": {"enabled": True, "fp16_scale_tolerance": 0.0}},
        "fp16.fp16_scale_tolerance",
        "an unknown key",
        FP16,
    ),
    "a dynamic scale": (
        {"fp16": {"enabled": True, "dynamic_loss_scale": True}},
        "fp16.dynamic_loss_scale",
        "A loss_scale of 0 is dynamic",
        {"fp16": {"enabled": True, "loss_scale": 0}},
    ),
    "a number as text": (
        {"train_batch_size": 16, "gradient_accumulation_steps": "8"},
        "gradient_accumulation_steps",
        "Write 8 without quotes",
        {"train_batch_size": 16, "gradient_accumulation_steps": 8},
    ),
    "clipping in the optimizer": (
        optimizer("Adam", max_grad_norm=0.5),
        "optimizer.params.max_grad_norm",
        "Write gradient_clipping",
        optimizer("Adam") | {"gradient_clipping": 0.5},
    ),
    "NVMe": (
        zero(offload_param={"device": "nvme", "nvme_path": "/nvme"}),
        "zero_optimization.offload_param.device",
        'Write "cpu"',
        zero(offload_param={"device": "cpu", "nvme_path": "/nvme"}),
    ),
    "bfp16": (
        {"communication_data_type": "bfp16"},
        "communication_data_type",
        'Did you mean "bf16"?',
        {"communication_data_type": "bf16"},
    ),
    "secondary shards": (
        zero(zero_hpz_partition_size=8),
        "zero_optimization.zero_hpz_partition_size",
        "mesh.replica x mesh.data",
        zero(),
    ),
    "ZenFlow": (
        zero(zenflow={"topk_ratio": 0.1}),
        "zero_optimization.zenflow",
        "offload_optimizer",
        zero(),
    ),
    "Apex": (enabled("amp"), "amp", f'{REMOVED}. Apex is for torch; write "bf16"', {}),
    "eigenvalues": (enabled("eigenvalue"), "eigenvalue", REMOVED, {}),
    "sparse attention": (
        {"sparse_attention": {"mode": "fixed", "block": 16}},
        "sparse_attention",
        REMOVED,
        {},
    ),
    "hooks in ZeRO": (
        zero(grad_hooks=True),
        "zero_optimization.grad_hooks",
        "Remove it. DeepSpeed refuses it too.",
        zero(),
    ),
    # The other keys that 0.19.8 removed.
    "Nebula": (enabled("nebula"), "nebula", REMOVED, {}),
    "quantized training": (enabled("quantize_training"), "quantize_training", REMOVED, {}),
    "sparse gradients": ({"sparse_gradients": True}, "sparse_gradients", REMOVED, {}),
    "CUDA graphs": ({"graph_harvesting": True}, "graph_harvesting", REMOVED, {}),
    "LoCo": (
        zero(zeropp_loco_param={"err_beta": 0.8}),
        "zero_optimization.zeropp_loco_param",
        REMOVED,
        zero(),
    ),
    # Without one answer.
    "a cycle with a warm-up's keys": (
        schedule("OneCycle", **WARMUP),
        "scheduler.params.warmup_min_lr, warmup_max_lr, warmup_num_steps",
        "It is a parameter of WarmupLR and WarmupDecayLR",
        None,
    ),
    "a decay without its end": (
        schedule("WarmupDecayLR", **WARMUP),
        "scheduler.params.total_num_steps",
        '"auto" takes run.steps; WarmupLR has no decay.',
        None,
    ),
    "a decay without its end, in a run": (
        schedule("WarmupDecayLR", **WARMUP) | {"run": {"steps": 9}},
        "scheduler.params.total_num_steps",
        '"auto" takes run.steps',
        schedule("WarmupDecayLR", **WARMUP, total_num_steps="auto") | {"run": {"steps": 9}},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_is_refused_with_the_alternative_and_fixed(name):
    tree, path, hint, expected = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        Config.load(tree)
    (line,) = [x for x in str(caught.value).splitlines() if x.startswith(f"  - {path}: ")]
    assert hint in line
    first = path.partition(",")[0]
    refused = {row.key for row in explain_config(tree) if row.verdict == "refused"}
    assert any(key == first or key.startswith(f"{first}.") for key in refused)
    fixed, problems = fix_config(tree)
    if expected is None:
        assert fixed == tree and not problems
    else:
        assert fixed == expected and problems
        assert not examine(fixed).problems


def merged(a, b):
    """Two configs in one; of two values the second."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    return a | {key: merged(a[key], b[key]) if key in a else b[key] for key in b}


def test_several_forms_are_fixed_together():
    """Nothing is left that has an answer, and no fix makes a problem of its own."""
    rng = random.Random(0)
    for _ in range(100):
        names = rng.sample(sorted(REFUSED), 4)
        tree = {}
        for name in names:
            tree = merged(tree, REFUSED[name][0])
        left = examine(fix_config(tree)[0], strict=True).problems
        assert not any(problem.fix for problem in left), names
        known = {"fp16.enabled", "gradient_accumulation_steps", "scheduler.params"}
        assert all(problem.path.startswith(tuple(known)) for problem in left), (names, left)


# The form; the key whose verdict it is, the verdict, and what its sentence has.
LOADED = {
    "compression, disabled": (
        {"compression_training": {"weight_quantization": QUANTIZED, "layer_reduction": OFF}},
        "compression_training.layer_reduction.enabled",
        "harmless",
        REMOVED,
    ),
    "data efficiency, disabled": (
        {"data_efficiency": OFF},
        "data_efficiency.enabled",
        "harmless",
        "Not built",
    ),
    "data efficiency without a part": (
        {"data_efficiency": {"enabled": True, "seed": 1, "data_sampling": OFF}},
        "data_efficiency.seed",
        "harmless",
        "no-op",
    ),
    "no curriculum": (
        {"curriculum_learning": {"enabled": False, "min_difficulty": 8}},
        "curriculum_learning.enabled",
        "harmless",
        REMOVED,
    ),
    "no layer drop": (
        {"progressive_layer_drop": OFF},
        "progressive_layer_drop.enabled",
        "harmless",
        REMOVED,
    ),
    "parameters beside params": (
        optimizer("Adam", {"eps": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.95]}),
        "optimizer.betas",
        "ignored",
        "only as optimizer.params.betas",
    ),
    "offload at the top": (
        {"offload_optimizer": {"device": "cpu"}},
        "offload_optimizer.device",
        "ignored",
        "only as zero_optimization.offload_optimizer",
    ),
    "a size with a fraction": (
        zero(stage3_prefetch_bucket_size=15099494.4),
        "zero_optimization.stage3_prefetch_bucket_size",
        "harmless",
        "Rounded to 15099494.",
    ),
    "groups of a parameter each": (
        zero(sub_group_size=0),
        "zero_optimization.sub_group_size",
        "harmless",
        "Ignored while zero_optimization.offload_optimizer.device is \"none\"",
    ),
    "a size as a power of ten": (
        zero(reduce_bucket_size=5e8),
        "zero_optimization.reduce_bucket_size",
        "harmless",
        "An option of DeepSpeed's runtime",
    ),
    "autocast with bf16": (
        BF16 | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "torch_autocast.enabled",
        "approximated",
        "While bf16.enabled is true, all operations compute in bf16",
    ),
    "hooks at the top": ({"grad_hooks": True}, "grad_hooks", "ignored", "DeepSpeed ignores it too"),
    "no Apex": ({"amp": OFF | {"opt_level": "O1"}}, "amp.opt_level", "harmless", REMOVED),
    # Removed in 0.19.8, and built here.
    "elastic batches": (enabled("elasticity"), "elasticity.enabled", "honoured", REMOVED),
    "MiCS": (
        zero(mics_shard_size=4),
        "zero_optimization.mics_shard_size",
        "honoured",
        f"{REMOVED}; it works here.",
    ),
    "MiCS by steps": (
        zero(mics_hierarchical_params_gather=True),
        "zero_optimization.mics_hierarchical_params_gather",
        "harmless",
        REMOVED,
    ),
    # Keys of 0.19.8.
    "no norm": (
        zero(compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "harmless",
        "a metric",
    ),
    "alignment": (
        zero(parameter_alignment=True),
        "zero_optimization.parameter_alignment",
        "harmless",
        "",
    ),
    "no collector": ({"disable_python_gc": True}, "disable_python_gc", "harmless", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_a_form_loads_with_its_verdict(name):
    tree, path, verdict, hint = LOADED[name]
    assert Config.load(tree)
    (row,) = [row for row in explain_config(tree) if row.key == path]
    assert row.verdict == verdict and hint in row.sentence
    assert row.sentence.startswith("Rounded") == ("fraction" in name)


def test_what_deepspeed_removed_loads_switched_off_though_it_raises_there():
    for key in ("nebula", "compression_training", "amp", "quantize_training", "eigenvalue"):
        assert Config.load({key: OFF})
    for key in ("sparse_attention", "elasticity", "curriculum_learning", "progressive_layer_drop"):
        assert Config.load({key: OFF})
    assert Config.load({"sparse_gradients": False, "graph_harvesting": False})
    assert Config.load(zero(mics_shard_size=-1, zeropp_loco_param=None))


def test_bf16_with_autocast_computes_as_bf16_alone():
    config = Config.load(LOADED["autocast with bf16"][0])
    assert config.compute_dtype == "bf16" and not config.autocasts
    alone = Config.load({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert alone.compute_dtype == "bf16" and alone.autocasts
