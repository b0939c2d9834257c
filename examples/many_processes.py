"""Train in two processes on this host, and compare with one process.

Started as it is, the script runs itself under `jaxspeed launch`: two processes of four devices
each, which find each other and train as one. Every process makes the batch of all and places the
rows of its own devices. Then the script trains in one process of eight devices: the losses are
equal. `--hostfile` starts such processes on hosts over ssh, and `--on` under a scheduler.

    python examples/many_processes.py
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxspeed


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train():
    engine = jaxspeed.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        config={
            "train_batch_size": 64,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    losses = []
    for step in range(10):
        x = np.random.default_rng(step).normal(size=(64, 16)).astype(np.float32)
        losses.append(float(engine.train_batch({"x": x, "y": np.tanh(x[:, 0])})["loss"]))
    engine.close()
    if jax.process_index() == 0:
        places = f"{jax.process_count()} x {jax.local_device_count()} devices"
        print(f"{places}: loss {losses[0]:.5f} to {losses[-1]:.5f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        jaxspeed.start_processes()  # a no-op in a process alone
        train()
    else:
        launch = [sys.executable, "-m", "jaxspeed", "launch", "--processes", "2"]
        launch += ["--devices-per-process", "4", "--", __file__, "train"]
        subprocess.run(launch, check=True)
        jaxspeed.simulate(8)
        train()
