"""The engine over a pipeline is the engine: evaluation, checks, checkpoints, frozen weights.

And what no pipeline can cut is refused with a reason, never with a crash.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ConfigError, ModelError, PlacementError
from tests.support import awkward
from tests.support.covering import covering
from tests.system import stacks
from tests.train import cases

LAYERS, WIDTH = 5, 12
NAMES = {"scanned": {"logical_axes": {"layers/w": ["layers", None, None]}}, "listed": {}}
PIPES: dict[str, dict[str, Any]] = {
    "none": {"mesh": {"data": 8}},
    "2": {"mesh": {"pipe": 2, "data": 4}},
    "4": {"mesh": {"pipe": 4, "data": 2}},
    "2, interleaved": {
        "mesh": {"pipe": 2, "data": 4},
        "parallel": {"pipeline_schedule": "interleaved"},
    },
}
ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}


def engine(form="listed", pipe="4", stage=0, loss=stacks.loss, model=None, devices=8, **sections):
    more = {**PIPES[pipe], **sections}
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": 1, "compilation_cache": False},
        **more,
        "parallel": {**NAMES.get(form, {}), **more.get("parallel", {})},
    }
    if form in NAMES:
        model = stacks.FORMS[form](LAYERS, WIDTH)
    return jaxspeed.initialize(model, loss, config, devices=jax.devices()[:devices])


def batch(samples=64, seed=0):
    x, y = np.random.default_rng(seed).normal(size=(2, samples, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(y)}


def after(made, steps, first=0):
    return [float(made.train_batch(batch(seed=first + i))["loss"]) for i in range(steps)]


def assert_close(ours, theirs, tolerance=1e-6):
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        np.testing.assert_allclose(x, theirs[path], rtol=tolerance, atol=tolerance, err_msg=path)


# -- evaluation, checks, what is handed out -------------------------------------------------------


def plain_loss(loss, module, given):
    """The loss of the module itself, on one device."""
    graph, state = nnx.split(module)
    state = jax.device_put(state, jax.devices()[0])
    found = jax.jit(lambda state, batch: loss(nnx.merge(graph, state), batch))(state, given)
    return float(found[0] / found[1] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("form", covering(NAMES, ["scanned"]))
@pytest.mark.parametrize(
    "pipe",
    ["2, interleaved", *(pytest.param(pipe, marks=pytest.mark.full) for pipe in ("2", "4"))],
)
def test_evaluation_is_the_models_own_loss(form, pipe):
    made = engine(form, pipe, stage=3)
    for samples in (8, 24, 40):
        given = batch(samples)
        found = float(made.eval_batch(given)["loss"])
        np.testing.assert_allclose(found, plain_loss(stacks.loss, made.module, given), rtol=1e-5)


@pytest.mark.sampled
def test_evaluation_of_a_mean_and_of_a_model_that_drops_is_the_models_own_loss():
    case = cases.CASES["dropout"]
    for loss in (cases.squared_error, cases.weighted_error):
        made = engine("", "2", loss=loss, model=case.model)
        given = cases.vectors(np.random.default_rng(0), 24)
        found = float(made.eval_batch(given)["loss"])
        np.testing.assert_allclose(found, plain_loss(loss, made.module, given), rtol=1e-5)


@pytest.mark.parametrize(
    ("form", "precision"),
    [
        ("scanned", "bf16"),
        # test_check.py has fp16.
        pytest.param("listed", "fp16", marks=pytest.mark.full),
        pytest.param("scanned", "fp32", marks=pytest.mark.full),
        pytest.param("scanned", "fp16", marks=pytest.mark.full),
        pytest.param("listed", "fp32", marks=pytest.mark.full),
        pytest.param("listed", "bf16", marks=pytest.mark.full),
    ],
)
def test_a_step_agrees_with_the_step_on_one_device(form, precision):
    sections = {} if precision == "fp32" else {precision: {"enabled": True}}
    report = engine(form, "4", stage=3, **sections).check(batch())
    assert report.ok, str(report)
    assert report.devices == 8


def test_parameters_and_module_are_those_without_stages():
    theirs = engine("listed", "none")
    wanted = {**theirs.parameters}
    for pipe in ("2", "4", "2, interleaved"):
        made = engine("listed", pipe, stage=3)
        assert_close(made.parameters, wanted, 0)
        x = batch()["x"]
        np.testing.assert_allclose(made.module(x), theirs.module(x), rtol=1e-5, atol=1e-6)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pipe", "stage"),
    covering([("none", 3), ("2", 2), ("2, interleaved", 3)], [("2, interleaved", 3)]),
)
@pytest.mark.parametrize("form", covering(NAMES, ["listed"]))
def test_a_run_goes_on_with_other_stages(form, pipe, stage, tmp_path):
    first = engine(form, "4", stage=1)
    after(first, 2)
    first.save_checkpoint(tmp_path)
    first.wait()
    losses = after(first, 3, first=2)
    then = engine(form, pipe, stage)
    then.load_checkpoint(tmp_path)
    np.testing.assert_allclose(after(then, 3, first=2), losses, rtol=1e-6)
    assert_close(then.parameters, first.parameters, 1e-5)


# -- the update -----------------------------------------------------------------------------------

UPDATES = {
    "clipping": {"gradient_clipping": 0.1},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "a rate of its own": {
        "optimizer": {**ADAM, "groups": [{"pattern": "shift", "lr_factor": 0.1}]},
        "gradient_clipping": 1.0,
    },
}


@pytest.mark.parametrize("form", covering(NAMES, ["listed"]))
@pytest.mark.parametrize(
    "update",
    [pytest.param(n, marks=() if n == "muon" else pytest.mark.full) for n in UPDATES],
)
def test_an_update_sees_parameters_without_padding(form, update):
    wanted = engine(form, "none", **UPDATES[update])
    losses = after(wanted, 3)
    ours = engine(form, "4", stage=2, **UPDATES[update])
    np.testing.assert_allclose(after(ours, 3), losses, rtol=1e-5)
    assert_close(ours.parameters, wanted.parameters, 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("pipe", "layers"), [("2", 3), pytest.param("4", 5, marks=pytest.mark.full)]
)
def test_frozen_weights_of_blocks_stay_and_all_else_is_trained_as_ever(pipe, layers):
    class Deep(awkward.Plain):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.blocks = nnx.List([self.block(rngs) for _ in range(layers)])

    groups = [{"pattern": "blocks/*/down/kernel", "frozen": True}]
    more = {"optimizer": {**ADAM, "groups": groups}, "loss": cases.weighted_error}
    ranks = PIPES[pipe]["mesh"]["data"]  # as many: a micro-batch is a slice of each rank's part
    wanted = engine("", "none", model=Deep, mesh={"data": ranks}, devices=ranks, **more)
    ours = engine("", pipe, stage=3, model=Deep, **more)
    for made in (wanted, ours):
        first = {path: np.array(x) for path, x in made.parameters.items()}
        for i in range(2):
            made.train_batch(cases.vectors(np.random.default_rng(i), 64))
    assert_close(ours.parameters, wanted.parameters, 1e-5)
    for path, x in ours.parameters.items():
        assert np.any(x != first[path]) == (not path.endswith("down/kernel")), path


# -- what is refused ------------------------------------------------------------------------------


class Unlike(nnx.Module):
    """No two blocks have parameters of equal shapes."""

    def __init__(self, rngs):
        widths = [WIDTH, 16, 20, WIDTH]
        pairs = itertools.pairwise(widths)
        self.blocks = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairs])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Alone(nnx.Module):
    def __init__(self, rngs):
        self.only = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.only(x)


class ByTurns(nnx.Module):
    """Blocks of equal parameters that compute different things."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            x = jnp.tanh(block(x)) if i % 2 else jnp.sin(block(x))
        return x


class Twice(ByTurns):
    """Goes through its blocks two times."""

    def __call__(self, x):
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Collecting(ByTurns):
    """Adds up what every block gave."""

    def __call__(self, x):
        total = 0.0
        for block in self.blocks:
            x = block(x)
            total = total + x
        return total


class Skipping(ByTurns):
    """The last block reads what the first one gave."""

    def __call__(self, x):
        given = []
        for block in self.blocks:
            x = block(x)
            given.append(x)
        return x + given[0]


class Backwards(ByTurns):
    """From the last block to the first."""

    def __call__(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x


NOT_FOUND = "partition a model's repeated blocks, and none were found. Needed: "
ELSEWHERE = "an output of block 0 is read outside of the next block"
CHANGES = "the training pass changes variables of the model"
REFUSED = {
    "no blocks": (Alone, PlacementError, NOT_FOUND),
    "unlike blocks": (Unlike, PlacementError, NOT_FOUND),
    "blocks that take turns": (ByTurns, ModelError, "has to be part of a block"),
    "blocks that are read twice": (Twice, ModelError, ELSEWHERE),
    "a sum of all blocks": (Collecting, ModelError, ELSEWHERE),
    "a long way round": (Skipping, ModelError, ELSEWHERE),
    "backwards": (Backwards, ModelError, "block 0 reads an output of block 1"),
    "statistics of blocks": (awkward.BatchStatistics, ModelError, CHANGES),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(name):
    model, kind, reason = REFUSED[name]
    with pytest.raises(kind, match=reason):
        engine("", "2", model=model, loss=cases.squared_error).train_batch(batch())


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"mesh": {"pipe": 8}, "gradient_accumulation_steps": 8}, "8 stages need 8 layers"),
        ({"parallel": {"pipeline_schedule": "interleaved"}}, "chunks each need 8 layers"),
        ({"gradient_accumulation_steps": 2}, "4 pipeline stages"),
        (
            {
                "mesh": {"pipe": 2},
                "gradient_accumulation_steps": 3,
                "train_batch_size": 96,
                "parallel": {"pipeline_schedule": "interleaved"},
            },
            "multiple of 2",
        ),
    ],
)
def test_numbers_that_make_no_pipeline_are_refused_with_those_that_would(sections, reason):
    with pytest.raises((ConfigError, PlacementError), match=reason):
        engine("listed", "4", **sections)
