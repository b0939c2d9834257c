"""Generation: from a request to its texts, token by token."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.generation.decode_programs import NO_TOKEN, ForwardPrograms
from jaxspeed.generation.decode_steps import (
    Cached,
    OneByOne,
    Recomputed,
    Runs,
    Seen,
    Steps,
    bucket,
    first_seen,
    short_start,
)
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text import TextStream, TextTokenizer, end_of
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.config_model import sizes_of

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Request:
    """What to generate.

    Prompts are texts, or lists of tokens if there is no tokenizer.

    Raises:
      ConfigError: the request is impossible.
    """

    prompts: Sequence[str | Sequence[int]]
    tokens: int = 100  # at most, after each prompt
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()  # texts before which a text ends
    seed: int = 0  # prompt i draws from fold_in(key(seed), i), whatever else is in the batch
    context: int | None = None  # tokens that the model sees at most; None: by its config
    tokenizer: TextTokenizer | None = None
    stop_tokens: Sequence[int] = ()  # tokens before which a text ends, as at the end of a document

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or not self.prompts:
            raise ConfigError("prompts: a list with at least one prompt")
        if isinstance(self.seed, int) and self.seed >= 2**31:
            raise ConfigError("seed: it is an integer from 0 to 2^31 - 1")
        for name, least in (("tokens", 0), ("seed", 0), ("context", 2)):
            value = getattr(self, name)
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if (value is not None or name != "context") and not (is_integer and value >= least):
                raise ConfigError(f"{name}: {value!r}; it is an integer from {least}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop: {self.stop!r}; it is a list of texts that are not empty")
        if not all(type(token) is int and token >= 0 for token in self.stop_tokens):
            raise ConfigError(f"stop_tokens: {self.stop_tokens!r}; it is a list of tokens")

    def encoded(self) -> list[list[int]]:
        """The tokens of each prompt; an empty one begins after the end of a document.

        Raises:
          ConfigError: there is no tokenizer for a text.
        """
        texts = [*self.stop, *(prompt for prompt in self.prompts if isinstance(prompt, str))]
        if texts and self.tokenizer is None:
            raise ConfigError(
                f"{texts[0]!r} is a text, and there is no tokenizer; pass tokenizer=..., or "
                "prompts as lists of tokens"
            )
        end, encoded = end_of(self.tokenizer), []
        for number, prompt in enumerate(self.prompts, 1):
            ids: Any = prompt
            if isinstance(prompt, str) and self.tokenizer is not None:
                ids = self.tokenizer.encode(prompt)
            if not len(ids) and end is None:
                raise ConfigError(
                    f"prompt {number} is empty, and no token ends a document, after which a text "
                    "could begin; give it a first token"
                )
            encoded.append([int(i) for i in ids] if len(ids) or end is None else [end])
        return encoded


class Generated(NamedTuple):
    """What followed a prompt."""

    text: str  # without the stop string; empty without a tokenizer
    tokens: tuple[int, ...]
    ended_by: (
        str  # "tokens" (their number), "stop" (a stop string) or "end" (of the document or turn)
    )


class TextPiece(NamedTuple):
    """A token that was generated after a prompt, and the text that has become certain with it."""

    prompt: int
    text: str
    token: int | None  # None: no token follows, and this is the text that was held back


class BatchRow:
    """One sequence of a batch: a prompt and what has followed it, and what an encoder reads."""

    def __init__(self, ids: list[int], request: Request, inputs: Sequence[int] = ()) -> None:
        self.ids, self._prompt, self._request = ids, len(ids), request
        self.inputs = inputs
        tokenizer = request.tokenizer
        self._ends = {end_of(tokenizer), *request.stop_tokens}
        self._stream = None if tokenizer is None else TextStream(tokenizer, ids, request.stop)
        self.ended_by = None if request.tokens else "tokens"

    @property
    def drawn(self) -> int:
        return len(self.ids) - self._prompt

    def add(self, token: int) -> str:
        """The text that the token makes certain."""
        if token in self._ends:
            self.ended_by = "end"
            return ""
        self.ids.append(token)
        text = self._stream.add(token) if self._stream else ""
        if self._stream and self._stream.stopped:
            self.ended_by = "stop"
        elif self.drawn == self._request.tokens:
            self.ended_by = "tokens"
        return text

    def rest(self) -> str:
        """The text that was held back, once the sequence has ended."""
        return self._stream.end() if self._stream else ""

    @property
    def generated(self) -> Generated:
        text = self._stream.text if self._stream else ""
        return Generated(text, tuple(self.ids[self._prompt :]), self.ended_by or "tokens")


class Generation:
    """A request that is being generated: an iterator over pieces of its texts."""

    def __init__(
        self,
        rows: list[BatchRow],
        count: int,
        steps: Steps,
        context: int,
        *,
        seed: int,
        text: bool,
    ) -> None:
        self._rows, self._count, self._steps = rows, count, steps
        self._context, self._text = context, text
        self._keys = np.tile(jax.random.key_data(jax.random.key(seed)), (len(rows), 1))
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # the steps
        self._pieces = self._run()
        if any(row.ended_by is None for row in rows):
            steps.compile_ahead([*map(self._seen, rows)], self._draws())

    def __iter__(self) -> Iterator[TextPiece]:
        return self._pieces

    def finish(self) -> list[Generated]:
        """What followed each prompt, once all of it is generated."""
        for _ in self._pieces:
            pass
        return [row.generated for row in self._rows[: self._count]]

    def _run(self) -> Iterator[TextPiece]:
        for row in self._rows[self._count :]:  # to a number that the data ranks divide
            row.ended_by = "tokens"
        while any(row.ended_by is None for row in self._rows):
            with self.around():
                tokens = self._steps.next([*map(self._seen, self._rows)], self._draws())
            for number, row in enumerate(self._rows):
                if row.ended_by is None and number in tokens:
                    yield TextPiece(number, row.add(tokens[number]), tokens[number])
                    if row.ended_by and (rest := row.rest()):
                        yield TextPiece(number, rest, None)

    def _seen(self, row: BatchRow) -> Seen:
        start = first_seen(len(row.ids), self._context)
        return Seen(start, row.ids[start:], row.inputs)

    def _draws(self) -> dict[str, Any]:
        drawn = np.asarray([row.drawn for row in self._rows], np.int32)
        draws = {"keys": self._keys, "drawn": drawn}
        if self._text:
            most = bucket(max(len(row.ids) for row in self._rows), 1 << 30)
            draws["text"] = np.full((len(self._rows), most), NO_TOKEN, np.int32)
            for row, ids in zip(draws["text"], (row.ids for row in self._rows)):
                row[: len(ids)] = ids
        return draws


@dataclass
class Generator:
    """Generates with one program; what is compiled is kept for batches of the same shape."""

    program: Program
    cache: bool = True  # False: recompute, as for a model without a cache
    once: GatherOnce | None = None  # how parameters are gathered; None: as on this machine
    _programs: dict[tuple[int, int], ForwardPrograms] = field(default_factory=dict)
    _noted: bool = False

    def start(self, state: TrainState, request: Request) -> Generation:
        """The generation of a request, whose programs compile in the background from now on."""
        prompts = request.encoded()
        ranks, count = self.program.ranks, len(prompts)
        prompts += [[0]] * (-count % ranks)
        inputs: list[list[int]] = [[] for _ in prompts]
        if self._begin is not None:  # of a decoder, whose encoder reads the prompts
            inputs, prompts = self._ended(prompts, request), [[self._begin] for _ in prompts]
        rows = [BatchRow(ids, request, read) for ids, read in zip(prompts, inputs)]
        longest, read = max(map(len, prompts)) + request.tokens, max(map(len, inputs))
        context = request.context or self.context or longest
        rules = request.sampling.rules
        length = bucket(max(min(context, longest), read), max(context, read))
        steps = self._steps(len(rows), length, state, rules, short_start(request.tokens))
        text = "repetition_penalty" in rules
        return Generation(rows, count, steps, context, seed=request.seed, text=text)

    @cached_property
    def context(self) -> int | None:
        """The tokens that the model sees at most, if its config says so."""
        return getattr(sizes_of(self.program.source.model), "max_position_embeddings", None)

    @cached_property
    def _begin(self) -> int | None:
        """The token with which a decoder begins that has an encoder."""
        return getattr(sizes_of(self.program.source.model), "decoder_start_token_id", None)

    def _ended(self, prompts: list[list[int]], request: Request) -> list[list[int]]:
        """The prompts, of which texts end as an encoder's inputs do."""
        end = getattr(sizes_of(self.program.source.model), "eos_token_id", None)
        texts = [isinstance(prompt, str) for prompt in request.prompts]
        texts += [False] * (len(prompts) - len(texts))
        return [
            [*ids, end] if is_text and end is not None and ids[-1] != end else ids
            for ids, is_text in zip(prompts, texts)
        ]

    @cached_property
    def _once(self) -> GatherOnce:
        return self.once or GatherOnce(self.program)

    def _steps(self, rows: int, length: int, state: TrainState, rules: Any, short: int) -> Steps:
        if (rows, length) not in self._programs:
            self._programs[rows, length] = self._compilable(rows, length, rules)
        programs = self._programs[rows, length]
        runs = Runs(self._once, state, rules)
        if programs.cached is None:
            return Recomputed(programs, runs, length)
        if programs.cached.one_by_one:
            return OneByOne(programs, runs)
        return Cached(programs, runs, length, short)

    def _compilable(self, rows: int, length: int, rules: Any) -> ForwardPrograms:
        params = {
            path: jax.ShapeDtypeStruct(self.program.table.shape_of(path), rows[0].read.dtype)
            for path, rows in self.program.table.parameters.items()
        }
        why = "it has no nnx.Cache, and no collection cache of Linen"
        # Keys may be wider than parameters, where layers have a dtype of their own.
        for dtype in dict.fromkeys((self.program.traced_loss.compute_dtype, np.float32)):
            if not self.cache:
                break
            try:
                cached = self.program.model.cached(rows, length, params, dtype or np.float32)
                if cached is None:
                    break
                programs = ForwardPrograms(self._once, cached)
                programs.check(rows, rules)
                return programs
            except ModelError as error:
                why = str(error).splitlines()[0]
        if self.cache and not self._noted:
            log.warning(
                "the model keeps no key-value cache: each token recomputes all before it (%s)",
                why,
            )
            self._noted = True
        return ForwardPrograms(self._once, None)
