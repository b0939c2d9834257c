"""200 generated configs, read and run by DeepSpeed's own code and by jaxspeed's.

Batch triple, clipping, precision and stage are those of DeepSpeedConfig; learning rates and loss
scales those of its schedulers and scalers over 200 steps; elastic batches those of its table.
DeepSpeed runs in the references' process; the reference is 0.19.6.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.config import Config, examine
from jaxspeed.config.auto import with_value
from jaxspeed.config.suggestions import OWN_SECTIONS
from jaxspeed.config.tree import section_paths
from jaxspeed.errors import ConfigError
from jaxspeed.optim import loss_scale
from jaxspeed.optim.schedules import build_schedule

STEPS = 200
# Those that need a type, and lists.
OTHER_SECTIONS = {"optimizer", "optimizer.groups", "scheduler", "objective", "data.mixture"}
OF_JAXSPEED = {"tensor_parallel.partition_config"}


def generated(number):
    """A config with a bit of everything, and its data-parallel size."""
    rng = random.Random(number)
    pick = rng.choice
    ranks = pick([1, 2, 4, 8])
    micro, accumulation = pick([1, 2, 3, 8]), pick([1, 2, 5])
    sizes = {
        "train_batch_size": micro * accumulation * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    tree = {key: sizes[key] for key in rng.sample(sorted(sizes), rng.randint(1, 3))}
    if rng.random() < 0.1:
        tree["train_batch_size"] = sizes["train_batch_size"] + pick([1, ranks])
    if rng.random() < 0.5:
        tree["gradient_clipping"] = pick([0, 0.5, 1.0, 7])
    precision = pick(["fp16", "bf16", "bfloat16", None])
    if precision == "fp16":
        keys = {
            "loss_scale": pick([0, 0, 0, 128, "64"]),
            "initial_scale_power": pick([4, 8, 16]),
            "loss_scale_window": pick([2, 10, 50]),
            "hysteresis": pick([1, 2, 3]),
            "consecutive_hysteresis": pick([True, False, "false"]),
            "min_loss_scale": pick([1, 2, 0]),
        }
        chosen = rng.sample(sorted(keys), rng.randint(0, len(keys)))
        tree["fp16"] = {"enabled": pick([True, 1, "true"])} | {key: keys[key] for key in chosen}
    elif precision:
        tree[precision] = {"enabled": pick([True, False, "true"])}
    tree["zero_optimization"] = pick(
        [True, False, {"stage": 1}, {"stage": "2"}, {"stage": 3, "max_live_parameters": 1e8}]
    )
    tree["optimizer"] = {"type": "Adam", "params": {"lr": pick([1e-4, 3e-3])}}
    if scheduler := _scheduler(rng):
        tree["scheduler"] = scheduler
    if rng.random() < 0.3:
        tree["zero_allow_untested_optimizer"] = True
    if rng.random() < 0.2:
        tree["unheard_of"] = {"enabled": True}
    return tree, ranks


def _scheduler(rng):
    pick = rng.choice
    warmup = {"warmup_num_steps": pick([1, 2, 10, 50]), "warmup_type": pick(["log", "linear"])}
    total = {"total_num_steps": pick([60, 150, 400])}
    rates = {"warmup_min_lr": pick([0, 1e-6]), "warmup_max_lr": pick([1e-3, 2e-5])}
    cycle = {
        "cycle_min_lr": 1e-5,
        "cycle_max_lr": 1e-3,
        "cycle_first_step_size": pick([5, 40]),
        "cycle_first_stair_count": pick([0, 4]),
        "decay_step_size": pick([0, 7]),
        "decay_lr_rate": pick([0, 0.1]),
        "cycle_momentum": pick([True, False]),
    }
    if rng.random() < 0.5:
        cycle["cycle_second_step_size"] = pick([10, 30])
    sweep = {
        "lr_range_test_min_lr": 1e-4,
        "lr_range_test_step_size": pick([3, 20]),
        "lr_range_test_step_rate": pick([0.5, 2.0]),
        "lr_range_test_staircase": pick([True, False]),
    }
    return pick(
        [
            None,
            {"type": "WarmupLR", "params": warmup | rates},
            {"type": "WarmupLR", "params": warmup},
            {"type": "WarmupDecayLR", "params": warmup | rates | total},
            {"type": "WarmupCosineLR", "params": warmup | total | {"cos_min_ratio": 0.1}},
            {"type": "OneCycle", "params": cycle},
            {"type": "LRRangeTest", "params": sweep},
        ]
    )


def test_configs_are_read_as_deepspeed_reads_them(references):
    agreed = refused = 0
    configs = [generated(number) for number in range(200)]
    read = references.call("deepspeed_rules.read", configs=configs)
    for number, ((tree, ranks), theirs) in enumerate(zip(configs, read, strict=True)):
        try:
            ours = Config.load(tree)
            batch = ours.batch(ranks)
        except ConfigError:
            assert theirs is None, (number, tree)
            refused += 1
            continue
        assert theirs is not None, (number, tree)
        triple = [batch.train, batch.micro, batch.accumulation]
        assert triple == theirs["batch"], (number, tree)
        assert ours.gradient_clipping == theirs["gradient_clipping"]
        assert ours.fp16.enabled == theirs["fp16"]
        assert ours.bf16.enabled == theirs["bf16"]
        assert ours.zero_optimization.stage == theirs["stage"]
        agreed += 1
    assert agreed > 120
    assert refused > 10


def test_learning_rates_are_those_of_deepspeeds_schedulers(references):
    trees = [generated(number)[0] for number in range(200)]
    trees = [tree for tree in trees if "scheduler" in tree]
    theirs = references.call(
        "deepspeed_rules.learning_rates",
        schedulers=[(tree["scheduler"], tree["optimizer"]["params"]["lr"]) for tree in trees],
        steps=STEPS,
    )
    for tree, lrs in zip(trees, theirs, strict=True):
        given = {key: tree[key] for key in ("optimizer", "scheduler")}
        config = Config.load(given)
        base = config.optimizer.params["lr"]
        ours = build_schedule(config.scheduler.type, config.scheduler.params)
        found = jax.vmap(lambda step, ours=ours, base=base: ours.lr(step, base))(jnp.arange(STEPS))
        np.testing.assert_allclose(found, lrs, rtol=2e-5, atol=1e-9, err_msg=str(given))
    assert len(trees) > 120


def overflows_of(number):
    rng = random.Random(number)
    return [rng.random() < 0.1 for _ in range(STEPS)]


def test_loss_scales_are_those_of_deepspeeds_scaler(references):
    compared = 0
    trees = {number: generated(number)[0] for number in range(200)}
    trees = {number: {"fp16": tree["fp16"]} for number, tree in trees.items() if "fp16" in tree}
    theirs = references.call(
        "deepspeed_rules.loss_scales",
        configs=[{"train_batch_size": 8, **tree} for tree in trees.values()],
        overflows=[overflows_of(number) for number in trees],
    )
    for (number, tree), expected in zip(trees.items(), theirs, strict=True):
        if expected is None:
            continue
        section = Config.load(tree).fp16
        rule = loss_scale.make_rule(
            loss_scale=section.loss_scale,
            initial_scale_power=section.initial_scale_power,
            loss_scale_window=section.loss_scale_window,
            hysteresis=section.hysteresis,
            consecutive_hysteresis=section.consecutive_hysteresis,
            min_loss_scale=section.min_loss_scale,
        )

        def step(state, overflow, rule=rule):
            state = loss_scale.update(state, ~overflow, rule)
            return state, state.scale

        _, found = jax.lax.scan(step, loss_scale.init(rule), jnp.asarray(overflows_of(number)))
        assert found.tolist() == expected, (number, tree["fp16"])
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("version", [None, 0.1, 0.2])
@pytest.mark.parametrize("prefer_larger", [True, False])
def test_elastic_batches_are_deepspeeds(references, version, prefer_larger):
    """At each device count, inside the table and outside of it."""
    seen = {"fits": 0, "refused": 0}
    counts = [1, 2, 3, 5, 6, 7, 8, 11, 12, 16, 17, 24, 31, 48, 64, 65, 96, 100]
    sections = []
    for number in range(12):
        rng = random.Random(number)
        section = {
            "enabled": True,
            "max_train_batch_size": rng.choice([100, 500, 2000]),
            "micro_batch_sizes": sorted(rng.sample([1, 2, 3, 4, 6, 8, 16], 3)),
            "min_gpus": rng.choice([1, 4]),
            "max_gpus": rng.choice([64, 1000]),
            "prefer_larger_batch": prefer_larger,
        }
        sections.append(section | ({} if version is None else {"version": version}))
    batches = references.call("deepspeed_rules.elastic_batches", sections=sections, ranks=counts)
    for section, row in zip(sections, batches, strict=True):
        for ranks, theirs in zip(counts, row, strict=True):
            try:
                batch = Config.load({"elasticity": section}).batch(ranks)
                ours = [batch.train, batch.micro, batch.accumulation]
            except ConfigError:
                ours = None
            if theirs is not None and theirs[0] == 0:
                theirs = None  # DeepSpeed returns a batch of nothing
            assert ours == theirs, (section, ranks)
            seen["fits" if ours else "refused"] += 1
    assert seen["fits"] > 50
    if version == 0.1:
        assert seen["refused"] > 50


def test_messages_on_unknown_keys_say_what_deepspeed_does_with_them(references):
    sections = ["", *(path for path in section_paths() if path not in OTHER_SECTIONS)]
    trees = {path: with_value({}, f"{path}.frobnicate".lstrip("."), 1) for path in sections}
    works = {
        path: next(p.works for p in examine(tree, strict=True).problems if "frobnicate" in p.path)
        for path, tree in trees.items()
    }
    theirs = references.call(
        "deepspeed_rules.read",
        configs=[({"train_batch_size": 8, **tree}, 1) for tree in trees.values()],
    )
    says = {True: "DeepSpeed ignores it.", False: "DeepSpeed refuses it too."}
    for path, read in zip(trees, theirs, strict=True):
        if path.partition(".")[0] in (*OWN_SECTIONS, "lora") or path in OF_JAXSPEED:
            assert "DeepSpeed" not in works[path]
        else:
            assert works[path].endswith(says[read is not None]), path
    assert {read is None for read in theirs} == {True, False}
