"""Words of which another is a typo: those with few wrong letters, or that it begins."""

import itertools
from collections.abc import Iterable


def is_near(word: str, known: str) -> bool:
    """Whether a word is a known one with about a sixth of its letters wrong, or its beginning."""
    begins = "_" in word and known.startswith(f"{word}_")
    return begins or _edits(word, known, max(1, len(word) // 6))


def _edits(a: str, b: str, most: int) -> bool:
    """Whether at most so many letters are to insert, delete, replace or swap with the next."""
    if abs(len(a) - len(b)) > most:
        return False
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        last, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (a[i - 2], letter) == (other, b[j - 2]):
                row[j] = min(row[j], last[j - 2] + 1)
        if min(row) > most and min(before) >= most:  # no later one is less
            return False
    return row[-1] <= most


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """'Did you mean "x"?', or '' if the word is a typo of no choice."""
    near = closest(word, choices)
    return f'Did you mean "{near}"?' if near else ""


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Find the choice of which a word is a typo; None if there is none.

    Of several, the one with the fewest wrong letters, then with the longest equal beginning.
    """
    lower = word.lower()
    near = [choice for choice in choices if is_near(lower, choice.lower())]

    def distance(choice: str) -> tuple[int, int]:
        known = choice.lower()
        wrong = next((n for n in range(len(lower)) if _edits(lower, known, n)), len(lower))
        pairs = zip(lower, known, strict=False)
        return wrong, -len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return min(near, key=distance, default=None)
