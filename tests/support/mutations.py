"""Seeded random mutations of trees, as of a config, and of bytes, as of a file."""

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.5, 1.5,
    1e-300, 1e300, float("inf"), float("nan"), "", " ", "auto", "x", "a.b", "\0", "\ud800", "é",
    "1e5", "-1", "x" * 500, "../..", "/", "%s{}", [], [[]], [None], [1, "x"], {}, {"": 1},
    {"x": {"y": []}}, {"type": None}, [{}], ["a"] * 100,
)  # fmt: skip


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below."""
    found = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def mutated(tree: Any, rng: random.Random) -> Any:
    """A copy with one to three values replaced, removed, moved, renamed or nested."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        if not (places := _places(tree)):
            return tree
        inside, key = rng.choice(places)
        kind = rng.choice(["replace", "replace", "replace", "remove", "move", "rename", "nest"])
        if kind == "replace":
            inside[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == "remove":
            del inside[key]
        elif kind == "move":
            there, other = rng.choice(places)
            there[other] = copy.deepcopy(inside[key])
        elif kind == "rename" and isinstance(inside, dict):
            inside[rng.choice([f"{key}s", str(key)[:-1], str(key).upper(), ""])] = inside.pop(key)
        else:
            inside[key] = rng.choice([[inside[key]], {"value": inside[key]}, str(inside[key])])
    return tree


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content with a few bytes flipped, inserted, removed or doubled, or without its end."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        kind = rng.choice(["flip", "flip", "insert", "remove", "double", "truncate"])
        if kind == "flip" and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == "insert":
            found[at:at] = rng.choice([b"\0", b"[", b"{", b'"', b"9" * 30, b"\xff", b"-", b"\n"])
        elif kind == "remove":
            del found[at : at + rng.randint(1, 20)]
        elif kind == "double":
            found[at:at] = found[at : at + rng.randint(1, 60)]
        elif rng.random() < 0.3:
            del found[at:]
    return bytes(found)
