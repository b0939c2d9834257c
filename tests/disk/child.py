"""A run with state on a disk that is killed: it resumes from the newest checkpoint.

`python -m tests.disk.child FOLDER STEPS` prints each step, and at the end writes all arrays.
"""

import logging
import sys
from pathlib import Path

import jax
import numpy as np


def main(folder: Path, steps: int) -> None:
    from tests.disk.disk_models import batch_of, engine, program, values_of

    logging.getLogger("jaxspeed").setLevel(logging.ERROR)
    bf16 = {"bf16": {"enabled": True}}
    made = program("nvme", folder / "disk", bucket=40, offload={"buffer_count": 3}, **bf16)
    started = engine(made)
    started.load_checkpoint(folder / "checkpoints")
    print("ready", flush=True)
    for step in range(int(started.state.step), steps):
        started.train_batch(batch_of(made.batch.train, step))
        started.save_checkpoint(folder / "checkpoints")
        print(step, flush=True)
    started.wait()
    np.savez(folder / "values.npz", *values_of(started.state))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(Path(sys.argv[1]), int(sys.argv[2]))
