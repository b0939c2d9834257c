"""Analyses of a traced program: a state of each value, by the call that computes it.

A function is a `Frame` once per call: two layers that share one traced `relu` have states of their
own. A `ForwardAnalysis` gives the states of the results of operations from those of the operands;
how a loop's inputs and results follow from outside is a rule that it may replace.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from jaxspeed.jaxpr.primitives import LOOPS
from jaxspeed.jaxpr.traverse import Body, JaxprEqn, Var, is_var, open_jaxpr, transparent_bodies


@dataclass(eq=False)
class Frame:
    """One call of a function of a program.

    Attributes:
      call, body: the equation that runs it, and what it is there; None for the program itself.
      times: runs per pass: the product of the trips of the enclosing scans.
      inner: by the position of an equation, the frames of what it runs.
    """

    jaxpr: Any
    call: Any = None
    body: Any = None
    times: int = 1
    inner: dict[int, list[Self]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.times *= self.body.trips if self.body else 1
        for position, eqn in enumerate(self.jaxpr.eqns):
            if entered_bodies := self.entered(eqn):
                frames = [replace(self, jaxpr=b.jaxpr, call=eqn, body=b) for b in entered_bodies]
                self.inner[position] = frames  # type: ignore[assignment]

    def entered(self, eqn: JaxprEqn) -> list[Body]:
        """The inner programs of an equation that are analyzed."""
        return transparent_bodies(eqn)

    @property
    def in_loop(self) -> bool:
        """Whether it is the body of a loop."""
        return self.call is not None and self.call.primitive.name in LOOPS

    @property
    def condition(self) -> Any:
        """The program of the condition of a `while`."""
        return open_jaxpr(self.call.params["cond_jaxpr"])[0]

    def walk(self) -> Iterator[Self]:
        """This frame and all frames inside it."""
        yield self
        for frame in itertools.chain(*self.inner.values()):
            yield from frame.walk()

    def equations(self) -> Iterator[tuple[Self, int, JaxprEqn]]:
        """(frame, position, equation), here and inside."""
        for frame in self.walk():
            yield from ((frame, *numbered) for numbered in enumerate(frame.jaxpr.eqns))


class ForwardAnalysis[State]:
    """States of all values of a program, from its inputs to its results."""

    def __init__(self) -> None:
        self.states: dict[Frame, dict[Var, State]] = {}

    def constant(self, atom: Any) -> State:
        """The state of a literal or of a constant."""
        raise NotImplementedError

    def operation(self, frame: Any, position: int, operands: Sequence[State]) -> Sequence[State]:
        """The states of the results of an equation that is not entered."""
        raise NotImplementedError

    def inputs(self, frame: Any, operands: Sequence[State]) -> Sequence[State]:
        """The states of a frame's inputs from those of all operands of its call."""
        return operands[frame.body.first :]

    def results(
        self, inner: Any, operands: Sequence[State], branches: Sequence[Sequence[State]]
    ) -> Sequence[State]:
        """The states of the results of an equation from those of the frames that it runs."""
        return [self.joined(states) for states in zip(*branches, strict=True)]

    def joined(self, states: Sequence[State]) -> State:
        """The state of a result of several branches, or of one program."""
        raise NotImplementedError

    def of(self, frame: Frame, atom: Any) -> State:
        return self.states[frame][atom] if is_var(atom) else self.constant(atom)

    def run(self, frame: Frame, inputs: Sequence[State]) -> list[State]:
        """The states of the results of a frame."""
        known = self.states[frame] = dict(zip(frame.jaxpr.invars, inputs, strict=True))
        known.update((v, self.constant(v)) for v in frame.jaxpr.constvars)
        for position, eqn in enumerate(frame.jaxpr.eqns):
            operands = [self.of(frame, v) for v in eqn.invars]
            if inner := frame.inner.get(position):
                branches = [self.run(f, self.inputs(f, operands)) for f in inner]
                results = self.results(inner, operands, branches)
            else:
                results = self.operation(frame, position, operands)
            known.update(zip(eqn.outvars, results, strict=True))
        return [self.of(frame, v) for v in frame.jaxpr.outvars]
