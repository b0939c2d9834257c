"""Offload to host memory: transfers, the streamed update of offloaded state."""

from jaxspeed.offload.per_leaf_update import LeafProgram, Separated, Shared, Slot, separate
from jaxspeed.offload.pinned_memory import GPU_LIMIT, pinned_limit
from jaxspeed.offload.streaming import (
    StreamedArray,
    StreamPlan,
    choose_stream_plan,
    mean_in_host,
    stream,
    total,
    zeros_in_host,
)
from jaxspeed.offload.update_device import ON_DEVICE, ON_HOST, UpdateDevice

__all__ = [
    "GPU_LIMIT",
    "ON_DEVICE",
    "ON_HOST",
    "LeafProgram",
    "Separated",
    "Shared",
    "Slot",
    "StreamPlan",
    "StreamedArray",
    "UpdateDevice",
    "choose_stream_plan",
    "mean_in_host",
    "pinned_limit",
    "separate",
    "stream",
    "total",
    "zeros_in_host",
]
