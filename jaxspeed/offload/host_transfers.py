"""Host transfers of a step: its device-to-host and host-to-device traffic, from the trace.

A transfer is a `device_put` between two memory spaces; it runs once per trip of the scans around
it. Its purpose follows from the host array that it reads or writes: values in host memory that are
slices, updates or carries of each other are one array, and one that is an argument of the step has
the argument's kind. Arrays on which the host's cores compute are not transferred; their inputs from
the device and outputs to it are `HOST_UPDATE`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication, dtypes_text
from jaxspeed.jaxpr.flops import count_all, nbytes
from jaxspeed.jaxpr.primitives import CHECKPOINTS, CONSTRAINT, KERNELS
from jaxspeed.jaxpr.traverse import Body, bodies, is_var
from jaxspeed.placement.specs import spec_axes

ACTIVATIONS, GRADIENTS, PARAMETERS, OPTIMIZER, HOST_UPDATE = (
    "activations",
    "gradients",
    "parameters",
    "optimizer",
    "update on the host",
)
_COMPUTE_ON = "compute_on"
_SAME_VALUES = ("reshape", "device_put")


@dataclass(frozen=True)
class Argument:
    """An argument of the step: its path in the state, its kind and its sharding."""

    path: str
    kind: str
    sharding: NamedSharding


@dataclass(frozen=True)
class HostTransfers:
    """Host transfers of one step, per device.

    Attributes:
      moves: the transfers; the purpose is one of the kinds above, the site the path of the argument
        in host memory, if it is an argument.
      by_host: {path of an argument: bytes that the host's cores read in place}.
      regions: number of rematerialized regions of the backward pass.
      flops: FLOPs per device, if devices share the work evenly; an estimate.
    """

    moves: Sequence[Communication]
    by_host: Mapping[str, int]
    regions: int
    flops: float

    @property
    def to_device(self) -> dict[str, int]:
        """Host-to-device bytes by purpose."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == FROM_HOST)

    @property
    def to_host(self) -> dict[str, int]:
        """Device-to-host bytes by purpose."""
        return _sums((m.purpose, m) for m in self.moves if m.kind == TO_HOST)

    @property
    def fetched(self) -> dict[str, int]:
        """Host-to-device bytes by path of the argument."""
        return _sums((m.site, m) for m in self.moves if m.kind == FROM_HOST and m.site)

    @property
    def stored(self) -> dict[str, int]:
        """Device-to-host bytes by path of the argument."""
        return _sums((m.site, m) for m in self.moves if m.kind == TO_HOST and m.site)

    @property
    def bytes(self) -> int:
        return sum(m.payload for m in self.moves)


def _sums(named: Iterable[tuple[str, Communication]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for name, move in named:
        found[name] += move.payload
    return dict(found)


def transfers_in(
    closed: Any,
    arguments: Sequence[Argument | None],
    gradients: Iterable[tuple[int, ...]],
    activation_axes: Iterable[str],
    mesh: Mapping[str, int],
) -> HostTransfers:
    """Host transfers of a traced step.

    Args:
      closed: its jaxpr.
      arguments: one per input; None for inputs that are not in the state. Their next values are
        the step's first outputs, in the same order.
      gradients: shapes of the gradients that are not streamed.
      activation_axes: the mesh axes over which activations are sharded.
      mesh: the sizes of the mesh axes.
    """
    counter = _TransferCounter(mesh, frozenset(activation_axes))
    env = {}
    for var, argument in zip(closed.jaxpr.invars, arguments, strict=True):
        if _in_host(var):
            env[var] = node = counter.node(var.aval.shape)
            if argument is not None:
                counter.arguments[node] = argument
    counter.run(closed.jaxpr, env, 1, frozenset())
    pairs = zip(closed.jaxpr.invars, closed.jaxpr.outvars, arguments, strict=False)
    for var, out, argument in pairs:
        if argument is not None and is_var(out):
            counter.join([env.get(var), env.get(out)])
    return counter.summed(set(gradients))


@dataclass
class _Transfer:
    kind: str
    node: int  # the host value
    aval: Any  # shape per run, sharded over the `manual` axes only
    runs: int
    axes: frozenset[str] | None  # that shard it; None: unknown from the transfer
    manual: frozenset[str]

    @property
    def bytes(self) -> int:
        return self.runs * nbytes(self.aval)


@dataclass
class _TransferCounter:
    mesh: Mapping[str, int]
    activation_axes: frozenset[str]
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    arguments: dict[int, Argument] = field(default_factory=dict)
    moves: list[_Transfer] = field(default_factory=list)
    works: list[_Transfer] = field(default_factory=list)  # in-place reads of the host's cores
    host_io: set[int] = field(default_factory=set)  # inputs and outputs of the host's cores
    regions: int = 0
    flops: float = 0.0

    # -- which host values are one array: union-find -------------------------------------------

    def node(self, shape: tuple[int, ...]) -> int:
        self.shapes.append(shape)
        self.parents.append(len(self.parents))
        return self.parents[-1]

    def root(self, node: int) -> int:
        while self.parents[node] != node:
            self.parents[node] = node = self.parents[self.parents[node]]
        return node

    def join(self, nodes: Iterable[int | None]) -> None:
        roots = [self.root(node) for node in nodes if node is not None]
        for other in roots[1:]:
            self.parents[self.root(other)] = self.root(roots[0])

    # -- traversal of the program -----------------------------------------------------------------

    def run(self, jaxpr: Any, env: dict[Any, int], trips: int, manual: frozenset[str]) -> None:
        """Add the nodes of all host values to `env`, which has those of the inputs."""
        for var in jaxpr.constvars:
            if _in_host(var):
                env.setdefault(var, self.node(var.aval.shape))
        producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            for v in eqn.outvars:
                if _in_host(v):
                    env[v] = self.node(v.aval.shape)
            if eqn.primitive.name in CHECKPOINTS and eqn.params.get("differentiated"):
                self.regions += trips
            if eqn.primitive.name == _COMPUTE_ON:
                self._host_compute(eqn, env, trips, manual, producers)
                continue
            inner = bodies(eqn)
            if eqn.primitive.name == "cond":
                self._largest(eqn, inner, env, trips, manual)
            elif inner:
                for body in inner:
                    self._into(eqn, body, env, trips, manual)
            elif eqn.primitive.name == "device_put":
                self._put(eqn, env, trips, manual, producers)
            else:
                self._host_only(eqn, env)
                devices = math.prod(n for axis, n in self.mesh.items() if axis not in manual)
                if eqn.primitive.name not in KERNELS:
                    self.flops += trips * count_all(eqn) / devices

    def _put(
        self,
        eqn: Any,
        env: dict[Any, int],
        trips: int,
        manual: frozenset[str],
        producers: Mapping[Any, Any],
    ) -> None:
        for source, made, to in zip(eqn.invars, eqn.outvars, eqn.params["devices"], strict=True):
            if _in_host(source) == _in_host(made):
                self.join(env[v] for v in (source, made) if is_var(v) and v in env)
                continue
            node = env[source] if _in_host(source) else env[made]
            axes = (
                spec_axes(to.spec)
                if isinstance(to, NamedSharding)
                else self._constrained_axes(source, producers)
            )
            kind = FROM_HOST if _in_host(source) else TO_HOST
            self.moves.append(_Transfer(kind, node, made.aval, trips, axes, manual))

    def _constrained_axes(self, source: Any, producers: Mapping[Any, Any]) -> frozenset[str] | None:
        """Axes of the constraint on a transferred value, and of activations where it is open."""
        producer = producers.get(source) if is_var(source) else None
        if producer is None or producer.primitive.name != CONSTRAINT:
            return None
        spec = getattr(producer.params["sharding"], "spec", PartitionSpec())
        open_ = PartitionSpec.UNCONSTRAINED in tuple(spec)
        return spec_axes(spec) | (self.activation_axes if open_ else frozenset())

    def _host_compute(
        self,
        eqn: Any,
        env: dict[Any, int],
        trips: int,
        manual: frozenset[str],
        producers: Mapping[Any, Any],
    ) -> None:
        """Record computation on the host's cores; each output is an array."""
        for v in eqn.invars:
            if is_var(v) and v in env:
                self.works.append(_Transfer(TO_HOST, env[v], v.aval, trips, None, manual))
                self.host_io |= {env[each] for each in _same_values(v, producers)}
        self.host_io |= {env[v] for v in eqn.outvars if v in env}

    def _host_only(self, eqn: Any, env: dict[Any, int]) -> None:
        """Join inputs and outputs of an operation on host values into one array."""
        read = [env.get(v) if is_var(v) else None for v in eqn.invars]
        made = [env.get(v) for v in eqn.outvars]
        if eqn.primitive.name == "optimization_barrier":
            for pair in zip(read, made, strict=True):
                self.join(pair)
        elif any(node is not None for node in made):
            self.join([*read, *made])
            if eqn.primitive.name == "reshape" and self.host_io & set(read):
                self.host_io |= {node for node in made if node is not None}

    def _largest(
        self,
        eqn: Any,
        branches: Sequence[Body],
        env: dict[Any, int],
        trips: int,
        manual: frozenset[str],
    ) -> None:
        """Count the branch that transfers most."""
        before, runs = self.moves, []
        for body in branches:
            self.moves = []
            self._into(eqn, body, env, trips, manual)
            runs.append(self.moves)
        self.moves = before + max(runs, key=lambda moves: sum(move.bytes for move in moves))

    def _into(
        self, eqn: Any, body: Body, env: dict[Any, int], trips: int, manual: frozenset[str]
    ) -> None:
        inner = {
            iv: env[v]
            for iv, v in zip(body.jaxpr.invars, body.operands, strict=True)
            if is_var(v) and v in env and _in_host(iv)
        }
        for iv in body.jaxpr.invars:
            if _in_host(iv):
                inner.setdefault(iv, self.node(iv.aval.shape))
        self.run(body.jaxpr, inner, trips * body.trips, manual | {axis for axis, _ in body.manual})
        outs = [inner.get(v) if is_var(v) else None for v in body.jaxpr.outvars]
        for made, outer in zip(outs, eqn.outvars, strict=False):
            self.join([made, env.get(outer)])
        for made, carried in zip(outs, body.carried, strict=False):
            self.join([made, inner.get(carried)])

    # -- attribution and sums --------------------------------------------------------------------

    def summed(self, gradients: set[tuple[int, ...]]) -> HostTransfers:
        owners = {self.root(node): argument for node, argument in self.arguments.items()}
        shapes, axes = defaultdict(set), {}
        for node, shape in enumerate(self.shapes):
            shapes[self.root(node)].add(shape)
        # Fetched with a known sharding, or read by the host's cores: not an activation.
        streamed = {self.root(work.node) for work in self.works}
        for move in self.moves:
            root = self.root(move.node)
            if move.axes is not None:
                axes[root] = move.axes
                if move.kind == FROM_HOST:
                    streamed.add(root)
        axes |= {root: spec_axes(argument.sharding.spec) for root, argument in owners.items()}

        def sent(move: _Transfer, purpose: str, site: str = "") -> Communication:
            over = axes.get(self.root(move.node), self.activation_axes) - move.manual
            shards = math.prod(self.mesh[axis] for axis in over)
            elements, size, runs = move.aval.size, nbytes(move.aval), move.runs
            if size % shards:  # not divisible per run: the bytes of all runs together
                elements, size, runs = elements * runs, size * runs, 1
            return Communication(
                move.kind,
                (),
                size // shards,
                runs,
                "trace",
                dtypes_text([move.aval.dtype]),
                elements // shards,
                purpose=purpose,
                site=site,
            )

        def attributed(move: _Transfer) -> Communication:
            root = self.root(move.node)
            if argument := owners.get(root):
                return sent(move, argument.kind, argument.path)
            if move.node in self.host_io:
                return sent(move, HOST_UPDATE)
            gradient = root in streamed or shapes[root] & gradients
            return sent(move, GRADIENTS if gradient else ACTIVATIONS)

        read = ((owners.get(self.root(work.node)), work) for work in self.works)
        by_host = _sums((owner.path, sent(work, HOST_UPDATE)) for owner, work in read if owner)
        return HostTransfers(tuple(map(attributed, self.moves)), by_host, self.regions, self.flops)


def _same_values(v: Any, producers: Mapping[Any, Any]) -> Iterator[Any]:
    """A host value, and the values of which it is a reshape or copy."""
    yield v
    while (
        v in producers
        and producers[v].primitive.name in _SAME_VALUES
        and _in_host(producers[v].invars[0])
    ):
        v = producers[v].invars[0]
        yield v


def _in_host(atom: Any) -> bool:
    return getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host
