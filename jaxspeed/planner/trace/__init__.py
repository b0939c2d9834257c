"""A step as memory and time read it: traced, partitioned, with each operation's buffers and cost.

The traced step (`traced_step`) becomes a list of operations (`trace_ir`) and is partitioned as XLA
would (`partitioning`), in the device's layout (`tiles`, `bf16_demotion`). Of each value it is known
whether it has a buffer (`materialization`) and what it is (`classify`), of each operation what it
costs (`op_cost`).
"""

from jaxspeed.planner.trace.traced_step import Step, TracedPhase, read_step

__all__ = ["Step", "TracedPhase", "read_step"]
