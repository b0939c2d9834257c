"""Inferred sharding: which parameters to shard over the tensor axis of an unannotated model.

A *class* of dims is all that has to be cut together (`dim_equivalence.py`). To cut one is to cut
every parameter that has a dim in it: of the weight that makes it ("column"), of the weight that
sums over it ("row"), and what lies along it, biases and scales. In between, everything is computed
in parts; where it is entered and left, devices add up what they have (`boundary_costs.py`).

A parameter is cut on one dim, and so is every activation: classes that meet in one variable exclude
each other. In a chain of products x W1 W2 W3 W4 the classes are

    x  [a, b]  ->  h1 [a, c]  ->  h2 [a, d]  ->  h3 [a, e]  ->  y [a, f]
          W1 [b, c]    W2 [c, d]     W3 [d, e]     W4 [e, f]

c excludes b and d, and c with e cuts all four weights with one all-reduce a pair and pass. In a
transformer the residual stream is one class with a dim of every weight; it excludes all others, and
would cost an all-reduce of what is *inside* each branch, the widest arrays that there are.

Chosen is the set of classes without conflicts that maximises

    (elements of products' weights that are cut) / (all of them)
    - 3/4 (elements that it sends) / (elements that it would send to enter and leave every product)

Both are sums over classes, so this is a maximum-weight independent set (`max_weight_set.py`). The
second term is relative on purpose: what an element that is sent costs, against one that is stored,
depends on batch and machine; that a pair sends less than its two products apart does not. Of what a
transformer's layer would send, heads and MLP send 2 parts of 18 each and the stream 12. A class
whose share of the sending is 4/3 its share of the weights stays whole: a convolution of few
channels over a large image, a vocabulary of bytes.

No candidates, each with its reason told for the weights that stay whole:

- the samples of the batch, which the data axes cut;
- what T does not divide, in any of the shapes that it is folded or split into (12 heads), but for
  a vocabulary, which is padded;
- a dim along which what a weight makes is split into parts: each device's part of a fused
  [query, key, value] is not its part of each. One weight each can be cut;
- a dim that two activations are multiplied along, as attention's scores are along head_dim: each
  device would hold a part of every score, and what that costs grows with the sequence;
- a class with two dims of one weight: a residual around a single product. It is no pair.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxspeed.placement.rows import Leaf
from jaxspeed.tensor_parallel.array_roles import Reading
from jaxspeed.tensor_parallel.boundary_costs import Costs, costs
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import Followed
from jaxspeed.tensor_parallel.matmuls import Product, products, uses_of
from jaxspeed.tensor_parallel.max_weight_set import best_set
from jaxspeed.tensor_parallel.proposal import Proposal
from jaxspeed.tensor_parallel.proposed_patterns import ShardedDim

# Above 0.53 a block with a fused projection and an MLP of 4 widths is not cut by its stream.
COST_WEIGHT = 0.75
MOST_PADDING = 1 / 8  # of a vocabulary


def propose(followed: Followed, leaves: Sequence[Leaf], tensor: int) -> Proposal:
    """The cuts of a program's parameters into `tensor` parts; `leaves` are all of them."""
    program = _Program.of(followed, leaves, tensor)
    candidates = _candidates(program, tensor)
    open_ = {c.cls: c for c in candidates.values() if not c.refused}
    conflicts = _conflicts(followed, open_)
    total = max(1, sum(_apart(product) for product in program.products))
    weights = max(1, sum(program.sizes[path] for path in program.used))
    worth = {cls: c.elements / weights - COST_WEIGHT * c.sent / total for cls, c in open_.items()}
    chosen = best_set(worth, conflicts)
    cuts = {
        path: ShardedDim(dim, open_[cls].vocabulary)
        for cls in open_
        if cls in chosen
        for path, dim in open_[cls].dims
    }
    whole = {
        leaf.path: _why(program, candidates, worth, leaf, tensor)
        for leaf in leaves
        if leaf.path in program.used and leaf.path not in cuts
    }
    sends = [one for cls in open_ if cls in chosen for one in program.costs.sends.get(cls, ())]
    uses = uses_of(followed, program.products)
    in_order = {leaf.path: cuts[leaf.path] for leaf in leaves if leaf.path in cuts}
    return Proposal(tensor, tuple(leaves), in_order, whole, tuple(sends), uses)


@dataclass(frozen=True)
class _Program:
    followed: Followed
    products: Sequence[Product]
    costs: Costs
    leaves: Mapping[str, Leaf]
    used: frozenset[str]  # the parameters that stand in products
    in_products: frozenset[tuple[str, int]]  # (parameter, dim)
    vocabularies: frozenset[Node]  # classes by which something is looked up
    scores: frozenset[Node]  # classes that a product of two activations sums over

    @classmethod
    def of(cls, followed: Followed, leaves: Sequence[Leaf], tensor: int) -> "_Program":
        reading = Reading(followed)
        found = products(followed, reading)
        dims = {
            at
            for product in found
            for i in product.weights
            for role in (product.contracted, product.shared, product.free)
            for dim in role[i]
            for at in product.operands[i].dims[dim]
        }
        used = {p for x in found for i in x.weights for p in x.operands[i].parameters}
        scores = {
            cls
            for x in found
            if x.kind == "dot" and not list(x.weights)
            for cls in x.classes("contracted", 0) | x.classes("contracted", 1)
        }
        looked_up = {c for x in found if x.kind == "lookup" for c in x.classes("contracted", 0)}
        return cls(
            followed,
            found,
            costs(followed, reading, found, tensor),
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
        node = self.followed.parameters[path][dim]
        return None if node is None else self.followed.classes.of(node)


@dataclass(frozen=True)
class _Candidate:
    """A class that parameters of products have dims in."""

    cls: Node
    dims: tuple[tuple[str, int], ...]  # of parameters
    elements: int  # of the products' weights among them
    sent: int
    vocabulary: bool
    refused: str  # why it cannot be cut, or ""


def _candidates(program: _Program, tensor: int) -> dict[Node, _Candidate]:
    dims: dict[Node, list[tuple[str, int]]] = {}
    for path, nodes in program.followed.parameters.items():
        for dim in range(len(nodes)):
            cls = program.class_of(path, dim)
            if cls is not None:
                dims.setdefault(cls, []).append((path, dim))
    found, sizes = {}, program.sizes
    for cls, held in dims.items():
        weights = {path for path, dim in held if (path, dim) in program.in_products}
        if weights:
            vocabulary = cls in program.vocabularies and _may_pad(program, cls, tensor)
            found[cls] = _Candidate(
                cls,
                tuple(held),
                sum(sizes[path] for path in weights),
                program.costs.sent(cls),
                vocabulary,
                _refusal(program, cls, held, vocabulary, tensor),
            )
    return found


def _apart(product: Product) -> int:
    """What a product with a weight would send if it were entered and left alone."""
    weights = list(product.weights)
    if not weights:
        return 0
    inputs = sum(
        x.elements for i, x in enumerate(product.operands) if x.trained and i not in weights
    )
    return 2 * product.times * (inputs + math.prod(product.result))


def _may_pad(program: _Program, cls: Node, tensor: int) -> bool:
    sizes = program.followed.classes.sizes(cls)
    size = max(sizes)
    return len(sizes) == 1 and -size % tensor <= MOST_PADDING * size


def _refusal(
    program: _Program, cls: Node, held: Sequence[tuple[str, int]], vocabulary: bool, tensor: int
) -> str:
    classes = program.followed.classes
    if classes.same(cls, program.followed.samples):
        return "is the batch's"
    if pieces := program.costs.pieces.get(cls):
        return f"is split into {pieces} parts further on: one weight for each could be cut"
    if len({path for path, _ in held}) < len(held):
        return "is both what it reads and what it adds to: no pair of products"
    if cls in program.scores:
        return "is summed over in a product of two activations"
    common = classes.common_size(cls)
    if common % tensor and not vocabulary:
        works = [d for d in range(1, common + 1) if common % d == 0]
        least = min(classes.sizes(cls))
        what = "" if least == max(classes.sizes(cls)) else f"is made of {least} parts and "
        return (
            f"{what}cannot be cut {tensor} ways; tensor degrees that work: "
            f"{', '.join(map(str, works))}"
        )
    return ""


def _conflicts(followed: Followed, open_: Mapping[Node, _Candidate]) -> dict[Node, set[Node]]:
    """The candidates that meet in one variable."""
    found: dict[Node, set[Node]] = {cls: set() for cls in open_}
    of = followed.classes.of
    met = {
        frozenset(cls for node in nodes if node is not None and (cls := of(node)) in open_)
        for frame in followed.frames()
        for nodes in frame.nodes.values()
    }
    for together in met:
        for a, b in itertools.permutations(together, 2):
            found[a].add(b)
    return found


def _why(
    program: _Program,
    candidates: Mapping[Node, _Candidate],
    worth: Mapping[Node, float],
    leaf: Leaf,
    tensor: int,
) -> str:
    """Why a weight is whole, dim by dim; what a change of the model would mend comes first."""
    refused, other = [], []
    for dim, size in enumerate(leaf.shape):
        cls = program.class_of(leaf.path, dim)
        if cls is None or (leaf.path, dim) not in program.in_products:
            continue
        candidate = candidates[cls]
        if candidate.refused:
            refused.append(f"dim {dim} ({size}) {candidate.refused}")
        elif worth[cls] <= 0:
            other.append(f"dim {dim} ({size}) would send more than its weights are worth")
        else:
            other.append(f"dim {dim} ({size}) shares weights with dims that are cut")
    reasons = dict.fromkeys([*refused, *other])
    return "; ".join(reasons) or f"no dim of it can be cut {tensor} ways"
