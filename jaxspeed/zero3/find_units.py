"""Unit discovery: the repeated module calls that hold most of the parameters.

A candidate is a set of calls of one class that read parameters of equal shapes, or the members of
one list, of one class or several. Those that repeat (with their own parameters, or inside a scan)
are chosen greedily by the parameter bytes that they cover. Patterns of the config replace the
search.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.flops import nbytes
from jaxspeed.jaxpr.module_scopes import Call, calls_in
from jaxspeed.jaxpr.traverse import is_var, sliceable_bodies

NEARLY = 0.9  # of candidates that cover nearly as much, the one with more, smaller members wins


@dataclass
class TracedCall:
    """One call in a traced program and the parameters that it reads."""

    call: Call
    times: int = 1  # how often it runs in one pass (trips of the enclosing scans)
    chain: tuple[int, ...] = ()  # the serials of the enclosing calls
    reads: dict[Any, int] = field(default_factory=dict)  # parameter variable -> bytes read of it

    @property
    def bytes(self) -> int:
        return sum(self.reads.values())


@dataclass(frozen=True)
class Units:
    """The calls that are units, and their number per class."""

    serials: frozenset[int] = frozenset()
    kinds: tuple[tuple[str, int], ...] = ()  # (class, how many calls, scan trips counted)

    def __str__(self) -> str:
        return ", ".join(f"{count} x {kind}" for kind, count in self.kinds) or "none"

    def of(self, eqn: Any) -> int | None:
        """The unit that an equation belongs to: the outermost enclosing one."""
        calls = calls_in(str(eqn.source_info.name_stack))
        return next((c.serial for c in calls if c.serial in self.serials), None)


def choose_units(
    jaxpr: Any,
    parameters: Iterable[Any],
    patterns: Sequence[str] = (),
    match: Callable[[str, str], bool] | None = None,
) -> Units:
    """The units of a traced program; `parameters` are its input variables that are parameters."""
    seen = traced_calls(jaxpr, parameters)
    if patterns:
        assert match is not None
        return _named(seen, patterns, match)
    left = [group for group in _candidates(seen) if _members(group) > 1]
    taken: list[list[TracedCall]] = []
    while left:
        most = max(map(_coverage, left))
        best = max((g for g in left if _coverage(g) >= NEARLY * most), key=_members)
        taken.append(best)
        left = [g for g in left if g is not best and not _overlap(g, best)]
    return _units(taken)


def outermost_calls(jaxpr: Any, parameters: Iterable[Any]) -> Units:
    """The calls of a program that are in no other call, such as that of the model, as units."""
    return _units([[s for s in traced_calls(jaxpr, parameters) if s.bytes and not s.chain]])


def traced_calls(jaxpr: Any, parameters: Iterable[Any]) -> list[TracedCall]:
    """Every tagged call of a program.

    Calls that share one cached trace, as those of a function in `jax.checkpoint` or `jax.jit` do,
    have one serial; each is a call of its own here.
    """
    seen: dict[Any, TracedCall] = {}
    _walk(jaxpr, {v: v for v in parameters}, 1, seen, defaultdict(int))
    return [*seen.values()]


def _walk(
    jaxpr: Any,
    origin: dict[Any, Any],
    times: int,
    seen: dict[Any, TracedCall],
    visits: dict[int, int],
    again: tuple[int, ...] = (),
) -> None:
    """Add the calls of a jaxpr to `seen`, by serial and `again`.

    Args:
      origin: a variable of this jaxpr -> the parameter that it is, or is a slice of.
      visits: how often each inner trace was walked before.
      again: that number, of each enclosing jaxpr that was.
    """
    for eqn in jaxpr.eqns:
        calls = calls_in(str(eqn.source_info.name_stack))
        chain = tuple(c.serial for c in calls)
        for depth, call in enumerate(calls):
            new = TracedCall(call, times, chain[:depth])
            known = seen.setdefault((call.serial, again), new)
            for v in eqn.invars:
                if is_var(v) and v in origin:
                    known.reads[origin[v]] = nbytes(v.aval)
        if eqn.primitive.name == "transpose" and eqn.invars[0] in origin:
            # A scan along another dim than the first reads the parameter with that dim in front.
            origin = {**origin, eqn.outvars[0]: origin[eqn.invars[0]]}
        for body in sliceable_bodies(eqn):
            # A shared trace has the same calls, although a pass may have rewritten it twice.
            calls_by_eqn = (calls_in(str(e.source_info.name_stack)) for e in body.jaxpr.eqns)
            trace = next(
                (eqn_calls[0].serial for eqn_calls in calls_by_eqn if eqn_calls), id(body.jaxpr)
            )
            before = visits[trace]
            visits[trace] += 1
            nested = (*again, before) if before else again
            _walk(body.jaxpr, body.passed(origin), times * body.trips, seen, visits, nested)


def _candidates(seen: Sequence[TracedCall]) -> list[list[TracedCall]]:
    """Calls of one class that read equal shapes, and the members of one list."""
    groups: dict[Any, list[TracedCall]] = defaultdict(list)
    for s in seen:
        if s.bytes:
            groups[s.call.kind, tuple(sorted(s.reads.values()))].append(s)
            parent, _, last = s.call.path.rpartition("/")
            if last.isdigit():
                groups[parent, "list"].append(s)
    return list(groups.values())


def _distinct(group: Sequence[TracedCall]) -> dict[Any, TracedCall]:
    """One call per set of parameters: a block that is called twice counts once."""
    return {frozenset(s.reads): s for s in group}


def _members(group: Sequence[TracedCall]) -> int:
    return sum(s.times for s in _distinct(group).values())


def _coverage(group: Sequence[TracedCall]) -> int:
    return sum(s.times * s.bytes for s in _distinct(group).values())


def _overlap(a: Sequence[TracedCall], b: Sequence[TracedCall]) -> bool:
    inside_a, inside_b = ({s.call.serial for s in g} for g in (a, b))
    return any(inside_b & set(s.chain) for s in a) or any(inside_a & set(s.chain) for s in b)


def _named(
    seen: Sequence[TracedCall], patterns: Sequence[str], match: Callable[[str, str], bool]
) -> Units:
    named_calls: list[list[TracedCall]] = []
    for pattern in patterns:
        hits = [s for s in seen if s.call.kind == pattern or match(pattern, s.call.path)]
        if not hits:
            names = sorted({s.call.path or s.call.kind for s in seen if s.bytes})
            raise ConfigError(
                f"parallel.units: {pattern!r} matches no call of this model; its calls are, for "
                f"example: {', '.join(names[:12])}"
            )
        named_calls.append(hits)
    return _units(named_calls)


def _units(groups: Sequence[Sequence[TracedCall]]) -> Units:
    chosen = {id(s): s for group in groups for s in group}.values()
    serials = {s.call.serial for s in chosen}
    outermost = [s for s in chosen if not serials & set(s.chain)]
    kinds: dict[str, int] = defaultdict(int)
    for s in outermost:
        kinds[s.call.kind] += s.times
    return Units(frozenset(s.call.serial for s in outermost), tuple(kinds.items()))
