"""Plan the training of Llama 3 8B on eight H100s that are not attached.

The step of a run is traced for as many devices as the target has, without an array, and its memory
and collectives are estimated from the trace. The script compares ZeRO 1 with ZeRO 3: only ZeRO 3
fits into 80 GB, and it gathers parameters in every micro-batch for that.

    python examples/plan.py
"""

from pathlib import Path

import yaml

import jaxspeed

config = yaml.safe_load((Path(__file__).parents[1] / "configs" / "llama3_8b.yaml").read_text())
config["train_micro_batch_size_per_gpu"] = 2

for stage in (1, 3):
    config["zero_optimization"] = {"stage": stage}
    figures = jaxspeed.plan(config, "h100:8").figures()  # what `jaxspeed plan --json` prints
    memory, time = figures["memory"], figures["time"]
    print(f"\nZeRO {stage}, a step of {time['step']:.2f} s, memory of a device:")
    largest = sorted(memory["components"], key=lambda part: -part["bytes"])[:5]
    for part in largest:
        print(f"  {part['bytes'] / 1e9:6.2f} GB  {part['name']}")
    for sent in (each for each in time["exchanges"] if each["bytes"] > 1e9):
        print(f"  {sent['bytes'] / 1e9:6.1f} GB sent a step: {sent['kind']} of {sent['what']}")
    print(f"ZeRO {stage} needs {memory['device'] / 1e9:.0f} GB of a device: {memory['verdict']}")
