"""`weights_only` restore: parameters and statistics of a checkpoint, with a new optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath

from jaxspeed.checkpoint.header import Header
from jaxspeed.checkpoint.leaves import SavedLeaf, frozen_leaves, saved_leaves
from jaxspeed.checkpoint.other_adapters import PREFIX as OTHERS
from jaxspeed.checkpoint.restore import ReadsArrays, as_on_disk, check_adapters, donatable_arrays
from jaxspeed.checkpoint.tensorstore_arrays import read_arrays
from jaxspeed.errors import CheckpointError
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import IS_RANGE
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState

_KINDS = ("params/", "variables/")


def restore_weights(
    program: Program,
    folder: epath.Path,
    header: Header,
    renames: Mapping[str, str],
    ready: Callable[[], None],
    reader: ReadsArrays = read_arrays,
) -> tuple[TrainState, list[str], bool]:
    """An initial state with the checkpoint's weights where path and shape match, and notes.

    The third value is whether frozen parameters are as they were read from the model's folder.

    `ready` is called when all has been checked, before any array is read. Random streams and
    counters are reinitialized with the optimizer. Parameters that the checkpoint does not have
    since they were frozen are those of the model's folder, which is the same.
    """
    leaves = saved_leaves(program)
    if header.excluded:  # of a stack the layers that were trained
        apart = saved_leaves(program, True) | frozen_leaves(program)
        known = header.leaves.keys() | header.excluded.keys()
        for name, leaf in list(leaves.items()):
            if leaf.parts and name.startswith("params/") and known >= leaf.parts.keys():
                leaves |= {part: apart[part] for part in leaves.pop(name).parts}
    wanted = {name: leaf for name, leaf in leaves.items() if _is_weight(name, leaf)}
    there = {
        renamed(name, renames): name
        for name, record in header.leaves.items()
        if name.startswith(_KINDS) and not record.key and _floats(record.dtype)
    }
    if unused := [old for old in renames if not _names_any(old, header.leaves)]:
        raise CheckpointError(
            f"renames: the checkpoint has no parameter {unused[0]!r}; it has "
            + ", ".join(
                sorted(n.split("/", 1)[1] for n in header.leaves if n.startswith(_KINDS))[:8]
            )
        )
    notes, taken = [], {}
    for name, leaf in wanted.items():
        source = there.pop(name, None)
        if source is None and name in header.excluded:
            continue
        if source is None:
            notes.append(f"{_path(name)} is reinitialized: not in the checkpoint")
        elif header.leaves[source].shape != leaf.shape:
            was = list(header.leaves[source].shape)
            here = list(leaf.shape)
            notes.append(f"{_path(name)} is reinitialized: {was} in the checkpoint, {here} here")
        else:
            taken[name] = source
    if ranges := [n for n in there if header.excluded and IS_RANGE.fullmatch(n.split("/")[-1])]:
        raise CheckpointError(
            f"{folder}: of stacked layers it has only {listed(sorted(map(_path, ranges)))}: train "
            " the same layers, or start from an export of it (jaxspeed checkpoint export)"
        )
    notes += [f"{_path(source)} was not restored: not in the model" for source in there.values()]
    others = {n.split("/")[1] for n in header.leaves if n.startswith(OTHERS)}
    notes += [f"the adapter {name} was not restored" for name in sorted(others)]
    if not any(name.startswith("params/") for name in taken):
        raise CheckpointError(
            f"{folder}: no parameter matches this model's; give renames={{old: new}}. "
            + "; ".join(notes[:4])
        )
    check_adapters(program, folder, header)
    leaves = {name: wanted[name] for name in taken}
    on_disk = {
        name: as_on_disk(taken[name], leaf, header.leaves[taken[name]])
        for name, leaf in leaves.items()
    }
    ready()
    read = reader(folder, {taken[name]: on_disk[name] for name in taken})
    named = {name: read.pop(source) for name, source in taken.items() if source in read}
    restored = {part for name in taken for part in (wanted[name].parts or (name,))}
    as_read = restored.isdisjoint(frozen_leaves(program))
    state = _with_weights(program, *donatable_arrays(program, named, leaves, on_disk))
    return state, notes, as_read


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """A name with the longest of its prefixes that `renames` has replaced."""
    kind, _, path = name.partition("/")
    parts = path.split("/")
    for end in range(len(parts), 0, -1):
        head = "/".join(parts[:end])
        if head in renames:
            tail = parts[end:]
            return "/".join(filter(None, [kind, renames[head], *tail]))
    return name


def _with_weights(
    program: Program, saved: Mapping[str, Any], published: Mapping[str, Any]
) -> TrainState:
    fresh = program.init(program.config.run.seed)
    params, master = dict(fresh.params), dict(fresh.master)
    variables = dict(fresh.variables)
    del fresh
    for name, value in saved.items():
        kind, _, path = name.partition("/")
        if kind == "variables":
            variables[path] = value
        else:
            (master if program.table[path].master else params)[path] = value
            if path in master:
                master[path] = program.storage.stored_master(path, master[path])
    params.update(published)
    known = {name.partition("/")[2] for name in saved}
    params, master = program.storage.with_magnitudes(params, master, known)
    # An optimizer's state may be initialized from the parameters (averages, copies): from these.
    rest = program.storage.rest(params, master)
    return TrainState(params=params, master=master, variables=variables, **rest)


def _is_weight(name: str, leaf: SavedLeaf) -> bool:
    return name.startswith(_KINDS) and not leaf.key and _floats(leaf.stored.dtype)


def _floats(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def _names_any(path: str, leaves: Mapping[str, Any]) -> bool:
    paths = (name.split("/", 1)[-1] for name in leaves if name.startswith(_KINDS))
    return any(p == path or p.startswith(f"{path}/") for p in paths)


def _path(name: str) -> str:
    return name.split("/", 1)[1]
