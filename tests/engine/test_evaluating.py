"""Several evaluations with the same parameters, which are gathered once for all of them."""

import math

import jax
import numpy as np
import pytest

import jaxspeed
from jaxspeed import models as families
from tests.engine import tiny

ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
OFFLOADED = {
    "zero_optimization": {**ZERO3["zero_optimization"], "offload_param": {"device": "cpu"}},
    "bf16": {"enabled": True},
}
GATHERED = {
    "ZeRO 3": ZERO3,
    "ZeRO 3, tensor 2": {"mesh": {"tensor": 2}, **ZERO3},
    "ZeRO 3, bf16": {**ZERO3, "bf16": {"enabled": True}},
    "ZeRO 3, autocast": {**ZERO3, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "ZeRO 3, rings": {**ZERO3, "parallel": {"data_reduction": "ring"}},
    "ZeRO 3, remat": {**ZERO3, "parallel": {"remat": "full"}},
    "offloaded": OFFLOADED,
}
AS_STORED = {
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "pipe 2": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2, **ZERO3},
}
FP32 = {"ZeRO 3", "ZeRO 3, tensor 2", "ZeRO 3, rings", "ZeRO 3, remat", *AS_STORED}
SIZES = {"num_hidden_layers": 2, "vocab_size": 250}  # not a multiple of the devices


def engine_of(placement):
    config = {
        "model": {"family": "llama", "preset": "tiny", "config": SIZES},
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "run": {"seed": 1, "compilation_cache": False},
        **{**GATHERED, **AS_STORED}[placement],
    }
    return jaxspeed.initialize(config=config)


def batch(seed):
    return {"tokens": np.random.default_rng(seed).integers(0, 250, (16, 17))}


def losses(engine, seeds):
    return [float(engine.eval_batch(batch(seed))["loss"]) for seed in seeds]


def gathers(evaluate, state, shapes):
    return evaluate.lower(state, shapes).compile().as_text().count(" all-gather(")


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(
            name, marks=() if name in ("ZeRO 3, tensor 2", "offloaded") else pytest.mark.full
        )
        for name in GATHERED
    ],
)
def test_evaluations_in_a_context_gather_parameters_once(placement):
    engine = engine_of(placement)
    each = losses(engine, range(3))
    with engine.evaluating():
        found = losses(engine, range(3))
    assert found == pytest.approx(each, rel=1e-4 if "autocast" in placement else 2e-6)
    if placement in FP32:
        built = families.build("llama", "tiny", SIZES)
        total, weight = built.loss(engine.module, batch(1))
        assert each[1] == pytest.approx(float(total / weight), rel=1e-5)
    once, program = engine.gather_once, engine.program
    shapes = program.abstract_batch(batch(0))
    with program.set_mesh():
        inside = gathers(once.evaluate, once.shapes, shapes)
        assert inside < gathers(program.evaluate, engine.state, shapes)
    if "tensor" not in placement:
        assert inside == 0


@pytest.mark.parametrize("placement", AS_STORED)
def test_where_nothing_is_gathered_a_context_changes_nothing(placement):
    engine = engine_of(placement)
    each = losses(engine, range(2))
    with engine.evaluating():
        assert losses(engine, range(2)) == each
    assert engine.gather_once is None


def test_parameters_that_change_in_a_context_are_gathered_again():
    engine = engine_of("ZeRO 3")
    with engine.evaluating():
        found = [losses(engine, [0])]
        engine.train_batch(batch(7))
        found.append(losses(engine, [0]))
        engine.parameters = {path: 1.5 * x for path, x in engine.parameters.items()}
        found.append(losses(engine, [0]))
        engine.reset()
        found.append(losses(engine, [0]))
    assert found[3] == found[0] != found[1] != found[2]
    engine.train_batch(batch(7))
    assert losses(engine, [0]) == pytest.approx(found[1], rel=2e-6)
    engine.parameters = {path: 1.5 * x for path, x in engine.parameters.items()}
    assert losses(engine, [0]) == pytest.approx(found[2], rel=2e-6)


def live_bytes():
    def on_all(x):
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.devices())

    return sum(map(on_all, jax.live_arrays()))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_context_gathered_is_freed_at_its_end(fails):
    engine = engine_of("ZeRO 3")
    losses(engine, [0])
    before, full = live_bytes(), 8 * sum(x.nbytes for x in engine.parameters.values())
    try:
        with engine.evaluating():
            losses(engine, [0])
            assert live_bytes() - before == pytest.approx(full, rel=0.02)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert live_bytes() == pytest.approx(before, abs=1000)  # numbers of the last metrics


def test_parameters_that_do_not_fit_are_gathered_by_each_evaluation(monkeypatch):
    def engine_on(memory):
        monkeypatch.setattr("jaxspeed.engine.engine.device_limit", lambda program: memory)
        return tiny.engine(stage=3)

    assert engine_on(1 << 20).gather_once is not None
    engine = engine_on(2 << 10)
    with engine.evaluating():
        assert float(engine.eval_batch(tiny.batch())["loss"])
    assert engine.gather_once is None


def test_processes_decide_alike_by_the_least_memory_of_their_devices():
    engine = tiny.engine(stage=3)
    asked = []

    class Two:
        def all(self, what, work, combine):
            asked.append(work())
            return combine([work(), 2 << 10])

    engine._processes = Two()
    assert engine.gather_once is None
    assert asked and asked[0] > 1 << 20
