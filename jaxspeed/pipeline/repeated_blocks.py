"""The repeated blocks of a traced loss, scanned or unrolled: one body, applied in turn."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weights:
    """A parameter of the blocks: its name in the stack, and casts between it and the blocks."""

    name: str
    casts: tuple[Any, ...] = ()

    def cast(self, x: Any) -> Any:
        for eqn in self.casts:
            x = eqn.primitive.bind(x, **eqn.params)
        return x


@dataclass(frozen=True)
class Rows:
    """What each block reads of its own that is no parameter: one array a layer, or one of all."""

    atoms: tuple[Any, ...]


@dataclass(frozen=True)
class Blocks:
    """`body(shared, carry, per layer) -> carry`, with what its inputs are in the program."""

    layers: int
    body: Any  # a jaxpr without constants
    shared: tuple[Any, ...]  # the program's variables that every block reads
    carry: tuple[Any, ...]  # ... that the first block starts from
    results: tuple[Any, ...]  # ... that the last block gives
    per_layer: tuple[Weights | Rows, ...]
    others: tuple[Any, ...]  # the equations of the program that are no block's
    unroll: int = 1
