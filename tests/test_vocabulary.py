"""The package, its messages and the docs use the field's terms (docs/glossary.md)."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *sorted((ROOT / "jaxspeed").rglob("*.py")),
    *sorted((ROOT / "models").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").iterdir()),
    *sorted((ROOT / "examples").iterdir()),
    ROOT / "README.md",
]

# What not to write (words also inside of snake_case names), and what to write instead.
PHRASES = {
    r"cuts?|cutting|cutter": "shard, partition; split (a program)",
    r"whole|wholly": "replicated; full, unsharded (an array); entire",
    r"keeping": "saving; residual policy",
    r"(made|make|makes|making)[ _]again": "rematerialized, recomputed",
    r"waits? (in host|there|on the host)|waiting in host": "is offloaded to host memory",
    r"a piece at a time": "streamed layer by layer",
    r"told|telling": "reported, known",
    r"tells?": "reports, shows, states",
    r"says? nothing|asks? for nothing": "does not set; no-op",
    r"words? (of|for) (a|the|its|DeepSpeed)|words of": "keys",
    r"crossings?": "shard boundary; host transfer",
    r"lanes?": "stage program, per-stage",
    r"a fault (of|in) jaxspeed": "a bug in jaxspeed",
    r"of now": "current",
    r"(M|what) against N": "fits in memory",
    r"face": "protocol, interface",
    r"uses? (it |its \w+ |the state |a state )?up|used up": "donates",
    r"whose turn": "the schedule",
    r"(comes?|came) to nothing|what \w+ comes? to": "the resolved value",
    r"ways": "num_shards",
    r"mended|mends?": "fixed",
    r"the device does not tell": "device memory size unknown",
    r"in place of an N": "host RAM shared by the simulated devices",
}
# Names that are public, or another library's, and other meanings of a word: not searched.
ALLOWED = (
    "infer_tensor_cuts",  # a config key
    "ring_both_ways",  # a config value
    "tells_host",  # a key of `plan --json`
    "untold",
    "file.tell()",
    "both ways",
)


def places(name: str, text: str) -> list[str]:
    """Each line with a phrase, and what to write instead."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for allowed in ALLOWED:
            line = line.replace(allowed, "")
        for phrase, better in PHRASES.items():
            match = re.search(rf"(?<![A-Za-z])({phrase})(?![A-Za-z])", line)
            if match:
                found.append(f"{name}:{number}: {match[0]!r}: write {better}")
    return found


def test_no_file_uses_a_phrase_that_the_field_has_a_term_for():
    found = [
        place
        for path in FILES
        for place in places(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "nothing is made again in the backward pass",
        "the optimizer waits in host memory",
        "num = ways(spec)",
        "def cut_leaf(leaf):",
        "what it comes to",
        "the words of a config",
        "the devices of now",
    ],
)
def test_a_phrase_is_found(line):
    assert places("file.py", line)


def test_allowed_names_are_in_use():
    text = "".join(path.read_text() for path in FILES)
    assert not [allowed for allowed in ALLOWED if allowed not in text]


# Names that say nothing of what they hold, and cannot be searched for.
EMPTY_NAMES = {"found", "given", "own", "each", "made", "one"}


def empty_names(source: str) -> list[str]:
    """Those that functions bind, as arguments or targets of assignments, loops, comprehensions."""
    tree = ast.parse(source)
    bound = [
        node.arg if isinstance(node, ast.arg) else node.id
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return [name for name in bound if name in EMPTY_NAMES]


def test_bindings_are_named_after_what_they_hold():
    package = (ROOT / "jaxspeed").rglob("*.py")
    counts = {file.relative_to(ROOT): empty_names(file.read_text()) for file in package}
    named = {str(file): names for file, names in counts.items() if names}
    assert not named, "write a noun of the field"


def test_an_empty_name_is_found():
    source = "def f(given):\n    for one in given:\n        found = [each for each in one]"
    assert sorted(empty_names(source)) == ["each", "found", "given", "one"]
    assert not empty_names("x = given = 1\ndef f(leaf):\n    return given")
