"""Tasks of EleutherAI's lm-eval: its requests for log-likelihoods and texts, by an engine.

lm-eval reads the tasks and computes the scores. Each process answers all requests, and so lm-eval
sees one.
"""

import contextlib
import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxspeed.checkpoint.process_agreement import is_first
from jaxspeed.data import Tokenizer
from jaxspeed.data.chat_template import special_tokens
from jaxspeed.data.tokenizer import added_tokens
from jaxspeed.engine import Engine
from jaxspeed.errors import ConfigError, DataError, ModelError
from jaxspeed.generation.decode_steps import bucket
from jaxspeed.run.sampling import has_scores
from jaxspeed.user_models.config_model import sizes_of
from jaxspeed.user_models.user_code import foreign

log = logging.getLogger("jaxspeed")

Scores = dict[str, dict[str, float]]  # of each task and group: its metrics, and "NAME_stderr"

IGNORED = -100  # a target that does not count
# Of lm-eval's `generation_kwargs`, the first that is set.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
MOST_TOKENS = 256  # lm-eval's own limit, without one of these
LENGTH = 2048  # of samples, without data.seq_len and for a long context
RULES = ("top_k", "top_p", "min_p")
# Draws for the standard error of a metric that has no formula.
BOOTSTRAP = 1000


def evaluate_tasks(
    engine: Engine,
    tokenizer: Tokenizer | None,
    tasks: Sequence[str],
    *,
    context: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Scores | None:
    """The scores of an engine's model on tasks; None if `stop()` was true between two batches.

    Called on every process; the first one alone returns scores and prints.

    Args:
      tasks: names of lm-eval's tasks and groups, and YAML files. They may run code (`!function`).
      context: tokens that the model sees, if its config has no max_position_embeddings.

    Raises:
      ModelError: the model writes no text, or a task raised an exception.
    """
    if tokenizer is None or has_scores(engine):
        raise ModelError("tasks: the model has no tokenizer and next tokens, which lm-eval reads")
    context = getattr(sizes_of(engine.program.source.model), "max_position_embeddings", context)
    if context is None:
        raise ModelError("tasks: neither the model nor data.seq_len says how many tokens it sees")
    requests = TaskRequests(engine, tokenizer, context, stop)
    # With several processes of lm-eval's own, which would be forks of one that has JAX's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # --json has the other
        if not is_first():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # progress bars
        stack.enter_context(foreign(f"lm-eval ({', '.join(tasks)})"))
        stack.enter_context(engine.evaluating())
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        # To read the names of its own tasks takes lm-eval ten seconds.
        manager = TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))
        try:
            results = simple_evaluate(
                model_of(requests),
                tasks=[*tasks],
                task_manager=manager,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
            )
        except Stopped:
            return None
    return {} if results is None else scores_of(results["results"])


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> Scores:
    """lm-eval's results: numbers by task and metric, with a filter's name if there is one."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if "," in name and isinstance(value, int | float)
        }
        for task, metrics in results.items()
    }


class Stopped(BaseException):
    """The run is to stop; lm-eval and its tasks catch no exception of this kind."""


class TaskRequests:
    """The answers to lm-eval's requests, computed in batches.

    A batch has as many tokens as one of training, rows of nearly the same length, and a shape that
    few others have, so that few programs are compiled.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        context: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._tokenizer, self.context = engine, tokenizer, context
        self._stop = stop
        self._begin, self._end = added_tokens(tokenizer)
        self.end = self._special("eos_token")
        begin = self._special("bos_token")
        self._prefix = self.end if begin is None else begin
        self._prefix_text = None if self._prefix is None else tokenizer.spell([self._prefix])

    def _special(self, name: str) -> int | None:
        text = special_tokens(self._tokenizer).get(name)
        ids = [] if text is None else self._tokenizer.encode(text).tolist()
        if len(ids) == 1:
            return int(ids[0])
        return self._tokenizer.end if name == "eos_token" else None

    @property
    def prefix(self) -> int:
        """The token after which a text without a context begins."""
        if self._prefix is None:
            raise DataError(
                "tasks: the tokenizer has neither bos_token nor eos_token, after which a text "
                "without a context could begin"
            )
        return self._prefix

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """The tokens of a text, with those that the tokenizer adds unless the text has them."""
        ids = self._tokenizer.encode(text).tolist()
        if special is None:
            special = not (self._prefix_text and text.startswith(self._prefix_text))
        return [*self._begin, *ids, *self._end] if special else ids

    def loglikelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        """Of the tokens of each continuation after its context, and whether each is the top one.

        A context that is too long loses its first tokens.
        """
        answers = [(0.0, True)] * len(pairs)
        for before, after in pairs:
            if not before or not 0 < len(after) <= self.context:
                raise DataError(
                    f"tasks: a continuation of {len(after)} tokens after {len(before)}; it has "
                    f"from 1 to {self.context}, the model's context, after at least 1"
                )
        rows = [[*before, *after][-self.context - 1 :] for before, after in pairs]
        for numbers, size, length in self._batches([len(ids) - 1 for ids in rows]):
            tokens = np.zeros((size, length), np.int32)
            targets = np.full((size, length), IGNORED, np.int32)
            for row, number in enumerate(numbers):
                ids, count = rows[number], len(pairs[number][1])
                tokens[row, : len(ids) - 1] = ids[:-1]
                targets[row, len(ids) - 1 - count : len(ids) - 1] = ids[-count:]
            scored = self._engine.logprobs({"tokens": tokens, "targets": targets}, is_top=True)
            sums, is_top = process_allgather((scored.sums, scored.is_top), tiled=True)
            is_greedy = (is_top | (targets == IGNORED)).all(-1)
            for row, number in enumerate(numbers):
                answers[number] = float(sums[row]), bool(is_greedy[row])
        return answers

    def texts(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context by its `generation_kwargs`, up to the first text of `until`."""
        answers = [""] * len(requests)
        numbers_of = dict[str, list[int]]()
        for number, (_, wanted) in enumerate(requests):
            numbers_of.setdefault(json.dumps(wanted, sort_keys=True), []).append(number)
        for written, group in numbers_of.items():
            until, most, options = generation_options(json.loads(written))
            if most >= self.context:
                raise ConfigError(
                    f"tasks: max_gen_toks is {most}, and the model's context is {self.context}; "
                    "set generation_kwargs.max_gen_toks of the task to less"
                )
            prompts = [self.encode(requests[n][0]) or [self.prefix] for n in group]
            prompts = [ids[most - self.context :] for ids in prompts]
            for places, size, _ in self._batches([len(ids) + most for ids in prompts]):
                filled = [prompts[i] for i in places]
                outputs = self._engine.generate(
                    filled + filled[-1:] * (size - len(filled)),
                    most,
                    stop=until,
                    stop_tokens=[] if self.end is None else [self.end],
                    seed=group[places[0]],
                    context=self.context,
                    tokenizer=self._tokenizer,
                    **options,
                )
                for i, output in zip(places, outputs):
                    text = self._tokenizer.decode(output.tokens)  # as lm-eval does, alone
                    ends = [at for stop in until if (at := text.find(stop)) >= 0]
                    answers[group[i]] = text[: min(ends)] if ends else text
        return answers

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """(numbers of sequences, number of rows, padded length), the longest first."""
        program, data = self._engine.program, self._engine.config.data
        micro = program.batch.train // program.batch.accumulation
        ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        padded = [bucket(length, self.context) for length in lengths]
        for length, group in itertools.groupby(ordered, key=padded.__getitem__):
            numbers = [*group]
            size = max(micro, micro * (data.seq_len or min(self.context, LENGTH)) // length)
            enough = 1 << (-(-len(numbers) // program.ranks) - 1).bit_length()
            size = min(size // program.ranks, enough) * program.ranks
            for start in range(0, len(numbers), size):
                yield numbers[start : start + size], size, length
                if self._stop():
                    raise Stopped


def generation_options(wanted: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """(texts that end one, number of tokens, options of `Engine.stream`) of `generation_kwargs`."""
    wanted = dict(wanted)
    until = wanted.pop("until", None) or []
    limits = [wanted.pop(name, None) for name in LIMITS]
    most = next((int(limit) for limit in limits if limit is not None), MOST_TOKENS)
    temperature = float(wanted.pop("temperature", 0.0) or 0.0)
    draws = wanted.pop("do_sample", None) is not False and temperature > 0
    rules = {name: wanted.pop(name) for name in RULES if name in wanted}
    options = {"temperature": temperature, **rules} if draws else {"temperature": 0.0}
    if (penalty := wanted.pop("repetition_penalty", None)) is not None:
        options["repetition_penalty"] = penalty
    if wanted:
        log.warning("tasks: generation_kwargs that are ignored: %s", ", ".join(wanted))
    texts = [until] if isinstance(until, str) else until
    return [text for text in texts if text], most, options


def model_of(requests: TaskRequests) -> Any:
    """lm-eval's model whose requests these answer."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class EngineLM(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return requests.prefix if requests.end is None else requests.end

        @property
        def prefix_token_id(self) -> int:
            return requests.prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return requests.encode(string, add_special_tokens)

        def loglikelihood(self, instances: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(instances, disable_tqdm=True)

        def _loglikelihood_tokens(self, encoded: Any, **_: Any) -> list[tuple[float, bool]]:
            return requests.loglikelihoods([(before, after) for _, before, after in encoded])

        def loglikelihood_rolling(self, instances: Any, disable_tqdm: bool = True) -> list[float]:
            windows = list[tuple[int, Any]]()
            for number, request in enumerate(instances):
                ids = requests.encode(request.args[0])
                parts = get_rolling_token_windows(ids, requests.prefix, requests.context, 1)
                windows += [(number, make_disjoint_window(part)) for part in parts]
            totals = [0.0] * len(instances)
            answers = requests.loglikelihoods([pair for _, pair in windows])
            for (number, _), (value, _) in zip(windows, answers):
                totals[number] += value
            return totals

        def generate_until(self, instances: Any, disable_tqdm: bool = True) -> list[str]:
            return requests.texts([request.args for request in instances])

    return EngineLM()
