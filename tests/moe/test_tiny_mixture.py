"""configs/tiny_moe.yaml against the dense model with as many active parameters."""

from pathlib import Path

import numpy as np
import pytest

import jaxspeed
from jaxspeed.run import train

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tiny_moe.yaml"
OF_MIXTURES = (
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "router_aux_loss_coef",
)


def held_out_loss(tmp_path, seed: int, *, dense: bool) -> float:
    given = jaxspeed.Config.load(CONFIG).given
    given["run"] |= {"devices": "cpu:1", "seed": seed, "sample_tokens": 0, "checkpoint_every": 1000}
    given["run"]["output"] = str(tmp_path / f"{'dense' if dense else 'mixture'} {seed}")
    given["mesh"] = {}
    if dense:
        sizes = given["model"]["config"]
        sizes["intermediate_size"] *= sizes["num_experts_per_tok"]
        given["model"] = {
            "family": "llama",
            "config": {name: x for name, x in sizes.items() if name not in OF_MIXTURES},
        }
    return train(given).reached.eval_loss


@pytest.mark.full
def test_the_tiny_mixture_ends_below_the_dense_model_of_equal_active_size(tmp_path):
    """Of equal tokens, optimizer and schedule; the mean of three seeds."""
    mixtures, dense = (
        [held_out_loss(tmp_path, seed, dense=is_dense) for seed in range(3)]
        for is_dense in (False, True)
    )
    print(mixtures, dense)
    assert np.mean(mixtures) < np.mean(dense), (mixtures, dense)
