"""The notebook of the first steps runs offline, and shows what its cells print."""

import json

import pytest

from tests.support import doc_checks as checks
from tests.support.notebook import NOTEBOOK, code_cells, executed, output, source, words


def test_its_commands_and_programs_are_valid_and_have_text_outputs():
    assert json.loads(NOTEBOOK.read_text())["nbformat"] == 4
    assert len(code_cells()) >= 6
    for number, cell in enumerate(code_cells(), 1):
        assert cell["execution_count"] == number
        text = source(cell)
        check = checks.command_problems if text[0] == "!" else checks.python_problems
        assert not list(check(text.removeprefix("!"))), text
        assert output(cell) and {item["output_type"] for item in cell["outputs"]} == {"stream"}


@pytest.mark.sampled
def test_each_cell_prints_what_the_notebook_shows(tmp_path):
    for cell in code_cells():
        text = executed(cell, tmp_path)
        if "generated" in cell["metadata"].get("tags", ()):
            assert text.strip(), source(cell)
        else:
            assert words(text) == words(output(cell)), source(cell)
