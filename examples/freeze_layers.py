"""Train the last layers of a model alone, by a pattern in the config.

Frozen layers have no gradient, no optimizer state and no reduction, and nothing of theirs is saved
for a backward pass. The script trains all eight blocks, then the last two and the head, and prints
what either step costs on a device, as the compiler counts it.

    python examples/freeze_layers.py
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxspeed

jaxspeed.simulate(8)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(8)])
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
batch = {"x": x, "y": np.tanh(x[:, 0] - x[:, 1])}
costs = {}
for name, trainable in {"all": ["**"], "last": ["blocks[-2:]/**", "head/**"]}.items():
    engine = jaxspeed.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        config={
            "train_batch_size": 256,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "trainable": trainable,
        },
    )
    first = {path: np.asarray(value) for path, value in engine.parameters.items()}
    losses = [float(engine.train_batch(batch)["loss"]) for _ in range(20)]
    report = engine.compiled(batch)
    changed = [p for p, v in engine.parameters.items() if not np.array_equal(first[p], v)]
    costs[name] = report.flops, report.argument_bytes
    print(
        f"{name:4s}  loss {losses[0]:.3f} to {losses[-1]:.3f}, {len(changed)} parameters changed,"
    )
    print(f"      {report.flops / 1e6:.1f} Mflop, {report.argument_bytes / 1e3:.0f} kB of state")
    engine.close()

flops, state = (b / a for a, b in zip(costs["all"], costs["last"]))
print(f"the last layers alone: {flops:.0%} of the FLOPs, {state:.0%} of the state")
