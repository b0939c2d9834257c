"""The commands of docs/fine-tuning.md run as the page has them, beside a small base."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.cli.main import main
from tests.data.chat_examples import template, tokenizer_folder, write_lines
from tests.support.documents import ROOT, blocks, shell_commands

PAGE = (ROOT / "docs" / "fine-tuning.md").read_text()
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 128,
}
SMALL = ("data.seq_len=64", "run.steps=3", "bf16.enabled=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the commands of the page have run, and what they printed."""
    where = tmp_path_factory.mktemp("tuning")
    model = {"family": "llama", "config": SIZES}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"model": model, "train_batch_size": 8, "optimizer": optimizer}
    engine = jaxspeed.initialize(config=config)
    engine.save_pretrained(where / "base")
    tokenizer_folder(where / "base", chat_template=template("chatml"))
    (line,) = [block.text for block in blocks(PAGE) if block.language == "json"]
    write_lines(where / "chat.jsonl", [json.loads(line)] * 40)
    (where / "configs").symlink_to(ROOT / "configs")
    return where


@pytest.mark.sampled
def test_the_commands_of_the_page_run(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("Which fox?\n"))
    printed = {}
    for block in blocks(PAGE):
        for command in shell_commands(block.text) if block.language == "sh" else ():
            words = command.split()[1:]
            small = [x for each in SMALL for x in ("--set", each)]
            small = small if words[0] not in ("checkpoint", "init") else []
            tokens = ["--tokens", "3"] if words[0] == "sample" else []
            assert main([*words, *small, *tokens]) == 0, capfd.readouterr().err
            printed[words[0]] = capfd.readouterr().out
    assert "{+The quick one." in printed["data"]
    assert str(Path("runs/base-chat-lora/adapter")) in printed["train"]
    config = json.loads(Path("runs/base-chat-lora/adapter/adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (16, "base")
    adapter = load_file("runs/base-chat-lora/adapter/adapter_model.safetensors")
    base, merged = load_file("base/model.safetensors"), load_file("merged/model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    assert a.shape == (16, 32) and np.abs(b).max() > 0
    weight = base[f"{name}.weight"].astype(np.float64) + 2 * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(merged[f"{name}.weight"], weight, rtol=1e-6, atol=1e-6)
    assert base.keys() == merged.keys()
    np.testing.assert_array_equal(base["lm_head.weight"], merged["lm_head.weight"])
