"""Train two networks against each other, each with an engine of its own.

A generator learns the normal distribution with mean 3 and deviation 0.5 from a critic that
distinguishes its samples from real ones. Each loss reads the other network by `extra`, whose arrays
are not divided among the devices. The engines may differ in optimizer, stage and precision.

    python examples/gan.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxspeed

jaxspeed.simulate(8)
LATENT, SAMPLES, STEPS = 4, 256, 300


class Network(nnx.Module):
    def __init__(self, inputs: int, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(inputs, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def latent(rng, batch):
    return jax.random.normal(rng, (batch["x"].shape[0], LATENT))


def generator_loss(model, batch, rng, extra):
    judged = nnx.merge(critic_graph, extra)(moments(model(latent(rng, batch))))
    return jax.nn.softplus(-judged).mean()


def critic_loss(model, batch, rng, extra):
    made = nnx.merge(generator_graph, extra)(latent(rng, batch))
    real, false = model(moments(batch["x"])), model(moments(made))
    return (jax.nn.softplus(-real) + jax.nn.softplus(false)).mean()


def moments(x):
    """What the critic sees of a sample."""
    return jnp.concatenate([x, x**2], -1) / 4


def engine(inputs, loss_fn, lr):
    config = {"train_batch_size": SAMPLES, "zero_optimization": {"stage": 3}}
    optimizer = optax.adam(optax.linear_schedule(lr, 0, STEPS), b1=0.5, b2=0.9)
    return jaxspeed.initialize(lambda rngs: Network(inputs, rngs), loss_fn, config, optimizer)


generator, critic = engine(LATENT, generator_loss, 5e-3), engine(2, critic_loss, 2e-2)
generator_graph, critic_graph = nnx.graphdef(generator.module), nnx.graphdef(critic.module)
random = np.random.default_rng(0)
for _ in range(STEPS):
    batch = {"x": random.normal(3, 0.5, (SAMPLES, 1)).astype(np.float32)}
    critic.train_batch(batch, extra=nnx.state(generator.module))
    generator.train_batch(batch, extra=nnx.state(critic.module))

made = generator.module(random.normal(size=(4096, LATENT)).astype(np.float32))
print(f"generated: mean {made.mean():.2f} of 3.00, deviation {made.std():.2f} of 0.50")
