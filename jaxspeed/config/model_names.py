"""Names of model families and presets, read in the source of modules that import Flax."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxspeed.config.problems import Problem
from jaxspeed.config.run_sections import ModelSection
from jaxspeed.config.verdicts import shown
from jaxspeed.near_words import closest, did_you_mean


def family_problems(model: ModelSection) -> Iterator[Problem]:
    """Yield the problem of a family or of a preset that does not exist."""
    name, spec = model.family, importlib.util.find_spec("jaxspeed.models")
    if not name or spec is None or "jaxspeed.models" in sys.modules:  # which may have others
        return
    folder = Path((spec.submodule_search_locations or [""])[0])
    file = folder / f"{name}.py"
    if "/" in name:
        works = f"Such an id, or a folder, is model.pretrained: {shown(name)}."
        yield Problem("model.family", shown(name), works)
    elif not file.is_file():
        yield _unknown("model.family", name, _keys(folder / "__init__.py", "FAMILIES"))
    elif model.preset is not None:
        presets = _keys(file, "PRESETS")
        if presets and model.preset not in presets:
            yield _unknown("model.preset", model.preset, presets)


def _unknown(path: str, name: str, known: list[str]) -> Problem:
    works = f"Needs one of {', '.join(known)}. {did_you_mean(name, known)}".strip()
    near = closest(name, known)
    return Problem(path, shown(name), works, fix={path: near} if near else {})


def _keys(file: Path, table: str) -> list[str]:
    """The keys of a mapping that a module assigns to a name."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == table:
            keys = getattr(node.value, "keys", [])
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []
