"""Dim propagation through a traced program, into every jit, scan, cond and checkpoint.

Dims that an operation relates (`jaxpr.dim_relations`) are tied. If it needs all of a dim, or mixes
along it, the dim ends there: the compiler has to gather a sharded one. An operation without a rule
is element-wise if its shapes allow it, and ties nothing otherwise.

A function is propagated through once per call, so that two layers that share one traced `relu` do
not share their dims.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.jaxpr.dim_relations import RULES, DimRelations, relations, same_place
from jaxspeed.jaxpr.primitives import KERNELS, LOOPS, MANUAL_REGION, OPAQUE_TO_DIMS
from jaxspeed.jaxpr.rewriter import Rewriting
from jaxspeed.jaxpr.traverse import is_var, product_of, shape_of, transparent_bodies
from jaxspeed.jaxpr.weight_uses import Origin, origins
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node, Nodes

# Kernels are not looked into; the other branch is a plain form (ops.attention).
OPAQUE = (MANUAL_REGION, *KERNELS)


@dataclass
class CallFrame:
    """One call of a function of the program."""

    jaxpr: Any
    times: int  # runs per pass: the product of the trips of the enclosing scans
    weights: Rewriting[Origin]  # which values depend only on parameters and constants
    nodes: dict[Any, Nodes] = field(default_factory=dict)
    inner: dict[int, list["CallFrame"]] = field(default_factory=dict)  # by an equation's position
    # By the position of an equation without inner programs: (operand, dim) of the dims whose class
    # is in none of its results, and (result, dim) of those whose class is in no operand.
    ended: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    began: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def of(self, atom: Any) -> Nodes:
        if is_var(atom):
            return self.nodes[atom]
        return (None,) * len(getattr(atom.aval, "shape", ()))

    def sources(self, atom: Any) -> frozenset[str]:
        """The parameters that a weight is computed from; empty if it depends on the batch."""
        return self.weights.state(atom) or frozenset()

    def is_weight(self, atom: Any) -> bool:
        """Whether an atom depends only on parameters and constants."""
        return self.weights.state(atom) is not None

    def walk(self) -> Iterator["CallFrame"]:
        """This frame and all frames inside it."""
        yield self
        for frames in self.inner.values():
            for frame in frames:
                yield from frame.walk()


@dataclass(frozen=True)
class PropagatedDims:
    """A traced program with the equivalence classes of its dims."""

    classes: DimEquivalence
    top: CallFrame
    parameters: Mapping[str, Nodes]
    samples: Node | None = None  # of the first dims of the batch

    def frames(self) -> Iterator[CallFrame]:
        return self.top.walk()

    def is_sample(self, node: Node | None) -> bool:
        """Whether a dim is that of the batch's samples."""
        return self.classes.same(node, self.samples)


def propagate_dims(
    jaxpr: Any, parameters: Mapping[str, Any], batch: Iterable[Any] = ()
) -> PropagatedDims:
    """Propagate the dims of a program; `parameters` are its variables by path.

    `batch` are the variables whose first dims are samples, which are one class.
    """
    classes = DimEquivalence()
    paths = {v: path for path, v in parameters.items()}
    frame = CallFrame(jaxpr, 1, origins(jaxpr, paths))
    operands = [classes.new(shape_of(v)) for v in jaxpr.invars]
    by_var = dict(zip(jaxpr.invars, operands, strict=True))
    samples = [nodes[0] for v in batch if (nodes := by_var.get(v)) and nodes[0] is not None]
    for node in samples[1:]:
        classes.tie(samples[0], node)
    _walk(frame, operands, classes)
    nodes = {path: by_var[v] for path, v in parameters.items()}
    return PropagatedDims(classes, frame, nodes, samples[0] if samples else None)


def tie_results(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """The nodes of an operation's results, tied to those of its operands."""
    outs = [classes.new(shape_of(v)) for v in eqn.outvars]
    found = relations_of(eqn)
    if found is None:
        return outs
    first: dict[int, Node] = {}  # by factor
    for nodes, factors in zip((*operands, *outs), (*found.operands, *found.results), strict=True):
        for node, factor in zip(nodes, factors, strict=True):
            if node is not None and factor is not None and factor not in found.mixed:
                classes.tie(first.setdefault(factor, node), node)
    for factor, groups in found.groups.items():
        classes.add_groups(first.get(factor), groups)
    return outs


def relations_of(eqn: Any) -> DimRelations | None:
    """The dim relations of an operation; None if it has no rule and is not element-wise."""
    given, made = [shape_of(v) for v in eqn.invars], [shape_of(v) for v in eqn.outvars]
    like = product_of(eqn) or eqn
    known = relations(like.primitive.name, like.params, given, made)
    return same_place(given, made) if known is None and is_elementwise(eqn) else known


def is_elementwise(eqn: Any) -> bool:
    """Whether it has no rule, and equal shapes except for scalars and dims of size 1."""
    name = eqn.primitive.name
    if name in RULES or name in OPAQUE_TO_DIMS or not eqn.outvars:
        return False
    given, made = [shape_of(v) for v in eqn.invars], {shape_of(v) for v in eqn.outvars}
    if len(made) != 1:
        return False
    (out,) = made
    return all(
        not shape or (len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out)))
        for shape in given
    )


def _missing(
    these: Sequence[Nodes], those: Sequence[Nodes], classes: DimEquivalence
) -> list[tuple[int, int]]:
    """(variable, dim) of the nodes of `these` whose class is not among `those`."""
    there = {classes.of(node) for nodes in those for node in nodes if node is not None}
    return [
        (i, dim)
        for i, nodes in enumerate(these)
        for dim, node in enumerate(nodes)
        if node is not None and classes.of(node) not in there
    ]


def _walk(frame: CallFrame, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """Fill a frame from its inputs; return the nodes of its outputs."""
    jaxpr = frame.jaxpr
    frame.nodes.update((v, classes.new(shape_of(v))) for v in jaxpr.constvars)
    frame.nodes.update(zip(jaxpr.invars, operands, strict=True))
    for position, eqn in enumerate(jaxpr.eqns):
        given = [frame.of(v) for v in eqn.invars]
        if transparent_bodies(eqn):
            outs = _through(frame, position, given, classes)
        else:
            outs = tie_results(eqn, given, classes)
            if ended := _missing(given, outs, classes):
                frame.ended[position] = ended
            if began := _missing(outs, given, classes):
                frame.began[position] = began
        frame.nodes.update(zip(eqn.outvars, outs, strict=True))
    return [frame.of(v) for v in jaxpr.outvars]


def _through(
    frame: CallFrame, position: int, given: Sequence[Nodes], classes: DimEquivalence
) -> list[Nodes]:
    """The nodes of the results of an equation with inner programs.

    A loop's condition is skipped: its result is a scalar.
    """
    eqn = frame.jaxpr.eqns[position]
    pairs = list(zip(transparent_bodies(eqn), frame.weights.inner[position], strict=True))
    if len(pairs) > 1:  # branches without kernels, if there are any
        pairs = [pair for pair in pairs if not has_opaque(pair[0].jaxpr)] or pairs
    frames = [CallFrame(b.jaxpr, frame.times * b.trips, weights) for b, weights in pairs]
    frame.inner[position] = frames
    first, _ = pairs[0]
    loop = first if eqn.primitive.name in LOOPS else None
    operands = list(given[first.first :])
    if loop:
        walked = loop.num_consts + loop.num_carry
        operands[walked:] = [nodes[1:] for nodes in operands[walked:]]
    outs, *others = [_walk(inner, operands, classes) for inner in frames]
    for other in others:
        for a, b in zip(outs, other, strict=True):
            classes.tie_all(a, b)
    if loop:
        for a, b in zip(outs[: loop.num_carry], operands[loop.num_consts :], strict=False):
            classes.tie_all(a, b)
        stacked = zip(eqn.outvars[loop.num_carry :], outs[loop.num_carry :])
        outs[loop.num_carry :] = [(classes.new(shape_of(v)[:1])[0], *o) for v, o in stacked]
    return outs


def has_opaque(jaxpr: Any) -> bool:
    """Whether a function runs a kernel or a manual region, whose dims are not propagated."""
    return any(
        eqn.primitive.name in OPAQUE
        or any(has_opaque(body.jaxpr) for body in transparent_bodies(eqn))
        for eqn in jaxpr.eqns
    )
