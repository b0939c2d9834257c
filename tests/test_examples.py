"""Each script of examples/ runs as it stands, and its last line has the promised figures."""

import ast
import re

import pytest

from tests.support import doc_checks as checks
from tests.support.documents import ROOT, printed

FOLDER = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
# What the numbers of the last line have to be.
SHOWN = {
    "foreign_unet": lambda first, last: last < first / 2,
    "freeze_layers": lambda flops, state: flops < 60 and state < 60,  # percent
    "gan": lambda mean, _, deviation, __: abs(mean - 3) < 0.3 and 0.2 < deviation < 0.9,
    "parameter_server": lambda times: times > 2,
    "unlike_stages": lambda _, two, __, one: abs(two - one) < 1e-3 and two < 2,
    "fine_tune": lambda before, after, merged: after < before / 2 and abs(merged - after) < 2e-3,
    "generate": lambda right, sentences: right == sentences > 1,
    "many_processes": lambda processes, devices, *losses: (processes, devices) == (1, 8),
    "own_model": lambda before, after, _: before < 0.7 and after > 0.95,
    "plan": lambda stage, needed: stage == 3 and 40 < needed < 70,
}
# What they show is run by other tests of the docs, of adapters, of text or of `launch`.
ELSEWHERE = {"fine_tune", "freeze_layers", "generate", "many_processes", "own_model", "plan"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in ELSEWHERE else n for n in SCRIPTS]
)
def test_a_script_shows_what_it_promises(name, tmp_path):
    lines = printed(f"python {FOLDER / name}.py", "", tmp_path).splitlines()
    numbers = [float(x) for x in re.findall(r"(?<!\w)\d+(?:\.\d+)?", lines[-1])]
    assert SHOWN[name](*numbers), lines
    if name == "many_processes":  # the line before is of two processes
        assert lines[-2].partition(":")[2] == lines[-1].partition(":")[2]
        assert lines[-2].startswith("2 x 4 devices: ")
    if name == "own_model":
        assert "the step on 8 devices agrees with the step on one device" in "\n".join(lines)
    if name == "plan":
        assert any("does not fit" in line for line in lines) and "fits" in lines[-1]


def test_the_scripts_are_short_and_listed_and_use_public_names():
    page = (FOLDER / "README.md").read_text()
    assert not list(checks.link_problems(FOLDER / "README.md", page))
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\((\w+)\.py\)", page, re.M)
    assert sorted(name for name, _ in listed) == SCRIPTS == sorted(SHOWN)
    assert all(name == link for name, link in listed)
    for name in SCRIPTS:
        text = (FOLDER / f"{name}.py").read_text()
        assert 25 <= len(text.splitlines()) <= 70, name
        run = f"\n\n    python examples/{name}.py"
        assert ast.get_docstring(ast.parse(text)).endswith(run)
        assert not list(checks.python_problems(text))
        imported = set(re.findall(r"(?:from|import) (jaxspeed[\w.]*)", text))
        assert imported <= {"jaxspeed", "jaxspeed.models"}, name
