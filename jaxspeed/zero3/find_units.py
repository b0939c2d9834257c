"""Unit discovery: the repeated module calls that hold most of the parameters.

A candidate is a set of calls of one class that read parameters of equal shapes, or the members of
one list, like or unlike. Those that repeat (with parameters of their own, or inside a scan) are
taken greedily, by the parameter bytes that they cover. Patterns from the config replace the search.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.evaluate import bodies, is_var
from jaxspeed.jaxpr.flops import nbytes
from jaxspeed.jaxpr.module_scopes import Call, calls_in

NEARLY = 0.9  # of two candidates that cover nearly as much, the one with more, smaller members wins


@dataclass
class Seen:
    """What a walk through a traced program found out about one call."""

    call: Call
    times: int = 1  # how often the equations of this call run in one pass (enclosing scans)
    chain: tuple[int, ...] = ()  # the serials of the calls around it
    reads: dict[Any, int] = field(default_factory=dict)  # parameter variable -> bytes read of it

    @property
    def bytes(self) -> int:
        return sum(self.reads.values())


@dataclass(frozen=True)
class Units:
    """The calls that are units, and what to say about them."""

    serials: frozenset[int]
    kinds: tuple[tuple[str, int], ...]  # (class, how many calls, scan trips counted)

    def __str__(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.kinds) or "none"

    def of(self, eqn: Any) -> int | None:
        """The unit that an equation belongs to: the outermost around it."""
        calls = calls_in(str(eqn.source_info.name_stack))
        return next((c.serial for c in calls if c.serial in self.serials), None)


def choose_units(
    jaxpr: Any,
    parameters: Iterable[Any],
    patterns: Sequence[str] = (),
    match: Callable[[str, str], bool] | None = None,
) -> Units:
    """The units of a traced program whose input variables `parameters` are stored parameters."""
    seen = survey(jaxpr, parameters)
    if patterns:
        assert match is not None
        return _named(seen, patterns, match)
    left = [group for group in _candidates(seen) if _members(group) > 1]
    taken: list[list[Seen]] = []
    while left:
        most = max(map(_coverage, left))
        best = max((g for g in left if _coverage(g) >= NEARLY * most), key=_members)
        taken.append(best)
        left = [g for g in left if g is not best and not _overlap(g, best)]
    return _units(taken)


def survey(jaxpr: Any, parameters: Iterable[Any]) -> dict[int, Seen]:
    """Every named call of a program: what parameters it reads, how often, inside what."""
    seen: dict[int, Seen] = {}
    _walk(jaxpr, {v: v for v in parameters}, 1, seen)
    return seen


def _walk(jaxpr: Any, origin: dict[Any, Any], times: int, seen: dict[int, Seen]) -> None:
    """`origin` maps a variable of this jaxpr to the parameter that it is, or is a slice of."""
    for eqn in jaxpr.eqns:
        calls = calls_in(str(eqn.source_info.name_stack))
        chain = tuple(c.serial for c in calls)
        for depth, call in enumerate(calls):
            known = seen.setdefault(call.serial, Seen(call, times, chain[:depth]))
            for v in eqn.invars:
                if is_var(v) and v in origin:
                    known.reads[origin[v]] = nbytes(v.aval)
        for body, skip, trips in bodies(eqn):
            inner = {
                iv: origin[v]
                for v, iv in zip(eqn.invars[skip:], body.invars)
                if is_var(v) and v in origin
            }
            _walk(body, inner, times * trips, seen)


def _candidates(seen: dict[int, Seen]) -> list[list[Seen]]:
    """Calls of one class that read equal shapes; and the members of one list, like or unlike."""
    groups: dict[Any, list[Seen]] = defaultdict(list)
    for s in seen.values():
        if s.bytes:
            groups[s.call.kind, tuple(sorted(s.reads.values()))].append(s)
            parent, _, last = s.call.path.rpartition("/")
            if last.isdigit():
                groups[parent, "list"].append(s)
    return list(groups.values())


def _distinct(group: Sequence[Seen]) -> dict[Any, Seen]:
    """One call for each set of parameters: a block that is called twice counts once."""
    return {frozenset(s.reads): s for s in group}


def _members(group: Sequence[Seen]) -> int:
    return sum(s.times for s in _distinct(group).values())


def _coverage(group: Sequence[Seen]) -> int:
    return sum(s.times * s.bytes for s in _distinct(group).values())


def _overlap(a: Sequence[Seen], b: Sequence[Seen]) -> bool:
    inside_a, inside_b = ({s.call.serial for s in g} for g in (a, b))
    return any(inside_b & set(s.chain) for s in a) or any(inside_a & set(s.chain) for s in b)


def _named(
    seen: dict[int, Seen], patterns: Sequence[str], match: Callable[[str, str], bool]
) -> Units:
    found: list[list[Seen]] = []
    for pattern in patterns:
        hits = [s for s in seen.values() if s.call.kind == pattern or match(pattern, s.call.path)]
        if not hits:
            names = sorted({s.call.path or s.call.kind for s in seen.values() if s.bytes})
            raise ConfigError(
                f"parallel.units: {pattern!r} names no call of this model; there are, for example: "
                + ", ".join(names[:12])
            )
        found.append(hits)
    return _units(found)


def _units(groups: Sequence[Sequence[Seen]]) -> Units:
    chosen = {s.call.serial: s for group in groups for s in group}
    outermost = [s for s in chosen.values() if not chosen.keys() & set(s.chain)]
    kinds: dict[str, int] = defaultdict(int)
    for s in outermost:
        kinds[s.call.kind] += s.times
    return Units(frozenset(s.call.serial for s in outermost), tuple(kinds.items()))
