"""Tensor parallelism: dims propagated through a traced program, collectives at shard boundaries.

The placement table has the dim of each parameter that is sharded over `tensor`. Dims are propagated
from there through the traced program (`dim_propagation`, by `jaxpr.dim_relations`, into
`dim_equivalence` classes). Where an activation enters or leaves the sharded region
(`shard_boundaries`), a constraint is inserted (`insert_constraints`, `activation_layout`,
`boundary_ops`), or the collective is split into ring steps, overlapped with its matmul
(`collective_matmul`).

For a model without annotations, `infer_sharding` chooses the sharding from the matmuls and the
arrays between them (`matmuls`, `array_roles`), the communication of each choice (`boundary_costs`)
and the best set of choices (`max_weight_set`); `infer_experts` finds the dim of stacked experts.

Over `expert` the same propagation finds where rows go to their experts and come back.
"""

from jaxspeed.tensor_parallel.activation_layout import REPLICATED, ActivationLayout, best_overlap
from jaxspeed.tensor_parallel.dim_propagation import PropagatedDims, propagate_dims
from jaxspeed.tensor_parallel.infer_experts import infer_experts
from jaxspeed.tensor_parallel.infer_sharding import propose_sharding
from jaxspeed.tensor_parallel.insert_constraints import with_boundary_constraints
from jaxspeed.tensor_parallel.matmuls import uses_of
from jaxspeed.tensor_parallel.proposal import ShardingProposal
from jaxspeed.tensor_parallel.shard_boundaries import dims_sharded_over

__all__ = [
    "REPLICATED",
    "ActivationLayout",
    "PropagatedDims",
    "ShardingProposal",
    "best_overlap",
    "dims_sharded_over",
    "infer_experts",
    "propagate_dims",
    "propose_sharding",
    "uses_of",
    "with_boundary_constraints",
]
