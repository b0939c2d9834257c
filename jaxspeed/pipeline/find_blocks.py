"""The blocks that become stages: found by the names of parameters, or in the traced loss.

Equal blocks run as one program on all stages. Where none are found, or where they are only a part
of the model (an encoder beside a decoder, a UNet's levels), unlike blocks are partitioned into
contiguous stages (`partition_stages.py`).

Equal parameters under numbered names may be blocks (`layers/0`, `layers/1`) or not (`conv1`,
`conv2`): with a traced loss the largest stack is taken at which the loss can be split. A scan over
parameters shows a stack by itself, on any dim and without names.
"""

from collections.abc import Callable, Sequence

from jaxspeed.config import match
from jaxspeed.errors import ModelError, PlacementError
from jaxspeed.pipeline.partition_stages import partition_stages
from jaxspeed.pipeline.scanned_stack import scanned_stacks
from jaxspeed.pipeline.split_loss import split_loss
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.stacks import (
    Stack,
    find_stacks,
    largest_first,
    refuse_stages,
    stack_bytes,
)
from jaxspeed.traced_loss.loss_program import LossProgram

SHOWN = 3
# Equal blocks are only a part of the model if they have less than this share of the parameters (a
# vocabulary aside), or if other blocks repeat that have this share of theirs.
LEAST_SHARE, OTHER_SHARE = 0.5, 0.25


def find_stages(
    leaves: Sequence[Leaf],
    patterns: Sequence[str],
    trace: Callable[[], LossProgram] | None,
    stages: int,
    chunks: int,
    against: Sequence[str],
) -> Stack:
    """The blocks that become stages, equal or unlike.

    Args:
      leaves, patterns, trace: as in `find_blocks`.
      chunks: of each stage.
      against: what a config with unlike stages needs, and this one has not.

    Raises:
      PlacementError: there are no blocks, or too few.
      ModelError: the loss cannot be split into stages, with the reasons.
    """
    stack: Stack | None = None
    try:
        stack = find_blocks(leaves, patterns, trace)
        refuse_stages(stack, stages, chunks)
        assert stack is not None
        if trace is None or patterns or _is_most(stack, leaves, patterns):
            return stack
        reason = None
    except (ModelError, PlacementError) as error:
        if trace is None or patterns:
            raise
        reason = error
    try:
        if against:
            raise ModelError(f"they need {', '.join(against)}")
        program = trace()
        parameters = {v: path for path, v in program.parameters.items()}
        return partition_stages(program.closed, parameters, stages)
    except ModelError as error:
        if reason is None:
            assert stack is not None
            return stack
        text = str(error).removeprefix("mesh.pipe: ")
        raise type(reason)(f"{reason}. Nor can unlike blocks be stages: {text}") from None


def _is_most(stack: Stack, leaves: Sequence[Leaf], patterns: Sequence[str]) -> bool:
    """Whether equal blocks are about the entire model."""
    outside = (leaf.path for leaf in leaves if "vocab" in leaf.names or leaf.of_images)
    every = Stack(1, {path: (path,) for path in {leaf.path for leaf in leaves} - {*outside}})
    covered = stack_bytes(stack, leaves)
    others = [s for s in find_stacks(leaves, patterns, match) if not s.paths & stack.paths]
    largest = max((stack_bytes(s, leaves) for s in others), default=0)
    return covered >= LEAST_SHARE * stack_bytes(every, leaves) and largest < OTHER_SHARE * covered


def find_blocks(
    leaves: Sequence[Leaf], patterns: Sequence[str], trace: Callable[[], LossProgram] | None
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
    variables = program.parameters
    scanned = scanned_stacks(program.closed, {v: path for path, v in variables.items()})
    stacks = largest_first([*scanned, *named], leaves)
    if not stacks:
        return None
    reasons = []
    for stack in stacks:
        members = {name: [variables[p] for p in paths] for name, paths in stack.leaves.items()}
        try:
            split_loss(program.closed, members)
        except ModelError as error:
            reasons.append(f"{stack}: {str(error).removeprefix('mesh.pipe: ')}")
        else:
            return stack
    if len(stacks) == 1:
        raise ModelError("mesh.pipe: " + reasons[0].removeprefix(f"{stacks[0]}: "))
    raise ModelError(
        "mesh.pipe: the loss cannot be split into stages at any of the model's repeated blocks. "
        + "; ".join(reasons[:SHOWN])
    )
