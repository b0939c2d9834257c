"""Compiled functions of a worker: the gradients, or the loss, of a part of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.objective.train_state import Arrays
from jaxspeed.parameter_server.ray.ownership import OwnedParams, OwnedRows
from jaxspeed.parameter_server.ray.server_functions import LossScalars, Published
from jaxspeed.parameter_server.worker_step import refuse_statistics, wire_of
from jaxspeed.placement.rows import reduction_dtype
from jaxspeed.train.program import Program


@dataclass(frozen=True)
class WorkerFunctions:
    """The compiled functions of a worker, on its device."""

    program: Program
    shares: Sequence[OwnedParams]  # of the servers

    @cached_property
    def gradients(self) -> Any:
        """(sources, variables, batch, step, part, scale) -> (gradients by server, scalars).

        Random numbers derive from the part's number, whichever worker computes it.
        """
        wire = wire_of(self.program.config)

        def trained(owned: OwnedParams) -> list[tuple[str, OwnedRows]]:
            table = self.program.table
            return [(path, x) for path, x in owned.items() if table[path].leaf.trainable]

        def gradients(
            sources: Arrays, variables: Arrays, batch: Any, step: Any, part: Any, scale: Any
        ) -> tuple[list[Arrays], LossScalars]:
            refuse_statistics(self.program, variables, batch)
            first = part * self.program.batch.accumulation
            own = self.program.gradients
            sums = own.of_part(sources, variables, batch, step, scale, first)

            def split(owned: OwnedParams) -> Arrays:
                mine = {path: rows.of(sums.grads[path]) for path, rows in trained(owned)}
                return {path: x.astype(reduction_dtype(x.dtype, wire)) for path, x in mine.items()}

            return list(map(split, self.shares)), LossScalars(
                sums.total, sums.weight, sums.metrics, scale
            )

        return jax.jit(self.program.in_mesh(gradients))

    @cached_property
    def evaluate(self) -> Any:
        """(sources, variables, batch, step) -> the scalars of the loss in evaluation mode."""

        def evaluate(sources: Arrays, variables: Arrays, batch: Any, step: Any) -> LossScalars:
            loss, _ = self.program.objective(sources, variables, batch, step, 0, False)
            return LossScalars(loss.total, loss.weight, loss.metrics, jnp.ones(()))

        return jax.jit(self.program.in_mesh(evaluate))

    def join_rows(self, found: Sequence[Mapping[str, Any]]) -> Arrays:
        """Full parameters by path, from the servers' rows."""
        return join_rows(self.shares, found)

    def sources(self, published: Sequence[Published], frozen: Arrays) -> Arrays:
        """The parameters as layers read them, joined from the servers' rows."""
        found = self.join_rows([one.params for one in published]) | frozen
        return {row.path: jnp.asarray(found[row.path]) for row in self.program.table}


def join_rows(shares: Sequence[OwnedParams], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Full parameters by path, from the servers' rows."""
    parts: dict[str, list[tuple[int, int, Any]]] = {}
    for owned, own in zip(shares, found, strict=True):
        for path, value in own.items():
            rows = owned[path]
            parts.setdefault(path, []).append((rows.start, rows.dim, value))
    return {path: _concatenate(rows) for path, rows in parts.items()}


def _concatenate(rows: list[tuple[int, int, Any]]) -> Any:
    if len(rows) == 1:
        return rows[0][2]
    rows = sorted(rows, key=lambda row: row[0])
    return np.concatenate([value for _, _, value in rows], axis=rows[0][1])
