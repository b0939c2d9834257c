"""Which checkpoint may be trusted: every byte is read, each process a part of them."""

import logging

import jax

from jaxspeed.checkpoint.catalog import checkpoints
from jaxspeed.checkpoint.manifest import dealt, problems_of, read_manifest
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.checkpoint.stores import LocalStore, ObjectStore
from jaxspeed.errors import CheckpointError

log = logging.getLogger("jaxspeed")


def newest_sound(store: LocalStore | ObjectStore, processes: Processes) -> str:
    """The tag of the newest checkpoint without a wrong byte; damaged ones are named in warnings.

    Raises:
      CheckpointError: there is none.
    """
    tags: list[str] = processes.first("listing", lambda: written(store))
    damaged = []
    for tag in reversed(tags):
        problems = problems_with(store, processes, tag)
        if not problems:
            return tag
        damaged.append(tag)
        log.warning(
            "checkpoint %s is damaged and is passed over: %s",
            store.root / tag,
            "; ".join(problems[:3]),
        )
    if damaged:
        raise CheckpointError(
            f"{store.root}: no checkpoint is sound; damaged are {', '.join(damaged)}"
        )
    raise CheckpointError(f"{store.root}: holds no checkpoint")


def check_sound(store: LocalStore | ObjectStore, processes: Processes, tag: str) -> None:
    """CheckpointError where a byte of it is wrong."""
    if problems := problems_with(store, processes, tag):
        raise CheckpointError(f"{store.root / tag}: is damaged: {'; '.join(problems[:3])}")


def problems_with(store: LocalStore | ObjectStore, processes: Processes, tag: str) -> list[str]:
    """What is wrong with a checkpoint, equal on all processes."""

    def look() -> list[str]:
        folder = store.root / tag
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            return [str(error)]
        sizes = {name: size for name, (size, _) in manifest.files.items()}
        mine = dealt(sizes, jax.process_index(), jax.process_count())
        return problems_of(folder, manifest, mine)

    parts: list[list[str]] = processes.together("checking", look)
    return [problem for part in parts for problem in part]


def written(store: LocalStore | ObjectStore) -> list[str]:
    """All tags but those of saves that were cut short, oldest first.

    Those that do not say when they were written come last: they are damaged, and are to be named.
    """
    there = set(store.tags())
    infos = [info for info in checkpoints(store) if info.tag in there]
    return [info.tag for info in sorted(infos, key=lambda info: not info.leaves)]
