"""`explain_config`: the verdict on each key of a config, and its reason."""

from collections.abc import Iterable
from typing import Any

from jaxspeed.config.config import Config
from jaxspeed.config.load import ALIASES, Examined, examine
from jaxspeed.config.optimizer_defaults import rate_is_the_schedules
from jaxspeed.config.problems import Problem
from jaxspeed.config.tree import VOCABULARY, declared, given_leaves, read
from jaxspeed.config.verdicts import ExplainedKey, judge, shown

# Surprising defaults, explained even if the config does not set them.
NOTED_DEFAULTS = {
    "gradient_clipping": "DeepSpeed's default since mid 2026; it was 0, no clipping, before.",
    "scheduler.params.warmup_type": 'DeepSpeed\'s default; most other libraries mean "linear".',
    "scheduler.params.warmup_max_lr": "The schedule's peak, whatever the optimizer's lr.",
}


def explain_config(config: Any, overrides: Iterable[str] = ()) -> list[ExplainedKey]:
    """Explain each key that the config sets, and surprising defaults.

    Args:
      config: as for `Config.load`; an invalid config is explained too, without an error.
      overrides: as for `Config.load`.

    Returns:
      Rows of (key, value, verdict, sentence). A key with a problem has the verdict "refused" and
      the problem as its sentence.
    """
    examined = examine(config.given if isinstance(config, Config) else config, overrides)
    problems = {problem.path: problem for problem in examined.problems}
    rows = []
    for path, value in given_leaves(examined.given):
        if path:
            rows.append(_row(path, value, examined, problems))
    explained = {
        key for row in rows if not _is_comment(row.key) for key in (row.key, _canonical(row.key))
    }
    for path, problem in problems.items():
        if not any(_is_or_is_in(key, path) or _is_or_is_in(path, key) for key in explained):
            rows.append(
                ExplainedKey(path, read(examined.given, path), "refused", _sentence(problem, path))
            )
    for path, note in NOTED_DEFAULTS.items():
        value = read(examined.settings, path)
        if path not in explained and value is not None:
            key = VOCABULARY[path]
            rows.append(ExplainedKey(path, value, key.verdict, f"Not set. {note} {key.sentence}"))
    return rows


def _row(path: str, value: Any, examined: Examined, problems: dict[str, Problem]) -> ExplainedKey:
    if _is_comment(path):
        return ExplainedKey(path, value, "harmless", "A comment.")
    known = _canonical(path)
    for key, problem in problems.items():
        if key == path or _is_or_is_in(known, key) or _is_or_is_in(key, known):
            return ExplainedKey(path, value, "refused", _sentence(problem, known))
    found = declared(known)
    if found is None:  # an empty section
        return ExplainedKey(path, value, "harmless", "Empty: every key has its default.")

    def read_key(key: str) -> Any:
        return read(examined.settings, key)

    verdict, sentence = judge(found[1], _effective(known, found[0], value, examined), read_key)
    if known == "optimizer.params.lr" and rate_is_the_schedules(examined.settings):
        return ExplainedKey(path, value, "harmless", "The schedule sets the rate itself.")
    if known in examined.autos:
        value_of_auto = examined.autos[known]
        default = value_of_auto is None
        sentence += " Its default." if default else f" Here: {shown(value_of_auto)}."
    return ExplainedKey(path, value, verdict, sentence)


def _is_comment(path: str) -> bool:
    return any(part.startswith("_") for part in path.split("."))


def _canonical(path: str) -> str:
    """Replace old names in a path by current ones."""
    head, dot, tail = path.partition(".")
    return ALIASES.get(head, head) + dot + tail


def _is_or_is_in(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _effective(path: str, row: str, value: Any, examined: Examined) -> Any:
    """Value to judge: that of the free-form section around the key, or of the key."""
    effective = read(examined.settings, row if path.startswith(f"{row}.") else path)
    return value if effective is None else effective


def _sentence(problem: Problem, path: str) -> str:
    """Format a problem, with its key where that is not the row's."""
    return f"Found {problem.found}. {problem.works}" if problem.path == path else str(problem)
