"""What a model itself computes, and how much of the devices' peak that is (MFU).

Model flops are a property of the model: recomputation, padding and what a mesh repeats are not in
them. So MFU (PaLM, arXiv:2204.02311, appendix B) is comparable between ways to run one model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxspeed.hardware.chip import peak_flops
from jaxspeed.jaxpr.flops import of_products, program_flops


class Parameter(Protocol):
    """A parameter's shape, and the logical names of its dims where it has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str | None, ...]: ...


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of forward and backward for one item (a token or a sample).

    Attributes:
      per_item: how many.
      item: "token" or "sample".
      formula: how they were counted, for the record.
    """

    per_item: float
    item: str
    formula: str


def language_flops(sizes: Any, parameters: Iterable[Parameter], seq_len: int) -> ModelFlops | None:
    """6 N + 12 L H Q T a token, in PaLM's symbols; None for a model without these sizes.

    N is the parameters without tables that are only looked up: positions, and an embedding that is
    not the head too. L layers, H query heads of Q dims, T positions that a token attends to; the
    causal half is not taken off.

    Args:
      sizes: has `num_hidden_layers`, `num_attention_heads`, and `head_dim` or `hidden_size`.
      parameters: all of them, for example the leaves of a placement table.
      seq_len: tokens that are predicted in one sample.
    """
    layers = getattr(sizes, "num_hidden_layers", None)
    heads = getattr(sizes, "num_attention_heads", None)
    parameters = list(parameters)
    tables = [p for p in parameters if p.names[:1] == ("vocab",)]
    if layers is None or heads is None or not tables:
        return None
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
    context = min(seq_len, getattr(sizes, "sliding_window", None) or seq_len)
    looked_up = [p for p in parameters if p.names[:1] == ("pos",)]
    looked_up += sorted(tables, key=_size)[:-1]  # one of the tables is the head
    n = sum(map(_size, parameters)) - sum(map(_size, looked_up))
    return ModelFlops(
        6 * n + 12 * layers * heads * head_dim * context,
        "token",
        "6 N + 12 L H Q T a token (PaLM, appendix B; N without tables that are only looked up, "
        "attention in full: the causal half is not taken off)",
    )


def traced_flops(loss: Callable[..., Any], *args: Any, samples: int) -> ModelFlops:
    """Three times the forward pass, for any model: a backward pass costs two of them.

    Args:
      loss: what is traced, without running it.
      args: its arguments, arrays or shapes.
      samples: how many samples are in them.
    """
    counted = program_flops(jax.make_jaxpr(loss)(*args).jaxpr, of_products)
    return ModelFlops(
        3 * counted / samples,
        "sample",
        "3 x the matrix products and convolutions of the forward pass, a sample",
    )


def utilisation(
    flops: ModelFlops, items_per_second: float, device_kind: str, devices: int
) -> dict[str, float | str | None]:
    """`model_flops_per_second`, `mfu` (None where no peak is known) and `mfu_formula`."""
    per_second = flops.per_item * items_per_second
    peak = peak_flops(device_kind)
    return {
        "model_flops_per_second": per_second,
        "mfu": None if peak is None else per_second / (peak * devices),
        "mfu_formula": f"{flops.formula}; of the bf16 peak of all devices",
    }


def _size(parameter: Parameter) -> int:
    return math.prod(parameter.shape)
