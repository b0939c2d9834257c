"""DeepSpeed's elastic batch: one global batch that as many device counts as possible can train.

Candidates are each micro-batch size, and their least common multiple, times the largest highly
composite number that keeps the product at or below `max_train_batch_size`. For a batch B the
compatible data-parallel sizes are the divisors of B / m, for each micro-batch size m that divides
B, between `min_gpus` and `max_gpus`. The candidate with the most of them is taken.

Version 0.2, the default, has a batch for other sizes R too: the largest (or smallest) of the
products k m R, over the micro-batch sizes m, with the largest k each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxspeed.config.batch import Batch, Stages
from jaxspeed.config.problems import Problem
from jaxspeed.config.run_sections import Elasticity

# DeepSpeed's list of highly composite numbers ends here.
_LARGEST_FACTOR = 720_720
FOR_ANY_COUNT = 0.2  # the version that has a batch for each device count
_PRIMES = (2, 3, 5, 7, 11, 13, 17)


@dataclass(frozen=True)
class ElasticTable:
    """Global batch and the data-parallel sizes that divide it."""

    train: int
    counts: tuple[int, ...]


def elastic_table(elasticity: Elasticity) -> ElasticTable:
    """Find the batch with the most compatible counts; no counts if there is none."""
    micros, most = elasticity.micro_batch_sizes, elasticity.max_train_batch_size
    best = ElasticTable(min(micros), ())
    for base in {*micros, math.lcm(*micros)}:
        if base > most:
            continue
        train = base * largest_highly_composite(most // base)
        sign = 1 if elasticity.prefer_larger_batch else -1
        table = ElasticTable(train, tuple(sorted(_compatible(train, elasticity))))
        if (len(table.counts), sign * table.train) > (len(best.counts), sign * best.train):
            best = table
    return best


def solve_elastic(elasticity: Elasticity, ranks: int, stages: Stages) -> Batch | Problem:
    """Solve for the triple with the largest micro-batch size that fills the stages."""
    table = elastic_table(elasticity)
    if ranks not in table.counts and elasticity.version == FOR_ANY_COUNT:
        table = _table_for(elasticity, ranks) or table
    if ranks not in table.counts:
        below = [count for count in table.counts if count < ranks][-1:]
        above = [count for count in table.counts if count > ranks][:1]
        near = " or ".join(str(count) for count in below + above)
        return Problem(
            "elasticity",
            f"data-parallel size {ranks}, which train_batch_size {table.train} does not fit",
            f"Would work: {near}, of the {len(table.counts)} sizes in the table.",
        )
    per_rank = table.train // ranks
    sizes = [size for size in elasticity.micro_batch_sizes if per_rank % size == 0]
    filling = [size for size in sizes if stages.accepts(per_rank // size)]
    if not filling:
        counts = " or ".join(str(per_rank // size) for size in sorted(sizes, reverse=True))
        return Problem(
            "elasticity.micro_batch_sizes",
            f"{sizes}, which make {counts} micro-batches for {stages.count} pipeline stages",
            f"Needs {stages.needed}: add smaller sizes, or use fewer stages.",
        )
    micro = max(filling)
    return Batch(table.train, micro, per_rank // micro)


def _table_for(elasticity: Elasticity, ranks: int) -> ElasticTable | None:
    """Batch for a count that is not in the table, as of version 0.2; None if each is too large."""
    most = elasticity.max_train_batch_size
    sizes = [most // (micro * ranks) * micro * ranks for micro in elasticity.micro_batch_sizes]
    train = max(sizes) if elasticity.prefer_larger_batch else min(sizes)
    return ElasticTable(train, (ranks,)) if train else None


def largest_highly_composite(limit: int) -> int:
    """Find the largest number up to `limit` with more divisors than any smaller one."""
    record, largest = 0, 1
    for number, divisors in sorted(_smooth(min(limit, _LARGEST_FACTOR))):
        if divisors > record:
            record, largest = divisors, number
    return largest


def _smooth(
    limit: int, prime: int = 0, exponent: int = 64, number: int = 1, divisors: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield products of the first primes with exponents that never grow, with divisor counts.

    Every highly composite number is one of these.
    """
    yield number, divisors
    if prime == len(_PRIMES):
        return
    for power in range(1, exponent + 1):
        number *= _PRIMES[prime]
        if number > limit:
            return
        yield from _smooth(limit, prime + 1, power, number, divisors * (power + 1))


def _compatible(train: int, elasticity: Elasticity) -> set[int]:
    counts: set[int] = set()
    for micro in elasticity.micro_batch_sizes:
        if train % micro == 0:
            counts |= set(divisors(train // micro))
    return {count for count in counts if elasticity.min_gpus <= count <= elasticity.max_gpus}


def divisors(number: int) -> tuple[int, ...]:
    """All of them, the smallest first."""
    low = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return tuple(dict.fromkeys([*low, *(number // count for count in reversed(low))]))
