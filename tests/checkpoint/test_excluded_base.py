"""Checkpoints of what is trained alone: the frozen base is read from its folder again."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.checkpoint import Checkpointer, show, verify
from jaxspeed.cli.main import main
from jaxspeed.errors import CheckpointError, ConfigError
from tests.interop import folders

LORA = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj", "down"]}
NF4 = {"quantize": {"weights": "nf4"}}
TWO = jax.devices()[:2]


def engine(base, stage=3, devices=None, model=(), **more):
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.5},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "model": {"pretrained": str(base), **dict(model)},
        "lora": LORA,
        **more,
    }
    return jaxspeed.initialize(config=config, devices=devices or TWO)


def batch(seed=0):
    tokens = np.random.default_rng(seed).integers(0, folders.VOCAB, (8, 9))
    return {"tokens": tokens.astype(np.int32)}


def save(made, folder, **given):
    made.save_checkpoint(folder, **given)
    made.wait()


def names(folder):
    return set(show(folder).leaves)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


def values(made):
    return {path: np.asarray(x) for path, x in made.parameters.items()}


def moments(made):
    return made.program.layout.logical(made.state.opt)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folders.folder(folder, folders.LLAMA, folders.llama_tensors(), files=2)


FULL = pytest.mark.full


@pytest.fixture(scope="module", params=[pytest.param((), marks=FULL, id="plain"), NF4])
def saved(request, base, tmp_path_factory):
    """(engine after a step, its run's folder, whose checkpoint it made then, `model` of it)."""
    run = tmp_path_factory.mktemp("run")
    made = engine(base, model=request.param)
    made.train_batch(batch())
    save(made, run / "checkpoints")
    return made, run, request.param


@pytest.mark.sampled
def test_it_has_adapters_and_their_state_alone(saved):
    made, run, _ = saved
    found = names(run / "checkpoints")
    own = {n.split("/", 1)[1] for n in found if n.startswith(("params/", "ema/"))}
    assert own and all(path.startswith("lora/") for path in own)
    frozen = {row.path for row in made.placements if not row.leaf.trainable}
    assert {f"params/{path}" for path in frozen} == set(show(run / "checkpoints").excluded)
    assert verify(run / "checkpoints") == []


@pytest.mark.parametrize("is_fresh", [pytest.param(True, marks=FULL), False])
def test_training_goes_on_bit_by_bit(saved, base, is_fresh):
    """Also in an engine that has other parameters by then, whose base is read again."""
    made, run, model = saved
    other = engine(base, model=model)
    if not is_fresh:
        other.parameters = {
            p: x + 1 for p, x in values(other).items() if model == () or "lora" in p
        }
    for each in (made, other):
        each.load_checkpoint(run / "checkpoints")
        each.train_batch(batch(1))
    state = [(e.state.params, e.state.opt, e.state.ema) for e in (made, other)]
    assert_equal(*state)


@pytest.mark.sampled
def test_another_mesh_and_stage_restore_it(saved, base):
    made, run, model = saved
    made.load_checkpoint(run / "checkpoints")
    other = engine(base, 1, jax.devices(), model, mesh={"data": 4, "tensor": 2})
    other.load_checkpoint(run / "checkpoints")
    assert_equal(values(other), values(made))
    assert_equal(moments(other), moments(made))


def test_frozen_parameters_that_are_in_place_are_not_read_again(saved, base, monkeypatch):
    from jaxspeed.interop.pretrained import FolderWeights

    made, run, model = saved
    other = engine(base, model=model)
    monkeypatch.setattr(FolderWeights, "read", None)
    other.load_checkpoint(run / "checkpoints")
    assert other.frozen_as_read
    other.train_batch(batch(1))
    other.load_checkpoint(run / "checkpoints")
    made.load_checkpoint(run / "checkpoints")
    assert_equal(other.state.params, made.state.params)


PEFT, EMA = (pytest.param([*words], marks=FULL) for words in (["--format", "peft"], ["--ema"]))
EXPORTS = [["--merge"], PEFT, EMA, []]


@pytest.mark.parametrize("words", EXPORTS)
def test_every_export_is_that_of_the_engine(saved, base, tmp_path, words):
    made, run, model = saved
    made.load_checkpoint(run / "checkpoints")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model": {"pretrained": str(base), **dict(model)}}))
    how = ["--config", str(config)] if words not in ([], ["--ema"]) else []
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run / "checkpoints"), str(out), *words, *how]) == 0
    if words == ["--merge"]:
        made.save_pretrained(tmp_path / "own", merge=True)
    elif words:
        made.save_adapter(tmp_path / "own")
    if words in ([], ["--ema"]):
        expected = {p: np.asarray(x) for p, x in made.parameters.items()}
        if words:
            expected |= {p: np.asarray(x) for p, x in made.ema_parameters.items()}
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
    else:
        name = "adapter_model" if "peft" in words else "model"
        expected = load_file(tmp_path / "own" / f"{name}.safetensors")
        found = load_file(out / f"{name}.safetensors")
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-6, err_msg=path)


def test_its_weights_start_a_run_of_all_parameters(saved, base):
    """From the same base; moments and step start anew, and nothing is called missing."""
    made, run, _ = saved
    made.load_checkpoint(run / "checkpoints")
    restored = Checkpointer(run / "checkpoints").restore(engine(base).program, weights_only=True)
    assert restored.notes == [] and restored.frozen_as_read
    lora = {p: x for p, x in values(made).items() if p.startswith("lora/")}
    assert_equal({path: restored.state.params[path] for path in lora}, lora)


def test_another_base_or_none_is_one_error(saved, tmp_path):
    _, run, model = saved
    moved = folders.folder(tmp_path / "moved", folders.LLAMA, folders.llama_tensors(), files=2)
    engine(moved, model=model).load_checkpoint(run / "checkpoints")  # the same files elsewhere
    tensors = folders.llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] + 1
    other = folders.folder(tmp_path / "other", folders.LLAMA, tensors, files=2)
    unlike = engine(other, model=model)
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=r"those of .*other are others: model-0000\d-of-"):
            unlike.load_checkpoint(run / "checkpoints", weights_only=weights_only)


@pytest.mark.sampled
def test_an_absent_base_is_one_error(base, tmp_path, capsys):
    gone = shutil.copytree(base, tmp_path / "base")
    made = engine(gone)
    save(made, tmp_path / "run")
    shutil.rmtree(gone)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "its frozen parameters were not saved, and cannot be read again" in error
    assert f"{gone}: no such folder" in error
    family = jaxspeed.initialize(
        config={
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.5},
            "model": {"family": "llama", "config": dict(made.program.source.model.config.__dict__)},
            "lora": LORA,
        },
        devices=TWO,
    )
    with pytest.raises(CheckpointError, match=r"set model.pretrained to that folder"):
        family.load_checkpoint(tmp_path / "run")
    save(family, tmp_path / "family")  # drawn: it could not be read again
    assert "params/embed/table" in names(tmp_path / "family")
    with pytest.raises(CheckpointError, match=r"exclude_frozen_parameters: .* not read from"):
        family.save_checkpoint(tmp_path / "family", exclude_frozen_parameters=True)


def test_a_base_that_was_changed_is_saved(base, tmp_path, caplog):
    made = engine(base)
    made.parameters = {"norm/scale": np.zeros(folders.EMBED, np.float32)}
    save(made, tmp_path / "changed")
    assert "checkpoints have the frozen parameters too: they were assigned" in caplog.text
    other = engine(base)
    other.load_checkpoint(tmp_path / "changed")
    assert not np.asarray(other.parameters["norm/scale"]).any()
    save(other, tmp_path / "again")
    assert "params/norm/scale" in names(tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"exclude_frozen_parameters: .* were assigned"):
        other.save_checkpoint(tmp_path / "again", exclude_frozen_parameters=True)


def test_the_config_and_the_call_decide(base, tmp_path):
    with_base = engine(base, checkpoint={"exclude_frozen_parameters": False})
    save(with_base, tmp_path / "a")
    assert "params/embed/table" in names(tmp_path / "a")
    save(with_base, tmp_path / "b", exclude_frozen_parameters=True)
    assert "params/embed/table" not in names(tmp_path / "b")
    save(engine(base), tmp_path / "c", exclude_frozen_parameters=False)
    assert "params/embed/table" in names(tmp_path / "c")
    with pytest.raises(
        ConfigError, match=r"checkpoint.exclude_frozen_parameters: .* would be lost"
    ):
        jaxspeed.initialize(
            config={
                "train_batch_size": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "model": {"family": "gpt2", "preset": "tiny"},
                "checkpoint": {"exclude_frozen_parameters": True},
            }
        )


LAST = {"lora": None, "trainable": ["blocks[-1:]/**", "norm/**"]}


@pytest.mark.sampled
def test_of_a_stack_the_trained_layers_are_saved(base, tmp_path):
    given = {**LAST, "checkpoint": {"exclude_frozen_parameters": True}, "bf16": {"enabled": True}}
    made = engine(base, **given)
    made.train_batch(batch())
    save(made, tmp_path / "run")
    assert "params/blocks/mlp/up/kernel/[2:3]" in names(tmp_path / "run")
    assert not any(n.startswith("params/embed") for n in names(tmp_path / "run"))
    other = engine(base, 1, mesh={"tensor": 2}, **given)
    other.load_checkpoint(tmp_path / "run")
    assert_equal(values(other), values(made))
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for path, x in values(made).items():
        np.testing.assert_array_equal(found[path].astype(np.float32), x.astype(np.float32))
    started = engine(base, **given)
    started.load_checkpoint(tmp_path / "run", weights_only=True)
    assert_equal(values(started), values(made))
    every = engine(base, lora=None)
    with pytest.raises(CheckpointError, match=r"of stacked layers it has only .*\[2:3\]"):
        every.load_checkpoint(tmp_path / "run", weights_only=True)
    more = engine(base, **{**given, "trainable": [*LAST["trainable"], "embed/**"]})
    with pytest.raises(CheckpointError, match=r"has no params/embed/table .*, which was frozen"):
        more.load_checkpoint(tmp_path / "run")
