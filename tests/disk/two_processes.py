"""One of two processes with two devices each: `python -m tests.disk.two_processes FOLDER`."""

import logging
import sys
from pathlib import Path

import jax
import numpy as np

BF16 = {"bf16": {"enabled": True}}
EMA = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}, "ema_decay": 0.9}}
CONFIG = {"mesh": {"data": 4}, "stage": 2, "bucket": 40, **BF16, **EMA}
STEPS = 4


def steps(started, first, last):
    from tests.disk.disk_models import batch_of

    for step in range(first, last):
        batch = batch_of(started.program.batch.train, step)
        at = started.program.batch_shardings(batch)
        placed = {
            name: jax.make_array_from_callback(x.shape, at[name], lambda rows, x=x: x[rows])
            for name, x in batch.items()
        }
        float(started.train_batch(placed)["loss"])


def main(folder: Path) -> None:
    from jaxspeed.launch.environment import start_processes

    start_processes()
    from tests.disk.disk_models import engine, program

    logging.getLogger("jaxspeed").setLevel(logging.ERROR)
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    first = engine(program("nvme", folder / "disk", **CONFIG))
    steps(first, 0, 2)
    first.save_checkpoint(folder / "checkpoints")
    steps(first, 2, STEPS)
    first.wait()
    again = engine(program("nvme", folder / "disk", **CONFIG))
    again.load_checkpoint(folder / "checkpoints")
    steps(again, 2, STEPS)
    for path, x in first.state.params.items():
        other = again.state.params[path].addressable_data(0)
        np.testing.assert_array_equal(np.asarray(x.addressable_data(0)), np.asarray(other))
    if jax.process_index() == 0:
        values = {path: x.addressable_data(0) for path, x in first.state.params.items()}
        fp32 = {path: np.asarray(x, np.float32) for path, x in values.items()}
        np.savez(folder / "params.npz", **fp32)
    print("resumed bitwise")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    main(Path(sys.argv[1]))
