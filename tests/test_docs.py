"""README and docs are valid: their commands, configs, snippets, keys, names, paths and links.

`test_docs_run.py` runs them.
"""

import inspect
import re
import subprocess
import sys

import pytest

import jaxspeed
from jaxspeed.cli.main import COMMANDS
from jaxspeed.metrics import NAMES
from tests.support import doc_checks as checks
from tests.support.documents import (
    GUIDES,
    KEYS,
    OBJECTIVES_OF_FAMILIES,
    PAGES,
    PUBLIC_NAMES,
    ROOT,
    Block,
    blocks,
    example,
    key_table,
    name_table,
    objective_table,
    shell_commands,
    spans,
)

DOCS = ROOT / "docs"
TEXTS = {page.name: page.read_text() for page in PAGES}


def each(check, texts):
    return [problem for text in texts for problem in check(text)]


# -- what is written is valid ------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_every_command_and_snippet_is_valid(page, tmp_path, monkeypatch):
    found = blocks(TEXTS[page.name])
    if page.name == "objectives.md":  # whose commands name a module that it shows
        (tmp_path / "ranking.py").write_text(example(TEXTS[page.name]))
        monkeypatch.syspath_prepend(tmp_path)
    shell = [c for block in found if block.language == "sh" for c in shell_commands(block.text)]
    assert not each(checks.command_problems, shell)
    assert not each(checks.config_problems, (b for b in found if b.language in ("json", "yaml")))
    assert not each(checks.python_problems, (b.text for b in found if b.language == "python"))
    assert {block.language for block in found} <= {"sh", "json", "yaml", "python", ""}


def test_tables_of_keys_are_those_of_the_declarations():
    found = [match for text in TEXTS.values() for match in KEYS.finditer(text)]
    assert {match[1] for match in found} >= {"mesh", "parallel"}
    for match in found:
        assert match[2] == key_table(match[1]), "python -m tests.support.documents docs/config.md"


def test_the_table_of_objectives_is_that_of_the_classes():
    (found,) = OBJECTIVES_OF_FAMILIES.finditer(TEXTS["objectives.md"])
    assert found[1] == objective_table(), "python -m tests.support.documents docs/objectives.md"


def test_every_command_in_a_comment_of_a_config_is_valid():
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        comment = "\n".join(re.findall(r"^#   (.*)$", config.read_text(), re.M))
        assert not each(checks.command_problems, shell_commands(comment))


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_every_key_name_path_and_link_in_the_prose_is_there(page):
    text = TEXTS[page.name]
    if page.name == "mistakes.md":  # whose table has wrong ones
        text = text.partition("\n|")[0]
    written = spans(text)
    for check in (
        checks.span_problems,
        checks.key_problems,
        checks.name_problems,
        checks.path_problems,
    ):
        assert not each(check, written)
    assert not list(checks.link_problems(page, text))


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (checks.command_problems, "jaxspeed plan configs/tiny.yaml --tagret v5p:2x2x2"),
        (checks.command_problems, "jaxspeed plan configs/tiny.yaml --target v5p:2x2"),
        (checks.command_problems, "jaxspeed plan configs/tiny.yaml --set mesh.tenser=2"),
        (checks.command_problems, "jaxspeed train configs/no.yaml"),
        (checks.command_problems, "jaxspeed trian configs/tiny.yaml"),
        (checks.command_problems, "make tset"),
        (checks.command_problems, "make test TESTS=tests/no_such_folder"),
        (checks.command_problems, "pip install jaxspeed[no_such_extra]"),
        (checks.command_problems, "python benchmarks/no_such_file.py"),
        (checks.command_problems, "deepspeed train.py"),
        (checks.span_problems, "jaxspeed checkpoint list|shwo DIR"),
        (checks.span_problems, "jaxspeed plan CONFIG --tagret v5p:4x4x8"),
        (checks.span_problems, "--no-such-option"),
        (checks.config_problems, Block("json", '{"zero_optimisation": {"stage": 3}}')),
        (checks.config_problems, Block("yaml", "parallel: { remat: fulll }\n")),
        (checks.config_problems, Block("yaml", "parallel: { remat: full }\nparallel: { no: 1 }\n")),
        (checks.config_problems, Block("yaml", "gpu: { memory: 3 }\n", checks.CHIPS)),
        (checks.key_problems, "parallel.remats"),
        (checks.key_problems, "parallel.remat: fulll"),
        (checks.key_problems, '"mesh": {"tenser": 4}'),
        (checks.python_problems, "for x in y"),
        (checks.python_problems, "from jaxspeed.run import trian"),
        (checks.python_problems, "engine.trian_batch(batch)"),
        (checks.python_problems, "jaxspeed.initialize(model, configs={})"),
        (checks.name_problems, "engine.check_all(batch)"),
        (checks.name_problems, "jaxspeed.planner.memory.memory_off(program)"),
        (checks.path_problems, "tests/no_such_file.py"),
        (checks.path_problems, "no_such_file.py"),
        (checks.path_problems, "no_such_folder/"),
    ],
)
def test_what_is_wrong_is_found(check, wrong):
    assert list(check(wrong))


@pytest.mark.parametrize("link", ["no.md", "config.md#no-such-heading", "#no-such-heading"])
def test_a_dead_link_is_found(link):
    assert list(checks.link_problems(DOCS / "plan.md", f"# Plan\n\n[here]({link})\n"))


# -- the docs as a whole -----------------------------------------------------------------------


def test_every_metric_is_listed_as_it_is():
    listed = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", TEXTS["running.md"], re.M)
    metrics = {name: text for name, text in listed if name in NAMES}
    assert metrics == NAMES


def test_every_command_is_listed():
    for name in COMMANDS:
        assert f"`jaxspeed {name}" in TEXTS["running.md"]


def test_every_page_is_in_the_contents_and_says_what_it_is_for():
    for page in PAGES:
        path = page.relative_to(DOCS, walk_up=True).as_posix()
        assert path == "index.md" or f"]({path})" in TEXTS["index.md"]
    for page in GUIDES[1:]:
        assert "After this page you" in TEXTS[page.name].split("\n\n")[1].replace("\n", " ")


def test_the_readme_leads_to_what_is_asked_first():
    first = TEXTS["README.md"].partition("## Install")[0]
    for target in ("#install", "#your-own-model", "#your-own-ds_configjson", "docs/index.md"):
        assert f"]({target})" in first
    for page in ("fine-tuning", "plan", "clusters", "api"):
        assert f"](docs/{page}.md)" in first


def test_the_tables_of_names_are_those_of_the_package():
    found = [match for text in TEXTS.values() for match in PUBLIC_NAMES.finditer(text)]
    assert {match[1] for match in found} >= {"jaxspeed", "jaxspeed.ops"}
    for match in found:
        assert match[3] == name_table(match[1], match[2]), (
            "python -m tests.support.documents docs/api.md"
        )
        rows = re.findall(r"^\| `\w+` \| *(.*?) *\|$", match[3], re.M)
        assert all(rows), "a public name has no docstring"


def test_public_methods_have_docstrings():
    for name in jaxspeed.__all__:
        value = getattr(jaxspeed, name)
        if inspect.isclass(value) and not issubclass(value, Exception) and name != "Config":
            own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
            methods = {
                k: v for k, v in own.items() if inspect.isfunction(v) or isinstance(v, property)
            }
            undocumented = [k for k, v in methods.items() if not inspect.getdoc(v)]
            assert not undocumented, f"{name}: {undocumented}"


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", DOCS, tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    reference = (tmp_path / "api.html").read_text()
    assert 'id="jaxspeed.initialize"' in reference and "jaxspeed.Engine.train_batch" in reference


def test_the_architecture_fits_12_kb():
    assert len(TEXTS["architecture.md"].encode()) <= 12 * 1024
