"""Listing, inspection, verification and retention of the checkpoints in a folder."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from jaxspeed.checkpoint import manifest as manifests
from jaxspeed.checkpoint.header import NAME, LeafRecord, read_header
from jaxspeed.checkpoint.manifest import Manifest, problems_of, read_manifest, sizes_of, unlisted
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore, as_checkpoint_error, store_at
from jaxspeed.errors import CheckpointError
from jaxspeed.user_models.pretrained_model import Origin

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint, from its header and file sizes; `verify` compares checksums."""

    tag: str
    step: int | None
    bytes: int
    time: float
    ok: bool  # all files exist with the right sizes
    problem: str = ""
    mesh: dict[str, int] = field(default_factory=dict)
    stage: int | None = None
    processes: int | None = None
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    leaves: dict[str, LeafRecord] = field(default_factory=dict)
    base: Origin | None = None
    excluded: dict[str, LeafRecord] = field(default_factory=dict)


def default_tag(step: int) -> str:
    return f"step-{step:08d}"


def step_of(tag: str) -> int | None:
    """The step of a default tag, else None."""
    match = _STEP.fullmatch(tag)
    return int(match[1]) if match else None


def checkpoints(store: LocalStore | ObjectStore) -> list[CheckpointInfo]:
    """All checkpoints, oldest first, after those of interrupted saves."""
    partial = [
        CheckpointInfo(tag, step_of(tag), 0, 0, False, "its save was interrupted")
        for tag in store.unfinished()
    ]
    complete = [
        info_of(store.root / tag) for tag in store.tags() if _is_checkpoint(store.root / tag)
    ]
    return partial + sorted(complete, key=lambda info: (info.time, info.step or 0))


def info_of(folder: epath.Path) -> CheckpointInfo:
    """The checkpoint in `folder`, without reading its arrays."""
    tag, step = folder.name, step_of(folder.name)
    try:
        manifest = read_manifest(folder)
        header = read_header(folder, manifest.format)
    except CheckpointError as error:
        return CheckpointInfo(tag, step, _bytes_in(folder), _mtime(folder), False, str(error))
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
        base=header.base,
        excluded=header.excluded,
    )


def verify(folder: Any, tag: str | None = None) -> list[str]:
    """Problems of a checkpoint, or of all in a folder, from the checksums; [] if valid.

    Raises:
      CheckpointError: the folder or tag does not exist.
    """
    store = store_at(folder)
    with as_checkpoint_error(store.root, "verifying"):
        infos = {info.tag for info in checkpoints(store)} - set(store.unfinished())
        tags = sorted(infos) if tag is None else [existing(store, tag)]
        if not tags:
            raise CheckpointError(f"{store.root}: no checkpoint")
        return [f"{tag}: {problem}" for tag in tags for problem in _problems(store.root / tag)]


def show(folder: Any, tag: str | None = None) -> CheckpointInfo:
    """One checkpoint with array shapes, mesh, device and versions; the newest by default."""
    store = store_at(folder)
    with as_checkpoint_error(store.root, "reading"):
        if tag is None:
            complete = [info.tag for info in checkpoints(store) if info.ok]
            if not complete:
                raise CheckpointError(f"{store.root}: no complete checkpoint")
            tag = complete[-1]
        return info_of(store.root / existing(store, tag))


def existing(store: LocalStore | ObjectStore, tag: str) -> str:
    """The tag, if such a checkpoint exists."""
    tags = store.tags()
    if tag in tags:
        return tag
    tags = [info.tag for info in checkpoints(store) if info.tag in tags]
    names = ", ".join(tags[-5:]) or "none"
    raise CheckpointError(f"{store.root}: no checkpoint {tag!r}; existing checkpoints: {names}")


def _problems(folder: epath.Path) -> list[str]:
    try:
        manifest = read_manifest(folder)
        problems = [
            *problems_of(folder, manifest.files),
            *unlisted(folder, manifest.files, NAME),
        ]
        if not problems:
            read_header(folder, manifest.format)
        return problems
    except CheckpointError as error:
        return [str(error)]


def _wrong_sizes(folder: epath.Path, manifest: Manifest) -> list[str]:
    actual, problems = sizes_of(folder), []
    for name, (size, _) in manifest.files.items():
        if name not in actual:
            problems.append(f"{name} is missing")
        elif actual[name] != size:
            problems.append(f"{name} has {actual[name]:,} bytes, not {size:,}")
    return problems


def _is_checkpoint(folder: epath.Path) -> bool:
    return any((folder / name).exists() for name in (manifests.NAME, NAME, "arrays"))


def _mtime(folder: epath.Path) -> float:
    """Modification time; that of etils has a resolution of one second."""
    local = manifests.is_local(folder)
    return os.stat(folder).st_mtime if local else float(folder.stat().mtime or 0)


def _bytes_in(folder: epath.Path) -> int:
    return sum(sizes_of(folder).values())


# -- retention ------------------------------------------------------------------------------------


def tags_to_remove(
    infos: Sequence[CheckpointInfo], keep: int | None, keep_every: int | None
) -> list[str]:
    """The tags to remove from `infos`, which are oldest first.

    Retained are the newest `keep` complete checkpoints and all saved after the oldest of them,
    those at multiples of `keep_every` steps, and those with a tag not of the default form.
    """
    if keep is None:
        return []
    numbered = [info for info in infos if step_of(info.tag) is not None]
    complete = [i for i, info in enumerate(numbered) if info.ok]
    if len(complete) <= keep:
        return []
    old = [info.tag for info in numbered[: complete[-keep]]]
    return [tag for tag in old if not (keep_every and (step_of(tag) or 0) % keep_every == 0)]
