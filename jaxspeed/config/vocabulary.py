"""The whole vocabulary: one row a key, one verdict a row, true of today's code."""

from jaxspeed.config.keys_autotuning import AUTOTUNING
from jaxspeed.config.keys_parallelism import PARALLELISM, PIPELINE
from jaxspeed.config.keys_system import OWN, REPORTS, UNBUILT, ZERO
from jaxspeed.config.keys_training import TRAINING
from jaxspeed.config.verdicts import Entry

VOCABULARY: dict[str, Entry] = {
    entry.path: entry
    for entry in (
        *TRAINING,
        *ZERO,
        *PARALLELISM,
        *PIPELINE,
        *REPORTS,
        *AUTOTUNING,
        *UNBUILT,
        *OWN,
    )
}


def entry_for(path: str) -> Entry | None:
    """The row of a key, or of the nearest section of free form around it.

    List items have their list's row: `optimizer.groups.0.frozen` is `optimizer.groups.frozen`.
    """
    parts = [part for part in path.split(".") if not part.isdigit()]
    while parts:
        if entry := VOCABULARY.get(".".join(parts)):
            return entry
        parts.pop()
    return None
