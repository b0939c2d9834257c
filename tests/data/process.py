"""One of several processes that feed the same global batches; run by test_processes.py.

    python -m tests.data.process ADDRESS PROCESSES INDEX

Prints, for each step, the rows that this process has read and the sum over the global batch.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.data import Feeder, placer
from jaxspeed.data.samples import ArrayRows
from jaxspeed.data.split import Split

BATCH, STEPS, START = 16, 6, 2


class Remembering(ArrayRows):
    def __init__(self):
        super().__init__({"x": np.arange(45, dtype=np.int32)})
        self.seen = []

    def read(self, ids, positions):
        self.seen += ids.tolist()
        return super().read(ids, positions)


def main(address: str, processes: int, index: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, index)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    at = NamedSharding(mesh, PartitionSpec("data"))
    samples = Remembering()
    split = Split([samples], seed=0, shuffle=True)
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    batches = []
    place = placer(lambda batch: jax.tree.map(lambda _: at, batch), BATCH)
    with Feeder(split, BATCH, place, start_step=START, prefetch=1) as feeder:
        for _ in range(STEPS):
            batch, _ = next(feeder)
            batches.append(np.asarray(gathered(batch["x"])).tolist())
    jnp.zeros(()).block_until_ready()
    print(json.dumps({"batches": batches, "seen": samples.seen}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
