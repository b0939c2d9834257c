"""Train a model of your own: a Flax module and a loss, neither of which knows of devices.

A classifier separates two interleaved spirals. It trains under ZeRO 3 on eight simulated devices:
each stores an eighth of the parameters and of Adam's moments. The script prints the accuracy on
points that it was not trained on, and compares a step with the same step on one device.

    python examples/own_model.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxspeed

jaxspeed.simulate(8)  # leave it out where there are TPUs or GPUs


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(2, 64, rngs=rngs)
        self.middle = nnx.Linear(64, 64, rngs=rngs)
        self.leave = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        return self.leave(nnx.gelu(self.middle(nnx.gelu(self.enter(x)))))


def loss_fn(model, batch):
    logits = model(batch["points"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    right = jnp.mean(jnp.argmax(logits, -1) == batch["labels"])
    return losses.mean(), {"accuracy": right}


def spirals(seed, points=512):
    random = np.random.default_rng(seed)
    labels, turn = random.integers(0, 2, points), random.uniform(0.2, 1, points)
    angle = 2 * np.pi * (turn + labels / 2)
    xy = np.stack([turn * np.cos(angle), turn * np.sin(angle)], -1) * 3
    return {"points": xy.astype(np.float32), "labels": labels}


engine = jaxspeed.initialize(
    model=lambda rngs: Classifier(rngs),
    loss_fn=loss_fn,
    config={
        "train_batch_size": 512,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
)
before = float(engine.eval_batch(spirals(999))["accuracy"])
for step in range(150):
    engine.train_batch(spirals(step))
after = float(engine.eval_batch(spirals(999))["accuracy"])

print(engine.placements)
print(str(engine.check(spirals(0))).splitlines()[0])
print(f"accuracy on new points: {before:.3f} before, {after:.3f} after 150 steps")
