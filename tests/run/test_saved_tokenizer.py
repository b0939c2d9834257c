"""The tokenizer is saved with a run and with each checkpoint, with the files beside it."""

import contextlib
import json
import shutil

import pytest

import jaxspeed
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.cli.main import main
from jaxspeed.data import BPETokenizer, ByteTokenizer, read_tokenizer
from jaxspeed.data.tokenizer import files_of, tokenizer_in
from jaxspeed.parameter_server.engine import engine_of
from jaxspeed.run import source_of, train
from jaxspeed.run.start import Source
from tests.data.corpora import opened, sentences
from tests.interop import folders

TEXT = "the fox <|endoftext|> für 狐\nthe fox"
WORDS = ["<|endoftext|>", "<unk>", *sorted({*TEXT.split(), "of", "to", "a"})]
FOREIGN = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": WORDS[0], "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {word: i for i, word in enumerate(dict.fromkeys(WORDS))},
        "unk_token": "<unk>",
    },
}
BESIDE = {
    "chat_template.jinja": b"{% for m in messages %}{{ m.content }}\r\n{% endfor %}",
    "tokenizer_config.json": b'{"eos_token":  "<|endoftext|>"}',
    "special_tokens_map.json": b"{}\n",
}


@pytest.fixture
def pretrained(tmp_path):
    """A folder with weights, a tokenizer, and what belongs to it."""
    folder = folders.folder(tmp_path / "base", folders.LLAMA, folders.llama_tensors())
    (folder / "tokenizer.json").write_text(json.dumps(FOREIGN, indent=1))
    for name, content in BESIDE.items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder):
    return {
        name: (folder / name).read_bytes()
        for name in ("tokenizer.json", *BESIDE)
        if (folder / name).is_file()
    }


def test_a_tokenizer_of_any_kind_is_equal_when_it_is_read_again(pretrained):
    trained = BPETokenizer.train(sentences(20), 300)
    for tokenizer in (ByteTokenizer(), trained, read_tokenizer(pretrained)):
        saved = files_of(tokenizer)
        again = tokenizer_in(saved, "saved")
        assert type(again) is type(tokenizer) and files_of(again) == saved
        assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        assert again.decode(again.encode(TEXT)) == tokenizer.decode(tokenizer.encode(TEXT))
        assert (again.end, again.vocab_size) == (tokenizer.end, tokenizer.vocab_size)
    assert saved.keys() == {"tokenizer.json", *BESIDE}
    assert tokenizer_in({"chat_template.jinja": b""}, "saved") is None
    alone = read_tokenizer(pretrained / "tokenizer.json")  # a file is that file
    assert files_of(alone).keys() == {"tokenizer.json"}


def test_a_folder_of_tokens_has_the_files_too(pretrained, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    data = {"source": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(pretrained)}
    jaxspeed.data.tokenize(jaxspeed.Config(data=data).data, tmp_path / "tokens")
    assert contents(tmp_path / "tokens") == contents(pretrained)
    read = opened({"source": "tokens", "path": str(tmp_path / "tokens"), "held_out": 0}, seq_len=4)
    assert files_of(read.tokenizer) == contents(pretrained)


@pytest.mark.sampled
def test_a_run_its_checkpoint_and_its_export_have_the_files(pretrained, tmp_path):
    expected = contents(pretrained)
    (tmp_path / "corpus.txt").write_text(" ".join([TEXT] * 200))
    given = {
        "run": {"steps": 1, "output": str(tmp_path / "run"), "sample_tokens": 0},
        "model": {"pretrained": str(pretrained)},
        "data": {"source": "text", "path": str(tmp_path / "corpus.txt"), "seq_len": 8},
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    trainer = train(given)
    trainer.engine.save_checkpoint(tmp_path / "mine", tag="mine")
    trainer.engine.close()
    checkpoints = Checkpointer(tmp_path / "run" / "checkpoints")
    assert contents(tmp_path / "run") == expected
    assert checkpoints.files("step-00000001") == expected
    assert Checkpointer(tmp_path / "mine").files("mine") == expected
    # Elsewhere there are neither the data nor the tokenizer of the base.
    (tmp_path / "corpus.txt").unlink()
    for name in expected:
        (pretrained / name).unlink()
    saved = checkpoints.files("step-00000001")
    elsewhere = given | {"run": {"output": str(tmp_path / "elsewhere")}}
    assert files_of(source_of(elsewhere).tokenizer(saved)) == expected  # the checkpoint's
    assert files_of(source_of(given).tokenizer({})) == expected  # that of the run's folder
    assert isinstance(source_of(elsewhere).tokenizer({}), ByteTokenizer)  # the config's default
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "alone")
    for source in (tmp_path / "alone", tmp_path / "mine"):
        out = tmp_path / f"of-{source.name}"
        config = tmp_path / "config.json"
        config.write_text(json.dumps(given))
        words = ["checkpoint", "export", source, out, "--format", "hf", "--config", config]
        assert main([*map(str, words)]) == 0
        assert contents(out) == expected


def test_a_run_of_a_pretrained_model_names_what_it_reads_and_warns_of_another_tokenizer(
    pretrained, tmp_path, caplog, monkeypatch
):
    (tmp_path / "corpus.txt").write_text(" ".join([TEXT] * 200))
    given = {
        "run": {"steps": 1, "output": str(tmp_path / "run")},
        "model": {"pretrained": str(pretrained)},
        "data": {"path": str(tmp_path / "corpus.txt"), "source": "text", "seq_len": 8},
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    other = tmp_path / "other.json"
    other.write_text(json.dumps(FOREIGN).replace("fox", "hare"))
    given["data"]["tokenizer"] = str(other)
    shown = []

    def engine(source, **_):
        def named(what):
            shown.append(what)
            return contextlib.nullcontext()

        engine_of(source.config, None, None, None, showing=named)
        raise KeyboardInterrupt

    monkeypatch.setattr(Source, "engine", engine)
    with pytest.raises(KeyboardInterrupt):
        train(given)
    assert "other.json is not that of model.pretrained" in caplog.text
    assert shown == ["building the model", "reading weights"]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"family": "gpt2", "preset": "tiny"}, {"source": "tokens", "path": "/nowhere/ids.npy"}),
        ({"family": "mlp", "preset": "tiny"}, {"source": "no_such_module:samples"}),
        ({"family": "vit", "preset": "tiny"}, {"source": "images", "path": "/nowhere"}),
    ],
)
def test_where_no_tokenizer_was_saved_and_none_is_needed_the_data_need_not_exist(
    model, data, tmp_path
):
    given = {"model": model, "data": data, "run": {"output": str(tmp_path)}}
    given |= {"train_batch_size": 8}
    assert source_of(given).tokenizer({}) is None
    if model["family"] == "gpt2":  # but the config may name one
        given["data"] = data | {"tokenizer": "bytes"}
        assert isinstance(source_of(given).tokenizer({}), ByteTokenizer)
