"""Peak FLOP/s and host link bandwidth of a device, by its JAX `device_kind`.

The figures are from the hardware table, which has their sources. The peak is of dense bfloat16
matmuls with fp32 accumulation; MFU of an fp32 run uses it too, because its matmuls run on the same
units.
"""

from jaxspeed.hardware.chip import chip_of_kind

UNKNOWN_LINK = 32e9  # bytes/s of PCIe 4 x16


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s; None if unknown, as for a CPU."""
    chip = chip_of_kind(device_kind)
    return chip.flops["bf16"] if chip else None


def host_link(device_kind: str) -> float:
    """Peak bytes/s between a device and its host's memory, in one direction."""
    chip = chip_of_kind(device_kind)
    return chip.host_link if chip else UNKNOWN_LINK
