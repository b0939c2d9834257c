"""One attention as one equation of a traced program, for meshes with a sequence axis.

`ops.attention` writes it, and so does the pass that recognizes attention in a model's own code
(`sequence_parallel/`). Its program is plain code, the model's own where it was recognized, which
defines the numbers; all analyses of traced programs read that. The pass that shards the sequence
replaces the equation by a form that communicates over the axis. Wherever it is not replaced, its
program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxspeed.jaxpr.primitives import ATTENTION
from jaxspeed.ops.mask import Mask

# The named scope of attention over the sequence axis, in the names of its collectives.
SEQUENCE_SCOPE = "sequence_attention"

# The result of a query that sees no key: undefined; the mean of all values (a finite fill); NaN.
Blind = Literal["undefined", "mean", "nan"]


@dataclass(frozen=True)
class AttentionForm:
    """What is known of one attention. Its operands are q, k, v, then those that it names, in order.

    q is [batch, seq, heads, head_dim], k and v are [batch, kv_seq, kv_heads, head_dim], and the
    result is like q with the dims of v, as in `ops.attention`.

    Attributes:
      scale, soft_cap, mask: as in `ops.attention`. The mask is that of tokens in their order.
      segments: whether the ids of queries [batch, seq] and keys [batch, kv_seq] are operands.
      sinks: whether sinks [heads] are an operand.
      blind: the result of a query that sees no key.
      zigzag: whether the operands and the result have their tokens in zig-zag order
        (`ops.token_order`), over the devices of the sequence axis.
      rows: None if the above describes the attention completely, so that a kernel may compute it.
        Otherwise only its own program does, from blocks of queries and all keys: the other operands
        are any arrays, and for each of them this has the dim that belongs to the queries, or None.
    """

    scale: float
    mask: Mask
    soft_cap: float | None = None
    segments: bool = False
    sinks: bool = False
    blind: Blind = "undefined"
    zigzag: bool = False
    rows: tuple[int | None, ...] | None = None


attention_p = Primitive(ATTENTION)


def attention_call(
    form: AttentionForm, body: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """`body(*operands)` as one equation; `form` describes it."""
    closed = jax.make_jaxpr(body)(*operands)
    return attention_p.bind(*operands, jaxpr=closed, form=form)


def form_of(eqn: Any) -> AttentionForm | None:
    """The form of an attention, None of other equations."""
    return eqn.params["form"] if eqn.primitive.name == ATTENTION else None


def body_of(eqn: Any) -> Callable[..., jax.Array]:
    """The plain code of an attention, as a function of its operands."""
    return _plain(eqn.params["jaxpr"])


def _plain(jaxpr: ClosedJaxpr) -> Callable[..., jax.Array]:
    function = jaxpr_as_fun(jaxpr)

    def run(*operands: jax.Array) -> jax.Array:
        (out,) = function(*operands)
        return out

    return run


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, form: AttentionForm
) -> tuple[Any, Any]:
    dense_tangents = [ad.instantiate_zeros(t) if isinstance(t, ad.Zero) else t for t in tangents]
    return jax.jvp(_plain(jaxpr), tuple(primals), tuple(dense_tangents))


def _batch(args: Any, dims: Any, *, jaxpr: ClosedJaxpr, form: AttentionForm) -> tuple[Any, int]:
    return jax.vmap(_plain(jaxpr), in_axes=tuple(dims))(*args), 0


attention_p.def_impl(lambda *args, jaxpr, form: jax.jit(_plain(jaxpr))(*args))
attention_p.def_abstract_eval(lambda *args, jaxpr, form: jaxpr.out_avals[0])
ad.primitive_jvps[attention_p] = _differentiate
batching.primitive_batchers[attention_p] = _batch
mlir.register_lowering(
    attention_p,
    mlir.lower_fun(lambda *args, jaxpr, form: _plain(jaxpr)(*args), multiple_results=False),
)
