"""The peak of a device: dense products of bfloat16 with fp32 sums, as its maker quotes it.

Sources: https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e ("peak compute per chip",
of v2 and v3 half of it, because there a device is one of a chip's two cores); NVIDIA's data sheets
of the A100, H100, H200 and of GH200 ("BFLOAT16 Tensor Core", halved: they quote 2:4 sparsity). A
run in fp32 is held against the same peak: its products run on the same units.
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
