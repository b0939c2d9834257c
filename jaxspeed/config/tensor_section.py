"""The `tensor_parallel` section: DeepSpeed's AutoTP, with layer specs and presets."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import Flag, Int, Natural, Section, Text, lower

LayerType = Annotated[Literal["column", "row", "vocabulary", "replicated"], BeforeValidator(lower)]
PartitionType = Annotated[Literal["column", "row", "skip"], BeforeValidator(lower)]


class ShardedLayer(Section):
    """Type of a layer's sharding, with the sharded dim where the shape does not determine it."""

    type: LayerType
    dim: Int | None = None


class TorchSpec(Section):
    """DeepSpeed's TPLayerSpec: regexes over torch's parameter names, with their sharding."""

    patterns: Annotated[list[Text], Field(min_length=1)]
    partition_type: PartitionType = "column"
    shape: Any = None
    partition_dim: Natural | None = None
    model_types: list[Text] | None = None
    gather_output: Flag = False


def _mapping_or_list(value: Any) -> Any:
    if isinstance(value, dict | list):
        return value
    needs = (
        'a mapping from path patterns to "column", "row", "vocabulary" or "replicated", or '
        "DeepSpeed's list of specs"
    )
    raise PydanticCustomError("layer_specs", "{needs}", {"needs": needs})


# Its content is validated by `layer_specs.py`, which reports each problem with its own path.
LayerSpecsValue = Annotated[
    Any,
    BeforeValidator(
        _mapping_or_list,
        json_schema_input_type=dict[str, LayerType | ShardedLayer] | list[TorchSpec],
    ),
]


class PartitionConfig(Section):
    """Sharding of weights by pattern."""

    layer_specs: LayerSpecsValue = Field(default_factory=list)
    use_default_specs: Flag = True
    strict_mode: Flag = False
    tp_size: Natural = 1
    embedding_partition_dim: Natural = 1
    lm_head_patterns: list[Text] = Field(default_factory=lambda: ["lm_head", "embed_out"])


class TensorParallel(Section):
    """DeepSpeed's AutoTP."""

    autotp_size: Natural = 0
    preset_model: Text | None = None
    partition_config: PartitionConfig | None = None
    tp_overlap_comm: Flag = False
