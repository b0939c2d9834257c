"""The matmuls of a traced program: operands, contracted dims, and parameters.

Convolutions and table lookups count as matmuls. A lookup is the matmul of the ids, as one-hot rows,
with the table: it contracts the dims that are indexed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.jaxpr.flops import count_products
from jaxspeed.jaxpr.traverse import shape_of
from jaxspeed.placement.apply_layer_specs import Use
from jaxspeed.tensor_parallel.array_roles import ArrayRoles, Operand
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, PropagatedDims, relations_of

Dims = tuple[int, ...]
Kind = Literal["dot", "convolution", "lookup"]
Role = Literal["contracted", "shared", "free"]


@dataclass(frozen=True)
class Matmul:
    """One matmul of two operands; a lookup's are its table and its ids.

    Attributes:
      kind: its primitive.
      operands: its two operands.
      contracted: for each operand, its contracted dims.
      shared: dims of both operands and of the result: batch dims, the channels of a depthwise
        convolution.
      free: dims of one operand and of the result. The window dims of a convolution have no role:
        they are not sharded.
      result: shape of the result.
      dtype: of the result.
      times: runs per pass.
      flops: of one run; 0 of a lookup.
    """

    kind: Kind
    operands: tuple[Operand, Operand]
    contracted: tuple[Dims, Dims]
    shared: tuple[Dims, Dims]
    free: tuple[Dims, Dims]
    result: tuple[int, ...]
    dtype: Any
    times: int
    flops: int

    def classes(self, role: Role, operand: int) -> frozenset[Node]:
        """The classes of an operand's dims that have this role."""
        nodes = self.operands[operand].classes
        return frozenset(n for d in getattr(self, role)[operand] if (n := nodes[d]) is not None)

    @property
    def weights(self) -> Iterator[int]:
        """The positions of the operands that are weights."""
        return (i for i, x in enumerate(self.operands) if x.parameters)


def matmuls_of(propagated: PropagatedDims, arrays: ArrayRoles | None = None) -> list[Matmul]:
    """Every matmul of the program, once per call of its function."""
    arrays = arrays or ArrayRoles(propagated)
    return [
        matmul
        for frame, _, eqn in propagated.top.equations()
        if eqn.primitive.name in _KINDS and (matmul := _matmul(arrays, frame, eqn))
    ]


def uses_of(propagated: PropagatedDims, matmuls: Sequence[Matmul] | None = None) -> dict[str, Use]:
    """Contracted and free dims of each parameter in matmuls and convolutions, for layer specs.

    If a parameter is read by several, the first one decides the role of a dim.
    """
    uses: dict[str, Use] = {}
    for matmul in matmuls_of(propagated) if matmuls is None else matmuls:
        if matmul.kind == "lookup":
            continue
        for i in matmul.weights:
            for path in sorted(matmul.operands[i].parameters):
                use = Use(*(_dims(matmul, i, role, path) for role in ("contracted", "free")))
                known = uses.get(path, Use((), ()))
                decided = {*known.contracted, *known.free}
                uses[path] = replace(
                    known,
                    contracted=known.contracted + _without(use.contracted, decided),
                    free=known.free + _without(use.free, decided),
                )
    return uses


def _dims(matmul: Matmul, operand: int, role: str, path: str) -> Dims:
    """The dims of a parameter that have this role in a matmul."""
    dims = matmul.operands[operand].dims
    role_dims = {d for at in getattr(matmul, role)[operand] for p, d in dims[at] if p == path}
    return tuple(sorted(role_dims))


def _without(dims: Dims, decided: set[int]) -> Dims:
    return tuple(d for d in dims if d not in decided)


def _matmul(arrays: ArrayRoles, frame: CallFrame, eqn: Any) -> Matmul | None:
    """The matmul of an equation, or None.

    None for a convolution with batch groups, which only gradients have, and for a lookup with
    constant ids: every step reads all of a table of positions.
    """
    kind, relations = _KINDS[eqn.primitive.name], relations_of(eqn)
    if eqn.params.get("batch_group_count", 1) != 1 or relations is None:
        return None
    if kind == "lookup" and frame.is_weight(eqn.invars[1]):
        return None
    lhs, rhs = (arrays.operand(frame, v) for v in eqn.invars)
    contracted, shared, free = (
        (role(0), role(1)) for role in (relations.reduced, relations.shared, relations.free)
    )
    (out,) = eqn.outvars
    roles = contracted, shared, free
    result, flops = (shape_of(out), out.aval.dtype), count_products(eqn)
    return Matmul(kind, (lhs, rhs), *roles, *result, frame.times, flops)


_KINDS: dict[str, Kind] = {
    "dot_general": "dot",
    "conv_general_dilated": "convolution",
    "gather": "lookup",
}
