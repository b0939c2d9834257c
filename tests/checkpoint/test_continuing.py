"""A restored run goes on as the one that was never stopped, bit for bit."""

import jax
import numpy as np
import pytest

from jaxspeed.checkpoint import Checkpointer
from tests.checkpoint import states

KINDS = {
    "fp32": {"stage": 2},
    "fp16 with a dynamic scale": {
        "stage": 3,
        "fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2},
    },
    "bf16 and a moving average": {
        "stage": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}, "ema_decay": 0.9},
    },
    "dropout and batch statistics": {"stage": 3, "model": states.Stateful},
}


@pytest.mark.default_cases("fp16 with a dynamic scale")
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_is_bitwise_the_unbroken_one(tmp_path, kind):
    unbroken = states.engine(**KINDS[kind])
    states.steps(unbroken, 0, 4)
    unbroken.save_checkpoint(tmp_path)
    # The steps begin while it is written, and use up the state that is saved.
    losses = states.steps(unbroken, 4, 3)
    unbroken.close()
    restored = states.engine(**KINDS[kind])
    restored.load_checkpoint(tmp_path)
    assert states.steps(restored, 4, 3) == losses
    states.assert_same(states.held(restored), states.held(unbroken))


def test_a_save_writes_the_state_of_its_call_whatever_steps_follow(tmp_path):
    engine = states.engine(stage=0)
    saver = Checkpointer(tmp_path)
    expected = {}
    for i in range(6):
        expected[saver.save(engine.program, engine.state)] = states.held(engine)
        states.steps(engine, i, 1)
    saver.close()
    for tag, values in expected.items():
        engine.load_checkpoint(tmp_path, tag)
        states.assert_same(states.held(engine), values)


def test_a_save_of_replicated_arrays_compiles_one_program(tmp_path):
    """Orbax would slice each for the devices that write it: a program per array and slice."""
    compiled = []

    def heard(event, _, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name"))

    engine = states.engine(stage=0)
    states.steps(engine, 0, 1)
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        engine.save_checkpoint(tmp_path)
        engine.close()
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    assert len(compiled) == 1 and "copies_of" in compiled[0], compiled


def test_client_state_and_files_come_back_as_they_were(tmp_path):
    engine = states.engine()
    saver = Checkpointer(tmp_path)
    client = {"epoch": 3, "best": 0.25, "seen": [1, 2, {"a": None}], "name": "müde", "on": True}
    files = {"tokenizer.json": bytes(range(256)), "empty": b""}
    tag = saver.save(engine.program, engine.state, client_state=client, files=files)
    restored = saver.restore(engine.program)
    saver.close()
    assert (restored.client_state, restored.files, restored.tag) == (client, files, tag)
    assert saver.files(tag) == files
    assert (restored.step, restored.notes) == (0, [])


def test_loading_from_an_empty_folder_returns_none_and_says_so(tmp_path, caplog):
    engine = states.engine()
    before = states.held(engine)
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert engine.load_checkpoint(tmp_path / "none") == (None, {})
    assert f"{tmp_path / 'none'} holds no checkpoint: the state stays as it is" in caplog.text
    (tmp_path / "step-00000001.writing").mkdir()  # killed within its very first save
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert Checkpointer(tmp_path).is_empty()
    states.assert_same(states.held(engine), before)


def test_saving_twice_under_one_tag_keeps_the_second(tmp_path):
    engine = states.engine()
    engine.save_checkpoint(tmp_path, "best", {"which": 1})
    states.steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path, "best", {"which": 2})
    engine.wait()
    assert engine.load_checkpoint(tmp_path, "best") == ("best", {"which": 2})
    assert int(engine.state.step) == 1


def test_another_loss_scale_rule_reinitializes_its_scale_with_a_note(tmp_path):
    engine = states.engine(fp16={"enabled": True, "loss_scale": 64})
    states.steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.wait()
    dynamic = states.engine(fp16={"enabled": True, "initial_scale_power": 10})
    restored = Checkpointer(tmp_path).restore(dynamic.program)
    assert float(restored.state.loss_scale.scale) == 1024
    assert len(restored.notes) == 1 and "loss scale is reinitialized" in restored.notes[0]


def test_parameters_without_fp32_masters_are_rounded_with_a_note(tmp_path):
    engine = states.engine()
    engine.save_checkpoint(tmp_path)
    engine.wait()
    narrow = states.engine(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    restored = Checkpointer(tmp_path).restore(narrow.program)
    assert all("was rounded from float32 to bfloat16" in note for note in restored.notes)
    assert len(restored.notes) == len(engine.parameters)
    value = np.asarray(restored.state.params["wide/kernel"])
    expected = np.asarray(engine.parameters["wide/kernel"]).astype(value.dtype)
    np.testing.assert_array_equal(value, expected)
