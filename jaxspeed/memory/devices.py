"""What a device can do at best, as its maker quotes it: compute, and reach its host's memory.

The peak is of dense products of bfloat16 with fp32 sums.

Sources: https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e ("peak compute per chip",
of v2 and v3 half of it, because there a device is one of a chip's two cores); NVIDIA's data sheets
of the A100, H100, H200 and of GH200 ("BFLOAT16 Tensor Core", halved: they quote 2:4 sparsity). A
run in fp32 is held against the same peak: its products run on the same units.

The link to host memory, in one direction: of TPUs by https://jax-ml.github.io/scaling-book/tpus
(PCIe, 16 GB/s a chip, 32 of v6e), of GPUs by the same data sheets (PCIe of generation 4 or 5 by 16
lanes; GH200 has NVLink-C2C).
"""

# By `jax.Device.device_kind`.
_TPU = {
    "TPU v2": 23e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
# The first whose words are all in a GPU's name, which says its memory and socket too.
_NVIDIA = (
    ("GH200", 989.5e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations a second at best; None where none is known, as of a CPU."""
    if device_kind in _TPU:
        return _TPU[device_kind]
    words = set(device_kind.replace("-", " ").split())
    return next((peak for name, peak in _NVIDIA if set(name.split()) <= words), None)


UNKNOWN_LINK = 32e9  # bytes a second, of PCIe 4 by 16
_LINKS = (("GH200", 450e9), ("H200", 64e9), ("H100", 64e9), ("A100", 32e9))


def host_link(device_kind: str) -> float:
    """Bytes a second between a device and its host's memory, in one direction, at best."""
    if device_kind.startswith("TPU"):
        return 32e9 if "v6" in device_kind else 16e9
    words = set(device_kind.replace("-", " ").split())
    return next((link for name, link in _LINKS if name in words), UNKNOWN_LINK)
