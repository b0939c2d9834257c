"""Attention over sequences that the `seq` axis of the mesh shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.axes import SEQ
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.free_axes import free_axes

Kind = Literal["gather", "ulysses", "ring", "both"]
Layout = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceForm:
    """How one attention runs over the axis.

    Attributes:
      layout: the order of the tokens. Contiguous: device r of P has the r-th part. Zig-zag: of 2 P
        chunks device r has chunks r and 2 P - 1 - r, and all arrays are permuted so.
      ulysses: for "both", the size of the groups that exchange heads; the ring has P / ulysses.
    """

    kind: Kind
    layout: Layout = "contiguous"
    ulysses: int = 1


def over_sequence(
    form: AttentionForm, how: SequenceForm, body: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """The attention `body(*operands)` of global arrays, over the free `seq` axis of the mesh."""
    if free_axes().get(SEQ, 1) == 1:
        return body(*operands)

    def sharded(x: jax.Array, entry: Any) -> jax.Array:
        spec = [P.UNCONSTRAINED, entry, *[P.UNCONSTRAINED] * (x.ndim - 2)]
        mesh = jax.sharding.get_abstract_mesh()
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    q, k, v, *others = operands
    q, k, v = sharded(q, SEQ), sharded(k, None), sharded(v, None)
    return sharded(body(q, k, v, *others), SEQ)
