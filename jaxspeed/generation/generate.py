"""Generation: from a request to its texts, piece by piece, or to a rollout of all."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspeed.axes import PIPE
from jaxspeed.data.chat_masks import PromptWithImages
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.generation.continuous_batching import ContinuousBatching, GroupShape, Runs
from jaxspeed.generation.decode_programs import SEGMENT, UNDRAWN, Draws, ForwardPrograms
from jaxspeed.generation.rollout import Rollout, SampledCompletion
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text import TextTokenizer, end_of
from jaxspeed.generation.text_row import TextRow
from jaxspeed.objectives.padding import SMALLEST, bucket
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.caching import cache_names
from jaxspeed.user_models.config_model import sizes_of
from jaxspeed.user_models.protocol import CachedModel

log = logging.getLogger("jaxspeed")

# (rows of a group on each data rank, groups, tokens of a segment) of rollouts, by platform. The
# rows are the same on any number of ranks, so that each is computed by the same products. Larger
# groups use accelerators better, and a second one computes while the host looks at the first; on
# CPUs both share the cores, and a look costs little next to rows that wait for one.
LAYOUTS, OF_OTHERS = {"cpu": (8, 1, 8)}, (64, 2, SEGMENT)
WIDE = np.float32


@dataclass(frozen=True)
class Request:
    """What to generate.

    Prompts are texts, or lists of tokens if there is no tokenizer.

    Raises:
      ConfigError: the request is impossible.
    """

    prompts: Sequence[str | Sequence[int] | PromptWithImages]
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

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        end = end_of(self.tokenizer)
        return frozenset((*self.stop_tokens, *(() if end is None else (end,))))

    def row(
        self,
        number: int,
        prompt: Sequence[int],
        folds: Sequence[int],
        ends: frozenset[int],
        inputs: Sequence[int] = (),
        images: Mapping[str, np.ndarray] | None = None,
    ) -> TextRow:
        """The text of a prompt, which ends as the request says."""
        return TextRow(
            number,
            prompt,
            folds,
            tokens=self.tokens,
            ends=ends,
            stop=self.stop,
            tokenizer=self.tokenizer,
            inputs=inputs,
            images=images or {},
        )

    @property
    def images(self) -> list[Mapping[str, np.ndarray]]:
        """The arrays of each prompt's images."""
        return [p.arrays if isinstance(p, PromptWithImages) else {} for p in self.prompts]

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
            ids: Any = prompt.tokens if isinstance(prompt, PromptWithImages) else prompt
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
    """Tokens that were generated after a prompt, and the text that has become certain with them."""

    prompt: int
    text: str
    token: int | None  # the last; None: no token follows, and this is what was held back


class Generation:
    """A request that is being generated: an iterator over pieces of its texts."""

    def __init__(self, rows: list[TextRow], batching: ContinuousBatching) -> None:
        self._rows, self.batching = rows, batching
        self._pieces = self._run()

    def __iter__(self) -> Iterator[TextPiece]:
        return self._pieces

    def finish(self) -> list[Generated]:
        """What followed each prompt, once all of it is generated."""
        for _ in self._pieces:
            pass
        return [Generated(row.text, row.tokens, row.ended_by or "tokens") for row in self._rows]

    def _run(self) -> Iterator[TextPiece]:
        for row, drawn in self.batching.run():
            text = row.add(drawn)
            yield TextPiece(row.number, text, int(drawn.tokens[-1]))
            if row.ended_by and (rest := row.rest()):
                yield TextPiece(row.number, rest, None)


@dataclass
class Generator:
    """Generates with one program; what is compiled is kept for batches of the same shape."""

    program: Program
    cache: bool = True  # False: recompute, as for a model without a cache
    once: GatherOnce | None = None  # how parameters are gathered; None: as on this machine
    _programs: dict[tuple[int, int, int, bool], ForwardPrograms] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set)

    def start(self, state: TrainState, request: Request, steps: int = 1) -> Generation:
        """The generation of a request, whose programs compile in the background from now on.

        A piece of a text has up to `steps` tokens.
        """
        prompts = request.encoded()
        inputs: list[list[int]] = [[] for _ in prompts]
        if self._begin is not None:  # of a decoder, whose encoder reads the prompts
            inputs, prompts = self._ended(prompts, request), [[self._begin] for _ in prompts]
        longest, read = max(map(len, prompts)) + request.tokens, max(map(len, inputs))
        context = request.context or self.context or longest
        length = bucket(max(min(context, longest), read), max(context, read))
        ends = request.ends
        images = request.images
        if any(images):
            self._check_images(prompts, images, request.tokens, context)
        rows = [
            request.row(number, prompt, [number], ends, read, seen)
            for number, (prompt, read, seen) in enumerate(zip(prompts, inputs, images, strict=True))
        ]
        for row in rows:
            row.restart(context, length)
        widest = max(row.bucket for row in rows)
        for row in rows:  # one program for all starts
            row.bucket = widest
        size = -(-len(rows) // self.program.ranks)
        short = short_start(request.tokens)
        if any(images) or max(len(row.visible) for row in rows) > short:
            short = 0
        batching = self._batching(
            state, request, rows, size, length, context, ends, steps=steps, short=short
        )
        return Generation(rows, batching)

    def rollout(
        self,
        state: TrainState,
        request: Request,
        ends: Sequence[int] = (),
        *,
        generations: int = 1,
        step: int = 0,
        block: int | None = None,
        groups: int | None = None,
        segment: int | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Rollout:
        """Completions of all prompts, with what trains on them; see `Engine.rollout`."""
        counts = {"generations": generations, "groups": groups, "segment": segment, "block": block}
        for name, value in counts.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: {value!r}; it is an integer from 1")
        if self._begin is not None:
            raise ConfigError("rollout: the model has an encoder; rollouts are of decoders")
        if any(request.images):
            raise ConfigError("rollout: a prompt has images; rollouts are of text")
        if "repetition_penalty" in request.sampling.rules:
            raise ConfigError(
                "rollout: repetition_penalty is not 1; log-probabilities of what it draws depend "
                "on the text, and those of training would be others"
            )
        prompts = request.encoded()
        limit = request.context or self.context or 1 << 30
        fits = [i for i, prompt in enumerate(prompts) if len(prompt) + request.tokens <= limit]
        if not fits:
            raise ConfigError(
                f"rollout: no prompt fits: the shortest has {min(map(len, prompts))} tokens, and "
                f"with {request.tokens} after it the context of {limit} is exceeded"
            )
        # Ranks without a prompt of their own share one.
        share = max(len(fits) * generations // self.program.ranks, 1)
        all_ends = request.ends | {*ends}
        rows = []
        for i in fits:
            for generation in range(generations):
                row = request.row(i, prompts[i], [step, i, generation], all_ends)
                row.start_of = i, generation // share
                row.bucket = bucket(len(prompts[i]), limit)
                rows.append(row)
        ordered = sorted(rows, key=lambda row: row.bucket)
        platform = self.program.mesh.devices.flat[0].platform
        size, most, steps = LAYOUTS.get(platform, OF_OTHERS)
        length = min(ordered[-1].bucket + request.tokens, limit)
        options: dict[str, Any] = {"short": 1, "steps": segment or steps, "groups": groups or most}
        with around():
            batching = self._batching(
                state,
                request,
                ordered,
                block or size,
                length,
                length,
                all_ends,
                records=self.program.mesh.shape.get(PIPE, 1) == 1,
                **options,
            )
        batching.around = around
        for row, drawn in batching.run():
            row.add(drawn)
            if row.ended_by:
                row.rest()
        completions = [
            SampledCompletion(
                row.number,
                row.folds[-1],
                row.text,
                (*row.tokens, *(() if row.end is None else (row.end,))),
                np.asarray(row.logprobs, np.float32),
                np.asarray(row.thresholds, np.float32),
                row.ended_by or "tokens",
                np.concatenate(row.routing)[: len(row.ids) - (row.end is None)]
                if row.routing
                else None,
            )
            for row in rows
        ]
        dropped = sorted({*range(len(prompts))} - {*fits})
        return Rollout(prompts, completions, dropped, request.sampling)

    def _check_images(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Mapping[str, np.ndarray]],
        tokens: int,
        context: int,
    ) -> None:
        """Raise ConfigError for prompts whose images the model could not see until their end."""
        if not self.cache:
            raise ConfigError("a prompt has images, which need the model's key-value cache")
        for number, (prompt, seen) in enumerate(zip(prompts, images, strict=True), 1):
            if seen and len(prompt) + tokens > context:
                raise ConfigError(
                    f"prompt {number} has images and {len(prompt)} tokens, and with {tokens} after "
                    f"it the context of {context} is exceeded"
                )

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

    def _batching(
        self,
        state: TrainState,
        request: Request,
        rows: Sequence[TextRow],
        size: int,
        length: int,
        context: int,
        ends: frozenset[int],
        *,
        steps: int,
        records: bool = False,
        **options: Any,
    ) -> ContinuousBatching:
        """The batching of rows, in groups of `size` rows of each data rank."""
        rules, ranks = request.sampling.rules, self.program.ranks
        seen = 0
        if "repetition_penalty" in rules:
            seen = bucket(max(len(row.ids) for row in rows) + request.tokens, 1 << 30)
        counts = (len(x) for row in rows for x in row.images.values())
        folds, patches = len(rows[0].folds), max(counts, default=0)
        shape = GroupShape(size * ranks, ranks, length, context, folds, seen, patches)
        padded = np.full(max(4, 1 << (len(ends) - 1).bit_length()), UNDRAWN, np.int32)
        padded[: len(ends)] = sorted(ends)
        key = np.asarray(jax.random.key_data(jax.random.key(request.seed)))
        draws = Draws(key, padded, rules)
        programs = self._programs_for(shape, draws, max(steps, SEGMENT), records)
        runs = Runs(self._once, state)
        unfinished = [row for row in rows if row.ended_by is None]
        return ContinuousBatching(programs, runs, draws, shape, unfinished, steps=steps, **options)

    def _programs_for(
        self, shape: GroupShape, draws: Draws, segment: int, records: bool
    ) -> ForwardPrograms:
        key = shape.rows, shape.length, segment, records
        if key not in self._programs:
            self._programs[key] = programs = self.programs_for(shape, draws, segment, records)
            if programs.cached is not None:
                programs.compile_decode(shape.arrays([]), draws)
        return self._programs[key]

    def programs_for(
        self,
        shape: GroupShape,
        draws: Draws,
        segment: int = SEGMENT,
        records: bool = False,
    ) -> ForwardPrograms:
        """The programs for groups of a shape, with a cache if the model can be called with it."""
        params = {
            path: jax.ShapeDtypeStruct(self.program.table.shape_of(path), rows[0].read.dtype)
            for path, rows in self.program.table.parameters.items()
        }
        why = "it has no nnx.Cache, and no collection cache of Linen"
        # Keys may be wider than parameters, where layers have a dtype of their own.
        for dtype in dict.fromkeys((self.program.traced_loss.compute_dtype, WIDE)):
            if not self.cache:
                break
            sized = partial(
                self.program.model.cached, length=shape.length, params=params, dtype=dtype or WIDE
            )
            try:
                cached = sized(shape.rows)
                if cached is None:
                    break
                rows_of = dims_of_rows(cached, partial(sized, 2 * shape.rows))
                programs = ForwardPrograms(self._once, cached, rows_of, segment, records)
                programs.check(shape.arrays([]), draws)
                if cached.one_by_one and shape.folds > 1:
                    self._note(
                        "the model's cache takes one token of all sequences: those of a rollout "
                        "are sampled in batches that start together"
                    )
                return programs
            except ModelError as error:
                why = str(error).splitlines()[0]
        if self.cache:
            self._note(
                f"the model keeps no key-value cache: each token recomputes all before it ({why})"
            )
        return ForwardPrograms(self._once, None, {}, segment)

    def _note(self, text: str) -> None:
        if text not in self._noted:
            log.warning("%s", text)
            self._noted.add(text)


def short_start(tokens: int) -> int:
    """The length up to which starts are read token by token, where so many are drawn after them.

    That is at most an eighth more reads than with `prefill`, whose compilation takes longer.
    """
    return min(1 + tokens // 8, SMALLEST)


def dims_of_rows(
    cached: CachedModel, of_twice: Callable[[], CachedModel | None]
) -> dict[str, int | None]:
    """The dim of sequences of each array of a cache: by its name, or where twice as many differ."""
    fresh = jax.eval_shape(cached.fresh)
    names = {path: cache_names(path, len(x.shape)) for path, x in fresh.items()}
    dims = {path: n.index("batch") if "batch" in n else None for path, n in names.items()}
    unnamed = [path for path, dim in dims.items() if dim is None]
    if unnamed and not cached.one_by_one and (other := of_twice()) is not None:
        wider = jax.eval_shape(other.fresh)
        for path in unnamed:
            sizes = enumerate(zip(fresh[path].shape, wider[path].shape, strict=True))
            dims[path] = next((dim for dim, (n, twice) in sizes if n != twice), None)
    return dims
