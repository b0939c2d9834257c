"""Inferred sharding: the parameters of an unannotated model to shard over the tensor axis.

A *class* of dims has to be sharded together (`dim_equivalence.py`). Sharding one shards every
parameter with a dim in it: the weight that produces the dim ("column"), the weight that contracts
it ("row"), and biases and scales along it. In between everything is computed on shards; at both
ends there is a collective (`boundary_costs.py`).

A parameter is sharded on one dim, and so is every activation: classes that meet in one variable
exclude each other. In a chain of matmuls x W1 W2 W3 W4 the classes are

    x  [a, b]  ->  h1 [a, c]  ->  h2 [a, d]  ->  h3 [a, e]  ->  y [a, f]
          W1 [b, c]    W2 [c, d]     W3 [d, e]     W4 [e, f]

c excludes b and d; c with e shards all four weights, with one all-reduce per pair and pass. In a
transformer the residual stream is one class with a dim of every weight; it excludes all others, and
would all-reduce the widest arrays there are: those *inside* each branch.

The chosen set has no conflicts and maximizes

    (elements of sharded matmul weights) / (elements of all matmul weights)
    - 3/4 (elements sent) / (elements sent if every matmul had its own collectives)

Both are sums over classes, so this is a maximum-weight independent set (`max_weight_set.py`). The
second term is relative on purpose: the cost of an element sent, compared with one stored, depends
on batch and hardware; that a pair sends less than its two matmuls separately does not. Of what a
transformer's layer would send, heads and MLP send 2 parts of 18 each and the stream 12. A class
whose share of the communication is over 4/3 of its share of the weights stays replicated: a
convolution of few channels over a large image, a vocabulary of bytes.

Not candidates, each with a reason in the proposal:

- the samples of the batch, which are sharded over the data axes;
- dims that T does not divide, in any shape that they are reshaped to (12 heads), except a
  vocabulary, which is padded;
- a dim of an activation that is split further on: a device's shard of a fused [query, key, value]
  is not its shard of each. One weight each can be sharded;
- a dim that two activations contract, as attention's scores contract head_dim: each device would
  have partial sums of every score, and their reduction grows with the sequence;
- a class with two dims of one weight: a residual around a single matmul. It is not a pair.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.rules import EXPERTS
from jaxspeed.tensor_parallel.array_roles import ArrayRoles
from jaxspeed.tensor_parallel.boundary_costs import BoundaryCosts, boundary_costs
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import PropagatedDims
from jaxspeed.tensor_parallel.matmuls import Matmul, Role, matmuls_of, uses_of
from jaxspeed.tensor_parallel.max_weight_set import best_set
from jaxspeed.tensor_parallel.proposal import ShardingProposal
from jaxspeed.tensor_parallel.proposed_patterns import ShardedDim

# Above 0.53 a block with a fused projection and an MLP of 4 widths is not sharded by its stream.
COST_WEIGHT = 0.75
MOST_PADDING = 1 / 8  # of a vocabulary


def propose_sharding(
    propagated: PropagatedDims, leaves: Sequence[Leaf], tensor: int
) -> ShardingProposal:
    """Propose which parameters to shard over `tensor` devices; `leaves` are all parameters."""
    program = _Program.of(propagated, leaves, tensor)
    candidates = _candidates(program, tensor)
    open_ = {c.cls: c for c in candidates.values() if not c.refused}
    conflicts = _conflicts(propagated, open_)
    total = max(1, sum(_separate_sends(matmul) for matmul in program.matmuls))
    weights = max(1, sum(program.sizes[path] for path in program.used))
    worth = {cls: c.elements / weights - COST_WEIGHT * c.sent / total for cls, c in open_.items()}
    chosen = best_set(worth, conflicts)
    sharded = {
        path: ShardedDim(dim, open_[cls].vocabulary)
        for cls in open_
        if cls in chosen
        for path, dim in open_[cls].dims
    }
    replicated = {
        leaf.path: _why(program, candidates, worth, leaf, tensor)
        for leaf in leaves
        if leaf.path in program.used and leaf.path not in sharded
    }
    sends = [send for cls in open_ if cls in chosen for send in program.costs.sends.get(cls, ())]
    uses = uses_of(propagated, program.matmuls)
    in_order = {leaf.path: sharded[leaf.path] for leaf in leaves if leaf.path in sharded}
    flops = _sharded_flops(program.matmuls, chosen)
    return ShardingProposal(tensor, tuple(leaves), in_order, replicated, tuple(sends), uses, *flops)


def _sharded_flops(matmuls: Sequence[Matmul], chosen: Collection[Node]) -> tuple[int, int]:
    """(FLOPs of matmuls with a sharded dim, of all), in a forward and backward pass.

    The backward pass has two matmuls for each of the forward pass.
    """
    roles: tuple[Role, ...] = ("contracted", "shared", "free")
    sharded = [
        m
        for m in matmuls
        if any(not m.classes(role, i).isdisjoint(chosen) for role in roles for i in (0, 1))
    ]
    of_sharded, of_all = (3 * sum(m.flops * m.times for m in group) for group in (sharded, matmuls))
    return of_sharded, of_all


@dataclass(frozen=True)
class _Program:
    propagated: PropagatedDims
    matmuls: Sequence[Matmul]
    costs: BoundaryCosts
    leaves: Mapping[str, Leaf]
    used: frozenset[str]  # parameters of matmuls
    in_matmuls: frozenset[tuple[str, int]]  # (parameter, dim)
    vocabularies: frozenset[Node]  # classes indexed by lookups
    scores: frozenset[Node]  # classes contracted by a matmul of two activations

    @classmethod
    def of(cls, propagated: PropagatedDims, leaves: Sequence[Leaf], tensor: int) -> "_Program":
        arrays = ArrayRoles(propagated)
        matmuls = matmuls_of(propagated, arrays)
        dims = {
            at
            for matmul in matmuls
            for i in matmul.weights
            for role in (matmul.contracted, matmul.shared, matmul.free)
            for dim in role[i]
            for at in matmul.operands[i].dims[dim]
        }
        used = {p for x in matmuls for i in x.weights for p in x.operands[i].parameters}
        scores = {
            cls
            for x in matmuls
            if x.kind == "dot" and not list(x.weights)
            for cls in x.classes("contracted", 0) | x.classes("contracted", 1)
        }
        looked_up = {c for x in matmuls if x.kind == "lookup" for c in x.classes("contracted", 0)}
        return cls(
            propagated,
            matmuls,
            boundary_costs(propagated, arrays, matmuls, tensor),
            {leaf.path: leaf for leaf in leaves},
            frozenset(used),
            frozenset(dims),
            frozenset(looked_up),
            frozenset(scores),
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {path: math.prod(leaf.shape) for path, leaf in self.leaves.items()}

    def class_of(self, path: str, dim: int) -> Node | None:
        node = self.propagated.parameters[path][dim]
        return None if node is None else self.propagated.classes.of(node)


@dataclass(frozen=True)
class _Candidate:
    """A class with dims of matmul parameters."""

    cls: Node
    dims: tuple[tuple[str, int], ...]  # of parameters
    elements: int  # of the matmul weights among them
    sent: int
    vocabulary: bool
    refused: str  # why it cannot be sharded, or ""


def _candidates(program: _Program, tensor: int) -> dict[Node, _Candidate]:
    dims: dict[Node, list[tuple[str, int]]] = {}
    for path, nodes in program.propagated.parameters.items():
        for dim in range(len(nodes)):
            cls = program.class_of(path, dim)
            if cls is not None:
                dims.setdefault(cls, []).append((path, dim))
    candidates, sizes = {}, program.sizes
    for cls, held in dims.items():
        weights = {path for path, dim in held if (path, dim) in program.in_matmuls}
        if weights:
            vocabulary = cls in program.vocabularies and _may_pad(program, cls, tensor)
            candidates[cls] = _Candidate(
                cls,
                tuple(held),
                sum(sizes[path] for path in weights),
                program.costs.sent(cls),
                vocabulary,
                _refusal(program, cls, held, vocabulary, tensor),
            )
    return candidates


def _separate_sends(matmul: Matmul) -> int:
    """Elements sent by a matmul with a weight if it had its own collectives at both ends."""
    weights = list(matmul.weights)
    if not weights:
        return 0
    inputs = sum(
        x.elements for i, x in enumerate(matmul.operands) if x.trained and i not in weights
    )
    return 2 * matmul.times * (inputs + math.prod(matmul.result))


def _may_pad(program: _Program, cls: Node, tensor: int) -> bool:
    sizes = program.propagated.classes.sizes(cls)
    size = max(sizes)
    return len(sizes) == 1 and -size % tensor <= MOST_PADDING * size


def _refusal(
    program: _Program, cls: Node, held: Sequence[tuple[str, int]], vocabulary: bool, tensor: int
) -> str:
    classes = program.propagated.classes
    if classes.same(cls, program.propagated.samples):
        return "is the batch's"
    if any(EXPERTS in program.leaves[path].names[dim : dim + 1] for path, dim in held):
        return "is the experts', which their own axis shards"
    if splits := program.costs.splits.get(cls):
        return f"is split into {splits} parts further on; separate weights could be sharded"
    if len({path for path, _ in held}) < len(held):
        return "is both its input and its output (a residual): no pair of matmuls"
    if cls in program.scores:
        return "is contracted in a matmul of two activations"
    common = classes.common_size(cls)
    if common % tensor and not vocabulary:
        works = [d for d in range(1, common + 1) if common % d == 0]
        least = min(classes.sizes(cls))
        what = "" if least == max(classes.sizes(cls)) else f"consists of {least} parts and "
        return (
            f"{what}is not divisible by {tensor}; tensor degrees that work: "
            f"{', '.join(map(str, works))}"
        )
    return ""


def _conflicts(
    propagated: PropagatedDims, open_: Mapping[Node, _Candidate]
) -> dict[Node, set[Node]]:
    """The candidates that meet in one variable, and so exclude each other."""
    conflicts: dict[Node, set[Node]] = {cls: set() for cls in open_}
    of = propagated.classes.of
    met = {
        frozenset(cls for node in nodes if node is not None and (cls := of(node)) in open_)
        for frame in propagated.top.walk()
        for nodes in frame.nodes.values()
    }
    for together in met:
        for a, b in itertools.permutations(together, 2):
            conflicts[a].add(b)
    return conflicts


def _why(
    program: _Program,
    candidates: Mapping[Node, _Candidate],
    worth: Mapping[Node, float],
    leaf: Leaf,
    tensor: int,
) -> str:
    """Why a weight is replicated, dim by dim; first the reasons that the model could change."""
    refused, other = [], []
    for dim, size in enumerate(leaf.shape):
        cls = program.class_of(leaf.path, dim)
        if cls is None or (leaf.path, dim) not in program.in_matmuls:
            continue
        candidate = candidates[cls]
        if candidate.refused:
            refused.append(f"dim {dim} ({size}) {candidate.refused}")
        elif worth[cls] <= 0:
            other.append(f"dim {dim} ({size}) would cost more communication than it saves memory")
        else:
            other.append(f"dim {dim} ({size}) shares weights with sharded dims")
    reasons = dict.fromkeys([*refused, *other])
    return "; ".join(reasons) or f"none of its dims can be sharded over {tensor} devices"
