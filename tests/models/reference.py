"""GPT-2 and Llama in numpy and fp64, a layer and a head at a time, as the papers write them."""

import math

import numpy as np
from flax import nnx


def parameters(model):
    """{path: fp64 array} of a model, paths joined by "/"."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, p)): np.asarray(v.get_value(), np.float64) for p, v in flat}


def layers(params):
    """One dict of parameters a layer, from the stacked ones."""
    stacked = {p.removeprefix("blocks/"): v for p, v in params.items() if p.startswith("blocks/")}
    length = len(next(iter(stacked.values())))
    return [{path: value[i] for path, value in stacked.items()} for i in range(length)]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal_attention(q, k, v):
    """q [seq, heads, head_dim], k and v [seq, kv_heads, head_dim]."""
    seq, heads, head_dim = q.shape
    out = np.zeros_like(q)
    for h in range(heads):
        g = h * k.shape[1] // heads
        for i in range(seq):
            shares = softmax(q[i, h] @ k[: i + 1, g].T / math.sqrt(head_dim))
            out[i, h] = shares @ v[: i + 1, g]
    return out


def layer_norm(x, scale, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + bias


def rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def gelu_new(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt2_logits(model, tokens):
    """[seq, vocab] of tokens [seq]."""
    p, eps = parameters(model), model.config.layer_norm_epsilon
    x = p["embed/table"][tokens] + p["positions/table"][: len(tokens)]
    for w in layers(p):
        h = layer_norm(x, w["attn_norm/scale"], w["attn_norm/bias"], eps)
        q, k, v = (
            np.einsum("se,ehd->shd", h, w[f"attn/{n}_proj/kernel"]) + w[f"attn/{n}_proj/bias"]
            for n in "qkv"
        )
        out = np.einsum("shd,hde->se", causal_attention(q, k, v), w["attn/o_proj/kernel"])
        x = x + out + w["attn/o_proj/bias"]
        h = layer_norm(x, w["mlp_norm/scale"], w["mlp_norm/bias"], eps)
        up = gelu_new(h @ w["mlp/up/kernel"] + w["mlp/up/bias"])
        x = x + up @ w["mlp/down/kernel"] + w["mlp/down/bias"]
    x = layer_norm(x, p["norm/scale"], p["norm/bias"], eps)
    return x @ p["embed/table"].T


def rotate_half(x, positions, theta):
    """Llama's rotary positions without scaling, by complex multiplication."""
    half = x.shape[-1] // 2
    freqs = theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(positions, freqs))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def llama_logits(model, tokens):
    """[seq, vocab] of tokens [seq]."""
    c, p, positions = model.config, parameters(model), np.arange(len(tokens))
    x = p["embed/table"][tokens]
    for w in layers(p):
        h = rms_norm(x, w["attn_norm/scale"], c.rms_norm_eps)
        q, k, v = (np.einsum("se,ehd->shd", h, w[f"attn/{n}_proj/kernel"]) for n in "qkv")
        q, k = (rotate_half(t, positions, c.rope_theta) for t in (q, k))
        x = x + np.einsum("shd,hde->se", causal_attention(q, k, v), w["attn/o_proj/kernel"])
        h = rms_norm(x, w["mlp_norm/scale"], c.rms_norm_eps)
        gate = h @ w["mlp/gate/kernel"]
        gate = gate / (1 + np.exp(-gate))
        x = x + (gate * (h @ w["mlp/up/kernel"])) @ w["mlp/down/kernel"]
    return rms_norm(x, p["norm/scale"], c.rms_norm_eps) @ p["head/table"].T
