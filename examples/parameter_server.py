"""Train with a parameter server, synchronously and with bounded staleness, beside a slow worker.

Of eight devices two are servers, which own the masters and the moments, and six are workers, of
which the last takes four times as long as the others. Synchronous steps wait for it. With
`on_stale: drop` nobody does, and its pushes count while they are fresh enough. The order of arrival
is simulated by a clock that `run.seed` determines, so that a run can be repeated.

    python examples/parameter_server.py
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxspeed

jaxspeed.simulate(8)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(seed):
    x = np.random.default_rng(seed).normal(size=(96, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, 0] + x[:, 1])}


rates = {}
for name, chosen, lr in (
    ("synchronous", {}, 1e-2),
    ("bounded", {"max_staleness": 8, "on_stale": "drop"}, 5e-3),
):
    engine = jaxspeed.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        config={
            "train_batch_size": 96,
            "optimizer": {"type": "Adam", "params": {"lr": lr}},
            "parallel": {
                "data_reduction": "parameter_server",
                "servers": 2,
                "worker_pace": [1, 1, 1, 1, 1, 4],
                **chosen,
            },
        },
    )
    for step in range(40):
        metrics = engine.train_batch(batch_of(step))
    engine.wait()
    held_out = float(engine.eval_batch(batch_of(999))["loss"])
    updates, seconds = int(engine.state.step), float(metrics["virtual_seconds"])
    rates[name] = 40 * 96 / seconds
    print(f"{name:11s}  {updates} updates, held-out loss {held_out:.4f}")
    engine.close()

faster = rates["bounded"] / rates["synchronous"]
print(
    f"samples in the time of the simulated clock: {faster:.1f} times as many with bounded staleness"
)
