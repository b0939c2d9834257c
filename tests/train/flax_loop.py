"""Training loops of plain Flax and Optax on one device, as a user writes them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxspeed
from tests.support import covering
from tests.support.reference import slice_of_each_rank

SEED, DEVICES = 3, 8
WIDTH = 8
SGD = optax.sgd(0.05, momentum=0.9)


class Setting(NamedTuple):
    """How jaxspeed runs it."""

    stage: int
    accumulation: int
    tensor: int

    @property
    def ranks(self) -> int:
        return DEVICES // self.tensor

    def config(self, samples: int, **sections: Any) -> dict[str, Any]:
        return {
            "train_batch_size": samples,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "mesh": {"data": -1, "tensor": self.tensor},
            "run": {"seed": SEED, "compilation_cache": False},
            **sections,
        }

    def micro_batches(self, batch: Any) -> list[Any]:
        return [
            jax.tree.map(
                lambda x, i=i: slice_of_each_rank(x, i, self.accumulation, self.ranks), batch
            )
            for i in range(self.accumulation)
        ]


# Two of them have each setting. `make test` runs one for each test: of what nnx and Linen share,
# nnx is run at the first and Linen at the second.
SHARDED, REPLICATED = (3, 4, 1), (0, 1, 2)
STAGE_1 = (1, 4, 1)


def settings(default: tuple[int, int, int], *more: tuple[int, int, int]) -> Any:
    """All settings as parameters of a test; those that are not the default are marked `full`."""
    return pytest.mark.parametrize(
        "setting",
        [
            pytest.param(
                Setting(*s),
                id="stage{}-x{}-tensor{}".format(*s),
                marks=() if s == default else pytest.mark.full,
            )
            for s in ((0, 4, 1), SHARDED, REPLICATED, (3, 4, 2), *more)
        ],
    )


class Ended(NamedTuple):
    """Where a run came to."""

    losses: list[float]
    values: dict[str, np.ndarray]  # of parameters and state, by path


def train_nnx(
    factory: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], jax.Array],
    batches: list[Any],
    optimizer: optax.GradientTransformation,
    setting: Setting,
    frozen: Callable[[str], bool] = lambda path: False,
    mode: Callable[[nnx.Module], None] = lambda module: module.train(),
) -> Ended:
    module = factory(nnx.Rngs(SEED))
    mode(module)

    def flat(kind: Any) -> dict[str, Any]:
        pairs = nnx.to_flat_state(nnx.state(module, kind))
        return {
            "/".join(map(str, keys)): v.get_raw_value() if isinstance(v, nnx.Variable) else v
            for keys, v in pairs
        }

    def trained() -> dict[str, Any]:
        return {path: x for path, x in flat(nnx.Param).items() if not frozen(path)}

    micro_batch = nnx.jit(nnx.value_and_grad(loss_fn))
    state, losses = jax.jit(optimizer.init)(trained()), []
    for batch in batches:
        sums: dict[str, Any] = {}
        seen = []
        for part in setting.micro_batches(batch):
            loss, grads = micro_batch(module, part)
            nnx.pop(module, nnx.Intermediate)
            seen.append(float(loss))
            for keys, g in nnx.to_flat_state(grads):
                path, g = (
                    "/".join(map(str, keys)),
                    np.conj(g.get_raw_value()) / setting.accumulation,
                )
                sums[path] = sums.get(path, 0) + g
        losses.append(float(np.mean(seen)))
        old = trained()
        new, state = updated(optimizer, {path: sums[path] for path in old}, state, old)
        for keys, _ in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            path = "/".join(map(str, keys))
            if path in new:
                _at(module, keys).set_raw_value(new[path])
        if hasattr(module, "after_step"):
            module.after_step()
    every = flat(nnx.Not(nnx.RngState))
    return Ended(losses, {path: np.array(x) for path, x in every.items()})


@functools.partial(jax.jit, static_argnums=0)
def updated(optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any) -> Any:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _at(module: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        indexed = isinstance(key, int) or isinstance(module, dict)
        module = module[key] if indexed else getattr(module, key)
    return module


def train_linen(
    module: Any,
    loss_fn: Callable[[Any, Any], jax.Array],
    batches: list[Any],
    optimizer: optax.GradientTransformation,
    setting: Setting,
    carried: tuple[str, ...] = ("batch_stats",),
    frozen: Callable[[str], bool] = lambda path: False,
    **kwargs: Any,
) -> Ended:
    """`loss_fn(out, what was sown and carried, batch)`; `kwargs` are the module's in training."""
    variables = dict(meta.unbox(module.init(jax.random.key(SEED), batches[0]["x"])))
    params = flatten_dict(variables["params"], sep="/")
    state = {name: variables[name] for name in carried if name in variables}
    fixed = {path: x for path, x in params.items() if frozen(path)}
    params = {path: x for path, x in params.items() if path not in fixed}
    opt, losses = jax.jit(optimizer.init)(params), []

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def micro_batch(params: Any, state: Any, part: Any) -> Any:
        tree = {"params": unflatten_dict({**params, **fixed}, sep="/"), **state}
        out, after = module.apply(tree, part["x"], mutable=list(MUTABLE), **kwargs)
        return loss_fn(out, after, part), {name: after[name] for name in state}

    for batch in batches:
        sums = {path: np.zeros(x.shape, x.dtype) for path, x in params.items()}
        seen = []
        for part in setting.micro_batches(batch):
            (loss, state), grads = micro_batch(params, state, part)
            seen.append(float(loss))
            for path, g in grads.items():
                sums[path] = sums[path] + np.conj(g) / setting.accumulation
        losses.append(float(np.mean(seen)))
        params, opt = updated(optimizer, sums, opt, params)
        if hasattr(module, "after_step"):
            tree = {"params": unflatten_dict(params, sep="/"), **state}
            state = {**module.apply(tree, method="after_step", mutable=list(state))[1]}
    values = {**params, **fixed, **flatten_dict(state, sep="/")}
    return Ended(losses, {path: np.array(x) for path, x in values.items()})


MUTABLE = ("batch_stats", "cache", "counters", "losses", "metrics", "intermediates")


def train_jaxspeed(
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    batches: list[Any],
    transform: optax.GradientTransformation | None,
    setting: Setting,
    *,
    check: bool | None = None,
    trainable: Any = None,
    **sections: Any,
) -> Ended:
    """The same by jaxspeed, which also has to agree with its own check.

    By default not where ZeRO 3 is with micro-batches, unless all tests run: it compiles four more
    programs, and tests/engine/test_check.py has it for such models.
    """
    check = (covering.is_full or setting != Setting(*SHARDED)) if check is None else check
    samples = batches[0]["x"].shape[0]
    engine = jaxspeed.initialize(
        model,
        loss_fn,
        setting.config(samples, **sections),
        transform,
        example_batch=batches[0],
        trainable=trainable,
    )
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches]
    if check:
        report = engine.check(batches[0])
        assert report.ok, str(report)
    state = {
        path: x
        for path, x in engine.state.variables.items()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    return Ended(losses, {path: np.array(x) for path, x in (engine.parameters | state).items()})


def assert_alike(
    ours: Ended, plain: Ended, tolerance: float = 1e-5, also: tuple[str, ...] = ()
) -> None:
    """Losses, every parameter and every state variable; nothing else is kept but what is `also`."""
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=tolerance, atol=1e-7)
    kept = {path for path in ours.values if not path.endswith(("/count", *also))}
    assert kept == set(plain.values)
    for path, value in plain.values.items():
        scale = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(
            ours.values[path], value, rtol=0, atol=tolerance * scale, err_msg=path
        )


# -- a regression, for models whose loss is not the point --------------------------------------


def squared(out: Any, batch: Any) -> jax.Array:
    return jnp.mean((out - batch["y"]) ** 2)


def loss(model: Any, batch: Any) -> jax.Array:
    return squared(model(batch["x"]), batch)


def batches(steps: int = 4, samples: int = 64) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(samples, WIDTH)).astype(np.float32),
            "y": rng.normal(size=samples).astype(np.float32),
        }
        for _ in range(steps)
    ]
