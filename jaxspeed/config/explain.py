"""`explain_config`: the verdict on each key of a config, and its reason."""

from collections.abc import Iterable
from typing import Any

from jaxspeed.config.auto import DECAY_END, DROPPED, EPOCHS, STEPS, AutoValues
from jaxspeed.config.batch import ACCUMULATION, MICRO, TRAIN
from jaxspeed.config.config import Config
from jaxspeed.config.deepspeed_forms import ZERO, canonical_path
from jaxspeed.config.load import Examined, examine
from jaxspeed.config.objective_keys import own_key_sentence
from jaxspeed.config.optimizer_defaults import rate_is_the_schedules
from jaxspeed.config.problems import Problem
from jaxspeed.config.suggestions import own_key
from jaxspeed.config.tree import VOCABULARY, declared, given_leaves, read
from jaxspeed.config.verdicts import ExplainedKey, judge, shown

# Surprising defaults, explained even if the config does not set them.
NOTED_DEFAULTS = {
    "gradient_clipping": "DeepSpeed's default since mid 2026; it was 0, no clipping, before.",
    "scheduler.params.warmup_type": 'DeepSpeed\'s default; most other libraries mean "linear".',
    "scheduler.params.warmup_max_lr": "The schedule's peak, whatever the optimizer's lr.",
}


def explain_config(
    config: Any, overrides: Iterable[str] = (), *, auto: AutoValues = None, strict: bool = False
) -> list[ExplainedKey]:
    """Explain each key that the config sets, and surprising defaults.

    Args:
      config: as for `Config.load`; an invalid config is explained too, without an error.
      overrides: as for `Config.load`.
      auto: as for `Config.load`.
      strict: as for `Config.load`.

    Returns:
      Rows of (key, value, verdict, sentence). A key with a problem, or a section with one of its
      own, has the verdict "refused" and the problem as its sentence.
    """
    source = config.given if isinstance(config, Config) else config
    return explain(examine(source, overrides, auto=auto, strict=strict))


def explain(examined: Examined) -> list[ExplainedKey]:
    """Explain an examined config; as `explain_config`."""
    problems = {problem.path: problem for problem in examined.problems}
    rows: list[ExplainedKey] = []
    for path, value in given_leaves(examined.given):
        if section := _refused_around(path, problems):
            path, value = section, read(examined.given, section)
        if path and not (rows and rows[-1].key == path):
            rows.append(_row(path, value, examined, problems))
    explained = {
        key
        for row in rows
        if not _is_comment(row.key)
        for key in (row.key, canonical_path(row.key))
    }
    for path, problem in problems.items():
        if not any(_is_or_is_in(key, path) or _is_or_is_in(path, key) for key in explained):
            rows.append(
                ExplainedKey(path, read(examined.given, path), "refused", _sentence(problem, path))
            )
            explained.add(path)
    if not examined.is_read:
        return rows
    for path, value in examined.filled.items():
        if path not in explained:  # by the caller, for a key that the config does not have
            rows.append(_row(path, value.value, examined, problems))
            explained.add(path)
    for path, note in {**NOTED_DEFAULTS, **examined.notes}.items():
        value = read(examined.settings, path)
        if path not in explained | problems.keys() and value is not None:
            key = VOCABULARY[path]
            note = f"Not set. {note.removeprefix('Not set: ')}"
            rows.append(ExplainedKey(path, value, key.verdict, f"{note} {key.sentence}"))
    return rows


def still_needed(examined: Examined) -> list[str]:
    """What `jaxspeed.initialize` needs beside the config, a model and its loss: a line each."""
    settings, wrong = examined.settings, {p.path.partition(".")[0] for p in examined.problems}
    lines = []
    if settings.optimizer is None and "optimizer" not in wrong:
        lines.append(
            'optimizer: {"type": "AdamW", "params": {"lr": 5e-5}} with your values, --auto hf for '
            "the AdamW of Hugging Face's Trainer, or initialize(optimizer=...)"
        )
    batch = settings.train_batch_size or settings.train_micro_batch_size_per_gpu
    if not (batch or settings.elasticity.enabled or wrong & {TRAIN, MICRO, ACCUMULATION}):
        lines.append(f"{TRAIN} or {MICRO}")
    if (end := examined.filled.get(DECAY_END)) and end.source == EPOCHS:
        lines.append(f"{STEPS}: only training by a config knows the steps of {EPOCHS}")
    return lines


def _row(path: str, value: Any, examined: Examined, problems: dict[str, Problem]) -> ExplainedKey:
    if _is_comment(path):
        return ExplainedKey(path, value, "harmless", "A comment.")
    known = canonical_path(path)
    for key, problem in problems.items():
        if key == path or _is_or_is_in(known, key) or _is_or_is_in(key, known):
            return ExplainedKey(path, value, "refused", _sentence(problem, known))
    for key, where in examined.ignored.items():
        if _is_or_is_in(known, key):
            sentence = f"DeepSpeed ignores it too. {where}{own_key(key)}"
            return ExplainedKey(path, value, "ignored", sentence.rstrip())
    if known == ZERO and isinstance(value, bool):
        known = f"{ZERO}.stage"
    of = known.partition(".")[0]
    declaration_of = declared(known)
    is_own = declaration_of is None and known.startswith("objective.")
    if (is_own or known.startswith(f"{of}.params")) and f"{of}.type" in problems:
        return ExplainedKey(path, value, "refused", f"{of}.type is refused, which it belongs to.")
    if is_own:
        return ExplainedKey(path, value, "honoured", own_key_sentence(examined.settings, known))
    if declaration_of is None:
        empty = "Empty: every key has its default." if value is not None else "Not set."
        return ExplainedKey(path, value, "harmless", empty)

    def read_key(key: str) -> Any:
        return read(examined.settings, key)

    row, declaration = declaration_of
    # The value of the free-form section around the key, or of the key.
    effective = read_key(row if known.startswith(f"{row}.") else known)
    verdict, sentence = judge(declaration, value if effective is None else effective, read_key)
    if known == "optimizer.params.lr" and rate_is_the_schedules(examined.settings):
        verdict, sentence = "harmless", "The schedule sets the rate itself."
    if filled := examined.filled.get(known):
        here = "computed" if filled.value is None else shown(filled.value)
        here = f"{here}, from {filled.source}"
        sentence += (
            f" Here: {'its default, as in DeepSpeed' if filled.source == DROPPED else here}."
        )
    if note := examined.notes.get(canonical_path(path)):
        sentence = f"{note} {sentence}"
    return ExplainedKey(path, value, verdict, sentence)


def _refused_around(path: str, problems: dict[str, Problem]) -> str | None:
    """Path, as written, of the section around a key that has a problem of its own."""
    parts = path.split(".")
    sections = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((path for path in sections if canonical_path(path) in problems), None)


def _is_comment(path: str) -> bool:
    return any(part.startswith("_") for part in path.split("."))


def _is_or_is_in(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _sentence(problem: Problem, path: str) -> str:
    """Format a problem, with its key where that is not the row's."""
    return f"Found {problem.found}. {problem.works}" if problem.path == path else str(problem)
