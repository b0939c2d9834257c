"""Train a small language model on bytes, then stream text from it.

The model is one of jaxspeed's families, and the text has three sentences in random order.
`engine.stream` yields pieces of text as they are drawn, with a cache of keys and values, from the
sharded parameters that the next step would train.

    python examples/generate.py
"""

import numpy as np

import jaxspeed

jaxspeed.simulate(8)
LINES = ("the cat sat on the mat. ", "a dog ran to the sea. ", "my bird can sing all day. ")


class Bytes:
    """A tokenizer is an object with these two methods."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def batch_of(seed):
    random = np.random.default_rng(seed)
    texts = ["".join(random.choice(LINES, 4)) for _ in range(16)]
    return {"tokens": np.array([Bytes().encode(text)[:65] for text in texts])}


engine = jaxspeed.initialize(
    config={
        "train_batch_size": 16,
        "model": {
            "family": "llama",
            "config": {
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 150, "warmup_num_steps": 10},
        },
        "zero_optimization": {"stage": 3},
    }
)
losses = [float(engine.train_batch(batch_of(step))["loss"]) for step in range(150)]
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")

text = ""
for piece in engine.stream(["the cat"], 60, temperature=0, tokenizer=Bytes()):
    text += piece.text
    print(piece.text, end="", flush=True)
sentences = f"the cat{text}".split(". ")[:-1]  # the last one is not complete
known = sum(f"{sentence}. " in LINES for sentence in sentences)
print(f"\n{known} of {len(sentences)} sentences are of the text that was trained on")
