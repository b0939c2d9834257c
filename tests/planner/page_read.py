"""Reading a plan's page as a program would, without the code that made it."""

import json
import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "link", "br", "col"}
_PREFIX = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_WORDS = {"million": 1e6, "billion": 1e9, "trillion": 1e12}
_SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def all(self) -> list["Element"]:
        return [self, *(each for child in self.children for each in child.all())]

    @property
    def looks(self) -> set[str]:
        return set(self.attributes.get("class", "").split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, name: str, attributes: Any) -> None:
        made = Element(name, {key: value or "" for key, value in attributes})
        self.open[-1].children.append(made)
        if name not in _VOID:
            self.open.append(made)

    def handle_endtag(self, name: str) -> None:
        assert self.open[-1].name == name, (self.open[-1].name, name)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for each in self.open:
            each.text += data


def elements(page: str) -> list[Element]:
    reader = _Reader()
    reader.feed(page)
    assert len(reader.open) == 1  # all that was opened is closed
    return reader.open[0].all()


def embedded(page: str) -> Any:
    (found,) = [e for e in elements(page) if e.attributes.get("id") == "figures"]
    return json.loads(found.text)


def at(tree: Any, pointer: str) -> Any:
    """RFC 6901."""
    for part in pointer.split("/")[1:]:
        part = part.replace("%20", " ").replace("~1", "/").replace("~0", "~")
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def value_of(text: str, form: str) -> float:
    """What a shown number says, read as a person would."""
    found = re.fullmatch(r"(<?)([\d.,e+-]+) ?(.*)", text)
    assert found, text
    number, unit = float(found[2].replace(",", "")), found[3]
    if form == "percent":
        assert unit == "%", text
        return number / 100
    if form == "seconds":
        return number * _SECONDS[unit]
    if form == "count":
        return number * _WORDS.get(unit, 1)
    ends = {"bytes": "B", "bytes a second": "B/s", "flops": "FLOP", "flops a second": "FLOP/s"}
    assert unit.endswith(ends[form]), text
    return number * _PREFIX[unit.removesuffix(ends[form])]


def wrong(shown: list[tuple[str, str, str, str]], tree: Any) -> list[str]:
    """Of numbers (text, places, how, form) those that are not what the tree says."""
    found = []
    for text, places, how, form in shown:
        values = [at(tree, place) for place in places.split()]
        said, true = value_of(text, form), _made(how or "value", values)
        near = 0.00051 if form == "percent" and true < 0.995 else 0.0051 * max(abs(true), 1e-30)
        if text.startswith("<"):
            near = said
        if not math.isclose(said, true, rel_tol=0, abs_tol=near):
            found.append(f"{text} is not {true} ({places})")
    return found


def _made(how: str, values: list[float]) -> float:
    if how == "value":
        (one,) = values
        return one
    if how == "sum":
        return math.fsum(values)
    if how == "ratio":
        top, bottom = values
        return top / bottom
    assert how == "products", how
    return math.fsum(a * b for a, b in zip(values[::2], values[1::2], strict=True))
