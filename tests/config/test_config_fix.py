"""Errors with one answer are fixed; the fixed config has none of them."""

import json
import re

import pytest

from jaxspeed.cli.main import main
from jaxspeed.config import examine, fix_config

pytestmark = pytest.mark.fast

FIXED = {
    "a misspelt key": ({"train_batch_sise": 8}, {"train_batch_size": 8}),
    "a section": (
        {"offload_optimizer": {"device": "cpu"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    "a parameter": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}, "weight_decay": 0.1}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}},
    ),
    "a norm": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 0.5}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.5},
    ),
    "a number as text": ({"train_batch_size": "8"}, {"train_batch_size": 8}),
    "a rate as text": (
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-5"}}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-5}}},
    ),
    "a scale of bf16": ({"bf16": {"enabled": True, "loss_scale": 0}}, {"bf16": {"enabled": True}}),
    "a scale under an old name": (
        {"bfloat16": {"enabled": True, "loss_scale": 0}},
        {"bfloat16": {"enabled": True}},
    ),
    "a dynamic scale": (
        {"fp16": {"enabled": True, "dynamic_loss_scale": True}},
        {"fp16": {"enabled": True, "loss_scale": 0}},
    ),
    "bfp16": ({"bfp16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    "null": ({"gradient_clipping": None}, {}),
    "a flag for a section": ({"fp16": True}, {"fp16": {"enabled": True}}),
    "a key in two steps": ({"gradient_cliping": "0.5"}, {"gradient_clipping": 0.5}),
    "a choice": ({"gradient_allreduce_op": "maen"}, {"gradient_allreduce_op": "mean"}),
    "a comment stays": ({"_why": 1, "train_batch_sise": 8}, {"_why": 1, "train_batch_size": 8}),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_has_one_answer_is_fixed(name):
    tree, expected = FIXED[name]
    before = json.dumps(tree)
    fixed, problems = fix_config(tree)
    assert fixed == expected
    assert problems
    assert not examine(fixed).problems
    assert json.dumps(tree) == before


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"sparse_gradients": True}, {}),
        ({"train_batch_sise": 8, "train_batch_size": 4}, {"train_batch_size": 4}),
        ({"max_grad_norm": 0.5, "gradient_clipping": 1.0}, {"gradient_clipping": 1.0}),
        ({"fp16": {"frobnicate": 1}}, {"fp16": {}}),
    ],
)
def test_what_is_refused_and_what_would_overwrite_a_key_is_removed(tree, expected):
    fixed, problems = fix_config(tree)
    assert fixed == expected and len(problems) == 1
    assert not examine(fixed).problems


def test_what_has_no_answer_stays():
    for tree in (
        {"gradient_accumulation_steps": 4},
        {"train_batch_size": "many"},
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"mesh": {"frobnicate": 1}},
        {"mine": {"enabled": True}},  # ignored, also by DeepSpeed
    ):
        assert fix_config(tree) == (tree, [])


def test_the_command_s_summary_comes_first_and_80_columns_break_no_key(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    keys = {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 10**9}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": keys}))
    assert main(["config", str(path)]) == 0
    summary, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ keys: 0 refused, 0 approximated, .* harmless", summary)
    for key, value in keys.items():
        (line,) = (line.split() for line in lines if f"zero_optimization.{key}:" in line)
        assert line[1:] == [f"zero_optimization.{key}:", str(value)]
    assert max(map(len, lines)) <= 80


def test_the_command_ends_with_what_initialize_still_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "config.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert main(["config", str(path)]) == 0
    *_, title, optimizer, batch = capsys.readouterr().out.splitlines()
    assert title == "jaxspeed.initialize still needs:"
    assert optimizer.startswith("  optimizer: {") and "--auto hf" in optimizer
    assert batch == "  train_batch_size or train_micro_batch_size_per_gpu"
    path.write_text('{"optimizer": {"type": "Adam"}, "train_batch_size": 8}')
    assert main(["config", str(path)]) == 0
    assert "still needs" not in capsys.readouterr().out


def test_the_command_writes_a_fixed_config(tmp_path, capsys):
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    trained = '"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}'
    keys = '{"train_batch_sise": 8, "gradient_clipping": "auto", "mine": 1, '
    bad.write_text(f"{keys}{trained}, /* , */}}")
    column = len(keys + trained) + 1
    assert main(["config", str(bad)]) == 2
    printed = capsys.readouterr().out
    assert "Add --auto hf to the command" in printed
    assert main(["config", str(bad), "--auto", "hf", "--fix", str(good)]) == 0
    printed = capsys.readouterr().out
    assert "1 ignored" in printed
    assert "gradient_clipping: 1.0, from Hugging Face's default" in printed
    assert '"train_batch_size"? DeepSpeed ignores it. -> train_batch_size: 8' in " ".join(
        printed.split()
    )
    comma = f"line 1, column {column}: found a comma after the last item."
    assert comma in " ".join(printed.split())
    assert "left" not in printed
    assert json.loads(good.read_text())["train_batch_size"] == 8
    assert main(["config", str(good), "--auto", "hf"]) == 0
    assert main(["config", str(good), "--auto", "hf", "--strict"]) == 2
    bad.write_text('{"fp16": {"opt_level": "O2"}, "gradient_accumulation_steps": 4}')
    assert main(["config", str(bad), "--fix", str(good)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "remove the key. DeepSpeed refuses it too. -> removed" in shown
    assert "left, since no single answer fixes it: gradient_accumulation_steps: found" in shown
    assert main(["config", str(bad), "--fix", str(good), "--json"]) == 2
    as_json = capsys.readouterr()
    assert {row["key"] for row in json.loads(as_json.out)} >= {"gradient_accumulation_steps"}
    assert as_json.err.startswith("fixed: fp16.opt_level: ")
    bad.write_text(json.dumps({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}))
    assert main(["config", str(bad), "--fix", str(good)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert '-> optimizer.type: "Adam", optimizer.params.freeze_step: removed' in shown
    verdicts = [line.split() for line in printed.splitlines()]
    order = [v for line in verdicts for v in line[:1] if v in ("ignored", "honoured", "harmless")]
    assert len(order) > 2 and order == sorted(order, key=["ignored", "honoured", "harmless"].index)
