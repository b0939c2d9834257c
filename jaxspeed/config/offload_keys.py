"""What the several words for offload come to."""

from collections.abc import Iterator

from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown

# DeepSpeed's old words for sections of today.
_OLD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def with_one_offload(settings: Settings) -> Settings:
    """With the sections by DeepSpeed's old words for them, where those alone are said.

    Where both are and disagree, `offload_problems` tells.
    """
    zero = settings.zero_optimization
    for old, new in _OLD.items():
        section = getattr(zero, new)
        if getattr(zero, old) and "device" not in section.model_fields_set:
            section = section.model_copy(update={"device": "cpu"})
            zero = zero.model_copy(update={new: section})
    return settings.model_copy(update={"zero_optimization": zero})


def offload_problems(settings: Settings) -> Iterator[Problem]:
    """Words for offload that do not go together, and what has no such device."""
    zero = settings.zero_optimization
    for old, new in _OLD.items():
        said, device = getattr(zero, old), getattr(zero, new).device
        key = f"zero_optimization.{new}.device"
        if device == "nvme":
            works = 'NVMe is not built: write "cpu", which is the host\'s memory.'
            yield Problem(key, '"nvme"', works)
        if said is not None and said != (device != "none"):
            found = f"{shown(said)}, while {key} is {shown(device)}"
            works = "Both say the same thing: make them equal, or remove one."
            yield Problem(f"zero_optimization.{old}", found, works, (key,))
