"""Attention and its gradients in numpy and fp64, from the formulas, as what kernels must equal."""

import numpy as np


def seen(seq, kv_seq, *, causal, window, segments, kv_segments=None, offset=0):
    """[batch or 1, seq, kv_seq], from the definition; query i is at position offset + i."""
    i, j = offset + np.arange(seq)[:, None], np.arange(kv_seq)[None, :]
    mask = np.full((1, seq, kv_seq), True)
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= np.abs(i - j) < window
    if segments is not None:
        ids, of_keys = (
            np.asarray(x) for x in (segments, segments if kv_segments is None else kv_segments)
        )
        mask = mask & (ids[:, :, None] == of_keys[:, None, :])
    return mask


def attention_and_gradients(q, k, v, d_out, mask, scale, soft_cap=None, sinks=None, bias=0.0):
    """(out, dq, dk, dv) of softmax(scale q k^T) v for the cotangent d_out, heads grouped.

    With a soft cap c the scores s are c tanh(s / c); with sinks [heads] each softmax has one more
    score, and the gradient of the sinks comes last, or that of a bias [heads, seq, kv_seq].
    """
    q, k, v, d_out = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    kk, vv = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = scale * np.einsum("bihd,bjhd->bhij", q, kk)
    slope = 1.0
    if soft_cap is not None:
        slope = 1 - np.tanh(scores / soft_cap) ** 2
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(mask[:, None], scores + np.asarray(bias, np.float64), -np.inf)
    if sinks is not None:
        last = np.asarray(sinks, np.float64)[:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(last, (*scores.shape[:3], 1))], -1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    sink_shares, shares = shares[..., k.shape[1] :], shares[..., : k.shape[1]]
    out = np.einsum("bhij,bjhd->bihd", shares, vv)
    d_shares = np.einsum("bihd,bjhd->bhij", d_out, vv)
    mean = (d_shares * shares).sum(-1, keepdims=True)
    d_scores = slope * shares * (d_shares - mean)
    dq = scale * np.einsum("bhij,bjhd->bihd", d_scores, kk)
    dk = scale * np.einsum("bhij,bihd->bjhd", d_scores, q)
    dv = np.einsum("bhij,bihd->bjhd", shares, d_out)

    def of_group(x):
        return x.reshape(*k.shape[:3], group, -1).sum(3) if group > 1 else x

    found = (out, dq, of_group(dk), of_group(dv))
    if np.ndim(bias):
        return (*found, d_scores if np.ndim(bias) == 4 else d_scores.sum(0))
    return found if sinks is None else (*found, -(sink_shares * mean).sum((0, 2, 3)))
