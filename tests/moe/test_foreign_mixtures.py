"""Mixtures that know nothing of jaxspeed train on an expert axis as on one device."""

import functools
import itertools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxspeed
from jaxspeed.axes import axis_names
from jaxspeed.errors import ConfigError
from jaxspeed.placement.rules import model_sharding
from tests.engine import tiny
from tests.moe import foreign_mixtures as mixtures
from tests.support import reference
from tests.support.covering import covering

FORMS = ("gshard", "dense")
STEPS = 2


def config(mesh: dict[str, int], stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8 // (mesh.get("data", 1) * mesh.get("expert", 1)),
        "mesh": mesh,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        **more,
    }


@functools.cache
def plain(form: str) -> reference.Run:
    model = reference.NnxReference(lambda rngs: mixtures.Mixture(rngs, form))
    batches = [mixtures.batch()] * STEPS
    return reference.train(model, mixtures.loss, batches, optax.sgd(0.3))


def trained(form: str, mesh: dict[str, int], stage: int, named: bool = True, **more: Any) -> Any:
    taken = {"example_batch": more.pop("example_batch")} if "example_batch" in more else {}
    engine = jaxspeed.initialize(
        lambda rngs: mixtures.Mixture(rngs, form, named),
        mixtures.loss,
        config(mesh, stage, **more),
        devices=jax.devices()[: math.prod(mesh.values())],
        **taken,
    )
    losses = [float(engine.train_batch(mixtures.batch())["loss"]) for _ in range(STEPS)]
    want = plain(form)
    np.testing.assert_allclose(losses, want.losses, rtol=1e-6)
    for path, value in want.last.items():
        ours, start = np.asarray(engine.parameters[path]), want.first[path]
        most = np.abs(value - start).max()  # the sum of the gradients, times the rate
        rounding = np.spacing(np.abs(start).max())
        np.testing.assert_allclose(ours, value, atol=1e-5 * most + rounding, rtol=0, err_msg=path)
    return engine


@pytest.mark.default_cases("dense-4-1-2")
@pytest.mark.parametrize(
    ("form", "expert", "tensor", "stage"),
    covering(
        itertools.product(FORMS, (1, 2, 4), (1, 2), (0, 1, 2, 3)),
        [("gshard", 2, 2, 3), ("gshard", 4, 1, 1), ("dense", 4, 1, 2)],
    ),
)
def test_updates_equal_plain_flax(form, expert, tensor, stage):
    mesh = {"data": 1 if expert * tensor == 8 else 2, "expert": expert, "tensor": tensor}
    engine = trained(form, mesh, stage)
    gate = engine.placements["blocks/0/experts/gate"].read.spec
    assert gate[0] == ("expert" if expert > 1 else None)


# -- without names ---------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("form", covering(FORMS, ["gshard"]))
def test_names_come_from_the_config(form):
    parallel = {"logical_axes": mixtures.names()}
    engine = trained(form, {"data": 2, "expert": 4}, 3, named=False, parallel=parallel)
    assert engine.placements["blocks/1/experts/down"].read.spec[0] == "expert"


@pytest.mark.parametrize("form", covering(FORMS, ["dense"]))
def test_experts_are_inferred_from_the_loss(form):
    mesh = {"expert": 2, "tensor": 2}
    engine = trained(form, mesh, 0, named=False, example_batch=mixtures.batch())
    specs = {path: tuple(engine.placements[path].read.spec) for path in engine.parameters}
    assert specs["blocks/0/experts/gate"] == ("expert", None, "tensor")
    assert specs["blocks/0/experts/down"][:2] == ("expert", "tensor")
    assert specs["blocks/1/experts/bias"] == ("expert", "tensor")
    assert "expert" not in specs["blocks/1/router/kernel"]


def test_a_routers_outputs_are_replicated_though_they_are_named_experts():
    sizes = dict.fromkeys(axis_names(), 1) | {"expert": 4}
    assert not any(model_sharding((16, 6), ("embed", "experts"), sizes).spec)
    assert model_sharding((4, 16, 8), ("experts", "embed", "mlp"), sizes).spec[0] == "expert"


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (mixtures.Listed, True, "none of the traced loss is one"),
        (mixtures.Listed, False, "without initialize(..., example_batch=batch)"),
        (tiny.Listed, False, "Without experts write mesh.expert 1"),
    ],
)
def test_a_model_without_stacked_experts_is_told_what_to_do(model, example, said):
    taken = {"example_batch": mixtures.batch()} if example else {}
    with pytest.raises(ConfigError) as error:
        jaxspeed.initialize(model, mixtures.loss, config({"data": 4, "expert": 2}, 0), **taken)
    for part in (said, "mesh.expert is 2", "parallel.logical_axes", "jaxspeed.ops.moe", "stack"):
        assert part in str(error.value)
