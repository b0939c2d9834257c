"""Array roles in a traced program: identity, trainability, and the parameter dims of a weight."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.jaxpr.frames import ForwardAnalysis
from jaxspeed.jaxpr.primitives import CASTS, RESHAPES
from jaxspeed.jaxpr.traverse import is_real, is_var, shape_of
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node, Nodes
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, PropagatedDims, tie_results

# Views: the operand of several matmuls counts as one array, however it was cast or transposed.
VIEWS = (*RESHAPES, "transpose", *CASTS, "name")


@dataclass(frozen=True)
class Operand:
    """An operand of an operation.

    Attributes:
      id: equal for one array and its views, anywhere in the program.
      shape: its sizes.
      dtype: of its elements.
      classes: of its dims, as representative nodes; None if the size is 1.
      trained: whether it depends on a parameter, so that it has a gradient.
      parameters: of a weight, those that it is computed from; otherwise empty.
      dims: of a weight, for each dim the (parameter, dim) pairs with the same index.
    """

    id: int
    shape: tuple[int, ...]
    dtype: Any
    classes: Nodes
    trained: bool
    parameters: frozenset[str]
    dims: tuple[frozenset[tuple[str, int]], ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _State:
    id: int
    trained: bool = False
    own: Nodes | None = None  # of a weight: nodes in the classes of weights alone


class ArrayRoles(ForwardAnalysis[_State]):
    """The roles of all arrays of a propagated program.

    A class of dims that are sharded together may have two dims of one parameter. Which of the two a
    matmul contracts depends on how the weight is computed from the parameter; so dims are also
    propagated through these computations alone, in separate classes.
    """

    def __init__(self, propagated: PropagatedDims) -> None:
        super().__init__()
        self.propagated = propagated
        self._ids = itertools.count()
        self._own = DimEquivalence()
        # By the representative node of a class: the parameter dims in it.
        self._parameters: defaultdict[Node, set[tuple[str, int]]] = defaultdict(set)
        top = propagated.top
        states, places = [], []
        for v in top.jaxpr.invars:
            made_from = top.sources(v)
            nodes = self._own.new(shape_of(v)) if made_from else None
            for path in made_from:
                places += [(node, (path, dim)) for dim, node in enumerate(nodes or ())]
            states.append(_State(next(self._ids), bool(made_from), nodes))
        self.run(top, states)
        for node, place in places:
            if node is not None:
                self._parameters[self._own.of(node)].add(place)

    def operand(self, frame: CallFrame, atom: Any) -> Operand:
        known, of = self.of(frame, atom), self.propagated.classes.of
        shape = shape_of(atom)
        nodes = known.own or (None,) * len(shape)
        return Operand(
            known.id,
            shape,
            atom.aval.dtype,
            tuple(None if node is None else of(node) for node in frame.of(atom)),
            known.trained,
            frame.sources(atom),
            tuple(self._dims_of(node) for node in nodes),
        )

    def _dims_of(self, node: Node | None) -> frozenset[tuple[str, int]]:
        return frozenset() if node is None else frozenset(self._parameters[self._own.of(node)])

    def constant(self, atom: Any) -> _State:
        return _State(next(self._ids) if is_var(atom) else -1)

    def operation(
        self, frame: CallFrame, position: int, operands: Sequence[_State]
    ) -> Sequence[_State]:
        eqn = frame.jaxpr.eqns[position]
        trained = any(x.trained for x in operands) and eqn.primitive.name != "stop_gradient"
        out_nodes: Sequence[Nodes | None] = [None] * len(eqn.outvars)
        if any(frame.sources(v) for v in eqn.outvars):  # weights
            in_nodes = [x.own or (None,) * len(shape_of(v)) for x, v in zip(operands, eqn.invars)]
            out_nodes = tie_results(eqn, in_nodes, self._own)
        view = eqn.primitive.name in VIEWS
        return [
            _State(operands[0].id if view else next(self._ids), trained and is_real(v), nodes)
            for v, nodes in zip(eqn.outvars, out_nodes, strict=True)
        ]

    def inputs(self, frame: CallFrame, operands: Sequence[_State]) -> Sequence[_State]:
        """Each trip of a loop reads other arrays. A carry is trained if any operand is."""
        states = super().inputs(frame, operands)
        if not frame.in_loop:
            return states
        trained = any(x.trained for x in operands)
        walked = frame.body.first_xs
        inside = []
        for i, (x, v) in enumerate(zip(states, frame.jaxpr.invars, strict=True)):
            nodes = x.own if frame.sources(v) else None
            if nodes is not None and i >= walked:
                nodes = nodes[1:]  # a layer of a stack
            carried = trained and frame.body.num_consts <= i < walked
            inside.append(_State(next(self._ids), (x.trained or carried) and is_real(v), nodes))
        return inside

    def results(
        self, inner: Sequence[CallFrame], operands: Sequence[_State], branches: Sequence[Any]
    ) -> Sequence[_State]:
        if inner[0].in_loop:
            trained = any(x.trained for x in operands)
            outs = inner[0].call.outvars
            return [_State(next(self._ids), trained and is_real(v)) for v in outs]
        return super().results(inner, operands, branches)

    def joined(self, states: Sequence[_State]) -> _State:
        if len(states) == 1:
            return states[0]
        return _State(next(self._ids), any(x.trained for x in states))
