"""The `tensor_parallel` section: DeepSpeed's AutoTP, with layer specs and presets."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jaxspeed.config.parallelism import NO_TENSOR
from jaxspeed.config.types import Coercing, Flag, Int, Natural, Section, Text, lower, section
from jaxspeed.config.verdicts import approximated, harmless, honoured, refused

LayerType = Annotated[Literal["column", "row", "vocabulary", "replicated"], BeforeValidator(lower)]
PartitionType = Annotated[Literal["column", "row", "skip"], BeforeValidator(lower)]


_PARSER = "An option of DeepSpeed's parser of torch modules."


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

    layer_specs: LayerSpecsValue = honoured(
        [],
        "Tensor sharding of weights: a mapping from path patterns to column, row, vocabulary or "
        "replicated, or DeepSpeed's list. The first that covers a weight applies, and overrides "
        "the model's logical axes.",
        unless=NO_TENSOR,
    )
    use_default_specs: Flag = honoured(
        True, "The preset's specs follow layer_specs; false omits them.", unless=NO_TENSOR
    )
    strict_mode: Flag = refused(
        False, "Not built: the placement table shows the replicated weights; remove it."
    )
    tp_size: Natural = harmless(
        1, "DeepSpeed overwrites it with tensor_parallel.autotp_size, which applies here too."
    )
    embedding_partition_dim: Natural = harmless(
        1, "DeepSpeed does not read it; vocabulary in layer_specs shards an embedding."
    )
    lm_head_patterns: list[Text] = harmless(
        ["lm_head", "embed_out"],
        "Arrays are global: a head needs no special layer. vocabulary in layer_specs shards it.",
    )


class TensorParallelGroup(Coercing):
    """DeepSpeed's `tp`: options of its parser, for inference."""

    tp_size: Natural = harmless(1, "DeepSpeed trains with tensor_parallel.autotp_size.")
    tp_grain_size: Natural = harmless(1, _PARSER)
    mpu: Any = harmless(None, _PARSER)
    tp_group: Any = harmless(None, _PARSER)


class TensorParallel(Coercing):
    """DeepSpeed's AutoTP."""

    autotp_size: Natural = honoured(0, "The size of mesh.tensor; 0 does not set it.")
    preset_model: Text | None = honoured(
        None,
        "Shards the modules of a family by their usual names: gpt2, llama or vit.",
        when=("tensor_parallel.partition_config.use_default_specs", (True, None)),
        unless=NO_TENSOR,
    )
    partition_config: PartitionConfig | None = None
    tp_overlap_comm: Flag = approximated(
        False,
        'With parallel.sequence_parallel_activations the same as parallel.tensor_overlap "ring"; '
        "otherwise no effect: XLA overlaps what it can.",
        False,
        unless=NO_TENSOR,
    )
    vocab_parallel_lm_head: Flag | None = approximated(
        None,
        "A head whose vocabulary dim is sharded over tensor computes its loss in shards: by "
        "layer_specs (vocabulary), the model's names, or as inferred.",
        unless=NO_TENSOR,
    )
    vocab_parallel_ce_backend: Any = harmless("torch", "XLA compiles the cross-entropy.")
    dtype: Any = harmless(None, "The precision sections set the compute dtype.")
    tp: TensorParallelGroup = section()
    injection_policy_tuple: Any = harmless(None, _PARSER)
    keep_module_on_host: Flag = harmless(False, _PARSER)
    replace_with_kernel_inject: Flag = harmless(False, _PARSER)
