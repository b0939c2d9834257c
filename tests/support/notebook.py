"""The notebook of the first steps as data, and its execution without Jupyter.

A code cell is one command after "!", or a Python program. `python -m tests.support.notebook`
executes the cells in order, in one folder, and rewrites their outputs.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.support.documents import ROOT, masked, printed

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
HOME = "/home/me/first"  # in outputs, instead of the folder
# Lines of phases that last, which depend on the machine, as do those of progress and of generated
# text, curves, and the table of phases.
PHASES = re.compile(r"^(?:importing|reading|initializing|tracing|compiling)\b.*\n", re.M)
VARYING = re.compile(
    rf"{PHASES.pattern}|^step +\d+/.*\n|^[╭│╰].*\n|[▁-█]+|(?s:^where the time went.*?\n\n)", re.M
)


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def output(cell: dict[str, Any]) -> str:
    return "".join(line for item in cell["outputs"] for line in item["text"])


def executed(cell: dict[str, Any], folder: Path) -> str:
    """What a cell prints in a folder in which those before it were executed."""
    text = source(cell)
    command = text.removeprefix("!") if text.startswith("!") else ""
    return printed(command, text, folder).replace(str(folder.resolve()), HOME)


def words(text: str) -> set[str]:
    """The words of an output that do not depend on the machine."""
    return set(masked(VARYING.sub("", text)))


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(codes, 1):
            text = PHASES.sub("", executed(cell, Path(folder))).splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            cell |= {"execution_count": number, "outputs": [stream] if text else []}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
