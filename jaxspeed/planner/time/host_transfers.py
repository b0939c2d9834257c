"""Host transfers of a step: its device-to-host and host-to-device traffic, in the traced program.

A transfer is a `device_put` between two memory spaces; it runs once per trip of the scans around
it. Its purpose follows from the host array that it reads or writes: values in host memory that are
slices, updates or carries of each other are one array, and one that is an argument of the step has
the argument's kind. Arrays on which the host's cores compute are not transferred; their inputs from
the device and outputs to it are `HOST_UPDATE`.
"""

import math
from collections import Counter, defaultdict
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
from jaxspeed.planner.trace.traced_step import Step, TracedPhase
from jaxspeed.train.phases import BATCH, STATE

_COMPUTE_ON = "compute_on"
_SAME = ("reshape", "device_put")


def host_moves(phase: TracedPhase) -> list[CollectiveOp]:
    """The host transfers of a program, in its order."""
    return _TransferCounter(phase).sent() if phase.uses_host else []


def host_transfers(step: Step) -> HostTransfers:
    """The same of all programs of a step, with the bytes that the host's cores read in place."""
    counters = [_TransferCounter(phase) for phase in step.phases if phase.uses_host]
    by_host: Counter[str] = Counter()
    for counter in counters:
        by_host.update(counter.by_host())
    return HostTransfers(
        tuple(move.communication for counter in counters for move in counter.sent()),
        dict(by_host),
        frozenset().union(*(counter.written() for counter in counters)),
    )


@dataclass(eq=False)
class _Transfer:
    kind: str
    node: Value  # the host value
    sent: Value  # the smaller of its two values per device
    runs: int
    scope: Scope
    op: Op


class _TransferCounter:
    def __init__(self, phase: TracedPhase) -> None:
        self.sizes, self.kinds = phase.sizes, phase.kinds
        self.moves: list[_Transfer] = []
        self.works: list[tuple[Value, int]] = []  # read in place by the host's cores, and runs
        scope = phase.scope
        self.run(scope, 1)
        steps = [flow for flow in flows(scope) if flow[1].host and flow[2].host]
        # Slices, updates and carries of one array, in both directions.
        alike = [(v, out) for op, v, out in steps if op.name != _COMPUTE_ON]
        replaced = zip(phase.donated, scope.outs, strict=True)
        alike += [(v, out) for v, out in replaced if v and out and v.host and out.host]
        alike += [(out, v) for v, out in alike]
        self.gradients = reach((v for v in self.kinds.gradients if v.host), alike)
        others = phase.lasting - {STATE, BATCH}  # frozen models
        self.of_parameters = ("params/", *(f"{name}/" for name in sorted(others)))
        self.paths = {
            same: ("" if owner == STATE else f"{owner}/")
            + jax.tree_util.keystr(path, simple=True, separator="/")
            for v, owner, path in zip(scope.ins, phase.ins, phase.paths, strict=True)
            if v.host and owner in phase.lasting - {BATCH}
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
            purpose = PARAMETERS if path.startswith(self.of_parameters) else OPTIMIZER
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
