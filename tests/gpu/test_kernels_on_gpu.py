"""Attention's kernels as they run on a GPU, against the formula in fp64.

JAX_PLATFORMS=cuda python -m pytest tests/gpu
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.ops import attention, gpu
from tests.ops.attention_reference import attention_and_gradients, seen
from tests.ops.test_gpu_attention import random_arrays, runs

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

SEQ, BATCH = 512, 2
LONG = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True}
# Documents: those that cuDNN takes are few, each with an id of its own.
FEW = np.stack([np.repeat([1, 2, 3], [300, 12, 200]), np.repeat([7, 5, 6, 1], 128)])
MANY = runs(SEQ, [(name, 7) for name in range(1, 80)])
CUDNN, MOSAIC, TRITON = "cudnn", "mosaic_gpu", "triton"
PALLAS = MOSAIC if jax.default_backend() == "gpu" and gpu.has_major(9) else TRITON
# What is asked for, and the kernels in the compiled program. With documents both are in it, and
# their number decides when it runs.
FORMS = {
    "causal": (LONG, {CUDNN}),
    "both ways": (LONG | {"causal": False}, {CUDNN}),
    "heads of 128, not grouped": (LONG | {"kv_heads": 4, "head_dim": 128}, {CUDNN}),
    "window": (LONG | {"window": 100}, {CUDNN}),
    "window both ways": (LONG | {"window": 100, "causal": False}, {PALLAS}),
    "few documents": (LONG | {"segments": FEW}, {CUDNN, PALLAS}),
    "many documents": (LONG | {"segments": MANY}, {CUDNN, PALLAS}),
    "few documents, heads of 128": (LONG | {"segments": FEW, "head_dim": 128}, {CUDNN, PALLAS}),
    "documents with a window": (LONG | {"segments": FEW, "window": 50}, {CUDNN, PALLAS}),
    "soft cap": (LONG | {"soft_cap": 1.5}, {PALLAS}),
    "soft cap, documents": (LONG | {"soft_cap": 1.5, "segments": FEW}, {PALLAS}),
    "sinks": (LONG | {"sinks": True}, {CUDNN}),
    "sinks, documents": (LONG | {"sinks": True, "segments": MANY}, {CUDNN, PALLAS}),
    "fp16": (LONG | {"dtype": "float16"}, {CUDNN}),
    "fp32": (LONG | {"dtype": "float32"}, {TRITON}),
    "heads of 256": (LONG | {"head_dim": 256, "soft_cap": 1.5}, {TRITON}),
    "heads of 128, soft cap": (LONG | {"head_dim": 128, "soft_cap": 1.5}, {PALLAS}),
    "heads of 80, soft cap": (LONG | {"head_dim": 80, "soft_cap": 1.5}, {PALLAS}),
    "incomplete blocks": (LONG | {"soft_cap": 1.5, "seq": 200}, {PALLAS}),
}
# Of the result and the gradients, relative to the formula's largest, or to 1 if that is larger.
# Tensor cores round fp32 operands to the 11 bits of TF32.
BOUNDS = {"bfloat16": 4 * 2.0**-9, "float16": 4 * 2.0**-11, "float32": 4 * 2.0**-11}


@pytest.mark.parametrize("name", FORMS)
def test_kernels_equal_the_formula(name):
    form, kernels = FORMS[name]
    called, error = ran(form)
    assert called == kernels
    assert error < BOUNDS[form.get("dtype", "bfloat16")]


@pytest.mark.parametrize("kernel", [MOSAIC, TRITON])
@pytest.mark.parametrize("name", FORMS)
def test_each_own_kernel_equals_the_formula(name, kernel):
    """Where both support a form one of them is not chosen, or not for these documents."""
    form, _ = FORMS[name]
    dtype = form.get("dtype", "bfloat16")
    if kernel == MOSAIC and (PALLAS != MOSAIC or dtype == "float32" or form["head_dim"] > 128):
        pytest.skip("not supported")
    called, error = ran(form, kernel)
    assert called == {kernel}
    assert error < BOUNDS[dtype]


def ran(form, implementation=None):
    """(kernels in the compiled program, the largest error of its results and gradients)."""
    seq, segments, window = form.get("seq", SEQ), form.get("segments"), form.get("window")
    dtype, soft_cap = form.get("dtype", "bfloat16"), form.get("soft_cap")
    sizes = (form[key] for key in ("heads", "kv_heads", "head_dim"))
    *qkv, d_out = random_arrays(BATCH, seq, seq, *sizes, dtype)
    sinks = [jnp.linspace(-1.0, 3.0, d_out.shape[2])] if form.get("sinks") else []
    options = {"causal": form["causal"], "window": window, "scale": 0.3, "soft_cap": soft_cap}
    options["implementation"] = implementation

    @jax.jit
    def both(qkv, sinks, ids, d_out):
        def attend(q, k, v, sinks=None):
            return attention(q, k, v, sinks=sinks, segment_ids=ids, **options)

        out, pullback = jax.vjp(attend, *qkv, *sinks)
        return out, *pullback(d_out)

    compiled = both.lower(qkv, sinks, segments, d_out).compile()
    targets = set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text()))
    called = {k for k in (CUDNN, MOSAIC, TRITON) if any(k in target.lower() for target in targets)}
    dense = seen(seq, seq, causal=form["causal"], window=window, segments=segments)
    wanted = attention_and_gradients(*qkv, d_out, dense, 0.3, soft_cap, *sinks)
    pairs = zip(compiled(qkv, sinks, segments, d_out), wanted, strict=True)
    errors = [
        np.abs(np.asarray(x, np.float64) - y).max() / max(1, np.abs(y).max()) for x, y in pairs
    ]
    return called, max(errors)
