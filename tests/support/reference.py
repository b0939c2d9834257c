"""Plain training on one device, written apart from the package: what every parity test is held to.

Nothing here knows of meshes or placements. A model is two functions of flat dicts `{path: array}`,
the gradient is `jax.value_and_grad`, the update is Optax, and the loop over steps and micro-batches
is Python's. Of jaxspeed only the public rule of random keys is used, as a user would.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspeed import micro_batch_key
from jaxspeed.user_models.rng import linen_rngs

Arrays = dict[str, Any]


class NnxReference:
    """An nnx factory: split once, merged in the loss; the streams are rekeyed by the rule."""

    def __init__(self, factory: Callable[[nnx.Rngs], nnx.Module]) -> None:
        self.factory = factory

    def init(self, seed: int) -> tuple[Arrays, Arrays]:
        def values() -> Arrays:
            self.graph, state = nnx.split(self.factory(nnx.Rngs(seed)))
            self.flat = {"/".join(map(str, ks)): (ks, v) for ks, v in nnx.to_flat_state(state)}
            return {path: v.get_value() for path, (_, v) in self.flat.items()}

        values = jax.jit(values)()
        params = {p: x for p, x in values.items() if isinstance(self.flat[p][1], nnx.Param)}
        return params, {p: x for p, x in values.items() if p not in params}

    def bind(self, params: Arrays, rest: Arrays, step: Any, micro: Any) -> nnx.Module:
        for path, value in rest.items():
            kind = type(self.flat[path][1])
            if issubclass(kind, nnx.RngKey):
                rest = {**rest, path: micro_batch_key(value, step, micro)}
            elif issubclass(kind, nnx.RngCount):
                rest = {**rest, path: jnp.zeros_like(value)}
        values = {**params, **rest}
        state = [(keys, v.replace(values[path])) for path, (keys, v) in self.flat.items()]
        module = nnx.merge(self.graph, nnx.from_flat_state(state), copy=True)
        module.train()
        return module

    def changed(self, bound: nnx.Module) -> Arrays:
        return {
            path: v.get_value()
            for keys, v in nnx.to_flat_state(nnx.state(bound))
            if (path := "/".join(map(str, keys))) in self.flat
            and not isinstance(self.flat[path][1], nnx.Param | nnx.RngState)
        }


class LinenReference:
    """A Linen module, which is told its mode as `train`."""

    def __init__(self, module: nn.Module, example: Any) -> None:
        self.module, self.example = module, example

    def init(self, seed: int) -> tuple[Arrays, Arrays]:
        variables = self.module.init(jax.random.key(seed), self.example, train=False)
        pairs = jax.tree_util.tree_leaves_with_path(variables)
        flat = {"/".join(k.key for k in keys): x for keys, x in pairs}
        self.tree = jax.tree.structure(variables)
        self.order = [p.removeprefix("params/") for p in flat]
        params = {p.removeprefix("params/"): x for p, x in flat.items() if p.startswith("params/")}
        rest = {p: x for p, x in flat.items() if not p.startswith("params/")}
        return params, {**rest, "seed": jax.random.key(seed)}

    def bind(self, params: Arrays, rest: Arrays, step: Any, micro: Any) -> Any:
        values = {**params, **rest}
        variables = jax.tree.unflatten(self.tree, [values[path] for path in self.order])
        rngs = linen_rngs(micro_batch_key(rest["seed"], step, micro))
        kept: dict[str, Any] = {}

        def call(x: jax.Array) -> jax.Array:
            y, kept["after"] = self.module.apply(
                variables, x, train=True, rngs=rngs, mutable=["batch_stats"]
            )
            return y

        call.kept = kept  # type: ignore[attr-defined]
        return call

    def changed(self, bound: Any) -> Arrays:
        pairs = jax.tree_util.tree_leaves_with_path(bound.kept["after"])
        return {"/".join(k.key for k in keys): x for keys, x in pairs}


class PairReference:
    """A pair (init, apply) over nested dicts."""

    def __init__(self, init: Callable[..., Any], apply: Callable[..., Any]) -> None:
        self.make, self.apply = init, apply

    def init(self, seed: int) -> tuple[Arrays, Arrays]:
        params = self.make(jax.random.key(seed))
        pairs = jax.tree_util.tree_leaves_with_path(params)
        self.tree = jax.tree.structure(params)
        return {
            "/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys): x
            for keys, x in pairs
        }, {}

    def bind(self, params: Arrays, rest: Arrays, step: Any, micro: Any) -> Any:
        tree = jax.tree.unflatten(self.tree, list(params.values()))
        return lambda *args: self.apply(tree, *args)

    def changed(self, bound: Any) -> Arrays:
        return {}


@dataclass
class DynamicScale:
    """DeepSpeed's dynamic loss scale, without its growth: tests are shorter than its window."""

    scale: float
    hysteresis: int = 2

    def overflowed(self) -> None:
        if self.hysteresis == 1:
            self.scale /= 2
        else:
            self.hysteresis -= 1


@dataclass
class Run:
    """What a training run came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of the gradient, before clipping
    skipped: int = 0
    first: Arrays = field(default_factory=dict)
    last: Arrays = field(default_factory=dict)
    rest: Arrays = field(default_factory=dict)  # statistics
    ema: Arrays = field(default_factory=dict)


def train(
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    batches: Iterable[Mapping[str, Any]],
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    ranks: int = 1,
    seed: int = 0,
    clipping: float = 0.0,
    gradient_factor: float = 1.0,
    frozen: Callable[[str], bool] = lambda path: False,
    ema_decay: float | None = None,
    compute_dtype: Any = None,
    scale: DynamicScale | None = None,
) -> Run:
    """Train on one device. `ranks` only says which samples make up micro-batch i."""
    scale = scale or DynamicScale(1.0)
    params, rest = model.init(seed)
    fixed = {path: x for path, x in params.items() if frozen(path)}
    params = {path: x for path, x in params.items() if path not in fixed}
    opt = jax.jit(optimizer.init)(params)
    run = Run(first=_copied({**params, **fixed}), ema=_copied(params))

    def narrow(x: Any) -> Any:
        floating = compute_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(compute_dtype) if floating else x

    @jax.jit
    def micro_batch(params: Arrays, rest: Arrays, batch: Any, t: Any, i: Any, scale: Any) -> Any:
        """Gradients of scale * (sum / weight), and (sum, weight, changed variables)."""

        def objective(params: Arrays) -> Any:
            every = {path: params.get(path, fixed.get(path)) for path in run.first}
            bound = model.bind(jax.tree.map(narrow, every), rest, t, i)
            result = loss_fn(bound, jax.tree.map(narrow, batch))
            total, weight = result if isinstance(result, tuple) else (result, 1.0)
            total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
            weight = jnp.asarray(weight, total.dtype)
            changed = {p: x.astype(rest[p].dtype) for p, x in model.changed(bound).items()}
            mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1), 0)
            return mean * scale, (total, weight, changed)

        return jax.value_and_grad(objective, has_aux=True)(params)

    @jax.jit
    def update(grads: Arrays, opt: Any, params: Arrays) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        if clipping:
            factor = jnp.minimum(1.0, clipping / (norm + 1e-6))
            grads = {path: g * factor for path, g in grads.items()}
        updates, opt = optimizer.update(grads, opt, params)
        return norm, optax.apply_updates(params, updates), opt

    for t, batch in enumerate(batches):
        # NumPy's sums: each would be a program to compile for every shape, as jax.numpy's.
        sums = {path: np.zeros(x.shape, x.dtype) for path, x in params.items()}
        total = weight = 0.0
        carried = rest
        for i in range(accumulation):
            part = jax.tree.map(lambda x, i=i: slice_of_each_rank(x, i, accumulation, ranks), batch)
            (_, (s, w, changed)), grads = micro_batch(params, carried, part, t, i, scale.scale)
            s, w, grads = jax.tree.map(np.asarray, (s, w, grads))
            with np.errstate(all="ignore"):  # of gradients that overflow
                sums = {path: sums[path] + grads[path] * w for path in sums}
            total, weight, carried = total + s, weight + w, {**carried, **changed}
        with np.errstate(all="ignore"):
            factor = gradient_factor / (weight * scale.scale)
            grads = {path: g * factor for path, g in sums.items()}
        norm, moved, moved_opt = update(grads, opt, params)
        run.losses.append(float(total / weight))
        run.norms.append(float(norm))
        if np.isfinite(norm):
            params, opt, rest = moved, moved_opt, carried
            if ema_decay is not None:
                run.ema = {
                    path: ema_decay * old + (1 - ema_decay) * np.asarray(params[path])
                    for path, old in run.ema.items()
                }
        else:
            run.skipped += 1
            scale.overflowed()
    run.last = _copied({**params, **fixed})
    run.rest = {p: np.asarray(x) for p, x in rest.items() if not _is_key(x)}
    return run


def slice_of_each_rank(x: Any, i: int, accumulation: int, ranks: int) -> Any:
    """Micro-batch i: the i-th slice of each rank's own part of the batch, rank after rank."""
    per_rank = np.split(np.asarray(x), ranks)
    return np.concatenate([np.split(part, accumulation)[i] for part in per_rank])


def _copied(arrays: Arrays) -> Arrays:
    return {path: np.array(x) for path, x in arrays.items()}


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
