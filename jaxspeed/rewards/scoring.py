"""Rewards of completions: by functions in workers and by reward models, equal on all processes."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspeed.checkpoint.process_agreement import Processes, is_first
from jaxspeed.config.rollout_options import PolicyOptions
from jaxspeed.data.tokenizer import Tokenizer
from jaxspeed.errors import ConfigError, DataError, RunError
from jaxspeed.rewards.reward_model import RewardModel, check_reward_model
from jaxspeed.rewards.reward_workers import RewardCall, RewardWorkers
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")
MOST_WORKERS, SHOWN_FAILURES = 4, 5
# What functions get beside the columns of records.
RESERVED = {
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
}


@dataclass(frozen=True)
class RewardRow:
    """A completion to be scored.

    Attributes:
      prompt, completion: text, or messages.
      tokens: of the completion.
      columns: the further ones of the prompt's record.
      where: the prompt's row, as errors name it.
      prompt_number: consecutive rows with one number are a group.
    """

    prompt: str | list[dict[str, Any]]
    completion: str | list[dict[str, Any]]
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    columns: Mapping[str, Any]
    where: str
    prompt_number: int


@dataclass(frozen=True)
class TrainerProgress:
    """What reward functions know of the run, as `trainer_state`."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass(frozen=True)
class RewardTable:
    """The rewards of completions.

    Attributes:
      names: of the rewards.
      values: fp64 [rows, rewards]; nan where there is none.
      logged: by column, what functions logged of each row (`log_extra`).
      metrics: the means of what they logged of calls (`log_metric`).
      failures: a line for each call that failed.
    """

    names: list[str]
    values: np.ndarray
    logged: dict[str, list[Any]]
    metrics: dict[str, float]
    failures: list[str]


class _Scored(NamedTuple):
    """A call of a function with rows of a range, and its answer."""

    reward: int
    first: int
    stop: int
    answer: dict[str, Any]


class Rewards:
    """The rewards of an objective; a context, whose workers end with it.

    Args:
      options: the objective's.
      tokenizer: of the model that trains, which reward models have to share.
      program: of the model that trains, beside which reward models are; see `add_models`.
      start: whether functions are imported and workers started.
      tick: called whenever a call has ended, and each second.

    Raises:
      ConfigError: a reward is not there, or cannot be called.
    """

    def __init__(
        self,
        options: PolicyOptions,
        *,
        tokenizer: Tokenizer | None,
        program: Program | None = None,
        start: bool = True,
        tick: Callable[[], Any] = lambda: None,
    ) -> None:
        self.options, self._tokenizer, self._tick = options, tokenizer, tick
        self._processes = Processes()
        self._functions = [i for i, path in enumerate(options.rewards) if ":" in path]
        self._folders = [i for i, path in enumerate(options.rewards) if ":" not in path]
        self.models: list[RewardModel] = []
        self._pool: RewardWorkers | None = None
        for i in self._folders:
            check_reward_model(options.rewards[i])
        names = {i: os.path.basename(options.rewards[i].rstrip("/")) for i in self._folders}
        if self._functions and start:
            self._processes.all("starting the rewards", self._start)
            assert self._pool is not None
            names |= dict(zip(self._functions, self._pool.names))
        else:
            names |= {i: options.rewards[i].rpartition(":")[2] for i in self._functions}
        by_position = [names[i] for i in range(len(names))]
        self.names = [
            name if by_position.count(name) == 1 else path
            for name, path in zip(by_position, options.rewards)
        ]
        if program is not None:
            self.add_models(program)

    def _start(self) -> None:
        workers = self.options.reward_workers or min(_cpus(), MOST_WORKERS)
        paths = [self.options.rewards[i] for i in self._functions]
        self._pool = RewardWorkers(paths, workers, self.options.reward_timeout)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise an error before the run for columns that a function could not get.

        Raises:
          DataError: one has the name of another argument.
          ConfigError: a function needs one that no record has.
        """
        if taken := sorted(RESERVED.intersection(columns)):
            raise DataError(
                f"data: the column {taken[0]!r} has the name of another argument of rewards; "
                "rename it"
            )
        if self.options.rollout is not None:  # whose function adds columns
            return
        for i, needs in zip(self._functions, self._pool.needs if self._pool else ()):
            if absent := [name for name in needs if name not in {*columns, *RESERVED}]:
                raise ConfigError(
                    f"objective.rewards: {self.options.rewards[i]} needs {', '.join(absent)}; the "
                    f"columns of the records are {', '.join(columns) or 'none'}"
                )

    def add_models(self, program: Program) -> None:
        """Read the reward models, beside the model of this program.

        Raises:
          ConfigError: one has another tokenizer or vocabulary, or no single score.
        """
        self.models = [
            RewardModel(program, self.options.rewards[i], self._tokenizer) for i in self._folders
        ]

    def score(
        self,
        rows: Sequence[RewardRow],
        state: TrainerProgress,
        stop: Callable[[], bool] = lambda: False,
    ) -> RewardTable | None:
        """The rewards of completions; all processes pass the same ones.

        None if `stop()` was true on one of the processes before all calls had ended.

        Raises:
          RunError: a reward failed, and `reward_error` is "error".
        """
        assert len(self.models) == len(self._folders), "add_models is missing"
        sent = [model.send(rows) for model in self.models]
        failure: BaseException | None = None
        results: list[_Scored] | None = []
        try:
            results = self._local(rows, state, stop)
        except Exception as error:
            failure = error

        def local_results() -> list[_Scored] | None:
            if failure is not None:
                raise failure
            return results

        # Calls of another process may take longer than an exchange waits for.
        self._processes.wait("waiting for the rewards of all processes")
        scored: list[Any] | None = self._processes.all(
            "computing rewards",
            local_results,
            lambda received: None if None in received else [x for part in received for x in part],
        )
        if scored is None:
            return None
        table = self._table(rows, [_Scored(*x) for x in scored])
        for i, name, scores in zip(self._folders, (self.names[i] for i in self._folders), sent):
            table.values[:, i] = scores()
            for row in np.flatnonzero(~np.isfinite(table.values[:, i])).tolist():
                table.failures.append(f"reward {name}, {rows[row].where}: the score is not finite")
                table.values[row, i] = self._of_failure
        self._report(table.failures)
        if not table.failures and np.isnan(table.values).all() and is_first():
            log.warning(
                "none of %d completions has a reward, so nothing is learned from them: each "
                "function returned None for all",
                len(rows),
            )
        return table

    @property
    def _of_failure(self) -> float:
        return 0.0 if self.options.reward_error == "zero" else np.nan

    def _local(
        self, rows: Sequence[RewardRow], state: TrainerProgress, stop: Callable[[], bool]
    ) -> list[_Scored] | None:
        """The calls of this process, which are those of a contiguous part of the groups."""
        if self._pool is None:
            return []
        spans = [
            (reward, rows_of_call)
            for rows_of_call in self._spans(rows)
            for reward in range(len(self._functions))
        ]
        calls = [
            RewardCall(reward, *_arguments(rows[first:stop]), asdict(state))
            for reward, (first, stop) in spans
        ]
        is_last = self.options.reward_error == "error"
        answers = self._pool.run(calls, is_last, lambda: self._tick() or stop())
        if len(answers) < len(calls) and not any("error" in x for x in answers.values()):
            return None
        return [
            _Scored(self._functions[spans[i][0]], *spans[i][1], answer)
            for i, answer in sorted(answers.items())
        ]

    def _spans(self, rows: Sequence[RewardRow]) -> Iterator[tuple[int, int]]:
        """[first, stop) of the rows of each call of this process."""
        numbers = [row.prompt_number for row in rows]
        sizes = [len([*group]) for _, group in groupby(numbers)]
        starts = np.cumsum([0, *sizes]).tolist()
        rank, count, groups = jax.process_index(), jax.process_count(), len(sizes)
        first, stop = (groups * part // count for part in (rank, rank + 1))
        for at in range(first, stop, self.options.reward_batch):
            yield starts[at], starts[min(at + self.options.reward_batch, stop)]

    def _table(self, rows: Sequence[RewardRow], scored: Sequence[_Scored]) -> RewardTable:
        values = np.full((len(rows), len(self.names)), np.nan)
        logged, of_calls = dict[str, list[Any]](), dict[str, list[float]]()
        failures = list[str]()
        for reward, first, stop, answer in scored:
            if "error" in answer:
                prompts = dict.fromkeys(row.where for row in rows[first:stop])
                where = ", ".join([*prompts][:3]) + " ..." * (len(prompts) > 3)
                failures.append(f"reward {self.names[reward]}, {where}: {answer['error']}")
                values[first:stop, reward] = self._of_failure
                continue
            values[first:stop, reward] = [np.nan if x is None else x for x in answer["values"]]
            for column, items in answer["logged"].items():
                logged.setdefault(column, [None] * len(rows))[first:stop] = items
            for name, numbers in answer["metrics"].items():
                of_calls.setdefault(name, []).extend(numbers)
        metrics = {name: float(np.mean(numbers)) for name, numbers in of_calls.items()}
        return RewardTable(self.names, values, logged, metrics, failures)

    def _report(self, failures: Sequence[str]) -> None:
        if failures and self.options.reward_error == "error":
            raise RunError(
                f'{failures[0]}. With objective.reward_error: "zero" or "drop" the run would go on'
            )
        if failures and is_first():
            more = len(failures) - SHOWN_FAILURES
            lines = [*failures[:SHOWN_FAILURES], *([f"and {more} more"] if more > 0 else ())]
            log.warning("%s", "\n".join(lines))

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _arguments(rows: Sequence[RewardRow]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """(columns, other arguments) of a function, in lists by completion."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [row.columns.get(name) for row in rows] for name in names}
    return columns, {
        "prompts": [row.prompt for row in rows],
        "completions": [row.completion for row in rows],
        "completion_ids": [[*row.tokens] for row in rows],
    }


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
