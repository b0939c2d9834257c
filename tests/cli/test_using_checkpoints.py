"""What is done with a checkpoint where the training data are not: evaluate, sample, export."""

import contextlib
import io
import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed import models
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.cli.common import overrides_of
from jaxspeed.cli.main import main, parser
from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import ByteTokenizer, Split
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.run import source_of
from jaxspeed.run.evaluation import evaluate
from jaxspeed.run.start import checkpointer_of
from tests.engine import tiny
from tests.run import small
from tests.support.documents import ROOT, blocks, shell_commands

SIZES = small.CONFIG["model"]["config"]
SEQ = SIZES["max_position_embeddings"]
TEXTS = {
    "texts/a.txt": ["a cab faced a bad decade; " * 9],
    "texts/b.jsonl": ["deaf", "", "a fee, a bee, a cad " * 4, "b"],
    "texts/empty.txt": [""],
    "texts/z.txt": ["café ☕ façade"],
}


def command(*words):
    """The command line in this process."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main([*map(str, words)])
    return SimpleNamespace(code=code, out=said.getvalue(), err=complained.getvalue())


def succeeded(*words):
    done = command(*words)
    assert done.code == 0, done.err
    return done.out


def refused(*words):
    done = command(*words)
    assert done.code == 2 and done.err.count("error:") == 1 and "Traceback" not in done.err
    return " ".join(done.err.split())


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The current folder: a config, its run of 4 steps in runs/config, and texts; no corpus."""
    folder = tmp_path_factory.mktemp("run")
    path = small.write(
        folder,
        run={"steps": 4, "checkpoint_every": 2, "output": "runs/config"},
        bf16={"enabled": False},
        optimizer={"params": {"lr": 0.03}, "ema_decay": 0.6},
        data={"path": "corpus.txt"},
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(json.loads(path.read_text())))
    path.unlink()
    (folder / "texts").mkdir()
    for name, texts in TEXTS.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / name).write_text("".join(lines if name.endswith("l") else texts))
    (folder / "other.txt").write_text("a fee faced a decade. " * 50)
    (folder / "notes.txt").write_text(TEXTS["texts/a.txt"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeeded("train", "config.yaml", "--json")
        (folder / "corpus.txt").unlink()
        yield folder


@pytest.fixture(scope="module")
def saved(here):
    """The parameters of the last checkpoint, and their moving averages, as they are stored."""
    source = source_of("config.yaml")
    program = source.engine().program
    state = checkpointer_of(source).restore(program).state
    average = {
        path: x[tuple(map(slice, program.table[path].leaf.shape))] for path, x in state.ema.items()
    }
    return {"params": arrays(state.params), "ema": arrays(average)}


def arrays(values):
    return {path: np.asarray(x) for path, x in values.items()}


def plain_model(parameters):
    """A function from tokens and segments to log-probabilities, in plain Flax on one device."""
    factory = models.build("gpt2", None, SIZES | {"dropout": 0.0}).factory
    graph, state = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    for keys, variable in nnx.to_flat_state(state):
        variable.set_value(jnp.asarray(parameters["/".join(map(str, keys))]))

    @jax.jit
    def logits(tokens, segments):
        return nnx.merge(graph, state)(tokens[None], segment_ids=segments[None])[0]

    def logp(tokens, segments):
        found = np.asarray(logits(tokens, segments), np.float64)
        return found - np.log(np.exp(found).sum(-1, keepdims=True))

    return logp


def plain_loss(logp, texts):
    """(nats, predicted bytes) of documents: in windows of SEQ, each byte from those before it."""
    documents = [np.frombuffer(text.encode() + b"\0", np.uint8) for text in texts if text]
    if not documents:
        return 0.0, 0
    stream = np.concatenate(documents).astype(np.int32)
    number = np.repeat(np.arange(len(documents)), [len(d) for d in documents]).astype(np.int32)
    nats = count = 0
    for start in range(0, len(stream) - 1, SEQ):
        here, ids = stream[start : start + SEQ + 1], number[start : start + SEQ + 1]
        tokens, segments = np.zeros(SEQ, np.int32), np.full(SEQ, -1, np.int32)
        tokens[: len(here) - 1], segments[: len(here) - 1] = here[:-1], ids[:-1]
        found = logp(tokens, segments)
        for at, (target, own, before) in enumerate(zip(here[1:], ids[1:], ids[:-1])):
            if own == before:
                nats, count = nats - found[at, target], count + 1
    return nats, count


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.default_cases("params")
@pytest.mark.parametrize("weights", ["params", "ema"])
def test_the_loss_of_files_is_that_of_plain_flax_in_each_and_in_all(saved, weights):
    ema = ["--ema"] if weights == "ema" else []
    found = json.loads(succeeded("eval", "config.yaml", "--data", "texts", "--json", *ema))
    logp, total = plain_model(saved[weights]), np.zeros(2)
    assert [each["file"] for each in found["files"]] == list(TEXTS)
    for each, texts in zip(found["files"], TEXTS.values()):
        nats, count = plain_loss(logp, texts)
        total += nats, count
        assert each["tokens"] == each["eval_weight"] == count
        if not count:
            assert each["eval_loss"] is each["perplexity"] is each["bits_per_byte"] is None
            continue
        assert each["eval_loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found["tokens"] == total[1] and found["ema"] == bool(ema)
    loss = total[0] / total[1]
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)
    assert (found["step"], found["checkpoint"]) == (4, "step-00000004")


MESHES = {
    "one device": (1, {}),
    "tensor 2": (8, {"mesh": {"tensor": 2}}),
    "pipe 2, three ranks": (6, {"mesh": {"pipe": 2}, "train_batch_size": 12}),
}


@pytest.mark.parametrize(
    "mesh", ["one device", *(pytest.param(n, marks=pytest.mark.full) for n in [*MESHES][1:])]
)
def test_the_loss_does_not_depend_on_the_mesh(here, mesh):
    devices, settings = MESHES[mesh]
    given = yaml.safe_load(Path("config.yaml").read_text()) | settings
    section = jaxspeed.Config(data=given["data"]).data
    engine = jaxspeed.initialize(config=given, devices=jax.devices()[:devices])
    engine.load_checkpoint("runs/config/checkpoints")
    limits = jaxspeed.data.limits_of(models.build("gpt2", None, SIZES).config)
    texts = SourceSection(paths=["texts"])
    parts = evaluation_parts(section, texts, limits, ByteTokenizer())
    together = Split([part for part in parts.values() if part], seed=0, shuffle=False)
    assert together.samples % 3 and together.samples % 8  # the last batch is filled up
    found = evaluate(engine, together)
    logp = plain_model(arrays(engine.parameters))
    nats, count = np.sum([plain_loss(logp, texts) for texts in TEXTS.values()], 0)
    assert found.weight == count
    assert found.means["loss"] == pytest.approx(nats / count, rel=1e-5)


def test_a_table_shows_the_files_and_all_of_them(here):
    shown = succeeded("eval", "config.yaml", "--data", "texts/a.txt", "--data", "texts/z.txt")
    lines = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in lines[-3:]] == ["texts/a.txt", "texts/z.txt", "all"]
    assert "perplexity" in shown and "bits per byte" in shown
    alone = succeeded("eval", "config.yaml", "--data", "notes.txt")
    assert "notes.txt" in alone and " all " not in alone


def test_the_section_eval_is_evaluated_by_the_command_and_by_a_run(here, tmp_path):
    words = ["--set", 'data.eval={"source": "text", "path": "texts/*.txt"}']
    words += ["--set", "data.held_out=0"]
    named = json.loads(succeeded("eval", "config.yaml", "--json", *words))
    assert [each["file"] for each in named["files"]] == [n for n in TEXTS if n.endswith("txt")]
    data = ["--set", "data.path=other.txt"]
    train = [*words, *data, "--set", "run.steps=2", "--output", tmp_path / "run"]
    trained = json.loads(succeeded("train", "config.yaml", "--json", *train))
    again = json.loads(succeeded("eval", "config.yaml", "--json", *train))
    assert trained["eval_loss"] == pytest.approx(again["eval_loss"], rel=1e-6)
    assert again["tokens"] == named["tokens"]


def test_token_files_are_evaluated_by_the_files_of_their_folder(here, tmp_path):
    tokenize = ["--set", "data.path=texts/a.txt", "--set", "data.source=text"]
    tokenize += ["--output", "runs/config"]  # the run's tokenizer, and no new one
    tokenize += ["--set", "data.tokenizer=bpe"]
    succeeded("data", "tokenize", "config.yaml", tmp_path / "tokens", *tokenize)
    text = np.frombuffer(TEXTS["texts/a.txt"][0].encode() + b"\0", np.uint8)
    np.save(tmp_path / "ids.npy", text)
    text.astype(np.uint16).tofile(tmp_path / "ids.bin")
    paths = ["texts/a.txt", *(tmp_path / name for name in ("tokens", "ids.npy", "ids.bin"))]
    words = [word for path in paths for word in ("--data", path)]
    words += ["--set", "data.source=tokens", "--set", "data.dtype=uint16"]
    files = json.loads(succeeded("eval", "config.yaml", "--json", *words))["files"]
    assert [each["file"] for each in files] == [*map(str, paths)]
    assert len({each["eval_loss"] for each in files}) == 1


MISTAKES = {
    "no such file": (["--data", "nowhere.txt"], "'nowhere.txt' does not exist"),
    "an empty path": (["--data", ""], "data: an empty path"),
    "an empty file": (["--data", "texts/empty.txt"], "texts/empty.txt: nothing to predict"),
    "a binary file": (["--data", "runs/config/checkpoints"], "is not text"),
    "two sets": (
        ["--set", 'data.eval={"source":"text","path":"notes.txt"}', "--set", "data.held_out=0.1"],
        "data.held_out",
    ),
    "no path": (["--set", "data.eval.source=text"], "data.eval.path"),
    "two paths": (
        ["--set", 'data.eval={"source":"text","path":"notes.txt","paths":["notes.txt"]}'],
        "data.eval.path",
    ),
    "an unknown key": (["--set", "data.eval.held_out=0.1"], "data.eval.held_out"),
    "no data at all": ([], "'corpus.txt' does not exist"),
    "no such tag": (["--data", "notes.txt", "--tag", "best"], "no checkpoint best"),
    "no average": (
        ["--data", "notes.txt", "--ema", "--set", "optimizer.ema_decay=null"],
        "--ema: needs the config of a run that has optimizer.ema_decay",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_an_evaluation_is_one_message(here, name):
    words, hint = MISTAKES[name]
    assert hint in refused("eval", "config.yaml", *words)


# -- the moving average, and other places ----------------------------------------------------------


def test_a_text_is_sampled_without_the_data_from_the_weights_or_their_average(here, saved):
    words = ("--prompt", "a cab", "--tokens", "6", "--temperature", "0", "--json")
    for weights, ema in (("params", []), ("ema", ["--ema"])):
        logp, text = plain_model(saved[weights]), [*b"a cab"]
        for _ in range(6):
            tokens, own = np.zeros(SEQ, np.int32), np.full(SEQ, -1, np.int32)
            tokens[: len(text)], own[: len(text)] = text, 0
            text.append(int(logp(tokens, own)[len(text) - 1].argmax()))
        expected = ByteTokenizer().decode(text)
        assert json.loads(succeeded("sample", "config.yaml", *words, *ema))["text"] == expected


def test_an_export_has_the_average_of_the_weights(saved, tmp_path):
    done = ["checkpoint", "export", "runs/config", tmp_path / "out", "--ema"]
    succeeded(*done)
    found = load_file(tmp_path / "out" / "model.safetensors")
    exported = {path: found[path] for path in saved["ema"]}
    assert all(np.array_equal(x, saved["ema"][path]) for path, x in exported.items())
    assert any(not np.array_equal(x, saved["params"][path]) for path, x in exported.items())


def test_every_command_that_reads_a_config_takes_the_folder_of_the_run(here, tmp_path):
    shutil.copytree("runs/config", tmp_path / "elsewhere")
    config = tmp_path / "other.yaml"
    shutil.copy("config.yaml", config)
    at = ("--output", tmp_path / "elsewhere")
    words = ("--set", "run.output=null", "--prompt", "a", "--tokens", "2")
    assert succeeded("sample", config, *words, *at).startswith("a")
    assert succeeded("eval", config, "--data", "notes.txt", *at)
    for name in ("train", "eval", "sample", "plan", "check", "config"):
        given = parser(name).parse_args([name, "config.yaml", "--output", "x"])
        assert overrides_of(given) == ['run.output="x"']


def test_a_pretrained_folder_is_evaluated_and_sampled_without_a_run(here, tmp_path):
    out = tmp_path / "exported"
    succeeded("checkpoint", "export", "runs/config", out, "--format", "hf", "--ema")
    given = yaml.safe_load(Path("config.yaml").read_text())
    given |= {"model": {"pretrained": str(out)}, "run": {"output": str(tmp_path / "none")}}
    config = tmp_path / "other.yaml"
    config.write_text(yaml.safe_dump(given))
    done = command("eval", config, "--data", "notes.txt", "--json")
    assert "holds no checkpoint: the weights are those of" in " ".join(done.err.split())
    ours = json.loads(succeeded("eval", "config.yaml", "--data", "notes.txt", "--json", "--ema"))
    theirs = json.loads(done.out)
    assert theirs["eval_loss"] == pytest.approx(ours["eval_loss"], rel=1e-6)
    assert (theirs["step"], theirs["checkpoint"]) == (0, None)
    words = ("--prompt", "a cab", "--tokens", "4", "--temperature", "0")
    assert succeeded("sample", config, *words) == succeeded(
        "sample", "config.yaml", *words, "--ema"
    )
    assert "no checkpoint best" in refused("sample", config, *words, "--tag", "best")


# -- the tokenizer ---------------------------------------------------------------------------------


def test_the_tokenizer_comes_from_the_checkpoint_or_the_run_or_the_config(here, tmp_path):
    words = ("sample", "config.yaml", "--prompt", "a cab", "--tokens", "4", "--temperature", "0")
    expected = succeeded(*words)
    run = tmp_path / "run"
    shutil.copytree("runs/config", run)
    words = (*words, "--output", run)
    (run / "tokenizer.json").unlink()
    assert succeeded(*words) == expected  # from the checkpoint
    broken = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    for tag in (run / "checkpoints").glob("step-*"):
        (tag / "files" / "tokenizer.json").write_text(broken)
    checkpointer = Checkpointer(run / "checkpoints")
    assert checkpointer.files("step-00000004") == {}  # not what was saved


def test_a_checkpoint_without_a_tokenizer_has_the_configs(here, tmp_path):
    engine = source_of("config.yaml").engine()
    engine.load_checkpoint("runs/config/checkpoints")
    engine.save_checkpoint(tmp_path / "run" / "checkpoints", tag="mine")
    engine.close()
    words = ("--prompt", "a cab", "--tokens", "4", "--temperature", "0")
    expected = succeeded("sample", "config.yaml", *words)
    words = (*words, "--output", tmp_path / "run")
    assert succeeded("sample", "config.yaml", *words) == expected
    found = refused("sample", "config.yaml", *words, "--set", "data.tokenizer=bpe")
    assert "no tokenizer was saved with the checkpoint" in found and "corpus.txt" in found


# -- the docs --------------------------------------------------------------------------------------


def section(page, heading):
    """The commands and programs of a section of the docs, as a reader writes them."""
    text = (ROOT / "docs" / page).read_text()
    (found,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    written = [block for block in blocks(found) if block.language in ("sh", "python")]
    assert sum(len(block.text.splitlines()) for block in written) <= 10
    return written


@pytest.mark.default_cases("Sampling elsewhere")
@pytest.mark.parametrize(
    "heading", ["Perplexity of a file", "Averaged weights", "Sampling elsewhere"]
)
def test_a_section_of_running_runs(heading, here, saved, tmp_path, monkeypatch):
    shutil.copytree(here, tmp_path, dirs_exist_ok=True)
    shutil.copytree(here / "runs" / "config", tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    for block in section("running.md", heading):
        if block.language == "sh":
            for each in shell_commands(block.text):
                succeeded(*shlex.split(each)[1:])
            continue
        engine = source_of("config.yaml").engine()
        engine.load_checkpoint("runs/config/checkpoints")
        exec(block.text, {"engine": engine})
        found = arrays(engine.parameters)
        assert all(np.array_equal(found[path], x) for path, x in saved["ema"].items())
    exports = {"Averaged weights": ["averaged", "averaged-too"], "Sampling elsewhere": ["exported"]}
    for folder in exports.get(heading, []):
        assert (tmp_path / folder / "model.safetensors").is_file()
    if heading == "Averaged weights":
        one, other = (load_file(tmp_path / f / "model.safetensors") for f in exports[heading])
        assert all(np.array_equal(one[name], x) for name, x in other.items())
    if heading == "Sampling elsewhere":
        assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == ByteTokenizer().to_bytes()


def test_the_masks_of_the_page_on_the_engine_count_each_sample_once():
    samples = tiny.batch(11)
    given = {"np": np, "jnp": jnp, "samples": samples}
    loss, evaluation = section("engine.md", "A mask")
    exec(loss.text, given)
    given["engine"] = tiny.engine(loss_fn=given["loss_fn"])
    exec(evaluation.text, given)
    out = np.asarray(given["engine"].module(samples["x"]))[:, 0]
    assert float(given["metrics"]["weight"]) == 11
    expected = np.mean((out - samples["y"]) ** 2)
    assert float(given["metrics"]["loss"]) == pytest.approx(expected, rel=1e-5)
