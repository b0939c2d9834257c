"""One exchange as it stands in a program."""

from dataclasses import dataclass

from jaxspeed.planner.memory.trace_ir import Op, Scope, Value


@dataclass(frozen=True, eq=False)
class Moved:
    """One exchange as it stands in the program.

    Attributes:
      kind, axes, what: as of an `Exchange`.
      payload: bytes of a device in one run: what an all-gather gathered, what a reduce-scatter or
        an all-to-all was given, the operand of the others.
      value: what is exchanged.
      scope: in which it runs.
      op: of that scope, which waits for it or has made what is sent.
      before: whether it runs before `op`, or after it.
      runs: how often, all trips multiplied.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    payload: int
    value: Value
    scope: Scope
    op: Op
    before: bool
    runs: int


def sent(moved: Moved, ways: int) -> float:
    """Bytes that a device sends in one run, when the group forms a ring."""
    share = (ways - 1) / ways
    factor = {"all-reduce": 2 * share, "permute": 1.0, "to host": 1.0, "from host": 1.0}
    return moved.payload * factor.get(moved.kind, share)
