"""The mesh axis `expert`: what is sharded over it, and that training on it equals plain Optax."""

from typing import Any

import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.placement.specs import spec_axes
from tests.moe.dense_experts import DenseMixture, batches, config, loss_fn, plain, trained
from tests.support.covering import covering

CASES = [
    (stage, mesh, accumulation)
    for stage in range(4)
    for mesh in ("expert 2", "expert 4, tensor 2", "data 2, expert 2, tensor 2")
    for accumulation in (1, 2)
]
DEFAULT = [
    (0, "expert 2", 2),
    (1, "data 2, expert 2, tensor 2", 2),
    (2, "expert 2", 1),
    (3, "data 2, expert 2, tensor 2", 2),
    (3, "expert 4, tensor 2", 1),
]


def mesh_of(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split() for part in text.split(", "))}


@pytest.fixture(scope="module")
def expected() -> Any:
    return plain()


@pytest.mark.default_cases("2-expert 2-1")
@pytest.mark.parametrize(("stage", "mesh", "accumulation"), covering(CASES, DEFAULT))
def test_training_over_experts_equals_plain_optax(stage, mesh, accumulation, expected):
    engine, losses, final = trained(config(stage, accumulation, mesh=mesh_of(mesh)))
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    for path, value in expected[1].items():
        np.testing.assert_allclose(final[path], value, atol=2e-6, rtol=1e-5, err_msg=path)
    up, router = engine.placements["blocks/0/up"], engine.placements["blocks/0/router/kernel"]
    assert up.read.spec[0] == "expert"
    assert "expert" not in spec_axes(router.read.spec)
    stored = {axis for axis in ("data", "expert") if engine.program.mesh.shape[axis] > 1}
    assert spec_axes(up.opt.spec) >= (stored if stage else {"expert"})
    assert spec_axes(router.opt.spec) & {"data", "expert"} == (stored if stage else set())
    grads = up.grad.spec
    assert ("data" in spec_axes(grads)) == (stage >= 2 and "data" in stored)
    sizes = engine.program.mesh.shape
    value = engine.state.params["blocks/0/up"].addressable_shards[0].data
    assert value.shape[0] == engine.state.params["blocks/0/up"].shape[0] // sizes["expert"]


def test_names_of_dims_may_come_from_the_config(expected):
    class Unnamed(DenseMixture):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            for block in self.blocks:
                block.up = nnx.Param(block.up[...])
                block.down = nnx.Param(block.down[...])

    names = {"**/up": ["experts", None, None], "**/down": ["experts", None, None]}
    given = config(1, mesh={"expert": 2, "data": 4}, parallel={"logical_axes": names})
    engine = jaxspeed.initialize(Unnamed, loss_fn, given)
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
    assert engine.placements["blocks/1/down"].read.spec[0] == "expert"


def test_experts_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(jaxspeed.PlacementError) as error:
        jaxspeed.initialize(
            lambda rngs: DenseMixture(rngs, experts=6), loss_fn, config(0, mesh={"expert": 4})
        )
    assert "6 experts cannot be sharded over expert=4: blocks/*/down, blocks/*/up" in str(
        error.value
    )
    assert "sizes of expert that work for this model: 1, 2, 3, 6; nearest to 4: 3 and 6" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"data_reduction": "ring"}, "is sharded over an axis that shards the batch"),
        ({"gradient_reduction": "step"}, ""),
    ],
)
def test_reductions_of_a_ranks_partial_sums(parallel, message, expected):
    """No rank has all experts: rings are refused, and a step's reduction is each micro-batch's."""
    given = config(0, 2, mesh={"expert": 2}, parallel=parallel)
    if message:
        with pytest.raises(jaxspeed.ModelError, match=message):
            jaxspeed.initialize(lambda rngs: DenseMixture(rngs), loss_fn, given)
    else:
        _, losses, _ = trained(given)
        np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
