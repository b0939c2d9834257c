"""Which checkpoints are kept."""

from collections.abc import Sequence

from jaxspeed.checkpoint.catalog import CheckpointInfo, step_of


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
