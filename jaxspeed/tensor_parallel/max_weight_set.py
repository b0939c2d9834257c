"""Maximum-weight independent set, exactly: the best set of candidates that exclude each other.

Branch on the thing with most conflicts, then solve what falls apart one component at a time. A
transformer's stream conflicts with everything; once it is in or out, each layer is a component of
its own, so that the search is short for any depth.
"""

from collections.abc import Mapping, Set

Thing = int
MOST_STEPS = 20_000


def best_set(
    worth: Mapping[Thing, float], conflicts: Mapping[Thing, Set[Thing]]
) -> frozenset[Thing]:
    """The set without conflicts whose worths sum to most. Of equals, that with what comes first.

    Past `MOST_STEPS` subproblems what is left is chosen greedily.
    """
    gainful = [x for x in worth if worth[x] > 0]
    order = {x: i for i, x in enumerate(gainful)}
    against = {x: frozenset(y for y in conflicts.get(x, ()) if y in order) - {x} for x in gainful}
    solver = _Solver({x: worth[x] for x in gainful}, against, order)
    return solver.solve(frozenset(gainful))


class _Solver:
    def __init__(
        self,
        worth: Mapping[Thing, float],
        against: Mapping[Thing, frozenset[Thing]],
        order: Mapping[Thing, int],
    ) -> None:
        self.worth, self.against, self.order = worth, against, order
        self.known: dict[frozenset[Thing], frozenset[Thing]] = {}

    def solve(self, things: frozenset[Thing]) -> frozenset[Thing]:
        none: frozenset[Thing] = frozenset()
        return none.union(*(self._connected(part) for part in self._components(things)))

    def total(self, chosen: Set[Thing]) -> float:
        return sum(self.worth[x] for x in sorted(chosen, key=self.order.__getitem__))

    def _connected(self, things: frozenset[Thing]) -> frozenset[Thing]:
        if len(things) == 1:
            return things
        if things not in self.known:
            branch = self._greedy if len(self.known) >= MOST_STEPS else self._branch
            self.known[things] = branch(things)
        return self.known[things]

    def _branch(self, things: frozenset[Thing]) -> frozenset[Thing]:
        pivot = self._pivot(things)
        with_it = self.solve(things - self.against[pivot] - {pivot}) | {pivot}
        without = self.solve(things - {pivot})
        return max(with_it, without, key=self.total)

    def _pivot(self, things: frozenset[Thing]) -> Thing:
        """Of those with most conflicts the one in the middle: a chain falls into halves."""
        degrees = {x: len(self.against[x] & things) for x in things}
        most = max(degrees.values())
        busiest = sorted((x for x in things if degrees[x] == most), key=self.order.__getitem__)
        return busiest[len(busiest) // 2]

    def _greedy(self, things: frozenset[Thing]) -> frozenset[Thing]:
        chosen: set[Thing] = set()
        for x in sorted(things, key=lambda x: (-self.worth[x], self.order[x])):
            if not self.against[x] & chosen:
                chosen.add(x)
        return frozenset(chosen)

    def _components(self, things: frozenset[Thing]) -> list[frozenset[Thing]]:
        left, parts = set(things), []
        for start in sorted(things, key=self.order.__getitem__):
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
