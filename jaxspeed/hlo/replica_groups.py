"""Replica groups of a collective: parse them, and find the mesh axes that they span.

XLA prints the groups in three formats, all as positions in the program's device assignment, which
is the order of `mesh.devices.flat`:
- a list, `{{0,1},{2,3}}` (`{}` means all devices);
- an iota, `[2,4]<=[4,2]T(1,0)`: arange(8) in shape [4,2], transposed by (1,0), in shape [2,4];
- axes of a separate mesh, `mesh['a'=4,'b'=2] {'a'}`, with sub-axes, `'a':(2)2` being the 2 after a
  2 in 4 = 2 x 2 x 1, and devices possibly permuted by `device_ids`.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{(.*)\}$")
_MESH_AXIS = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^':,\s]+)'?(?::\((\d+)\)(\d+))?")
_DEVICE_IOTA = re.compile(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$")


def replica_groups(text: str, devices: int) -> Groups:
    """Parse the value of `replica_groups`; `{}` is one group of all `devices`."""
    text = text.strip()
    if text.startswith("{"):
        groups = _lists(text)
        return groups or (tuple(range(devices)),)
    if match := _IOTA.match(text):
        dims, reshape, order = (_ints(part or "") for part in match.groups())
        return _rows(_iota(reshape, order).reshape(dims))
    if match := _MESH.match(text):
        return _mesh_groups(*match.groups())
    raise ValueError(f"replica groups {text!r} have an unknown format")


def source_target_pairs(text: str) -> Groups:
    """Parse the value of `source_target_pairs`: `{{0,1},{1,0}}`."""
    return _lists(text)


def axes_of(groups: Sequence[Sequence[int]], mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in mesh order.

    A sub-axis counts as its axis.
    """
    names, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    differs = np.zeros(len(sizes), dtype=bool)
    for group in groups:
        positions = np.stack(np.unravel_index(np.asarray(group, dtype=int), sizes))
        differs |= (positions != positions[:, :1]).any(axis=1)
    return tuple(str(name) for name, yes in zip(names, differs, strict=True) if yes)


def _mesh_groups(axes: str, device_ids: str | None, members: str) -> Groups:
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids is not None:
        match = _DEVICE_IOTA.match(device_ids)
        ids = (
            _iota(_ints(match.group(1)), _ints(match.group(2) or "")).reshape(-1)
            if match
            else np.asarray(_ints(device_ids))
        )
    # Split every axis with a named sub-axis into (before, named, after).
    shape: list[int] = []
    named: list[int] = []  # the dims of `shape` that vary within a group, outermost first
    parts: dict[str, list[tuple[int, int]]] = {}
    order: list[tuple[str, int]] = []
    for name, before, size in _AXIS_REF.findall(members):
        part = (int(before), int(size)) if size else (1, sizes[name])
        parts.setdefault(name, []).append(part)
        order.append((name, part[0]))
    where: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for before, part_size in sorted(parts.get(name, [])):
            shape.append(before // done)
            where[name, before] = len(shape)
            shape.append(part_size)
            done = before * part_size
        shape.append(size // done)
    named = [where[key] for key in order]
    others = [dim for dim in range(len(shape)) if dim not in named]
    group_size = math.prod(shape[dim] for dim in named)
    return _rows(ids.reshape(shape).transpose(others + named).reshape(-1, group_size))


def _iota(reshape: list[int], order: list[int]) -> np.ndarray:
    """arange in shape `reshape`, transposed by `order` if it is not empty."""
    values = np.arange(math.prod(reshape)).reshape(reshape)
    return values.transpose(order) if order else values


def _lists(text: str) -> Groups:
    return tuple(tuple(_ints(part)) for part in re.findall(r"\{([\d,\s]+)\}", text))


def _rows(values: np.ndarray) -> Groups:
    return tuple(tuple(int(v) for v in row) for row in values)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
