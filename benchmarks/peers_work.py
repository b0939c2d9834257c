"""The work that jaxspeed and its peers have in common, for `peers_cpu.py` and `gpu_peers.py`.

It is imported in the interpreter of each peer, and needs NumPy and safetensors alone.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[[Any], Any]  # from a batch [batch, seq + 1] to its loss, which float() waits for


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, its batches and its optimizer, AdamW with betas 0.9 and 0.999."""

    family: str = "gpt2"  # or "llama"
    layers: int = 6
    width: int = 384
    heads: int = 6
    kv_heads: int = 6
    hidden: int = 1536  # of the MLP
    vocab: int = 8192
    seq: int = 256
    batch: int = 8
    eps: float = 1e-5  # of the norms
    theta: float = 500000.0  # of Llama's rotary positions
    rate: float = 1e-3
    decay: float = 0.1
    clip: float = 0.0  # of the global norm; 0: none
    bf16: bool = False  # computes in bf16, with fp32 parameters and moments
    remat: str = "none"  # or "full", or "attention", which saves the results of its kernel

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.family == "gpt2"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Work":
        return cls(**json.loads(text))


FORMULA = (
    "MFU = (6 N + 12 L H Q T) x tokens/s / the card's dense bf16 peak; N: parameters without "
    "lookup-only tables, L layers, H query heads of Q dims, T tokens a sequence: causal attention "
    "counts in full, recomputation does not (PaLM, arXiv:2204.02311, appendix B)"
)


def flops_per_token(work: Work) -> int:
    """Model FLOPs of forward and backward, as in `FORMULA`."""
    w = work
    query, key = w.heads * w.head_dim, w.kv_heads * w.head_dim
    if w.family == "gpt2":
        attention = 2 * w.width * (query + key) + query + 2 * key + w.width
        mlp = 2 * w.width * w.hidden + w.hidden + w.width
        norm = 2 * w.width
    else:
        attention = 2 * w.width * (query + key)
        mlp = 3 * w.width * w.hidden
        norm = w.width
    parameters = w.layers * (attention + mlp + 2 * norm) + norm + w.vocab * w.width
    return 6 * parameters + 12 * w.layers * query * w.seq


def batches(work: Work) -> Iterator[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, work.vocab, (work.batch, work.seq + 1), dtype=np.int32)


def save_weights(file: str, params: Any) -> None:
    """jaxspeed's initial weights, from which all others start too."""
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {path.replace("/", "."): np.asarray(value) for path, value in params.items()}
    save_file({path: np.ascontiguousarray(value) for path, value in arrays.items()}, file)
