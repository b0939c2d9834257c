"""What the several words for offload come to."""

from collections.abc import Iterator

from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown

_OLD = "zero_optimization.cpu_offload"
_DEVICE = "zero_optimization.offload_optimizer.device"


def with_one_offload(settings: Settings) -> Settings:
    """With `offload_optimizer` by DeepSpeed's old word for it, where that alone is said.

    Where both are and disagree, `offload_problems` tells.
    """
    zero = settings.zero_optimization
    section = zero.offload_optimizer
    if not zero.cpu_offload or "device" in section.model_fields_set:
        return settings
    section = section.model_copy(update={"device": "cpu"})
    zero = zero.model_copy(update={"offload_optimizer": section})
    return settings.model_copy(update={"zero_optimization": zero})


def offload_problems(settings: Settings) -> Iterator[Problem]:
    """Words for offload that do not go together, and what has no such device."""
    zero = settings.zero_optimization
    device = zero.offload_optimizer.device
    if device == "nvme":
        works = 'NVMe is not built: write "cpu", which is the host\'s memory.'
        yield Problem(_DEVICE, '"nvme"', works)
    if zero.cpu_offload is not None and zero.cpu_offload != (device != "none"):
        found = f"{shown(zero.cpu_offload)}, while {_DEVICE} is {shown(device)}"
        works = "Both say the same thing: make them equal, or remove one."
        yield Problem(_OLD, found, works, (_DEVICE,))
