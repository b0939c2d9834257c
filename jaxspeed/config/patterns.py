"""Path patterns of parameters and modules, as in .gitignore files.

Paths are segments joined by "/": `blocks/3/attn/q_proj/kernel`. A pattern covers its matches and
everything below them:

- `*` and `?` match within one segment, `**` any number of segments, none included;
- without a "/" a pattern may match any segment: `bias` covers `a/b/bias`, `*norm` covers
  `blocks/0/post_norm/scale`;
- with a "/" it starts at the root: `blocks/*/norm` covers `blocks/3/norm/scale`, but not
  `encoder/blocks/3/norm`, which `**/blocks/*/norm` does.
"""

import re
from functools import lru_cache


def match(pattern: str, path: str) -> bool:
    """Whether `pattern` covers `path`."""
    return _compiled(pattern).match(f"{path}/") is not None


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
    if "/" not in pattern and "." in pattern.strip("."):
        return f'segments joined by "/": {pattern.replace(".", "/")!r}'
    return None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    segments = pattern.split("/")
    if len(segments) == 1:
        segments = ["**", *segments]
    return re.compile(
        "".join("(?:[^/]+/)*" if part == "**" else f"{_segment(part)}/" for part in segments)
    )


def _segment(part: str) -> str:
    wildcards = {"*": "[^/]*", "?": "[^/]"}
    return "".join(wildcards.get(char) or re.escape(char) for char in part)
