"""Text from the model of a run, with its data's tokenizer and its training's context."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspeed.data import Corpus
from jaxspeed.engine import Engine
from jaxspeed.errors import ModelError


def sample_texts(
    engine: Engine, corpus: Corpus, prompts: Sequence[str] | None = None, **options: Any
) -> Iterator[tuple[int, str]]:
    """Prompts and what follows them, streamed as (number of the prompt, new text).

    The prompt is the config's unless some are given, and so are the number of tokens and the
    temperature; `options` are those of `Engine.stream`. Its programs compile in the background as
    soon as this is called.

    Raises:
      ModelError: the data has no tokenizer, so this is not a language model.
    """
    run, tokenizer = engine.config.run, corpus.tokenizer
    if tokenizer is None:
        raise ModelError("sample: the data has no tokenizer, so the model cannot generate text")
    prompts = [run.sample_prompt] if prompts is None else prompts
    pieces = engine.stream(
        prompts,
        run.sample_tokens,
        temperature=run.sample_temperature,
        context=corpus.train.batch(0, 1)["tokens"].shape[1] - 1,
        tokenizer=tokenizer,
        **options,
    )
    return itertools.chain(enumerate(prompts), ((piece.prompt, piece.text) for piece in pieces))
