"""Pipeline parallelism: each stage of the mesh's `pipe` axis holds some of the model's blocks.

A `schedule` says which chunk of which micro-batch each stage computes in each tick; its `phases`
are the runs of ticks that one compiled loop body serves. The traced loss is split at its blocks
(`split_loss`), `embed_and_head` runs what stands around them, `stage_program` the blocks;
`training` and `evaluation` follow the table of ticks. A `PipelineReport` says what it costs.
"""

from jaxspeed.pipeline.gantt import gantt
from jaxspeed.pipeline.pipeline import Pipeline
from jaxspeed.pipeline.report import PipelineReport
from jaxspeed.pipeline.schedule import SCHEDULES, Schedule, Work, forward_only, schedule
from jaxspeed.pipeline.tick_loops import Phase, Repeat, phases

__all__ = [
    "SCHEDULES",
    "Phase",
    "Pipeline",
    "PipelineReport",
    "Repeat",
    "Schedule",
    "Work",
    "forward_only",
    "gantt",
    "phases",
    "schedule",
]
