"""What a run needs is checked before JAX is imported: packages, devices, steps."""

import importlib.util
import sys

import pytest

from jaxspeed.config import load_config
from jaxspeed.config.before_start import check_start, packages, refuse_missing
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

NEEDED = {
    "a monitor": ({"wandb": {"enabled": True}}, "wandb.enabled", "wandb"),
    "a data set of the hub": (
        {"data": {"source": "huggingface", "path": "an/id"}},
        "data.source",
        "hf",
    ),
    "Parquet": ({"data": {"source": "parquet", "path": "a"}}, "data.path", "arrow"),
    "data to evaluate on": (
        {"data": {"source": "stdlib", "eval": {"source": "parquet", "path": "a"}}},
        "data.path",
        "arrow",
    ),
    "SentencePiece": ({"data": {"tokenizer": "m/tokenizer.model"}}, "data.tokenizer", "sentencepi"),
}


@pytest.mark.parametrize("case", NEEDED)
def test_a_missing_package_is_named_with_its_key_and_extra(case, monkeypatch):
    tree, key, extra = NEEDED[case]
    config = load_config(tree)
    assert not list(packages(load_config({})))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf'^{key}: needs .*pip install "jaxspeed\[{extra}'):
        refuse_missing(packages(config))


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # as W&B itself writes it
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="needs wandb"):
        refuse_missing(packages(load_config({"wandb": {"enabled": True}})))


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"data": 3}, r"^mesh\.data 3 needs 3 devices, and run\.devices cpu:2 has 2; -1 for"),
        ({"pipe": 3}, r"^mesh\.pipe 3, mesh\.data -1 needs a multiple of 3 devices"),
        ({"data": 1}, r"^mesh of all axes 1 needs 1 devices"),
        ({"data": 2}, None),
        ({"tensor": 2}, None),
    ],
    ids=str,
)
def test_a_mesh_of_other_than_the_simulated_devices_is_refused(mesh, says):
    run = {"devices": "cpu:2", "steps": 1}
    config = load_config({"mesh": mesh, "run": run, "train_micro_batch_size_per_gpu": 1})
    if says is None:
        check_start(config)
        return
    with pytest.raises(ConfigError, match=says):
        check_start(config)


def test_a_run_needs_a_number_of_steps():
    with pytest.raises(ConfigError, match=r"^run\.steps: missing"):
        check_start(load_config({}))


def test_a_batch_that_such_a_mesh_does_not_divide_tells_of_the_devices():
    tree = {"mesh": {"data": 3}, "train_batch_size": 4, "run": {"devices": "cpu:2"}}
    with pytest.raises(ConfigError, match=r"batch_size 3 or 6.* needs 3 devices, and run"):
        load_config(tree)


@pytest.mark.parametrize("batch", [{}, {"train_batch_size": 3}], ids=str)
def test_a_batch_is_checked_for_the_simulated_devices(batch):
    config = load_config(batch | {"run": {"devices": "cpu:2", "steps": 1}})
    with pytest.raises(ConfigError, match=r"train_batch_size: .*data-parallel size 2"):
        check_start(config)
