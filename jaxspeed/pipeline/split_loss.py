"""Splitting of a traced loss at its repeated blocks: before, the stack, after.

    before(inputs) -> carry              input of the first block: the embedding
    stage(weights, carry) -> carry       some of the blocks
    after(inputs, carry) -> outs         from the last block's output: head and loss

Other inputs of a block than its weights and the carry (rotations, segment ids, dropout keys) are
recomputed from the loss's inputs where needed, and so is what `after` reads of `before`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.inline_calls import with_calls_inlined
from jaxspeed.jaxpr.slicing import read_by, slice_of
from jaxspeed.jaxpr.traverse import like
from jaxspeed.pipeline.repeated_blocks import BlockInputs, BlockWeights, RepeatedBlocks
from jaxspeed.pipeline.scanned_stack import scanned_blocks
from jaxspeed.pipeline.unrolled_stack import unrolled_blocks


@dataclass(frozen=True)
class LossParts:
    """The parts, as jaxprs of the same inputs: the constants, then the loss's arguments."""

    constants: Sequence[Any]
    inputs: Sequence[Any]
    before: Any
    after: Any  # its inputs are followed by the carry
    context: Any  # some inputs -> the blocks' shared inputs, then those that differ per layer
    context_reads: Sequence[int]  # the indices of those inputs
    blocks: RepeatedBlocks

    @property
    def layers(self) -> int:
        return self.blocks.layers

    @property
    def names(self) -> list[str]:
        """The parameters that the blocks read."""
        return list(
            dict.fromkeys(r.name for r in self.blocks.per_layer if isinstance(r, BlockWeights))
        )

    @property
    def carry(self) -> list[jax.ShapeDtypeStruct]:
        return like(self.blocks.carry)

    def stage(
        self,
        rows: int,
        weights: Mapping[str, Any],
        context: Sequence[Any],
        first: Any,
        carry: Sequence[Any],
        *,
        padded: bool = False,
    ) -> list[Any]:
        """Apply `rows` blocks, from layer `first` on.

        `weights` are the parameters of the blocks by name, [rows, ...], and `context` the inputs
        at `context_reads`. Where the stack is `padded`, a block past the last layer is the
        identity.
        """
        reads = self.blocks.per_layer
        values = iter(as_function(self.context)(*context))
        shared = [next(values) for _ in self.blocks.shared]
        numbers = first + jnp.arange(rows)
        within = jnp.minimum(numbers, self.layers - 1)

        def per_layer(inputs: BlockInputs) -> Any:
            layer_values = [next(values) for _ in inputs.atoms]
            return (layer_values[0] if len(layer_values) == 1 else jnp.stack(layer_values))[within]

        xs = [weights[r.name] if isinstance(r, BlockWeights) else per_layer(r) for r in reads]
        run = as_function(self.blocks.body)

        def step(carry: list[Any], layer: list[Any]) -> list[Any]:
            pairs = zip(reads, layer, strict=True)
            cast = [r.cast(x) if isinstance(r, BlockWeights) else x for r, x in pairs]
            return list(run(*shared, *carry, *cast))

        def block(carry: list[Any], layer: tuple[Any, list[Any]]) -> tuple[list[Any], None]:
            number, slices = layer
            if not padded:
                return step(carry, slices), None
            real = number < self.layers
            # Select the inputs too, so that no gradient of a padding layer, be it NaN, gets out.
            into = [jnp.where(real, x, jax.lax.stop_gradient(x)) for x in carry]
            outs = step(into, slices)
            return [jnp.where(real, a, b) for a, b in zip(outs, carry, strict=True)], None

        unroll = min(self.blocks.unroll, rows)
        return jax.lax.scan(block, list(carry), (numbers, xs), unroll=unroll)[0]


def split_loss(closed: Any, stack: Mapping[str, Sequence[Any]]) -> LossParts:
    """Split a traced loss at its repeated blocks.

    Args:
      closed: the traced loss.
      stack: for each parameter of the blocks its stacked variable, or one variable per layer.

    Raises:
      ModelError: the program has no such parts, with the reason.
    """
    variables = {v for vs in stack.values() for v in vs}
    jaxpr = with_calls_inlined(closed.jaxpr, variables)
    if all(len(vs) == 1 for vs in stack.values()):
        blocks = scanned_blocks(jaxpr, {vs[0]: name for name, vs in stack.items()})
    else:
        blocks = unrolled_blocks(jaxpr, stack)
    inputs, eqns = [*jaxpr.constvars, *jaxpr.invars], blocks.others
    layer_inputs = [v for r in blocks.per_layer if isinstance(r, BlockInputs) for v in r.atoms]
    context = slice_of(jaxpr, eqns, inputs, [*blocks.shared, *layer_inputs])
    read = read_by(context)
    of_context = [i for i, v in enumerate(inputs) if v in read]
    return LossParts(
        closed.consts,
        inputs,
        slice_of(jaxpr, eqns, inputs, blocks.carry),
        slice_of(jaxpr, eqns, [*inputs, *blocks.results], jaxpr.outvars),
        context.replace(invars=[inputs[i] for i in of_context]),
        of_context,
        blocks,
    )
