"""Which frozen parameters a config quantizes, and by which codec."""

import logging
import math
from collections.abc import Sequence

from jaxspeed.config.patterns import lengths_of, match
from jaxspeed.config.run_sections import Quantize
from jaxspeed.errors import ConfigError
from jaxspeed.placement.codec import CodecRule
from jaxspeed.placement.linear_layers import TABLES, is_at_an_end, matrix_inputs
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import nearest
from jaxspeed.quantization.codecs import FourBit, MatrixCodec, RowInt8

log = logging.getLogger("jaxspeed")

KEY = "model.quantize"
DEEPSPEED_KEY = "zero_optimization.zero_quantized_nontrainable_weights"


def codec_rules(
    quantize: Quantize | None, leaves: Sequence[Leaf], *, if_frozen: bool = False
) -> tuple[CodecRule, ...]:
    """The codecs of a config's frozen weights of linear layers.

    With `if_frozen` a model may have none.

    Raises:
      ConfigError: a pattern of `modules` covers none, or one that is trained; or none is frozen.
    """
    if quantize is None:
        return ()
    weights = {leaf.path: leaf for leaf in leaves if _is_matrix(leaf)}
    if quantize.modules is None:
        chosen = [leaf for leaf in weights.values() if not leaf.trainable and _is_linear(leaf)]
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
    return tuple(_OfLeaf("param", leaf.path, codec_of_leaf(quantize, leaf)) for leaf in chosen)


class _OfLeaf(CodecRule):
    """The codec of the leaf that has this path: a pattern would match its adapter too."""

    def covers(self, path: str) -> bool:
        return path == self.pattern


def codec_of_leaf(quantize: Quantize, leaf: Leaf) -> MatrixCodec:
    dims = len(leaf.shape) - leaf.stacked
    found = matrix_inputs(leaf)
    inputs, outputs = (found, dims - found) if found else (1, 1)  # others are stacked, as experts
    if quantize.weights == "int8":
        return RowInt8(inputs, outputs)
    return FourBit(inputs, outputs, quantize.weights, quantize.block, quantize.double)


def _named(patterns: Sequence[str], weights: dict[str, Leaf]) -> list[Leaf]:
    """The weights that patterns cover, and that can be quantized."""
    lengths = lengths_of(path for leaf in weights.values() for path in leaf.paths)
    chosen: dict[str, Leaf] = {}
    for pattern in patterns:
        found = {
            path: leaf
            for path, leaf in weights.items()
            if any(match(pattern, each, lengths) for each in leaf.paths)
        }
        if not found:
            raise ConfigError(
                f"{KEY}.modules: {pattern!r} covers no weight of a linear layer; nearest: "
                + listed(nearest(pattern, list(weights)))
            )
        chosen |= found
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
    own = not leaf.adapts and leaf.parameter.split("/")[-1] not in (*TABLES, "bias", "scale")
    return own and not of_heads and len(leaf.shape) - leaf.stacked >= 2


def _is_linear(leaf: Leaf) -> bool:
    """Whether it is one that is quantized unless `modules` says which are."""
    return not is_at_an_end(leaf) and "conv" not in leaf.parameter.lower()


def _size(leaf: Leaf) -> int:
    return math.prod(leaf.shape)
