"""Completions that were sampled together, with what trains on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.objectives.model_logprobs import ROUTING, THRESHOLDS
from jaxspeed.objectives.padding import bucket
from jaxspeed.objectives.policy_gradient import SAMPLED
from jaxspeed.ops.next_tokens import IGNORED
from jaxspeed.ops.vocabulary_parallel import NO_THRESHOLD


class SampledCompletion(NamedTuple):
    """What was sampled after a prompt.

    Attributes:
      prompt: its number among the prompts.
      generation: the number among the prompt's completions.
      text: without a stop string or an end token; empty without a tokenizer.
      tokens: with the end token that was drawn, if one was.
      logprobs: fp32 [tokens], in the distributions that the tokens were drawn from.
      thresholds: fp32 [tokens], which describe these: see `ops.token_logprobs`.
      ended_by: "end" (a token), "stop" (a stop string) or "tokens" (their number: truncated).
      routing: of a mixture, int32 [tokens of prompt and completion but the last, routers, k]: the
        experts that its routers chose for each.
    """

    prompt: int
    generation: int
    text: str
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    thresholds: np.ndarray
    ended_by: str
    routing: np.ndarray | None = None


@dataclass(frozen=True)
class Rollout:
    """The completions of prompts, by prompt and generation.

    Attributes:
      prompts: the tokens of all prompts.
      dropped: the numbers of the prompts that are too long, which have no completions.
      sampling: how tokens were drawn.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[SampledCompletion]
    dropped: Sequence[int]
    sampling: Sampling

    def batch(self, most: int = 1 << 30) -> dict[str, np.ndarray]:
        """A batch of a language model, a row for each completion, whose tokens are the targets.

        Rows are padded to one of a few lengths, of at most `most`. `sampled_logprobs` and
        `thresholds` [rows, seq] are those of the targets. `routing` [rows, seq, routers, k] of a
        mixture are the choices of its routers, which the loss takes; -1 where there is none.
        """
        texts = [(*self.prompts[row.prompt], *row.tokens) for row in self.completions]
        shape = len(texts), bucket(max(map(len, texts)) - 1, most)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
        sampled = np.zeros(shape, np.float32)
        thresholds = np.full(shape, NO_THRESHOLD, np.float32)
        for i, (text, row) in enumerate(zip(texts, self.completions, strict=True)):
            tokens[i, : len(text) - 1] = text[:-1]
            here = slice(len(text) - 1 - len(row.tokens), len(text) - 1)
            targets[i, here], sampled[i, here] = row.tokens, row.logprobs
            thresholds[i, here] = row.thresholds
        batch = {"tokens": tokens, "targets": targets, SAMPLED: sampled, THRESHOLDS: thresholds}
        choices = [row.routing for row in self.completions]
        if some := [x for x in choices if x is not None]:
            batch[ROUTING] = np.full((*shape, *some[0].shape[1:]), -1, np.int32)
            for of_row, x in zip(batch[ROUTING], choices, strict=True):
                if x is not None:
                    of_row[: len(x)] = x
        return batch
