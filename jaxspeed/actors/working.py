"""What a worker does, as functions of arrays: the gradients, or the loss, of a part of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.actors.pieces import Pieces
from jaxspeed.actors.serving import Published, Told
from jaxspeed.train.loss import Loss
from jaxspeed.train.objective import Objective
from jaxspeed.train.program import Program
from jaxspeed.train.state import Arrays


@dataclass(frozen=True)
class ObjectiveOfPart(Objective):
    """Micro-batch i of part p of n draws its random numbers as micro-batch i n + p."""

    part: Any = 0
    parts: int = 1

    def __call__(
        self, sources: Arrays, variables: Arrays, batch: Any, step: Any, micro: Any, train: bool
    ) -> tuple[Loss, Arrays]:
        number = micro * self.parts + self.part
        return super().__call__(sources, variables, batch, step, number, train)


@dataclass(frozen=True)
class Working:
    """The compiled functions of a worker, whose program is of its own device."""

    program: Program
    shares: Sequence[Pieces]  # of the servers
    parts: int  # into how many a batch is cut

    @cached_property
    def gradients(self) -> Any:
        """(sources, variables, batch, step, part, scale) -> (gradients by server, what is told)."""

        def gradients(
            sources: Arrays, variables: Arrays, batch: Any, step: Any, part: Any, scale: Any
        ) -> tuple[list[Arrays], Told]:
            objective = self._objective(part)
            of_part = replace(self.program.gradients, objective=objective)
            sums, _ = of_part(sources, variables, batch, step, scale)
            wire = objective.wire

            def cut(pieces: Pieces) -> Arrays:
                own = {p: x.of(sums.grads[p]) for p, x in pieces.items() if p in sums.grads}
                return {path: x.astype(wire or x.dtype) for path, x in own.items()}

            return list(map(cut, self.shares)), Told(sums.total, sums.weight, sums.metrics)

        return jax.jit(self.program.in_mesh(gradients))

    @cached_property
    def evaluate(self) -> Any:
        """(sources, variables, batch, step) -> what is told of the loss in evaluation mode."""

        def evaluate(sources: Arrays, variables: Arrays, batch: Any, step: Any) -> Told:
            loss, _ = self.program.objective(sources, variables, batch, step, 0, False)
            return Told(loss.total, loss.weight, loss.metrics)

        return jax.jit(self.program.in_mesh(evaluate))

    def sources(self, published: Sequence[Published], frozen: Arrays) -> Arrays:
        """The parameters as layers read them, put together from the pieces of all servers."""
        found = joined(self.shares, [one.params for one in published]) | frozen
        return {row.path: jnp.asarray(found[row.path]) for row in self.program.table}

    def _objective(self, part: Any) -> ObjectiveOfPart:
        objective = self.program.objective
        given = {name: getattr(objective, name) for name in Objective.__dataclass_fields__}
        return ObjectiveOfPart(**given, part=part, parts=self.parts)


def joined(shares: Sequence[Pieces], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole parameters by path, from what each server has of them."""
    parts: dict[str, list[tuple[int, int, Any]]] = {}
    for pieces, own in zip(shares, found, strict=True):
        for path, value in own.items():
            piece = pieces[path]
            parts.setdefault(path, []).append((piece.start, piece.dim, value))
    return {path: _put_together(rows) for path, rows in parts.items()}


def _put_together(rows: list[tuple[int, int, Any]]) -> Any:
    if len(rows) == 1:
        return rows[0][2]
    rows = sorted(rows, key=lambda row: row[0])
    return np.concatenate([value for _, _, value in rows], axis=rows[0][1])
