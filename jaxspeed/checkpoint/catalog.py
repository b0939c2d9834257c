"""Which checkpoints a folder holds, and whether they are sound."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from jaxspeed.checkpoint import manifest as seal
from jaxspeed.checkpoint.header import NAME, LeafRecord, read_header
from jaxspeed.checkpoint.manifest import Manifest, files_of, problems_of, read_manifest
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore, store_at
from jaxspeed.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, from its header and the sizes of its files; checksums are `verify`'s."""

    tag: str
    step: int | None
    bytes: int
    time: float
    ok: bool  # all files are there in their sizes; else it is partial
    problem: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    stage: int | None = None
    processes: int | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    leaves: dict[str, LeafRecord] = field(default_factory=dict)


def default_tag(step: int) -> str:
    return f"step-{step:08d}"


def step_of(tag: str) -> int | None:
    """The step in a tag of the default form."""
    found = _STEP.fullmatch(tag)
    return int(found[1]) if found else None


def checkpoints(store: LocalStore | ObjectStore) -> list[CheckpointInfo]:
    """All that looks like one, oldest first; saves that were cut short come first."""
    partial = [
        CheckpointInfo(tag, step_of(tag), 0, 0, False, "its save was cut short")
        for tag in store.unfinished()
    ]
    found = [info_of(store.root / tag) for tag in store.tags() if _is_checkpoint(store.root / tag)]
    return partial + sorted(found, key=lambda info: (info.time, info.step or 0))


def info_of(folder: epath.Path) -> CheckpointInfo:
    """What can be said without reading the arrays."""
    tag, step = folder.name, step_of(folder.name)
    try:
        manifest = read_manifest(folder)
        header = read_header(folder, manifest)
    except (CheckpointError, ValueError, KeyError, TypeError, OSError) as error:
        what = str(error) if isinstance(error, CheckpointError) else f"{NAME} is damaged"
        return CheckpointInfo(tag, step, _bytes_in(folder), _changed(folder), False, what)
    problem = next(iter(_wrong_sizes(folder, manifest)), "")
    return CheckpointInfo(
        tag,
        header.step,
        manifest.nbytes,
        header.time,
        not problem,
        problem,
        **{
            name: getattr(header, name)
            for name in ("mesh", "stage", "processes", "device", "versions", "client_state")
        },
        files=tuple(header.files),
        leaves=header.leaves,
    )


def verify(folder: Any, tag: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, or with all of a folder, every byte read; [] when sound.

    Raises:
      CheckpointError: there is none.
    """
    store = store_at(folder)
    infos = {info.tag for info in checkpoints(store)} - set(store.unfinished())
    tags = sorted(infos) if tag is None else [existing(store, tag)]
    if not tags:
        raise CheckpointError(f"{store.root}: holds no checkpoint")
    return [f"{tag}: {problem}" for tag in tags for problem in _problems(store.root / tag)]


def show(folder: Any, tag: str | None = None) -> CheckpointInfo:
    """One checkpoint with its arrays' shapes and what it was written on; the newest by default."""
    store = store_at(folder)
    if tag is None:
        whole = [info.tag for info in checkpoints(store) if info.ok]
        if not whole:
            raise CheckpointError(f"{store.root}: holds no whole checkpoint")
        tag = whole[-1]
    return info_of(store.root / existing(store, tag))


def existing(store: LocalStore | ObjectStore, tag: str) -> str:
    """The tag, where it is there."""
    tags = [info.tag for info in checkpoints(store) if info.tag in store.tags()]
    if tag in store.tags():
        return tag
    there = ", ".join(tags[-5:]) or "no checkpoint"
    raise CheckpointError(f"{store.root}: has no checkpoint {tag!r}; it holds {there}")


def _problems(folder: epath.Path) -> list[str]:
    try:
        manifest = read_manifest(folder)
        problems = problems_of(folder, manifest, manifest.files)
        if not problems:
            read_header(folder, manifest)
        return problems
    except CheckpointError as error:
        return [str(error)]


def _wrong_sizes(folder: epath.Path, manifest: Manifest) -> list[str]:
    problems = []
    for name, (size, _) in manifest.files.items():
        try:
            found = (folder / name).stat().length
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if found != size:
            problems.append(f"{name} has {found:,} bytes, not {size:,}")
    return problems


def _is_checkpoint(folder: epath.Path) -> bool:
    return any((folder / name).exists() for name in (seal.NAME, NAME, "arrays"))


def _changed(folder: epath.Path) -> float:
    """When, as the disk says; Etils knows whole seconds alone."""
    return os.stat(folder).st_mtime if seal.is_local(folder) else float(folder.stat().mtime or 0)


def _bytes_in(folder: epath.Path) -> int:
    return sum((folder / name).stat().length for name in files_of(folder))


# -- which checkpoints are kept -------------------------------------------------------------------


def superfluous(
    infos: Sequence[CheckpointInfo], keep: int | None, keep_every: int | None
) -> list[str]:
    """The tags to remove, from all that are there, oldest first.

    Kept are the newest `keep` that are whole, those at multiples of `keep_every` steps, what was
    saved after the oldest of the newest, and whatever has a tag of its own.
    """
    if keep is None:
        return []
    numbered = [info for info in infos if step_of(info.tag) is not None]
    whole = [i for i, info in enumerate(numbered) if info.ok]
    if len(whole) <= keep:
        return []
    old = [info.tag for info in numbered[: whole[-keep]]]
    return [tag for tag in old if not (keep_every and (step_of(tag) or 0) % keep_every == 0)]
