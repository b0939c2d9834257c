"""Offload to host memory: transfers, the streamed update of offloaded state."""

from jaxspeed.offload.pinned_memory import GPU_LIMIT, pinned_limit
from jaxspeed.offload.streaming import StreamedArray, mean_in_host, zeros_in_host
from jaxspeed.offload.update_device import ON_DEVICE, ON_HOST, UpdateDevice

__all__ = [
    "GPU_LIMIT",
    "ON_DEVICE",
    "ON_HOST",
    "StreamedArray",
    "UpdateDevice",
    "mean_in_host",
    "pinned_limit",
    "zeros_in_host",
]
