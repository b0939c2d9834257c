"""The first minutes: a config from a model's folder and a file, and a fine-tune by flags alone."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.cli import init
from jaxspeed.cli.main import main
from jaxspeed.cli.recipe import BATCH, EPOCHS, KINDS, RATES
from jaxspeed.config import load_config
from tests.data.chat_examples import chat, template, tokenizer_folder, write_lines
from tests.engine import tiny

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 64,
}
RECORDS = {
    "chat.jsonl": {"messages": chat("the of", "to and")},
    "prompts.jsonl": {"prompt": "the", "completion": "to and"},
    "pairs.jsonl": {"prompt": "the", "chosen": "to", "rejected": "of"},
    "labels.jsonl": {"prompt": "the", "completion": "to", "label": True},
    "alpaca.jsonl": {"instruction": "the", "output": "to and"},
    "texts.jsonl": {"text": "the to and of " * 20},
    "questions.jsonl": {"question": "the", "answer": "to"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models' folders with and without a chat template, and files of every form."""
    where = tmp_path_factory.mktemp("first")
    model = {"family": "llama", "config": SIZES}
    engine = jaxspeed.initialize(config=tiny.config(model=model))
    for name, more in (("base", {"chat_template": template("chatml")}), ("plain", {})):
        engine.save_pretrained(where / name)
        tokenizer_folder(where / name, **more)
    engine.save_pretrained(where / "silent")
    for name, record in RECORDS.items():
        other = record | ({"label": False} if "label" in record else {})
        write_lines(where / name, [record, other] * 20)
    (where / "notes.txt").write_text("the to and of " * 400)
    return where


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """The current folder, with those files."""
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def succeeded(*words, capsys):
    code = main([*words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


# Flags, and what the config then has.
WRITTEN = {
    "--model base --data chat.jsonl --lora 4": {
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "optimizer.lr": RATES["lora"],
        "data.train_on": "assistant",
    },
    "--model base --data pairs.jsonl": {"objective.type": "dpo", "optimizer.lr": 1e-5},
    "--model plain --data alpaca.jsonl": {"data.chat_template": "chatml", "lora": None},
    "--model base --data labels.jsonl --lr 3e-6": {"objective.type": "kto", "optimizer.lr": 3e-6},
    "--model plain --data prompts.jsonl --epochs 0.5": {"data.chat_template": None, "epochs": 0.5},
    "--model base --data texts.jsonl --seq-len 32": {"data.train_on": None, "data.seq_len": 32},
    "--model base --data notes.txt --kind pretrain": {"data.source": "text", "epochs": EPOCHS},
    "--data notes.txt --batch-size 24 --seq-len 200": {
        "train_batch_size": 24,
        "model.config.max_position_embeddings": 200,
        "data.seq_len": 200,
    },
}


@pytest.mark.default_cases(*list(WRITTEN)[:2])
@pytest.mark.parametrize("flags", WRITTEN)
def test_a_written_config_passes_data_show_and_plan(flags, here, capsys):
    succeeded("init", *shlex.split(flags), capsys=capsys)
    text = Path("config.yaml").read_text()
    tree = yaml.safe_load(text)
    defaults = {"data.seq_len": 64 if "--model" in flags else 128, "train_batch_size": BATCH}
    for key, value in (defaults | WRITTEN[flags]).items():
        section, _, name = key.replace("optimizer.", "optimizer.params.").rpartition(".")
        node = tree["run"] if key == "epochs" else tree
        for part in filter(None, section.split(".")):
            node = node[part]
        assert node.get(name) == value, key
    assert f"rate {tree['optimizer']['params']['lr']:g} (--lr)" in text
    commands = [line[4:].split("jaxspeed ")[1] for line in text.splitlines()[1:4]]
    assert commands == [f"{words} config.yaml" for words in ("data show", "plan", "train")]
    assert "trained" in succeeded(*commands[0].split(), capsys=capsys)
    planned = succeeded(*commands[1].split(), "--target", "h100:8", "--json", capsys=capsys)
    assert json.loads(planned)["batch"]["train"] == tree["train_batch_size"]


@pytest.mark.sampled
def test_a_plan_names_what_a_reference_computes_and_its_share(here, capsys):
    succeeded("init", "--model", "base", "--data", "pairs.jsonl", capsys=capsys)
    words = ["plan", "config.yaml", "--target", "h100:8"]
    once = succeeded(*words, capsys=capsys)
    assert "before step 0: reference of each sample" in once and "of it for" not in once
    keys = {"reference_model": "base", "reference": "each_step"}
    more = [word for key, value in keys.items() for word in ("--set", f"objective.{key}={value}")]
    each = " ".join(succeeded(*words, *more, capsys=capsys).split())
    assert re.search(r"per device, [\d.]+ kB of it for the model of reference", each)
    assert "before step 0" not in each


def test_flags_alone_train_and_the_run_s_folder_has_their_config(here, capsys):
    few = ["--devices", "cpu:8", "--set", "bf16.enabled=false", "--set", "run.sample_tokens=2"]
    flags = ["--model", "base", "--data", "chat.jsonl", "--lora", "2", "--seq-len", "32"]
    words = [*flags, "--epochs", "0.5", "--batch-size", "8", "--output", "tuned"]
    shown = succeeded("train", *words, *few, capsys=capsys)
    line = "lora: adapters of rank 2, rate 0.0002 (--lr), 0.5 epochs (--epochs), 8 samples a step"
    assert line in " ".join(shown.split())
    assert "3 steps (0.6 epochs)" in shown  # of 40 conversations
    assert Path("tuned/adapter/adapter_config.json").is_file()
    config = load_config("tuned")
    assert config.run.epochs == 0.5 and config.train_batch_size == 8
    assert config.optimizer.params["lr"] == 2e-4 and config.lora.r == 2
    resumed = succeeded("train", *words, *few, "-v", capsys=capsys)  # the same flags: this run
    assert "all 3 steps are done" in resumed
    for detail in ("ZeRO stage 3", "compiled, per device"):  # of adapters only where asked for
        assert detail in resumed and detail not in shown
    adapter, base = (
        sum(tensor.size for tensor in load_file(file).values())
        for file in ("tuned/adapter/adapter_model.safetensors", "base/model.safetensors")
    )
    share = 100 * adapter / (adapter + base)
    line = f"trainable parameters {adapter:,} of {adapter + base:,} ({share:.3g}%)"
    assert line in shown
    words = ["--prompt", "the", "--tokens", "3", "--temperature", "0", "--devices", "cpu:8"]
    said = {}
    for name in ("tuned", "tuned/adapter", "base"):  # the folder of a model or an adapter, too
        assert main(["sample", name, *words, "--set", "bf16.enabled=false"]) == 0
        said[name] = capsys.readouterr()
        assert "WARNING" not in said[name].err  # these are its weights
    assert said["tuned"].out == said["tuned/adapter"].out


@pytest.mark.parametrize("answer", ["", "2"])
def test_questions_have_the_defaults_of_the_files(answer, here, monkeypatch, capsys):
    asked = []
    answers = iter(["lora", "base", "chat.jsonl", answer, "", "", "", "48", "tuned"])
    monkeypatch.setattr("sys.stdin", type("", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr(
        init, "input", lambda question: asked.append(question) or next(answers), raising=False
    )
    succeeded("init", "mine.yaml", capsys=capsys)
    config = load_config("mine.yaml")
    assert (config.lora.r, config.data.seq_len) == (int(answer or 16), 48)
    assert (config.run.output, config.run.epochs) == ("tuned", EPOCHS)
    assert asked[-2:] == ["tokens a sample [64]: ", "the run's folder [runs/base-chat-lora]: "]
    assert next(answers, None) is None


MISTAKES = {
    "init --model bas --data chat.jsonl": "--model bas: no such folder",
    "init --model base --data chat.json": "--data chat.json: no such file",
    "init --model base": "--data: missing. finetune needs a file",
    "init --kind lora --data chat.jsonl": "--model: missing. lora needs",
    "init --kind lora --model base --data pairs.jsonl": "--kind preferences does",
    "init --kind preferences --model base --data chat.jsonl": "--kind finetune does",
    "init --kind finetune --model base --data chat.jsonl --lora 4": "--kind lora has adapters",
    "init --model base --data questions.jsonl": "records have the fields question, answer; needs",
    "init --model base --data chat.jsonl --seq-len 65": "the model has 64 positions",
    "init --model silent --data chat.jsonl": "has no tokenizer.json or tokenizer.model",
    "init --model base --data chat.jsonl --lr 0": "--lr 0: needs more than 0",
    "init config.json --data notes.txt": "needs the name of a .yaml",
    "init there.yaml --data notes.txt": "there.yaml: is there already; name another",
    "train": "CONFIG is missing: train needs",
    "train --data chat.jsonl": "--model is missing",
    "train --model base": "--data is missing",
    "train there.yaml --lora 4": "--lora: with a config its keys are overridden by --set",
    "train base": "the folder of a model. Needs a config; `jaxspeed train --model",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_message_with_what_would_do(words, here, capsys):
    Path("there.yaml").write_text("run: {steps: 1}\n")
    assert main(words.split()) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert MISTAKES[words] in errors and errors.count("error:") == 1 and "Traceback" not in errors
    assert Path("there.yaml").read_text() == "run: {steps: 1}\n"


def test_every_kind_has_a_rate_that_help_states(capsys):
    assert RATES.keys() == KINDS.keys()
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.0002 of adapters, 2e-05 of all weights, 1e-05 of preferences" in shown
    assert f"by default {EPOCHS}; 1 of preferences" in shown and f"{BATCH} by default" in shown
