"""How a piece's parameters come in and its gradients leave: by constraints, or by an exchange.

In the global view each is its own `Stored.read` and `Stored.scatter`, and the compiler moves them.
Where the data axes are manual, an `Exchange` moves all those of a piece together.
"""

from collections.abc import Sequence
from typing import Any

from jaxspeed.placement.units.stored import Exchange, Stored


def place_of(stored: Sequence[Stored]) -> list[Any]:
    """What an exchange has to be told; nothing where there is none."""
    exchange = _exchange(stored)
    return list(exchange.place) if exchange else []


def read_all(stored: Sequence[Stored], shards: Sequence[Any], place: Sequence[Any]) -> list[Any]:
    """All parameters of a piece as layers read them."""
    exchange = _exchange(stored)
    if exchange:
        return exchange.gather(stored, shards, place)
    return [s.read(w) for s, w in zip(stored, shards, strict=True)]


def scatter_all(
    stored: Sequence[Stored], grads: Sequence[Any], likes: Sequence[Any], place: Sequence[Any]
) -> list[Any]:
    """All gradients of a piece as those of what is stored; None where there is none."""
    exchange = _exchange(stored)
    if not exchange:
        triples = zip(stored, grads, likes, strict=True)
        return [None if g is None else s.scatter(g, w) for s, g, w in triples]
    found = [i for i, g in enumerate(grads) if g is not None]

    def picked(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in found]

    done = iter(exchange.scatter(picked(stored), picked(grads), picked(likes), place))
    return [None if g is None else next(done) for g in grads]


def _exchange(stored: Sequence[Stored]) -> Exchange | None:
    return stored[0].exchange if stored else None
