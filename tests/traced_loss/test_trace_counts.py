"""The user's loss is called at most twice while a step is traced.

Once in the global view, and once where axes of the mesh are manual: in a data rank's own part of
the batch, or in a stage of a pipeline. There it is another program, of other shapes or on another
mesh. A third time, of twice as many samples, where that it is a sum over samples has to be proved.
"""

from typing import Any

import jax
import pytest

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.train.build import build_program
from tests.engine import tiny
from tests.support.covering import covering

COLUMNS = {"partition_config": {"layer_specs": {"blocks/**/linear": "column"}}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": {"enabled": True}},
    "tensor": {"mesh": {"tensor": 2}, "tensor_parallel": COLUMNS},
    "remat": {"parallel": {"remat": "full"}},
    "pipe": {"mesh": {"pipe": 2}},
    "ring": {"parallel": {"data_reduction": "ring"}},
    "offload": {"offload": True},
}


def counted(loss_fn: Any) -> Any:
    """(the loss function, a list that grows by one at each of its calls)."""
    calls: list[None] = []

    def loss(model: Any, batch: Any) -> Any:
        calls.append(None)
        return loss_fn(model, batch)

    return loss, calls


def mean_error(model: Any, batch: Any) -> Any:
    total, weight = tiny.squared_error(model, batch)
    return total / weight


LOSSES = {"sum": tiny.squared_error, "mean": mean_error}


def config(settings: str, stage: int, accumulation: int) -> dict[str, Any]:
    more = dict(SETTINGS[settings])
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if more.pop("offload", False):
        zero["offload_optimizer"] = {"device": "cpu"}
    more = {"zero_optimization": zero, "run": {"compilation_cache": False}, **more}
    return tiny.config(gradient_accumulation_steps=accumulation, **more)


def model(rngs: Any) -> Any:
    return tiny.Listed(rngs, 4)


def calls_of_a_step(settings: str, stage: int, accumulation: int, loss: str = "sum") -> int:
    """How often the loss is called until its step is ready to be compiled."""
    loss_fn, calls = counted(LOSSES[loss])
    loaded = Config.load(config(settings, stage, accumulation))
    program = build_program(loaded, model, loss_fn, devices=jax.devices())
    calls.clear()
    batch = program.abstract_batch(tiny.batch(program.batch.train))
    program.step.trace(program.state, batch).lower()
    return len(calls)


POINTS = [
    (settings, stage, accumulation, loss)
    for settings in SETTINGS
    for stage in (0, 1, 3)
    for accumulation in (1, 4)
    for loss in (LOSSES if accumulation > 1 else ("sum",))
    if settings != "pipe" or accumulation > 1  # stages share several micro-batches
]


# Every setting at every stage, with micro-batches at two of them.
DEFAULT = {(1, 1, "sum"), (0, 4, "mean"), (3, 4, "sum")}
ALWAYS = [point for point in POINTS if point[1:] in DEFAULT]


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize(
    ("settings", "stage", "accumulation", "loss"),
    covering(POINTS, [*ALWAYS, ("pipe", 1, 4, "sum")]),
)
def test_the_loss_is_traced_at_most_twice_for_a_step_and_its_proof(
    settings, stage, accumulation, loss
):
    once_a_step = accumulation > 1 and stage < 2 and loss == "sum" and settings != "pipe"
    is_proved = settings == "ring" or once_a_step
    assert calls_of_a_step(settings, stage, accumulation, loss) <= 2 + is_proved


@pytest.mark.default_cases("plain")
@pytest.mark.parametrize("settings", ["plain", "ring"])
def test_a_fresh_engine_traces_it_as_often(settings):
    loss_fn, calls = counted(tiny.squared_error)
    run = jaxspeed.initialize(model, loss_fn, config(settings, 1, 4))
    calls.clear()
    for seed in range(2):
        run.train_batch(tiny.batch(run.program.batch.train, seed))
    assert len(calls) == 3
