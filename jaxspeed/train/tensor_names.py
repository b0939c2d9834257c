"""Sharded dims of parameters: logical names, layer specs, or inference from the loss.

The config's layer specs come first. With neither names nor specs the sharding is inferred from the
loss, traced on an example batch. So is the dim of the experts, if no parameter names one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspeed.axes import EXPERT, TENSOR
from jaxspeed.config import TensorLayerSpec
from jaxspeed.config.parallelism import Parallel
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.placement.apply_layer_specs import named_by_specs
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import EXPERTS, LOGICAL_RULES, with_names, with_own_axis_names
from jaxspeed.placement.specs import by_dim
from jaxspeed.placement.table import build_table
from jaxspeed.tensor_parallel import (
    PropagatedDims,
    ShardingProposal,
    infer_experts,
    propagate_dims,
    propose_sharding,
    uses_of,
)
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.micro_batch_loss import MicroBatchLoss
from jaxspeed.user_models import Model, adapt_model
from jaxspeed.user_models.batches import example_shapes, with_extra

log = logging.getLogger("jaxspeed")

Loss = Callable[[Any, Any], Any]


def propose_tensor_sharding(
    model: Any, loss_fn: Loss, example_batch: Any, tensor: int = 2
) -> ShardingProposal:
    """A tensor-parallel sharding for a model without logical names.

    Args:
      model: as `initialize` takes it.
      loss_fn: as `initialize` takes it.
      example_batch: a batch, or the shapes of one (`jax.ShapeDtypeStruct`).
      tensor: the number of shards.

    Returns:
      The proposal. It prints itself; `.layer_specs` writes it into a config, `.replicated` has the
      replicated weights, each with the reason.
    """
    if tensor < 2:
        raise ModelError(f"tensor is {tensor}: sharding needs at least 2")
    adapted = adapt_model(model, loss_fn, example_batch=example_batch)
    mesh = build_mesh({}, jax.devices()[:1])
    return propose_sharding(
        propagated_dims(adapted, loss_fn, example_batch, mesh), adapted.leaves, tensor
    )


def with_tensor_names(
    parallel: Parallel,
    specs: Sequence[TensorLayerSpec],
    leaves: Sequence[Leaf],
    mesh: Mesh,
    dims: Callable[[], PropagatedDims] | None,
) -> tuple[tuple[Leaf, ...], ShardingProposal | None]:
    """The leaves with names from the config or inference; the proposal, if inferred.

    `dims()` are those of the traced loss; None without an example batch.
    """
    axes, num_shards = parallel.logical_axes, mesh.shape[TENSOR]
    leaves = with_own_axis_names(leaves, parallel.axis_names)

    def named(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
        leaves = with_names(leaves, axes)
        if mesh.shape[EXPERT] == 1 or any(map(_stacks_experts, leaves)):
            return leaves
        return _with_experts(leaves, dims() if dims else None, mesh)

    if num_shards == 1:
        return named(leaves), None
    if specs:
        uses = uses_of(dims()) if dims else None
        leaves = named_by_specs(leaves, specs, uses, logical_axes=axes)
        return named(leaves), None
    leaves = named(leaves)
    if parallel.infer_tensor_cuts == "never" or any(map(_names_tensor_dim, leaves)):
        return leaves, None
    if dims is None:
        raise ConfigError(
            f"mesh.tensor is {num_shards}, and no parameter has a dim to shard over it: the model "
            "gives no logical names, and the config no layer specs. To infer the sharding from the "
            "traced loss, pass initialize(..., example_batch=batch), a batch or the shapes of one. "
            "To set it, write tensor_parallel.partition_config.layer_specs, as "
            '{"**/up": "column", "**/down": "row"}. parallel.infer_tensor_cuts "never" replicates '
            "all parameters."
        )
    proposal = propose_sharding(dims(), leaves, num_shards)
    return tuple(_named(leaf, proposal) for leaf in leaves), proposal


def _names_tensor_dim(leaf: Leaf) -> bool:
    return any(LOGICAL_RULES.get(name or "") == TENSOR for name in leaf.names)


def _stacks_experts(leaf: Leaf) -> bool:
    return EXPERTS in leaf.names[:-1]


def _with_experts(
    leaves: Sequence[Leaf], traced: PropagatedDims | None, mesh: Mesh
) -> tuple[Leaf, ...]:
    """Leaves with the dim of the experts named, as it is inferred from the loss."""
    expert_dims = infer_experts(traced) if traced else {}
    if not expert_dims:
        looked = (
            "none of the traced loss is one (a dim that a weight shares with the rows of its "
            "product, and over which the results are summed)"
            if traced
            else "without initialize(..., example_batch=batch) none is looked for in the loss"
        )
        raise ConfigError(
            f"mesh.{EXPERT} is {mesh.shape[EXPERT]}, and no parameter has a dim of experts to "
            f"shard over it: the model names none, and {looked}. Experts that are modules of "
            "their own, in a list, cannot be sharded: stack their weights, as [experts, embed, "
            "mlp], and "
            'dispatch by einsums or jaxspeed.ops.moe. Name the dim in Flax metadata ("experts") or '
            'in parallel.logical_axes: {"**/experts/up": ["experts", "embed", "mlp"]}. Without '
            f"experts write mesh.{EXPERT} 1, and put the devices on data or tensor."
        )
    log.info("experts, inferred from the loss: %s", listed(list(expert_dims)))

    def of_leaf(leaf: Leaf) -> Leaf:
        if leaf.path not in expert_dims:
            return leaf
        names = by_dim(leaf.names, len(leaf.shape))
        names[expert_dims[leaf.path]] = EXPERTS
        return replace(leaf, names=tuple(names))

    return tuple(map(of_leaf, leaves))


def _named(leaf: Leaf, proposal: ShardingProposal) -> Leaf:
    names = proposal.names.get(leaf.path)
    if names is None:
        return leaf
    olds = by_dim(leaf.names, len(names))
    return replace(leaf, names=tuple(new or old for new, old in zip(names, olds, strict=True)))


def propagated_dims(
    model: Model, loss_fn: Loss, example_batch: Any, mesh: Mesh, dtype: Any = None
) -> PropagatedDims:
    """The dims of the loss of one micro-batch like the example."""
    program = traced_example(model, loss_fn, example_batch, mesh, dtype)
    return propagate_dims(program.closed.jaxpr, program.parameters, program.batch)


def traced_example(
    model: Model, loss_fn: Loss, example_batch: Any, mesh: Mesh, dtype: Any = None
) -> LossProgram:
    """The loss of one micro-batch like the example, traced in training mode."""
    single_device = build_mesh({}, list(mesh.devices.flat[:1]))
    traced_loss = MicroBatchLoss(model, loss_fn, build_table(model.leaves, single_device), dtype)
    variables, batch = with_extra(model.variables, example_shapes(example_batch))
    batch = jax.eval_shape(traced_loss.cast, batch)
    index = jnp.zeros((), jnp.int32)
    return traced_loss.trace((variables, batch, index, index), train=True)
