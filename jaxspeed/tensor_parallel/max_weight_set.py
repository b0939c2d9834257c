"""Maximum-weight independent set, exactly: the best set of candidates without conflicts.

Branch on the candidate with most conflicts, then solve each connected component. A transformer's
residual stream conflicts with all other classes; once it is in or out, each layer is a component,
so the search is short for any depth.
"""

from collections.abc import Mapping, Set

Item = int
MOST_STEPS = 20_000


def best_set(worth: Mapping[Item, float], conflicts: Mapping[Item, Set[Item]]) -> frozenset[Item]:
    """The set without conflicts of the largest total worth; ties go to earlier items.

    After `MOST_STEPS` subproblems the rest is chosen greedily.
    """
    worthwhile = [x for x in worth if worth[x] > 0]
    order = {x: i for i, x in enumerate(worthwhile)}
    against = {
        x: frozenset(y for y in conflicts.get(x, ()) if y in order) - {x} for x in worthwhile
    }
    solver = _Solver({x: worth[x] for x in worthwhile}, against, order)
    return solver.solve(frozenset(worthwhile))


class _Solver:
    def __init__(
        self,
        worth: Mapping[Item, float],
        against: Mapping[Item, frozenset[Item]],
        order: Mapping[Item, int],
    ) -> None:
        self.worth, self.against, self.order = worth, against, order
        self.known: dict[frozenset[Item], frozenset[Item]] = {}

    def solve(self, items: frozenset[Item]) -> frozenset[Item]:
        none: frozenset[Item] = frozenset()
        return none.union(*(self._connected(part) for part in self._components(items)))

    def total(self, chosen: Set[Item]) -> float:
        return sum(self.worth[x] for x in sorted(chosen, key=self.order.__getitem__))

    def _connected(self, items: frozenset[Item]) -> frozenset[Item]:
        if len(items) == 1:
            return items
        if items not in self.known:
            branch = self._greedy if len(self.known) >= MOST_STEPS else self._branch
            self.known[items] = branch(items)
        return self.known[items]

    def _branch(self, items: frozenset[Item]) -> frozenset[Item]:
        pivot = self._pivot(items)
        with_it = self.solve(items - self.against[pivot] - {pivot}) | {pivot}
        without = self.solve(items - {pivot})
        return max(with_it, without, key=self.total)

    def _pivot(self, items: frozenset[Item]) -> Item:
        """Of the items with most conflicts the middle one, which splits a chain into halves."""
        degrees = {x: len(self.against[x] & items) for x in items}
        most = max(degrees.values())
        busiest = sorted((x for x in items if degrees[x] == most), key=self.order.__getitem__)
        return busiest[len(busiest) // 2]

    def _greedy(self, items: frozenset[Item]) -> frozenset[Item]:
        chosen: set[Item] = set()
        for x in sorted(items, key=lambda x: (-self.worth[x], self.order[x])):
            if not self.against[x] & chosen:
                chosen.add(x)
        return frozenset(chosen)

    def _components(self, items: frozenset[Item]) -> list[frozenset[Item]]:
        left, parts = set(items), []
        for start in sorted(items, key=self.order.__getitem__):
            if start not in left:
                continue
            part, front = {start}, [start]
            left.discard(start)
            while front:
                near = self.against[front.pop()] & left
                left -= near
                part |= near
                front += near
            parts.append(frozenset(part))
        return parts
