"""Whether a program of one sample computes what that of several does, as its equations prove.

One sample is traced otherwise, for a dim of size 1 needs no broadcast. So each program is listed:
what its equations compute, without those that only change an array's layout, without sums over
samples alone, and without dims of size 1. The traces of n and of 2 n samples give the list of one:
a size that grows like the samples is its nth part, and a number c n^degree is c. The lists have to
be the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from typing import Any

import numpy as np

from jaxspeed.jaxpr.primitives import KERNELS, RESHAPES
from jaxspeed.jaxpr.sample_independence import Analysis, UnlikeTracesError
from jaxspeed.jaxpr.sample_rules import (
    SIZES,
    elements,
    is_alike,
    is_plain,
    numbered,
    place,
    relations_of,
)
from jaxspeed.jaxpr.sample_values import MIXED
from jaxspeed.jaxpr.traverse import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    is_var,
    open_jaxpr,
    programs,
    shape_of,
)

# Parameters that number dims, which relations say.
_DIMS = {"axes", "axis", "dimension", "dimensions", "permutation", "dimension_numbers"}
_DIMS |= {"slice_sizes"}

Program = tuple[Jaxpr, Sequence[Any]]  # with its constants


@dataclass
class Listing:
    """What a program computes of one sample, by its traces of the analysis's numbers of samples.

    Attributes:
      lines: (operation, operands, equation): an operand is the number of an earlier result, or the
        elements of a constant.
    """

    analysis: Analysis
    lines: list[tuple[Any, list[Any], Any]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, traced: Program, again: Program) -> None:
        """Add a program, by its traces."""
        (jaxpr, consts), (twin_jaxpr, others) = traced, again
        if len(jaxpr.eqns) != len(twin_jaxpr.eqns):
            raise UnlikeTracesError
        names: dict[Any, Any] = dict(
            zip(jaxpr.constvars, map(self._constant, consts, others), strict=True)
        )
        names |= {v: next(self._numbers) for v in jaxpr.invars}

        def read(atoms: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            pairs = zip(atoms, others, strict=True)
            return [names[v] if is_var(v) else self._constant(v.val, w.val) for v, w in pairs]

        for eqn, twin in zip(jaxpr.eqns, twin_jaxpr.eqns, strict=True):
            operands, operation = read(eqn.invars, twin.invars), self._operation(eqn, twin)
            if operation is None:
                names[eqn.outvars[0]] = operands[0]
                continue
            self.lines.append((operation, operands, eqn))
            self._within(eqn, twin)
            names |= {v: next(self._numbers) for v in eqn.outvars}
        self.lines.append(("results", read(jaxpr.outvars, twin_jaxpr.outvars), None))

    def _of_one(self, here: Any, there: Any) -> Any:
        """A size for one sample."""
        if isinstance(here, tuple):
            return tuple(map(self._of_one, here, there))
        return here if here == there else here // self.analysis.counts[0]

    def _constant(self, value: Any, twin: Any) -> np.ndarray:
        first, second = map(elements, (value, twin))
        if first is None or second is None:
            return np.zeros(0)
        constant = self.analysis.constant(value, twin)
        if constant.kind is MIXED:
            raise UnlikeTracesError
        sizes = zip(first.shape, second.shape, strict=True)
        of_one = first[tuple(slice(None if n == m else 1) for n, m in sizes)]
        return of_one.ravel() / float(self.analysis.counts[0]) ** constant.degree

    def _operation(self, eqn: JaxprEqn, twin: JaxprEqn) -> Any:
        """What an equation computes; None if its result has the operand's elements."""
        name = eqn.primitive.name
        if name in RESHAPES | {"broadcast_in_dim"}:
            return None
        if eqn.primitive is not twin.primitive or not is_alike(eqn, twin, self.analysis.counts):
            raise UnlikeTracesError(place(eqn))
        # Those of a convolution do not show its dims of windows.
        relations = relations_of(eqn) if name != "conv_general_dilated" else None
        what: dict[str, Any] = {}
        for key, x in eqn.params.items():
            if is_plain(x) and not (relations and key in _DIMS):
                what[key] = str(self._of_one(x, twin.params[key]) if key in SIZES else x)
        if relations is None:
            return name, what
        factors: defaultdict[int, int] = defaultdict(lambda: len(factors))
        dims = []
        arrays = zip((*eqn.invars, *eqn.outvars), (*twin.invars, *twin.outvars), strict=True)
        sizes = [self._of_one(shape_of(v), shape_of(w)) for v, w in arrays]
        for shape, shape_factors in zip(
            sizes, (*relations.operands, *relations.results), strict=True
        ):
            left = [(n, f) for n, f in zip(shape, shape_factors, strict=True) if n != 1]
            dims.append([(n, f if f is None else factors[f]) for n, f in left])
        if name == "reduce_sum" and dims[0] == dims[1]:
            return None
        mixed = sorted(factors[f] for f in relations.mixed if f in factors)
        columns = [
            [d == column for d, n in enumerate(sizes[0]) if n != 1] for column in numbered(eqn)
        ]
        return name, what, dims, mixed, columns

    def _within(self, eqn: JaxprEqn, twin: JaxprEqn) -> None:
        """The programs of an equation: of the platforms' kernels, what the default computes."""
        if eqn.primitive.name in KERNELS:
            return
        pairs = list(zip(programs(eqn), programs(twin), strict=True))
        platforms = eqn.params.get("branches_platforms") or ()
        if None in platforms:
            pairs = [pairs[platforms.index(None)]]
        if self.analysis.has_derivative(eqn):
            rule, twin_rule = map(self.analysis.derivative, (eqn, twin))
            pairs.append((open_jaxpr(rule), open_jaxpr(twin_rule)))
        inside = replace(self, analysis=self.analysis.within(eqn))
        for pair in pairs:
            inside.add(*pair)


def refuse_another_computation(
    analysis: Analysis, single: ClosedJaxpr, several: tuple[ClosedJaxpr, ClosedJaxpr]
) -> None:
    """Compare the program of one sample with those of the analysis's numbers of samples.

    Raises:
      UnlikeTracesError: it computes something else, or with another number; with the line.
    """
    lists = []
    for counts, traces in (((1, 1), (single, single)), (analysis.counts, several)):
        listing = Listing(replace(analysis, counts=counts))
        listing.add(*map(open_jaxpr, traces))
        lists.append(listing.lines)
    for (what, operands, eqn), (other, others, twin) in zip_longest(*lists, fillvalue=(0, [], 0)):
        is_alike = what == other and len(operands) == len(others)
        if not is_alike or not all(map(_are_equal, operands, others)):
            differing_eqn = eqn or twin
            raise UnlikeTracesError(place(differing_eqn) if differing_eqn else "")


def _are_equal(operand: Any, other: Any) -> bool:
    if isinstance(operand, int) or isinstance(other, int):
        return type(operand) is type(other) and operand == other
    return operand.shape == other.shape and np.allclose(
        operand, other, rtol=1e-6, atol=0, equal_nan=True
    )
