"""Steps of DPO, CPO, ORPO and KTO equal plain Flax and Optax, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import build

import jaxspeed
from tests.moe.small_models import MIXTRAL
from tests.objectives.plain_preferences import (
    ROWS,
    SIZES,
    PlainLoop,
    batch_of_pairs,
    for_seq,
)
from tests.support.reference import slice_of_each_rank

LR, BETA = 0.02, 0.3
GPT2 = {"family": "gpt2", "config": SIZES}


def ls(x):
    return jax.nn.log_sigmoid(x)


def sigmoid(chosen, rejected, _):
    return -ls(BETA * (chosen.ratio - rejected.ratio)).mean()


def likelihood(chosen):
    return -chosen.logp.sum() / chosen.count.sum()


def mixed(chosen, rejected, _):
    """ld_alpha 0.5, ipo and sft."""
    shared = np.minimum(chosen.count, rejected.count)

    def of(x):
        place = x.side.mask.cumsum(1)
        weight = np.where(place <= shared[:, None], 1, 0.5) * x.side.mask
        return ((x.each - x.reference) * weight).sum(1) / x.count

    ipo = (of(chosen) - of(rejected) - 1 / (2 * BETA)) ** 2
    return ipo.mean() + 0.7 * likelihood(chosen)


def simpo(chosen, rejected, _):
    x = BETA * (chosen.mean - rejected.mean) - 0.5
    return (-0.9 * ls(x) - 0.1 * ls(-x)).mean() + 0.4 * likelihood(chosen)


def orpo(chosen, rejected, _):
    def log_odds(x):
        return x.mean - jnp.log(-jnp.expm1(x.mean))

    counted = chosen.side.mask + chosen.side.prompts
    nll = -(chosen.each * counted).sum() / counted.sum()
    return nll - BETA * ls(log_odds(chosen) - log_odds(rejected)).mean()


def kto(labelled, mismatched, _):
    kl = jax.lax.stop_gradient(jnp.maximum(mismatched.ratio.mean(), 0))
    label = labelled.side.label
    losses = 1 - jax.nn.sigmoid(label * BETA * (labelled.ratio - kl))
    return (np.where(label > 0, 1.5, 0.5) * losses).mean()


OBJECTIVES: dict[str, tuple[dict[str, Any], Any]] = {
    "dpo": ({"type": "dpo"}, sigmoid),
    "mixed": (
        {
            "type": "dpo", "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.7],
            "ld_alpha": 0.5,
        },
        mixed,
    ),
    "simpo": (
        {"type": "cpo", "loss_type": "simpo", "cpo_alpha": 0.4, "label_smoothing": 0.1}, simpo,
    ),
    "orpo": ({"type": "orpo"}, orpo),
    "kto": ({"type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}, kto),
}  # fmt: skip
LORA = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": "all-linear"}
SETTINGS: dict[str, dict[str, Any]] = {
    f"stage {stage}, accumulation {accumulation}": {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_accumulation_steps": accumulation,
    }
    for stage in range(4)
    for accumulation in (1, 4)
}
SETTINGS |= {
    "tensor 2": {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}},
    "pipe 2": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
    "seq 2": {
        "mesh": {"seq": 2}, "zero_optimization": {"stage": 3},
        "parallel": {"sequence": {"layout": "zigzag"}},
    },
    "expert 2": {"mesh": {"expert": 2}, "model": MIXTRAL, "gradient_accumulation_steps": 2},
    "tiles": {"parallel": {"sequence_tiles": 4}},
    "rings": {"parallel": {"data_reduction": "ring"}, "gradient_accumulation_steps": 2},
    "adapters": {"lora": LORA, "zero_optimization": {"stage": 3}},
    "NF4": {"lora": LORA, "model": {**GPT2, "quantize": {"weights": "nf4"}}},
}  # fmt: skip
DEFAULT = [
    ("dpo", "seq 2"),
    ("mixed", "stage 3, accumulation 4"),
    ("kto", "pipe 2"),
    ("orpo", "tensor 2"),
    ("kto", "adapters"),
]
# DPO and one of the others in each setting.
CASES = [
    (name, setting)
    for number, setting in enumerate(SETTINGS)
    for i, name in enumerate(OBJECTIVES)
    if i in (0, 1 + number % 4) or (name, setting) in DEFAULT
]


def config(objective: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {"beta": BETA, **objective}
    if "lora" in more and objective["type"] in ("dpo", "kto"):
        own["reference"] = "each_step"
    return {
        "model": GPT2,
        "objective": own,
        "train_batch_size": ROWS,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "run": {"seed": 1},
        **more,
    }


def auxiliary(model: Any, batch: Any) -> Any:
    inputs = {n: batch[n][:, :-1] for n in ("segment_ids", "positions")}
    return model.hidden_and_auxiliary(batch["tokens"][:, :-1], **inputs)[1]


def compare(name: str, setting: str, steps: int) -> None:
    objective, loss = OBJECTIVES[name]
    more = SETTINGS[setting]
    engine = jaxspeed.initialize(config=config(objective, **more))
    model = more.get("model", GPT2)
    factory = build(model["family"], model.get("preset"), model["config"]).factory
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    of_routers = auxiliary if model is MIXTRAL else None
    loop = PlainLoop(factory, values, loss, LR, 1.5 * ("lora" in more), of_routers)
    parts, ranks = engine.program.batch.accumulation, engine.program.ranks
    for seed in range(steps):
        batch = batch_of_pairs(seed, unpaired=name == "kto")
        micro = [
            {n: slice_of_each_rank(x, i, parts, ranks) for n, x in batch.items()}
            for i in range(parts)
        ]
        wanted = loop.step(batch, micro)
        given = batch if "lora" not in more else without_reference(batch)
        given = for_seq(given) if "seq" in setting else given
        metrics = engine.train_batch(given)
        found = float(metrics["loss"]), float(metrics["grad_norm"])
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    trained = engine.parameters
    for path, value in loop.trained.items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


def without_reference(batch):
    return {name: x for name, x in batch.items() if name != "reference_logprobs"}


@pytest.mark.default_cases(*("-".join(case) for case in DEFAULT))
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_step_of_preferences_equals_plain_optax(name, setting):
    compare(name, setting, 1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_ten_steps_of_preferences_equal_plain_optax(name, setting):
    compare(name, setting, 10)
