"""Equivalence classes of dims: the dims of a program that have to be sharded together.

A node is one dim of one variable. Two nodes are in one class if an operation reads the same index
along both: `a + b` ties every dim of a and b, `x @ w` the contracted dim. Dims of size 1 have no
node: they cannot be sharded.
"""

import math
from collections.abc import Sequence

Node = int
Nodes = tuple[Node | None, ...]  # one for each dim of a variable; None where its size is 1


class DimEquivalence:
    """A union-find over nodes, with the sizes of each class's dims."""

    def __init__(self) -> None:
        self._parent: list[Node] = []
        self._sizes: list[set[int]] = []
        self._own: list[int] = []

    def new(self, shape: Sequence[int]) -> Nodes:
        """Fresh nodes for the dims of a variable of this shape."""
        return tuple(self._one(size) for size in shape)

    def _one(self, size: int) -> Node | None:
        if size == 1:
            return None
        self._parent.append(len(self._parent))
        self._sizes.append({size})
        self._own.append(size)
        return len(self._parent) - 1

    def of(self, node: Node) -> Node:
        """The class of a node, as its representative node."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def tie(self, a: Node | None, b: Node | None) -> None:
        """Merge the classes of two dims that are read by the same index."""
        if a is None or b is None:
            return
        a, b = self.of(a), self.of(b)
        if a != b:
            self._parent[b] = a
            self._sizes[a] |= self._sizes[b]

    def tie_all(self, a: Sequence[Node | None], b: Sequence[Node | None]) -> None:
        for x, y in zip(a, b, strict=True):
            self.tie(x, y)

    def add_groups(self, node: Node | None, groups: int) -> None:
        """Record that the dim consists of so many groups that must not be split."""
        if node is not None:
            self._sizes[self.of(node)].add(groups)

    def same(self, a: Node | None, b: Node | None) -> bool:
        return a is not None and b is not None and self.of(a) == self.of(b)

    def own_size(self, node: Node) -> int:
        """The size of this dim itself."""
        return self._own[node]

    def sizes(self, node: Node) -> frozenset[int]:
        """The sizes of all dims of a node's class; a reshape of [768] to [12, 64] gives two."""
        return frozenset(self._sizes[self.of(node)])

    def common_size(self, node: Node) -> int:
        """The largest number of equal shards of every dim of the class."""
        return math.gcd(*self.sizes(node))
