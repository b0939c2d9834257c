"""A step kept in a file: the same losses without compiling it, and never another program."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import compile_for, refuse_missing
from jaxspeed.train.aot_step import MAGIC, OPTIONS, Identity, identity_of, load, read_identity
from jaxspeed.train.aot_step import write as write_step
from jaxspeed.train.build import build_program
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import resolve_model
from tests.cli.planning import plan
from tests.planner import jobs
from tests.planner.test_compiling import needs_libtpu
from tests.support.covering import covering

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {
        "family": "gpt2",
        "config": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "dropout": 0.1,
        },
    },
    "data": {"source": "synthetic", "seq_len": 32, "document_masks": False},
    "train_batch_size": 16,
    "bf16": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "run": {"compilation_cache": False},
}


def process(*words, **more):
    """Python in a process of its own, which chooses its own devices."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env={**kept, **more}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(config, *executables, **more):
    """What each of the runs came to; an empty name is for one that compiles as always."""
    words = ("-m", "tests.engine.starting", json.dumps(config), "4", *map(str, executables))
    lines = process(*words, **more).splitlines()
    return [json.loads(line) for line in lines[-len(executables) :]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A file that the command line wrote, for 8 devices."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = (folder / "config.json", "--target", "cpu:8", "--compile", "--json")
    path = folder / "step.exe"
    told = json.loads(plan(*words, "--keep", path).stdout)
    compiled, outcome = told["compiled"], told["outcome"]
    assert outcome["kept"] == str(path) and outcome["fits"] and outcome["refused"] is None
    assert outcome["seconds"] > compiled["compile_seconds"] > 0
    return path


@pytest.mark.sampled
def test_the_losses_are_the_same_bit_for_bit_and_no_step_is_compiled(kept, tmp_path):
    loose = Path(shutil.copy(kept, tmp_path))
    loose.chmod(0o666)
    trusting = changed(("run", "trust_executable"), True)
    from_file, trusted, compiled = started(trusting, kept, loose, "")
    assert from_file["losses"] == trusted["losses"] == compiled["losses"]
    assert len(set(compiled["losses"])) == 4
    assert "jit(step)" in compiled["compiled"] or "step" in compiled["compiled"]
    for each in (from_file, trusted):
        assert not [name for name in each["compiled"] if "step" in name]
        assert each["warned"] == []


OTHERS = {
    "none": (("train_batch_size",), 16, set()),
    "another rate": (("optimizer", "params", "lr"), 3e-3, {"program"}),
    "another stage": (("zero_optimization", "stage"), 2, {"program"}),
    "another mesh": (("mesh",), {"tensor": 2}, {"mesh", "program"}),
    "another batch": (("train_batch_size",), 8, {"batch", "program"}),
}


def changed(places, value):
    config = copy.deepcopy(CONFIG)
    *within, last = places
    section = config
    for place in within:
        section = section[place]
    section[last] = value
    return config


@pytest.mark.default_cases("none", "another rate", "another batch")
@pytest.mark.parametrize("name", covering(OTHERS, OTHERS.keys() - {"another stage"}))
def test_another_step_is_known_to_be_another(kept, name):
    places, value, differs = OTHERS[name]
    config = Config.load(changed(places, value))
    program = build_program(config, *resolve_model(config))
    batch = {"tokens": jax.ShapeDtypeStruct((program.batch.train, 33), jnp.int32)}
    lowered = program.step.trace(program.state, program.abstract_batch(batch)).lower()
    said = read_identity(kept).differences(identity_of(lowered, program.devices, program.mesh))
    # The tests' own process has other flags and options.
    assert {each.split()[0] for each in said} - {"flags", "options"} == differs


@pytest.mark.full
@pytest.mark.parametrize(
    "differs,config,more",
    [
        ("program", changed(("optimizer", "params", "lr"), 3e-3), {}),
        ("flags", CONFIG, {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=false"}),
        ("options", CONFIG, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}),
    ],
    ids=["program", "flags", "options"],
)
def test_for_another_step_the_differences_are_logged_and_it_is_compiled(
    kept, differs, config, more
):
    (found,) = started(config, kept, **more)
    (said,) = found["warned"]
    assert f"which is compiled now: {differs} (" in said
    assert [each for each in found["compiled"] if "step" in each]


def test_every_compiler_option_is_known_to_jax(kept):
    options = read_identity(kept).options
    assert options == {name: str(jax.config.values[name]) for name in OPTIONS}


def test_what_it_was_compiled_for_can_be_read_without_loading_it(kept):
    found = read_identity(kept)
    assert found.mesh["data"] == 8 and len(found.devices) == 8
    assert found.devices[0].startswith("cpu") and found.versions["jax"] == jax.__version__
    assert found.differences(found) == []


def test_each_thing_that_differs_is_named():
    one = Identity(
        {"x": "f32[8]"}, "a" * 64, ("cpu 0",), {"data": 1}, {"jax": "1"}, "x86", (), {"o": "1"}
    )
    two = Identity(
        {"x": "f32[4]"}, "b" * 64, ("cpu 1",), {"data": 2}, {"jax": "2"}, "arm", ("f",), {"o": "0"}
    )
    said = one.differences(two)
    assert [each.split()[0] for each in said] == [
        "batch", "program", "devices", "mesh", "versions", "machine", "flags", "options",
    ]  # fmt: skip
    assert "jax 1 there, jax 2 here" in said[4]


def write(path, how, kept):
    whole = kept.read_bytes()
    made = {
        "cut off": whole[:-1],
        "changed": whole[:-9] + b"x" + whole[-8:],
        "of another kind": b"\x80\x04N.",
        "without a head": MAGIC + b"{}\n",
    }
    if how != "not there":
        path.write_bytes(made[how])


BROKEN = {
    "not there": "No such file",
    "cut off": "damaged",
    "changed": "damaged",
    "of another kind": "holds no executable",
    "without a head": "damaged",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_none_is_refused_before_anything_is_made(kept, how, tmp_path, monkeypatch):
    path = tmp_path / "step.exe"
    write(path, how, kept)
    monkeypatch.setattr(Program, "init", None)
    with pytest.raises(ConfigError, match=BROKEN[how]):
        jaxspeed.initialize(config=CONFIG, executable=path)


def test_nothing_of_a_damaged_file_is_unpickled(kept, tmp_path, monkeypatch):
    """Its digest is compared first; whom a file is from, only its owner knows."""

    def loads(*_, **__):
        raise AssertionError("unpickled")

    path = tmp_path / "step.exe"
    write(path, "changed", kept)
    monkeypatch.setattr(pickle, "Unpickler", loads)
    with pytest.raises(ConfigError, match="damaged"):
        jaxspeed.initialize(config=CONFIG, executable=path)


OTHERS_FILES = {
    "theirs": (65534, 0o644, r"owned by another user \(uid 65534\)"),
    "group": (None, 0o664, r"written by other users \(mode 664\)"),
    "all": (None, 0o602, r"written by other users \(mode 602\)"),
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A file with a pickle in it, written where new files are for all."""
    monkeypatch.setattr(serialize_executable, "serialize", lambda compiled: (compiled, None, None))
    path, umask = tmp_path / "step.exe", os.umask(0)
    try:
        write_step(path, pickle.dumps(0), Identity({}, "", (), {}, {}, "", (), {}))
    finally:
        os.umask(umask)
    return path


def test_no_other_user_may_change_a_file_that_is_written(written):
    assert written.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("whose", OTHERS_FILES)
def test_a_file_that_others_could_have_written_is_refused_unless_trusted(
    written, monkeypatch, whose
):
    """Whoever writes the file runs code as the user who loads it."""
    owner, mode, problem = OTHERS_FILES[whose]
    written.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(written, owner, owner)
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", None)
    lowered = jax.jit(lambda: 0).lower()
    for ask in (lambda: read_identity(written), lambda: load(written, lowered, jax.devices())):
        with pytest.raises(ConfigError, match=problem) as caught:
            ask()
        assert "run.trust_executable" in str(caught.value)
    assert read_identity(written, trusted=True).program == ""


def test_a_parameter_server_has_no_one_step_to_keep():
    with pytest.raises(ConfigError, match="step is many programs"):
        Config.load(
            {
                "train_batch_size": 24,
                "parallel": {"data_reduction": "parameter_server", "servers": 2},
                "run": {"executable": "step.exe"},
            }
        )


def test_for_absent_gpus_it_says_why_not():
    with pytest.raises(ConfigError, match="jax cannot serialize it"):
        refuse_missing(target_of("h100:8"), keep=True)


@pytest.mark.full
@needs_libtpu
def test_for_absent_tpus_a_step_is_kept_with_what_it_is_for(tmp_path):
    path = tmp_path / "step.exe"
    outcome = compile_for(target_of("v5e:2x2"), jobs.small, keep=path)
    found = read_identity(path)
    assert outcome.kept == str(path) and path.stat().st_size > 10_000
    assert found.devices[0].startswith("tpu TPU v5 lite") and len(found.devices) == 4
    assert found.machine == "" and "libtpu" in found.versions and found.flags == ()
