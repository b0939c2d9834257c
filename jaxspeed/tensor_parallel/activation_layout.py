"""Layout of activations on both sides of a shard boundary, as the config sets it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.ops.free_axes import TENSOR, free_axes
from jaxspeed.placement.mesh import DATA_AXES
from jaxspeed.tensor_parallel.boundary_ops import Between
from jaxspeed.tensor_parallel.dim_propagation import Frame
from jaxspeed.tensor_parallel.shard_boundaries import ShardedProgram

Overlap = Literal["none", "ring", "ring_both_ways"]


@dataclass(frozen=True)
class Style:
    """How activations live between the cuts."""

    sequence_parallel: bool = False
    # Collective matmul instead of one collective, where activations are cut along the sequence.
    overlap: Overlap = "none"


AS_WHOLE = Style()


def best_overlap(platform: str) -> Overlap:
    """What `auto` stands for on a platform, by what its compiler makes of the forms.

    For a block of Llama 8B's size on data 2 x tensor 4 (benchmarks/tensor_overlap.py), XLA:TPU
    leaves collectives that nothing covers, on v5p all of them; the ring covers its own. XLA:GPU
    covers what there is with the plain form, and a CPU's devices share its memory.
    """
    return "ring" if platform == "tpu" else "none"


@dataclass(frozen=True)
class Sides:
    """How the activations of a program live on the two sides of its crossings."""

    cut: ShardedProgram
    mesh: Any  # of the trace's context
    style: Style

    def between(self, frame: Frame, atom: Any) -> Between:
        """How an activation that is not cut lives at a crossing."""
        nodes, shape = frame.of(atom), atom.aval.shape
        entries: list[Any] = [
            self.samples(size) if self.cut.is_samples(node) else None
            for node, size in zip(nodes, shape, strict=True)
        ]
        if entries and not any(map(self.cut.is_samples, nodes)):
            # Samples that were joined or split on the way: the compiler knows where they are.
            entries[0] = PartitionSpec.UNCONSTRAINED
        whole = NamedSharding(self.mesh, PartitionSpec(*entries))
        dim = self.cut.sequence_dim(frame, atom) if self.style.sequence_parallel else None
        if dim is None:
            return Between(whole, whole)
        entries[dim] = TENSOR
        return Between(whole, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def ring(self, frame: Frame, atom: Any) -> dict[str, Any]:
        """How the collective of an activation goes round a ring; empty where it does not."""
        dim = self.cut.sequence_dim(frame, atom)
        if self.style.overlap == "none" or not self.style.sequence_parallel or dim is None:
            return {}
        length, ways = atom.aval.shape[dim], self.cut.ways
        both_ways = self.style.overlap == "ring_both_ways" and length % (2 * ways) == 0
        return {"axis": TENSOR, "both_ways": both_ways} if length % ways == 0 else {}

    def samples(self, size: int) -> Any:
        return sample_axes(self.mesh, size)


def context_mesh(mesh: Mesh) -> Any:
    """The mesh as the trace under way sees it: inside a shard_map some axes are manual."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context


def sample_axes(mesh: Any, size: int) -> tuple[str, ...] | None:
    """The data axes that shard so many samples here: none that is manual, or does not divide."""
    free = free_axes(mesh)
    axes = tuple(axis for axis in DATA_AXES if axis in free)
    ways = math.prod(free[axis] for axis in axes)
    return axes if ways > 1 and size % ways == 0 else None
