"""Hardware table (chips.yaml): peak FLOP/s, memory and links of each chip; plan targets."""

from jaxspeed.hardware.chip import Chip, chip_for, chip_of_kind, read_chips

__all__ = [
    "Chip",
    "chip_for",
    "chip_of_kind",
    "read_chips",
]
