"""The key `parallel.remat`, and one residual policy from it and `activation_checkpointing`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import LARGEST, Count, Text, integral, lower

POLICIES = ("none", "full", "dots", "attention")
LISTS = ("save", "offload", "recompute")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("kmgt", 1)}
_NEEDS = (
    '"none", "full", "dots", "attention", {"every_n": 2}, {"budget": "4 GB"}, or names of '
    'activations as {"save": [...], "offload": [...], "recompute": [...]}'
)


def _remat(value: Any) -> Any:
    policy = lower(value)
    if policy in POLICIES:
        return policy
    read = _read_mapping(value) if isinstance(value, Mapping) else None
    if read is None:
        raise PydanticCustomError("remat", "{needs}", {"needs": _NEEDS})
    return read


def _read_mapping(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Normalize a mapping; None for an unknown form."""
    if set(value) == {"every_n"}:
        every = integral(value["every_n"])
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
    """Parse a number of bytes, or text such as "4 GB" or "512 MiB"; None if it is neither."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        value = float(match[1]) * _UNITS[match[2] or ""] if match else None
        return None if value is None else int(value)
    value = integral(value)
    return value if _is_count(value) else None


_Names = dict[Literal["save", "offload", "recompute"], list[Text]]
_Policy = Literal["none", "full", "dots", "attention"]
_Budget = dict[Literal["budget"], Count | Text]
_Schema = _Policy | dict[Literal["every_n"], Count] | _Budget | _Names
Remat = Annotated[Any, BeforeValidator(_remat, json_schema_input_type=_Schema)]


@dataclass(frozen=True)
class Recompute:
    """Residual policy of units, from all keys for it."""

    policy: Literal["none", "full", "dots", "attention", "names", "budget"] = "none"
    every: int | None = None  # number of units that are recomputed together
    count: int | None = None  # or: number of checkpoints
    budget: int | None = None  # bytes of residuals per device
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    partition: bool = False  # residuals are sharded over tensor
    host_ratio: float = 0.0  # share of each residual that is offloaded

    def __bool__(self) -> bool:
        return self.policy != "none"

    @property
    def on_host(self) -> bool:
        """Whether residuals are offloaded, all or a part of each."""
        return self.host_ratio > 0

    def duplicates(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, list, other list) for each name that is in two lists."""
        lists = dict(zip(LISTS, (self.save, self.offload, self.recomputed), strict=True))
        for i, first in enumerate(LISTS):
            for second in LISTS[i + 1 :]:
                yield from ((n, first, second) for n in lists[first] if n in lists[second])


NO_RECOMPUTE = Recompute()


def recompute_of(
    remat: Any, count: int | None, partition: bool, host_ratio: float | None
) -> Recompute:
    """Combine `parallel.remat` and `activation_checkpointing` into one policy.

    `host_ratio` is None without `cpu_checkpointing`.
    """
    how: dict[str, Any] = {"count": count, "partition": partition, "host_ratio": host_ratio or 0.0}
    if isinstance(remat, str):
        implied = remat == "none" and (count or partition or host_ratio is not None)
        return Recompute("full" if implied else remat, **how)  # type: ignore[arg-type]
    if "every_n" in remat:
        return Recompute("full", every=remat["every_n"], **how)
    if "budget" in remat:
        return Recompute("budget", budget=remat["budget"], **how)
    save, offload, again = (tuple(remat.get(key, ())) for key in LISTS)
    return Recompute("names", save=save, offload=offload, recomputed=again, **how)
