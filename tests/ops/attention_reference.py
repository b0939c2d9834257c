"""Attention and its gradients in numpy and fp64, from the formulas, as what kernels must equal."""

import numpy as np


def seen(seq, kv_seq, *, causal, window, segments):
    """[batch or 1, seq, kv_seq], from the definition."""
    i, j = np.arange(seq)[:, None], np.arange(kv_seq)[None, :]
    mask = np.full((1, seq, kv_seq), True)
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= np.abs(i - j) < window
    if segments is not None:
        ids = np.asarray(segments)
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    return mask


def attention_and_gradients(q, k, v, d_out, mask, scale):
    """(out, dq, dk, dv) of softmax(scale q k^T) v for the cotangent d_out, heads grouped."""
    q, k, v, d_out = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    kk, vv = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = scale * np.einsum("bihd,bjhd->bhij", q, kk)
    scores = np.where(mask[:, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", shares, vv)
    d_shares = np.einsum("bihd,bjhd->bhij", d_out, vv)
    d_scores = shares * (d_shares - (d_shares * shares).sum(-1, keepdims=True))
    dq = scale * np.einsum("bhij,bjhd->bihd", d_scores, kk)
    dk = scale * np.einsum("bhij,bihd->bjhd", d_scores, q)
    dv = np.einsum("bhij,bihd->bjhd", shares, d_out)

    def of_group(x):
        return x.reshape(*k.shape[:3], group, -1).sum(3) if group > 1 else x

    return out, dq, of_group(dk), of_group(dv)
