"""The `tensor_parallel` section: DeepSpeed's AutoTP, and which weights are cut how."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.types import Flag, Int, Natural, Section, Text, lower

Word = Annotated[Literal["column", "row", "vocabulary", "replicated"], BeforeValidator(lower)]
TorchWord = Annotated[Literal["column", "row", "skip"], BeforeValidator(lower)]


class WordAt(Section):
    """A word with the dim that it cuts, where the shape does not tell."""

    type: Word
    dim: Int | None = None


class TorchSpec(Section):
    """DeepSpeed's TPLayerSpec: regexes over torch's parameter names, and how those are cut."""

    patterns: Annotated[list[Text], Field(min_length=1)]
    partition_type: TorchWord = "column"
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


# What is in it is read by `layer_specs.py`, which can tell each problem with its own path.
LayerSpecWords = Annotated[
    Any,
    BeforeValidator(
        _mapping_or_list, json_schema_input_type=dict[str, Word | WordAt] | list[TorchSpec]
    ),
]


class PartitionConfig(Section):
    """Which weights are cut how, by pattern."""

    layer_specs: LayerSpecWords = Field(default_factory=list)
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
