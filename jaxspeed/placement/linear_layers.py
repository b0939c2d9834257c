"""What is known of the weights of linear layers by their names alone.

`model.quantize` and the adapters of `lora` go by it where a loss is not traced, and leave out what
is at a model's ends unless the config names it, as bitsandbytes and PEFT do.
"""

from jaxspeed.placement.matrices import MatrixView, view_of
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.specs import by_dim

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


def experts_dim(leaf: Leaf, of_parameter: bool = False) -> tuple[int, ...]:
    """The dim that stacks experts: by its name, or the first of three or more.

    In a parameter that has "expert" in its path, or that `target_parameters` names, as in PEFT.
    """
    names = by_dim(leaf.names, len(leaf.shape))
    if "experts" in names:
        return (names.index("experts"),)
    three = len(leaf.shape) - leaf.stacked >= 3
    stacks = three and names[leaf.stacked] is None and (of_parameter or "expert" in leaf.path)
    return (leaf.stacked,) if stacks else ()


def matrix_stack(leaf: Leaf) -> int:
    """Number of leading dims that number its matrices: layers and experts."""
    return leaf.stacked + (experts_dim(leaf) == (leaf.stacked,))


def matrices_of(leaf: Leaf) -> MatrixView | None:
    """The leaf as a stack of matrices; None if it has none, or if it is not known which."""
    return view_of(leaf.shape, matrix_stack(leaf), matrix_inputs(leaf))


def is_router(leaf: Leaf) -> bool:
    """Whether its outputs are the scores of experts, by its dims' names."""
    return not {"router", "experts"}.isdisjoint(leaf.names[matrix_stack(leaf) :])


def attention_heads(leaf: Leaf) -> int:
    """Number of heads of a projection to queries, keys or values; 1 of any other weight."""
    if leaf.adapts or matrix_inputs(leaf) != 1 or "qkv" in leaf.parameter:
        return 1
    return leaf.shape[matrix_stack(leaf) + 1]
