"""A user's function that samples in place of the model, in the form of TRL's `rollout_func`.

    def rollout(prompts, trainer):
        return {"prompt_ids": ..., "completion_ids": ..., "logprobs": ..., "env_mask": ...}

`prompts` has each prompt as often as it is to be completed; the lists of the result have an item
for each of them.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspeed.checkpoint.process_agreement import Processes, is_first
from jaxspeed.config.objective_keys import imported
from jaxspeed.config.rollout_options import SamplingOptions
from jaxspeed.errors import ConfigError
from jaxspeed.placement.paths import listed
from jaxspeed.rewards.scoring import RESERVED, TrainerProgress
from jaxspeed.user_models.user_code import foreign

PROMPTS, COMPLETIONS, LOGPROBS, MASK = "prompt_ids", "completion_ids", "logprobs", "env_mask"


@dataclass(frozen=True)
class RolloutTrainer:
    """What the function has of the run: the second argument, with TRL's names.

    `engine.rollout` samples with the current parameters, on all processes together.
    """

    engine: Any
    processing_class: Any  # the tokenizer
    args: SamplingOptions  # of the objective
    state: TrainerProgress


class SampledRow(NamedTuple):
    """A completion that the function has sampled.

    Attributes:
      tokens: of the completion, those of tools included.
      logprobs: fp32 [tokens], of the function's sampler; nan where a token is not the model's.
      is_model: bool [tokens]: whether the model has sampled them.
      columns: further ones, for rewards.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray | None
    is_model: np.ndarray
    columns: dict[str, Any]


class RolloutFunction:
    """The function of `objective.rollout`.

    Args:
      path: package.module:name.
      most: tokens of a completion.
      context: tokens that the model reads, if known.
      vocab_size: of the model, if known.

    Raises:
      ConfigError: it cannot be imported or called.
    """

    def __init__(self, path: str, most: int, context: int | None, vocab_size: int | None) -> None:
        self._name, self._processes = f"objective.rollout: {path}", Processes()
        self._most, self._context, self._vocab_size = most, context, vocab_size
        if ":" not in path:
            raise ConfigError(f"{self._name} is no import path package.module:name")
        try:
            self._function: Callable[..., Any] = imported(path)
        except Exception as error:  # the user's module may raise any
            raise ConfigError(f"{self._name} cannot be imported: {error}") from error
        if not callable(self._function):
            raise ConfigError(f"{self._name} is not callable")

    def __call__(
        self, prompts: Sequence[Any], where: Sequence[str], trainer: RolloutTrainer
    ) -> list[SampledRow]:
        """A row for each prompt; of several processes, which all call it, the first one's.

        Args:
          where: the row of each prompt, as errors name it.

        Raises:
          ConfigError: what it returns has not the form.
          ModelError: it raises.
        """
        rows, failure = list[SampledRow](), None
        try:
            with foreign(f"{self._name}(prompts, trainer)"):
                result = self._function(copy.deepcopy([*prompts]), trainer)
            rows = self._rows(result, where)
        except Exception as error:
            failure = error

        def first_rows() -> Any:
            if failure is not None:
                raise failure
            return [self._as_json(*x) for x in zip(rows, where)] if is_first() else None

        if jax.process_count() == 1:
            if failure is not None:
                raise failure
            return rows
        self._processes.wait("waiting for objective.rollout of all processes")
        received = self._processes.all(self._name, first_rows, lambda results: results[0])
        return [_from_json(row) for row in received]

    def _rows(self, result: Any, where: Sequence[str]) -> list[SampledRow]:
        if not isinstance(result, dict):
            kind = type(result).__name__
            raise ConfigError(f"{self._name} returned {kind}, and not a dict with {PROMPTS}, ...")
        if missing := [name for name in (PROMPTS, COMPLETIONS) if result.get(name) is None]:
            raise ConfigError(f"{self._name} returned no {listed(missing)}")
        if reserved := sorted(RESERVED & result.keys() - {COMPLETIONS}):
            raise ConfigError(f"{self._name} returned {listed(reserved)}, which rewards get anyway")
        lists = {name: value for name, x in result.items() if (value := _plain(x)) is not None}
        for name, value in lists.items():
            if not isinstance(value, list) and name in (PROMPTS, COMPLETIONS, LOGPROBS, MASK):
                raise ConfigError(f"{self._name} returned {name} that is no list")
            if isinstance(value, list) and len(value) != len(where):
                raise ConfigError(
                    f"{self._name} returned {name} of {len(value)} rows for {len(where)} prompts"
                )
        by_row = {n: x if isinstance(x, list) else [x] * len(where) for n, x in lists.items()}
        return [
            self._row({name: x[i] for name, x in by_row.items()}, row)
            for i, row in enumerate(where)
        ]

    def _row(self, values: dict[str, Any], where: str) -> SampledRow:
        prompt = self._tokens(values.pop(PROMPTS), f"{where}: {PROMPTS}")
        tokens = self._tokens(values.pop(COMPLETIONS), f"{where}: {COMPLETIONS}")
        if not prompt:
            raise ConfigError(f"{self._name}, {where}: {PROMPTS} is empty")
        if len(tokens) > self._most:
            raise ConfigError(
                f"{self._name}, {where}: a completion of {len(tokens)} tokens, which is more than "
                f"objective.max_completion_length: {self._most}"
            )
        if self._context is not None and len(prompt) + len(tokens) > self._context:
            raise ConfigError(
                f"{self._name}, {where}: {len(prompt)} + {len(tokens)} tokens, and the model reads "
                f"{self._context}"
            )
        mask = self._numbers(values.pop(MASK, None), len(tokens), f"{where}: {MASK}")
        if mask is not None and not np.isin(mask, (0, 1)).all():
            raise ConfigError(f"{self._name}, {where}: {MASK} has other values than 0 and 1")
        is_model = np.ones(len(tokens), bool) if mask is None else mask == 1
        logprobs = self._numbers(values.pop(LOGPROBS, None), len(tokens), f"{where}: {LOGPROBS}")
        if logprobs is not None and not np.isfinite(logprobs[is_model]).all():
            raise ConfigError(
                f"{self._name}, {where}: {LOGPROBS} are not finite at the model's tokens"
            )
        return SampledRow(prompt, tokens, logprobs, is_model, values)

    def _tokens(self, value: Any, what: str) -> tuple[int, ...]:
        value = _plain(value)
        if not isinstance(value, list | tuple) or not all(isinstance(x, int) for x in value):
            raise ConfigError(f"{self._name}, {what} has to be a list of token ids")
        if outside := [x for x in value if not 0 <= x < (self._vocab_size or x + 1)]:
            raise ConfigError(
                f"{self._name}, {what} has {outside[0]}, which is not in the vocabulary of "
                f"{self._vocab_size or 'the model'}"
            )
        return tuple(value)

    def _numbers(self, value: Any, count: int, what: str) -> np.ndarray | None:
        if (value := _plain(value)) is None:
            return None
        try:
            numbers = np.array([np.nan if x is None else x for x in value], np.float32)
        except (TypeError, ValueError):
            raise ConfigError(f"{self._name}, {what} has to be a list of numbers") from None
        if numbers.shape != (count,):
            raise ConfigError(
                f"{self._name}, {what} has {len(numbers)} numbers for {count} tokens of the "
                "completion"
            )
        return numbers

    def _as_json(self, row: SampledRow, where: str) -> list[Any]:
        try:
            json.dumps(row.columns)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._name}, {where}: the further columns go to all processes, as JSON: {error}"
            ) from None
        return [_plain(x) for x in row]


def _plain(value: Any) -> Any:
    """Arrays, such as NumPy's or torch's, as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _from_json(row: list[Any]) -> SampledRow:
    prompt, tokens, logprobs, is_model, columns = row
    numbers = None if logprobs is None else np.array(logprobs, np.float32)
    return SampledRow(tuple(prompt), tuple(tokens), numbers, np.array(is_model, bool), columns)
