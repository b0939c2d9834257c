"""What a device can do at best, by what JAX calls it: compute, and reach its host's memory.

The figures are those of the table of hardware, each with its source. The peak is of dense products
of bfloat16 with fp32 sums; a run in fp32 is held against it too, because its products run on the
same units.
"""

from jaxspeed.hardware.chip import chip_of_kind

UNKNOWN_LINK = 32e9  # bytes a second, of PCIe 4 by 16


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations a second at best; None where none is known, as of a CPU."""
    chip = chip_of_kind(device_kind)
    return chip.flops["bf16"] if chip else None


def host_link(device_kind: str) -> float:
    """Bytes a second between a device and its host's memory, in one direction, at best."""
    chip = chip_of_kind(device_kind)
    return chip.host_link if chip else UNKNOWN_LINK
