"""A task to try training by rewards with, without a file of data: the digit after each."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

DIGITS, PROMPTS = 4, 4096


def prompts() -> Iterator[dict[str, Any]]:
    """Records such as {"prompt": "3192=", "answer": "4203"}."""
    draw = random.Random(0)
    for _ in range(PROMPTS):
        digits = [draw.randrange(10) for _ in range(DIGITS)]
        following = [(digit + 1) % 10 for digit in digits]
        yield {"prompt": "".join(map(str, digits)) + "=", "answer": "".join(map(str, following))}


def in_place(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of the answer's digits that a completion has in their place."""
    return [
        sum(map(str.__eq__, completion, right)) / len(right)
        for completion, right in zip(completions, answer, strict=True)
    ]
