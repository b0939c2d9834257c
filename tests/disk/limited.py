"""Training in a process whose memory may grow by less than the optimizer's state.

`python -m tests.disk.limited DEVICE FOLDER`: 50 million parameters, of which masters and moments
are 600 MB. A smaller model is trained first, so that what JAX itself needs is counted before.
"""

import re
import resource
import sys
from pathlib import Path

import jax

TABLES, ROWS, WIDTH = 16, 24_576, 128
STATE_BYTES = 12 * TABLES * ROWS * WIDTH


def model(rows):
    import jax.numpy as jnp

    def init(key):
        return {f"t{i}": jnp.full((rows, WIDTH), 0.01 * (i + 1)) for i in range(TABLES)}

    def apply(params, x):
        ids = x[:, 0].astype(jnp.int32)
        return sum(jnp.mean(table[ids], -1) for table in params.values())

    return init, apply


def trained(rows, device, folder):
    import numpy as np

    import jaxspeed
    from tests.disk.disk_models import loss

    offload = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"sub_group_size": 1 << 20, "offload_optimizer": offload},
        "run": {"devices": "cpu:1"},
    }
    engine = jaxspeed.initialize(model(rows), loss, config)
    batch = {"x": np.ones((2, 1), np.float32), "y": np.ones(2, np.float32)}
    return [float(engine.train_batch(batch)["loss"]) for _ in range(2)]


def main(device: str, folder: str) -> None:
    trained(64, device, folder)
    status = Path("/proc/self/status").read_text()
    private = 1024 * int(re.search(r"VmData:\s*(\d+)", status)[1])
    limit = private + int(0.95 * STATE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(trained(ROWS, device, folder))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(*sys.argv[1:])
