"""Each task of docs/everyday.md runs as the page has it, beside a text and a small model."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxspeed.cli.main import main
from tests.support.documents import ROOT, blocks, shell_commands

BASE, *SECTIONS = re.split(r"^## ", (ROOT / "docs/everyday.md").read_text(), flags=re.M)
TASKS = {text.partition("\n")[0]: text for text in SECTIONS}
SLOW = {"Two processes", "Continue on fewer devices"}  # start processes
NEEDS = {"TensorBoard": "tensorboardX", "Weights & Biases, offline": "wandb"}


def write_config(task="", in_process=True):
    """The page's config with the lines of a task."""
    (block,) = blocks(BASE)
    config = yaml.safe_load(block.text)
    for block in blocks(task):
        if block.language == "yaml":
            lines = yaml.safe_load(block.text)
            config |= lines | {"run": config["run"] | lines.get("run", {})}
    if in_process:
        del config["run"]["devices"]  # this process has its devices already
    with open("config.yaml", "w") as file:
        yaml.safe_dump(config, file)


def run(command):
    words = shlex.split(command)
    while "=" in words[0]:
        os.environ.update([words.pop(0).split("=")])
    if words[0] == "cp":
        shutil.copytree(*words[2:])
    elif "--devices" in words:  # others than this process has
        subprocess.run([sys.executable, "-m", *words], env=without_devices(), check=True)
    else:
        assert words[0] == "jaxspeed"
        assert main(words[1:]) == 0


def without_devices():
    return {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which the page's config was trained, and its weights exported."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "corpus").mkdir()
    for name in ("argparse", "ast", "inspect"):
        shutil.copy(__import__(name).__file__, folder / "corpus" / f"{name}.txt")
    shutil.copy(re.__file__, folder / "notes.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_config()
        run("jaxspeed train config.yaml")
        run("jaxspeed checkpoint export runs/mine small --format hf")
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.full) if t in SLOW else t for t in TASKS]
)
def test_a_task_takes_ten_lines_that_run(task, trained, tmp_path, monkeypatch):
    if task in NEEDS:
        pytest.importorskip(NEEDS[task])
    text = TASKS[task]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if "jaxspeed train" in text or "jaxspeed launch" in text or "train(" in text:
        shutil.rmtree("runs")
    write_config(text, task not in SLOW)
    of_user = [b for b in blocks(text) if b.language in ("yaml", "sh", "python")]
    assert sum(bool(line.strip()) for b in of_user for line in b.text.splitlines()) <= 10
    for block in of_user:
        if block.language == "python":
            exec(compile(block.text, task, "exec"), {"__name__": "task"})
        for command in shell_commands(block.text) if block.language == "sh" else ():
            run(command)
