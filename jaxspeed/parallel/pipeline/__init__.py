"""Pipeline parallelism: each stage of the mesh's `pipe` axis holds some of the model's blocks.

A `schedule` says which chunk of which micro-batch each stage computes in each tick; its `phases`
are the runs of ticks that one compiled loop body serves; `gantt` draws it as text, and a
`PipelineReport` tells what it costs.
"""

from jaxspeed.parallel.pipeline.gantt import gantt
from jaxspeed.parallel.pipeline.phases import Phase, Repeat, phases
from jaxspeed.parallel.pipeline.report import PipelineReport
from jaxspeed.parallel.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    Work,
    forward_only,
    schedule,
)

__all__ = [
    "SCHEDULES",
    "Phase",
    "PipelineReport",
    "Repeat",
    "Schedule",
    "Work",
    "forward_only",
    "gantt",
    "phases",
    "schedule",
]
