"""A step of several phases: a device program, host work and another program, from outside."""

import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.engine import Engine
from jaxspeed.train.phases import BATCH, METRICS, STATE, SUMS, VARIABLES, PhasedStep, StepPhase
from jaxspeed.user_models.batches import with_extra
from tests.engine import tiny


def gradients_of(program):
    """`(state, batch) -> (sums, variables)`."""

    def gradients(state, batch):
        variables, batch = with_extra(state.variables, batch)
        sources, scale = state.sources(program.table), state.loss_scale.scale
        return program.gradients(sources, variables, batch, state.step, scale, state.ring_errors)

    return jax.jit(program.in_mesh(gradients))


def on_host(factor):
    """Host work on the gradients: each is read as a numpy array, and sent back."""

    def scaled(sums):
        grads = {
            path: jax.device_put(factor * np.asarray(x), x.sharding)
            for path, x in sums.grads.items()
        }
        return sums._replace(grads=grads)

    return scaled


def three_phases(factor):
    def phases(program):
        update = jax.jit(
            program.in_mesh(program.update),
            donate_argnums=0,
            out_shardings=(program.shardings, None),
        )
        reads = (STATE, SUMS, VARIABLES)
        return (
            StepPhase(
                "gradients",
                gradients_of(program),
                (STATE, BATCH),
                (SUMS, VARIABLES),
                mesh=program.mesh,
            ),
            StepPhase("scaling", on_host(factor), (SUMS,), (SUMS,)),
            StepPhase("update", update, reads, (STATE, METRICS), (STATE,), mesh=program.mesh),
        )

    return phases


def divided(stage, phases, **more):
    """An engine whose step has these phases, and one that fuses all."""
    fused = tiny.engine(stage=stage, train_micro_batch_size_per_gpu=2, **more)
    program = replace(fused.program, phases_of=phases)
    return Engine(program, program.init(0)), fused


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


@pytest.mark.default_cases("3-more1")
@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (3, {**ADAM, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}})],
)
def test_a_step_of_three_phases_trains_as_one_program(stage, more):
    engine, fused = divided(stage, three_phases(1.0), **more)
    samples = engine.program.batch.train
    for seed in range(3):
        batch = tiny.batch(samples, seed)
        ours, theirs = engine.train_batch(batch), fused.train_batch(batch)
        for name in ("loss", "grad_norm", "weight"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)
    for path, value in fused.parameters.items():
        np.testing.assert_allclose(engine.parameters[path], value, rtol=1e-5, atol=1e-6)


def test_check_and_compiled_show_the_phases():
    engine, fused = divided(1, three_phases(1.0), **ADAM)
    batch = tiny.batch(16)
    report = engine.compiled(batch)
    assert report.phase == "gradients" and list(report.others) == ["update"]
    assert list(report.on_host) == ["scaling"]
    read, written = report.on_host["scaling"]
    gradients = sum(4 * x.size for x in fused.parameters.values())
    assert read == written and gradients <= read <= gradients + 64
    assert "on the host, scaling: reads" in str(report)
    assert report.figures()["on_host"] == {"scaling": (read, written)}
    assert "on_host" not in fused.compiled(batch).figures()
    found = engine.check(batch)
    assert found.ok, str(found)
    engine.train_batch(batch)  # check donated nothing
    halved, _ = divided(1, three_phases(0.5), **ADAM)
    wrong = halved.check(batch)
    assert not wrong.ok and wrong.gradient == pytest.approx(0.5, rel=1e-3)


def test_a_phase_before_the_step_adds_arrays_to_the_batch():
    def of_targets(model, batch):
        error = jnp.square(model(batch["x"])[:, 0] - batch["y"])
        return (error * batch["w"]).sum(), batch["w"].sum()

    def weighed(batch):
        return {**batch, "w": 1 + jnp.abs(batch["y"])}

    def phases(program):
        names = (STATE, BATCH), (STATE, METRICS), (STATE,)
        weigh = jax.jit(program.in_mesh(weighed))
        return (
            StepPhase("weights", weigh, (BATCH,), (BATCH,), mesh=program.mesh),
            StepPhase("step", program.step, *names, mesh=program.mesh),
        )

    engine, fused = divided(1, phases, loss_fn=of_targets)
    batch = tiny.batch(16)
    expected = {**batch, "w": 1 + np.abs(batch["y"])}
    ours, theirs = engine.train_batch(batch), fused.train_batch(expected)
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
    found = engine.check(batch)
    assert found.ok, str(found)


def test_host_work_runs_beside_later_phases():
    later = threading.Event()

    def slow(x):
        assert later.wait(10), "the phase after it did not run meanwhile"
        return np.asarray(x) + 1

    def marked(x):
        later.set()
        return 3 * x

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    step = PhasedStep(
        [
            StepPhase("slow", slow, (BATCH,), ("a",)),
            StepPhase("marked", marked, (BATCH,), ("b",), mesh=mesh),
            StepPhase(
                "both", lambda a, b, x: (x, a + b), ("a", "b", STATE), (STATE, METRICS), (), mesh
            ),
        ]
    )
    _, metrics = step(jnp.ones(()), jnp.ones(()))
    assert metrics == 5


def test_host_work_that_nothing_reads_is_waited_for_and_its_error_is_raised():
    def broken(x):
        raise OSError("no space")

    step = PhasedStep(
        [
            StepPhase("write", broken, (STATE,), ("written",)),
            StepPhase("rest", lambda x: (x, x), (STATE,), (STATE, METRICS), mesh=jax.devices()[0]),
        ]
    )
    step(jnp.ones(()), None)
    with pytest.raises(OSError, match="no space"):
        step.wait()


def test_a_value_is_not_donated_while_host_work_reads_it():
    seen = []

    def slow(x):
        threading.Event().wait(0.2)
        seen.append(float(np.asarray(x).sum()))
        return x

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    taken = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=0)
    step = PhasedStep(
        [
            StepPhase("read", slow, (STATE,), ("copy",), shapes=lambda x: x),
            StepPhase("update", taken, (STATE,), (STATE, METRICS), (STATE,), mesh),
        ]
    )
    step(jnp.ones(8), None)
    assert seen == [8.0]
