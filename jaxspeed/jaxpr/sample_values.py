"""What a traced program's value is, to the samples of a batch: the values of `sample_independence`.

FREE       independent of the batch
SAMPLES    of one dim of samples, along which an element depends on its own sample alone
SUM        a sum over samples of what depends on one of them each
GUARD      of a sum: whether it is positive, or what bounds it from below, to divide by
MEAN       a quotient of two sums, times and plus what is independent of the batch
TOTAL      in a loop over samples: the carried value plus terms of this sample
MIXED      anything else
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any


class SampleKind(Enum):
    """The kinds of values."""

    FREE = auto()
    SAMPLES = auto()
    SUM = auto()
    GUARD = auto()
    MEAN = auto()
    TOTAL = auto()
    MIXED = auto()


FREE, SAMPLES, SUM, GUARD, MEAN, TOTAL, MIXED = SampleKind

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SampleValue:
    """What is known of an array.

    Attributes:
      dim: of SAMPLES: the dim of samples, with the same number of adjacent elements for each; None
        in a loop over samples, where it is of one of them.
      degree: it is n^degree times what does not depend on the number of samples n.
      varies: of FREE: the dims along which elements may differ for another reason than draws.
      drawn: of FREE: the dims along which elements are drawn.
      draws: whether numbers were drawn for each sample.
      zero: whether all elements are 0, which has any degree.
      index: of FREE: the dim along which an element is its own index.
      columns: of indices: the values of which they were joined.
      root: equal for values of equal elements. Of GUARD and MEAN: the root of the divisor.
      carry: of TOTAL: the number of the carried value.
      why: of MIXED.
    """

    kind: SampleKind
    dim: int | None = None
    degree: int = 0
    varies: frozenset[int] = NONE
    drawn: frozenset[int] = NONE
    draws: bool = False
    zero: bool = False
    index: int | None = None
    columns: tuple["SampleValue", ...] = ()
    root: Any = None
    carry: int = 0
    why: str = ""

    @property
    def extent(self) -> int:
        """The power of the number of samples by which it grows."""
        return self.degree + (self.kind is SUM)

    @property
    def is_of_one_sample(self) -> bool:
        return self.kind is SAMPLES and self.dim is None


Values = Sequence[SampleValue]


def samples(dim: int | None = 0) -> SampleValue:
    """An array of the batch."""
    return SampleValue(SAMPLES, dim)


def free(rank: int) -> SampleValue:
    """An array of any elements that does not depend on the batch."""
    return SampleValue(FREE, varies=frozenset(range(rank)))


def mixed(why: str) -> SampleValue:
    return SampleValue(MIXED, why=why)


def union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return NONE.union(*sets)


def unnamed(x: SampleValue) -> SampleValue:
    """Without what holds of these very elements: of what a loop carries or slices."""
    return replace(x, root=None, index=None, columns=())


def slice_of(x: SampleValue) -> SampleValue:
    """A slice along dim 0, which is not that of samples."""
    varies, drawn = (frozenset(d - 1 for d in dims if d) for dims in (x.varies, x.drawn))
    dim = None if x.dim is None else x.dim - 1
    return replace(unnamed(x), dim=dim, varies=varies, drawn=drawn)


def stack_of(x: SampleValue) -> SampleValue:
    """Slices of trips that are not of samples, stacked along a new dim 0."""
    varies, drawn = (frozenset(d + 1 for d in dims) for dims in (x.varies, x.drawn))
    if x.kind is FREE:
        varies |= {0}
    dim = None if x.dim is None else x.dim + 1
    return replace(unnamed(x), dim=dim, varies=varies, drawn=drawn)


def either(a: SampleValue, b: SampleValue) -> SampleValue:
    """What is one of two values: of branches, or of a loop's trips."""
    a, b = unnamed(a), unnamed(b)
    for x in (a, b):
        if x.kind is MIXED:
            return x
    if a.kind is not FREE:
        a, b = b, a
    draws, same_degree = a.draws or b.draws, a.degree == b.degree or a.zero or b.zero
    degree = b.degree if a.zero else a.degree
    if a.kind is b.kind is FREE and same_degree:
        varies = a.varies | b.varies
        drawn = (a.drawn | b.drawn) - varies
        return SampleValue(FREE, None, degree, varies, drawn, zero=a.zero and b.zero)
    if a.kind is FREE and b.kind is SAMPLES and b.dim not in a.varies and same_degree:
        return replace(b, draws=draws or b.dim in a.drawn, degree=degree)
    if a.zero and b.kind in (SUM, TOTAL):
        return b
    if a.kind is not FREE and replace(a, draws=draws) == replace(b, draws=draws):
        return replace(a, draws=draws)
    return mixed("a loop or a branch mixes samples")
