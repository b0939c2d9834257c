"""Pipeline parallelism: each stage of the mesh's `pipe` axis holds some of the model's blocks.

A `schedule` assigns each stage a chunk of a micro-batch in each tick; its `phases` are runs of
ticks that share one compiled loop body. The traced loss is split at its blocks (`split_loss`),
`embed_and_head` runs the parts before and after them, `stage_program` the blocks; `training` and
`evaluation` loop over the table of ticks. A `PipelineReport` lists the costs.
"""

from jaxspeed.pipeline.cost_report import PipelineReport
from jaxspeed.pipeline.gantt import gantt
from jaxspeed.pipeline.pipeline import Pipeline
from jaxspeed.pipeline.schedule import schedule

__all__ = [
    "Pipeline",
    "PipelineReport",
    "gantt",
    "schedule",
]
