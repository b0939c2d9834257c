"""One of several processes that feed batches sharded over samples and positions.

    python -m tests.sequence.feeding_process ADDRESS PROCESSES INDEX DATA SEQ

Prints the global batches, the rows and positions that lie on this process's devices, and the
tokens that this process has read, in its order.
"""

import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.data import Feeder, placer
from jaxspeed.data.samples import ALL, Batch
from jaxspeed.data.split import Split
from jaxspeed.placement.batch_dims import batch_specs
from jaxspeed.placement.mesh import build_mesh

BATCH, SEQ_LEN, STEPS = 4, 8, 3


class Numbered:
    """Sample i has the tokens 100 i, 100 i + 1, ..., and documents of three tokens."""

    tokens_each: int | None = SEQ_LEN

    def __init__(self) -> None:
        self.read_here: list[list[int]] = []

    def __len__(self) -> int:
        return 20

    def read(self, ids: np.ndarray, positions: slice = ALL) -> Batch:
        places = np.arange(SEQ_LEN + 1)[positions]
        tokens = (ids[:, None] * 100 + places).astype(np.int32)
        self.read_here += tokens.tolist()
        return {"tokens": tokens, "segment_ids": np.broadcast_to(places // 3, tokens.shape)}


def main(address: str, processes: int, index: int, data: int, seq: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, index)
    mesh = build_mesh({"data": data, "seq": seq})

    def shardings(batch: Batch) -> dict[str, NamedSharding]:
        return {
            k: NamedSharding(mesh, spec) for k, spec in batch_specs(batch, {}, mesh.shape).items()
        }

    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    batches, here = [], set()
    samples = Numbered()
    split = Split([samples], seed=0, shuffle=True, targets=True)
    with Feeder(split, BATCH, placer(shardings, BATCH), prefetch=STEPS) as feeder:
        for _ in range(STEPS):
            batch, _ = next(feeder)
            batches.append({name: np.asarray(gathered(x)).tolist() for name, x in batch.items()})
            for shard in batch["targets"].addressable_shards:
                here.add(tuple(range_of(x, size) for x, size in zip(shard.index, (BATCH, SEQ_LEN))))
    print(json.dumps({"batches": batches, "here": sorted(here), "read": samples.read_here}))


def range_of(index: slice, size: int) -> tuple[int, int]:
    start, stop, _ = index.indices(size)
    return start, stop


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
