"""Train a UNet that was written elsewhere, in plain Linen, under ZeRO 3, without an edit.

`Level` and `UNet` know nothing of devices, and the loss is that of removing noise from images. Each
device stores an eighth of what is trained, and gathers the weights of one module at a time.

    python examples/foreign_unet.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed

jaxspeed.simulate(8)


class Level(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
        h = nn.Conv(self.channels, (3, 3))(nn.swish(nn.GroupNorm(4)(h)))
        return h + nn.Conv(self.channels, (1, 1))(x)


class UNet(nn.Module):
    widths: tuple[int, ...] = (8, 16)

    @nn.compact
    def __call__(self, x):
        out, skips = x.shape[-1], []
        x = nn.Conv(self.widths[0], (3, 3))(x)
        for width in self.widths:
            skips.append(Level(width)(x))
            x = nn.avg_pool(skips[-1], (2, 2), (2, 2))
        x = Level(self.widths[-1])(x)
        for width, skip in zip(reversed(self.widths), reversed(skips)):
            x = jax.image.resize(x, (*skip.shape[:-1], x.shape[-1]), "nearest")
            x = Level(width)(jnp.concatenate([x, skip], -1))
        return nn.Conv(out, (3, 3))(x)


def loss_fn(model, batch, rng):
    noise = jax.random.normal(rng, batch["image"].shape)
    return jnp.mean((model(batch["image"] + noise) - batch["image"]) ** 2)


def images(seed):  # discs at random places
    x, y = np.random.default_rng(seed).uniform(2, 6, (2, 32, 1, 1))
    disc = (np.arange(8)[:, None] - y) ** 2 + (np.arange(8) - x) ** 2 < 6
    return {"image": np.where(disc, 1, -1)[..., None].astype(np.float32)}


engine = jaxspeed.initialize(
    model=UNet(),
    loss_fn=loss_fn,
    example_batch=images(0),
    config={
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
)
losses = [float(engine.train_batch(images(step))["loss"]) for step in range(40)]
print(str(engine.placements).partition(" parameter")[0])
print(f"squared error: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last")
