"""Tensor parallelism: dims propagated through a traced program, collectives at shard boundaries.

A parameter's row says which of its dims is sharded over `tensor`. From there dims are followed
through the traced program (`dim_propagation`, by `jaxpr.dim_relations`, into `dim_equivalence`
classes); where an activation enters or leaves the sharded region (`shard_boundaries`) a constraint
is inserted (`insert_constraints`, `activation_layout`, `boundary_ops`), or the collective becomes
the steps of a ring beside its product (`collective_matmul`).

Where nothing says what is sharded, `infer_sharding` chooses: which product feeds which
(`matmuls`), what each choice would send (`boundary_costs`), and the best set (`max_weight_set`).
"""

from jaxspeed.tensor_parallel.activation_layout import AS_WHOLE, Style, best_overlap
from jaxspeed.tensor_parallel.dim_propagation import Followed, follow
from jaxspeed.tensor_parallel.infer_sharding import propose
from jaxspeed.tensor_parallel.insert_constraints import with_crossings
from jaxspeed.tensor_parallel.matmuls import uses_of
from jaxspeed.tensor_parallel.proposal import Proposal
from jaxspeed.tensor_parallel.shard_boundaries import dims_cut_over

__all__ = [
    "AS_WHOLE",
    "Followed",
    "Proposal",
    "Style",
    "best_overlap",
    "dims_cut_over",
    "follow",
    "propose",
    "uses_of",
    "with_crossings",
]
