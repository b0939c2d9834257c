"""Files, overrides and what goes wrong in them."""

import json

import pytest

from jaxspeed.config import Config, load_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

GOOD = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["ds.json", "ds.yaml", "ds.yml"])
def test_json_and_yaml_give_what_the_dict_gives(tmp_path, name):
    path = write(tmp_path, name, json.dumps(GOOD))
    assert load_config(path) == load_config(str(path)) == load_config(GOOD)


def test_yaml_reads_1e_5_as_a_number(tmp_path):
    text = "optimizer: {type: Adam, params: {lr: 1e-5, eps: 1E-8}}\ntrain_batch_size: 1e3\n"
    config = load_config(write(tmp_path, "ds.yaml", text))
    assert config.optimizer.params["lr"] == 1e-5
    assert config.optimizer.params["eps"] == 1e-8
    assert config.train_batch_size == 1000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"fp16": {"enabled": true, "loss_scale": 1, "enabled": false}}'),
        ("ds.yaml", "fp16:\n  enabled: true\n  loss_scale: 1\n  enabled: false\n"),
    ],
)
def test_a_key_that_stands_twice_is_found(tmp_path, name, text):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, name, text))
    assert "fp16.enabled: found the key twice, with true and false" in str(caught.value)


def test_a_yaml_merge_is_not_a_key_that_stands_twice(tmp_path):
    text = "_base: &base {enabled: true, loss_scale: 8}\nfp16: {<<: *base, loss_scale: 16}\n"
    config = load_config(write(tmp_path, "ds.yaml", text))
    assert (config.fp16.enabled, config.fp16.loss_scale) == (True, 16)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("ds.json", '{"a": 1 "b": 2}', "line 1, column"),
        ("ds.json", "", "line 1, column 1"),
        ("ds.yaml", "a: [1, 2", "line 1"),
        ("ds.json", "[1, 2]", "Needs a mapping of keys"),
        ("ds.yaml", "", "the file is empty"),
        ("ds.yaml", "1: 2", 'Needs a key in quotes: "1"'),
        ("ds.toml", "a = 1", 'ends in ".toml"'),
        ("ds.yaml", "a: &a [*a]", "unconstructable recursive node"),
        ("ds.json", "[" * 100_000, "too deep"),
        ("ds.json", "9" * 5000, "digits"),
    ],
)
def test_an_unreadable_file_is_one_config_error(tmp_path, name, text, found):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, name, text))
    assert found in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    write(tmp_path, "ds_config.json", "{}")
    with pytest.raises(ConfigError, match=r'no such file\. Did you mean "ds_config\.json"'):
        load_config(tmp_path / "ds_confg.json")


def test_a_shipped_config_is_named_anywhere_and_an_existing_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = {name: load_config(name).run.steps for name in ("tiny", "configs/tiny.yaml")}
    assert set(steps.values()) == {300}
    assert load_config("tiny").run.output == "runs/tiny"  # that of the file, not of a run's folder
    with pytest.raises(ConfigError, match=r'no such file\. Did you mean "llama3_8b"'):
        load_config("lama3_8b")
    with pytest.raises(ConfigError, match=r"no such file\. The folder is .*config --list"):
        load_config("elsewhere/tiny.json/configs")
    write(tmp_path, "tiny.yaml", "run: {steps: 7}\ntrain_batch_size: 8")
    assert load_config("tiny.yaml").run.steps == 7
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        load_config("tiny")


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run\. Needs a \.json, \.yaml or \.yml file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the folder of a model\. .*train --model FOLDER"):
        load_config(tmp_path)


def test_a_schedule_s_end_stays_that_of_the_run_when_autos_are_filled_in():
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    written = {"run": {"steps": 10}, "scheduler": schedule, "train_batch_size": 8}
    config = load_config(written, auto="hf")
    assert config.scheduler.params["total_num_steps"] == 10
    longer = load_config(config, ["run.steps=30"])
    assert longer.scheduler.params["total_num_steps"] == 30


def test_a_file_that_is_no_text_is_one_config_error(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="utf-8"):
        load_config(tmp_path / "ds.json")


@pytest.mark.parametrize("source", [None, 3, ["ds.json"], object()])
def test_a_source_of_another_kind_is_one_config_error(source):
    with pytest.raises(ConfigError, match=r"Needs a dict, a jaxspeed\.Config or the path"):
        load_config(source)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train_batch_size=16", "train_batch_size", 16),
        ("gradient_clipping=5e-1", "gradient_clipping", 0.5),
        ("bf16.enabled=true", "bf16", None),
        ("parallel.units=[blocks/*]", "parallel", None),
        ("communication_data_type=null", "communication_data_type", None),
    ],
)
def test_an_override_is_read_as_yaml(override, key, value):
    config = load_config(GOOD, [override])
    assert key in config.model_fields_set
    if value is not None:
        assert getattr(config, key) == value


def test_overrides_reach_into_lists_and_make_sections():
    groups = [{"pattern": "bias", "weight_decay": 0}]
    tree = {"optimizer": GOOD["optimizer"] | {"groups": groups}}
    config = load_config(tree, ["optimizer.groups.0.weight_decay=0.5", "mesh.tensor=2"])
    assert config.optimizer.groups[0].weight_decay == 0.5
    assert config.mesh.tensor == 2


@pytest.mark.parametrize("override", ["", "a", "=1", "a b=1", ".a=1", "a..b=1", "train_batch_size"])
def test_an_override_without_form_is_refused(override):
    with pytest.raises(ConfigError, match="Needs the form"):
        load_config(GOOD, [override])


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("train_batch_size.x=1", "train_batch_size is no section"),
        ("zero_optimization.stge=1", 'Did you mean "stage"?'),
        ("optimizer.params.lr=[1", "as YAML would write it"),
        ("optimizer.params.lr={a: 1, a: 2}", "found the key twice"),
    ],
)
def test_a_bad_override_names_its_key(override, found):
    with pytest.raises(ConfigError) as caught:
        load_config(GOOD, [override])
    assert override.partition("=")[0] in str(caught.value)
    assert found in str(caught.value)


def test_an_override_does_not_touch_the_source():
    tree = {"fp16": {"enabled": False}}
    load_config(tree, ["fp16.enabled=true"])
    assert tree == {"fp16": {"enabled": False}}


def test_a_config_takes_overrides_as_its_file_did():
    tree = {
        "run": {"steps": 100},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    config = load_config(load_config(tree), ["run.steps=200"])
    assert config.scheduler.params["total_num_steps"] == 200


def test_keys_that_begin_with_an_underscore_are_comments():
    config = load_config({"_note": {"x": 1}, "fp16": {"_why": "loss", "enabled": True}})
    assert config.fp16.enabled
    assert config.given["_note"] == {"x": 1}


def test_a_config_is_its_own_source():
    config = Config(train_batch_size=8)
    assert Config.load(config) is config
