"""All config keys with verdict and sentence, by path."""

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
    """Find the entry of a key, or of the nearest free-form section around it.

    List items have their list's entry: `optimizer.groups.0.frozen` is `optimizer.groups.frozen`.
    """
    parts = [part for part in path.split(".") if not part.isdigit()]
    while parts:
        if entry := VOCABULARY.get(".".join(parts)):
            return entry
        parts.pop()
    return None
