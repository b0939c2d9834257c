"""The `autotuning` section: what `jaxspeed plan --search` keeps to."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from jaxspeed.config.types import Count, Flag, Natural, Opaque, Section, Text, lower

Metric = Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)]
Tuner = Annotated[Literal["gridsearch", "random", "model_based"], BeforeValidator(lower)]


class Autotuning(Section):
    """DeepSpeed's bounds of what may be tried, and its words for how trials are run."""

    enabled: Flag = False
    fast: Flag = True
    metric: Metric = "throughput"
    metric_path: Text | None = None
    mp_size: Count = 1
    min_train_batch_size: Count = 1
    max_train_batch_size: Count | None = None
    min_train_micro_batch_size_per_gpu: Count = 1
    max_train_micro_batch_size_per_gpu: Count = 1024
    num_tuning_micro_batch_sizes: Count = 3
    tuner_type: Tuner = "gridsearch"
    tuner_early_stopping: Natural = 5
    tuner_num_trials: Count = 50
    results_dir: Text = "autotuning_results"
    exps_dir: Text = "autotuning_exps"
    overwrite: Flag = True
    start_profile_step: Natural = 3
    end_profile_step: Natural = 5
    arg_mappings: Opaque | None = None
    model_info: Opaque | None = None
    model_info_path: Text | None = None

    def said(self, key: str) -> bool:
        """Whether the section counts and has this key: DeepSpeed's defaults are no bounds here."""
        return self.enabled and key in self.model_fields_set
