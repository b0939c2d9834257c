"""Sections `elasticity`, `checkpoint`, `model`, `run`, `data`, `autotuning`, and monitors."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import (
    Count,
    Flag,
    Int,
    Natural,
    NonNegative,
    Number,
    Opaque,
    Positive,
    Section,
    Share,
    Text,
    lower,
)


class Elasticity(Section):
    """Elastic batch: one global batch for many device counts."""

    enabled: Flag = False
    max_train_batch_size: Count = 2000
    micro_batch_sizes: list[Count] = Field(default_factory=lambda: [2, 4, 6], min_length=1)
    min_gpus: Count = 1
    max_gpus: Count = 10_000
    prefer_larger_batch: Flag = True
    ignore_non_elastic_batch_info: Flag = False
    min_time: Natural = 0
    version: Number = 0.2
    model_parallel_size: Count = 1
    num_gpus_per_node: Count = 1


def _capital(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


class Checkpoint(Section):
    """DeepSpeed's options of checkpoints."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital)] = "Warn"
    load_universal: Flag = False
    use_node_local_storage: Flag = False
    parallel_write: Opaque | None = None


def _import_path(value: str) -> str:
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        needs = 'an import path of the form "package.module:name"'
        raise PydanticCustomError("import_path", "{needs}", {"needs": needs})
    return value


class ModelSection(Section):
    """Model to build: a family's name, or the import path of a factory."""

    family: Text | None = None
    factory: Annotated[Text, AfterValidator(_import_path)] | None = None
    preset: Text | None = None
    config: Opaque = Field(default_factory=dict)


def _flag_or_folder(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    needs = "true, false or the path of a folder"
    raise PydanticCustomError("flag_or_folder", "{needs}", {"needs": needs})


def _devices(value: str) -> str:
    platform, colon, count = value.partition(":")
    if platform not in ("cpu", "gpu", "cuda", "tpu") or (
        colon and (platform != "cpu" or not count.isdecimal() or int(count) < 1)
    ):
        needs = "cpu, gpu or tpu, or simulated devices such as cpu:8"
        raise PydanticCustomError("devices", "{needs}", {"needs": needs})
    return value


Devices = Annotated[Text, AfterValidator(_devices)]
CacheFolder = Annotated[bool | str, BeforeValidator(_flag_or_folder)]


class RunSection(Section):
    """One training run."""

    devices: Devices | None = None
    steps: Count | None = None
    seed: Natural = 0
    output: Text | None = None
    checkpoints: Text | None = None
    init_from: Text | None = None
    compilation_cache: CacheFolder = True
    executable: Text | None = None
    eval_every: Count | None = None
    eval_batches: Count | None = None
    checkpoint_every: Count | None = None
    keep: Count = 3
    keep_every: Count | None = None
    max_skipped: Count = 30
    profile_step: Count | None = None
    profile_steps: Count = 3
    sample_tokens: Natural = 200
    sample_prompt: Text = "def "
    sample_temperature: NonNegative = 0.8


# -- sections that report on a run: monitors, profilers, the communication log --------------------


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
    """FLOPs of a step."""

    enabled: Flag = False
    recompute_fwd_factor: NonNegative = 0.0
    profile_step: Natural = 1
    module_depth: Int = -1
    top_modules: Natural = 1
    detailed: Flag = True
    output_file: Text | None = None


class CommsLogger(Section):
    """Collectives of a step."""

    enabled: Flag = False
    verbose: Flag = False
    prof_all: Flag = True
    debug: Flag = False
    prof_ops: list[Text] = Field(default_factory=list)


# -- the `autotuning` section: bounds of `jaxspeed plan --search` ---------------------------------

Metric = Annotated[Literal["throughput", "latency", "flops"], BeforeValidator(lower)]
Tuner = Annotated[Literal["gridsearch", "random", "model_based"], BeforeValidator(lower)]


class Autotuning(Section):
    """DeepSpeed's bounds of a search, and its options of trial runs."""

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

    def has(self, key: str) -> bool:
        """Whether the section is enabled and sets the key: its defaults are no bounds."""
        return self.enabled and key in self.model_fields_set


# -- sources of samples ----------------------------------------------------------------------------


class SourceSection(Section):
    """One source of samples."""

    source: Text | None = None
    path: Text | None = None
    paths: list[Text] | None = None
    text_field: Text = "text"
    split: Text = "train"
    samples: Count | None = None


class MixtureSource(SourceSection):
    """One source of a mixture."""

    weight: Positive = 1.0


class Data(SourceSection):
    """Data sources, tokenizer and order of samples."""

    mixture: list[MixtureSource] = Field(default_factory=list)
    tokenizer: Text = "bytes"
    vocab_size: Count | None = None
    seq_len: Count | None = None
    document_masks: Flag = True
    held_out: Share = 0.05
    shuffle: Flag = True
    seed: Natural | None = None
    prefetch: Count = 2
