"""The objective of docs/objectives.md trains and evaluates by the commands of the page."""

import shlex

import pytest

from jaxspeed.cli.main import main
from tests.support.documents import ROOT, blocks, example, shell_commands

PAGE = (ROOT / "docs" / "objectives.md").read_text()
FEW = ("run.steps=8", "model.config.num_hidden_layers=1", "data.held_out=0.1")


@pytest.mark.sampled
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "ranking.py").write_text(example(PAGE))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = [block for block in blocks(PAGE) if block.language == "sh"]
    commands = shell_commands(block.text)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)[1:]  # without the program
        assert main([*words, *(x for key in FEW for x in ("--set", key))]) == 0
        printed = capsys.readouterr().out
    assert "accuracy" in printed
