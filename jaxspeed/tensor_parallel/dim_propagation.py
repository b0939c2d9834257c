"""Dim propagation through a traced program, into every jit, scan, cond and checkpoint.

Dims that an operation relates (`jaxpr.dim_relations`) are tied. If it needs all of a dim, or mixes
along it, the dim ends there: the compiler has to gather a sharded one. An operation without a rule
is element-wise if its shapes allow it, and ties nothing otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspeed.jaxpr.dim_relations import RULES, DimRelations, relations, same_place
from jaxspeed.jaxpr.frames import ForwardAnalysis, Frame
from jaxspeed.jaxpr.primitives import KERNELS, MANUAL_REGION, OPAQUE_TO_DIMS
from jaxspeed.jaxpr.traverse import (
    Body,
    equations,
    is_var,
    product_of,
    shape_of,
    transparent_bodies,
)
from jaxspeed.jaxpr.weight_uses import Origins, of_inputs
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node, Nodes

# Kernels are not looked into; the other branch is a plain form (ops.attention).
OPAQUE = (MANUAL_REGION, *KERNELS)


@dataclass(eq=False)
class CallFrame(Frame):
    """A call, with what is known of its values by two analyses: their weights, and their dims."""

    # By the position of an equation without inner programs: (operand, dim) of the dims whose class
    # is in none of its results, and (result, dim) of those whose class is in no operand.
    ended: dict[int, list[tuple[int, int]]] = field(init=False, default_factory=dict)
    began: dict[int, list[tuple[int, int]]] = field(init=False, default_factory=dict)
    weights: Origins = field(kw_only=True)
    dims: ForwardAnalysis[Nodes] = field(kw_only=True)

    def entered(self, eqn: Any) -> list[Body]:
        """Of branches those without kernels, if there are any."""
        branches = super().entered(eqn)
        if len(branches) > 1:
            branches = [body for body in branches if not has_opaque(body.jaxpr)] or branches
        return branches

    @property
    def nodes(self) -> Mapping[Any, Nodes]:
        return self.dims.states[self]

    def of(self, atom: Any) -> Nodes:
        return self.dims.of(self, atom)

    def sources(self, atom: Any) -> frozenset[str]:
        """The parameters that a weight is computed from; empty if it depends on the batch."""
        return self.weights.of(self, atom) or frozenset()

    def is_weight(self, atom: Any) -> bool:
        """Whether an atom depends only on parameters and constants."""
        return self.weights.of(self, atom) is not None


@dataclass(frozen=True)
class PropagatedDims:
    """A traced program with the equivalence classes of its dims."""

    classes: DimEquivalence
    top: CallFrame
    parameters: Mapping[str, Nodes]
    samples: Node | None = None  # of the first dims of the batch

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
    frame = CallFrame(jaxpr, weights=Origins(), dims=_Propagation(classes))
    frame.weights.run(frame, of_inputs(jaxpr, paths))
    operands = [classes.new(shape_of(v)) for v in jaxpr.invars]
    by_var = dict(zip(jaxpr.invars, operands, strict=True))
    samples = [nodes[0] for v in batch if (nodes := by_var.get(v)) and nodes[0] is not None]
    for node in samples[1:]:
        classes.tie(samples[0], node)
    frame.dims.run(frame, operands)
    nodes = {path: by_var[v] for path, v in parameters.items()}
    return PropagatedDims(classes, frame, nodes, samples[0] if samples else None)


def tie_results(eqn: Any, operands: Sequence[Nodes], classes: DimEquivalence) -> list[Nodes]:
    """The nodes of an operation's results, tied to those of its operands."""
    outs = [classes.new(shape_of(v)) for v in eqn.outvars]
    eqn_relations = relations_of(eqn)
    if eqn_relations is None:
        return outs
    first: dict[int, Node] = {}  # by factor
    for nodes, factors in zip(
        (*operands, *outs), (*eqn_relations.operands, *eqn_relations.results), strict=True
    ):
        for node, factor in zip(nodes, factors, strict=True):
            if node is not None and factor is not None and factor not in eqn_relations.mixed:
                classes.tie(first.setdefault(factor, node), node)
    for factor, groups in eqn_relations.groups.items():
        classes.add_groups(first.get(factor), groups)
    return outs


def relations_of(eqn: Any) -> DimRelations | None:
    """The dim relations of an operation; None if it has no rule and is not element-wise."""
    in_shapes, out_shapes = [shape_of(v) for v in eqn.invars], [shape_of(v) for v in eqn.outvars]
    like = product_of(eqn) or eqn
    known = relations(like.primitive.name, like.params, in_shapes, out_shapes)
    return same_place(in_shapes, out_shapes) if known is None and is_elementwise(eqn) else known


def is_elementwise(eqn: Any) -> bool:
    """Whether it has no rule, and equal shapes except for scalars and dims of size 1."""
    name = eqn.primitive.name
    if name in RULES or name in OPAQUE_TO_DIMS or not eqn.outvars:
        return False
    in_shapes, out_shapes = [shape_of(v) for v in eqn.invars], {shape_of(v) for v in eqn.outvars}
    if len(out_shapes) != 1:
        return False
    (out,) = out_shapes
    return all(
        not shape or (len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out)))
        for shape in in_shapes
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


class _Propagation(ForwardAnalysis[Nodes]):
    def __init__(self, classes: DimEquivalence) -> None:
        super().__init__()
        self.classes = classes

    def constant(self, atom: Any) -> Nodes:
        shape = shape_of(atom)
        return self.classes.new(shape) if is_var(atom) else (None,) * len(shape)

    def operation(
        self, frame: CallFrame, position: int, operands: Sequence[Nodes]
    ) -> Sequence[Nodes]:
        outs = tie_results(frame.jaxpr.eqns[position], operands, self.classes)
        if ended := _missing(operands, outs, self.classes):
            frame.ended[position] = ended
        if began := _missing(outs, operands, self.classes):
            frame.began[position] = began
        return outs

    def inputs(self, frame: CallFrame, operands: Sequence[Nodes]) -> Sequence[Nodes]:
        """A loop slices what it scans; its condition is skipped, whose result is a scalar."""
        body_inputs = list(super().inputs(frame, operands))
        if frame.in_loop:
            walked = frame.body.first_xs
            body_inputs[walked:] = [nodes[1:] for nodes in body_inputs[walked:]]
        return body_inputs

    def results(
        self, inner: Sequence[CallFrame], operands: Sequence[Nodes], branches: Sequence[Any]
    ) -> Sequence[Nodes]:
        frame, (outs, *others) = inner[0], branches
        for other in others:
            for a, b in zip(outs, other, strict=True):
                self.classes.tie_all(a, b)
        if frame.in_loop:
            carry = frame.body.num_carry
            for a, b in zip(outs[:carry], operands[frame.body.first + frame.body.num_consts :]):
                self.classes.tie_all(a, b)
            stacked = zip(frame.call.outvars[carry:], outs[carry:], strict=True)
            outs[carry:] = [(self.classes.new(shape_of(v)[:1])[0], *o) for v, o in stacked]
        return outs


def has_opaque(jaxpr: Any) -> bool:
    """Whether a function runs a kernel or a manual region, whose dims are not propagated."""
    every = equations(jaxpr.eqns, transparent_bodies)
    return any(eqn.primitive.name in OPAQUE for eqn in every)
