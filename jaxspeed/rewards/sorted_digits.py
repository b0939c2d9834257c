"""A task to try training by rewards with: to sort digits, without a file of data."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

DIGITS, PROMPTS = 4, 4096


def prompts() -> Iterator[dict[str, Any]]:
    """Records such as {"prompt": "3182=", "answer": "1238"}."""
    draw = random.Random(0)
    for _ in range(PROMPTS):
        digits = [str(draw.randrange(10)) for _ in range(DIGITS)]
        yield {"prompt": "".join(digits) + "=", "answer": "".join(sorted(digits))}


def in_order(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of the answer's digits that are in their place."""
    return [
        sum(map(str.__eq__, completion, right)) / len(right)
        for completion, right in zip(completions, answer)
    ]
