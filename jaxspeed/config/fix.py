"""Fix a config: apply the change of each problem that has one answer."""

import copy
from dataclasses import replace
from typing import Any

from jaxspeed.config.deepspeed_forms import canonical_path
from jaxspeed.config.load import examine
from jaxspeed.config.problems import Problem
from jaxspeed.config.suggestions import REMOVE, Fix

ROUNDS = 10  # a key that was moved may have a problem of its own in its new place


def fix_config(written: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Fix a config as it was written: (the new config, the problems fixed, each with its change).

    Misplaced keys are moved too, which are no problems unless `strict`.

    Args:
      given: the config, as in `Examined.given`.
      options: as for `examine`.
    """
    tree = copy.deepcopy(written)
    fixed: list[Problem] = []
    for _ in range(ROUNDS):
        before = copy.deepcopy(tree)
        for problem in examine(tree, **{**options, "strict": True}).problems:
            change = _change(problem, tree)
            for path, value in change.items():
                _put(tree, path, value)
            if change:
                fixed.append(replace(problem, fix=change))
        if tree == before:
            break
    return tree, fixed


def _change(problem: Problem, tree: dict[str, Any]) -> Fix:
    """The change that fixes a problem.

    If it would overwrite another key, that one is the user's choice, and only the key of the
    problem is removed.
    """
    copied = copy.deepcopy(tree)
    new = [path for path, value in problem.fix.items()
           if path != problem.path and value is not REMOVE]  # fmt: skip
    if not any(name in node for node, name in (_place(copied, path) for path in new)):
        return problem.fix
    return {problem.path: REMOVE}


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path, or remove it."""
    node, name = _place(tree, path)
    if value is not REMOVE:
        node[name] = value
    elif isinstance(node, list) or name in node:
        del node[name]


def _place(tree: dict[str, Any], path: str) -> tuple[Any, Any]:
    """Mapping or list around a key, with its name there; missing sections are created.

    The config may have an old name of the key or of a section around it.
    """
    node: Any = tree
    *parents, last = path.split(".")
    here = ""
    for part in parents:
        if isinstance(node, list):
            node = node[int(part)]
        else:
            name = _name_in(node, here, part)
            if not isinstance(node.get(name), dict | list):
                node[name] = {}
            node = node[name]
        here += f"{part}."
    return node, int(last) if isinstance(node, list) else _name_in(node, here, last)


def _name_in(node: dict[str, Any], here: str, part: str) -> str:
    """Name by which a mapping has a key of the schema."""
    return next((name for name in node if canonical_path(here + name) == here + part), part)
