"""The blocks that become stages: found by the names of parameters, or in the traced loss.

Equal parameters under numbered names may be blocks (`layers/0`, `layers/1`) or not (`conv1`,
`conv2`): with a traced loss the largest stack is taken at which the loss can be split. A scan over
parameters shows a stack by itself, on any dim and without names.
"""

from collections.abc import Callable, Sequence

from jaxspeed.config import match
from jaxspeed.errors import ModelError
from jaxspeed.objective.traced_loss import Traced
from jaxspeed.pipeline.scanned_stack import scanned_stacks
from jaxspeed.pipeline.split_loss import split_loss
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.stacks import Stack, find_stacks, largest_first

SHOWN = 3


def find_blocks(
    leaves: Sequence[Leaf], patterns: Sequence[str], trace: Callable[[], Traced] | None
) -> Stack | None:
    """The stack of blocks that is partitioned over `pipe`; None where nothing repeats.

    Args:
      leaves: the model's parameters.
      patterns: the config's units.
      trace: traces the loss on an example batch, if there is one.

    Raises:
      ModelError: there are several, and the loss can be split at none.
    """
    named = find_stacks(leaves, patterns, match)
    if trace is None or (named and named[0].stacked):
        return named[0] if named else None
    program = trace()
    paths = [leaf.path for leaf in leaves]
    variables = dict(zip(paths, program.parameters, strict=True))
    scanned = scanned_stacks(program.closed, {v: path for path, v in variables.items()})
    stacks = largest_first([*scanned, *named], leaves)
    if len(stacks) < 2:
        return stacks[0] if stacks else None
    reasons = []
    for stack in stacks:
        members = {name: [variables[p] for p in own] for name, own in stack.leaves.items()}
        try:
            split_loss(program.closed, members)
        except ModelError as error:
            reasons.append(f"{stack}: {str(error).removeprefix('mesh.pipe: ')}")
        else:
            return stack
    raise ModelError(
        "mesh.pipe: the loss cannot be split into stages at any of the model's repeated blocks. "
        + "; ".join(reasons[:SHOWN])
    )
