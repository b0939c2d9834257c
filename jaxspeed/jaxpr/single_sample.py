"""Whether a program of one sample computes what that of several does, as its equations prove.

One sample is traced otherwise, for a dim of size 1 needs no broadcast. So equations that only
change an array's layout are left out, and the others have to correspond in order, with their
operands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxspeed.jaxpr.primitives import CUSTOM_DERIVATIVE, KERNELS, RESHAPES, SCATTERS
from jaxspeed.jaxpr.sample_derivatives import Derivatives, is_of_library
from jaxspeed.jaxpr.sample_independence import Analysis, UnlikeTracesError
from jaxspeed.jaxpr.sample_rules import is_alike, numbered, place, shape_of
from jaxspeed.jaxpr.sample_values import SampleKind
from jaxspeed.jaxpr.traverse import ClosedJaxpr, Jaxpr, JaxprEqn, is_var, programs

_LAYOUT = RESHAPES | {"broadcast_in_dim"}


class Comparison:
    """A walk through the programs of one sample and of `count`.

    Attributes:
      degrees: of the numbers in the order of the walk: what is c n^degree of n samples has to be so
        of several counts.
    """

    def __init__(self, count: int, differentiated: bool, derivatives: Derivatives) -> None:
        self._analysis = Analysis((1, count), frozenset(), differentiated, derivatives)
        self.degrees: list[int | None] = []

    def run(self, one: ClosedJaxpr, many: ClosedJaxpr) -> None:
        """Raise UnlikeTracesError, with the line if it is known, where they do not correspond."""
        self._programs(one.jaxpr, many.jaxpr, one.consts, many.consts)

    def _programs(
        self, one: Jaxpr, many: Jaxpr, consts: Sequence[Any], others: Sequence[Any]
    ) -> None:
        names: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})

        def named(first: Any, second: Any) -> None:
            if len(first) != len(second):
                raise UnlikeTracesError
            for v, twin in zip(first, second, strict=True):
                names[0][v] = names[1][twin] = object()

        def corresponds(first: Any, second: Any) -> bool:
            # A variable that has another's elements is that; one that has a number's, is this.
            pairs = (
                [of[v] if is_var(v) else v for v, of in zip(atoms, names, strict=True)]
                for atoms in zip(first, second, strict=True)
            )
            return all(
                a is b or (hasattr(a, "val") and hasattr(b, "val") and self._numbers(a.val, b.val))
                for a, b in pairs
            )

        if len(consts) != len(others) or not all(map(self._numbers, consts, others)):
            raise UnlikeTracesError
        named(one.constvars, many.constvars)
        named(one.invars, many.invars)
        walks = [_computing(jaxpr, of) for jaxpr, of in zip((one, many), names, strict=True)]
        count = self._analysis.counts[1]
        for eqn in walks[0]:
            twin = next(walks[1], None)
            while twin and not self._is_alike(eqn, twin) and _sums_samples(twin, count):
                _rename(twin, names[1])
                twin = next(walks[1], None)
            alike = twin is not None and self._is_alike(eqn, twin)
            if twin is None or not alike or not corresponds(eqn.invars, twin.invars):
                raise UnlikeTracesError(place(eqn))
            self._within(eqn, twin)
            named(eqn.outvars, twin.outvars)
        for twin in walks[1]:
            if not _sums_samples(twin, count):
                raise UnlikeTracesError(place(twin))
            _rename(twin, names[1])
        if len(one.outvars) != len(many.outvars) or not corresponds(one.outvars, many.outvars):
            raise UnlikeTracesError

    def _is_alike(self, eqn: JaxprEqn, twin: JaxprEqn) -> bool:
        if eqn.primitive is not twin.primitive or len(eqn.invars) != len(twin.invars):
            return False
        counts = self._analysis.counts
        if is_alike(eqn, twin, counts):
            return True
        of_dims = {"axes", "dimension", "dimension_numbers", "slice_sizes", "permutation"}
        return is_alike(eqn, twin, counts, of_dims) and _dims_alike(eqn, twin, counts[1])

    def _numbers(self, one: Any, many: Any) -> bool:
        found = self._analysis.constant(one, many)
        self.degrees.append(None if found.zero else found.degree)
        return found.kind is not SampleKind.MIXED

    def _within(self, eqn: JaxprEqn, twin: JaxprEqn) -> None:
        """The programs of an equation: of the platforms' kernels, what the default computes."""
        if eqn.primitive.name in KERNELS:
            return
        inner, others = list(programs(eqn)), list(programs(twin))
        if len(inner) != len(others):
            raise UnlikeTracesError(place(eqn))
        pairs = list(zip(inner, others, strict=True))
        platforms = eqn.params.get("branches_platforms") or ()
        if None in platforms:
            pairs = [pairs[platforms.index(None)]]
        for (one, consts), (many, many_consts) in pairs:
            self._programs(one, many, consts, many_consts)
        # A library's derivative is that of any number of samples, and its trace takes long.
        is_own = eqn.primitive.name in CUSTOM_DERIVATIVE and not is_of_library(eqn)
        if is_own and self._analysis.differentiated:
            analysis = self._analysis  # a derivative, which may call its function, has none itself
            self._analysis = replace(analysis, differentiated=False)
            self.run(*map(analysis.derivatives.of, (eqn, twin)))
            self._analysis = analysis


def _computing(jaxpr: Jaxpr, names: dict[Any, Any]) -> Iterator[JaxprEqn]:
    """The equations that compute something; what others make is named like their operand."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _LAYOUT or _sums_samples(eqn, 1):
            _rename(eqn, names)
        else:
            yield eqn


def _rename(eqn: JaxprEqn, names: dict[Any, Any]) -> None:
    v = eqn.invars[0]
    names[eqn.outvars[0]] = names[v] if is_var(v) else v


def _sums_samples(eqn: JaxprEqn, count: int) -> bool:
    """Whether an equation is a sum over dims of `count` elements alone: of one sample, itself."""
    if eqn.primitive.name != "reduce_sum":
        return False
    return all(shape_of(eqn.invars[0])[d] == count for d in eqn.params["axes"])


def _dims_alike(eqn: JaxprEqn, twin: JaxprEqn, count: int) -> bool:
    """Whether sums and lookups do the same along all dims beside those of samples."""
    for dims, others in zip(_roles(eqn), _roles(twin), strict=True):
        left = [(n, role) for n, role in dims if n != 1]
        for size, role in others:
            if left and role == left[0][1] and size in (left[0][0], left[0][0] * count):
                left.pop(0)
            elif size not in (1, count):
                return False
        if left:
            return False
    return bool(_roles(eqn))


def _roles(eqn: JaxprEqn) -> list[list[tuple[int, Any]]]:
    """(size, what the operation does along it) of the dims of the arrays that it relates."""
    name, params, shape = eqn.primitive.name, eqn.params, shape_of(eqn.invars[0])
    if name == "reduce_sum":
        return [[(n, d in params["axes"]) for d, n in enumerate(shape)]]
    if name == "sort":
        return [[(n, d == params["dimension"]) for d, n in enumerate(shape)]]
    if name == "transpose":  # counted from the last: samples come first
        return [[(shape[d], len(shape) - d) for d in params["permutation"]]]
    if name == "dot_general":
        kinds = ("sum", "batch")
        lists = [dict(zip(kinds, of, strict=True)) for of in zip(*params["dimension_numbers"])]
        # Counted from the last: samples come first.
        roles = [
            {d: (kind, len(of[kind]) - i) for kind in kinds for i, d in enumerate(of[kind])}
            for of in lists
        ]
        return [
            [(n, own.get(d)) for d, n in enumerate(shape_of(v))]
            for v, own in zip(eqn.invars, roles, strict=True)
        ]
    if name not in ("gather", *SCATTERS):
        return []
    numbers, columns = params["dimension_numbers"], numbered(eqn)
    other: Any
    if name == "gather":
        other, windows, single = eqn.outvars[0], numbers.offset_dims, numbers.collapsed_slice_dims
    else:
        other, windows = eqn.invars[2], numbers.update_window_dims
        single = numbers.inserted_window_dims

    def role(d: int) -> Any:
        column = columns.index(d) if d in columns else None
        size = params["slice_sizes"][d] if name == "gather" and column is not None else None
        return column, d in single, d in numbers.operand_batching_dims, size

    return [
        [(n, role(d)) for d, n in enumerate(shape)],
        [(n, d in windows) for d, n in enumerate(shape_of(other))],
    ]


def refuse_another_computation(
    one: ClosedJaxpr,
    several: dict[int, ClosedJaxpr],
    differentiated: bool,
    derivatives: Derivatives,
) -> None:
    """Compare the program of one sample with those of several.

    Args:
      several: by the number of samples.

    Raises:
      UnlikeTracesError: it computes something else, or with another number.
    """
    found = []
    for count, many in several.items():
        comparison = Comparison(count, differentiated, derivatives)
        comparison.run(one, many)
        found.append(comparison.degrees)
    if any(degrees != found[0] for degrees in found):
        raise UnlikeTracesError
