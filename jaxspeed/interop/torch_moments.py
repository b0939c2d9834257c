"""The state of an optimizer by torch's names: `state.NAME.exp_avg` is `opt/.../mu/PATH` here."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxspeed.interop.mapping import MappingTable
from jaxspeed.train_state.opt_layout import owner_of

# By a field of Optax's states: torch's name, and its power of the gradient's unit.
MOMENTS = {
    "mu": ("exp_avg", 1),
    "nu": ("exp_avg_sq", 2),
    "trace": ("momentum_buffer", 1),
    "sum_of_squares": ("sum", 2),
}


def moments_in(
    leaves: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """{field: {a parameter's path: leaf}} of the leaves `opt/...`; "" has all others but counts."""
    fields: dict[str, dict[str, str]] = {}
    for leaf, array in leaves.items():
        path = leaf.removeprefix("opt/")
        owner = owner_of(path, parameters)
        if path != leaf and (owner or array.shape):
            owner = owner or path
            kind = path.removesuffix(f"/{owner}").rpartition("/")[2]
            fields.setdefault(kind if kind in MOMENTS else "", {})[owner] = leaf
    return fields


def count_of(moment: str, kind: str, leaves: Iterable[str]) -> str:
    """The leaf with the number of a moment's updates, which is beside it, or ""."""
    state = moment.partition(f"/{kind}/")[0]
    return next((n for n in (f"{state}/count", f"{state}/step") if n in leaves), "")


def in_units(table: MappingTable, power: int) -> MappingTable:
    """The table for moments: where a tensor is a multiple of its parameter, they are too."""
    rules = [replace(x, scale=x.scale**-power) if power else x for x in table.rules]
    return replace(table, rules=rules, variables=())
