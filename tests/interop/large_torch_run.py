"""An import of 0.5 billion parameters: `-m tests.interop.large_torch_run MODE FORMAT FOLDER`.

MODE is `write`, or `import`, which prints by how many bytes anonymous memory grew at most, above
what it was before and the state that is stored.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.interop import large_folder, torch_files

CONFIG = large_folder.CONFIG | {
    "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "vocab_size": 50304,
}  # fmt: skip
SMALL = large_folder.SMALL
KEYS = ("", "exp_avg", "exp_avg_sq")


def value(name: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = [*name.encode(), *key.encode()]
    return np.random.default_rng(seed).random(shape, np.float32)


class Drawn(dict):
    """Values that are drawn when they are read."""

    def __init__(self, key: str, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(shapes)
        self.key = key

    def items(self):
        return ((name, value(name, self.key, shape)) for name, shape in super().items())


def write(folder: Path, form: str, config: dict) -> None:
    shapes = large_folder.shapes(config)
    values = {key: Drawn(key, shapes) for key in KEYS}
    if form == "dcp":
        torch_files.dcp(folder, values)
    else:
        torch_files.deepspeed(folder, int(form), values, ranks=4)


def engine(config: dict):
    import jaxspeed

    sizes = {name: x for name, x in config.items() if name != "model_type"}
    return jaxspeed.initialize(
        config={
            "model": {"family": "llama", "config": sizes},
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "mesh": {"data": 4, "tensor": 2},
        }
    )


def imported(folder: Path) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    engine(SMALL).import_run(folder / "small")  # the runtime
    ours = engine(CONFIG)
    largest = max(s.nbytes for s in jax.tree.leaves(ours.state))
    stored = {id(s.data): s.data.nbytes for x in jax.tree.leaves(ours.state)
              for s in x.addressable_shards}  # fmt: skip
    grown: dict[str, int] = {}
    # Above the state, which is freed before the other is read.
    with large_folder.peak(grown, "import"):
        ours.import_run(folder / "large")
    up = np.asarray(ours.state.opt[0].nu["blocks"]["mlp"]["up"]["kernel"][23])
    expected = value("model.layers.23.mlp.up_proj.weight", "exp_avg_sq", (4096, 1024)).T
    assert np.array_equal(up, expected)
    count = sum(np.prod(shape) for shape in large_folder.shapes(CONFIG).values())
    print(json.dumps({"grown": grown["import"], "state": sum(stored.values()), "of": int(count),
                      "largest": largest}))  # fmt: skip


if __name__ == "__main__":
    mode, form, where = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if mode == "write":
        write(where / "large", form, CONFIG)
        write(where / "small", form, SMALL)
    else:
        imported(where)
