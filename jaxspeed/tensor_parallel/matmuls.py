"""The matrix products of a program: operands, contracted dims, and parameters.

A product is a `dot_general`, a convolution or a lookup in a table. A lookup is the product of the
ids, as one-hot rows, with the table: it sums over the dims that are indexed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxspeed.placement.apply_layer_specs import Use
from jaxspeed.tensor_parallel.array_roles import Array, Reading, shape_of
from jaxspeed.tensor_parallel.dim_equivalence import Node
from jaxspeed.tensor_parallel.dim_propagation import Followed, Frame

Dims = tuple[int, ...]
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
      free: dims of one operand and of the result.
      result, dtype: the result's shape, and the dtype of its elements.
      times: how often it runs in one pass.
    """

    kind: Literal["dot", "convolution", "lookup"]
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
        if (rule := _RULES.get(eqn.primitive.name)) and (product := rule(reading, frame, eqn))
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


def _others(rank: int, *taken: Sequence[int]) -> Dims:
    gone = {d for dims in taken for d in dims}
    return tuple(d for d in range(rank) if d not in gone)


def _dot(reading: Reading, frame: Frame, eqn: Any) -> Product:
    lhs, rhs = (reading.array(frame, v) for v in eqn.invars)
    contracted, shared = eqn.params["dimension_numbers"]
    result = shape_of(eqn.outvars[0])
    return Product(
        "dot",
        (lhs, rhs),
        (tuple(contracted[0]), tuple(contracted[1])),
        (tuple(shared[0]), tuple(shared[1])),
        (
            _others(len(lhs.shape), contracted[0], shared[0]),
            _others(len(rhs.shape), contracted[1], shared[1]),
        ),
        result,
        eqn.outvars[0].aval.dtype,
        frame.times,
    )


def _convolution(reading: Reading, frame: Frame, eqn: Any) -> Product | None:
    """Windows are neither contracted nor free: they are not cut."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] != 1:
        return None
    image, kernel = (reading.array(frame, v) for v in eqn.invars)
    samples, features = numbers.lhs_spec[:2]
    outputs, inputs = numbers.rhs_spec[:2]
    result, dtype = shape_of(eqn.outvars[0]), eqn.outvars[0].aval.dtype
    sides: tuple[Dims, Dims] = ((features,), (inputs if groups == 1 else outputs,))
    none: tuple[Dims, Dims] = ((), ())
    contracted, shared = (sides, none) if groups == 1 else (none, sides)
    free: tuple[Dims, Dims] = ((samples,), (outputs,) if groups == 1 else ())
    both = (image, kernel)
    return Product("convolution", both, contracted, shared, free, result, dtype, frame.times)


def _lookup(reading: Reading, frame: Frame, eqn: Any) -> Product | None:
    """None where the ids are constants: a table of positions is read as a whole, by every step."""
    if frame.is_weight(eqn.invars[1]):
        return None
    table, ids = (reading.array(frame, v) for v in eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shared = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    indexed = tuple(d for d in numbers.start_index_map if sizes[d] == 1)
    whole = tuple(
        d
        for d in _others(len(table.shape), shared[0], indexed)
        if sizes[d] == table.shape[d] and d not in numbers.collapsed_slice_dims
    )
    free = whole, _others(len(ids.shape) - 1, shared[1])
    result, dtype = shape_of(eqn.outvars[0]), eqn.outvars[0].aval.dtype
    return Product("lookup", (table, ids), (indexed, ()), shared, free, result, dtype, frame.times)


_RULES = {"dot_general": _dot, "conv_general_dilated": _convolution, "gather": _lookup}
