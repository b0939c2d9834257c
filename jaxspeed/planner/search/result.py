"""What a search found: a table for people, plain figures for programs, a config for the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import Target
from jaxspeed.placement.show import as_text, bytes_text, seconds_text
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.search.candidate import Choice, applied
from jaxspeed.planner.search.candidate_estimate import Estimate, figures, why_lost

SHOWN = 12  # rows of the table


@dataclass(frozen=True)
class Candidate:
    """One choice that was estimated.

    Attributes:
      choice: itself.
      name: for people.
      words: the keys that make it of the config; None takes one out.
      estimate: what it would take.
      lost: why it is not the best.
      outcome: of compiling it, where it was; with the target that says whether it fits.
    """

    choice: Choice
    name: str
    words: Mapping[str, Any]
    estimate: Estimate
    lost: str | None
    outcome: Outcome | None = None

    def figures(self, target: Target) -> dict[str, Any]:
        """As plain numbers and words."""
        outcome = self.outcome
        return {
            "name": self.name,
            "set": dict(self.words),
            **figures(self.estimate),
            "lost": self.lost,
            "compiled": outcome
            and {
                "device_bytes": outcome.device_bytes,
                "host_bytes": outcome.host_bytes,
                "fits": outcome.fits(target),
            },
        }


@dataclass(frozen=True)
class SearchResult:
    """All that a search estimated, by time a token.

    Attributes:
      samples: of a step, the same for all.
      unit: of what is counted a second, tokens or samples.
      considered: choices that formulas looked at.
      tried: choices that were estimated.
      seconds: that it took.
      candidates: those that there can be, by time; then those that there cannot.
      best: which of them.
    """

    target: Target
    samples: int
    unit: str
    considered: int
    tried: int
    seconds: float
    candidates: tuple[Candidate, ...]
    best: int | None

    @property
    def winner(self) -> Candidate | None:
        return None if self.best is None else self.candidates[self.best]

    @property
    def proved(self) -> bool | None:
        """Whether a compiler said that the best fits; None where it was not asked."""
        asked = [each for each in self.candidates if each.outcome]
        return (
            any(each.outcome.fits(self.target) for each in asked if each.outcome) if asked else None
        )

    def figures(self) -> dict[str, Any]:
        """As plain numbers and words."""
        return {
            "global_batch": self.samples,
            "considered": self.considered,
            "tried": self.tried,
            "seconds": self.seconds,
            "candidates": [each.figures(self.target) for each in self.candidates],
            "best": self.best,
        }

    def __rich__(self) -> Group:
        table = Table(title="search", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("candidate", overflow="fold", ratio=3)
        table.add_column("a step", justify="right", no_wrap=True)
        table.add_column("mfu", justify="right", no_wrap=True)
        table.add_column("device", justify="right", no_wrap=True)
        table.add_column("why not", overflow="fold", ratio=2)
        for number, each in self._shown():
            found = each.estimate
            table.add_row(
                f"{number + 1}{'' if each.words else '*'}",
                each.name,
                seconds_text(found.seconds) if found.seconds else "",
                f"{found.mfu:.0%}" if found.seconds else "",
                bytes_text(found.device) if found.device else "",
                each.lost or "best",
                style="bold" if number == self.best else "",
            )
        return Group(table, Text("\n".join(self._told())))

    def _shown(self) -> list[tuple[int, Candidate]]:
        """The best, the config as it is, and of the rest one a reason and mesh first."""
        rows = list(enumerate(self.candidates))
        first = [row for row in rows if row[0] == self.best or not row[1].words]
        seen: set[Any] = set()
        others: list[tuple[int, Candidate]] = []
        again: list[tuple[int, Candidate]] = []
        for row in rows:
            if row in first:
                continue
            kind = row[1].choice.mesh, row[1].choice.stage
            (again if kind in seen else others).append(row)
            seen.add(kind)
        return sorted([*first, *[*others, *again][: SHOWN - len(first)]], key=lambda row: row[0])

    def _told(self) -> list[str]:
        lines = [
            f"{self.tried} of {self.considered} candidates estimated in {self.seconds:.0f} s, each "
            f"with the {self.samples} samples of a step that the config gives (* is the config)"
        ]
        best = self.winner
        if best is None:
            return [*lines, "none of them is expected to fit"]
        rate = f"{best.estimate.tokens_per_second:,.0f} {self.unit}/s"
        lines.append(f"best: {best.name}")
        lines.append(f"  {rate}, mfu {best.estimate.mfu:.0%}; {self._proof(best)}")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in best.words.items()]
        if not best.words:
            lines.append("  the config as it is")
        return lines

    def _proof(self, best: Candidate) -> str:
        outcome = best.outcome
        if outcome is None:
            return "an estimate; --compile proves it"
        needs = bytes_text(outcome.device_bytes or 0)
        fits = "fits" if outcome.fits(self.target) else "does not fit"
        return f"compiled: {needs} a device, {fits}"

    def __str__(self) -> str:
        return as_text(self, 80)


def found_of(
    target: Target,
    samples: int,
    unit: str,
    considered: int,
    seconds: float,
    estimated: Mapping[Choice, tuple[Estimate, Mapping[str, Any]]],
    best: Choice | None,
) -> SearchResult:
    """Ordered, each with why it lost to the best."""
    able = [c for c, (found, _) in estimated.items() if not found.refused]

    def order(choice: Choice) -> tuple[Any, ...]:
        found, words = estimated[choice]
        return bool(found.refused), found.seconds, len(words), choice != best

    rows = sorted(estimated, key=order)
    top = estimated[best][0] if best else None
    candidates = []
    for choice in rows:
        found, words = estimated[choice]
        if choice == best:
            lost = None
        elif top:
            lost = why_lost(found, top)
        else:
            lost = why_lost(found, found)
        candidates.append(Candidate(choice, choice.name(samples), words, found, lost))
    where = rows.index(best) if best else None
    tried = len(able)
    return SearchResult(target, samples, unit, considered, tried, seconds, tuple(candidates), where)


def with_outcomes(found: SearchResult, outcomes: Sequence[tuple[int, Outcome]]) -> SearchResult:
    """With what the compiler said of some; the best is then the first that it said fits."""
    candidates = list(found.candidates)
    best = found.best
    said = dict(outcomes)
    for number, outcome in said.items():
        candidates[number] = replace(candidates[number], outcome=outcome)
    proved = [n for n, outcome in said.items() if outcome.fits(found.target)]
    if said:
        best = proved[0] if proved else None
    top = candidates[best].estimate if best is not None else None
    for number, each in enumerate(candidates):
        lost = each.lost
        if number == best:
            lost = None
        elif each.outcome and not each.outcome.fits(found.target):
            lost = _refused(each.outcome, found.target)
        elif top and best != found.best:
            lost = why_lost(each.estimate, top)
        candidates[number] = replace(each, lost=lost)
    return replace(found, candidates=tuple(candidates), best=best)


def _refused(outcome: Outcome, target: Target) -> str:
    needed, has = outcome.device_bytes, target.chip.memory
    if needed and needed > has:
        return f"the compiler: needs {bytes_text(needed)} of {bytes_text(has)}"
    if outcome.host_bytes > target.chip.host_memory:
        host = bytes_text(target.chip.host_memory)
        return f"the compiler: needs {bytes_text(outcome.host_bytes)} of host memory, of {host}"
    return "the compiler says that it does not fit"


def refuse_path(path: str | Path, searching: bool) -> None:
    """ConfigError unless a config can be written there."""
    where = Path(path)
    if not searching:
        raise ConfigError("--write: what is written is what --search finds; give that too")
    if where.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--write {path}: needs a name that ends in .yaml, .yml or .json")
    if where.is_dir() or not where.resolve().parent.is_dir():
        raise ConfigError(f"--write {path}: needs a file in a folder that is there")


def write_config(
    path: str | Path, given: Mapping[str, Any], found: SearchResult, config_name: str | None = None
) -> None:
    """The best candidate as a config file: what the user wrote, with its changes."""
    import yaml

    best = found.winner
    assert best is not None
    made = applied(given, best.words)
    if Path(path).suffix == ".json":
        text = json.dumps(made, indent=2) + "\n"
    else:
        of = f" from {config_name}" if config_name else ""
        lines = [
            f"Chosen by jaxspeed plan --search for {found.target}{of}: of {found.considered} "
            f"candidates,",
            f"{found.tried} of them estimated, the fastest with head room at {found.samples} "
            "samples a step:",
            f"{best.name}.",
            f"Expected: {seconds_text(best.estimate.seconds)} a step, "
            f"{best.estimate.tokens_per_second:,.0f} {found.unit}/s, mfu {best.estimate.mfu:.0%}, "
            f"{bytes_text(best.estimate.device)} of a device.",
        ]
        if best.words:
            lines.append("Changed: " + ", ".join(best.words) + ".")
        head = "".join(f"# {line}\n" for line in lines)
        text = head + "\n" + yaml.safe_dump(made, sort_keys=False, width=100)
    Path(path).write_text(text, "utf-8")
