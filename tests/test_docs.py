"""README and docs are true: their commands, configs, snippets, paths and links are valid, those
that take less than 20 s run, and what they are shown to print is what they print.

Every command of a shell block, and of an output block, is in exactly one of the lists below.
"""

import re
import shlex

import pytest

from jaxspeed.cli.main import COMMANDS, main
from jaxspeed.metrics import NAMES
from jaxspeed.objective.loss import OWN_METRICS
from tests.support import doc_checks as checks
from tests.support.documents import (
    PAGES,
    ROOT,
    Block,
    blocks,
    masked,
    prepare,
    printed,
    shell_commands,
    shown_outputs,
    spans,
)

DOCS = ROOT / "docs"
TEXTS = {page.name: page.read_text() for page in PAGES}
PARALLEL = "--set parallel.remat=full --set zero_optimization.offload_optimizer.device=cpu"
PIPELINE = "--set mesh.pipe=4 --set gradient_accumulation_steps=8"

# Under 20 s each on an idle machine; `make test` runs them.
QUICK = (
    "jaxspeed config ds_config.json",
    "jaxspeed config config.json --set zero_optimization.stage=3",
    "jaxspeed config --schema",
    f"jaxspeed plan configs/tiny.yaml {PIPELINE} --no-compile",
    f"jaxspeed plan configs/tiny.yaml {PARALLEL}",
    "jaxspeed plan configs/llama3_8b.yaml --devices 8 --set mesh.pipe=4 --no-compile",
    "jaxspeed plan configs/llama3_8b.yaml --target v5p:2x2x2",
)
# Longer; `make test-full` runs them, the training ones for few steps.
LONG = (
    "jaxspeed plan configs/llama3_70b.yaml --target v5p:4x4x8",
    "jaxspeed plan configs/gpt3_175b.yaml --target h100:512 --search --write best.yaml",
    "jaxspeed plan configs/gpt_1t.yaml --target v5p:16x16x16 --html plan.html",
    "jaxspeed train configs/tiny.yaml",
    "jaxspeed train configs/tiny.yaml --set run.steps=100",
    f"jaxspeed train configs/tiny.yaml {PIPELINE}",
    "jaxspeed train configs/ds_config.json --set model.family=gpt2 --set model.preset=tiny "
    "--set run.steps=100",
    # of the run that the second one leaves
    "jaxspeed eval configs/tiny.yaml",
    "jaxspeed sample configs/tiny.yaml --prompt 'import ' --tokens 100",
    "jaxspeed checkpoint export runs/tiny weights/ --dtype bf16",
)
FEW_STEPS = " --set run.steps=4 --set run.eval_batches=1"
# Need libtpu; `make test-full` runs them where it is installed.
LIBTPU = (
    "jaxspeed plan configs/llama3_70b.yaml --target v5p:4x4x8 --compile",
    "jaxspeed plan configs/llama3_8b.yaml --target v5p:2x2x2 --compile",
)
# Not run here: what they need is absent, or they change the machine.
NOT_RUN = {
    "git clone <this repository> jaxspeed": "a network",
    "cd jaxspeed": "the clone",
    "python3 -m venv .venv": "a network",
    ". .venv/bin/activate": "the venv",
    "pip install -e .": "a network",
    "pip install 'jaxspeed[ray]'": "a network",
    "jaxspeed train configs/tiny.yaml --engine ray --set mesh.data=2 --set parallel.servers=2 "
    "--set zero_optimization.stage=0": "Ray; tests/parameter_server/ray runs it",
    "jaxspeed plan config.yaml --target v5e:2x4 --compile --keep step.exe": "a TPU v5e, to be used",
    "jaxspeed train config.yaml --set run.executable=step.exe": "a TPU v5e",
}


def commands():
    """Every command of a shell block."""
    found = [block for text in TEXTS.values() for block in blocks(text) if block.language == "sh"]
    return [command for block in found for command in shell_commands(block.text)]


def each(check, texts):
    return [problem for text in texts for problem in check(text)]


# -- what is written is valid ------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_every_command_and_snippet_is_valid(page):
    found = blocks(TEXTS[page.name])
    shell = [c for block in found if block.language == "sh" for c in shell_commands(block.text)]
    assert not each(checks.command_problems, shell)
    assert not each(checks.config_problems, (b for b in found if b.language in ("json", "yaml")))
    assert not each(checks.python_problems, (b.text for b in found if b.language == "python"))
    assert {block.language for block in found} <= {"sh", "json", "yaml", "python", ""}


def test_every_command_in_a_comment_of_a_config_is_valid():
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        comment = "\n".join(re.findall(r"^#   (.*)$", config.read_text(), re.M))
        assert not each(checks.command_problems, shell_commands(comment))


@pytest.mark.parametrize("page", PAGES, ids=TEXTS)
def test_every_key_name_path_and_link_in_the_prose_is_there(page):
    written = spans(TEXTS[page.name])
    for check in (
        checks.span_problems,
        checks.key_problems,
        checks.name_problems,
        checks.path_problems,
    ):
        assert not each(check, written)
    assert not list(checks.link_problems(page, TEXTS[page.name]))


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


def test_every_command_is_in_one_of_the_lists():
    lists = [*QUICK, *LONG, *LIBTPU, *NOT_RUN]
    assert sorted(lists) == sorted(set(lists))
    shown = {shown.command for page in PAGES for shown in shown_outputs(page) if shown.command}
    unlisted = set(commands()) - set(lists) - {command.partition(" | ")[0] for command in shown}
    assert not unlisted
    assert not set(lists) - set(commands())


# -- what is run -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(prepare(tmp_path))
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.full
def test_the_long_commands_run(tmp_path):
    for command in LONG:
        few = FEW_STEPS if command.startswith("jaxspeed train") else ""
        assert printed(command + few, "", tmp_path), command


@pytest.mark.full
@pytest.mark.parametrize("command", LIBTPU)
def test_a_command_runs_that_needs_libtpu(command, tmp_path):
    pytest.importorskip("libtpu")
    assert printed(command, "", tmp_path)


def test_the_readmes_example_prints_what_the_readme_shows(tmp_path):
    (shown,) = shown_outputs(PAGES[0])
    out = printed("", shown.program, tmp_path)
    assert masked(out) == masked(shown.output)
    for line in out.splitlines():
        if "data@" in line:  # the placement table is the same on every machine
            assert line in shown.output.splitlines()
    assert "agrees with the step on one device" in out


SHOWN = {
    f"{page.name}-{i}": shown
    for page in PAGES[1:]
    for i, shown in enumerate(shown_outputs(page), 1)
}


@pytest.mark.full
@pytest.mark.parametrize("name", SHOWN)
def test_an_output_is_what_its_command_prints(name, tmp_path):
    shown = SHOWN[name]
    if "--compile" in shown.command:
        pytest.importorskip("libtpu")
    assert masked(printed(shown.command, shown.program, tmp_path)) == masked(shown.output)


# -- the docs as a whole -----------------------------------------------------------------------


def test_every_metric_is_listed_as_it_is():
    listed = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", TEXTS["running.md"], re.M)
    metrics = {name: text for name, text in listed if name in NAMES}
    assert metrics == NAMES


def test_every_command_is_listed():
    for command in COMMANDS:
        name = command.__name__.rsplit(".", 1)[1].replace("evaluate", "eval")
        assert f"`jaxspeed {name}" in TEXTS["running.md"]


def test_no_metric_of_a_loss_may_take_the_name_of_one_of_the_runs():
    assert {name for name in NAMES if "/" not in name} <= set(OWN_METRICS)


def test_every_page_is_linked_from_the_readme_and_says_what_it_is_for():
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in TEXTS["README.md"] or f"({page.name}" in "".join(
            TEXTS[name] for name in TEXTS if name != page.name
        )
        assert "After this page you" in TEXTS[page.name].split("\n\n")[1].replace("\n", " ")


def test_the_architecture_fits_12_kb():
    assert len(TEXTS["architecture.md"].encode()) <= 12 * 1024
