"""Sections about the run itself: elasticity, checkpoints, and the own words model and run."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import (
    Count,
    Flag,
    Natural,
    NonNegative,
    Number,
    Opaque,
    Section,
    Text,
)


class Elasticity(Section):
    """One global batch that many device counts can train."""

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
    """How checkpoints are written and read."""

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


class Model(Section):
    """The model to build: a family's name, or the import path of a factory."""

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
        needs = "cpu, gpu or tpu, or a number of simulated devices as in cpu:8"
        raise PydanticCustomError("devices", "{needs}", {"needs": needs})
    return value


Devices = Annotated[Text, AfterValidator(_devices)]
CacheFolder = Annotated[bool | str, BeforeValidator(_flag_or_folder)]


class Run(Section):
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
