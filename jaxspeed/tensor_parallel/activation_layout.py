"""Layout of activations at shard boundaries: replicated, or sharded along the sequence.

Over `tensor` they are sharded along the sequence between its boundaries, if the config asks for it;
over `seq` everywhere.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import EXPERT, SEQ, TENSOR, product
from jaxspeed.ops.free_axes import free_axes, free_sample_axes
from jaxspeed.tensor_parallel.boundary_ops import BoundaryLayout, ExpertLayout
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame
from jaxspeed.tensor_parallel.sequence_dims import SequenceDims
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
    sequence: SequenceDims | None = None  # over the sequence axis
    also: tuple[str, ...] = ()  # axes that shard the samples as well

    def of(self, frame: CallFrame, atom: Any, by_expert: bool = False) -> BoundaryLayout:
        """The layouts of an activation at a boundary of `tensor` that does not shard it."""
        nodes, shape = frame.of(atom), atom.aval.shape
        entries: list[Any] = [
            self._of_samples(node, size, by_expert) if self.program.is_samples(node) else None
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
        position = self.sequence.of(frame, atom) if self.sequence else None
        if position is not None:
            entries[position] = SEQ
        replicated = NamedSharding(self.mesh, PartitionSpec(*entries))
        dim = self.program.sequence_dim(frame, atom) if self.layout.sequence_parallel else None
        if dim is None:
            return BoundaryLayout(replicated, replicated)
        entries[dim] = (SEQ, TENSOR) if dim == position else TENSOR
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
        if self.sequence and self.sequence.of(frame, atom) == dim:
            return {}  # the ring's shards are contiguous in the sequence, those of `seq` too
        length, size = atom.aval.shape[dim], self.program.num_shards
        bidirectional = overlap == "ring_both_ways" and length % (2 * size) == 0
        return {"axis": TENSOR, "bidirectional": bidirectional} if length % size == 0 else {}

    def along_sequence(
        self, frame: CallFrame, atom: Any, by_expert: bool = False
    ) -> NamedSharding | None:
        """The sharding of an activation along the sequence; None if it has no such dim.

        Its other dims but the samples' are left to the compiler.
        """
        if self.sequence is None:
            return None
        position, nodes = self.sequence.of(frame, atom), frame.of(atom)
        entries: list[Any] = [
            self._of_samples(node, size, by_expert, self.also) or PartitionSpec.UNCONSTRAINED
            if self.program.is_samples(node)
            else PartitionSpec.UNCONSTRAINED
            for node, size in zip(nodes, atom.aval.shape, strict=True)
        ]
        if position is not None:
            at_boundary = self.program.sequence_dim(frame, atom) == position
            between = at_boundary and self.program.sharded_dim(frame, atom) is None
            entries[position] = (SEQ, TENSOR) if between and self.layout.sequence_parallel else SEQ
        elif not any(map(self.sequence.merged, nodes)):
            return None
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def _of_samples(
        self, node: Node | None, size: int, by_expert: bool, also: tuple[str, ...] = ()
    ) -> Any:
        """The entry of a dim of samples, or of samples and positions in one dim."""
        merged = self.sequence.merged(node) if self.sequence else None
        if self.sequence is None or merged is None:
            return self.samples(size, by_expert, also)
        axes = self.samples(merged.samples, by_expert, also) or ()
        shards = product(axes, free_axes(self.mesh))
        # Equal shards of the merged dim are those of the sequence where a device has one sample.
        fits = shards == merged.samples and merged.positions % self.sequence.num_shards == 0
        return (*axes, SEQ) if fits else PartitionSpec.UNCONSTRAINED

    def samples(self, size: int, by_expert: bool = False, also: tuple[str, ...] = ()) -> Any:
        """The axes of a dim of samples."""
        axes = free_sample_axes(size, self.mesh, also) or free_sample_axes(size, self.mesh)
        return tuple(axis for axis in axes if not (by_expert and axis == EXPERT)) or None


def context_mesh(mesh: Mesh) -> Any:
    """The mesh of the current trace: inside a shard_map some of its axes are manual."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context
