"""From a config to an engine: the ways to give one, its model, the cache, simulated devices."""

import json
import logging
import os
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jaxspeed.models import gpt2

import jaxspeed
from jaxspeed import Config, ConfigError, ModelError
from jaxspeed.engine.jax_setup import enable_compilation_cache
from jaxspeed.user_models.config_model import hidden_size_of
from tests.engine import tiny
from tests.engine.tiny import PAIR, Listed, squared_error

MLP = {"family": "mlp", "preset": "tiny"}


def as_json(config, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def as_yaml(config, folder):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


FORMS = {
    "dict": lambda config, folder: config,
    "json": as_json,
    "yaml": as_yaml,
    "config": lambda config, folder: Config.load(config),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_config_may_be_a_dict_a_path_or_a_config(form, tmp_path):
    given = FORMS[form](tiny.config(stage=2, gradient_accumulation_steps=2), tmp_path)
    engine = jaxspeed.initialize(PAIR, squared_error, given)
    assert engine.placements.stage == 2
    assert engine.program.batch.train == 16
    assert np.isfinite(engine.train_batch(tiny.batch(16))["loss"])


def test_a_config_that_names_a_model_is_enough():
    engine = jaxspeed.initialize(config=tiny.config(model=MLP))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 16)).astype(np.float32), rng.integers(0, 4, 8)
    losses = [float(engine.train_batch({"x": x, "y": y})["loss"]) for _ in range(10)]
    assert losses[-1] < losses[0]


def test_a_language_model_reads_tokens():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    model = {"family": "gpt2", "preset": "tiny", "config": sizes}
    engine = jaxspeed.initialize(config=tiny.config(model=model))  # test_honoured_keys.py trains
    tokens = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
    metrics = engine.eval_batch({"tokens": tokens})
    assert float(metrics["weight"]) == 64  # each token but the first of a row is predicted
    assert float(metrics["loss"]) == pytest.approx(np.log(32), rel=0.1)


def test_a_model_may_be_named_by_its_import_path():
    config = tiny.config(model={"factory": "tests.engine.tiny:Listed", "config": {"layers": 2}})
    engine = jaxspeed.initialize(loss_fn=squared_error, config=config)
    assert "blocks/1/linear/kernel" in engine.parameters
    assert "blocks/2/linear/kernel" not in engine.parameters
    assert np.isfinite(engine.train_batch(tiny.batch())["loss"])


class Sized(Listed):
    config = types.SimpleNamespace(text_config=types.SimpleNamespace(hidden_sizes=[8, 16]))


SIZED_LINEN = type("SizedLinen", (tiny.Linen,), {"config": types.SimpleNamespace(d_model=16)})()


@pytest.mark.parametrize("model", [Sized, SIZED_LINEN], ids=["nnx", "linen"])
def test_an_auto_threshold_is_ten_times_the_models_hidden_size(model):
    """As Hugging Face fills it in: of 160 elements, so that 8 x 16 is replicated, 16 x 16 not."""
    auto = {"stage": 3, "stage3_param_persistence_threshold": "auto"}
    engine = tiny.engine(model, zero_optimization=auto)
    spread = {x.shape: not x.sharding.is_fully_replicated for x in engine.parameters.values()}
    assert (spread[8, 16], spread[16, 16]) == (False, True)
    assert engine.config.given["zero_optimization"]["stage3_param_persistence_threshold"] == 160


def test_the_hidden_size_of_a_family_is_that_of_its_preset():
    section = {"family": "gpt2", "preset": "tiny"}
    find = hidden_size_of()
    assert find({"model": section}) == gpt2.PRESETS["tiny"].hidden_size
    assert find({"model": {**section, "config": {"hidden_size": 48}}}) == 48
    assert find({"model": {"family": "gpt3"}}) is find({}) is None
    assert hidden_size_of(PAIR)({"model": section}) is None


BAD_SECTIONS = {
    "unknown family": ({"family": "gpt3"}, ConfigError, "gpt3.*did you mean 'gpt2'"),
    "unknown preset": ({"family": "gpt2", "preset": "tny"}, ConfigError, "did you mean 'tiny'"),
    "unknown size": ({"family": "gpt2", "config": {"hiden_size": 8}}, ConfigError, "hidden_size"),
    "no such module": ({"factory": "nowhere.at_all:Net"}, ConfigError, "cannot be imported"),
    "no such name": ({"factory": "tests.engine.tiny:Absent"}, ConfigError, "cannot be imported"),
    "no name": ({"factory": "tests.engine.tiny"}, ConfigError, "factory"),
    "a size that it lacks": (
        {"factory": "tests.engine.tiny:Listed", "config": {"depth": 2}},
        ModelError,
        "unexpected keyword argument 'depth'",
    ),
}


@pytest.mark.parametrize("case", BAD_SECTIONS)
def test_a_model_section_that_names_nothing_is_refused(case):
    section, kind, message = BAD_SECTIONS[case]
    with pytest.raises(kind, match=message):
        jaxspeed.initialize(loss_fn=squared_error, config=tiny.config(model=section))


def test_a_factory_by_import_path_needs_a_loss():
    with pytest.raises(ModelError, match="has no loss"):
        jaxspeed.initialize(config=tiny.config(model={"factory": "tests.engine.tiny:Listed"}))


def test_a_model_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="model: given twice"):
        jaxspeed.initialize(Listed, squared_error, tiny.config(model=MLP))


def test_a_subset_of_the_devices_may_be_used():
    engine = tiny.engine(PAIR, stage=3, devices=jax.devices()[4:6])
    assert engine.program.batch.train == 2
    metrics = engine.train_batch(tiny.batch(2))
    assert metrics["loss"].sharding.device_set == set(jax.devices()[4:6])


def test_the_file_of_the_step_is_the_one_that_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"step\.exe"):
        tiny.engine(PAIR, run={"executable": str(tmp_path / "step.exe")})


def test_a_file_that_others_can_write_is_read_only_if_it_is_trusted(tmp_path):
    path = tmp_path / "step.exe"
    path.write_text("nothing to run")
    path.chmod(0o664)
    for trusted, problem in ((False, r"mode 664.*run\.trust_executable"), (True, "no executable")):
        with pytest.raises(ConfigError, match=problem):
            tiny.engine(PAIR, run={"executable": str(path), "trust_executable": trusted})


# -- what compiled ------------------------------------------------------------------------------


def test_the_compiled_step_is_reported_without_running_it():
    engine = tiny.engine(PAIR, stage=3, train_micro_batch_size_per_gpu=4)
    state, batch = engine.state, tiny.batch(32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    report = engine.compiled(shapes)
    assert engine.state is state
    # A device's 4 rows through 3 layers of 8 x 8, forward and for the weights, and back through 2
    # of them (the batch has no gradient); then the head of 8 x 1, forward and for its weights (the
    # way back through it is an outer product, which is none of the compiler's matrix products).
    assert report.flops == 4 * (2 * 8 * 8 * (3 + 3 + 2) + 2 * 8 * (1 + 1))
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert gathers and all(c.axes == ("data",) and not c.in_accumulation for c in gathers)
    live = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    mine = sum(x.nbytes for x in batch.values()) // 8
    assert live <= report.argument_bytes <= live + mine + 256  # aligned
    assert report.compile_seconds is None or report.compile_seconds > 0


class Child(NamedTuple):
    devices: str  # how many JAX has
    # Whether a step has the library's, on one core and on two, and then plain Flax of `check`.
    kernels: list[str]
    cached: set[str]  # the files in the user's cache folder


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """A process without the tests' compiler options and cache, that simulates two devices."""
    caches = tmp_path_factory.mktemp("caches")
    out = python(
        "import os, jax, jaxspeed, numpy as np\n"
        "from flax import nnx\n"
        "jaxspeed.simulate(2)\n"
        "print(len(jax.devices()))\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "config = {'train_batch_size': 8, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}}\n"
        "for cores in (1, 2):\n"
        "    os.cpu_count = lambda: cores\n"
        "    engine = jaxspeed.initialize(lambda rngs: nnx.Linear(64, 64, rngs=rngs),\n"
        "        lambda model, batch: (model(batch['x'])**2).mean(), config)\n"
        "    batch = {'x': np.ones((8, 64), np.float32)}\n"
        "    shapes = engine.program.abstract_batch(batch)\n"
        "    step = engine.step.lower(engine.program.state, shapes)\n"
        "    print('ynn_fusion' in step.compile().as_text())\n"
        "from jaxspeed.engine import check\n"
        "plain = check.compiled_otherwise(engine.program, lambda x: x @ x)\n"
        "text = plain.lower(jax.ShapeDtypeStruct((64, 64), 'float32')).compile().as_text()\n"
        "print('ynn_fusion' in text)\n"
        "engine.train_batch(batch)\n",  # in flight when the process ends
        XDG_CACHE_HOME=str(caches),
    )
    devices, *kernels = out.split()
    return Child(devices, kernels, {f.name for f in (caches / "jaxspeed" / "xla").iterdir()})


@pytest.mark.sampled
def test_only_devices_that_share_cores_do_without_a_library_of_kernels(child):
    """The tests' own compiler options leave the library out: only a process without them has it."""
    assert child.kernels[:2] == ["False", "True"]


def test_plain_flax_of_check_is_compiled_without_the_library(child):
    assert child.kernels[2] == "False"


# -- the compilation cache ----------------------------------------------------------------------


@pytest.fixture
def no_cache():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def cache_for(value):
    run = {} if value is None else {"run": {"compilation_cache": value}}
    enable_compilation_cache(Config.load(tiny.config(**run)).run.compilation_cache)
    return jax.config.jax_compilation_cache_dir


def test_the_cache_is_on_by_default_in_the_users_cache_folder(no_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_for(None) == str(tmp_path / "jaxspeed" / "xla")


def test_the_cache_may_be_elsewhere_or_off(no_cache, tmp_path):
    assert cache_for(False) is None
    assert cache_for(str(tmp_path)) == str(tmp_path)
    assert cache_for("~/elsewhere") == str(tmp_path)  # one that is set already is kept


@pytest.mark.parametrize(("given", "kept"), [(1.0, 0.1), (0.0, 0.0), (5.0, 5.0)])
def test_the_cache_keeps_short_compilations_unless_told_otherwise(no_cache, tmp_path, given, kept):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", given)
    cache_for(str(tmp_path))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == kept


def python(code, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_programs_land_in_the_cache_of_a_run_that_asks_for_nothing(child):
    assert any("step" in name for name in child.cached)


# -- simulated devices --------------------------------------------------------------------------


def test_simulate_gives_the_devices_before_jax_has_started(child):
    assert child.devices == "2"


@pytest.mark.full  # so it is after the start of these tests' own
def test_simulate_after_the_start_of_jax_is_an_error():
    out = python(
        "import jaxspeed, jax\n"
        "jax.numpy.zeros(3)\n"
        "try: jaxspeed.simulate(4)\n"
        "except jaxspeed.JaxspeedError as error: print(error)"
    )
    assert "already started with 1 cpu devices" in out and "call simulate first" in out


def test_simulate_again_with_the_same_count_is_no_error():
    jaxspeed.simulate(8)
    assert len(jax.devices()) == 8
    with pytest.raises(jaxspeed.JaxspeedError, match="already started with 8 cpu"):
        jaxspeed.simulate(4)


@pytest.mark.parametrize("count", [0, -1])
def test_simulate_needs_a_device(count):
    with pytest.raises(jaxspeed.JaxspeedError, match="at least one device"):
        jaxspeed.simulate(count)


def test_nothing_is_logged_above_information_by_a_plain_run(caplog):
    caplog.set_level(logging.WARNING)
    engine = tiny.engine(PAIR)
    engine.train_batch(tiny.batch())
    engine.close()
    assert not [r for r in caplog.records if r.name.startswith("jaxspeed")]


def test_a_closed_engine_trains_no_step():
    engine = tiny.engine(PAIR)
    engine.close()
    with pytest.raises(jaxspeed.JaxspeedError, match=r"the engine is closed.*engine\.wait"):
        engine.train_batch(tiny.batch())
    assert np.isfinite(float(engine.eval_batch(tiny.batch())["loss"]))


def test_x64_is_left_as_the_user_set_it():
    assert jnp.zeros(1).dtype == jnp.float32
