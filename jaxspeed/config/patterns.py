"""Path patterns of parameters and modules, as in .gitignore files.

Paths are segments joined by "/": `blocks/3/attn/q_proj/kernel`. A pattern covers its matches and
everything below them:

- `*` and `?` match within one segment, `**` any number of segments, none included;
- without a "/" a pattern may match any segment: `bias` covers `a/b/bias`, `*norm` covers
  `blocks/0/post_norm/scale`;
- with a "/" it starts at the root: `blocks/*/norm` covers `blocks/3/norm/scale`, but not
  `encoder/blocks/3/norm`, which `**/blocks/*/norm` does;
- `blocks[20:32]` is a range of the members of a list, as a slice in Python: `blocks/20` to
  `blocks/31`, and `blocks_20` as Linen names them. `blocks[-4:]` are the last four.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

_RANGE = re.compile(r"(.*)\[(?:(-?\d+)|(-?\d+)?:(-?\d+)?)\]")
_SLICE = re.compile(r".*\[[^\]]*:[^\]]*\]")  # a range, well formed or not
_MEMBER = re.compile(r"(.*)_(\d+)")
NO_LENGTHS: Mapping[str, int] = MappingProxyType({})


def match(pattern: str, path: str, lengths: Mapping[str, int] = NO_LENGTHS) -> bool:
    """Whether `pattern` covers `path`.

    `lengths` are those of the lists, by path, for ranges that count from the end.
    """
    if "[" in pattern:
        return _covers(_segments(pattern), path.split("/"), 0, lengths)
    return _compiled(pattern).match(f"{path}/") is not None


def has_range(pattern: str) -> bool:
    """Whether a pattern names members of a list by a range."""
    return any(_RANGE.fullmatch(part) for part in pattern.split("/"))


def lengths_of(paths: Iterable[str]) -> dict[str, int]:
    """The lengths of the lists that the paths of parameters suggest, by path."""
    lengths: dict[str, int] = {}
    for path in paths:
        segments = path.split("/")
        for at in range(len(segments)):
            for name, number, _ in member_of(segments, at):
                of_list = "/".join([*segments[:at], *filter(None, [name])])
                lengths[of_list] = max(lengths.get(of_list, 0), number + 1)
    return lengths


def member_of(segments: Sequence[str], at: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name of a list, number, index of what follows) if a member of one starts at `at`."""
    if at == 0 and segments[0].isdigit():
        yield "", int(segments[0]), 1
    if at + 1 < len(segments) and segments[at + 1].isdigit():
        yield segments[at], int(segments[at + 1]), at + 2
    if member := _MEMBER.fullmatch(segments[at]):
        yield member[1], int(member[2]), at + 1


def pattern_problem(pattern: str) -> str | None:
    """Describe what a malformed pattern needs; None for a valid one."""
    if not pattern.strip("/"):
        return 'a pattern such as "blocks/*" or "bias"'
    if pattern.startswith("/") or pattern.endswith("/"):
        return f'a pattern without a "/" at its ends: {pattern.strip("/")!r}'
    if "//" in pattern:
        return f"a pattern without empty segments: {re.sub('/+', '/', pattern)!r}"
    if any("**" in part and part != "**" for part in pattern.split("/")):
        return '"**" standing alone between slashes; within a segment write "*"'
    slices = [part for part in pattern.split("/") if _SLICE.fullmatch(part)]
    for wrong in (part for part in slices if not _RANGE.fullmatch(part)):
        name = wrong.partition("[")[0]
        return f"a range of layers such as {name}[20:32], {name}[-4:] or {name}[3]"
    if "/" not in pattern and "." in pattern.strip("."):
        return f'segments joined by "/": {pattern.replace(".", "/")!r}'
    return None


def _segments(pattern: str) -> tuple[str, ...]:
    segments = tuple(pattern.split("/"))
    return segments if len(segments) > 1 else ("**", *segments)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(
        "".join(
            "(?:[^/]+/)*" if part == "**" else f"{_segment(part)}/" for part in _segments(pattern)
        )
    )


def _covers(
    pattern: Sequence[str], path: Sequence[str], at: int, lengths: Mapping[str, int]
) -> bool:
    """Whether the segments of a pattern cover those of a path from `at` on."""
    if not pattern:
        return True
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        while rest[:1] == ("**",):
            rest = rest[1:]
        return any(_covers(rest, path, i, lengths) for i in range(at, len(path) + 1))
    if at == len(path):
        return False
    ranged = _RANGE.fullmatch(first)
    if not ranged:
        return _alike(first, path[at]) and _covers(rest, path, at + 1, lengths)
    name, index, start, stop = ranged.groups()
    ends = [None if end is None else int(end) for end in (index or start, index or stop)]
    if index is not None:
        ends[1] = None if index == "-1" else int(index) + 1
    for of_list, number, after in member_of(path, at):
        length = lengths.get("/".join([*path[:at], *filter(None, [of_list])]))
        if length is None and any(end is not None and end < 0 for end in ends):
            continue  # it counts from the end of a list that is not known
        chosen = range(*slice(*ends).indices(number + 1 if length is None else length))
        if number in chosen and _alike(name, of_list) and _covers(rest, path, after, lengths):
            return True
    return False


def _alike(part: str, segment: str) -> bool:
    return part == segment or _compiled(f"{part}/**").match(f"{segment}/") is not None


def _segment(part: str) -> str:
    wildcards = {"*": "[^/]*", "?": "[^/]"}
    return "".join(wildcards.get(char) or re.escape(char) for char in part)
