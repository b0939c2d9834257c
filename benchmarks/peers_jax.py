"""The step of plain JAX and Optax for `peers_cpu.py` and `gpu_peers.py`.

Hand-written, as a careful user writes it. It uses nothing of jaxspeed, and reads its weights.
"""

from typing import Any

from peers_work import Step, Work

_RESULTS_OF_KERNEL = "dot_product_attention_fwd"  # the primitives of cuDNN's forward pass
_NAME = "attention"  # of what attention in XLA's operations returns


def plain_jax_step(weights: str, work: Work, scanned: bool, attention: str | None = None) -> Step:
    """The step from these weights.

    Args:
      scanned: whether the layers are a scan, instead of a loop that is unrolled.
      attention: the implementation of `jax.nn.dot_product_attention`; None: JAX's choice.
    """
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    params = {path: jnp.asarray(value) for path, value in load_file(weights).items()}
    update, tx = plain_jax_update(work, scanned, attention)
    state = [(params, tx.init(params))]
    jitted = jax.jit(update, donate_argnums=0)

    def step(tokens: Any) -> Any:
        state[0], value = jitted(state[0], tokens)
        return value

    return step


def plain_jax_update(work: Work, scanned: bool, attention: str | None) -> tuple[Any, Any]:
    """(state, tokens) -> (state, loss), and the optimizer of that state."""
    import jax
    import optax

    loss = plain_jax_loss(work, scanned, attention)
    tx = optax.adamw(work.rate, weight_decay=work.decay)
    if work.clip:
        tx = optax.chain(optax.clip_by_global_norm(work.clip), tx)

    def update(state: Any, tokens: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return update, tx


def plain_jax_loss(work: Work, scanned: bool, attention: str | None) -> Any:
    """(params, tokens) -> the mean loss of next tokens."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.ad_checkpoint import checkpoint_name

    def norm(x: Any, p: Any, name: str) -> Any:
        wide = x.astype(jnp.float32)
        if work.family == "gpt2":
            wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + work.eps)
        wide = wide * p[f"{name}.scale"]
        return (wide + p[f"{name}.bias"] if work.family == "gpt2" else wide).astype(x.dtype)

    def linear(x: Any, p: Any, name: str, contracted: int = 1) -> Any:
        y = jnp.tensordot(x, p[f"{name}.kernel"], contracted)
        return y + p[f"{name}.bias"] if work.family == "gpt2" else y

    def rotate(x: Any, angles: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def block(x: Any, p: Any, angles: Any) -> Any:
        h = norm(x, p, "attn_norm")
        q, k, v = (linear(h, p, f"attn.{name}_proj") for name in "qkv")
        if work.family == "llama":
            q, k = rotate(q, angles), rotate(k, angles)
        kind: Any = attention
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
        attended = checkpoint_name(attended, _NAME)
        x = x + linear(attended, p, "attn.o_proj", 2)
        h = norm(x, p, "mlp_norm")
        if work.family == "gpt2":
            hidden = jax.nn.gelu(linear(h, p, "mlp.up"), approximate=True)
        else:
            hidden = jax.nn.silu(linear(h, p, "mlp.gate")) * linear(h, p, "mlp.up")
        return x + linear(hidden, p, "mlp.down")

    def loss(params: Any, tokens: Any) -> Any:
        if work.bf16:
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        applied = rematerialized(block, work.remat)
        x, angles = params["embed.table"][tokens[:, :-1]], None
        if work.family == "gpt2":
            x = x + params["positions.table"]
        else:
            turns = work.theta ** -(jnp.arange(0, work.head_dim, 2) / work.head_dim)
            angles = (jnp.arange(work.seq)[:, None] * turns)[:, None]  # [seq, 1, head_dim / 2]
        layers = {k.removeprefix("blocks."): v for k, v in params.items() if "blocks." in k}
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (applied(x, p, angles), None), x, layers)
        else:
            for i in range(work.layers):
                x = applied(x, {k: v[i] for k, v in layers.items()}, angles)
        head = params["embed.table" if work.tied else "head.table"]
        logits = jnp.einsum(
            "bse,ve->bsv", norm(x, params, "norm"), head, preferred_element_type=jnp.float32
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def rematerialized(block: Any, remat: str) -> Any:
    """The block with its activations recomputed, but for what `remat` saves."""
    import jax

    if remat == "none":
        return block
    if remat == "full":
        return jax.checkpoint(block)

    # A name cannot save what cuDNN's kernel returns beside its output, without which it runs again.
    by_name = jax.checkpoint_policies.save_only_these_names(_NAME)

    def saved(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if primitive.name.startswith(_RESULTS_OF_KERNEL):
            return True
        return by_name(primitive, *arguments, **parameters)

    return jax.checkpoint(block, policy=saved)
