"""How far the log-probabilities of a rollout are from those that training computes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxspeed.generation import Rollout
from jaxspeed.generation.rollout import SAMPLED
from jaxspeed.ops.next_tokens import IGNORED
from jaxspeed.train.program import Program

# Of the mean difference, relative to max(1, |log p|): rounding of logits.
TOLERANCE = {"float32": 2e-5, "16 bits": 5e-3}


class RolloutCheck(NamedTuple):
    """Differences |trained - sampled| / max(1, |sampled|) of log-probabilities, over drawn tokens.

    Attributes:
      ratios: the share of tokens whose ratio of probabilities is not within 0.9 and 1.1.
      tolerance: of the mean.
    """

    tokens: int
    mean: float
    percentile_99_9: float
    largest: float
    ratios: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.mean <= self.tolerance

    def __str__(self) -> str:
        state = "ok" if self.ok else "the sampler and the trainer have different distributions"
        return (
            f"log-probabilities of {self.tokens:,} drawn tokens: {self.mean:.2g} apart in the mean "
            f"(tolerance {self.tolerance:.2g}), {self.percentile_99_9:.2g} at the 99.9th "
            f"percentile, {self.largest:.2g} at most; {self.ratios:.2%} of the ratios are off by "
            f"more than 10%: {state}"
        )


def check_rollout(rollout: Rollout, logprobs: Callable[..., Any], program: Program) -> RolloutCheck:
    """The check; `logprobs` is that of the engine whose parameters drew the rollout."""
    batch = rollout.batch()
    sampled = batch.pop(SAMPLED)
    size = program.batch.train // program.batch.accumulation
    size = -(-size // program.ranks) * program.ranks
    trained = []
    for start in range(0, len(sampled), size):
        rows = {name: x[start : start + size] for name, x in batch.items()}
        more = size - len(rows["tokens"])
        rows = {
            name: np.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)), mode="edge")
            for name, x in rows.items()
        }
        values = logprobs(rows, temperature=rollout.sampling.temperature or 1.0).logprobs
        trained.append(np.asarray(process_allgather(values, tiled=True))[: size - more])
    counted = batch["targets"] != IGNORED
    of_sampler, of_trainer = sampled[counted], np.concatenate(trained)[counted]
    apart = np.abs(of_trainer - of_sampler) / np.maximum(1, np.abs(of_sampler))
    ratio = np.exp(of_trainer.astype(np.float64) - of_sampler)
    dtype = program.traced_loss.compute_dtype or jnp.float32
    autocast = program.traced_loss.autocast is not None
    narrow = autocast or jnp.dtype(dtype).itemsize == 2
    return RolloutCheck(
        len(apart),
        float(apart.mean()),
        float(np.quantile(apart, 0.999)),
        float(apart.max()),
        float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        TOLERANCE["16 bits" if narrow else "float32"],
    )
