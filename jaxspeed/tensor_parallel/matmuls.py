"""The matrix products of a program: operands, contracted dims, and parameters.

A product is a `dot_general`, a convolution or a lookup in a table. A lookup is the product of the
ids, as one-hot rows, with the table: it sums over the dims that are indexed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.placement.apply_layer_specs import Use
from jaxspeed.tensor_parallel.array_roles import Array, Reading
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import Followed, Frame, relations_of, shape_of

Dims = tuple[int, ...]
Kind = Literal["dot", "convolution", "lookup"]
Role = Literal["contracted", "shared", "free"]


@dataclass(frozen=True)
class Product:
    """One product of two operands; a lookup's are its table and its ids.

    Attributes:
      kind: what it is.
      operands: what it reads.
      contracted: for each operand, its dims that are summed over.
      shared: dims of both operands and of the result: batch dims, the channels of a depthwise
        convolution.
      free: dims of one operand and of the result. The windows of a convolution, along which it
        mixes, have no role: they are not cut.
      result, dtype: the result's shape, and the dtype of its elements.
      times: how often it runs in one pass.
    """

    kind: Kind
    operands: tuple[Array, Array]
    contracted: tuple[Dims, Dims]
    shared: tuple[Dims, Dims]
    free: tuple[Dims, Dims]
    result: tuple[int, ...]
    dtype: Any
    times: int

    def classes(self, role: Role, operand: int) -> frozenset[Node]:
        """The classes of an operand's dims that have this role."""
        nodes = self.operands[operand].classes
        return frozenset(n for d in getattr(self, role)[operand] if (n := nodes[d]) is not None)

    @property
    def weights(self) -> Iterator[int]:
        """The positions of the operands that are weights."""
        return (i for i, x in enumerate(self.operands) if x.parameters)


def products(followed: Followed, reading: Reading | None = None) -> list[Product]:
    """Every product of the program, once for each place that it is called from."""
    reading = reading or Reading(followed)
    return [
        product
        for frame in followed.frames()
        for eqn in frame.jaxpr.eqns
        if eqn.primitive.name in _KINDS and (product := _product(reading, frame, eqn))
    ]


def uses_of(followed: Followed, found: Sequence[Product] | None = None) -> dict[str, Use]:
    """How each parameter stands in the dot products and convolutions, for layer specs.

    Of a parameter that stands in several, a dim is contracted where it is first read so.
    """
    uses: dict[str, Use] = {}
    for product in products(followed) if found is None else found:
        if product.kind == "lookup":
            continue
        for i in product.weights:
            for path in sorted(product.operands[i].parameters):
                use = Use(*(_dims(product, i, role, path) for role in ("contracted", "free")))
                known = uses.get(path, Use((), ()))
                told = {*known.contracted, *known.free}
                uses[path] = replace(
                    known,
                    contracted=known.contracted + _but(use.contracted, told),
                    free=known.free + _but(use.free, told),
                )
    return uses


def _dims(product: Product, operand: int, role: str, path: str) -> Dims:
    """The dims of a parameter that have this role in a product with it."""
    dims = product.operands[operand].dims
    found = {d for at in getattr(product, role)[operand] for p, d in dims[at] if p == path}
    return tuple(sorted(found))


def _but(dims: Dims, told: set[int]) -> Dims:
    return tuple(d for d in dims if d not in told)


def _product(reading: Reading, frame: Frame, eqn: Any) -> Product | None:
    """None of a gradient's convolution by groups of samples, which no loss has; and of a lookup
    whose ids are constants: a table of positions is read as a whole, by every step."""
    kind, found = _KINDS[eqn.primitive.name], relations_of(eqn)
    if eqn.params.get("batch_group_count", 1) != 1 or found is None:
        return None
    if kind == "lookup" and frame.is_weight(eqn.invars[1]):
        return None
    lhs, rhs = (reading.array(frame, v) for v in eqn.invars)
    contracted, shared, free = (
        (role(0), role(1)) for role in (found.reduced, found.shared, found.free)
    )
    (out,) = eqn.outvars
    roles = contracted, shared, free
    return Product(kind, (lhs, rhs), *roles, shape_of(out), out.aval.dtype, frame.times)


_KINDS: dict[str, Kind] = {
    "dot_general": "dot",
    "conv_general_dilated": "convolution",
    "gather": "lookup",
}
