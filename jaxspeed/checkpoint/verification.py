"""Checksum verification of checkpoints, shared over processes; the newest valid checkpoint."""

import logging

import jax

from jaxspeed.checkpoint.catalog import checkpoints
from jaxspeed.checkpoint.manifest import files_of_process, problems_of, read_manifest
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore
from jaxspeed.errors import CheckpointError

log = logging.getLogger("jaxspeed")


def newest_valid(store: LocalStore | ObjectStore, processes: Processes) -> str:
    """The tag of the newest valid checkpoint, with a warning for each damaged one.

    Raises:
      CheckpointError: there is none.
    """
    tags: list[str] = processes.first("listing", lambda: written_tags(store))
    damaged = []
    for tag in reversed(tags):
        problems = problems_with(store, processes, tag)
        if not problems:
            return tag
        damaged.append(tag)
        log.warning(
            "checkpoint %s is damaged and is skipped: %s",
            store.root / tag,
            "; ".join(problems[:3]),
        )
    if damaged:
        raise CheckpointError(
            f"{store.root}: no checkpoint is valid; damaged: {', '.join(damaged)}"
        )
    raise CheckpointError(f"{store.root}: no checkpoint")


def check_valid(store: LocalStore | ObjectStore, processes: Processes, tag: str) -> None:
    """Raise CheckpointError if the checkpoint is damaged."""
    if problems := problems_with(store, processes, tag):
        raise CheckpointError(f"{store.root / tag} is damaged: {'; '.join(problems[:3])}")


def problems_with(store: LocalStore | ObjectStore, processes: Processes, tag: str) -> list[str]:
    """Problems of a checkpoint, equal on all processes."""

    def check() -> list[str]:
        folder = store.root / tag
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            return [str(error)]
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        mine = files_of_process(sizes, jax.process_index(), jax.process_count())
        return problems_of(folder, manifest, mine)

    parts: list[list[str]] = processes.all("checking", check)
    return [problem for part in parts for problem in part]


def written_tags(store: LocalStore | ObjectStore) -> list[str]:
    """The tags of all completed saves, oldest first.

    Those with an unreadable header come last: they are damaged, and are reported.
    """
    committed = set(store.tags())
    infos = [info for info in checkpoints(store) if info.tag in committed]
    return [info.tag for info in sorted(infos, key=lambda info: not info.leaves)]
