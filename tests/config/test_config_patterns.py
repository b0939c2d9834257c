"""Path patterns, against a reading of their definition a segment at a time."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.config import match
from jaxspeed.config.patterns import lengths_of, pattern_problem

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("bias", "a/b/bias", True),
        ("bias", "bias", True),
        ("bias", "a/bias/b", True),
        ("bias", "a/biases", False),
        ("*norm", "blocks/0/post_norm/scale", True),
        ("*norm", "blocks/0/norms/scale", False),
        ("blocks/*/norm", "blocks/3/norm/scale", True),
        ("blocks/*/norm", "blocks/3/norm", True),
        ("blocks/*/norm", "blocks/3/attn/norm", False),
        ("blocks/*/norm", "encoder/blocks/3/norm", False),
        ("**/blocks/*/norm", "encoder/blocks/3/norm", True),
        ("**/blocks/*/norm", "blocks/3/norm", True),
        ("blocks/**/norm", "blocks/norm", True),
        ("blocks/**/norm", "blocks/3/attn/norm/scale", True),
        ("blocks/?", "blocks/3", True),
        ("blocks/?", "blocks/31", False),
        ("blocks/3", "blocks/31", False),
        ("**", "a/b", True),
        ("a.b", "a.b/c", True),
        ("a.b", "axb/c", False),
        ("[a]/b", "[a]/b", True),
    ],
)
def test_what_a_pattern_covers(pattern, path, covered):
    assert match(pattern, path) is covered


@pytest.mark.parametrize(
    ("pattern", "is_range"),
    [
        ("blocks[2:4]/**", True),
        ("blocks[:]/**", True),
        ("*/blocks[-1:]", True),
        ("blocks[3]/**", True),
        ("[a]/b", True),
        ("blocks[::2]/**", False),
        ("blocks[a:b]/**", False),
        ("blocks[2:-]", False),
    ],
)
def test_a_malformed_range_is_refused(pattern, is_range):
    needs = pattern_problem(pattern)
    assert needs is None if is_range else "a range of layers such as blocks[20:32]" in needs


def covers(pattern, path):
    """The definition by recursion; True when a prefix of the path is matched."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(covers(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and covers(pattern[1:], path[1:])


SEGMENT = st.sampled_from(["a", "b", "ab", "ba", "0", "12"])
GLOB = st.sampled_from(["a", "b", "ab", "*", "a*", "*b", "?", "?b", "**"])


@given(st.lists(GLOB, min_size=1, max_size=4), st.lists(SEGMENT, min_size=1, max_size=5))
def test_match_is_the_definition(pattern, path):
    parts = pattern if len(pattern) > 1 else ["**", *pattern]
    assert match("/".join(pattern), "/".join(path)) is covers(parts, path)


ENDS = st.none() | st.integers(-8, 8)


@given(ENDS, ENDS, st.integers(1, 7), st.sampled_from(["blocks/{}", "blocks_{}"]))
def test_a_range_of_layers_is_a_slice_of_the_list(start, stop, length, member):
    ends = ":".join("" if end is None else str(end) for end in (start, stop))
    paths = [f"net/{member.format(i)}/up/kernel" for i in range(length)]
    lengths = lengths_of(paths)
    for pattern in (f"net/blocks[{ends}]/**", f"blocks[{ends}]", f"**/blo*[{ends}]/*/kernel"):
        covered = [path for path in paths if match(pattern, path, lengths)]
        assert covered == paths[start:stop]


@pytest.mark.parametrize("number", [0, 3, -1, -4, 4, -5])
def test_one_layer_may_be_named(number):
    paths = [f"blocks/{i}/up" for i in range(4)]
    covered = [p for p in paths if match(f"blocks[{number}]/up", p, lengths_of(paths))]
    assert covered == (paths[number : number + 1 or None] if -4 <= number < 4 else [])


def test_a_range_that_counts_from_the_end_needs_the_length():
    assert match("blocks[2:]", "blocks/3") and not match("blocks[-2:]", "blocks/3")
    assert match("[1:2]/w", "1/w") and not match("[1:2]/w", "2/w")  # a tree that is a list
