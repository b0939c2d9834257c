"""Sections that report on a run: monitors, profilers, the communication log."""

from typing import Annotated

from pydantic import Field, Strict

from jaxspeed.config.types import Flag, Int, Natural, NonNegative, Section, Text


class FileMonitor(Section):
    """TensorBoard or CSV files under `output_path`/`job_name`."""

    enabled: Flag = False
    output_path: Annotated[str, Strict()] = ""
    job_name: Text = "DeepSpeedJobName"


class Wandb(Section):
    """Weights & Biases."""

    enabled: Flag = False
    group: Text | None = None
    team: Text | None = None
    project: Text = "deepspeed"


class FlopsProfiler(Section):
    """The floating-point operations of a step."""

    enabled: Flag = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Natural = 1
    module_depth: Int = -1
    top_modules: Natural = 1
    detailed: Flag = True
    output_file: Text | None = None


class CommsLogger(Section):
    """The collectives of a step."""

    enabled: Flag = False
    verbose: Flag = False
    prof_all: Flag = True
    debug: Flag = False
    prof_ops: list[Text] = Field(default_factory=list)
