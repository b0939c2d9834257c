"""Model FLOPs, and model FLOPs utilization (MFU) of the devices' peak.

Model FLOPs are a property of the model, without recomputation, padding and replicated work. So MFU
(PaLM, arXiv:2204.02311, appendix B) is comparable between configs of one model.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxspeed.hardware.chip import peak_flops
from jaxspeed.jaxpr.flops import count_products, program_flops
from jaxspeed.objectives import objective_of
from jaxspeed.traced_loss.loss import parse_loss
from jaxspeed.train.program import Program
from jaxspeed.user_models.batches import call_loss
from jaxspeed.user_models.config_model import family_sizes, own_objective
from jaxspeed.user_models.own_axes import with_own_axes
from jaxspeed.user_models.user_code import foreign


class Parameter(Protocol):
    """A parameter's shape, and the logical names of its dims if it has them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str | None, ...]: ...


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of forward and backward per item (a token or a sample).

    Attributes:
      per_item: their number.
      item: "token" or "sample".
      formula: how they were counted, for the record.
    """

    per_item: float
    item: str
    formula: str


def program_model_flops(program: Program, batch: Mapping[str, Any]) -> ModelFlops:
    """Model FLOPs per token of a language model with known sizes, otherwise per sample.

    Args:
      batch: arrays of an entire step, or their shapes.
    """
    # An objective of one's own may call the model otherwise, or several times.
    sizes = family_sizes(program.config) if own_objective(program.config) is None else None
    if sizes is not None and "tokens" in batch:
        leaves = [row.leaf for row in program.table]
        predicted = batch["tokens"].shape[1] - ("targets" not in batch)
        model_flops = language_flops(sizes, leaves, predicted)
        if model_flops is not None:
            return model_flops

    def loss(sources: Any, variables: Any, batch: Any) -> Any:
        bound = program.model.bind(sources, variables, train=False, step=0, micro=0)
        loss_fn = program.traced_loss.loss_fn
        with foreign("loss_fn(model, batch)", batch):
            return parse_loss(call_loss(loss_fn, bound, batch, variables, 0, 0, train=False))[0]

    parameters = {
        path: jax.ShapeDtypeStruct(program.table.shape_of(path), rows[0].read.dtype)
        for path, rows in program.table.parameters.items()
    }
    variables, batch = program.loss_inputs(batch)
    samples = program.batch.micro
    few = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((samples, *x.shape[1:]) if x.shape else (), x.dtype), batch
    )
    args = (parameters, variables, few)
    return traced_flops(lambda *args: with_own_axes(loss)(*args)[0], *args, samples=samples)


def counted_tokens(program: Program, batch: Mapping[str, Any]) -> int | None:
    """The tokens of a sample as the objective counts them; None: as the data have it.

    Args:
      batch: arrays of samples, or their shapes.
    """
    objective = objective_of(program.traced_loss.loss_fn)
    if objective is None:
        return None
    sample = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in batch.items()}
    return objective.tokens(sample)


def language_flops(sizes: Any, parameters: Iterable[Parameter], seq_len: int) -> ModelFlops | None:
    """6 N + 12 L H Q T per token, in PaLM's symbols; None for a model without these sizes.

    N is the number of parameters without lookup-only tables: positions, and an embedding that is
    not tied to the head. Of E experts, of which a token has k, it counts the active ones: k / E of
    their parameters. L layers, H query heads of Q dims (the mean of keys' and values' dims where
    they differ), T positions that a token attends to; causal attention counts in full.

    Args:
      sizes: has `num_hidden_layers`, `num_attention_heads`, and `head_dim` or `hidden_size`; of a
        mixture `num_experts_per_tok`.
      parameters: all of them, for example the leaves of a placement table.
      seq_len: predicted tokens per sample.
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
    experts = [p for p in parameters if "experts" in p.names]
    active, of_n = getattr(sizes, "num_experts_per_tok", None), "without lookup-only tables"
    if experts and active is not None:
        n -= sum(_size(p) - _size(p) * active // _experts(p) for p in experts)
        of_n += f" and with {active} of {_experts(experts[0])} experts"
    value_dim = getattr(sizes, "v_head_dim", None) or head_dim
    return ModelFlops(
        6 * n + 6 * layers * heads * (head_dim + value_dim) * context,
        "token",
        f"6 N + 12 L H Q T per token (PaLM, appendix B; N {of_n}, causal attention counted in "
        "full)",
    )


def traced_flops(loss: Callable[..., Any], *args: Any, samples: int) -> ModelFlops:
    """Three times the forward FLOPs, for any model: a backward pass costs two forward passes.

    Args:
      loss: the function to trace (not run).
      args: its arguments, arrays or shapes.
      samples: number of samples in them.
    """
    counted = program_flops(jax.make_jaxpr(loss)(*args).jaxpr, count_products)
    return ModelFlops(
        3 * counted / samples,
        "sample",
        "3 x the matmuls and convolutions of the forward pass, per sample",
    )


def utilisation(
    flops: ModelFlops, items_per_second: float, device_kind: str, devices: int
) -> dict[str, float | str | None]:
    """`model_flops_per_second`, `mfu` (None if the peak is unknown) and `mfu_formula`."""
    per_second = flops.per_item * items_per_second
    peak = peak_flops(device_kind)
    return {
        "model_flops_per_second": per_second,
        "mfu": None if peak is None else per_second / (peak * devices),
        "mfu_formula": f"{flops.formula}; of the bf16 peak of all devices",
    }


def _experts(parameter: Parameter) -> int:
    return parameter.shape[parameter.names.index("experts")]


def _size(parameter: Parameter) -> int:
    return math.prod(parameter.shape)
