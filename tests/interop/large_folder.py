"""A folder of 1.3 billion parameters in and out: `-m tests.interop.large_folder MODE FOLDER`.

MODE is `write`, or `import_and_export`, which prints as JSON by how many bytes anonymous memory
grew at most in each, above what it was before and the state that is stored.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

EMBED, LAYERS, HEADS, MLP, VOCAB = 2048, 24, 16, 5504, 32000
CONFIG = {
    "model_type": "llama", "hidden_size": EMBED, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": MLP,
    "vocab_size": VOCAB, "max_position_embeddings": 2048,
}  # fmt: skip
SMALL = CONFIG | {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    embed, mlp, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed)}
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        for name in "qkvo":
            found[f"{block}.self_attn.{name}_proj.weight"] = (embed, embed)
        found[f"{block}.mlp.gate_proj.weight"] = found[f"{block}.mlp.up_proj.weight"] = (mlp, embed)
        found[f"{block}.mlp.down_proj.weight"] = (embed, mlp)
        found[f"{block}.input_layernorm.weight"] = (embed,)
        found[f"{block}.post_attention_layernorm.weight"] = (embed,)
    return found | {"model.norm.weight": (embed,), "lm_head.weight": (vocab, embed)}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = [*name.encode()]
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def write(folder: Path, config: dict) -> None:
    from jaxspeed.interop.safetensors import Tensor, TensorFile

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: Tensor(n, shape, "float32") for n, shape in shapes(config).items()}
    file = TensorFile.create(folder / "model.safetensors", tensors, {})
    for name, tensor in tensors.items():
        file.array(name)[...] = values(name, tensor.shape)
        file.release()
    file.finish(folder / "model.safetensors")


def anonymous() -> int:
    """Bytes of memory that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


@contextmanager
def peak(into: dict[str, int], name: str) -> Iterator[None]:
    before, ended = anonymous(), threading.Event()
    into[name] = 0

    def sample() -> None:
        while not ended.wait(0.003):
            into[name] = max(into[name], anonymous() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    yield
    ended.set()
    thread.join()


def engine(folder: Path):
    import jaxspeed

    return jaxspeed.initialize(
        config={
            "model": {"pretrained": str(folder)},
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "mesh": {"data": 4, "tensor": 2},
        }
    )


def import_and_export(folder: Path) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    engine(folder / "small").save_pretrained(folder / "small_out")  # the runtime
    grown: dict[str, int] = {}
    with peak(grown, "import"):
        made = engine(folder / "in")
    leaves = {id(s.data): s.data.nbytes for x in jax.tree.leaves(made.state)
              for s in x.addressable_shards}  # fmt: skip
    grown["import"] -= sum(leaves.values())
    with peak(grown, "export"):
        made.save_pretrained(folder / "out")
    print(json.dumps(grown))


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(where / "in", CONFIG)
        write(where / "small", SMALL)
    else:
        import_and_export(where)
