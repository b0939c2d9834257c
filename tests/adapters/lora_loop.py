"""Models with adapters, and LoRA as a plain loop of JAX and Optax trains it: merged weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict

import jaxspeed
from tests.train.cases import CASES, WIDTH, weighted_error

SEED, SAMPLES, LR, DECAY = 3, 16, 1e-2, 0.1


@dataclass(frozen=True)
class AdaptedCase:
    """A model, and its loss as a function of parameters by path."""

    model: Any
    loss: Callable[[Any, Any], Any]
    sample: Callable[[np.random.Generator, int], Any]
    bound: Callable[[Mapping[str, Any]], Any]  # parameters -> what the loss gets
    lora: Mapping[str, Any]

    def batches(self, steps: int, samples: int = SAMPLES) -> list[Any]:
        rng = np.random.default_rng(0)
        return [self.sample(rng, samples) for _ in range(steps)]

    def engine(
        self,
        stage: int = 0,
        tensor: int = 1,
        pipe: int = 1,
        devices: Any = None,
        trainable: Any = None,
        **more: Any,
    ) -> Any:
        """An engine on all devices, by default; `lora` adds to the section."""
        section = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, **self.lora}
        lora = more.pop("lora", {})
        if lora is not None:
            more["lora"] = lora if "adapter" in lora else section | lora
        config = {
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "mesh": {"data": -1, "tensor": tensor, "pipe": pipe},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
            "run": {"seed": SEED},
            **more,
        }
        example = self.batches(1)[0]
        return jaxspeed.initialize(
            self.model,
            self.loss,
            config,
            example_batch=example,
            devices=devices,
            trainable=trainable,
        )


def split_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's own parameters, and its adapters."""
    copied = {path: np.asarray(x) for path, x in values.items()}
    adapters = {path: x for path, x in copied.items() if path.startswith("lora/")}
    return {path: x for path, x in copied.items() if path not in adapters}, adapters


def merged(values: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """W + s A B of every weight that has A and B: stacked dims, inputs, then outputs."""
    found = {path: x for path, x in values.items() if not path.startswith("lora/")}
    for path, w in found.items():
        if f"lora/{path}/A" not in values:
            continue
        a, b = values[f"lora/{path}/A"], values[f"lora/{path}/B"]
        stacked = a.ndim + b.ndim - 2 - w.ndim
        stack, rank = w.shape[:stacked], a.shape[-1]
        product = a.reshape(*stack, -1, rank) @ b.reshape(*stack, rank, -1)
        found[path] = w + scale * product.reshape(w.shape)
    return found


def mean_loss(case: AdaptedCase, values: Mapping[str, Any], batch: Any) -> jax.Array:
    found = case.loss(case.bound(values), batch)
    return found[0] / found[1] if isinstance(found, tuple) else found


def train_plainly(
    case: AdaptedCase,
    values: Mapping[str, Any],
    batches: list[Any],
    scale: float,
    trained: Callable[[str], bool] = lambda path: path.startswith("lora/"),
    merge: Callable[[Mapping[str, Any], float], Mapping[str, Any]] = merged,
) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the trained parameters at the end."""
    own = {path: jnp.asarray(x) for path, x in values.items() if trained(path)}
    fixed = {path: jnp.asarray(x) for path, x in values.items() if path not in own}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, weight_decay=DECAY))

    @jax.jit
    def step(own: Any, state: Any, batch: Any) -> Any:
        def loss(own: Any) -> jax.Array:
            return mean_loss(case, merge({**fixed, **own}, scale), batch)

        found, grads = jax.value_and_grad(loss)(own)
        updates, state = optimizer.update(grads, state, own)
        return optax.apply_updates(own, updates), state, found

    state, losses = optimizer.init(own), []
    for batch in batches:
        own, state, loss = step(own, state, batch)
        losses.append(float(loss))
    return losses, own


# -- models ---------------------------------------------------------------------------------------


def nnx_case(model: Any, loss: Any, sample: Any, **lora: Any) -> AdaptedCase:
    graph, state = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    flat = nnx.to_flat_state(state)

    def bound(values: Mapping[str, Any]) -> Any:
        pairs = [(keys, v.replace(values["/".join(map(str, keys))])) for keys, v in flat]
        return nnx.merge(graph, nnx.from_flat_state(pairs), copy=True)

    return AdaptedCase(model, loss, sample, bound, lora)


class ExpertStack(nnx.Module):
    """Parameters of two stacked layers of three experts each."""

    def __init__(self, rngs: nnx.Rngs):
        def param(*dims: tuple[str, int]) -> nnx.Param:
            value = jax.random.normal(rngs.params(), [n for _, n in dims]) / 3
            return nnx.Param(value, logical_axes=tuple(name for name, _ in dims))

        layers, experts = ("layers", 2), ("experts", 3)
        embed, mlp = ("embed", WIDTH), ("mlp", 12)
        self.router = param(layers, embed, ("router", 3))
        self.up = param(layers, experts, embed, mlp)
        self.down = param(layers, experts, mlp, embed)


class Experts(nnx.Module):
    """Scanned layers, in each of which a router weighs the results of all experts."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = ExpertStack(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            router, up, down = layer
            hidden = jnp.tanh(jnp.einsum("bd,edm->ebm", x, up))
            made = jnp.einsum("ebm,emd->ebd", hidden, down)
            return x + jnp.einsum("be,ebd->bd", jax.nn.softmax(x @ router), made), None

        own = self.blocks
        return jax.lax.scan(block, x, (own.router[...], own.up[...], own.down[...]))[0]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH, name="down")(jnp.tanh(nn.Dense(12, name="up")(x)))


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = LinenBlock(name=f"blocks_{i}")(x)
        return nn.Dense(WIDTH, name="head")(x)


class _BoundLinen:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.params = unflatten_dict({tuple(p.split("/")): x for p, x in values.items()})

    def __call__(self, x: Any) -> Any:
        return LinenBlocks().apply({"params": self.params}, x)


def _bound_pair(values: Mapping[str, Any]) -> Any:
    init, apply = CASES["pair"].model
    shapes = jax.eval_shape(init, jax.random.key(0))
    paths = [
        "/".join(str(k.key if hasattr(k, "key") else k.idx) for k in keys)
        for keys, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    params = jax.tree.unflatten(jax.tree.structure(shapes), [values[p] for p in paths])
    return lambda x: apply(params, x)


def adapted_cases() -> dict[str, AdaptedCase]:
    gpt2, llama, pair = CASES["gpt2"], CASES["llama"], CASES["pair"]
    return {
        "gpt2": nnx_case(gpt2.model, gpt2.loss, gpt2.sample),
        "llama": nnx_case(llama.model, llama.loss, llama.sample),
        "experts": nnx_case(
            Experts, weighted_error, pair.sample, target_parameters=["blocks.up", "blocks.down"]
        ),
        "linen": AdaptedCase(LinenBlocks(), weighted_error, pair.sample, _BoundLinen, {}),
        "pair": AdaptedCase(pair.model, weighted_error, pair.sample, _bound_pair, {}),
    }
