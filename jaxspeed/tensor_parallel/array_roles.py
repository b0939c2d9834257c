"""Array roles in a traced program: identity, trainability, and the parameter dims of a weight."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxspeed.jaxpr.primitives import CASTS, LOOPS, RESHAPES
from jaxspeed.jaxpr.traverse import consts_and_carry, is_real, is_var, shape_of
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


class ArrayRoles:
    """The roles of all arrays of a propagated program.

    A class of dims that are sharded together may have two dims of one parameter. Which of the two a
    matmul contracts depends on how the weight is computed from the parameter; so dims are also
    propagated through these computations alone, in separate classes.
    """

    def __init__(self, propagated: PropagatedDims) -> None:
        self.propagated = propagated
        self._ids = itertools.count()
        self._by_frame: dict[int, dict[Any, _State]] = {}
        self._own = DimEquivalence()
        self._parameters: dict[Node, set[tuple[str, int]]] = {}
        top = propagated.top
        given = []
        for v in top.jaxpr.invars:
            made_from = top.sources(v)
            own = self._own.new(shape_of(v)) if made_from else None
            for path in made_from:
                for dim, node in enumerate(own or ()):
                    if node is not None:
                        self._parameters[node] = {(path, dim)}
            given.append(_State(next(self._ids), bool(made_from), own))
        self._read(top, given)
        self._merge_parameters()

    def operand(self, frame: CallFrame, atom: Any) -> Operand:
        known, of = self._of(frame, atom), self.propagated.classes.of
        shape = shape_of(atom)
        own = known.own or (None,) * len(shape)
        return Operand(
            known.id,
            shape,
            atom.aval.dtype,
            tuple(None if node is None else of(node) for node in frame.of(atom)),
            known.trained,
            frame.sources(atom),
            tuple(self._dims_of(node) for node in own),
        )

    def id(self, frame: CallFrame, atom: Any) -> int:
        return self._of(frame, atom).id

    def trained(self, frame: CallFrame, atom: Any) -> bool:
        return self._of(frame, atom).trained

    def _of(self, frame: CallFrame, atom: Any) -> _State:
        return self._by_frame[id(frame)][atom] if is_var(atom) else _State(-1)

    def _dims_of(self, node: Node | None) -> frozenset[tuple[str, int]]:
        if node is None:
            return frozenset()
        return frozenset(self._parameters.get(self._own.of(node), ()))

    def _merge_parameters(self) -> None:
        """Merge the parameter dims of each class under its representative node."""
        found: dict[Node, set[tuple[str, int]]] = {}
        for node, dims in self._parameters.items():
            found.setdefault(self._own.of(node), set()).update(dims)
        self._parameters = found

    def _read(self, frame: CallFrame, given: Sequence[_State]) -> list[_State]:
        known = self._by_frame[id(frame)] = dict(zip(frame.jaxpr.invars, given, strict=True))
        known.update((v, _State(next(self._ids))) for v in frame.jaxpr.constvars)
        for position, eqn in enumerate(frame.jaxpr.eqns):
            read = [self._of(frame, v) for v in eqn.invars]
            inner = frame.inner.get(position)
            if inner is None:
                made = self._operation(frame, eqn, read)
            elif eqn.primitive.name in LOOPS:
                made = self._loop(inner[0], eqn, read)
            else:
                branches = [self._read(f, read[len(read) - len(f.jaxpr.invars) :]) for f in inner]
                made = [self._either(outs) for outs in zip(*branches, strict=True)]
            known.update(zip(eqn.outvars, made, strict=True))
        return [self._of(frame, v) for v in frame.jaxpr.outvars]

    def _operation(self, frame: CallFrame, eqn: Any, read: Sequence[_State]) -> list[_State]:
        trained = any(x.trained for x in read) and eqn.primitive.name != "stop_gradient"
        owns: Sequence[Nodes | None] = [None] * len(eqn.outvars)
        if any(frame.sources(v) for v in eqn.outvars):  # weights
            given = [x.own or (None,) * len(shape_of(v)) for x, v in zip(read, eqn.invars)]
            owns = tie_results(eqn, given, self._own)
        view = eqn.primitive.name in VIEWS
        return [
            _State(read[0].id if view else next(self._ids), trained and is_real(v), own)
            for v, own in zip(eqn.outvars, owns, strict=True)
        ]

    def _loop(self, body: CallFrame, eqn: Any, read: Sequence[_State]) -> list[_State]:
        """Each trip reads other arrays. A carry is trained if any operand is."""
        trained = any(x.trained for x in read)
        inputs = read[len(read) - len(body.jaxpr.invars) :]
        consts, carry = consts_and_carry(eqn)
        given = []
        for i, (x, v) in enumerate(zip(inputs, body.jaxpr.invars, strict=True)):
            own = x.own if body.sources(v) else None
            if own is not None and i >= consts + carry:
                own = own[1:]  # a layer of a stack
            carried = trained and consts <= i < consts + carry
            given.append(_State(next(self._ids), (x.trained or carried) and is_real(v), own))
        self._read(body, given)
        return [_State(next(self._ids), trained and is_real(v)) for v in eqn.outvars]

    def _either(self, outs: Sequence[_State]) -> _State:
        if len(outs) == 1:
            return outs[0]
        return _State(next(self._ids), any(x.trained for x in outs))
