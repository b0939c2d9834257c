"""The conversions of docs/from-deepspeed.md and docs/from-optax.md run, and give what they say."""

import json
import re

import numpy as np
import pytest

import jaxspeed
from jaxspeed.config import examine
from jaxspeed.deepspeed_habits import ARGUMENTS, METHODS
from tests.engine import tiny
from tests.support.documents import PAGES, ROOT, blocks, shell_commands

TEXTS = {page.name: page.read_text() for page in PAGES}


def written(page, language):
    return [block.text for block in blocks(TEXTS[page]) if block.language == language]


def test_the_script_after_deepspeed_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (config,) = written("from-deepspeed.md", "json")
    (tmp_path / "ds_config.json").write_text(config)
    before, after = written("from-deepspeed.md", "python")
    compile(before, "before", "exec")  # torch and DeepSpeed are not here
    names = {}
    exec(compile(after, "after", "exec"), names)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(step) for step, _, _ in printed] == [19, 39]
    assert float(printed[1][1]) < float(printed[0][1])
    assert float(printed[1][2]) == pytest.approx(0.01)
    assert list((tmp_path / "checkpoints").iterdir())
    assert names["engine"].program.batch.accumulation == 2


def test_the_loop_with_optax_and_its_conversion_have_equal_losses():
    loop, conversion = written("from-optax.md", "python")
    names = {}
    exec(compile(loop, "loop", "exec"), names)
    plain = names.pop("losses")
    exec(compile(conversion, "conversion", "exec"), names)
    assert len(plain) == 40 and plain[-1] < 0.7 * plain[0]
    np.testing.assert_allclose(names["losses"], plain, rtol=1e-5)
    rate = float(names["metrics"]["lr"])
    assert rate == pytest.approx(float(names["schedule"](39)), rel=1e-5)


def test_every_call_that_is_explained_is_in_the_table():
    table = TEXTS["from-deepspeed.md"]
    named = {"forward", "allreduce_gradients", "zero_grad", "train", "save_fp16_model"}
    missing = [name for name in METHODS if name not in table and name not in named]
    rare = {"mpu", "mesh_param", "distributed_port"}
    missing += [f"{name}=" for name in ARGUMENTS if name not in rare and f"{name}=" not in table]
    assert not missing


def test_what_0198_removed_is_listed_with_its_verdict():
    """Each key of the table is refused, or loads, as the table says."""
    section = TEXTS["from-deepspeed.md"].partition("## What 0.19.8 removed")[2]
    rows = re.findall(r"^\| (.*`) \| (\w+)", section, re.M)
    keys = [(key, what) for cell, what in rows for key in re.findall(r"`([\w.]+)`", cell)]
    assert len(keys) == 17
    on = {"mics_shard_size": 4, "sparse_gradients": True, "graph_harvesting": True}
    for key, what in keys:
        head, _, name = key.rpartition(".")
        value = on.get(name, {"mode": "fixed"} if name == "sparse_attention" else None)
        tree = {name: {"enabled": True} if value is None else value}
        if name[0].isupper():
            tree = {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
        elif head:
            tree = {head: {"stage": 3, **({name: True} if "gather" in name else tree)}}
        assert bool(examine(tree).problems) == (what == "refused"), key


def test_the_readme_says_how_the_ds_config_trains():
    """As it is from Python, and with a model and steps on the command line."""
    path = ROOT / "configs" / "ds_config.json"
    engine = jaxspeed.initialize(tiny.Listed, tiny.squared_error, path)
    given = json.loads(path.read_text())
    samples = 8 * given["train_micro_batch_size_per_gpu"] * given["gradient_accumulation_steps"]
    assert np.isfinite(float(engine.train_batch(tiny.batch(samples))["loss"]))
    commands = [
        command for block in written("README.md", "sh") for command in shell_commands(block)
    ]
    (command,) = [line for line in commands if "configs/ds_config.json" in line]
    assert "--set model.family=gpt2" in command and "--set run.steps=" in command
