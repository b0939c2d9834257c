"""Load and validate a config: settings, or all problems of the file, dict or overrides."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from jaxspeed.config.auto import (
    DECAY_END,
    EPOCHS,
    STEPS,
    AutoValues,
    Filled,
    HiddenSize,
    fill_autos,
    with_value,
)
from jaxspeed.config.cross_checks import check
from jaxspeed.config.deepspeed_forms import rewrite
from jaxspeed.config.equivalent_keys import mesh_from_keys, with_one_offload, with_one_recompute
from jaxspeed.config.layer_specs import layer_specs_from_keys
from jaxspeed.config.optimizer_defaults import complete
from jaxspeed.config.parse import apply_override, read_source
from jaxspeed.config.problems import Problem, from_pydantic
from jaxspeed.config.schema import Settings
from jaxspeed.config.suggestions import REMOVE
from jaxspeed.config.tree import PARAMS, declared, given_leaves, read, without
from jaxspeed.config.verdicts import judge, shown


@dataclass(frozen=True)
class Examined:
    """A config as data: as written, its settings, all its problems, and what was read into it.

    `problems` is empty for a config that loads. `given` is the config as written, with overrides;
    `tree` has the schema's names and no "auto". By path: `filled` has the values that replaced
    "auto", `ignored` the unknown keys that DeepSpeed ignores too, with a sentence on those that are
    misplaced, `notes` what was read otherwise than it is written. `advice` has the lines to add for
    "auto" keys that are open. Without `is_read` the file cannot be read.
    """

    given: dict[str, Any]
    tree: dict[str, Any]
    settings: Settings
    problems: tuple[Problem, ...]
    origin: str
    filled: dict[str, Filled] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    advice: str = ""
    is_read: bool = True


def examine(
    source: Any,
    overrides: Iterable[str] = (),
    *,
    auto: AutoValues = None,
    strict: bool = False,
    hidden_size: HiddenSize | None = None,
    has_optimizer: bool = False,
) -> Examined:
    """Read and validate a config without raising: its settings and all its problems as data.

    Invalid values are removed from the settings.

    Args:
      source: a dict, or the path of a .json, .yaml or .yml file.
      overrides: each `section.key=value`, with the value as in YAML.
      auto: values for "auto" keys, or the preset "hf": see `auto.read_auto`.
      strict: whether unknown keys are problems that DeepSpeed ignores.
      hidden_size: finds that of the model, for "auto" keys that depend on it.
      has_optimizer: whether the caller has an optimizer, to which the preset adds none.
    """
    written, problems, origin = read_source(source)
    if problems and not written:
        return Examined({}, {}, Settings(), tuple(problems), origin, is_read=False)
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    problems += filter(None, [apply_override(written, override) for override in overrides])

    _override_length(written, overrides)
    plain = _without_comments(written)
    forms = rewrite(plain, strict or plain.get("strict") is True)
    problems += forms.problems
    autos = fill_autos(forms.tree, auto, hidden_size, has_optimizer)
    tree = autos.tree
    problems += autos.problems
    settings, wrong = _validated(tree)
    problems += wrong
    settings, wrong, notes = complete(settings)
    params = settings.scheduler.params if settings.scheduler else {}
    total, warmup = (params.get(f"{name}_num_steps") or 0 for name in ("total", "warmup"))
    if warmup >= total > 0 and DECAY_END not in autos.filled:
        text = f"{warmup}, of total_num_steps {total}: the rate never decays."
        notes["scheduler.params.warmup_num_steps"] = text
    problems += wrong
    problems += _refused(tree, settings)
    mesh, wrong = mesh_from_keys(settings)
    if mesh != settings.mesh and not wrong:
        settings = settings.model_copy(update={"mesh": mesh})
    settings = with_one_offload(with_one_recompute(settings))
    problems += layer_specs_from_keys(settings)[1]
    problems += _no_echoes([*wrong, *check(settings)], problems)
    return Examined(
        given=written,
        tree=tree,
        settings=settings,
        problems=tuple(_once_each(problems)),
        origin=origin,
        filled=autos.filled,
        ignored=forms.ignored,
        notes=forms.notes | autos.notes | notes,
        advice=autos.advice,
    )


def _override_length(written: dict[str, Any], overrides: Iterable[Any]) -> None:
    """Remove the steps of a run whose epochs are overridden, or the epochs if its steps are."""
    overridden = {str(override).partition("=")[0] for override in overrides}
    for key, other in ((STEPS, EPOCHS), (EPOCHS, STEPS)):
        if key in overridden and other not in overridden and read(written, key) is not None:
            written["run"].pop(other.rpartition(".")[2], None)


def with_open_end(examined: Examined) -> dict[str, Any]:
    """The tree with its "auto" filled in, except an end of the schedule that the run's moves."""
    end = examined.filled.get(DECAY_END)
    is_of_run = end is not None and end.source in (STEPS, EPOCHS)
    return with_value(examined.tree, DECAY_END, "auto") if is_of_run else examined.tree


def _without_comments(node: Any) -> Any:
    """Remove keys that begin with "_", which are comments."""
    if isinstance(node, dict):
        return {
            key: _without_comments(value) for key, value in node.items() if not key.startswith("_")
        }
    if isinstance(node, list):
        return [_without_comments(item) for item in node]
    return node


def _validated(tree: dict[str, Any]) -> tuple[Settings, list[Problem]]:
    """Validate with Pydantic: settings of the valid values, and problems of the others.

    Each round removes the values that Pydantic rejects; a section that then lacks a required key is
    removed entirely, so that the depth of the schema bounds the number of rounds.
    """
    tree = copy.deepcopy(tree)
    problems: list[Problem] = []
    while True:
        try:
            return Settings.model_validate(tree), problems
        except ValidationError as error:
            removed: set[tuple[Any, ...]] = set()
            for item in error.errors():
                problems.append(from_pydantic(item, tree=tree))
                where = item["loc"][:-1] if item["type"] == "missing" else item["loc"]
                removed.add(_in_mappings(where, tree))
            for where in sorted(removed, key=len, reverse=True):
                without(tree, where)


def _in_mappings(where: tuple[Any, ...], tree: Any) -> tuple[Any, ...]:
    """The part of a path that leads through mappings of the tree.

    A list is removed entirely, as its items have no names. Beyond that, Pydantic names the key of a
    mapping itself, and which of several types a value failed to be.
    """
    for depth, part in enumerate(where):
        if not isinstance(tree, dict) or part not in tree:
            return where[:depth]
        tree = tree[part]
    return where


def _refused(tree: dict[str, Any], settings: Settings) -> list[Problem]:
    """Problems of keys whose value is refused."""
    refused: dict[str, Problem] = {}
    for leaf, _ in given_leaves(tree):
        path, key = declared(leaf) or ("", None)
        if key is None or path in refused or path.rpartition(".")[0] in PARAMS:
            continue
        value = read(settings, path)
        verdict, sentence = judge(key, value, lambda key: read(settings, key))
        if verdict == "refused" and key.when is None:
            works, fix = f"Refused: {sentence}", {path: REMOVE}
            refused[path] = Problem(path, shown(value), works, fix=fix)
    return list(refused.values())


def _no_echoes(later: Iterable[Problem], earlier: list[Problem]) -> list[Problem]:
    """Remove problems of keys that already have one."""
    wrong = {problem.path for problem in earlier}

    def is_echo(problem: Problem) -> bool:
        return any(
            path == bad or path.startswith(f"{bad}.") or bad.startswith(f"{path}.")
            for path in (problem.path, *problem.about)
            for bad in wrong
        )

    return [problem for problem in later if not is_echo(problem)]


def _once_each(problems: list[Problem]) -> list[Problem]:
    """Keep the first problem of each path; later ones follow from it."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.path, problem)
    return list(first.values())
