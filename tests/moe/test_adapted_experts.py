"""Adapters and quantized storage of experts, over an axis of experts and beside tensor and pipe."""

import itertools
from typing import Any

import numpy as np
import pytest

import jaxspeed
from tests.moe.plain_mixtures import batches
from tests.moe.small_models import MIXTRAL
from tests.moe.test_mixture_training import config
from tests.support.covering import covering

LORA = {"r": 4, "lora_alpha": 8, "target_parameters": ["w_gate", "w_up", "w_down"]}
# Those of routers depend on which samples form a micro-batch, and so on the data ranks.
NO_LOSSES = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}
NF4 = {"quantize": {"weights": "nf4", "modules": ["blocks/mlp/w_*"]}}
MESHES = {
    "expert 2": {"expert": 2, "stage": 3},
    "expert 4, remat": {"expert": 4, "remat": "full"},
    "expert 2, tensor 2": {"expert": 2, "tensor": 2, "stage": 2},
    "expert 2, pipe 2": {"expert": 2, "pipe": 2, "accumulation": 4},
}


def losses(model: dict[str, Any], **given: Any) -> list[float]:
    model = MIXTRAL | {"config": MIXTRAL["config"] | NO_LOSSES} | model
    settings = config("mixtral", **given) | {"model": model, "lora": LORA}
    engine = jaxspeed.initialize(config=settings, example_batch=batches()[0])
    trained = {row.path for row in engine.placements if row.leaf.trainable}
    assert trained == {
        f"lora/blocks/mlp/w_{name}/{factor}" for name in ("gate", "up", "down") for factor in "AB"
    }
    return [float(engine.train_batch(batch)["loss"]) for batch in [*batches(), batches()[0]]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("weights", "mesh"),
    covering(itertools.product(("plain", "nf4"), MESHES), [("nf4", "expert 2")]),
)
def test_adapted_experts_train_alike_over_an_axis_of_experts(weights, mesh):
    model, given = NF4 if weights == "nf4" else {}, MESHES[mesh]
    alone = losses(model, accumulation=given.get("accumulation", 1))
    assert len(set(alone)) == 3
    np.testing.assert_allclose(losses(model, **given), alone, rtol=1e-5)
