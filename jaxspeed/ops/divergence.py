"""Divergence of the distributions that two heads give each token, in chunks of the vocabulary.

With the softmaxes s of the student and t of the teacher, and their mixture m:

    m = (1 - beta) s + beta t
    D = beta KL(t || m) + (1 - beta) KL(s || m)

is the generalized Jensen-Shannon divergence (Agarwal et al., arXiv:2306.13649). Both of its limits
are 0, so that beta 0 stands for the forward KL(t || s), and beta 1 for the reverse KL(s || t). The
gradient of the student's logit l_v is s_v (g_v - sum_w s_w g_w), where g_v is
(1 - beta) log(s_v / m_v) or, for beta 1, log(s_v / t_v); for beta 0 it is s_v - t_v.

The chunks are scanned twice, first for the log-sum-exps of both heads, and once in the backward
pass, which recomputes their logits. The vocabulary is sharded as in `vocabulary_parallel`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspeed.errors import ModelError
from jaxspeed.ops.free_axes import vocabulary_parts
from jaxspeed.ops.vocabulary_parallel import VocabularyChunks, logits_of
from jaxspeed.placement.grad_barrier import grads_together


class Divergence(NamedTuple):
    """What `linear_divergence` returns, by token; the student's entropy has no gradient."""

    divergence: jax.Array
    entropy: jax.Array


class _Sums(NamedTuple):
    """Sums over the vocabulary, of each token."""

    divergence: jax.Array
    student: jax.Array  # sum_v s_v g_v
    entropy: jax.Array


def linear_divergence(
    student_hidden: jax.Array,
    student_weight: jax.Array,
    teacher_hidden: jax.Array,
    teacher_weight: jax.Array,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    counted: jax.Array | None = None,
    student_soft_cap: float | jax.Array | None = None,
    teacher_soft_cap: float | jax.Array | None = None,
    chunk: int | None = None,
) -> Divergence:
    """The divergence of each token, with its gradient for the student, never with all logits.

    Args:
      student_hidden: [..., embed]; the teacher's may have another size of embed.
      student_weight: [vocab, embed], as the teacher's.
      beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between for the generalized
        Jensen-Shannon divergence.
      temperature: divides the logits of both, after their caps.
      counted: [...] bool: other tokens are 0, without gradient.
      student_soft_cap, teacher_soft_cap: as in `linear_cross_entropy`, or scalar arrays.
      chunk: as in `linear_cross_entropy`.

    Returns:
      `Divergence` in nats, in fp32 (fp64 for fp64 operands).
    """
    vocab, embed = student_weight.shape
    if teacher_weight.shape[0] != vocab:
        raise ModelError(
            f"the student has a vocabulary of {vocab}, and the teacher of "
            f"{teacher_weight.shape[0]}: a divergence needs the same tokens"
        )
    tokens = student_hidden.shape[:-1]
    wanted = (*tokens, embed), (*tokens, teacher_weight.shape[1])
    if (student_hidden.shape, teacher_hidden.shape) != wanted:
        raise ModelError(
            f"hidden states {student_hidden.shape} and {teacher_hidden.shape} do not match heads "
            f"{student_weight.shape} and {teacher_weight.shape}: they should be {wanted[0]} and "
            f"{wanted[1]}"
        )
    if not (0 <= beta <= 1 and temperature > 0):
        raise ModelError(
            f"beta is {beta} and temperature {temperature}: beta is from 0 to 1, and the "
            "temperature above 0"
        )
    dtype = jnp.promote_types(student_hidden.dtype, jnp.float32)
    chunks = VocabularyChunks.of(vocab, vocabulary_parts(), chunk)
    student, teacher = map(chunks.on_shards, (student_hidden, teacher_hidden))
    teacher = lax.stop_gradient(teacher)
    # The gradient of `student` is a sum over chunks: as a fp32 loop constant it is summed in fp32.
    wide_student = student.astype(dtype)
    shape = student.shape[:-1]
    lowest = float(jnp.finfo(dtype).min)

    def logits(xs: Any) -> tuple[jax.Array, jax.Array]:
        hidden, weight = grads_together(wide_student, xs[0])
        operand = hidden.astype(student.dtype)
        others = lax.stop_gradient(xs[1])
        return (
            logits_of(operand, weight, None, dtype, student_soft_cap, temperature),
            logits_of(teacher, others, None, dtype, teacher_soft_cap, temperature),
        )

    def real(values: jax.Array, xs: Any, other: float = 0) -> jax.Array:
        if not chunks.padded:
            return values
        return jnp.where(chunks.real(xs[2], len(tokens)), values, other)

    def exponents(seen: tuple[jax.Array, jax.Array], xs: Any) -> tuple[jax.Array, jax.Array]:
        """The online log-sum-exp of both, [2, ...]."""
        both = [real(lax.stop_gradient(x), xs, lowest) for x in logits(xs)]
        top = jnp.maximum(seen[0], jnp.stack([jnp.max(x, axis=-1) for x in both]))
        exps = [jnp.sum(jnp.exp(x - m[..., None]), axis=-1) for x, m in zip(both, top, strict=True)]
        return top, seen[1] * jnp.exp(seen[0] - top) + jnp.stack(exps)

    xs = chunks.split(student_weight), chunks.split(teacher_weight), chunks.starts
    start = jnp.full((2, *shape), lowest, dtype), jnp.zeros((2, *shape), dtype)
    top, total = chunks.scan(exponents, start, xs)
    if chunks.parts > 1:
        tops, top = top, jnp.max(top, axis=1)
        total = jnp.sum(total * jnp.exp(tops - top[:, None]), axis=1)
    log_total = jnp.log(total)

    def logprobs(both: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        # Not of top + log_total, whose rounding error is that of the largest logit.
        return [
            lax.stop_gradient(x) - m[..., None] - y[..., None]
            for x, m, y in zip(both, top, log_total, strict=True)
        ]

    def terms(seen: _Sums, xs: Any) -> _Sums:
        log_s, log_t = logprobs(logits(xs))
        s, t = jnp.exp(log_s), jnp.exp(log_t)
        of_student = s * _slopes(log_s, log_t, beta)
        if beta == 0:
            divergence = t * (log_t - log_s)
        elif beta == 1:
            divergence = of_student
        else:
            divergence = of_student + beta * t * (log_t - _mixture(log_s, log_t, beta))
        of_chunk = (divergence, of_student, -s * log_s)
        return _Sums(*(x + jnp.sum(real(y, xs), -1) for x, y in zip(seen, of_chunk, strict=True)))

    sums = chunks.scan(terms, _Sums(*[jnp.zeros(shape, dtype)] * 3), xs)
    sums = _Sums(*(jnp.sum(x, axis=0) for x in sums)) if chunks.parts > 1 else sums

    def tangents(seen: jax.Array, xs: Any) -> jax.Array:
        """The sum over the student's logits times what are the gradients of the divergence."""
        both = logits(xs)
        log_s, log_t = logprobs(both)
        if beta == 0:
            slopes = jnp.exp(log_s) - jnp.exp(log_t)
        else:
            slopes = jnp.exp(log_s) * (_slopes(log_s, log_t, beta) - sums.student[..., None])
        return seen + jnp.sum(real(slopes, xs) * both[0], axis=-1)

    gradients = chunks.scan(tangents, jnp.zeros(shape, dtype), xs)
    gradients = jnp.sum(gradients, axis=0) if chunks.parts > 1 else gradients
    divergence = _with_gradient_of(sums.divergence, gradients)
    values = Divergence(divergence, sums.entropy)
    if counted is None:
        return values
    return Divergence(*(jnp.where(counted, x, jnp.zeros((), x.dtype)) for x in values))


def _mixture(log_s: jax.Array, log_t: jax.Array, beta: float) -> jax.Array:
    """The logarithm of m."""
    return jnp.logaddexp(log_s + jnp.log1p(-beta), log_t + jnp.log(beta))


def _slopes(log_s: jax.Array, log_t: jax.Array, beta: float) -> jax.Array:
    """g, the gradient of the divergence by s, without constants; 0 for beta 0."""
    if beta == 0:
        return jnp.zeros_like(log_s)
    if beta == 1:
        return log_s - log_t
    return (1 - beta) * (log_s - _mixture(log_s, log_t, beta))


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """A value with the gradient of another, whose own value is not computed."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))
