"""What the several words for a pipeline come to."""

from collections.abc import Iterator

from jaxspeed.config.micro_batch_counts import Stages
from jaxspeed.config.problems import Problem
from jaxspeed.config.schema import Settings
from jaxspeed.config.verdicts import shown

_RECOMPUTE = "parallel.pipeline_recompute"
_INTERVAL = "pipeline.activation_checkpoint_interval"


def stages_of(settings: Settings, count: int) -> Stages:
    """So many stages under the schedule of the config."""
    return Stages(count, settings.parallel.pipeline_schedule == "interleaved")


def with_one_recompute(settings: Settings) -> Settings:
    """With `parallel.pipeline_recompute` by DeepSpeed's word for it, where that alone is said.

    Where both are and disagree, `pipeline_problems` tells.
    """
    parallel = settings.parallel
    said = "pipeline_recompute" in parallel.model_fields_set
    if said or not settings.pipeline.activation_checkpoint_interval:
        return settings
    parallel = parallel.model_copy(update={"pipeline_recompute": "layers"})
    return settings.model_copy(update={"parallel": parallel})


def pipeline_problems(settings: Settings) -> Iterator[Problem]:
    """Words for a pipeline that do not go together."""
    parallel, interval = settings.parallel, settings.pipeline.activation_checkpoint_interval
    if interval and parallel.pipeline_recompute != "layers":
        found = f"{interval}, while {_RECOMPUTE} is {shown(parallel.pipeline_recompute)}"
        works = f'It asks for {_RECOMPUTE} "layers": make them equal, or remove one.'
        yield Problem(_INTERVAL, found, works, (_RECOMPUTE,))
    default = type(parallel).model_fields["pipeline_chunks"].default
    if parallel.pipeline_schedule != "interleaved" and parallel.pipeline_chunks != default:
        schedule = "parallel.pipeline_schedule"
        found = f"{parallel.pipeline_chunks} with {schedule} {shown(parallel.pipeline_schedule)}"
        works = f'Only {schedule} "interleaved" has chunks: write it, or remove the key.'
        yield Problem("parallel.pipeline_chunks", found, works, (schedule,))
