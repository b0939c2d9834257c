"""Programs whose devices share a vocabulary or heads, compiled for a TPU topology."""

from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxspeed.models import gpt2

from jaxspeed import ops
from jaxspeed.hlo import collectives, largest_buffers
from jaxspeed.placement import build_mesh
from jaxspeed.train import build_program
from tests.system import stacks
from tests.system.measured import measure, without

EMBED, SEQ, CHUNK, TENSOR = 512, 128, 768, 2  # CHUNK: columns of one device
VOCABULARY = 6145  # TENSOR does not divide it, nor CHUNK what a device has of it
SAMPLES, HEAD_DIM = 8, 64
# (devices over tensor, query heads, key heads, kernel)
HEADS = {
    "one key head": (2, 8, 1, "splash"),
    "fewer than devices": (4, 8, 2, "plain"),
    "do not divide": (4, 12, 6, "splash"),
}


def model(devices: list[jax.Device]) -> dict[str, Any]:
    """gpt2 at stage 3 on tensor 2 x data 4, two samples a rank; its head is its table."""
    sizes = gpt2.Config(
        hidden_size=EMBED,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQ,
        vocab_chunk=CHUNK,
    )
    mesh = {"data": len(devices) // TENSOR, "tensor": TENSOR}
    config = stacks.config_of(3, micro=2, mesh=mesh)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh["data"] * 2, SEQ + 1), jnp.int32)}
    program = build_program(
        config, lambda rngs: gpt2.build(sizes, rngs), gpt2.loss, devices=devices
    )
    return measure(program, batch)


def losses(devices: list[jax.Device]) -> dict[str, Any]:
    """The gradients of the chunked loss alone, whether the head is stored cut or not."""
    mesh = build_mesh({"data": len(devices) // TENSOR, "tensor": TENSOR}, devices)
    stored = -(-VOCABULARY // TENSOR) * TENSOR

    def loss(weight: jax.Array, h: jax.Array) -> jax.Array:
        targets = jnp.arange(h.shape[0] * SEQ).reshape(-1, SEQ) % VOCABULARY
        return ops.linear_cross_entropy(jnp.tanh(h), weight[:VOCABULARY], targets, chunk=CHUNK)[0]

    hidden = ((SAMPLES, SEQ, EMBED), P("data"))
    cut = (((stored, EMBED), P("tensor")), hidden)
    whole = (((stored, EMBED), P()), hidden)
    found = {name: _gradients(mesh, loss, args) for name, args in (("cut", cut), ("whole", whole))}
    with without("vocabulary.parts"):
        found["whole, dropped"] = _gradients(mesh, loss, whole)
    return found


def attentions(devices: list[jax.Device]) -> dict[str, Any]:
    """The gradients of an attention layer whose query heads are cut over tensor."""
    found = {}
    for name, (tensor, n_heads, kv_heads, kernel) in HEADS.items():
        mesh = build_mesh({"data": len(devices) // tensor, "tensor": tensor}, devices)

        def layer(*args: jax.Array, kernel: Any = kernel) -> jax.Array:
            wq, wk, wv, wo, x = args
            q, k, v = (jnp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
            y = ops.attention(q, k, v, implementation=kernel)
            return jnp.sum(jnp.tanh(jnp.einsum("bshd,hde->bse", y, wo)).astype(jnp.float32))

        queries = ((EMBED, n_heads, HEAD_DIM), P(None, "tensor"))
        keys = ((EMBED, kv_heads, HEAD_DIM), P())
        out = ((n_heads, HEAD_DIM, EMBED), P("tensor"))
        x = ((SAMPLES, SEQ, EMBED), P("data"))
        found[name] = _gradients(mesh, layer, (queries, keys, keys, out, x))
    return found


def _gradients(mesh: Any, loss: Any, args: Any) -> dict[str, Any]:
    """What the gradients of a loss compile to; args are (shape, spec)."""
    places = [NamedSharding(mesh, spec) for _, spec in args]
    given = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=at)
        for (shape, _), at in zip(args, places, strict=True)
    ]
    # A function of its own for each trace, or the second would be taken from the cache.
    gradients = jax.grad(lambda *args: loss(*args), tuple(range(len(args))))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(gradients, out_shardings=tuple(places)).lower(*given)
    text = lowered.compile().as_text()
    return {
        "collectives": [asdict(c) for c in collectives(text, mesh)],
        "largest": [asdict(b) for b in largest_buffers(text, 40)],
    }
