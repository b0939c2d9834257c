"""Versions that compute wrong numbers are refused, and the programs that show it are right here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.errors import ConfigError
from jaxspeed.known_jax_bugs import KNOWN_BUGS, refuse_known_bugs, refuse_old_jax
from jaxspeed.known_jax_bugs import programs as faulty
from tests.engine.tiny import Listed, squared_error

OFFLOAD = ["activation_checkpointing.cpu_checkpointing"]
EVERY_PLATFORM = ("cpu", "cuda", "gpu", "tpu")


def versions(jaxlib: str, **others: str) -> dict[str, str]:
    return {"jax": jaxlib, "jaxlib": jaxlib, **others}


def said(platform: str, installed: dict[str, str], offload=()) -> str:
    with pytest.raises(ConfigError) as error:
        refuse_known_bugs(platform, installed, offload)
    return str(error.value)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("platform", ["cuda", "gpu"])
@pytest.mark.parametrize("version", ["0.11.0", "0.11.0.dev20260701"])
def test_offload_on_gpus_with_jaxlib_0_11_0_names_the_key_and_what_is_right(platform, version):
    message = said(platform, versions(version), OFFLOAD)
    for word in (*OFFLOAD, version, platform, "before 0.11.0", "0.11.1 and later", "46231"):
        assert word in message
    assert "46231" not in said(platform, versions(version))  # without offload
    assert "46231" not in said("cpu", versions(version), OFFLOAD)
    assert "46231" not in said(platform, versions("0.11.1"), OFFLOAD)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("platform", "version", "source"),
    [("cpu", "0.10.2", "jax/issues/39103"), ("cpu", "0.11.1", "jax/issues/40101")],
)
def test_a_version_below_the_floor_is_refused_with_what_is_wrong_with_it(platform, version, source):
    message = said(platform, versions(version))
    for word in ("jaxspeed needs jax 0.11.2 or newer", f"{version} is installed", source):
        assert word in message
    assert source not in said("gpu", versions(version))


@pytest.mark.fast
def test_only_jaxlib_may_be_too_old():
    message = said("gpu", {"jax": "0.11.2", "jaxlib": "0.11.1"})
    assert message == "jaxspeed needs jaxlib 0.11.2 or newer; 0.11.1 is installed"


@pytest.mark.fast
def test_libtpu_has_versions_of_its_own():
    message = said("tpu", versions("0.11.2", libtpu="0.0.48"))
    for word in ("libtpu 0.0.48", "49143", "0.0.50 and later"):
        assert word in message
    refuse_known_bugs("tpu", versions("0.11.2", libtpu="0.0.50"))
    refuse_known_bugs("cpu", versions("0.11.2", libtpu="0.0.48"))


@pytest.mark.fast
@pytest.mark.parametrize("platform", EVERY_PLATFORM)
@pytest.mark.parametrize("version", ["0.11.2", "0.12.0", "0.12.0.1", "0.13.0.dev1"])
def test_the_floor_and_what_is_newer_are_not_refused(platform, version):
    refuse_known_bugs(platform, versions(version, libtpu="0.0.52"), OFFLOAD)
    refuse_old_jax(versions(version))


@pytest.mark.fast
def test_a_bug_of_explicit_axes_refuses_nothing():
    (bug,) = (bug for bug in KNOWN_BUGS if bug.affects == "explicit axes")
    assert bug.is_in(versions("0.12.0.1"))
    assert "42481" not in said("cpu", versions("0.10.2"), OFFLOAD)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("platform", "sources"),
    [
        ("cpu", {"jax-ml/jax/issues/34755"}),
        ("cuda", {"marin-community/marin/issues/8077", "openxla/xla/issues/47283"}),
        ("gpu", {"marin-community/marin/issues/8077", "openxla/xla/issues/47283"}),
        ("tpu", set()),
    ],
)
def test_ragged_exchanges_are_right_on_tpus_alone_and_refuse_nothing(platform, sources):
    found = {
        bug.source.removeprefix("https://github.com/")
        for bug in KNOWN_BUGS
        if bug.affects == "ragged exchanges" and platform in bug.platforms
    }
    assert found == sources
    for version in ("0.11.2", "0.12.0.1", "0.13.0"):
        refuse_known_bugs(platform, versions(version, libtpu="0.0.52"))


@pytest.mark.parametrize("package", ["jax.__version__", "jax.lib.__version__"])
def test_initialize_says_first_that_jax_is_too_old(monkeypatch, package):
    monkeypatch.setattr(package, "0.10.2")
    name = package.split(".__")[0].replace("jax.lib", "jaxlib")
    wanted = f"jaxspeed needs {name} 0.11.2 or newer; 0.10.2 is installed"
    with pytest.raises(ConfigError, match=wanted):
        jaxspeed.initialize(None, None, "no such config")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing"),
        ({"parallel": {"remat": {"offload": ["h"]}}}, "parallel.remat.offload"),
        ({"parallel": {"remat": {"budget": "1 GB"}}}, "parallel.remat.budget"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
    ],
)
def test_each_offload_key_is_checked(monkeypatch, config, key):
    def refused(platform, installed, asked):
        assert (platform, installed["jaxlib"]) == ("cpu", jax.lib.__version__)
        if asked:
            raise ConfigError(*asked)

    monkeypatch.setattr("jaxspeed.train.build.refuse_known_bugs", refused)
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    plain = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
    with pytest.raises(ConfigError, match=key):
        jaxspeed.initialize(Listed, squared_error, plain | config)


# -- what is right here ----------------------------------------------------------------------------


@pytest.fixture
def optimized():
    """Programs as users run them: with XLA's optimizer, which the tests switch off."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


# Those of other platforms are right on a CPU too: what they compare with is what they compute.
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            marks=[pytest.mark.xfail(strict=True, reason="no version of JAX is right")]
            if program.bug.until is None
            else [],
        )
        for program in faulty.PROGRAMS
    ],
    ids=lambda program: program.source.rpartition("/")[2],
)
@pytest.mark.usefixtures("optimized")
def test_a_program_that_a_known_bug_made_wrong_is_right(program):
    assert program.run(jax.devices()[: program.devices]) <= program.most


@pytest.mark.fast
def test_every_bug_has_a_program():
    assert [bug.source for bug in KNOWN_BUGS] == [program.source for program in faulty.PROGRAMS]


@pytest.mark.fast
def test_a_verdict_names_the_number_and_what_is_not_run_says_why():
    def program(error: float) -> faulty.BugProgram:
        return faulty.BugProgram(
            KNOWN_BUGS[0].source, 2, "an error of", lambda devices: error * len(devices)
        )

    devices = jax.devices()
    assert program(1e-6).judged(devices) == "right: an error of 2.0e-06, of at most 1e-05"
    assert program(1e-5).judged(devices) == "WRONG: an error of 2.0e-05, of at most 1e-05"
    assert program(0).judged(devices[:1]) == "not run: it needs 2 devices, and there are 1"
    (of_tpus, *_) = (bug for bug in KNOWN_BUGS if bug.platforms == ("tpu",))
    on_tpus = faulty.BugProgram(of_tpus.source, 1, "", lambda devices: 0)
    assert on_tpus.judged(devices) == "not run: it concerns tpu, and the devices are cpu"


class Weighted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (3, 3)))


def per_sample_weights(model: Weighted, batch: jax.Array) -> jax.Array:
    weight = model.weight.get_value()
    of_sample = jax.lax.stop_gradient(jax.vmap(lambda row: jnp.sum((weight @ row) ** 2))(batch))
    return jnp.mean(of_sample * model.scale.get_value())


@pytest.mark.usefixtures("optimized")
def test_a_training_step_with_weights_of_40000_samples_has_the_right_loss():
    """With jaxlib 0.10.2 its loss is off by some percent (jax issue 39103)."""
    rows = 40_000
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    config = {"train_micro_batch_size_per_gpu": rows, "optimizer": adam}
    size_of_row = np.linspace(0.1, 3, rows)[:, None]  # what is read for a wrong row differs
    batch = (np.random.default_rng(0).normal(size=(rows, 3)) * size_of_row).astype(np.float32)
    run = jaxspeed.initialize(Weighted, per_sample_weights, config, devices=jax.devices()[:1])
    weight = np.asarray(run.state.params["weight"]).astype(np.float64)
    loss = float(run.train_batch(batch)["loss"])
    right = np.mean(((batch.astype(np.float64) @ weight.T) ** 2).sum(axis=1))
    assert abs(loss - right) <= 1e-6 * right
