"""Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909) over bytes, in plain Python."""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

Pair = tuple[int, int]
Word = tuple[int, ...]

# Words as GPT-2 splits them: a space belongs to the word after it. Lengths are bounded, or a line
# of a million dashes would be slow. Every character is in exactly one word.
WORDS = r" ?[^\W\d_]{1,32}| ?\d{1,3}| ?(?:[^\w\s]|_){1,32}|\s{1,64}(?!\S)|\s{1,64}"
find_words = re.compile(WORDS).findall


def learn_merges(
    words: Iterable[tuple[bytes, int]], merges: int, least: int = 2
) -> tuple[list[Pair], dict[bytes, Word]]:
    """Learn merges: repeatedly replace the most frequent pair of adjacent ids by a new id.

    Args:
      words: byte strings with their counts.
      merges: number of ids to add to the 256 bytes; fewer if no pair occurs `least` times.

    Returns: the merged pairs in the order of their ids, from 256 on; and the ids of each word.
    """
    spelled = list(words)
    ids = [list(word) for word, _ in spelled]
    counts = [count for _, count in spelled]
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for i, word in enumerate(ids):
        for pair in pairwise(word):
            pairs[pair] += counts[i]
            where[pair].add(i)
    # Ties go to the smaller pair, so the result does not depend on the order of the words.
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    learned: list[Pair] = []
    while heap and len(learned) < merges:
        negative, pair = heapq.heappop(heap)
        if -negative != pairs[pair]:  # stale; a later entry has its current count
            continue
        if -negative < least:
            break
        new = 256 + len(learned)
        learned.append(pair)
        changed: set[Pair] = set()
        for i in where.pop(pair):
            before, after = ids[i], merge(ids[i], pair, new)
            if len(before) == len(after):
                continue
            count = counts[i]
            for old in pairwise(before):
                pairs[old] -= count
                changed.add(old)
            for now in pairwise(after):
                pairs[now] += count
                where[now].add(i)
                changed.add(now)
            ids[i] = after
        for other in changed:
            if pairs[other] > 0:
                heapq.heappush(heap, (-pairs[other], other))
        pairs.pop(pair, None)
    return learned, {word: tuple(merged) for (word, _), merged in zip(spelled, ids)}


def merge(ids: list[int], pair: Pair, new: int) -> list[int]:
    """Replace each occurrence of the pair, from the left, by one id."""
    first, second = pair
    out, i, last = [], 0, len(ids) - 1
    while i <= last:
        if ids[i] == first and i < last and ids[i + 1] == second:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def encode_word(word: bytes, ranks: dict[Pair, int]) -> Word:
    """The ids of a word: apply the earliest learned merge until none applies."""
    ids = list(word)
    while len(ids) > 1:
        pair = min(pairwise(ids), key=lambda p: ranks.get(p, _NEVER))
        new = ranks.get(pair)
        if new is None:
            break
        ids = merge(ids, pair, new)
    return tuple(ids)


_NEVER = 1 << 62
