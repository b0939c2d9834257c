"""Whatever is done to a config, loading gives a Config or one ConfigError, and nothing else."""

import contextlib
import copy
import json

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config_keys import HF
from test_config_samples import SAMPLES

from jaxspeed.config import Config, explain_config, load_config
from jaxspeed.config.tree import VOCABULARY
from jaxspeed.errors import ConfigError
from tests.support.covering import examples

GOOD = [*SAMPLES.values(), HF]
PATHS = sorted(VOCABULARY)
SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "true", "8", "1e-5", "fp16", "bfloat16", "none", "cpu", "a.b", "/"])
)
ANY = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["enabled", "type", "params", "lr", "x", "_c"]), inner)
    ),
    max_leaves=6,
)


def places(node, path=()):
    """Every place in a tree, as a path of keys and indices."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items if isinstance(node, dict | list) else ():
        yield (*path, key)
        yield from places(value, (*path, key)) if isinstance(value, dict | list) else ()


@st.composite
def mutated(draw):
    tree = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 4))):
        spots = list(places(tree))
        deed = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if deed == "add" or not spots:
            *parents, last = draw(st.sampled_from(PATHS)).split(".")
            node = tree
            for part in parents:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
                if not isinstance(node, dict):
                    break
            if isinstance(node, dict):
                node[last] = draw(ANY)
            continue
        *parents, last = draw(st.sampled_from(spots))
        node = tree
        for part in parents:
            node = node[part]
        if deed == "replace":
            node[last] = draw(ANY)
        elif deed == "remove":
            del node[last]
        elif isinstance(node, dict):
            node[draw(st.text(max_size=4) | st.just(f"{last}s") | st.integers())] = node.pop(last)
    return tree


@settings(max_examples=examples(150, 600), deadline=None)
@given(mutated())
def test_a_mutated_config_loads_or_is_one_config_error(tree):
    before = copy.deepcopy(tree)
    try:
        config = load_config(tree)
    except ConfigError as error:
        problems = str(error).splitlines()[1:]
        if problems[-1].startswith("Add --auto "):
            problems.pop()
        assert problems
        assert all(line.startswith("  - ") and ": found " in line for line in problems)
    else:
        assert isinstance(config, Config)
        again = load_config(config.model_dump(exclude_unset=True))
        assert again.model_dump() == config.model_dump()
    assert repr(tree) == repr(before)


@settings(max_examples=examples(75, 300), deadline=None)
@given(mutated())
def test_explaining_never_raises_and_refuses_exactly_what_does_not_load(tree):
    rows = explain_config(tree)
    try:
        load_config(tree)
    except ConfigError:
        assert any(row.verdict == "refused" for row in rows)
    else:
        assert all(row.verdict != "refused" for row in rows)


@settings(max_examples=100, deadline=None)
@given(ANY)
def test_any_value_at_all_loads_or_is_a_config_error(source):
    if isinstance(source, str):
        return  # a path
    with contextlib.suppress(ConfigError):
        load_config(source)


@settings(max_examples=examples(50, 200), deadline=None)
@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=40), st.sampled_from([".json", ".yaml"])
)
def test_any_text_loads_or_is_a_config_error(tmp_path_factory, text, suffix):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(ConfigError):
        load_config(path)


@settings(max_examples=examples(50, 200), deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"[a-z0-9_.]{1,12}=[a-z0-9\[\]{}:, '\"-]{0,8}"))
def test_any_override_loads_or_is_a_config_error(override):
    with contextlib.suppress(ConfigError):
        load_config(SAMPLES["with the own sections"], [override])


SAID = {
    "train_batch_size": st.integers(1, 10**6),
    "gradient_clipping": st.floats(0, 1e6),
    "bf16.check_grad_overflow": st.booleans(),
    "zero_optimization.stage": st.integers(0, 3),
    "optimizer.params.lr": st.floats(0, 10),
    "communication_data_type": st.sampled_from(["fp32", "fp16", "bf16"]),
    "parallel.units": st.lists(st.from_regex(r"[a-z]{1,4}/\*", fullmatch=True), max_size=3),
    "mesh.tensor": st.integers(1, 8),
}


@settings(max_examples=examples(50, 200), deadline=None)
@given(st.data(), st.sampled_from(sorted(SAID)), st.sampled_from([json.dumps, yaml.safe_dump]))
def test_an_override_sets_exactly_its_key(data, path, dump):
    value = data.draw(SAID[path])
    text = dump(value).removesuffix("\n").removesuffix("\n...")
    base = {"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
    tree = copy.deepcopy(base)
    *parents, last = path.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    assert load_config(base, [f"{path}={text}"]) == load_config(tree)
