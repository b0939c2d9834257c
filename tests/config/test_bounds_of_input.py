"""A config that would take minutes or gigabytes to read is refused before the work, in a moment."""

import itertools
import time

import pytest

import jaxspeed
from jaxspeed.config.load import examine
from jaxspeed.config.suggestions import suggest

pytestmark = pytest.mark.fast

LARGE = 1 << 18  # bytes
BASE = {"train_batch_size": 8}


def nested(levels, leaf=1):
    for _ in range(levels):
        leaf = {"a": leaf}
    return leaf


def doubled(levels, leaf=1):
    for _ in range(levels):
        leaf = [leaf, leaf]
    return leaf


def endless():
    found = dict(BASE)
    found["x"] = found
    return found


def bomb(form):
    """Nine aliases in each of nine lines: 9^9 values in 324 bytes, or as merged mappings."""
    names = "abcdefghi"
    lines = [f"{new}: &{new} {form(old)}" for old, new in itertools.pairwise(names)]
    return "\n".join(["a: &a {x: 1}", *lines])


TEXTS = {
    "alias bomb": (
        "yaml", bomb(lambda old: f"[{','.join([f'*{old}'] * 9)}]"), "over 10,000 values",
    ),
    "merged bomb": (
        "yaml", bomb(lambda old: f"{{<<: [{','.join([f'*{old}'] * 9)}]}}"), "over 10,000 values",
    ),
    "deep yaml": ("yaml", "[" * LARGE, "over 50 levels"),
    "deep lines": ("yaml", "\n".join(f"{' ' * i}a:" for i in range(99)), "over 50 levels"),
    "deep json": ("json", '{"a":' * 60 + "1" + "}" * 60, "over 50 levels"),
    "deeper json": ("json", "[" * LARGE, "nesting too deep"),
    "long list": ("yaml", f"a: [{'x,' * (LARGE // 2 - 4)}]", "over 10,000 values"),
    "long number": ("yaml", f"a: 1{':1' * (LARGE // 2 - 4)}", "a number of"),
    "large file": ("yaml", "#" * (LARGE + 1), "over 262,144 bytes"),
    "open comments": ("json", "{" + "/*" * (LARGE // 2 - 1), "Needs JSON"),
    "open text": ("json", '{"' + '\\"' * (LARGE // 2 - 2), "Needs JSON"),
}  # fmt: skip


def refused(source, said, overrides=()):
    begun = time.process_time()
    with pytest.raises(jaxspeed.ConfigError) as found:
        jaxspeed.Config.load(source, overrides)
    assert said in str(found.value) and len(str(found.value)) < 1000
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_too_large_is_refused_at_once(tmp_path, name):
    suffix, text, said = TEXTS[name]
    (tmp_path / f"config.{suffix}").write_text(text)
    refused(tmp_path / f"config.{suffix}", said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"x" * 200_000: 1}, "a key of 200,000 characters"),
        ({f"unknown_{i}": 1 for i in range(5000)}, "over 1,000 keys"),
        ({"optimizer": nested(100)}, "over 50 levels"),
        ({"optimizer": doubled(30)}, "over 10,000 values"),
        (endless(), "over 50 levels"),
    ],
    ids=["key", "keys", "levels", "values", "endless"],
)
def test_a_mapping_that_is_too_large_is_refused_at_once(more, said):
    refused(BASE | more, said)


@pytest.mark.parametrize(
    ("override", "said"),
    [(f"{'a.' * 3000}b=1", "No key is that long"), (f"x={'[' * 9000}", "Needs a value as YAML")],
)
def test_an_override_is_bounded_too(override, said):
    refused(BASE, said, [override])


def test_as_many_unknown_keys_as_are_read_take_a_moment():
    """Also where each resembles a known one."""
    begun = time.process_time()
    keys = {f"stage3_max_live_parameterz{i}": 1 for i in range(950)}
    assert len(examine(BASE | {"zero_optimization": keys}).problems) == 950
    assert time.process_time() - begun < 5


def test_a_long_key_resembles_none_in_no_time():
    begun = time.process_time()
    assert suggest("x" * 200_000, 1) is None
    assert time.process_time() - begun < 1


def test_what_a_config_may_be_is_far_from_the_bounds():
    paths = [f"part-{i}.npy" for i in range(5000)]
    found = examine(BASE | {"data": {"source": "tokens", "paths": paths}})
    assert found.problems == () and len(found.settings.data.paths) == 5000
