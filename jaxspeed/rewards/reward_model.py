"""Reward models: frozen models in folders, whose scalar head scores a completion's last token."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.data.feeder import placer, reader
from jaxspeed.data.model_limits import limits_of
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import ConfigError, DataError, JaxspeedError
from jaxspeed.generation.text_row import bucket
from jaxspeed.interop.pretrained import refuse_other_tokenizer
from jaxspeed.objectives.model_logprobs import head_input
from jaxspeed.ops.next_tokens import NextTokens
from jaxspeed.train.array_program import array_function
from jaxspeed.train.frozen_model import frozen_program
from jaxspeed.train.program import Program

SCORES = "scores"


class _Row(Protocol):
    """What is read of a `RewardRow`."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> Sequence[int]: ...
    @property
    def where(self) -> str: ...


def check_reward_model(folder: str) -> None:
    """Raise ConfigError unless a folder has a reward model; no weights are read."""
    families = importlib.import_module("jaxspeed.models")
    try:
        config = families.from_pretrained(folder).config
    except JaxspeedError as error:
        raise ConfigError(
            f"objective.rewards: {folder} is neither a function package.module:name nor the folder "
            f"of a reward model: {error}"
        ) from None
    if not families.is_classifier(config) or config.num_labels != 1:
        raise ConfigError(
            f"objective.rewards: {folder} is no reward model, which scores sequences with one "
            "label; objective.type: reward trains one"
        )


class RewardModel:
    """A folder's reward model, on the mesh of another program.

    Attributes:
      program: its own.

    Raises:
      ConfigError: it has another tokenizer or vocabulary than the model that trains.
    """

    def __init__(self, program: Program, folder: str, tokenizer: Tokenizer | None) -> None:
        what, section = "objective.rewards", FrozenModelSection.model_validate(folder)
        self.folder, self.program = folder, frozen_program(program, section, what)
        weights: Any = self.program.model.weights
        refuse_other_tokenizer(tokenizer, weights, what)
        self._size = program.batch.train // program.batch.accumulation
        self._context = limits_of(self.program.source.model.config).seq_len
        self._state = self.program.init(0)
        several = jax.process_count() > 1
        at = NamedSharding(self.program.mesh, PartitionSpec()) if several else None
        self._function = self.program.jit(array_function(self.program, scores), out_shardings=at)
        self._compiled = dict[int, Any]()
        self._processes = Processes()

    def send(self, rows: Sequence[_Row]) -> Callable[[], np.ndarray]:
        """Start to compute the scores of completions; what returns them, fp32 [rows].

        Raises:
          DataError: one is longer than the model reads.
        """
        longest = max(rows, key=_length)
        if self._context is not None and _length(longest) > self._context:
            raise DataError(
                f"{longest.where}: prompt and completion have {_length(longest)} tokens, and the "
                f"reward model {self.folder} reads {self._context}"
            )
        seq = bucket(_length(longest), self._context or 1 << 30)
        place = placer(self.program.batch_shardings, self._size)
        sent = []
        for first in range(0, len(rows), self._size):
            batch = place(reader(_arrays(rows[first : first + self._size], self._size, seq)))
            with self.program.set_mesh():
                if seq not in self._compiled:
                    lowered = self._function.lower(self._state, batch)
                    self._compiled[seq] = lowered.compile()
                    self._processes.wait("compiling a reward model")
                sent.append(self._compiled[seq](self._state, batch)[SCORES])
        return lambda: np.concatenate(jax.device_get(sent))[: len(rows)]


def scores(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The scores [rows] of texts: those of their last tokens that are no padding."""
    tokens, padding = batch["tokens"], model.config.pad_token_id
    hidden = head_input(model, NextTokens(tokens, tokens, None, None), train=False).hidden
    is_text = batch["mask"] != 0
    if padding is not None:  # as transformers pools
        is_text &= tokens != padding
    places = jnp.arange(tokens.shape[1])
    last = jnp.max(jnp.where(is_text, places, 0), axis=1, keepdims=True)
    of_tokens = model.token_scores(hidden)[..., 0]
    return {SCORES: jnp.sum(jnp.where(places == last, of_tokens, 0), axis=1)}


def _length(row: _Row) -> int:
    return len(row.prompt_tokens) + len(row.tokens)


def _arrays(rows: Sequence[_Row], size: int, seq: int) -> dict[str, np.ndarray]:
    tokens, mask = np.zeros((2, size, seq), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : _length(row)] = [*row.prompt_tokens, *row.tokens]
        mask[i, : _length(row)] = 1
    return {"tokens": tokens, "mask": mask}
