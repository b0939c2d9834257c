"""`Config`: the settings of one run, loaded, checked and frozen.

The modules that load a config are imported when one is loaded, not with the class.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import PrivateAttr

from jaxspeed.axes import PIPE, data_ranks
from jaxspeed.config.remat import Recompute, recompute_of
from jaxspeed.config.run_sections import Quantize
from jaxspeed.config.schema import Settings

if TYPE_CHECKING:
    from jaxspeed.config.auto import AutoValues, HiddenSize
    from jaxspeed.config.batch import Batch
    from jaxspeed.config.layer_specs import TensorLayerSpec
    from jaxspeed.config.load import Examined


class Config(Settings):
    """Validated settings of one run: DeepSpeed's keys and jaxspeed's sections.

    Every constructor validates: `Config(train_batch_size=8)`, `Config.load("config.json")`,
    `Config.load(config, ["zero_optimization.stage=3"])`. All problems come in one ConfigError.
    `model_fields_set` distinguishes given values from defaults.
    """

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _quantize: Quantize | None = PrivateAttr(default=None)

    def __init__(self, **keys: Any) -> None:
        checked = Config.load(keys)
        for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_private__"):
            object.__setattr__(self, name, getattr(checked, name))
        object.__setattr__(self, "__pydantic_extra__", None)

    @classmethod
    def load(
        cls,
        source: "Mapping | str | Path | Config",
        overrides: Iterable[str] = (),
        *,
        auto: "AutoValues" = None,
        strict: bool = False,
        hidden_size: "HiddenSize | None" = None,
        has_optimizer: bool = False,
    ) -> Self:
        """Load a dict, a .json, .yaml or .yml file, or a Config, with `a.b=c` overrides.

        Args:
          source: the config or its path.
          overrides: each `section.key=value`, with the value as in YAML.
          auto: values for keys that are "auto": `{"preset": "hf", "train_batch_size": 8}`, or
            `["hf", "train_batch_size=8"]`. The preset "hf" has Hugging Face's defaults, and its
            Trainer's AdamW and linear schedule where the config has none.
          strict: whether unknown keys are errors also where DeepSpeed ignores them.
          hidden_size: finds that of the model, for "auto" keys that depend on it.
          has_optimizer: whether the caller has an optimizer, to which the preset adds none.

        Raises:
          ConfigError: lists every problem of the config, each with its key's path.
        """
        from jaxspeed.config.auto import BY_HIDDEN_SIZE
        from jaxspeed.config.load import examine
        from jaxspeed.config.problems import config_error

        overrides = list(overrides) if not isinstance(overrides, str) else [overrides]
        if isinstance(source, cls) and not overrides and auto is None and not strict:
            return source
        plain = source.given if isinstance(source, Config) else source
        options: dict[str, Any] = {"auto": auto, "strict": strict, "hidden_size": hidden_size}
        examined = examine(plain, overrides, has_optimizer=has_optimizer, **options)
        if examined.problems:
            raise config_error(examined.problems, examined.origin, examined.advice)
        # A value by the model's size is kept: the config may be loaded again without the model.
        by_size = hidden_size is not None and BY_HIDDEN_SIZE in examined.filled
        return cls._of(examined, filled=auto is not None or by_size)

    @classmethod
    def _of(cls, examined: "Examined", filled: bool) -> Self:
        from jaxspeed.config.load import with_open_end

        settings = examined.settings
        values = {name: getattr(settings, name) for name in type(settings).model_fields}
        section = settings.model
        if section is not None and not section.named:  # of a model that is passed
            values["model"] = None
        config = cls.model_construct(_fields_set=set(settings.model_fields_set), **values)
        config._quantize = section.quantize if section else None
        config._given = with_open_end(examined) if filled else examined.given
        notes = {
            path: f"Ignored, as by DeepSpeed. {where}".rstrip()
            for path, where in examined.ignored.items()
        }
        notes |= examined.notes
        config._notes = tuple(f"{path}: {note}" for path, note in notes.items())
        return config

    @classmethod
    def model_validate(cls, obj: Any, **_: Any) -> Self:
        """Load, so that no constructor skips validation."""
        return cls.load(obj)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy; with `update` of sections or keys by name, validate again."""
        if not update:
            return super().model_copy(deep=deep)
        return type(self).load({**self.given, **update})

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of a config file, for completion and validation in editors."""
        from jaxspeed.config.json_schema import json_schema

        return json_schema()

    @property
    def given(self) -> dict[str, Any]:
        """The config as the user wrote it, with overrides, and with values for "auto" if given."""
        return copy.deepcopy(self._given)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the file was read: ignored keys, values read otherwise."""
        return self._notes

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Dtype in which layers compute."""
        if self.fp16.enabled:
            return "fp16"
        if self.bf16.enabled:
            return "bf16"
        return (self.autocasts and self.torch_autocast.dtype) or "fp32"

    @property
    def autocasts(self) -> bool:
        """Whether operations are cast one by one; with bf16 all compute in it anyway."""
        return self.torch_autocast.enabled and not self.bf16.enabled

    @property
    def layer_specs(self) -> "tuple[TensorLayerSpec, ...]":
        """Tensor sharding of weights; the first spec that covers a weight applies."""
        from jaxspeed.config.layer_specs import layer_specs_from_keys

        return layer_specs_from_keys(self)[0]

    @property
    def tensor_overlap(self) -> Literal["auto", "none", "ring", "ring_both_ways"]:
        """Overlap of tensor-parallel collectives with matmuls, from all keys for it."""
        overlap = self.parallel.tensor_overlap
        steps = self.parallel.sequence_parallel_activations
        ring = overlap == "auto" and steps and self.tensor_parallel.tp_overlap_comm
        return "ring" if ring else overlap

    @property
    def reduction_dtype(self) -> Literal["fp32", "bf16", "fp16"] | None:
        """The dtype in which gradients are reduced, from all keys for it; None: as computed."""
        key = "seq_parallel_communication_data_type"
        of_sequences = self.mesh.seq != 1 and key in self.model_fields_set
        return getattr(self, key if of_sequences else "communication_data_type")

    @property
    def quantize(self) -> Quantize | None:
        """How frozen weights are stored, from all keys for it."""
        if self._quantize is None and self.zero_optimization.zero_quantized_nontrainable_weights:
            return Quantize(weights="int8")
        return self._quantize

    @property
    def quantizes_what_is_frozen(self) -> bool:
        """Whether DeepSpeed's key alone asks for it: a model in which nothing is frozen is fine."""
        return self._quantize is None

    @property
    def recompute(self) -> Recompute:
        """Residual policy of units, from all keys for it."""
        keys = self.activation_checkpointing
        ratio = keys.cpu_checkpointing_ratio if keys.cpu_checkpointing else None
        how = keys.number_checkpoints, keys.partition_activations, ratio
        return recompute_of(self.parallel.remat, *how)

    @property
    def pipeline_recompute(self) -> Literal["stage", "layers", "save"]:
        """What the backward pass of a pipeline stage recomputes, from all keys for it."""
        return self.parallel.pipeline_recompute

    def batch_on(self, sizes: Mapping[str, int]) -> "Batch":
        """Solve for the batch triple on a mesh with these sizes of all axes."""
        return self.batch(data_ranks(sizes), sizes[PIPE])

    def batch(self, data_parallel_size: int, pipe: int | None = None) -> "Batch":
        """Solve for the batch triple with so many data ranks and pipeline stages.

        Args:
          data_parallel_size: number of shards of the samples, over all axes that shard them.
          pipe: number of stages; needed only if the config does not set it.

        Raises:
          ConfigError: states the equation and the nearest values for which it holds.
        """
        from jaxspeed.config.batch import batch_keys, solve_batch
        from jaxspeed.config.elastic import solve_elastic
        from jaxspeed.config.equivalent_keys import stages_of
        from jaxspeed.config.problems import Problem, config_error

        count = self.mesh.pipe if pipe is None else pipe
        solved: Batch | Problem
        if count == -1:
            works = "The batch depends on the number of stages: set it, or pass it as `pipe`."
            solved = Problem("mesh.pipe", "-1", works)
        elif self.elasticity.enabled:
            solved = solve_elastic(self.elasticity, data_parallel_size, stages_of(self, count))
        else:
            solved = solve_batch(batch_keys(self, data_parallel_size, stages_of(self, count)))
        if isinstance(solved, Problem):
            raise config_error([solved], "the config")
        return solved


def load_config(
    source: "Mapping | str | Path | Config", overrides: Iterable[str] = (), **options: Any
) -> Config:
    """Call `Config.load`."""
    return Config.load(source, overrides, **options)
