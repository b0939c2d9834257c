"""How many micro-batches a pipeline takes, and in how many a rank's samples are cut for it."""

from dataclasses import dataclass

# Of 4 K micro-batches, K stages spend (K - 1) / (5 K - 1) of a step waiting: less than a fifth.
ROUNDS = 4


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, as far as the number of micro-batches goes.

    Each stage needs at least one micro-batch to work on while the others work; the interleaved
    schedule sends them round in groups of as many as there are stages.
    """

    count: int = 1
    interleaved: bool = False

    def take(self, micro_batches: int) -> bool:
        """Whether a step of so many micro-batches can pass them."""
        whole_rounds = micro_batches % self.count == 0 or not self.interleaved
        return micro_batches >= self.count and whole_rounds

    @property
    def needed(self) -> str:
        """What `take` asks for, in words."""
        if self.interleaved:
            return f"a multiple of {self.count}, to interleave"
        return f"at least {self.count}"

    @property
    def unsaid(self) -> int:
        """The number of micro-batches where nothing bounds it."""
        return ROUNDS * self.count if self.count > 1 else 1

    def cut(self, samples: int) -> int:
        """In how many micro-batches to cut a rank's samples; 1 where no number of them fits.

        The largest multiple of the stages that divides the samples; without one, the largest
        divisor.
        """
        return max(
            self.cuts(samples), key=lambda number: (number % self.count == 0, number), default=1
        )

    def cuts(self, samples: int) -> list[int]:
        """The numbers of equal micro-batches up to `unsaid` that they take of so many samples."""
        numbers = range(self.count, min(self.unsaid, samples) + 1)
        return [number for number in numbers if samples % number == 0 and self.take(number)]

    def near(self, micro_batches: int, step: int | None = None) -> list[int]:
        """The one or two numbers nearest to this one that they take; with `step`, its multiples."""
        step = step or (self.count if self.interleaved else 1)
        below = micro_batches // step * step
        return [number for number in (below, below + step) if number >= self.count] or [self.count]
