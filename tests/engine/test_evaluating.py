"""Several evaluations with the same parameters, which are gathered once for all of them."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import models as families
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.engine.gathered import Gathered
from jaxspeed.train.gather_once import GatherOnce
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
FP32 = {"ZeRO 3", "ZeRO 3, tensor 2", "ZeRO 3, rings", "ZeRO 3, remat"}
SIZES = {"num_hidden_layers": 2, "vocab_size": 250}  # not a multiple of the devices
WIDE = 512


def init_wide(key):
    keys = jax.random.split(key, 3)
    shapes = {"in": (tiny.FEATURES, WIDE), "between": (WIDE, WIDE), "out": (WIDE, 1)}
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def apply_wide(params, x):
    return jnp.tanh(jnp.tanh(x @ params["in"]) @ params["between"]) @ params["out"]


def wide_engine():
    """Its parameters are large beside the numbers of a step, and three."""
    return tiny.engine((init_wide, apply_wide), stage=3)


def losses(engine, seeds):
    return [float(engine.eval_batch(tiny.batch(16, seed))["loss"]) for seed in seeds]


def gathers(evaluate, state, shapes):
    return evaluate.lower(state, shapes).compile().as_text().count(" all-gather(")


@pytest.mark.default_cases("offloaded")
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
    config = {
        "model": {"family": "llama", "preset": "tiny", "config": SIZES},
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "run": {"seed": 1, "compilation_cache": False},
        **GATHERED[placement],
    }
    engine = jaxspeed.initialize(config=config)

    def batch(seed):
        return {"tokens": np.random.default_rng(seed).integers(0, 250, (16, 17))}

    def losses():
        return [float(engine.eval_batch(batch(seed))["loss"]) for seed in range(3)]

    each = losses()
    with engine.evaluating():
        found = losses()
    assert found == pytest.approx(each, rel=1e-4 if "autocast" in placement else 2e-6)
    if placement in FP32:
        built = families.build("llama", "tiny", SIZES)
        graph, state = nnx.split(engine.module)
        plain = jax.jit(lambda state, batch: built.loss(nnx.merge(graph, state), batch))
        total, weight = plain(jax.device_put(state, jax.devices()[0]), batch(1))
        assert each[1] == pytest.approx(float(total / weight), rel=1e-5)
    once, program = engine.gather_once, engine.program
    shapes = program.abstract_batch(batch(0))
    with program.set_mesh():
        inside = gathers(once.evaluate, once.shapes, shapes)
        assert inside < gathers(program.evaluate, engine.state, shapes)
    if "tensor" not in placement:
        assert inside == 0


@pytest.mark.default_cases("ZeRO 2")
@pytest.mark.parametrize("placement", AS_STORED)
def test_where_nothing_is_gathered_a_context_changes_nothing(placement):
    engine = tiny.engine(**AS_STORED[placement])
    each = losses(engine, range(2))
    with engine.evaluating():
        assert losses(engine, range(2)) == each
    assert engine.gather_once is None


def test_parameters_that_change_in_a_context_are_gathered_again():
    def change(engine):
        engine.parameters = {path: 1.5 * np.asarray(x) for path, x in engine.parameters.items()}

    engine = tiny.engine(tiny.PAIR, stage=3)
    with engine.evaluating():
        found = [losses(engine, [0])]
        engine.train_batch(tiny.batch(seed=7))
        found.append(losses(engine, [0]))
        change(engine)
        found.append(losses(engine, [0]))
        engine.reset()
        found.append(losses(engine, [0]))
    assert found[3] == found[0] != found[1] != found[2]
    engine.train_batch(tiny.batch(seed=7))
    assert losses(engine, [0]) == pytest.approx(found[1], rel=2e-6)
    change(engine)
    assert losses(engine, [0]) == pytest.approx(found[2], rel=2e-6)


def live_bytes():
    def on_all(x):
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.devices())

    return sum(map(on_all, jax.live_arrays()))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_context_gathered_is_freed_at_its_end(fails):
    engine = wide_engine()
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
        monkeypatch.setattr("jaxspeed.engine.gathered.device_limit", lambda program: memory)
        return tiny.engine(stage=3)

    assert engine_on(1 << 20).gather_once is not None
    engine = engine_on(2 << 10)
    with engine.evaluating():
        assert float(engine.eval_batch(tiny.batch())["loss"])
    assert engine.gather_once is None


def test_a_context_within_another_ends_alone():
    engine = wide_engine()
    with engine.evaluating():
        with engine.evaluating():
            losses(engine, [0])
        kept = live_bytes()
        assert engine._gathered.now() is engine.gather_once
        losses(engine, [0])
        assert live_bytes() == pytest.approx(kept, abs=1000)
    assert live_bytes() < kept / 2


def test_a_checkpoint_is_loaded_into_the_memory_of_what_was_gathered(tmp_path, monkeypatch):
    engine = wide_engine()
    engine.save_checkpoint(tmp_path)
    engine.wait()
    found, load = [], engine._saver.load
    monkeypatch.setattr(
        engine._saver, "load", lambda *args: (found.append(live_bytes()), load(*args))[1]
    )
    before = live_bytes()
    with engine.evaluating():
        (loss,) = losses(engine, [0])
        engine.load_checkpoint(tmp_path)
        assert losses(engine, [0]) == [loss]
    assert found == [pytest.approx(before, rel=0.02)]


class Two:
    """This process and one that does `other`."""

    def __init__(self, other):
        self.other, self.order = other, []

    def all(self, what, work, combine):
        self.order.append(what)
        return combine([work(), self.other])

    def wait(self, what):
        self.order.append(what)


def test_processes_decide_alike_by_the_least_memory_of_their_devices():
    engine = tiny.engine(stage=3)
    engine._gathered._processes = Two(1 << 30)
    assert engine.gather_once.memory == 1 << 30
    engine = tiny.engine(stage=3)
    engine._gathered._processes = Two(2 << 10)
    assert engine.gather_once is None


@pytest.mark.parametrize("before", [False, True])
def test_processes_wait_for_what_compiles_before_they_gather(before, monkeypatch):
    """Otherwise the first waits in the gather for one that compiles: Gloo gives up after 30 s."""
    engine = tiny.engine(stage=3)
    if before:  # the same shapes, but another program
        engine.eval_batch(tiny.batch())
    engine._call.processes = two = Two(None)
    gather = GatherOnce.__call__
    monkeypatch.setattr(
        GatherOnce, "__call__", lambda *args: (two.order.append("gather"), gather(*args))[1]
    )
    assert engine.gather_once is not None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with engine.evaluating():
        engine.eval_batch(tiny.batch())
        engine.eval_batch(tiny.batch())
    assert two.order == ["compiling", "gather"]


class Device:
    platform = "gpu"

    def __init__(self, process, memory):
        self.process_index, self.memory = process, memory

    def memory_stats(self):
        if self.process_index != jax.process_index():
            raise jax.errors.JaxRuntimeError("only supported for addressable devices")
        return self.memory and {"bytes_limit": self.memory}


@pytest.mark.parametrize(("memory", "expected"), [(80 << 30, 80 << 30), (None, 0)])
def test_the_memory_is_that_of_a_device_of_this_process(memory, expected):
    """Not of the mesh's first device, which reports nothing elsewhere; and not the host's."""
    devices = (Device(1, 1), Device(0, memory))
    mesh = SimpleNamespace(devices=np.array(devices))
    program = SimpleNamespace(devices=devices, mesh=mesh)
    gathered = Gathered(program, Processes())
    assert gathered.once(program).memory == expected
