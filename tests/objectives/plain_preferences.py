"""Batches of pairs, and the training on them in plain Flax and Optax, on one device.

The plain loop reads each completion from its row and runs the model on it alone, without segments;
its losses are written for a list of pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxspeed.data.samples import with_targets
from tests.adapters.lora_loop import merged

VOCAB, SEQ, ROWS = 64, 32, 32
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
Batch = dict[str, np.ndarray]


def batch_of_pairs(seed: int = 0, *, unpaired: bool = False, rows: int = ROWS) -> Batch:
    """Rows of 0 to 3 pairs of unlike lengths; the first rows of a batch have more."""
    rng = np.random.default_rng(seed)
    names = ("tokens", "segment_ids", "positions", "mask", "desirable")
    batch = {name: np.zeros((rows, SEQ + 1), np.int32) for name in names}
    for row in range(rows):
        at = 0
        for pair in range(rng.integers(1, 4) if row < rows // 2 else rng.integers(0, 2)):
            prompt = rng.integers(0, VOCAB, rng.integers(1, 4))
            for side in (1, 2):
                answer = rng.integers(0, VOCAB, rng.integers(1, 4))
                ids = np.concatenate([prompt, answer])
                here = slice(at, at + len(ids))
                if here.stop > SEQ + 1:
                    break
                batch["tokens"][row, here] = ids
                batch["segment_ids"][row, here] = 2 * pair + side
                batch["positions"][row, here] = np.arange(len(ids))
                batch["mask"][row, here] = np.arange(len(ids)) >= len(prompt)
                if side == 1:
                    batch["desirable"][row, at] = rng.choice([-1, 1])
                at = here.stop
    if not unpaired:
        del batch["desirable"]
    reference = rng.normal(-5, 1, (rows, SEQ)).astype(np.float32)
    counts = batch["mask"][:, 1:] * (batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1])
    return {**batch, "reference_logprobs": np.where(counts, reference, 0)}


def for_seq(batch: Batch) -> Batch:
    """As the data give it where sequences are sharded."""
    reference = {"reference_logprobs": batch["reference_logprobs"]}
    arrays = {name: x for name, x in batch.items() if name not in reference}
    return with_targets(arrays) | reference


@dataclass(frozen=True)
class Side:
    """The completions of one side, [pairs, length]; in the order of their rows."""

    tokens: np.ndarray
    mask: np.ndarray  # of the targets, [pairs, length - 1]
    prompts: np.ndarray  # the targets that are of prompts
    reference: np.ndarray
    label: np.ndarray  # [pairs]


def sides_of(batch: Batch) -> tuple[Side, Side]:
    found: tuple[list[Any], list[Any]] = ([], [])
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            (at,) = np.nonzero(batch["segment_ids"][row] == segment)
            pad = SEQ + 1 - len(at)
            real = np.pad(np.ones(len(at) - 1, np.int32), (0, pad))
            mask = np.pad(batch["mask"][row, at[1:]], (0, pad))
            reference = np.pad(batch["reference_logprobs"][row, at[:-1]], (0, pad))
            label = batch["desirable"][row, at[0]] if "desirable" in batch else 0
            tokens = np.pad(batch["tokens"][row, at], (0, pad))
            found[1 - segment % 2].append((tokens, mask, real - mask, reference, label))
    chosen, rejected = (Side(*map(np.stack, zip(*side, strict=True))) for side in found)
    return chosen, rejected


class Scored:
    """Log-probabilities of the tokens of one side, and their sums."""

    def __init__(self, model: Any, side: Side, reference: Any = None):
        def logprobs(model: Any) -> tuple[jax.Array, jax.Array]:
            logits = model(side.tokens[:, :-1])
            logp = jax.nn.log_softmax(logits)
            return jnp.take_along_axis(logp, side.tokens[:, 1:, None], 2)[..., 0], logits

        self.side = side
        self.each, self.logits = logprobs(model)
        self.reference = side.reference if reference is None else logprobs(reference)[0]
        self.count = side.mask.sum(1)
        self.logp = (self.each * side.mask).sum(1)
        self.ratio = self.logp - (self.reference * side.mask).sum(1)
        self.mean = self.logp / self.count


PlainLoss = Callable[[Scored, Scored, Any], Any]


class PlainLoop:
    """Steps of SGD with momentum on a loss of a batch's pairs."""

    def __init__(
        self,
        factory: Callable[[Any], Any],
        values: Mapping[str, Any],
        loss: PlainLoss,
        rate: float,
        scale: float = 0.0,
        auxiliary: Callable[[Any, Batch], Any] | None = None,
    ):
        model = nnx.jit(lambda: factory(nnx.Rngs(0)))()
        self.graph, self.state, self.rest = nnx.split(model, nnx.Param, ...)
        self.scale, self.plain_loss, self.auxiliary = scale, loss, auxiliary
        self.trained = {p: x for p, x in values.items() if p.startswith("lora/") or not scale}
        self.fixed = {p: x for p, x in values.items() if p not in self.trained}
        self.optimizer = optax.sgd(rate, momentum=0.9)
        self.opt = self.optimizer.init(self.trained)

    def model(self, values: Mapping[str, Any]) -> Any:
        flat = [
            (keys, x.replace(values["/".join(map(str, keys))]))
            for keys, x in nnx.to_flat_state(self.state)
        ]
        return nnx.merge(self.graph, nnx.from_flat_state(flat), self.rest)

    def loss(self, trained: Mapping[str, Any], batch: Batch, sides: Any, micro: list[Batch]) -> Any:
        values = self.fixed | trained
        model = self.model(merged(values, self.scale) if self.scale else values)
        base = self.model(self.fixed) if self.scale else None
        scored = [Scored(model, side, base) for side in sides]
        total = self.plain_loss(*scored, sum)
        if self.auxiliary:
            total += sum(self.auxiliary(model, part) for part in micro) / len(micro)
        return total

    def step(self, batch: Batch, micro: list[Batch] | None = None) -> tuple[float, float]:
        """(loss, norm of the gradient)."""
        sides = sides_of(batch)
        loss, grads = jax.jit(
            jax.value_and_grad(lambda p: self.loss(p, batch, sides, micro or [batch]))
        )(self.trained)
        updates, self.opt = self.optimizer.update(grads, self.opt, self.trained)
        self.trained = optax.apply_updates(self.trained, updates)
        return float(loss), float(optax.tree.norm(grads))
