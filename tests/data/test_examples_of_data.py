"""The examples of docs/data.md, each with the files and names that its section speaks of."""

import gzip
import importlib
import itertools
import json
import re
import sys

import grain
import jax
import numpy as np
import pytest
import yaml

import jaxspeed
from jaxspeed.data.chat_template import BUILT_IN
from jaxspeed.data.model_limits import PairForm, PromptForm
from tests.data import chat_examples
from tests.data.chat_examples import chat, write_lines
from tests.data.corpora import opened
from tests.support.documents import ROOT, blocks
from tests.support.tensors import Loader

PAGE = (ROOT / "docs" / "data.md").read_text()
SECTIONS = {
    title: blocks(text)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
IDS = np.random.default_rng(0).integers(0, 256, (40, 100))


def block(title, number=0):
    return SECTIONS[title][number].text


def module_and_corpus(title, first, folder, monkeypatch):
    """The corpus of the config after a module's text."""
    (folder / "my_data.py").write_text(block(title, first))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    importlib.invalidate_caches()
    return corpus(block(title, first + 1))


def corpus(text):
    return opened(yaml.safe_load(text)["data"])


def trained_ids(c):
    return {int(i) for b in c.train.once(8) for i in b["tokens"].ravel()}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_section_has_an_example_of_at_most_ten_lines_that_is_run_here():
    with open(__file__) as file:
        own = file.read()
    for title, found in SECTIONS.items():
        assert found and f'"{title}"' in own
        assert all(len(b.text.splitlines()) <= 10 for b in found), title


@pytest.mark.sampled
def test_an_array_of_tokens(here, monkeypatch):
    code = block("An array of tokens").replace('"steps": 20', '"steps": 2')
    exec(code, {"ids": IDS.ravel()})
    records = [json.loads(x) for x in (here / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in record for record in records) == 2
    IDS.astype(np.uint16).tofile("ids.dat")
    c = module_and_corpus("An array of tokens", 1, here, monkeypatch)
    assert isinstance(c.train.parts[0].parts[0].stream.tokens, np.memmap)


def test_preferences(here):
    pairs = [{"prompt": f"{i} ", "chosen": "yes", "rejected": "no"} for i in range(8)]
    write_lines(here / "pairs.jsonl", pairs)
    given = yaml.safe_load(block("Preferences"))
    c = opened({**given["data"], "tokenizer": "bytes"}, pairs=PairForm("preference"), seq_len=None)
    assert "8 pairs" in c.summary


def test_prompts(here):
    record = json.loads(block("Prompts"))
    file = write_lines(here / "prompts.jsonl", [record] * 2)
    data = {"source": "jsonl", "path": str(file), "chat_template": "chatml", "held_out": 0.0}
    form = PromptForm(("tokens", "targets"), 8)
    c = opened({**data, "seq_len": 200}, prompts=form, seq_len=None)
    (prompt,) = c.train.prompts(np.array([1]))
    assert (prompt.prompt, prompt.columns) == (record["prompt"], {"answer": 4})


def test_raw_files_of_tokens(here):
    (here / "openwebtext").mkdir()
    for name, ids in (("train", IDS[:30]), ("val", IDS[30:])):
        ids.astype(np.uint16).tofile(here / "openwebtext" / f"{name}.bin")
    c = corpus(block("Raw files of tokens"))
    assert (c.train.samples, c.held_out.samples) == (2999 // 16, -(-999 // 16))


def test_records_with_ids(here, monkeypatch):
    (here / "ids.jsonl").write_text(
        "".join(json.dumps({"input_ids": x.tolist()}) + "\n" for x in IDS)
    )
    assert module_and_corpus("Records with ids", 0, here, monkeypatch).held_out.samples


def engine():
    return jaxspeed.initialize(
        config={
            "model": {
                "family": "gpt2",
                "config": {
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "vocab_size": 256,
                    "max_position_embeddings": 16,
                },
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "train_batch_size": 8,
        }
    )


@pytest.mark.sampled
def test_a_loop_over_a_grain_loader_continues_with_the_next_batch(here):
    rows = [{"tokens": row.astype(np.int32)} for row in IDS[:, :17]]
    code = block("Grain").replace("step % 100 == 99", "step == 1")

    def after(*steps):
        for each in steps:
            made = engine()
            exec(code, {"engine": made, "grain": grain, "rows": rows, "steps": each})
        return made.parameters

    expected = after(3)
    (here / "checkpoints").rename("of one process")
    found = after(2, 3)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))


def test_a_loop_over_torchs_data_loader():
    rows = [{"tokens": row.astype(np.int32)} for row in IDS[:, :17]]

    def stand_in(rows, batch_size):
        return Loader({"tokens": np.stack([row["tokens"] for row in rows])}, batch_size, np.asarray)

    made = engine()
    names = {"engine": made, "itertools": itertools, "rows": rows, "DataLoader": stand_in}
    for _ in range(2):  # the second time there is nothing left
        exec(block("torch's DataLoader"), names)
        assert int(made.state.step) == 5


def test_conversations(here):
    """With the tokenizer of the folder that `model.pretrained` names."""
    base = chat_examples.tokenizer_folder(here / "base", chat_template=BUILT_IN["chatml"])
    talks = [{"messages": chat("the of", f"to {'and ' * i}")} for i in range(40)]
    write_lines(here / "chats.jsonl", talks)
    text = yaml.safe_load(block("Conversations"))["data"]
    c = opened({**text, "tokenizer": str(base)}, seq_len=512)
    assert (c.conversations.samples, c.conversations.dropped) == (40, 0)


def test_folders_of_datasets(here):
    pyarrow = pytest.importorskip("pyarrow")
    folder = here / "saved" / "train"
    folder.mkdir(parents=True)
    (here / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    table = pyarrow.table({"text": ["abc" * 100] * 40})
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as out:
        out.write_table(table)
    assert trained_ids(corpus(block("Folders of datasets"))) == {*b"abc", 0}


@pytest.mark.parametrize("by", ["gz", "zst"])
def test_compressed_text(here, by):
    zstd = gzip if by == "gz" else pytest.importorskip("backports.zstd")
    (here / "corpus").mkdir()
    lines = json.dumps({"text": "abc" * 100}) + "\n"
    (here / "corpus" / f"a.jsonl.{by}").write_bytes(zstd.compress(lines.encode() * 40))
    text = block("Compressed text").replace("zst", by)
    assert trained_ids(corpus(text)) == {*b"abc", 0}
