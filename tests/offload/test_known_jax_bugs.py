"""Versions on which offload would compute wrong numbers are refused, with those that are right."""

import jax
import pytest

import jaxspeed
from jaxspeed.errors import ConfigError
from jaxspeed.offload.known_jax_bugs import refuse_known_bugs
from tests.engine.tiny import Listed, squared_error

ASKED = ["activation_checkpointing.cpu_checkpointing"]


@pytest.mark.parametrize("platform", ["cuda", "gpu"])
@pytest.mark.parametrize("version", ["0.11.0", "0.11.0.dev20260701"])
def test_jaxlib_0_11_0_is_refused_on_gpus(platform, version):
    with pytest.raises(ConfigError) as error:
        refuse_known_bugs(ASKED, platform, version)
    for word in (*ASKED, version, platform, "before 0.11.0", "0.11.1 and later", "46231"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("platform", "version"),
    [("tpu", "0.11.0"), ("cpu", "0.11.0"), ("cuda", "0.10.2"), ("gpu", "0.11.1"), ("gpu", "0.12")],
)
def test_others_are_not(platform, version):
    refuse_known_bugs(ASKED, platform, version)


def test_no_offload_is_not_refused():
    refuse_known_bugs([], "gpu", "0.11.0")


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
    def refused(asked, platform, version):
        assert (platform, version) == ("cpu", jax.lib.__version__)
        if asked:
            raise ConfigError(*asked)

    monkeypatch.setattr("jaxspeed.train.build.refuse_known_bugs", refused)
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    plain = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
    with pytest.raises(ConfigError, match=key):
        jaxspeed.initialize(Listed, squared_error, plain | config)
