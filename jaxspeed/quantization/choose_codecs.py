"""Which frozen parameters a config quantizes, and by which codec."""

import logging
import math
from collections.abc import Sequence

from jaxspeed.config.patterns import lengths_of, match
from jaxspeed.config.run_sections import Quantize
from jaxspeed.errors import ConfigError
from jaxspeed.jaxpr.weight_uses import Uses, WeightDims
from jaxspeed.placement.codec import CodecRule
from jaxspeed.placement.linear_layers import TABLES, experts_dim, is_at_an_end, matrix_inputs
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import nearest
from jaxspeed.quantization.codecs import FourBit, MatrixCodec, Reordered, RowInt8

log = logging.getLogger("jaxspeed")

KEY = "model.quantize"
DEEPSPEED_KEY = "zero_optimization.zero_quantized_nontrainable_weights"


def codec_rules(
    quantize: Quantize | None,
    leaves: Sequence[Leaf],
    uses: Uses | None = None,
    *,
    if_frozen: bool = False,
) -> tuple[CodecRule, ...]:
    """The codecs of a config's frozen weights of linear layers.

    Args:
      uses: the dims of each weight in the products that read it; None if the loss is not traced.
      if_frozen: a model may have none.

    Raises:
      ConfigError: a pattern of `modules` covers none, or one that is trained; or none is frozen.
    """
    if quantize is None:
        return ()
    weights = {leaf.path: leaf for leaf in leaves if _is_matrix(leaf)}

    def uses_of(leaf: Leaf) -> Sequence[WeightDims]:
        return (uses or {}).get(leaf.parameter, ())

    if quantize.modules is None:
        frozen = (leaf for leaf in weights.values() if not leaf.trainable)
        chosen = [leaf for leaf in frozen if _is_linear(leaf, uses_of(leaf))]
        if not chosen:
            trained = [leaf.path for leaf in weights.values() if leaf.trainable]
            why = f"{listed(trained)} are trained" if trained else "it has no linear layers"
            if if_frozen:
                log.info("%s has no effect: %s", DEEPSPEED_KEY, why)
                return ()
            raise ConfigError(
                f"{KEY}: quantizes the frozen weights of linear layers, and this model has none: "
                f"{why}. Freeze the base (trainable, lora or a frozen group of optimizer.groups)"
            )
    else:
        chosen = _named(quantize.modules, weights)
    values, total = sum(map(_size, chosen)), sum(map(_size, leaves))
    log.info("%s %s: %.1f%% of %s parameters", KEY, quantize.weights, 100 * values / total, total)
    return tuple(
        _OfLeaf("param", leaf.path, codec_of_leaf(quantize, leaf, uses_of(leaf))) for leaf in chosen
    )


class _OfLeaf(CodecRule):
    """The codec of the leaf that has this path: a pattern would match its adapter too."""

    def covers(self, path: str) -> bool:
        return path == self.pattern


def codec_of_leaf(
    quantize: Quantize, leaf: Leaf, uses: Sequence[WeightDims] = ()
) -> MatrixCodec | Reordered:
    """The codec along the dims that the weight's first product contracts.

    Without one it goes by names, and by what is usual: [in, out] is last.
    """
    dims, experts = range(len(leaf.shape)), experts_dim(leaf)
    products = (use.inputs for use in uses if use.kind == "product")
    traced = [
        contracted for x in products if (contracted := tuple(d for d in x if d not in experts))
    ]
    if traced:
        inputs = traced[0]
    elif known := matrix_inputs(leaf):
        inputs = tuple(dims[leaf.stacked :][:known])
    else:
        inputs = (dims[-2],)
    rest = [d for d in dims if d not in inputs]
    stack = min(inputs[0], len(rest) - 1)  # what stands before: layers, experts
    order = tuple(d - stack for d in (*inputs, *rest[stack:]))
    of = len(inputs), len(rest) - stack
    codec: MatrixCodec = RowInt8(*of)
    if quantize.weights != "int8":
        codec = FourBit(*of, quantize.weights, quantize.block, quantize.double)
    return codec if order == tuple(sorted(order)) else Reordered(codec, order)


def _named(patterns: Sequence[str], weights: dict[str, Leaf]) -> list[Leaf]:
    """The weights that patterns cover, and that can be quantized."""
    lengths = lengths_of(path for leaf in weights.values() for path in leaf.paths)
    chosen: dict[str, Leaf] = {}
    for pattern in patterns:
        covered = {
            path: leaf
            for path, leaf in weights.items()
            if any(match(pattern, path_of_layer, lengths) for path_of_layer in leaf.paths)
        }
        if not covered:
            raise ConfigError(
                f"{KEY}.modules: {pattern!r} covers no weight of a linear layer; nearest: "
                + listed(nearest(pattern, list(weights)))
            )
        chosen |= covered
    if trained := [path for path, leaf in chosen.items() if leaf.trainable]:
        raise ConfigError(
            f"{KEY}.modules: {listed(trained)} are trained, and only frozen parameters are "
            "quantized: freeze them (trainable, lora or a frozen group of optimizer.groups), or "
            "leave them out"
        )
    return list(chosen.values())


def _is_matrix(leaf: Leaf) -> bool:
    """Whether it may be the weight of a linear layer."""
    dims = leaf.names[leaf.stacked :]
    of_heads = len(leaf.shape) - leaf.stacked == 2 and "head_dim" in dims  # of a bias or a norm
    is_weight = not leaf.adapts and leaf.parameter.split("/")[-1] not in (*TABLES, "bias", "scale")
    return is_weight and not of_heads and len(leaf.shape) - leaf.stacked >= 2


def _is_linear(leaf: Leaf, uses: Sequence[WeightDims]) -> bool:
    """Whether it is one that is quantized unless `modules` says which are.

    What no product is seen to read goes by its name: it may be inside a custom derivative.
    """
    named = "conv" not in leaf.parameter.lower()
    is_linear = all(use.kind == "product" for use in uses) if uses else named
    return is_linear and not is_at_an_end(leaf)


def _size(leaf: Leaf) -> int:
    return math.prod(leaf.shape)
