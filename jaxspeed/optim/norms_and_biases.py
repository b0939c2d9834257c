"""Detection of norm parameters and biases from a leaf's path."""

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxspeed.placement.paths import path_of
from jaxspeed.placement.rows import IS_RANGE

# "RMSNorm_0" -> RMS, Norm; "input_layernorm" -> input, layernorm; "ln1" -> ln
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NORM_ABBREVIATIONS = frozenset({"ln", "lnf", "bn", "gn", "rms"})
_VECTOR_NAMES = frozenset({"scale", "gamma", "beta"})


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` with the leaf's path as the function's first argument."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, *leaves: function(path_of(keys), *leaves), tree, *rest
    )


def is_norm_or_bias(path: str) -> bool:
    """Whether a leaf is a bias or a parameter of a normalization layer, from its path alone.

    The number of dims does not decide: a stacked bias has two. The leaf's name decides (`bias`,
    `b`, `scale`, `gamma`, `beta`, `q_bias`; but an adapter's `B` is a matrix), or else the name of
    its module (`norm1/weight`, `ln_f/weight`, `RMSNorm_0/kernel`). Modules further up do not: in
    `norm1/linear/kernel` the kernel belongs to a linear layer.
    """
    named = (segment for segment in path.split("/") if not segment.isdigit())
    segments = [segment for segment in named if not IS_RANGE.fullmatch(segment)]
    if not segments:
        return False
    words = _words(segments[-1])
    is_b = _WORDS.findall(segments[-1]) == ["b"]
    if "bias" in words or is_b or (words and words[-1] in _VECTOR_NAMES):
        return True
    return any(_names_a_norm(segment) for segment in segments[-2:])


def _names_a_norm(segment: str) -> bool:
    # The first or the last word, so that `adaLN_modulation`, a linear layer, does not match.
    words = _words(segment)
    return any(
        word.endswith(("norm", "norms")) or word in _NORM_ABBREVIATIONS
        for word in words[:1] + words[-1:]
    )


def _words(segment: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(segment)]
