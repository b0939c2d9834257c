"""What devices there are to train on, and what each can do at best: a table with its sources."""

from jaxspeed.hardware.chip import BUILT_IN, Chip, chip_of_kind, read_chips

__all__ = [
    "BUILT_IN",
    "Chip",
    "chip_of_kind",
    "read_chips",
]
