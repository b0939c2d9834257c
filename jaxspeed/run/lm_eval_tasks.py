"""Tasks of EleutherAI's lm-eval, which reads them, and has its requests answered by an engine."""

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
from jaxspeed.objectives.padding import bucket
from jaxspeed.run.sampling import has_scores
from jaxspeed.user_models.config_model import sizes_of
from jaxspeed.user_models.user_code import foreign

log = logging.getLogger("jaxspeed")

IGNORED = -100  # a target that does not count
LENGTH = 2048  # of a context, or of training's samples, that nothing else sets
LIMITS = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"


def evaluate_tasks(
    engine: Engine,
    tokenizer: Tokenizer | None,
    tasks: Sequence[str],
    context: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> dict[str, float] | None:
    """Scores as "TASK/METRIC", on every process; None if `stop()` was true between two batches.

    Tasks are names or YAML files, and may run code. Models without max_position_embeddings have
    this `context`. `options` are lm-eval's: `limit` of examples and `num_fewshot`.
    """
    if tokenizer is None or has_scores(engine):
        raise ModelError("tasks: lm-eval needs a model that writes text, and its tokenizer")
    limit = getattr(sizes_of(engine.program.source.model), "max_position_embeddings", None)
    # Else it forks processes, of one that has JAX's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # --json has the other
        if not is_first():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))  # progress bars
        stack.enter_context(foreign(f"lm-eval ({', '.join(tasks)})"))
        stack.enter_context(engine.evaluating())
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager

        model = type("EngineLM", (TaskRequests, TemplateLM), {})
        # lm-eval reads the names of its own tasks for ten seconds.
        manager = TaskManager(include_defaults=not all(Path(task).is_file() for task in tasks))
        try:
            results = simple_evaluate(
                model(engine, tokenizer, limit or context or LENGTH, stop),
                tasks=[*tasks],
                task_manager=manager,
                bootstrap_iters=1000,
                log_samples=False,
                **options,
            )
        except Stopped:
            return None
    return {} if results is None else scores_of(results["results"])


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers in lm-eval's results, whose metrics are named "METRIC,FILTER"."""
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, metrics in results.items()
        for name, value in metrics.items()
        if "," in name and isinstance(value, int | float)
    }


class Stopped(BaseException):
    """The run is to stop."""


class TaskRequests:
    """Methods of lm-eval's `TemplateLM`, which splits texts into contexts and continuations.

    A batch has at most as many tokens as one of training, and a shape that few others have.
    """

    eot_token_id: int | None = None
    prefix_token_id: int = 0  # after which a text without a context begins

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, context: int, stop: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._engine, self._tokenizer, self._context, self._stop = engine, tokenizer, context, stop
        texts = special_tokens(tokenizer)

        def token(*names: str) -> int | None:
            encoded = [tokenizer.encode(texts[name]).tolist() for name in names if name in texts]
            return next((ids[0] for ids in encoded if len(ids) == 1), tokenizer.end)

        prefix, self.eot_token_id = token("bos_token", "eos_token"), token("eos_token")
        if prefix is None:
            raise DataError("tasks: the tokenizer has neither bos_token nor eos_token")
        self.prefix_token_id, self._prefix = prefix, tokenizer.spell([prefix])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> list[int]:
        """The tokens, with those that the tokenizer adds unless the text begins with one."""
        begin, end = added_tokens(self._tokenizer)
        ids = self._tokenizer.encode(string).tolist()
        is_bare = add_special_tokens is None and self._prefix and string.startswith(self._prefix)
        return ids if add_special_tokens is False or is_bare else [*begin, *ids, *end]

    def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
        """Of (texts, context, continuation): the log-likelihood, and whether it is greedy.

        A context that is too long loses its first tokens.
        """
        answers = [(0.0, True)] * len(requests)
        counts = [len(after) for _, _, after in requests]
        if not all(0 < count <= self._context for count in counts):
            raise DataError(
                f"tasks: continuations have {min(counts)} to {max(counts)} tokens; the model's "
                f"context allows 1 to {self._context}"
            )
        rows = [[*before, *after][-self._context - 1 :] for _, before, after in requests]
        for numbers, size, length in self._batches([len(ids) - 1 for ids in rows]):
            tokens = np.zeros((size, length), np.int32)
            targets = np.full((size, length), IGNORED, np.int32)
            for row, i in enumerate(numbers):
                end = len(rows[i]) - 1
                tokens[row, :end] = rows[i][:-1]
                targets[row, end - counts[i] : end] = rows[i][-counts[i] :]
            scored = self._engine.logprobs({"tokens": tokens, "targets": targets}, is_top=True)
            sums, is_top = process_allgather((scored.sums, scored.is_top), tiled=True)
            is_greedy = (is_top | (targets == IGNORED)).all(-1)
            for row, i in enumerate(numbers):
                answers[i] = float(sums[row]), bool(is_greedy[row])
        return answers

    def loglikelihood_rolling(self, requests: Any, **more: Any) -> list[float]:
        """The log-likelihoods of texts, in parts as long as the context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Any] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(ids, self.prefix_token_id, self._context, 1)
            windows += [(i, *make_disjoint_window(part)) for part in parts]
        totals = [0.0] * len(requests)
        for (i, *_), (value, _) in zip(windows, self._loglikelihood_tokens(windows)):
            totals[i] += value
        return totals

    def generate_until(self, requests: Any, **more: Any) -> list[str]:
        """What follows each context, up to the first text of `until`."""
        answers, groups = [""] * len(requests), dict[str, list[int]]()
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1]), []).append(i)
        for written, group in groups.items():
            until, most, options = generation_options(json.loads(written))
            if most >= self._context:
                raise ConfigError(
                    f"tasks: max_gen_toks {most}; needs less than the context, {self._context}"
                )
            prompts = [self.tok_encode(requests[i].args[0]) for i in group]
            prompts = [(ids or [self.prefix_token_id])[most - self._context :] for ids in prompts]
            for places, size, _ in self._batches([len(ids) + most for ids in prompts]):
                rows = [prompts[i] for i in places]
                outputs = self._engine.generate(
                    rows + rows[-1:] * (size - len(rows)),
                    most,
                    stop=until,
                    stop_tokens=[] if self.eot_token_id is None else [self.eot_token_id],
                    seed=group[places[0]],
                    context=self._context,
                    tokenizer=self._tokenizer,
                    **options,
                )
                for i, output in zip(places, outputs):
                    text = self._tokenizer.decode(output.tokens)  # without the prompt, as lm-eval
                    answers[group[i]] = min([text, *(text.partition(x)[0] for x in until)], key=len)
        return answers

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
        """(numbers of sequences, rows, padded length), the longest first."""
        program, trained = self._engine.program, self._engine.config.data.seq_len
        micro = program.batch.train // program.batch.accumulation
        tokens = micro * (trained or min(self._context, LENGTH))
        ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        padded = [bucket(length, self._context) for length in lengths]
        for length, group in itertools.groupby(ordered, key=padded.__getitem__):
            numbers = [*group]
            enough = 1 << (-(-len(numbers) // program.ranks) - 1).bit_length()
            size = min(max(micro, tokens // length) // program.ranks, enough) * program.ranks
            for start in range(0, len(numbers), size):
                yield numbers[start : start + size], size, length
                if self._stop():
                    raise Stopped


def generation_options(wanted: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """(texts that end one, number of tokens, options of `Engine.stream`) of `generation_kwargs`."""
    until = wanted.pop("until", None) or []
    limits = [wanted.pop(name, None) for name in LIMITS]
    draws = wanted.pop("do_sample", None) is not False
    options: dict[str, Any] = {"temperature": float(wanted.pop("temperature", 0)) * draws}
    for name in ("top_k", "top_p", "min_p", "repetition_penalty"):
        value = wanted.pop(name, None) or None  # 0 is none in transformers
        if options["temperature"] or name == "repetition_penalty":
            options |= {name: value} if value else {}
    if wanted:
        log.warning("tasks: generation_kwargs that are ignored: %s", ", ".join(wanted))
    texts = [text for text in ([until] if isinstance(until, str) else until) if text]
    return texts, next((int(x) for x in limits if x is not None), 256), options
