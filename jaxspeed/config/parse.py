"""Parse a config file, dict or override into a plain tree, with problems of what is unreadable."""

import copy
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxspeed.config.problems import Problem
from jaxspeed.config.tree import keys_in
from jaxspeed.config.verdicts import shown
from jaxspeed.near_words import did_you_mean

# Of a config, with YAML's aliases written out. What is read takes a pass over all of it, and each
# unknown key a comparison with all known ones.
MOST_BYTES = 1 << 18
MOST_VALUES = 10_000
MOST_KEYS = 1_000
DEEPEST = 50
LONGEST_KEY = 200
RUN_CONFIG = "run.yaml"  # in a run's folder: its config with all overrides
PASSED = "_passed_in_python"  # a comment in it: arguments of `jaxspeed.run.train` beside the config
_LONGEST_NUMBER = 4_300  # as in Python


class TooLarge(ValueError):
    """What is read exceeds a bound, which its text names."""


class _Pairs(list):
    """A mapping as its (key, value) pairs, with duplicate keys."""


def read_source(source: Any) -> tuple[dict[str, Any], list[Problem], str]:
    """Read a dict, a .json, .yaml or .yml file, or a run's folder: (tree, problems, name).

    The output of a run's config is the folder itself, wherever that is now. A path that does not
    exist may name a shipped config.
    """
    if isinstance(source, Mapping):
        return *as_tree(source), "the config"
    if not isinstance(source, str | Path):
        kind = f"a {type(source).__name__}"
        works = "Needs a dict, a jaxspeed.Config or the path of a .json, .yaml or .yml file."
        return {}, [Problem("config", kind, works)], "the config"
    path = Path(source)
    origin = shown(str(path)).strip('"')
    try:
        is_run = path.is_dir()
        file = path / RUN_CONFIG if is_run else path if path.exists() else _shipped(path)
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise TooLarge(f"over {MOST_BYTES:,} bytes")
        tree, problems = _parsed(content.decode("utf-8-sig"), file.suffix.lower())
        if is_run and isinstance(tree, dict):
            tree["run"] = {**(tree.get("run") or {}), "output": str(path)}
    except TooLarge as error:
        return {}, [Problem(origin, str(error), _NO_CONFIG)], origin
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return {}, [_unreadable(path, error)], origin
    except RecursionError:
        return {}, [Problem(origin, "nesting too deep to read", "Needs fewer levels.")], origin
    return _mapping(tree, problems), problems, origin


_NO_CONFIG = "No config is that large."


def shipped_configs() -> list[Path]:
    """The configs in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    folder = package / "configs"
    folder = folder if folder.is_dir() else package.parent / "configs"
    return sorted(file for file in folder.glob("*") if file.suffix in (".json", ".yaml"))


def _shipped(path: Path) -> Path:
    """The shipped config of a name such as tiny or configs/tiny.yaml; else the path itself."""
    files = shipped_configs()
    names = {name: file for file in files for name in (file.stem, file.name)}
    return names.get(path.as_posix().removeprefix("configs/"), path)


def as_tree(source: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Copy a user's mapping to plain dicts and lists, with problems of its keys."""
    try:
        return _folded(source)
    except TooLarge as error:
        return {}, [Problem("config", str(error), _NO_CONFIG)]


def apply_override(tree: dict[str, Any], override: Any) -> Problem | None:
    """Set `a.b=c` in the tree, with the value parsed as YAML."""
    if not isinstance(override, str) or not re.match(r"[^=\s.]+(\.[^=\s.]+)*=", override):
        return Problem("override", shown(override), "Needs the form section.key=value.")
    path, _, text = override.partition("=")
    try:
        value, problems = _parsed_yaml(text)
    except (ValueError, RecursionError):
        return Problem(path, f"the override {shown(text)}", "Needs a value as YAML would write it.")
    if problems:
        first = problems[0]
        return Problem(f"{path}.{first.path}", first.found, first.works)
    *parents, last = path.split(".")
    if len(parents) >= DEEPEST or len(path) > LONGEST_KEY:
        return Problem("override", shown(override), "No key is that long.")
    node: Any = tree
    for done, part in enumerate(parents):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            continue
        if isinstance(node, dict) and node.get(part, {}) is None:
            node[part] = {}
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict | list):
            where = ".".join(parents[: done + 1])
            return Problem(path, f"an override below {where}", f"{where} is no section.")
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            return Problem(path, "an override", f"The list has {len(node)} items, from 0.")
        node[int(last)] = value
    else:
        node[last] = value
    return None


def _unreadable(path: Path, error: Exception) -> Problem:
    name = shown(str(path)).strip('"')
    if isinstance(error, FileNotFoundError) and path.is_dir():
        return _no_run(path, name)
    if isinstance(error, FileNotFoundError):
        near = did_you_mean(path.name, _file_names(path.parent))
        near = near or did_you_mean(path.parent.name, _file_names(path.parent.parent))
        near = near or did_you_mean(path.stem, [file.stem for file in shipped_configs()])
        where = f"The folder is {path.parent.absolute()}; `jaxspeed config --list` has others."
        return Problem(name, "no such file", near or where)
    if isinstance(error, json.JSONDecodeError):
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        return Problem(name, place, "Needs JSON, in which comments may stand.")
    reason = re.sub(r"\s+", " ", str(error)).replace(r"character '\t'", "a tab")
    return Problem(name, reason[:200], "Needs a readable .json, .yaml or .yml file.")


def _no_run(folder: Path, name: str) -> Problem:
    """The problem of a folder without a run's config."""
    if (folder / "run.json").exists():
        works = "Name the run's config file once: training then stores it in the folder."
        return Problem(name, f"a run's folder without {RUN_CONFIG}", works)
    if (folder / "config.json").exists():
        works = "Needs a config; `jaxspeed train --model FOLDER --data FILE` trains such a model."
        return Problem(name, "the folder of a model", works)
    works = "Needs a .json, .yaml or .yml file, or the folder of a run."
    return Problem(name, "a folder that holds no run", works)


def _file_names(folder: Path) -> list[str]:
    try:
        return [item.name for item in folder.iterdir()]
    except OSError:
        return []


def _parsed(text: str, suffix: str) -> tuple[Any, list[Problem]]:
    if suffix in (".yaml", ".yml"):
        return _parsed_yaml(text)
    if suffix == ".json":
        plain, commas = _plain_json(text)
        tree, problems = _parsed_json(plain)
        return tree, [*commas, *problems]
    raise ValueError(f'a file name that ends in "{suffix}"')


LAST_COMMA = "a comma after the last item"
# Text and comments without their ends match, too, so that the end is searched for once.
_STRING = r'"(?:\\.|[^"\\\n])*"?'
_COMMENT = re.compile(rf"({_STRING})|(?://|\#)[^\n]*|/\*.*?(?:\*/|\Z)", re.S)
_LAST_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")
_COMMA_ALONE = re.compile(rf"({_STRING})|(?<=[\[{{,])\s*,")


def _plain_json(text: str) -> tuple[str, list[Problem]]:
    """Blank out comments, and commas after a last item, each of which is a problem.

    Each other character keeps its line and column, which errors name. A comma without an item
    before it is no JSON at all.
    """

    def blank(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"[^\n]", " ", match[0])

    plain = _COMMENT.sub(blank, text)
    for comma in _COMMA_ALONE.finditer(plain):
        if comma[1] is None:
            at = plain.index(",", comma.start())
            raise json.JSONDecodeError("a comma without an item before it", plain, at)
    places = [comma.start() for comma in _LAST_COMMA.finditer(plain) if comma[1] is None]
    lines = [(plain.count("\n", 0, at) + 1, at - plain.rfind("\n", 0, at)) for at in places]
    remedy = "Remove it; `jaxspeed config CONFIG --fix OUT` does."
    commas = [
        Problem(f"line {line}, column {column}", LAST_COMMA, remedy) for line, column in lines
    ]
    return _LAST_COMMA.sub(blank, plain), commas


def _parsed_json(text: str) -> tuple[Any, list[Problem]]:
    """Parse JSON, or else what YAML and hjson accept alike: text and names without quotes."""
    try:
        return _folded(json.loads(text, object_pairs_hook=_Pairs))
    except json.JSONDecodeError:
        if not text.lstrip().startswith("{"):
            raise
        with suppress(ValueError):
            return _parsed_yaml(text)
        raise


def _parsed_yaml(text: str) -> tuple[Any, list[Problem]]:
    import yaml

    try:
        return _folded(yaml.load(text, _yaml_loader()))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


@lru_cache(maxsize=1)
def _yaml_loader() -> Any:
    """PyYAML's safe loader, with bounds on what is composed, and two fixes.

    YAML 1.1, which PyYAML follows, reads `1e-5` as text because it has no dot; YAML 1.2 reads it as
    a number. And a duplicate key silently loses its first value.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        composed = level = 0  # nodes, those behind an alias each time

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias, before = self.check_event(yaml.AliasEvent), self.composed
            self.composed += 1
            self.level += 1
            if self.level > DEEPEST + 1:
                raise TooLarge(f"over {DEEPEST} levels")
            node: Any = super().compose_node(parent, index)
            self.level -= 1
            if is_alias:
                self.composed += getattr(node, "composed", 0)
            else:
                node.composed = self.composed - before
            if self.composed > 2 * MOST_VALUES:  # keys are nodes, too
                raise TooLarge(f"over {MOST_VALUES:,} values")
            if node.tag in numbers and len(node.value) > _LONGEST_NUMBER:
                raise TooLarge(f"a number of {len(node.value):,} characters")
            return node

    numbers = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

    def pairs(loader: Any, node: Any) -> _Pairs:
        own_items = [item for item in node.value if item[0].tag != "tag:yaml.org,2002:merge"]
        loader.flatten_mapping(node)
        inherited = node.value[: len(node.value) - len(own_items)]
        read = [
            [(loader.construct_object(key, True), loader.construct_object(value, True))
             for key, value in items]
            for items in (inherited, own_items)
        ]  # fmt: skip
        names = [key for key, _ in read[1]]
        return _Pairs([item for item in read[0] if item[0] not in names] + read[1])

    number = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
    Loader.add_constructor("tag:yaml.org,2002:map", pairs)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def _folded(root: Any) -> tuple[Any, list[Problem]]:
    """Copy to dicts and lists; duplicate keys and keys that are no text are problems.

    Of a user's objects, tuples become lists, and models their values.
    """
    problems: list[Problem] = []
    values = keys = 0

    def fold(node: Any, path: str, level: int = 0) -> Any:
        nonlocal values, keys
        values += 1
        if values > MOST_VALUES:
            raise TooLarge(f"over {MOST_VALUES:,} values")
        if level > DEEPEST:
            raise TooLarge(f"over {DEEPEST} levels")
        if hasattr(node, "model_dump"):
            node = node.model_dump(exclude_unset=True)
        if isinstance(node, list | tuple) and not isinstance(node, _Pairs):
            return [fold(item, f"{path}.{n}", level + 1) for n, item in enumerate(node)]
        if not isinstance(node, _Pairs | Mapping):
            return copy.copy(node)
        folded: dict[str, Any] = {}
        for key, value in node if isinstance(node, _Pairs) else node.items():
            keys += 1
            if keys > MOST_KEYS:
                raise TooLarge(f"over {MOST_KEYS:,} keys")
            if isinstance(key, str) and len(key) > LONGEST_KEY:
                raise TooLarge(f"a key of {len(key):,} characters, {shown(key)}")
            where = f"{path}.{key}".removeprefix(".")
            if not isinstance(key, str):
                works = f'Needs a key in quotes: "{shown(key)}".'
                problems.append(Problem(path or "config", f"the key {shown(key)}", works))
                continue
            if key in folded:
                actual = f"the key twice, with {shown(folded[key])} and {shown(value)}"
                problems.append(Problem(where, actual, "Needs the key once: keep one of the two."))
            folded[key] = fold(value, where, level + 1)
        return folded

    return fold(root, ""), problems


def _mapping(tree: Any, problems: list[Problem]) -> dict[str, Any]:
    if isinstance(tree, dict):
        return tree
    if tree is None:
        problems.append(
            Problem("config", "nothing: the file is empty", "`jaxspeed init` writes one.")
        )
        return {}
    known = ", ".join(keys_in("")[:3])
    problems.append(Problem("config", shown(tree), f"Needs a mapping of keys such as {known}."))
    return {}
