"""What is wrong with a command, a config, a snippet, a path or a link of the docs.

Each check takes a text and yields problems, so that a test can give it a wrong one too.
"""

import argparse
import ast
import glob
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import jaxspeed
from jaxspeed.cli.main import parser
from jaxspeed.config.objective_keys import OBJECTIVES, objective_class
from jaxspeed.config.tree import VOCABULARY
from jaxspeed.errors import JaxspeedError
from jaxspeed.hardware import read_chips
from jaxspeed.hardware.targets import target_of
from jaxspeed.parameter_server.engine import LocalServedEngine
from tests.support.documents import ROOT, Block, prose

CHIPS = "<!-- a file of chips -->"
# Programs of shell blocks that only prepare a checkout.
PREPARING = {"git", "cd", "cp", "python3", "."}
# Configs that a reader has, as if they said this.
RUNS = ("runs/", "copied")  # folders of a reader's runs
READERS_CONFIGS = {"config.yaml", "config.json", "ds_config.json"}
READERS_CONFIG = {"train_batch_size": 64}
SECTIONS = {path.partition(".")[0] for path in VOCABULARY}
KEYS = [
    *VOCABULARY,
    *(
        f"objective.{key}"
        for name in OBJECTIVES
        for key in objective_class(name).Options.model_fields
    ),
]
# Folders of a run.
OF_A_RUN = {"runs/", "checkpoints/", "profile/"}


# -- commands ----------------------------------------------------------------------------------


def command_problems(command: str) -> Iterator[str]:
    """What is wrong with a complete command."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if words[0] == "jaxspeed":
        yield from _jaxspeed_problems(words[1:])
    elif words[0] == "make":
        yield from _make_problems(words[1:])
    elif words[:2] == ["pip", "install"]:
        yield from _pip_problems(words[2:])
    elif words[0] == "python":
        yield from _python_problems(words[1:])
    elif words[0] not in PREPARING:
        yield f"no check knows the program {words[0]}"


def span_problems(span: str) -> Iterator[str]:
    """What is wrong with inline code that is a command, or a part of one."""
    program, _, rest = span.partition(" ")
    if program == "jaxspeed" and rest:
        words, inner = _launched(rest.split())
        found, options = _subcommand(words)
        if inner:
            yield from span_problems(f"jaxspeed {' '.join(inner)}")
        if found is None:
            yield f"no command {span!r}"
        else:
            known = found._option_string_actions
            yield from (f"{span!r}: no option {o}" for o in options if o not in known)
    elif program == "make" and rest:
        yield from _make_problems(shlex.split(rest))
    elif program == "python" and rest:
        yield from _python_problems(shlex.split(rest))
    elif re.fullmatch(r"--[a-z-]+", program) and not any(
        program in each._option_string_actions for each in _parsers(parser())
    ):
        yield f"no command has the option {program}"


def _jaxspeed_problems(words: list[str]) -> Iterator[str]:
    words, inner = _launched(words)
    if inner and not inner[0].endswith(".py"):
        yield from _jaxspeed_problems(inner)
    try:
        given = _strict(parser()).parse_args([*words, *inner])
    except ValueError as error:
        yield f"jaxspeed {shlex.join(words)}: {error}"
        return
    config, overrides = getattr(given, "config", None), getattr(given, "overrides", [])
    if getattr(given, "engine", None) == "ray":
        overrides = [*overrides, "parallel.data_reduction=parameter_server"]
    try:
        if config in READERS_CONFIGS or str(config).startswith(RUNS):
            jaxspeed.Config.load(READERS_CONFIG, overrides)
        elif config is not None:
            file = ROOT / config
            jaxspeed.Config.load(file if file.exists() else config, overrides)  # a shipped one
        if getattr(given, "target", None):
            target_of(given.target)
    except JaxspeedError as error:
        yield f"jaxspeed {shlex.join(words)}: {error}"


def _launched(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of `jaxspeed launch`, and those of the command that it starts."""
    end = words.index("--") if words[:1] == ["launch"] and "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _strict(found: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser, and those below it, that raise ValueError."""

    def error(message: str) -> None:
        raise ValueError(message)

    for each in _parsers(found):
        each.error = error  # type: ignore[method-assign, assignment]
    return found


def _below(found: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = (a for a in found._actions if isinstance(a, argparse._SubParsersAction))
    return {name: each for action in actions for name, each in action.choices.items()}


def _parsers(found: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield found
    for each in _below(found).values():
        yield from _parsers(each)


def _subcommand(words: list[str]) -> tuple[argparse.ArgumentParser | None, list[str]]:
    """The parser of `plan --target X`, and the options; of `checkpoint list|show` the first."""
    found = parser()
    while words and _below(found):
        below = _below(found)
        if words[0].startswith("--"):
            break
        names = words[0].split("|")
        if any(name not in below for name in names if name != "COMMAND"):
            return None, []
        found, words = below.get(names[0], found), words[1:]
    return found, [word for word in words if word.startswith("--")]


def _make_problems(words: list[str]) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in targets:
            yield f"make {name}: no such target"
        if name == "TESTS":
            yield from (f"make: no {path}" for path in value.split() if not _exists(path))


def _pip_problems(words: list[str]) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        if extra not in project["optional-dependencies"]:
            yield f"no extra {extra}"


def _python_problems(words: list[str]) -> Iterator[str]:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            yield f"no module {words[1]}"
    elif words[0] == "-c":
        yield from python_problems(words[1])
    elif not _exists(words[0]):
        yield f"no {words[0]}"


def _exists(path: str) -> bool:
    return bool(glob.glob(str(ROOT / path)))


# -- configs -----------------------------------------------------------------------------------


def config_problems(block: Block) -> Iterator[str]:
    """What is wrong with a block of JSON or YAML: each is a config, or a file of chips."""
    try:
        if block.marker == CHIPS:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                file.write(block.text)
                file.flush()
                read_chips(file.name)
            return
        for text in _alternatives(block) if block.language == "yaml" else [block.text]:
            given = json.loads(text) if block.language == "json" else yaml.safe_load(text)
            jaxspeed.Config.load(_complete(given))
    except (ValueError, yaml.YAMLError, JaxspeedError) as error:
        yield str(error)


def _alternatives(block: Block) -> list[str]:
    """A YAML block, or each of its entries where one key comes several times."""
    entries = re.split(r"^(?=\w)", block.text, flags=re.M)
    keys = [entry.partition(":")[0] for entry in entries if entry.strip()]
    return [block.text] if len(set(keys)) == len(keys) else [e for e in entries if e.strip()]


def _complete(given: dict[str, Any]) -> dict[str, Any]:
    sized = {"train_batch_size", "train_micro_batch_size_per_gpu"} & given.keys()
    return given if sized else READERS_CONFIG | given


def key_problems(span: str) -> Iterator[str]:
    """What is wrong with inline code that is a key of a config, alone or with a value."""
    found = re.fullmatch(r"(\w+(?:\.\w+)+)(?:: (.+))?", span)
    if found and found[1].partition(".")[0] in SECTIONS and not _is_file(found[1]):
        if not any(path == found[1] or path.startswith(f"{found[1]}.") for path in KEYS):
            yield f"no key {found[1]}"
        elif found[2]:
            value = yaml.safe_load(found[2])
            for key in reversed(found[1].split(".")):
                value = {key: value}
            yield from config_problems(Block("json", json.dumps(value)))
    written = re.fullmatch(r'"(\w+)": \{.*\}', span)
    if written and written[1] in SECTIONS:
        yield from config_problems(Block("json", "{" + span + "}"))


def _is_file(name: str) -> bool:
    return name.endswith((".json", ".py", ".yaml"))


# -- Python ------------------------------------------------------------------------------------


def python_problems(code: str) -> Iterator[str]:
    """What is wrong with a snippet: its syntax, and the names of jaxspeed that it uses."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        yield str(error)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxspeed"):
            for alias in node.names:
                yield from name_problems(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("jaxspeed", "engine"):
                yield from name_problems(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            yield from _argument_problems(node)


def _argument_problems(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in ("jaxspeed.initialize", "jaxspeed.plan", "jaxspeed.propose_tensor_sharding"):
        known = inspect.signature(getattr(jaxspeed, name.partition(".")[2])).parameters
        unknown = [word.arg for word in call.keywords if word.arg not in known]
        yield from (f"{name} has no argument {argument}" for argument in unknown)


def name_problems(span: str) -> Iterator[str]:
    """What is wrong with inline code that begins with a name of jaxspeed's, or of an engine's."""
    found = re.match(r"(engine|jaxspeed)((?:\.\w+)+)", span)
    if not found:
        return
    here: Any = LocalServedEngine if found[1] == "engine" else jaxspeed
    path = found[1]
    for name in found[2].split(".")[1:]:
        path = f"{path}.{name}"
        if found[1] == "engine":
            if not hasattr(here, name):
                yield f"no {path}"
            return
        try:
            here = getattr(here, name, None) or importlib.import_module(path)
        except ImportError:
            yield f"no {path}"
            return


# -- links and paths ---------------------------------------------------------------------------


def link_problems(page: Path, text: str) -> Iterator[str]:
    """Links to files, and to headings in them, that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            yield f"{target}: no such heading"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def path_problems(span: str) -> Iterator[str]:
    """What is wrong with inline code that is a path of this repository, or a file's name."""
    if re.match(r"(tests|jaxspeed|benchmarks|configs|docs|tools)/[\w./*-]*$", span):
        if not _exists(span):
            yield f"no {span}"
    elif re.fullmatch(r"[\w/]+\.py", span):
        if not any(path.endswith(f"/{span}") for path in _files()):
            yield f"no file {span}"
    elif re.fullmatch(r"[\w/]+/", span) and not (
        span in OF_A_RUN or any(f"/{span}" in path for path in _files())
    ):
        yield f"no folder {span}"


@cache
def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [f"/{line}" for line in listed.splitlines()]
