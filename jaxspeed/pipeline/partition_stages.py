"""Contiguous stages of a loss whose blocks are unlike: which stage has which parameters.

The traced loss is a list of equations, which is divided where the largest stage has the least work
and parameters and, among divisions that are about equal in that, where the least is sent on:
activations, skip connections among them, and parameters that both sides read, which every stage
then has.

The assignment of parameters to stages is the result: `unlike_stages.py` derives all else from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.flops import count_all, equation_flops, nbytes
from jaxspeed.jaxpr.inline_calls import with_calls_inlined
from jaxspeed.jaxpr.slicing import dependents
from jaxspeed.jaxpr.traverse import is_var
from jaxspeed.jaxpr.weight_uses import weight_uses
from jaxspeed.placement.stacks import UnlikeStages

SLACK = 1.25  # how much more than in the best division the largest stage may have


def uses_of_parameters(jaxpr: Any, parameters: Mapping[Any, str]) -> list[frozenset[str]]:
    """The parameters that each equation reads beside other values.

    A cast or transpose of parameters alone is no use; its reader is.
    """
    uses, _ = weight_uses(jaxpr, parameters)
    paths = {use.position: use.weights for use in uses}
    return [paths.get(position, frozenset()) for position in range(len(jaxpr.eqns))]


def partition_stages(closed: Any, parameters: Mapping[Any, str], stages: int) -> UnlikeStages:
    """Assign the parameters of a traced loss to contiguous stages.

    Args:
      closed: the traced loss.
      parameters: paths of its variables that are parameters.

    Raises:
      ModelError: it reads its parameters in too few places.
    """
    jaxpr = with_calls_inlined(closed.jaxpr, set(parameters))
    uses = uses_of_parameters(jaxpr, parameters)
    scalars = {path for v, path in parameters.items() if math.prod(v.aval.shape) == 1}
    uses = [paths - scalars for paths in uses]
    while True:
        places = [i for i, paths in enumerate(uses) if paths]
        if len(places) < stages:
            raise ModelError(_reason(jaxpr, parameters, stages))
        starts = _best_division(_Graph(jaxpr, parameters, uses, places), stages)
        readers = _stages_of(uses, places, starts)
        stage_of = {path: min(read) for path, read in readers.items() if len(read) == 1}
        if set(stage_of.values()) == set(range(stages)):
            return UnlikeStages(stages, {path: (path,) for path in stage_of}, stage_of=stage_of)
        shared = readers.keys() - stage_of.keys()  # some stage has no others
        uses = [paths - shared for paths in uses]


def _stages_of(
    uses: Sequence[frozenset[str]], places: Sequence[int], starts: Sequence[int]
) -> dict[str, set[int]]:
    """The stages that read each parameter."""
    readers: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(places)], strict=True)):
        for place in places[start:stop]:
            for path in uses[place]:
                readers.setdefault(path, set()).add(stage)
    return readers


def _reason(jaxpr: Any, parameters: Mapping[Any, str], stages: int) -> str:
    first_read = [sorted(paths)[0] for paths in uses_of_parameters(jaxpr, parameters) if paths]
    blocks = list(dict.fromkeys(path.rpartition("/")[0] or path for path in first_read))
    names = ", ".join(blocks[:4]) + (", ..." if len(blocks) > 4 else "")
    return (
        f"mesh.pipe: each of {stages} stages needs parameters that no other stage reads, and the "
        f"loss reads its parameters ({names}) in {len(first_read)} operations, a loop over stacked "
        "layers being one. Use fewer stages, or blocks in a list"
    )


@dataclass(frozen=True)
class _Graph:
    """Costs of dividing the program before each place that uses parameters."""

    jaxpr: Any
    parameters: Mapping[Any, str]
    uses: Sequence[frozenset[str]]
    places: Sequence[int]

    def work(self) -> np.ndarray:
        """[places + 1]: the share of FLOPs and parameters before each place, together 2."""
        flops = [equation_flops(eqn, count_all) for eqn in self.jaxpr.eqns]
        before = [0, *accumulate(flops)]
        sizes = {path: nbytes(v.aval) for v, path in self.parameters.items()}
        seen = set[str]()
        new = []
        for place in self.places:
            new.append(sum(sizes[path] for path in self.uses[place] - seen))
            seen |= self.uses[place]
        held = np.asarray([0, *accumulate(new)], float)
        computed = np.asarray([*(before[p] for p in self.places), before[-1]], float)
        computed[0] = 0
        return computed / max(computed[-1], 1) + held / max(held[-1], 1)

    def sent(self) -> np.ndarray:
        """[places + 1]: bytes that are sent on before each place, shared parameters too."""
        change = np.zeros(len(self.jaxpr.eqns) + 2)

        def spans(size: int, first: int, last: int) -> None:
            change[first + 1] += size
            change[last + 1] -= size

        moving = dependents(self.jaxpr, self.parameters)
        producers = {
            v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars if v in moving
        }
        last = dict.fromkeys(filter(is_var, self.jaxpr.outvars), len(self.jaxpr.eqns))
        used: dict[str, list[int]] = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            last |= {v: max(i, last.get(v, 0)) for v in filter(is_var, eqn.invars)}
            for path in self.uses[i]:
                used.setdefault(path, []).append(i)
        for v, i in producers.items():
            spans(nbytes(v.aval), i, last.get(v, i))
        for v, path in self.parameters.items():
            if path in used:
                spans(nbytes(v.aval), used[path][0], used[path][-1])
        return np.cumsum(change)[[*self.places, -1]]


def _best_division(graph: _Graph, stages: int) -> list[int]:
    """The first place of each stage."""
    work, sent = graph.work(), graph.sent()
    share = work[None, :] - work[:, None]  # [start, stop]
    _, least = _minimax(share, stages)
    cost = np.where(share <= SLACK * least + 1e-9, sent[:, None], np.inf)
    cost[0] = np.where(np.isfinite(cost[0]), 0, np.inf)  # nothing is sent to the first stage
    starts, _ = _minimax(cost, stages)
    return starts


def _minimax(cost: np.ndarray, parts: int) -> tuple[list[int], float]:
    """(starts, largest cost) of the division of range(n) into parts whose largest cost is least.

    `cost[start, stop]` is that of a part, [n + 1, n + 1].
    """
    count = cost.shape[1] - 1
    best = cost[0].astype(float)  # of one part that ends at each stop
    best[0] = np.inf
    came: list[np.ndarray] = []
    for _ in range(parts - 1):
        through = np.full((count + 1, count + 1), np.inf)
        for start in range(1, count):
            through[start, start + 1 :] = np.maximum(best[start], cost[start, start + 1 :])
        came.append(through.argmin(axis=0))
        best = through.min(axis=0)
    starts, stop = [], count
    for origin in reversed(came):
        stop = int(origin[stop])
        starts.append(stop)
    return [0, *starts[::-1]], float(best[count])
