"""Host transfers of a step: its device-to-host and host-to-device traffic, in the traced program.

A transfer is a `device_put` between two memory spaces; it runs once per trip of the scans around
it. Its purpose follows from the host array that it reads or writes: values in host memory that are
slices, updates or carries of each other are one array, and one that is an argument of the step has
the argument's kind. Arrays on which the host's cores compute are not transferred; their inputs from
the device and outputs to it are `HOST_UPDATE`.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import jax

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication, dtype_text
from jaxspeed.offload.transfer_report import (
    ACTIVATIONS,
    GRADIENTS,
    HOST_UPDATE,
    OPTIMIZER,
    PARAMETERS,
    HostTransfers,
)
from jaxspeed.planner.time.infer_collectives import CollectiveOp
from jaxspeed.planner.trace.tiles import local_shape
from jaxspeed.planner.trace.trace_ir import PAIRWISE, Op, Scope, Value, all_ops, flows, reach
from jaxspeed.planner.trace.traced_step import Step

_COMPUTE_ON = "compute_on"
_SAME = ("reshape", "device_put")


def host_moves(step: Step) -> list[CollectiveOp]:
    """The host transfers of a step, in the order of the program."""
    return _TransferCounter(step).sent() if step.uses_host else []


def host_transfers(step: Step) -> HostTransfers:
    """The same, with the bytes that the host's cores read in place."""
    if not step.uses_host:
        return HostTransfers((), {})
    walk = _TransferCounter(step)
    moves = tuple(move.communication for move in walk.sent())
    return HostTransfers(moves, walk.by_host(), walk.written())


@dataclass(eq=False)
class _Transfer:
    kind: str
    node: Value  # the host value
    sent: Value  # the smaller of its two values per device
    runs: int
    scope: Scope
    op: Op


class _TransferCounter:
    def __init__(self, step: Step) -> None:
        self.sizes, self.kinds = step.sizes, step.kinds
        self.moves: list[_Transfer] = []
        self.works: list[tuple[Value, int]] = []  # read in place by the host's cores, and runs
        self.run(step.scope, 1)
        scope, state = step.scope, step.state
        steps = [flow for flow in flows(scope) if flow[1].host and flow[2].host]
        # Slices, updates and carries of one array, in both directions.
        alike = [(v, out) for op, v, out in steps if op.name != _COMPUTE_ON]
        alike += [
            (v, out) for v, out in zip(scope.ins, scope.outs[:state]) if out and v.host and out.host
        ]
        alike += [(out, v) for v, out in alike]
        self.gradients = reach((v for v in self.kinds.gradients if v.host), alike)
        self.paths = {
            same: jax.tree_util.keystr(path[1:], simple=True, separator="/")
            for v, path in zip(scope.ins[:state], step.paths)
            if v.host
            for same in reach([v], alike)
        }
        # What the host's cores read or compute, and other shapes of it.
        handed = reach(
            (v for v, _ in self.works), ((out, v) for op, v, out in steps if op.name in _SAME)
        )
        self.computed = [out for op in all_ops(scope) if op.name == _COMPUTE_ON for out in op.outs]
        handed |= {*self.computed}
        self.handed = reach(handed, ((v, out) for op, v, out in steps if op.name == "reshape"))

    # -- one scope -------------------------------------------------------------------------------

    def run(self, scope: Scope, runs: int) -> None:
        for op in scope.ops:
            if op.name == _COMPUTE_ON:
                self.works += [(v, runs) for v in op.values if v.host]
            elif op.bodies:
                self._largest(op, runs)
            elif op.name in PAIRWISE:
                for v, out in zip(op.ins, op.outs, strict=True):
                    if v is not None and v.host != out.host:
                        kind, node = (FROM_HOST, v) if v.host else (TO_HOST, out)
                        sent = min(v, out, key=self.sizes.plain)
                        self.moves.append(_Transfer(kind, node, sent, runs, scope, op))

    def _largest(self, op: Op, runs: int) -> None:
        """Count the branch that transfers most."""
        before, best = self.moves, list[_Transfer]()
        for body in op.bodies:
            self.moves = []
            self.run(body, runs * max(op.trips, 1))
            best = max(best, self.moves, key=lambda moves: sum(map(self._bytes, moves)))
        self.moves = before + best

    def _bytes(self, move: _Transfer) -> int:
        return move.runs * self.sizes.plain(move.sent)

    # -- purposes and owners ---------------------------------------------------------------------

    def sent(self) -> list[CollectiveOp]:
        return [self._sent(move) for move in self.moves]

    def _sent(self, move: _Transfer) -> CollectiveOp:
        value, path = move.sent, self.paths.get(move.node, "")
        if path:
            purpose = PARAMETERS if path.startswith("params/") else OPTIMIZER
        elif move.node in self.handed:
            purpose = HOST_UPDATE
        else:
            purpose = GRADIENTS if move.node in self.gradients else ACTIVATIONS
        communication = Communication(
            move.kind,
            (),
            self.sizes.plain(value),
            move.runs,
            "trace",
            dtype_text(value.dtype),
            math.prod(local_shape(value, self.sizes.mesh)),
            purpose=purpose,
            site=path,
            backward=move.op.backward,
        )
        return CollectiveOp(communication, value, move.scope, move.op, before=True)

    def by_host(self) -> dict[str, int]:
        """{path of an argument: bytes that the host's cores read in place}."""
        read_in_place: dict[str, int] = defaultdict(int)
        for value, runs in self.works:
            if path := self.paths.get(value):
                read_in_place[path] += runs * self.sizes.plain(value)
        return dict(read_in_place)

    def written(self) -> frozenset[str]:
        """Paths of the arguments whose new values the host's cores compute in place."""
        return frozenset(self.paths[v] for v in self.computed if v in self.paths)
