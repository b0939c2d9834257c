"""A run that takes seconds: what its tests start, stop and continue."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxspeed.run import source_of, train
from jaxspeed.run.start import checkpointer_of

CONFIG: dict[str, Any] = {
    "run": {"devices": "cpu:8", "steps": 20, "checkpoint_every": 4, "sample_tokens": 0},
    "model": {
        "family": "gpt2",
        "config": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 16,
            "dropout": 0.1,
        },
    },
    "data": {"source": "text", "path": "corpus.txt", "held_out": 0.05},
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def write(folder: Path, **changes: dict[str, Any]) -> Path:
    """A corpus and a config in the folder; sections in `changes` are laid over the config's."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 6, n)) for n in rng.integers(2, 7, 50)]
    lines = [" ".join(rng.choice(words, 12)) for _ in range(600)]
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(lines))
    config = json.loads(json.dumps(CONFIG))
    config["data"]["path"] = str(corpus)
    config["run"]["output"] = str(folder / "run")
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def environment() -> dict[str, str]:
    """For a child that chooses its own devices; what shortens compilation is kept."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**kept, "XLA_FLAGS": " ".join(flags), "NO_COLOR": "1", "COLUMNS": "80"}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "jaxspeed", *map(str, words)]


def jaxspeed(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment())


def started(config: Path, output: Path) -> subprocess.Popen[str]:
    """A run in a child."""
    return subprocess.Popen(
        command("train", config, "--output", output),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(config: Path, output: Path, **run: Any) -> Any:
    """A run in this process, to its end; `run` has other keys of its section."""
    given = json.loads(config.read_text())
    trainer = train(given | {"run": given["run"] | {"output": str(output), **run}})
    trainer.close()
    return trainer


def kept(config: Path, folder: Path | str, tag: str | None = None) -> dict[str, np.ndarray]:
    """Every array of a checkpoint of a run's folder, or of a bucket, by its path in the state."""
    import jax

    source, program = _source_and_program(config.read_text())
    source.folder.checkpoints = folder if isinstance(folder, str) else folder / "checkpoints"
    state = checkpointer_of(source).restore(program, tag=tag).state

    def array(x: Any) -> np.ndarray:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): array(x) for path, x in leaves}


@functools.cache
def _source_and_program(config: str) -> Any:
    """Of the runs that a test compares there is one config."""
    source = source_of(json.loads(config))
    return source, source.engine().program


def assert_bitwise_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    different = [path for path in a if a[path].tobytes() != b[path].tobytes()]
    assert not different
