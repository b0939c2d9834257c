"""Layout of activations at shard boundaries: replicated, or sharded along the sequence."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import EXPERT, TENSOR
from jaxspeed.ops.free_axes import free_sample_axes
from jaxspeed.tensor_parallel.boundary_ops import BoundaryLayout, ExpertLayout
from jaxspeed.tensor_parallel.dim_propagation import CallFrame
from jaxspeed.tensor_parallel.shard_boundaries import ShardedProgram

Overlap = Literal["none", "ring", "ring_both_ways"]


@dataclass(frozen=True)
class ActivationLayout:
    """Layout of the activations between sharded matmuls, as the config sets it."""

    sequence_parallel: bool = False
    # Ring steps instead of a single collective, for activations sharded along the sequence.
    overlap: Overlap = "none"


REPLICATED = ActivationLayout()


def best_overlap(platform: str) -> Overlap:
    """The value of `auto` on a platform.

    For a block of Llama 8B's size on data 2 x tensor 4 (benchmarks/tensor_overlap.py), XLA:TPU
    leaves single collectives exposed, on v5p all of them, and overlaps the ring's steps. XLA:GPU
    overlaps single collectives, and a CPU's devices share its memory.
    """
    return "ring" if platform == "tpu" else "none"


@dataclass(frozen=True)
class BoundaryLayouts:
    """The layouts of a program's activations at its shard boundaries."""

    program: ShardedProgram
    mesh: Any  # of the trace's context
    layout: ActivationLayout
    experts: ShardedProgram  # over the expert axis

    def of(self, frame: CallFrame, atom: Any, by_expert: bool = False) -> BoundaryLayout:
        """The layouts of an activation at a boundary of `tensor` that does not shard it."""
        nodes, shape = frame.of(atom), atom.aval.shape
        entries: list[Any] = [
            self.samples(size, by_expert) if self.program.is_samples(node) else None
            for node, size in zip(nodes, shape, strict=True)
        ]
        expert = self.experts.sharded_dim(frame, atom)
        if entries and not any(map(self.program.is_samples, nodes)):
            # A reshape merged or split the samples, or experts have a common capacity for all of
            # them: the sharding of the first dims is left to the compiler.
            for dim in {0, *(() if expert is None else (expert, min(1, len(nodes) - 1)))}:
                entries[dim] = PartitionSpec.UNCONSTRAINED
        if by_expert and expert is not None:
            entries[expert] = EXPERT
        replicated = NamedSharding(self.mesh, PartitionSpec(*entries))
        dim = self.program.sequence_dim(frame, atom) if self.layout.sequence_parallel else None
        if dim is None:
            return BoundaryLayout(replicated, replicated)
        entries[dim] = TENSOR
        return BoundaryLayout(replicated, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def around_experts(self, frame: CallFrame, atom: Any) -> ExpertLayout:
        """The layouts of an activation outside of the experts and inside."""
        tensor = self.program.sharded_dim(frame, atom)
        both: list[Any] = [self.of(frame, atom, inside).saved for inside in (False, True)]
        if tensor is not None:
            specs = [list(at.spec) for at in both]
            for entries in specs:
                entries[tensor] = TENSOR
            both = [NamedSharding(self.mesh, PartitionSpec(*entries)) for entries in specs]
        return ExpertLayout(*both)

    def ring(self, frame: CallFrame, atom: Any) -> dict[str, Any]:
        """The ring's keywords for an activation's collective; empty for a single collective."""
        dim, overlap = self.program.sequence_dim(frame, atom), self.layout.overlap
        if overlap == "none" or not self.layout.sequence_parallel or dim is None:
            return {}
        length, size = atom.aval.shape[dim], self.program.num_shards
        bidirectional = overlap == "ring_both_ways" and length % (2 * size) == 0
        return {"axis": TENSOR, "bidirectional": bidirectional} if length % size == 0 else {}

    def samples(self, size: int, by_expert: bool = False) -> Any:
        """The axes of a dim of samples."""
        axes = free_sample_axes(size, self.mesh)
        return tuple(axis for axis in axes if not (by_expert and axis == EXPERT)) or None


def context_mesh(mesh: Mesh) -> Any:
    """The mesh of the current trace: inside a shard_map some of its axes are manual."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context
