"""The moving average of the weights: read, put in their place, and exported."""

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.interop import HFForm, MappingTable, TensorRule, export
from tests.checkpoint import states
from tests.engine import tiny
from tests.support.covering import covering

DECAY = 0.6
RULES = [TensorRule(f"{n}.weight", f"{n}/kernel") for n in ("wide", "narrow", "head")]
RULES += [TensorRule(f"{n}.bias", f"{n}/bias") for n in ("wide", "narrow", "head")]
SETTINGS = {
    "ZeRO 3": {"stage": 3},
    "ZeRO 2, bf16": {"stage": 2, "bf16": {"enabled": True}},
    "tensor 2": {"stage": 3, "mesh": {"tensor": 2}},
    "offloaded": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": True},
    },
    "one device": {"devices": 1},
    "servers": {"devices": 3, "parallel": {"data_reduction": "parameter_server"}},
}


def engine(ema_decay=DECAY, **more):
    section = {"type": "SGD", "params": {"lr": 0.5}, "ema_decay": ema_decay}
    return states.engine(optimizer=section, **more)


def arrays(values):
    return {path: np.array(x, np.float32) for path, x in values.items()}


@pytest.mark.default_cases("ZeRO 3")
@pytest.mark.parametrize("name", covering(SETTINGS, ["ZeRO 3", "offloaded"]))
def test_the_averages_are_unpadded_and_may_take_the_parameters_place(name, tmp_path):
    trained = engine(**SETTINGS[name])
    average = arrays(trained.parameters)
    for step in range(3):
        states.steps(trained, step, 1)
        new = arrays(trained.parameters)
        average = optax.incremental_update(new, average, 1 - DECAY)
    memory = "pinned_host" if name == "offloaded" else "device"
    found = trained.ema_parameters
    assert {x.sharding.memory_kind for x in found.values()} == {"device"}
    for path, value in arrays(average).items():
        np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-7)
    assert any(abs(average[path] - new[path]).max() > 1e-3 for path in new)
    found, form = arrays(found), HFForm(MappingTable(RULES))
    trained.save_pretrained(tmp_path / "out", form=form, ema=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for path, value in found.items():
        written = path.replace("/", ".").replace("kernel", "weight")
        np.testing.assert_array_equal(exported[written], value)
    states.assert_same(arrays(trained.parameters), new)  # they are as they were
    batch = tiny.batch(8, seed=9)
    if name == "tensor 2":
        trained.parameters = trained.ema_parameters
    else:
        trained.state = trained.averaged
    assert {x.sharding.memory_kind for x in jax.tree.leaves(trained.state.master)} <= {memory}
    states.assert_same(arrays(trained.parameters), found)
    h = batch["x"]
    for layer in ("wide", "narrow"):
        h = np.tanh(h @ found[f"{layer}/kernel"] + found[f"{layer}/bias"])
    error = (h @ found["head/kernel"] + found["head/bias"])[:, 0] - batch["y"]
    tolerance = 2e-2 if "bf16" in SETTINGS[name] else 1e-5
    loss = float(trained.eval_batch(batch)["loss"])
    assert loss == pytest.approx(np.mean(error**2), rel=tolerance)


def test_what_is_frozen_is_its_own_average(tmp_path):
    section = {"type": "SGD", "params": {"lr": 0.5}, "ema_decay": DECAY}
    trained = jaxspeed.initialize(
        states.Awkward,
        tiny.squared_error,
        tiny.config(3, optimizer=section),
        trainable=["head/**"],
    )
    states.steps(trained, 0, 2)
    assert trained.state.ema.keys() == {"head/kernel", "head/bias"}
    found, now = arrays(trained.ema_parameters), arrays(trained.parameters)
    assert found.keys() == now.keys()
    same = {path for path in now if np.array_equal(found[path], now[path])}
    assert same == {path for path in now if not path.startswith("head")}
    trained.save_checkpoint(tmp_path / "run")
    trained.close()
    export(tmp_path / "run", tmp_path / "out", ema=True)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    states.assert_same({path: exported[path] for path in found}, found)


def test_without_an_average_each_way_to_it_is_refused_with_the_key(tmp_path):
    trained = engine(ema_decay=None)
    for use in (
        lambda: trained.ema_parameters,
        lambda: trained.save_pretrained(tmp_path / "out", ema=True),
    ):
        with pytest.raises(jaxspeed.ConfigError, match=r"optimizer\.ema_decay: not set"):
            use()
    trained.save_checkpoint(tmp_path / "run")
    trained.close()
    with pytest.raises(jaxspeed.CheckpointError, match=r"optimizer\.ema_decay was not set"):
        export(tmp_path / "run", tmp_path / "out", ema=True)
    assert not (tmp_path / "out").exists()
