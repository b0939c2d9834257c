"""Host transfers of a step: its device-to-host and host-to-device traffic, in the traced program.

A transfer is a `device_put` between two memory spaces; it runs once per trip of the scans around
it. Its purpose follows from the host array that it reads or writes: values in host memory that are
slices, updates or carries of each other are one array, and one that is an argument of the step has
the argument's kind. Arrays on which the host's cores compute are not transferred; their inputs from
the device and outputs to it are `HOST_UPDATE`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
from jaxspeed.planner.memory.tiles import local_shape
from jaxspeed.planner.memory.trace_ir import PAIRWISE, Op, Scope, Value, wires
from jaxspeed.planner.memory.traced_step import Step
from jaxspeed.planner.time.infer_collectives import CollectiveOp

_COMPUTE_ON = "compute_on"
_SAME_VALUES = ("reshape", "device_put")


def host_moves(step: Step) -> list[CollectiveOp]:
    """The host transfers of a step, in the order of the program."""
    return _TransferCounter(step).sent()


def host_transfers(step: Step) -> HostTransfers:
    """The same, with the bytes that the host's cores read in place."""
    walk = _TransferCounter(step)
    return HostTransfers(tuple(each.communication for each in walk.sent()), walk.by_host())


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
        self.parents: dict[Value, Value] = {}
        self.moves: list[_Transfer] = []
        self.works: list[tuple[Value, int]] = []  # read in place by the host's cores, and runs
        self.handed: set[Value] = set()  # the values that they read or computed
        scope, state = step.scope, step.state
        self.run(scope, 1)
        for before, after in zip(scope.ins[:state], scope.outs[:state], strict=True):
            self.join([before, after])
        paths = zip(scope.ins[:state], step.paths[:state], strict=True)
        self.paths = {
            self.root(value): jax.tree_util.keystr(path[1:], simple=True, separator="/")
            for value, path in paths
            if value.host
        }

    # -- the host values of one array: union-find -------------------------------------------

    def root(self, value: Value) -> Value:
        while (parent := self.parents.setdefault(value, value)) is not value:
            self.parents[value] = value = self.parents.setdefault(parent, parent)
        return value

    def join(self, values: Iterable[Value | None]) -> None:
        roots = [self.root(v) for v in values if v is not None and v.host]
        for other in roots[1:]:
            self.parents[self.root(other)] = self.root(roots[0])

    # -- one scope -------------------------------------------------------------------------------

    def run(self, scope: Scope, runs: int) -> None:
        producers = {v: op for op in scope.ops for v in op.outs}
        for op in scope.ops:
            if op.name == _COMPUTE_ON:
                self._by_host(op, runs, producers)
            elif op.bodies:
                self._largest(op, runs)
            elif op.name in PAIRWISE:
                for v, out in zip(op.ins, op.outs, strict=True):
                    if v is not None and v.host != out.host:
                        self._put(v, out, runs, scope, op)
                    else:
                        self.join([v, out])
            elif any(out.host for out in op.outs):
                # An operation on host values: operands and results are one array.
                self.join([*op.ins, *op.outs])
                if op.name == "reshape" and self.handed.intersection(op.values):
                    self.handed.update(op.outs)

    def _put(self, source: Value, made: Value, runs: int, scope: Scope, op: Op) -> None:
        kind, node = (FROM_HOST, source) if source.host else (TO_HOST, made)
        sent = min(source, made, key=self.sizes.plain)
        self.moves.append(_Transfer(kind, node, sent, runs, scope, op))

    def _by_host(self, op: Op, runs: int, producers: Mapping[Value, Op]) -> None:
        """Arrays read and computed by the host's cores: one per result."""
        for v in op.values:
            if v.host:
                self.works.append((v, runs))
                self.handed.update(_same_values(v, producers))
        self.handed.update(out for out in op.outs if out.host)

    def _largest(self, op: Op, runs: int) -> None:
        """Of branches, the one that transfers most."""
        before, best = self.moves, list[_Transfer]()
        for body in op.bodies:
            self.moves = []
            self.run(body, runs * max(op.trips, 1))
            for pair in itertools.chain(*wires(op, body)):
                self.join(pair)
            best = max(best, self.moves, key=lambda moves: sum(map(self._bytes, moves)))
        self.moves = before + best

    def _bytes(self, move: _Transfer) -> int:
        return move.runs * self.sizes.plain(move.sent)

    # -- purposes and owners ---------------------------------------------------------------------

    def sent(self) -> list[CollectiveOp]:
        gradients = {self.root(v) for v in self.kinds.gradients if v.host}
        return [self._sent(move, gradients) for move in self.moves]

    def _sent(self, move: _Transfer, gradients: set[Value]) -> CollectiveOp:
        root, value = self.root(move.node), move.sent
        path = self.paths.get(root, "")
        if path:
            purpose = PARAMETERS if path.startswith("params/") else OPTIMIZER
        elif move.node in self.handed:
            purpose = HOST_UPDATE
        else:
            purpose = GRADIENTS if root in gradients else ACTIVATIONS
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
        found: dict[str, int] = defaultdict(int)
        for value, runs in self.works:
            if path := self.paths.get(self.root(value)):
                found[path] += runs * self.sizes.plain(value)
        return dict(found)


def _same_values(v: Value | None, producers: Mapping[Value, Op]) -> Iterator[Value]:
    """A host value, and those of which it is a reshape or copy."""
    while v is not None and v.host:
        yield v
        producer = producers.get(v)
        v = (
            producer.ins[producer.outs.index(v)]
            if producer and producer.name in _SAME_VALUES
            else None
        )
