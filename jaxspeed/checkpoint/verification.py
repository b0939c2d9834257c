"""Checksum verification of checkpoints, shared over processes; the newest valid checkpoint."""

import logging
from itertools import chain
from typing import Any

import jax

from jaxspeed.checkpoint.catalog import checkpoints
from jaxspeed.checkpoint.header import NAME as HEADER
from jaxspeed.checkpoint.manifest import problems_of, read_manifest, shares_of, unlisted
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore
from jaxspeed.errors import CheckpointError

log = logging.getLogger("jaxspeed")
_MOST = 9  # problems that are sent to all processes


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
    """Problems of a checkpoint, equal on all processes; each reads its share of the files."""
    folder, count = store.root / tag, jax.process_count()

    def shares() -> list[Any]:
        try:
            files = read_manifest(folder).files
            if extra := unlisted(folder, files, HEADER):
                return ["; ".join(extra[:_MOST])] * count
        except CheckpointError as error:
            return [str(error)] * count
        sizes = {name: size for name, (size, _) in files.items()}
        return [{name: files[name] for name in share} for share in shares_of(sizes, count)]

    to_read = processes.share("reading the manifest", lambda: None, shares)
    if isinstance(to_read, str):
        return [to_read]
    problems: list[str] = processes.all(
        "checking", lambda: problems_of(folder, to_read), lambda parts: list(chain(*parts))[:_MOST]
    )
    return problems


def written_tags(store: LocalStore | ObjectStore) -> list[str]:
    """The tags of all completed saves, oldest first.

    Those with an unreadable header come last: they are damaged, and are reported.
    """
    committed = set(store.tags())
    infos = [info for info in checkpoints(store) if info.tag in committed]
    return [info.tag for info in sorted(infos, key=lambda info: not info.leaves)]
