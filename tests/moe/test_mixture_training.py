"""Mixtures train on every mesh as without dispatch on one device: losses, gradients, updates."""

from typing import Any

import numpy as np
import pytest

import jaxspeed
from tests.moe.plain_mixtures import RATE, SAMPLES, SEEDS, STEPS, batches, plain
from tests.moe.small_models import MODELS
from tests.support.covering import covering

TOLERANCE = 1e-5
# Names of a case: model, sizes of axes (the other devices are data), stage, accumulation, remat.
CASES = [
    (name, expert, tensor, pipe, stage, accumulation, remat)
    for name in MODELS
    for expert in (1, 2, 4, 8)
    for tensor in (1, 2)
    for pipe in (1, 2)
    for stage in range(4)
    for accumulation in (1, 4)
    for remat in ("none", "full")
    if expert * tensor * pipe <= 8 and (pipe == 1 or accumulation > 1)
]
DEFAULT = [
    ("mixtral", 4, 1, 1, 3, 4, "full"),
    ("mixtral", 2, 1, 2, 3, 4, "none"),
    ("deepseek", 2, 2, 1, 1, 1, "none"),
]


def config(
    name: str,
    expert: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    stage: int = 0,
    accumulation: int = 1,
    remat: Any = "none",
    **more: Any,
) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "model": MODELS[name],
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"expert": expert, "tensor": tensor, "pipe": pipe},
        "parallel": {"remat": remat},
        "run": {"seed": SEEDS[name], "compilation_cache": False},
        **more,
    }


def trained(given: Any) -> tuple[Any, list[Any]]:
    engine = jaxspeed.initialize(config=given, example_batch=batches()[0])
    return engine, [engine.train_batch(batch) for batch in batches()]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "expert", "tensor", "pipe", "stage", "accumulation", "remat"),
    covering(CASES, DEFAULT),
)
def test_a_mixture_trains_as_it_does_densely(
    name, expert, tensor, pipe, stage, accumulation, remat
):
    engine, reports = trained(config(name, expert, tensor, pipe, stage, accumulation, remat))
    expected = plain(name, 8 // tensor // pipe, accumulation)
    assert expected.margin > 1e-5  # else rounding might choose other experts
    np.testing.assert_allclose([float(r["loss"]) for r in reports], expected.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(
        [float(r["grad_norm"]) for r in reports], expected.norms, rtol=TOLERANCE
    )
    ours = {path: np.asarray(x) for path, x in engine.parameters.items()}
    assert ours.keys() == expected.last.keys()
    for path, last in expected.last.items():
        first = expected.first[path]
        # Each step rounds a stored parameter: of a scale of 1, 16 numbers wide, that is 2e-5 of its
        # update where one number is rounded the other way.
        rounding = STEPS * np.spacing(np.maximum(np.abs(first), np.abs(last)))
        off = np.maximum(np.abs(ours[path] - last) - rounding, 0)
        off = np.linalg.norm(off) / np.linalg.norm(last - first)
        assert off < TOLERANCE, f"{path}: the update is off by {off:.1e}"
    if expected.bias is not None:
        np.testing.assert_array_equal(engine.state.variables["expert_bias"], expected.bias)
        assert not np.asarray(engine.state.variables["expert_counts"]).any()
    read = engine.placements["blocks/mlp/w_up"].read.spec
    assert ("expert" in read) == (expert > 1)
