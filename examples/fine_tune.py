"""Fine-tune a Hugging Face folder with LoRA, and export the adapter and the merged weights.

The folder is one that the script makes itself, a Llama with random weights; any other folder, or
what `transformers` saved, is read alike. Adapter and head learn to count, modulo 64, while the
rest stays frozen. The merged folder has no trace of jaxspeed or of LoRA: read again, it has the
same loss as the base with its adapter.

    python examples/fine_tune.py
"""

import tempfile
from pathlib import Path

import numpy as np
from jaxspeed.models import from_pretrained

import jaxspeed

jaxspeed.simulate(8)
folder = Path(tempfile.mkdtemp())
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
run = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}}}
made = jaxspeed.initialize(config={**run, "model": {"family": "llama", "config": sizes}})
made.save_pretrained(folder / "base")


def counting(seed):
    start = np.random.default_rng(seed).integers(0, 64, (16, 1))
    return {"tokens": (start + np.arange(17)) % 64}


engine = jaxspeed.initialize(
    model=from_pretrained(folder / "base"),
    config={
        **run,
        "lora": {"r": 8, "lora_alpha": 16, "modules_to_save": ["head"]},
        "zero_optimization": {"stage": 3},
    },
)
before = float(engine.eval_batch(counting(999))["loss"])
for step in range(20):
    engine.train_batch(counting(step))
after = float(engine.eval_batch(counting(999))["loss"])
engine.save_adapter(folder / "adapter")  # as PEFT reads it
engine.save_pretrained(folder / "merged", merge=True)  # as transformers reads it
engine.close()

merged = jaxspeed.initialize(model=from_pretrained(folder / "merged"), config=run)
again = float(merged.eval_batch(counting(999))["loss"])
print("adapter:", sorted(file.name for file in (folder / "adapter").iterdir()))
print("merged: ", sorted(file.name for file in (folder / "merged").iterdir()))
print(f"loss {before:.3f} before, {after:.3f} with the adapter, {again:.3f} of the merged folder")
