"""What is known of the weights of linear layers by their names alone.

`model.quantize` and the adapters of `lora` go by it where a loss is not traced, and leave out what
is at a model's ends unless the config names it, as bitsandbytes and PEFT do.
"""

from jaxspeed.placement.rows import Leaf

TABLES = frozenset({"embedding", "table"})  # parameters that are looked up
_HEADS = frozenset({"lm_head", "head", "unembed", "logits", "classifier", "score"})
_DIMS_OF_ENDS = frozenset({"vocab", "block_vocab", "classes", "pos", "patch"})
# Flax's attention: [embed, heads, head_dim], and its output [heads, head_dim, embed].
_SPLIT_HEADS = {"query": 1, "key": 1, "value": 1, "out": 2}


def is_head(leaf: Leaf) -> bool:
    """Whether it is a weight of a model's output, or its module is."""
    return not _HEADS.isdisjoint(leaf.parameter.lower().split("/")[-2:])


def is_at_an_end(leaf: Leaf) -> bool:
    """Whether it encodes a model's input, or is of its output."""
    return is_head(leaf) or not _DIMS_OF_ENDS.isdisjoint(leaf.names)


def matrix_inputs(leaf: Leaf) -> int | None:
    """`Leaf.matrix_inputs`, also of Flax's attention, whose dims have no names."""
    module = leaf.parameter.split("/")[-2:-1]
    if leaf.matrix_inputs is None and len(leaf.shape) - leaf.stacked == 3 and module:
        return None if any(leaf.names[leaf.stacked :]) else _SPLIT_HEADS.get(module[0])
    return leaf.matrix_inputs
