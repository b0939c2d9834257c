"""Pairs of completions, a model and its reference in Hugging Face's folders, and rows of pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspeed.models import from_pretrained
from safetensors.numpy import load_file, save_file

from jaxspeed.interop.mapping import bind
from jaxspeed.objectives.pairs import most_pairs
from jaxspeed.user_models import adapt_model
from tests.data import chat_examples

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 400, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
# Of unequal lengths: either side is the longer one, and completions of one word.
PAIRS = [
    {"prompt": "the of ", "chosen": "to and in it", "rejected": "he was for on are the the of"},
    {"prompt": "it is", "chosen": " you that was in the of to", "rejected": " he"},
    {"prompt": "it is the", "chosen": "re", "rejected": " he was for"},
    {"prompt": "that he was for the of and", "chosen": " on", "rejected": " are"},
    {"prompt": "you", "chosen": " that is in the of", "rejected": " he is and to on it the of"},
]
Side = tuple[list[int], list[int]]  # (tokens, mask), the mask 1 at a completion's tokens


def folders(
    references: Any, folder: Path, classifier: bool = False, scale: float = 0.08
) -> tuple[Path, Path]:
    """The folders of a model and of its reference, whose weights differ."""
    name = "LlamaForSequenceClassification" if classifier else "LlamaForCausalLM"
    fields = SIZES | ({"num_labels": 1} if classifier else {})
    for role, seed in (("model", 0), ("reference", 1)):
        chat_examples.tokenizer_folder(
            folder / role, chat_template=chat_examples.template("chatml")
        )
        references.call("families.save", case=("Llama", name, fields), folder=folder / role)
        file = folder / role / "model.safetensors"
        rng = np.random.default_rng(seed)
        tensors = {
            name: x + rng.normal(size=x.shape).astype(np.float32) * scale
            for name, x in load_file(file).items()
        }
        if "lm_head.weight" in tensors:  # so that the mean of the logits is not near 0
            tensors["lm_head.weight"] += 0.1
        save_file(tensors, file, {"format": "pt"})
    return folder / "model", folder / "reference"


def _entire(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


class Bound:
    """A folder's model: its parameters in fp32, and what it is with such parameters."""

    def __init__(self, folder: Path, loss: Any = None):
        self._pretrained = from_pretrained(folder)
        self._model = adapt_model(self._pretrained, loss or self._pretrained.loss)
        shapes = {leaf.path: leaf.shape for leaf in self._model.leaves}
        weights = self._pretrained.weights
        weights.check(shapes)
        self.parameters = {
            path: jnp.asarray(weights.read(path, _entire(shape), np.float32))
            for path, shape in shapes.items()
        }

    def __call__(self, parameters: Mapping[str, jax.Array] | None = None) -> Any:
        parameters = self.parameters if parameters is None else parameters
        rest = self._model.init(0)[1]
        return self._model.bind(dict(parameters), rest, train=True, step=0, micro=0)

    def by_tensor(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Arrays of the parameters' shapes as tensors of the folder."""
        shapes = {path: x.shape for path, x in values.items()}
        bound = bind(self._pretrained.weights.table, shapes)
        tensors = {name: np.full(shape, np.nan) for name, shape in bound.tensors.items()}
        for path, x in values.items():
            for piece in bound.pieces[path]:
                piece.write(tensors[piece.tensor], _entire(x.shape), np.asarray(x))
        return tensors


def rows(pairs: list[list[Side]], seq_len: int, per_row: int) -> dict[str, jax.Array]:
    """The arrays of pairs, as many to a row as are asked for."""
    assert per_row <= most_pairs(seq_len)
    count = -(-len(pairs) // per_row)
    names = ("tokens", "segment_ids", "positions", "mask")
    batch = {name: np.zeros((count, seq_len + 1), np.int32) for name in names}
    for row in range(count):
        begin = 0
        for p, pair in enumerate(pairs[row * per_row :][:per_row]):
            for side, (tokens, mask) in enumerate(pair):
                end = begin + len(tokens)
                batch["tokens"][row, begin:end] = tokens
                batch["mask"][row, begin:end] = mask
                batch["segment_ids"][row, begin:end] = 2 * p + 1 + side
                batch["positions"][row, begin:end] = np.arange(len(tokens))
                begin = end
        assert begin <= seq_len + 1
    return {name: jnp.asarray(x) for name, x in batch.items()}
