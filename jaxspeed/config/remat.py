"""`parallel.remat` and DeepSpeed's words for it: what a layer keeps for its backward pass."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import LARGEST, Count, Text, lower, whole

WORDS = ("none", "full", "dots", "attention")
LISTS = ("save", "offload", "recompute")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("kmgt", 1)}
_NEEDS = (
    '"none", "full", "dots", "attention", {"every_n": 2}, {"budget": "4 GB"}, or names of '
    'activations as {"save": [...], "offload": [...], "recompute": [...]}'
)


def _remat(value: Any) -> Any:
    word = lower(value)
    if word in WORDS:
        return word
    read = _read_mapping(value) if isinstance(value, Mapping) else None
    if read is None:
        raise PydanticCustomError("remat", "{needs}", {"needs": _NEEDS})
    return read


def _read_mapping(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """As it is kept; None where it says nothing that is known."""
    if set(value) == {"every_n"}:
        every = whole(value["every_n"])
        return {"every_n": every} if _is_count(every) else None
    if set(value) == {"budget"}:
        budget = bytes_of(value["budget"])
        return None if budget is None else {"budget": budget}
    if not value or set(value) - set(LISTS):
        return None
    lists = [value.get(key, []) for key in LISTS]
    names = all(isinstance(names, list) and all(map(_is_name, names)) for names in lists)
    return {key: list(value[key]) for key in LISTS if key in value} if names else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def bytes_of(value: Any) -> int | None:
    """A number of bytes, or a text as "4 GB" or "512 MiB"; None where it is neither."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        value = float(found[1]) * _UNITS[found[2] or ""] if found else None
        return None if value is None else int(value)
    value = whole(value)
    return value if _is_count(value) else None


_Names = dict[Literal["save", "offload", "recompute"], list[Text]]
_Word = Literal["none", "full", "dots", "attention"]
_Budget = dict[Literal["budget"], Count | Text]
_Schema = _Word | dict[Literal["every_n"], Count] | _Budget | _Names
Remat = Annotated[Any, BeforeValidator(_remat, json_schema_input_type=_Schema)]


@dataclass(frozen=True)
class Recompute:
    """What each unit keeps between its passes, by all words for it."""

    policy: Literal["none", "full", "dots", "attention", "names", "budget"] = "none"
    every: int | None = None  # so many units are made again together
    count: int | None = None  # ... or as many as leave so many checkpoints
    budget: int | None = None  # bytes a device of what is kept
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    partition: bool = False  # what is kept is cut over tensor
    on_host: bool = False  # what is kept waits in host memory

    def __bool__(self) -> bool:
        return self.policy != "none"

    def doubles(self) -> Iterator[tuple[str, str, str]]:
        """(name, list, other list) of each name that two of the lists have."""
        lists = dict(zip(LISTS, (self.save, self.offload, self.recompute), strict=True))
        for i, first in enumerate(LISTS):
            for second in LISTS[i + 1 :]:
                yield from ((n, first, second) for n in lists[first] if n in lists[second])


NOTHING_SAID = Recompute()


def recompute_of(remat: Any, count: int | None, partition: bool, on_host: bool) -> Recompute:
    """The words of `parallel.remat` and of `activation_checkpointing` as one."""
    how: dict[str, Any] = {"count": count, "partition": partition, "on_host": on_host}
    if isinstance(remat, str):
        asked = remat == "none" and (count or partition or on_host)
        return Recompute("full" if asked else remat, **how)  # type: ignore[arg-type]
    if "every_n" in remat:
        return Recompute("full", every=remat["every_n"], **how)
    if "budget" in remat:
        return Recompute("budget", budget=remat["budget"], **how)
    save, offload, again = (tuple(remat.get(key, ())) for key in LISTS)
    return Recompute("names", save=save, offload=offload, recompute=again, **how)
