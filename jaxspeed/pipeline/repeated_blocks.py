"""`RepeatedBlocks` of a traced loss, scanned or unrolled: one body, applied layer by layer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BlockWeights:
    """A parameter of the blocks: its name in the stack, and the casts that the blocks read."""

    name: str
    casts: tuple[Any, ...] = ()

    def cast(self, x: Any) -> Any:
        for eqn in self.casts:
            x = eqn.primitive.bind(x, **eqn.params)
        return x


@dataclass(frozen=True)
class BlockInputs:
    """A per-layer input that is no parameter: one array per layer, or one stacked array."""

    atoms: tuple[Any, ...]


@dataclass(frozen=True)
class RepeatedBlocks:
    """`body(shared, carry, per layer) -> carry`, with the jaxpr's variables for its inputs."""

    layers: int
    body: Any  # a jaxpr without constants
    shared: tuple[Any, ...]  # the jaxpr's variables that every block reads
    carry: tuple[Any, ...]  # ... that are the first block's carry
    results: tuple[Any, ...]  # ... that are the last block's output
    per_layer: tuple[BlockWeights | BlockInputs, ...]
    others: tuple[Any, ...]  # the equations outside of the blocks
    unroll: int = 1
