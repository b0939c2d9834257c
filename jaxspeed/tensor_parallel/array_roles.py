"""Array roles in a program: identity, trainability, and what the dims of a weight are."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import is_var
from jaxspeed.tensor_parallel.dim_equivalence import DimEquivalence, Node, Nodes
from jaxspeed.tensor_parallel.dim_propagation import Followed, Frame, loop_parts
from jaxspeed.tensor_parallel.dim_rules import results

LOOPS = ("scan", "while")
# The same numbers: what several weights multiply is one array, however it was cast or transposed.
VIEWS = ("convert_element_type", "reshape", "transpose", "squeeze", "copy", "name")


@dataclass(frozen=True)
class Array:
    """An array that an operation reads.

    Attributes:
      id: equal for one array and for views of it, wherever in the program it is read.
      shape, dtype: its sizes, and the dtype of its elements.
      classes: of its dims, each as the node that stands for the class; None where the size is 1.
      trained: whether it depends on a parameter, so that a gradient flows into it.
      parameters: those that it was made from, if from nothing else: then it is a weight.
      dims: for a weight, by its dim: the (parameter, dim) that it is the same index of.
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
class _Known:
    id: int
    trained: bool = False
    own: Nodes | None = None  # dims as the weight's own history ties them


class Reading:
    """Reads the arrays of a followed program.

    A class says which dims are cut together, and may hold two dims of one parameter. Which of the
    two a product sums over is told by how the weight was made from the parameter, so that alone is
    followed here, in classes of its own.
    """

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self._ids = itertools.count()
        self._by_frame: dict[int, dict[Any, _Known]] = {}
        self._own = DimEquivalence()
        self._parameters: dict[Node, set[tuple[str, int]]] = {}
        top = followed.top
        given = []
        for v in top.jaxpr.invars:
            made_from = top.sources(v)
            own = self._own.new(shape_of(v)) if made_from else None
            for path in made_from:
                for dim, node in enumerate(own or ()):
                    if node is not None:
                        self._parameters[node] = {(path, dim)}
            given.append(_Known(next(self._ids), bool(made_from), own))
        self._read(top, given)
        self._merge_parameters()

    def array(self, frame: Frame, atom: Any) -> Array:
        known, of = self._of(frame, atom), self.followed.classes.of
        shape = shape_of(atom)
        own = known.own or (None,) * len(shape)
        return Array(
            known.id,
            shape,
            atom.aval.dtype,
            tuple(None if node is None else of(node) for node in frame.of(atom)),
            known.trained,
            frame.sources(atom),
            tuple(self._dims_of(node) for node in own),
        )

    def id(self, frame: Frame, atom: Any) -> int:
        return self._of(frame, atom).id

    def trained(self, frame: Frame, atom: Any) -> bool:
        return self._of(frame, atom).trained

    def _of(self, frame: Frame, atom: Any) -> _Known:
        return self._by_frame[id(frame)][atom] if is_var(atom) else _Known(-1)

    def _dims_of(self, node: Node | None) -> frozenset[tuple[str, int]]:
        if node is None:
            return frozenset()
        return frozenset(self._parameters.get(self._own.of(node), ()))

    def _merge_parameters(self) -> None:
        """Every class's parameter dims, by the node that stands for it."""
        found: dict[Node, set[tuple[str, int]]] = {}
        for node, dims in self._parameters.items():
            found.setdefault(self._own.of(node), set()).update(dims)
        self._parameters = found

    def _read(self, frame: Frame, given: Sequence[_Known]) -> list[_Known]:
        known = self._by_frame[id(frame)] = dict(zip(frame.jaxpr.invars, given, strict=True))
        known.update((v, _Known(next(self._ids))) for v in frame.jaxpr.constvars)
        for position, eqn in enumerate(frame.jaxpr.eqns):
            read = [self._of(frame, v) for v in eqn.invars]
            inner = frame.inner.get(position)
            if inner is None:
                made = self._operation(frame, eqn, read)
            elif eqn.primitive.name in LOOPS:
                made = self._loop(inner[0], eqn, read)
            else:
                ways = [self._read(f, read[len(read) - len(f.jaxpr.invars) :]) for f in inner]
                made = [self._either(outs) for outs in zip(*ways, strict=True)]
            known.update(zip(eqn.outvars, made, strict=True))
        return [self._of(frame, v) for v in frame.jaxpr.outvars]

    def _operation(self, frame: Frame, eqn: Any, read: Sequence[_Known]) -> list[_Known]:
        trained = any(x.trained for x in read) and eqn.primitive.name != "stop_gradient"
        owns: Sequence[Nodes | None] = [None] * len(eqn.outvars)
        if any(frame.sources(v) for v in eqn.outvars):  # made of weights
            given = [x.own or (None,) * len(shape_of(v)) for x, v in zip(read, eqn.invars)]
            owns = results(eqn, given, self._own)
        view = eqn.primitive.name in VIEWS
        return [
            _Known(read[0].id if view else next(self._ids), trained and _is_real(v), own)
            for v, own in zip(eqn.outvars, owns, strict=True)
        ]

    def _loop(self, body: Frame, eqn: Any, read: Sequence[_Known]) -> list[_Known]:
        """Each trip reads other arrays. What is carried is trained if anything is."""
        trained = any(x.trained for x in read)
        inputs = read[len(read) - len(body.jaxpr.invars) :]
        consts, carry = loop_parts(eqn)
        given = []
        for i, (x, v) in enumerate(zip(inputs, body.jaxpr.invars, strict=True)):
            own = x.own if body.sources(v) else None
            if own is not None and i >= consts + carry:
                own = own[1:]  # one layer of a stack
            carried = trained and consts <= i < consts + carry
            given.append(_Known(next(self._ids), (x.trained or carried) and _is_real(v), own))
        self._read(body, given)
        return [_Known(next(self._ids), trained and _is_real(v)) for v in eqn.outvars]

    def _either(self, outs: Sequence[_Known]) -> _Known:
        if len(outs) == 1:
            return outs[0]
        return _Known(next(self._ids), any(x.trained for x in outs))


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _is_real(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)
