"""Scans over arrays that are inputs in several parts, split at the borders of the parts.

One scan over a concatenation would copy all of it, and its backward pass would compute a gradient
of all parts, and save residuals for all trips. A scan over each part reads it as it is, and one
before the first differentiated part saves nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from jax import lax

from jaxspeed.jaxpr.primitives import CASTS, CHECKPOINTS, INLINED
from jaxspeed.jaxpr.rewriter import Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.jaxpr.traverse import (
    Jaxpr,
    JaxprEqn,
    Var,
    bodies,
    is_marked,
    is_var,
    with_functions,
    with_jaxpr,
)


class Joined(NamedTuple):
    """What a value is the concatenation of."""

    parts: tuple[Atom, ...]
    dim: int

    @property
    def borders(self) -> list[int]:
        sizes = (part.aval.shape[self.dim] for part in self.parts)
        return [0, *accumulate(sizes)]


def in_parts(
    jaxpr: Jaxpr, sizes: Mapping[Var, Sequence[int]]
) -> tuple[Jaxpr, dict[Var, list[Var]]]:
    """A program with some inputs in parts of these sizes along their first dim, and these inputs.

    Scans over them are split, and static slices read one part. Anything else reads their
    concatenation.
    """
    parts = {v: [_resized(v, n) for n in part_sizes] for v, part_sizes in sizes.items()}
    invars = [part for v in jaxpr.invars for part in parts.get(v, [v])]
    rewriter = _SplitScans()
    program = Rewriting(rewriter, jaxpr.replace(invars=invars), [None] * len(invars))
    for v, var_parts in parts.items():
        rewriter.join(program, v, Joined(tuple(var_parts), 0), None)
    for position in range(len(jaxpr.eqns)):
        program.write(position)
    return _without_unread(program.finished()), parts


class _SplitScans(Rewriter[Joined | None]):
    """The state of a value is what it is joined of, in atoms of the new program."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = {
            **dict.fromkeys(CASTS, self._part_by_part),
            "transpose": self._part_by_part,
            "slice": self._slice,
            "scan": self._scan,
        }

    def join(
        self, program: Rewriting[Joined | None], v: Var, joined: Joined, like: JaxprEqn | None
    ) -> None:
        """Let the concatenation of parts stand for a variable."""
        dim = joined.dim
        concatenation = program.splice(lambda *xs: lax.concatenate(xs, dim), joined.parts, like)
        program.replace([v], concatenation)
        program.set_state(v, joined)

    def equation(self, program: Rewriting[Joined | None], eqn: JaxprEqn) -> Sequence[Joined | None]:
        name = eqn.primitive.name
        if not any(program.state(v) for v in eqn.invars):
            program.emit(eqn)
        elif name in self.rules:
            return self.rules[name](program, eqn)
        elif name in INLINED and bodies(eqn) and not is_marked(eqn):
            program.inline(eqn)
        elif name in CHECKPOINTS and bodies(eqn):
            self._checkpoint(program, eqn)
        else:
            program.emit(eqn)
        return [program.state(v) for v in eqn.outvars]

    def _part_by_part(
        self, program: Rewriting[Joined | None], eqn: JaxprEqn
    ) -> list[Joined | None]:
        (v,), (out,) = eqn.invars, eqn.outvars
        joined = program.state(v)
        assert joined is not None
        dim = joined.dim
        if eqn.primitive.name == "transpose":
            dim = eqn.params["permutation"].index(dim)
        results = []
        for part in joined.parts:
            results.append(_resized(out, part.aval.shape[joined.dim], dim))
            program.eqns.append(eqn.replace(invars=[part], outvars=[results[-1]]))
        program.emit(eqn)
        return [Joined(tuple(results), dim)]

    def _slice(self, program: Rewriting[Joined | None], eqn: JaxprEqn) -> list[Joined | None]:
        joined = program.state(eqn.invars[0])
        assert joined is not None
        dim, params = joined.dim, dict(eqn.params)
        start, limit = params["start_indices"][dim], params["limit_indices"][dim]
        for part, (first, end) in zip(joined.parts, pairwise(joined.borders), strict=True):
            if first <= start and limit <= end:
                for key, at in (("start_indices", start), ("limit_indices", limit)):
                    params[key] = (*params[key][:dim], at - first, *params[key][dim + 1 :])
                program.eqns.append(eqn.replace(invars=[part], params=params))
                return [None]
        program.emit(eqn)
        return [None]

    def _scan(self, program: Rewriting[Joined | None], eqn: JaxprEqn) -> list[Joined | None]:
        (body,) = bodies(eqn)
        count, first = body.num_carry, body.first_xs
        states = [program.state(v) for v in eqn.invars]
        split_xs = [x for x in states[first:] if x and x.dim == 0]
        if not split_xs:
            program.emit(eqn)
            return [None] * len(eqn.outvars)
        ranges = list(
            pairwise(sorted({border for joined in split_xs for border in joined.borders}))
        )
        before = [program.atom(v) for v in eqn.invars[:first]]
        stacked: list[list[Var]] = []
        for start, stop in ranges[::-1] if eqn.params["reverse"] else ranges:
            xs = [
                self._rows(program, v, joined, start, stop, eqn)
                for v, joined in zip(eqn.invars[first:], states[first:], strict=True)
            ]
            outs = [
                Var(v.aval) if i < count else _resized(v, stop - start)
                for i, v in enumerate(eqn.outvars)
            ]
            unroll = min(int(eqn.params["unroll"]), stop - start)
            params = {**eqn.params, "length": stop - start, "unroll": unroll}
            program.eqns.append(eqn.replace(invars=[*before, *xs], outvars=outs, params=params))
            before[body.num_consts :] = outs[:count]
            stacked.append(outs[count:])
        program.replace(eqn.outvars[:count], before[body.num_consts :])
        ordered = stacked[::-1] if eqn.params["reverse"] else stacked
        for v, parts in zip(eqn.outvars[count:], zip(*ordered, strict=True), strict=True):
            self.join(program, v, Joined(parts, 0), eqn)
        return [program.state(v) for v in eqn.outvars]

    def _rows(
        self,
        program: Rewriting[Joined | None],
        v: Atom,
        joined: Joined | None,
        start: int,
        stop: int,
        like: JaxprEqn,
    ) -> Atom:
        """Rows `start` to `stop` of what a scan runs over."""
        x, offset = program.atom(v), 0
        if joined and joined.dim == 0:
            index = max(i for i, border in enumerate(joined.borders) if border <= start)
            x, offset = joined.parts[index], joined.borders[index]
        if x.aval.shape[0] == stop - start:
            return x
        ends = start - offset, stop - offset
        return program.splice(lambda x: lax.slice_in_dim(x, *ends), [x], like)[0]

    def _checkpoint(self, program: Rewriting[Joined | None], eqn: JaxprEqn) -> None:
        """Pass the parts instead of what they are joined to."""
        (body,) = bodies(eqn)
        sizes: dict[Var, list[int]] = {}
        operands: list[Atom] = []
        for v, iv in zip(body.operands, body.jaxpr.invars, strict=True):
            joined = program.state(v)
            if joined and joined.dim == 0:
                sizes[iv] = [b - a for a, b in pairwise(joined.borders)]
                operands += joined.parts
            else:
                operands.append(program.atom(v))
        inner, _ = in_parts(body.jaxpr, sizes)
        checkpoint = with_functions(eqn, lambda held: with_jaxpr(held, inner))
        program.eqns.append(checkpoint.replace(invars=operands))


def _resized(v: Any, size: int, dim: int = 0) -> Var:
    """A variable like this one, with another size of a dim."""
    shape = list(v.aval.shape)
    shape[dim] = size
    return Var(v.aval.update(shape=tuple(shape)))


def _without_unread(jaxpr: Jaxpr) -> Jaxpr:
    """A program without the movements of data that nothing reads."""
    movements = {*CASTS, "concatenate", "transpose", "slice"}
    eqns: list[JaxprEqn] = []
    read = read_by(jaxpr.replace(eqns=[]))
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name not in movements or eqn.outvars[0] in read:
            eqns.append(eqn)
            read.update(filter(is_var, eqn.invars))
    return jaxpr.replace(eqns=eqns[::-1])
