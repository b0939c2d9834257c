"""Cross-entropy and its gradients in numpy and fp64, from the formula, and inputs for it."""

import numpy as np

IGNORED = -100


def reference(hidden, weight, bias, targets, *, z_loss, label_smoothing, soft_cap=None):
    """(sum, weight, d hidden, d weight, d bias) in numpy and fp64, from the formula."""
    h, w, b = (np.asarray(x, np.float64) for x in (hidden, weight, bias))
    logits = h @ w.T + b
    slope = 1.0
    if soft_cap is not None:
        slope = 1 - np.tanh(logits / soft_cap) ** 2
        logits = soft_cap * np.tanh(logits / soft_cap)
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    counted = np.asarray(targets) != IGNORED
    one_hot = np.eye(len(w))[np.where(counted, targets, 0)]
    eps = label_smoothing
    smooth = (1 - eps) * one_hot + eps / len(w)
    loss = lse - (smooth * logits).sum(-1) + z_loss * lse**2
    d_logits = (1 + 2 * z_loss * lse)[..., None] * np.exp(logits - lse[..., None]) - smooth
    d_logits *= counted[..., None] * slope
    return (
        loss[counted].sum(),
        counted.sum(),
        d_logits @ w,
        np.einsum("bsv,bse->ve", d_logits, h),
        d_logits.sum((0, 1)),
    )


def problem(vocab, embed=12, batch=3, seq=5, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, seq, embed)).astype(dtype)
    weight = rng.normal(size=(vocab, embed)).astype(dtype)
    bias = rng.normal(size=vocab).astype(dtype)
    targets = rng.integers(0, vocab, (batch, seq))
    targets[rng.random((batch, seq)) < 0.3] = IGNORED
    return hidden, weight, bias, targets


def assert_near(found, wanted, tolerance=1e-6, scale=1e-30):
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
    assert error <= tolerance * max(np.linalg.norm(wanted), scale), error
