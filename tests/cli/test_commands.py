"""The commands as people and programs call them: what they print, and how they end."""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspeed import models, run
from jaxspeed.cli.main import COMMANDS, main, parser
from jaxspeed.config import explain_config, load_config
from jaxspeed.engine.check_report import CheckReport
from jaxspeed.errors import PlacementError
from jaxspeed.metrics import start_lines
from jaxspeed.placement.mesh import resolve_sizes
from tests.run import small


def jaxspeed(*words):
    """The command line in this process: what a process of its own would print, sooner."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main([*map(str, words)])
    return SimpleNamespace(returncode=code, stdout=said.getvalue(), stderr=complained.getvalue())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 8 steps, and what training it printed as JSON."""
    folder = tmp_path_factory.mktemp("trained")
    config = small.write(
        folder, run={"steps": 8, "sample_tokens": 12, "sample_prompt": "ab", "eval_every": 4}
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start_lines, "LASTS", 0)
        done = jaxspeed("train", config, "--json")
    assert done.returncode == 0, done.stderr
    return config, folder / "run", done


HELPS = [
    *((command,) for command in COMMANDS),
    *(("checkpoint", verb) for verb in ("list", "show", "verify", "export")),
    *(("data", verb) for verb in ("show", "tokenize", "verify")),
]


VERBS = (("checkpoint",), ("data",))  # which have no options


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_help_has_an_example(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args([*words, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"example: jaxspeed {' '.join(words)}" in shown


@pytest.mark.parametrize("words", [(), ("checkpoint",), ("data",), *HELPS], ids=" ".join)
def test_every_help_fits_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parser().parse_args([*words, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    example = shown.partition("example: jaxspeed ")[2].replace("\\\n", "")
    assert parser().parse_args(shlex.split(example)).command in COMMANDS


DEFAULTS_OF_SCHEMA = {
    "--prompt": load_config({}).run.sample_prompt,
    "--tokens": load_config({}).run.sample_tokens,
    "--temperature": load_config({}).run.sample_temperature,
}


@pytest.mark.parametrize("words", [x for x in HELPS if x not in VERBS], ids=" ".join)
def test_every_option_with_a_default_has_it_in_its_help(words, capsys):
    top = parser()
    chosen = top._chosen(argparse.Namespace(**dict(zip(("command", "verb"), words))))
    formatter, checked = chosen._get_formatter(), 0
    for action in chosen._actions:
        default = action.default
        if "sample" in words and action.option_strings:
            default = DEFAULTS_OF_SCHEMA.get(action.option_strings[0], default)
        if action.nargs != 0 and default not in (None, "", [], argparse.SUPPRESS):
            checked += 1
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert shown in formatter._expand_help(action), action.option_strings
    assert checked or words[0] not in ("plan", "launch", "sample", "train")


TYPOS = {
    "trian x": 'Did you mean "train"?',
    "data shwo x": 'Did you mean "show"?',
    "train x --devics cpu:2": 'Did you mean "--devices"?',
    "plan x --serch": 'Did you mean "--search"?',
    "checkpoint export a b --formt=hf": 'Did you mean "--format"?',
    "train x --engine rai": 'Did you mean "ray"?',
}


@pytest.mark.parametrize("words", TYPOS)
def test_a_mistyped_command_or_option_names_the_one_that_is_meant(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    errors = capsys.readouterr().err
    assert errors.rstrip().endswith(TYPOS[words])
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "Did you mean" not in capsys.readouterr().err


def test_a_width_that_the_environment_gives_is_followed_in_a_pipe(tmp_path, monkeypatch):
    config = small.write(tmp_path)
    widths = []
    for columns in ("60", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(max(map(len, jaxspeed("config", config).stdout.splitlines())))
    monkeypatch.delenv("COLUMNS")
    widths.append(max(map(len, jaxspeed("config", config).stdout.splitlines())))
    assert widths == [60, 100, 120]


def test_a_missing_file_is_not_explained_as_an_empty_config(tmp_path):
    fixed = tmp_path / "fixed.json"
    for words in ((), ("--json",), ("--fix", fixed)):
        done = jaxspeed("config", tmp_path / "no.json", *words)
        assert done.returncode == 2 and not done.stdout
        assert "no such file" in " ".join(done.stderr.split())
    assert not fixed.exists()
    (row,) = explain_config(str(tmp_path / "no.json"))
    assert row.verdict == "refused" and "no such file" in row.sentence


def test_the_shipped_configs_are_listed_with_their_subjects(capsys):
    assert main(["config", "--list", "--json"]) == 0
    subjects = json.loads(capsys.readouterr().out)
    configs = Path(__file__).resolve().parents[2] / "configs"
    assert [*subjects] == sorted(file.stem for file in configs.iterdir())
    assert subjects["llama3_8b"] == "Llama 3 8B in bf16, state sharded over all devices"
    assert all(8 < len(subject) < 80 for subject in subjects.values())


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxspeed {version('jaxspeed')}\n"


def test_one_device_is_no_devices():
    assert "on 1 device agrees with" in str(CheckReport(0.0, (), 1e-4, 1))
    assert "on 8 devices agrees with" in str(CheckReport(0.0, (), 1e-4, 8))
    with pytest.raises(PlacementError, match="is for exactly 1 device, but there are 8"):
        resolve_sizes({"data": 1}, 8)


@pytest.mark.sampled
def test_a_cpu_run_with_the_tpu_extra_shows_nothing_of_libtpu():
    pytest.importorskip("libtpu")
    # One process at a time loads libtpu, and others are silent.
    env = small.environment() | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    words = (small.command("report"), [sys.executable, "-c", "import jax; jax.devices()"])
    ours, plain = (subprocess.run(w, capture_output=True, text=True, env=env) for w in words)
    assert "TPU" in plain.stderr  # JAX alone starts libtpu
    assert ours.returncode == 0 and not ours.stderr
    assert "backend            cpu" in ours.stdout


@pytest.mark.sampled
def test_what_train_names_is_there(trained):
    _, folder, done = trained
    result = json.loads(done.stdout)
    assert result["steps"] == 8
    assert result["checkpoint"] == str(folder / "checkpoints" / "step-00000008")
    assert 0 < result["eval_loss"] < 6 and 0 < result["unigram_entropy"] < 6
    for name in ("checkpoint", "metrics", "picture"):
        assert small.Path(result[name]).exists()
    assert (folder / "loss.svg").read_text().startswith("<svg ")
    assert result["sample"].startswith("ab")
    assert "jaxspeed train" in result["again"]


def test_train_names_the_phases_of_its_start_with_their_seconds(trained):
    _, _, done = trained
    phases = re.findall(r"^([a-z][A-Za-z, ]+): \d+\.\d s$", done.stderr, re.M)
    assert phases == [
        "importing JAX, starting devices",
        "reading the data",
        "building the model",
        "tracing the loss",
        "initializing weights",
        "restoring a checkpoint",
        "tracing the evaluation",
        "tracing the step",
        "compiling the step",
    ]


def test_train_shows_the_table_the_collectives_and_m(trained):
    _, _, done = trained
    assert "ZeRO stage 3 on data 8" in done.stderr
    assert "all-gather" in done.stderr and "micro-batch" in done.stderr
    assert "needed: " in done.stderr and "available: " in done.stderr
    assert "embed/table" in done.stderr


@pytest.mark.sampled
def test_a_run_of_one_device_shows_a_summary_without_the_table(tmp_path):
    config = small.write(tmp_path, run={"devices": "cpu:1", "steps": 1, "sample_tokens": 0})
    done = small.jaxspeed("train", config)
    assert done.returncode == 0, done.stderr
    assert "trainable parameters" in done.stdout and "needed: " in done.stdout
    assert "ZeRO stage 3" not in done.stdout and "compiled, per device" not in done.stdout


def test_the_command_that_continues_does(trained, tmp_path):
    _, folder, done = trained
    again = json.loads(done.stdout)["again"].partition("jaxspeed ")[2].split()
    assert again == ["train", str(folder), "--set", "run.steps=16"]
    before = (folder / "run.json").read_bytes()
    more = jaxspeed(*again, "--json")
    assert more.returncode == 0, more.stderr
    assert json.loads(more.stdout)["steps"] == 16
    assert "resumed after step 8 of 16" in more.stderr
    assert load_config(folder).run.steps == 16  # what the next command reads
    quiet = jaxspeed("train", folder, "--quiet")
    assert quiet.stdout == f"{folder / 'checkpoints' / 'step-00000016'}\n" and not quiet.stderr
    assert (folder / "run.json").read_bytes() == before


def test_eval_gives_the_loss_that_training_ended_with(trained):
    _, folder, done = trained
    found = jaxspeed("eval", folder, "--json", "--tag", "step-00000008")
    assert found.returncode == 0, found.stderr
    found = json.loads(found.stdout)
    assert found["eval_loss"] == pytest.approx(json.loads(done.stdout)["eval_loss"], rel=1e-6)


def test_sample_writes_the_prompt_and_as_many_tokens(trained):
    _, folder, done = trained
    words = ("sample", folder, "--tag", "step-00000008", "--tokens", "12", "--prompt", "ab")
    shown = jaxspeed(*words)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == json.loads(done.stdout)["sample"] + "\n"  # the same seed
    cold = [jaxspeed(*words, "--temperature", "0", "--seed", seed) for seed in ("1", "2")]
    assert cold[0].stdout == cold[1].stdout != shown.stdout


def test_a_run_s_folder_is_a_config_wherever_it_is(trained, tmp_path):
    config, folder, _ = trained
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert load_config(moved).run.output == str(moved)
    assert load_config(moved).model == load_config(config).model
    shown = [jaxspeed("data", "show", x, "-n", "1").stdout for x in (config, folder, moved)]
    assert shown[0] and shown[0] == shown[1] == shown[2]
    sampled = jaxspeed("sample", moved, "--tokens", "1", "--json")
    assert sampled.returncode == 0 and json.loads(sampled.stdout), sampled.stderr
    planned = jaxspeed("plan", moved, "--no-compile", "--json")
    assert json.loads(planned.stdout)["batch"]["train"] == 16, planned.stderr


def test_a_run_without_its_config_names_what_would_do(trained, tmp_path):
    _, folder, _ = trained
    old = shutil.copytree(folder, tmp_path / "old")
    (old / "run.yaml").unlink()
    refused = jaxspeed("sample", old)
    assert refused.returncode == 2 and "a run's folder without run.yaml" in refused.stderr


def test_a_run_of_a_python_model_is_named_as_such(tmp_path):
    config = json.loads(small.write(tmp_path).read_text())
    section = config.pop("model")["config"]
    config["run"]["steps"] = 1
    config["data"]["seq_len"] = 16
    run.train(config, *passed_model(section))
    for command in ("train", "sample", "eval", "plan", "check"):
        refused = jaxspeed(command, tmp_path / "run")
        text = " ".join(refused.stderr.split())
        assert refused.returncode == 2 and "Traceback" not in text
        assert "a run of jaxspeed.run.train(model=..., loss_fn=...), which Python passed" in text
    shown = jaxspeed("data", "show", tmp_path / "run", "-n", "1")
    assert shown.returncode == 0, shown.stderr
    source = run.source_of(tmp_path / "run", *passed_model(section))  # as the error says
    assert run.evaluate_run(source)["step"] == 1


def passed_model(sizes):
    """A model and a loss as a script passes them."""
    built = models.build("gpt2", None, sizes)
    return built.factory, built.loss


@pytest.mark.full  # the check itself: tests/engine/test_check.py
def test_check_agrees_and_says_so(trained):
    _, folder, _ = trained
    words = ("check", folder, "--layers", "1")
    shown = jaxspeed(*words)
    assert shown.returncode == 0 and "agrees with the step on one device" in shown.stdout
    assert "blocks/mlp/up/kernel" in shown.stdout


def test_a_failed_check_ends_with_1(monkeypatch, tmp_path, capsys):
    from jaxspeed.engine.check_report import LeafDifference

    bad = CheckReport(0.5, (LeafDifference("w", 0.5, 0.5),), 1e-4, 8)
    monkeypatch.setattr(run, "check_run", lambda *_, **__: bad)
    config = str(small.write(tmp_path))
    assert main(["check", config]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert main(["check", config, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["devices"] == 8 and found["leaves"][0]["path"] == "w"


def test_checkpoints_are_listed_verified_and_found_out(trained, tmp_path):
    _, folder, _ = trained
    listed_before = json.loads(jaxspeed("checkpoint", "list", folder, "--json").stdout)
    assert "step-00000008" in [info["tag"] for info in listed_before]
    assert jaxspeed("checkpoint", "verify", folder).returncode == 0
    assert "embed/table" in jaxspeed("checkpoint", "show", folder).stdout
    shown = json.loads(jaxspeed("checkpoint", "show", folder, "--json").stdout)
    assert shown["leaves"]["params/embed/table"]["shape"] == [256, 16]
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", folder, copy], check=True)
    tag = copy / "checkpoints" / "step-00000008"
    largest = max((f for f in tag.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    found = jaxspeed("checkpoint", "verify", copy)
    assert found.returncode == 1
    assert largest.name in found.stdout
    (copy / "checkpoints" / "step-00000099.writing").mkdir()  # of a save that was killed
    listed = jaxspeed("checkpoint", "list", copy).stdout
    assert "its save was interrupted" in listed and "1970" not in listed
    other = next(info["tag"] for info in listed_before if info["tag"] != tag.name)
    assert jaxspeed("checkpoint", "verify", copy, "--tag", other).returncode == 0
    assert "not a checkpoint" in jaxspeed("checkpoint", "verify", copy).stdout


def test_export_writes_what_safetensors_reads(trained, tmp_path):
    _, folder, _ = trained
    done = jaxspeed("checkpoint", "export", folder, tmp_path / "weights")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "weights").glob("*.safetensors"))


def test_a_run_is_exported_for_hugging_face_and_continued_from_there(trained, tmp_path):
    _, folder, _ = trained
    out = tmp_path / "hf"
    done = jaxspeed("checkpoint", "export", folder, out, "--format", "hf", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    found = {file.name for file in out.iterdir()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json"}
    model = {"pretrained": str(out), "family": None, "preset": None, "config": {}}
    config = small.write(tmp_path, model=model, run={"steps": 1})
    again = jaxspeed("train", config, "--json")
    assert again.returncode == 0, again.stderr
    alone = folder / "checkpoints"
    shutil.copytree(alone, tmp_path / "alone")
    words = ["checkpoint", "export", tmp_path / "alone", tmp_path / "x", "--format", "hf"]
    assert jaxspeed(*words).returncode == 0  # checkpoints name the model of their run
    (tmp_path / "alone" / "run.json").unlink()
    refused = jaxspeed(*words)
    assert refused.returncode != 0 and "name the model with --config" in refused.stderr
    named = jaxspeed(*words[:3], tmp_path / "y", *words[4:], "--config", folder)
    assert named.returncode == 0, named.stderr


def test_config_gives_a_verdict_to_each_key_and_the_schema(tmp_path):
    config = small.write(tmp_path)
    rows = json.loads(jaxspeed("config", config, "--json").stdout)
    assert {"key", "value", "verdict", "sentence"} == set(rows[0])
    assert jaxspeed("config", config).returncode == 0
    refused = jaxspeed("config", config, "--set", "sparse_gradients=true")
    assert refused.returncode == 2 and "refused" in refused.stdout
    schema = json.loads(jaxspeed("config", "--schema").stdout)
    assert "zero_optimization" in schema["properties"]


def test_report_shows_devices_and_extras():
    found = json.loads(jaxspeed("report", "--json", "--devices", "cpu:8").stdout)
    assert found["devices"]["count"] == 8
    assert "pinned_host" in found["devices"]["memory kinds"]
    assert {"hf", "tpu", "cuda", "wandb"} <= set(found["extras"])
    faults = {source.rpartition("/")[2]: told for source, told in found["known faults"].items()}
    assert [name for name, told in faults.items() if told.startswith("right")] == ["39103", "40101"]
    assert faults["46231"].startswith("not run: it concerns cuda, gpu")
    shown = jaxspeed("report", "--devices", "cpu:8")
    assert shown.returncode == 0 and max(map(len, shown.stdout.splitlines())) <= 120


def test_tokens_are_written_once_and_read_by_training(trained, tmp_path):
    config, _, _ = trained
    done = jaxspeed("data", "tokenize", config, tmp_path / "tokens", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["documents"] > 0
    words = ["--set", "data.source=tokens", "--set", f"data.path={tmp_path / 'tokens'}"]
    words += ["--output", tmp_path / "run", "--set", "run.steps=2"]
    assert jaxspeed("train", config, *words).returncode == 0


MISTAKES = {
    "no such config": (["train", "/nowhere/x.yaml"], "no such file"),
    "unknown key": (["train", "CONFIG", "--set", "run.stepz=3"], "Did you mean"),
    "no such devices": (["train", "CONFIG", "--devices", "abacus"], "cpu, gpu or tpu"),
    "no corpus": (["train", "CONFIG", "--set", "data.path=/nowhere/*.txt"], "/nowhere/*.txt"),
    "sequence too long": (["train", "CONFIG", "--set", "data.seq_len=64"], "16 positions"),
    "vocabulary too small": (
        ["train", "CONFIG", "--set", "model.config.vocab_size=100"],
        "vocabulary has 100",
    ),
    "batch too large": (["train", "CONFIG", "--set", "train_batch_size=100000"], "100,000"),
    "no such folder": (["checkpoint", "list", "/nowhere"], "no such folder"),
    "no such tag there": (["checkpoint", "show", "RUN", "--tag", "best"], "has no checkpoint best"),
    "no run yet": (["sample", "CONFIG", "--set", "run.output=/tmp/none"], "holds no checkpoint"),
    "no such tag": (["eval", "CONFIG", "--tag", "best"], "best"),
    "unwritable folder": (["train", "CONFIG", "--output", "/proc/run"], "/proc/run"),
    "no model": (["train", "configs/ds_config.json", "--set", "run.steps=1"], "no model"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_no_traceback(trained, name):
    words, hint = MISTAKES[name]
    config, folder, _ = trained
    done = jaxspeed(*({"CONFIG": config, "RUN": folder}.get(word, word) for word in words))
    assert done.returncode == 2, done.stderr
    assert hint in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == 1


def test_devices_that_are_not_here_are_a_mistake(trained):
    config, _, _ = trained
    done = small.jaxspeed("train", config, "--devices", "gpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "run.devices: gpu, which JAX cannot start" in done.stderr


def test_a_closed_output_pipe_is_no_error(trained):
    config, _, _ = trained
    line = " ".join(small.command("config", config)) + " | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        env=small.environment(),
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
