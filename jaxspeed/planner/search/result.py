"""`SearchResult`: candidates as a table, as JSON values, and the best as a config file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from jaxspeed.errors import ConfigError
from jaxspeed.hardware.targets import Target
from jaxspeed.placement.show import as_text, bytes_text, seconds_text, titled
from jaxspeed.planner.compile.outcome import Outcome
from jaxspeed.planner.search.candidate import Choice, with_keys
from jaxspeed.planner.search.candidate_estimate import Estimate, why_lost

SHOWN = 12  # rows of the table


@dataclass(frozen=True)
class Candidate:
    """One estimated choice.

    Attributes:
      choice: its settings.
      name: as shown.
      keys: the config keys to set; None removes one.
      estimate: its memory and time.
      lost: why it is not the best.
      outcome: of its compile, if it was compiled.
    """

    choice: Choice
    name: str
    keys: Mapping[str, Any]
    estimate: Estimate
    lost: str | None
    outcome: Outcome | None = None

    def figures(self, target: Target) -> dict[str, Any]:
        """The candidate as JSON values."""
        outcome = self.outcome
        return {
            "name": self.name,
            "set": dict(self.keys),
            **self.estimate.figures(),
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
    """The estimated candidates of a search, ordered by time.

    Attributes:
      samples: per step, the same for all.
      unit: what is counted per second, tokens or samples.
      considered: number of choices with an analytic cost.
      tried: number of estimated choices.
      seconds: duration of the search.
      candidates: valid ones by time, then refused ones.
      best: index of the best.
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
        """Whether a compiled candidate fits; None if none was compiled."""
        outcomes = [candidate.outcome for candidate in self.candidates if candidate.outcome]
        return any(outcome.fits(self.target) for outcome in outcomes) if outcomes else None

    def figures(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "global_batch": self.samples,
            "considered": self.considered,
            "tried": self.tried,
            "seconds": self.seconds,
            "candidates": [candidate.figures(self.target) for candidate in self.candidates],
            "best": self.best,
        }

    def __rich__(self) -> Group:
        heads = ("", "candidate", ">step", ">mfu", ">device", "reason")
        table = titled("search", *heads, pad_edge=False)
        table.columns[1].ratio, table.columns[-1].ratio = 3, 2
        for number, candidate in self._shown():
            estimate = candidate.estimate
            table.add_row(
                f"{number + 1}{'' if candidate.keys else '*'}",
                candidate.name,
                seconds_text(estimate.seconds) if estimate.seconds else "",
                f"{estimate.mfu:.0%}" if estimate.seconds else "",
                bytes_text(estimate.device) if estimate.device else "",
                candidate.lost or "best",
                style="bold" if number == self.best else "",
            )
        return Group(table, Text("\n".join(self._summary())))

    def _shown(self) -> list[tuple[int, Candidate]]:
        """The best, the unchanged config, and of the rest first one per mesh and stage."""
        rows = list(enumerate(self.candidates))
        first = [row for row in rows if row[0] == self.best or not row[1].keys]
        seen: set[Any] = set()
        others: list[tuple[int, Candidate]] = []
        repeated: list[tuple[int, Candidate]] = []
        for row in rows:
            if row in first:
                continue
            kind = row[1].choice.mesh, row[1].choice.stage
            (repeated if kind in seen else others).append(row)
            seen.add(kind)
        rest = [*others, *repeated][: SHOWN - len(first)]
        return sorted([*first, *rest], key=lambda row: row[0])

    def _summary(self) -> list[str]:
        lines = [
            f"{self.tried} of {self.considered} candidates estimated in {self.seconds:.0f} s, each "
            f"with the config's {self.samples} samples per step (* is the unchanged config)"
        ]
        best = self.winner
        if best is None:
            return [*lines, "none of them is expected to fit"]
        rate = f"{best.estimate.tokens_per_second:,.0f} {self.unit}/s"
        lines.append(f"best: {best.name}")
        lines.append(f"  {rate}, mfu {best.estimate.mfu:.0%}; {self._proof(best)}")
        lines += [f"  {key}: {json.dumps(value)}" for key, value in best.keys.items()]
        if not best.keys:
            lines.append("  the unchanged config")
        return lines

    def _proof(self, best: Candidate) -> str:
        outcome = best.outcome
        if outcome is None:
            return "an estimate; --compile verifies it"
        needs = bytes_text(outcome.device_bytes or 0)
        fits = "fits" if outcome.fits(self.target) else "does not fit"
        return f"compiled: {needs} per device, {fits}"

    def __str__(self) -> str:
        return as_text(self, 80)


def make_result(
    target: Target,
    samples: int,
    unit: str,
    considered: int,
    seconds: float,
    estimated: Mapping[Choice, tuple[Estimate, Mapping[str, Any]]],
    best: Choice | None,
) -> SearchResult:
    """The result: candidates in order, each with the reason why it lost to the best."""
    able = [c for c, (estimate, _) in estimated.items() if not estimate.refused]

    def order(choice: Choice) -> tuple[Any, ...]:
        estimate, keys = estimated[choice]
        return bool(estimate.refused), estimate.seconds, len(keys), choice != best

    rows = sorted(estimated, key=order)
    where = rows.index(best) if best else None
    listed = (Candidate(c, c.name(samples), estimated[c][1], estimated[c][0], None) for c in rows)
    candidates = _with_reasons(tuple(listed), target, where, where)
    return SearchResult(target, samples, unit, considered, len(able), seconds, candidates, where)


def with_outcomes(search: SearchResult, outcomes: Sequence[tuple[int, Outcome]]) -> SearchResult:
    """The result with compile outcomes; the best is then the first that fits when compiled."""
    candidates, best = list(search.candidates), search.best
    for number, outcome in outcomes:
        candidates[number] = replace(candidates[number], outcome=outcome)
    if outcomes:
        best = next((n for n, outcome in outcomes if outcome.fits(search.target)), None)
    than = search.best if best is None else best
    explained = _with_reasons(tuple(candidates), search.target, best, than)
    return replace(search, candidates=explained, best=best)


def _with_reasons(
    candidates: tuple[Candidate, ...], target: Target, best: int | None, than: int | None
) -> tuple[Candidate, ...]:
    """The candidates, each but the best with the reason why it lost to `than`."""

    def reason(number: int, candidate: Candidate) -> str | None:
        if number == best:
            return None
        if candidate.outcome and not candidate.outcome.fits(target):
            return _refused(candidate.outcome, target)
        top = candidate if than is None else candidates[than]
        return why_lost(candidate.estimate, top.estimate)

    return tuple(
        replace(candidate, lost=reason(n, candidate)) for n, candidate in enumerate(candidates)
    )


def _refused(outcome: Outcome, target: Target) -> str:
    needed, has = outcome.device_bytes, target.chip.memory
    if needed and needed > has:
        return f"the compiler: needs {bytes_text(needed)} of {bytes_text(has)}"
    if outcome.host_bytes > target.chip.host_memory:
        host = bytes_text(target.chip.host_memory)
        return f"the compiler: needs {bytes_text(outcome.host_bytes)} of host memory, of {host}"
    return "the compiler: does not fit"


def refuse_path(path: str | Path, searching: bool) -> None:
    """Raise ConfigError unless a config can be written to `path`."""
    where = Path(path)
    if not searching:
        raise ConfigError("--write: it writes the result of --search; give --search too")
    if where.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--write {path}: needs a name that ends in .yaml, .yml or .json")
    if where.is_dir() or not where.resolve().parent.is_dir():
        raise ConfigError(f"--write {path}: needs a file in an existing folder")


def write_config(
    path: str | Path,
    written: Mapping[str, Any],
    search: SearchResult,
    config_name: str | None = None,
) -> None:
    """Write the best candidate as a config file: the user's config with its changes."""
    import yaml

    best = search.winner
    assert best is not None
    config = with_keys(written, best.keys)
    if Path(path).suffix == ".json":
        text = json.dumps(config, indent=2) + "\n"
    else:
        of = f" from {config_name}" if config_name else ""
        lines = [
            f"Chosen by jaxspeed plan --search for {search.target}{of}: of {search.considered} "
            f"candidates,",
            f"{search.tried} of them estimated, the fastest with headroom at {search.samples} "
            "samples per step:",
            f"{best.name}.",
            f"Expected: {seconds_text(best.estimate.seconds)} per step, "
            f"{best.estimate.tokens_per_second:,.0f} {search.unit}/s, mfu {best.estimate.mfu:.0%}, "
            f"{bytes_text(best.estimate.device)} per device.",
        ]
        if best.keys:
            lines.append("Changed: " + ", ".join(best.keys) + ".")
        head = "".join(f"# {line}\n" for line in lines)
        text = head + "\n" + yaml.safe_dump(config, sort_keys=False, width=100)
    Path(path).write_text(text, "utf-8")
