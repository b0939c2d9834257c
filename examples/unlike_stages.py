"""Split an encoder and a decoder, of unlike blocks, into the stages of a pipeline.

The model's code does not mention stages. Its traced loss is divided into contiguous parts of
similar work, and what a later stage reads, such as the encoder's output, is sent on. The script
prints the schedule, and the loss with two stages beside that without.

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
        self.encoder, self.decoder = Reader(rngs, 64), Reader(rngs, 128)

    def __call__(self, source, target):
        x, y = (self.words(each) + self.places(jnp.arange(8)) for each in (source, target))
        return self.words.attend(self.decoder(y, memory=self.encoder(x, memory=x)))


def loss_fn(model, batch):
    logits, wanted = model(batch["source"], batch["target"][:, :-1]), batch["target"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


source = np.random.default_rng(0).integers(1, WORDS, (64, 8), np.int32)
batch = {"source": source, "target": np.pad(source[:, ::-1], ((0, 0), (1, 0)))}  # backwards
losses = {}
for stages in (2, 1):
    engine = jaxspeed.initialize(
        model=lambda rngs: Translator(rngs),
        loss_fn=loss_fn,
        example_batch=batch,  # by which unlike blocks are found
        config={
            "train_batch_size": 64,
            "gradient_accumulation_steps": 4,
            "mesh": {"pipe": stages},  # of 8 devices; `data` has the others
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        },
    )
    losses[stages] = [float(engine.train_batch(batch)["loss"]) for _ in range(15)]
    if stages > 1:
        print(engine.compiled(batch).pipeline)
    engine.close()
print(f"loss of step 15: {losses[2][-1]:.5f} on 2 stages, {losses[1][-1]:.5f} without")
