"""Training and a search with axes that are not jaxspeed's: rows added to the table before it loads.

`island` is like `data`; `team` also shards a parameter, as experts' weights will be. Prints what it
found as JSON, for tests/train/test_added_axis.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

from jaxspeed.axes import AXES, Axis

AXES["island"] = Axis("As data.", batch="samples", sums=True, stores=True, near=2)
AXES["team"] = Axis(
    "As data, and of hidden units.",
    batch="samples",
    sums=True,
    stores=True,
    dims=("hidden",),
    near=2,
)

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax.traverse_util import flatten_dict  # noqa: E402

import jaxspeed  # noqa: E402
from jaxspeed.placement.specs import spec_axes  # noqa: E402
from tests.run.small import write  # noqa: E402

SAMPLES, FEATURES, HIDDEN, STEPS, SEED = 16, 8, 32, 3, 3
CASES: dict[str, dict[str, Any]] = {
    **{f"island, stage {stage}": {"stage": stage, "mesh": {"island": 2}} for stage in range(4)},
    "island 4, rings, stage 3": {"stage": 3, "mesh": {"data": 1, "island": 4}, "ring": True},
    **{
        f"team, stage {stage}": {"stage": stage, "mesh": {"team": 2}, "hidden": True}
        for stage in (0, 1, 3)
    },
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(HIDDEN, name="up")(x))
        return nn.Dense(1, name="head")(x)[:, 0]


def loss_fn(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    error = jnp.square(model(batch["x"]) - batch["y"]) * batch["weight"]
    return error.sum(), batch["weight"].sum()


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": (x := rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)),
            "y": np.sin(x.sum(1)),
            "weight": rng.integers(0, 3, SAMPLES).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def config(stage: int, mesh: dict[str, int], ring: bool = False, hidden: bool = False) -> Any:
    parallel: dict[str, Any] = {"data_reduction": "ring"} if ring else {}
    if hidden:
        parallel["logical_axes"] = {"up/kernel": [None, "hidden"], "up/bias": ["hidden"]}
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"data": -1, **mesh},
        "parallel": parallel,
        "run": {"seed": SEED, "compilation_cache": False},
    }


def plain() -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final parameters in Flax and Optax on one device, of the batch as one."""
    model, optimizer = Net(), optax.adam(0.02)
    params = model.init(jax.random.key(SEED), batches()[0]["x"])
    state, losses = optimizer.init(params), []

    def mean(params: Any, batch: Any) -> jax.Array:
        total, weight = loss_fn(lambda x: model.apply(params, x), batch)
        return total / weight

    for batch in batches():
        loss, grads = jax.jit(jax.value_and_grad(mean))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, flat(params["params"])


def flat(params: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in flatten_dict(params, sep="/").items()}


def trained(case: dict[str, Any], expected: Any) -> dict[str, Any]:
    """How far a run is from the plain one, and where its arrays are."""
    engine = jaxspeed.initialize(
        Net(), loss_fn, config(**case), example_batch=batches()[0], devices=jax.devices()[:4]
    )
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    final = flat(engine.module.variables["params"])
    row = engine.placements["up/kernel"]
    return {
        "losses": max(abs(a - b) / b for a, b in zip(losses, expected[0], strict=True)),
        "final": max(float(np.abs(final[path] - x).max()) for path, x in expected[1].items()),
        "read": axes_of(row.read.spec),
        "moments": axes_of(row.opt.spec),
        "ranks": engine.program.ranks,
    }


def axes_of(spec: Any) -> list[str]:
    return sorted(spec_axes(spec))


def searched(folder: Path) -> list[dict[str, int]]:
    """The meshes of the candidates that a search estimated, of those that can run."""
    found = jaxspeed.plan(
        write(folder, autotuning={"tuner_num_trials": 9}),
        "cpu:8",
        # Not picklable, so that the search runs in this process, which has the rows.
        loss_fn=lambda model, batch: jnp.square(model(batch["tokens"][:, :-1])).mean(),
        search=True,
        search_seconds=200,
    )
    assert found.search is not None
    return [each.choice.sizes for each in found.search.candidates if not each.estimate.refused]


if __name__ == "__main__":
    meshes = searched(Path(sys.argv[1]))  # before any other use of JAX
    expected = plain()
    found = {name: trained(case, expected) for name, case in CASES.items()}
    try:
        trained({"stage": 0, "mesh": {"team": 2}, "ring": True, "hidden": True}, expected)
    except jaxspeed.ModelError as error:
        refused = str(error)
    print(json.dumps({"trained": found, "searched": meshes, "refused": refused}))
