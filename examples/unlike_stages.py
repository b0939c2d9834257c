"""Split an encoder and a decoder, of unlike blocks, into the stages of a pipeline.

The model's code does not mention stages. Its traced loss is divided into contiguous parts of
similar work, and what a later stage reads, such as the encoder's output, is sent on. The script
prints the schedule and compares a step with the same step on one device.

    python examples/unlike_stages.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxspeed

jaxspeed.simulate(8)
WIDTH, WORDS = 32, 16


class Reader(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, hidden: int):
        self.query, self.key, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x, memory):
        scores = jnp.einsum("bqe,bke->bqk", self.query(x), self.key(memory)) / WIDTH**0.5
        x = x + self.out(nnx.softmax(scores) @ memory)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Translator(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words, self.places = (nnx.Embed(n, WIDTH, rngs=rngs) for n in (WORDS, 8))
        self.encoder = nnx.List([Reader(rngs, 64) for _ in range(2)])
        self.decoder = nnx.List([Reader(rngs, 128) for _ in range(2)])

    def __call__(self, source, target):
        memory, x = (self.words(each) + self.places(jnp.arange(8)) for each in (source, target))
        for block in self.encoder:
            memory = block(memory, memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.words.attend(x)


def loss_fn(model, batch):
    logits, wanted = model(batch["source"], batch["target"][:, :-1]), batch["target"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


source = np.random.default_rng(0).integers(1, WORDS, (64, 8), np.int32)
batch = {"source": source, "target": np.pad(source[:, ::-1], ((0, 0), (1, 0)))}  # backwards
engine = jaxspeed.initialize(
    model=lambda rngs: Translator(rngs),
    loss_fn=loss_fn,
    example_batch=batch,  # by which unlike blocks are found
    config={
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "mesh": {"pipe": 2},  # of 8 devices; `data` is 4
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    },
)
losses = [float(engine.train_batch(batch)["loss"]) for _ in range(40)]
print(engine.compiled(batch).pipeline)
print(str(engine.check(batch)).splitlines()[0])
print(f"2 stages: loss {losses[0]:.3f} to {losses[-1]:.3f}")
