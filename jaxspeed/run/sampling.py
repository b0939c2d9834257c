"""Text from a language model: one token at a time, by the program that evaluates it.

The whole window is computed again for each token (the reference models keep no cache), which is
what the step's own memory allows for: under ZeRO 3 the weights are gathered a unit at a time here
as well.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.data import Corpus
from jaxspeed.engine import Engine
from jaxspeed.errors import ModelError
from jaxspeed.objective.train_state import TrainState
from jaxspeed.train.program import Program


def sample_tokens(
    program: Program,
    state: TrainState,
    prompt: Sequence[int],
    count: int,
    *,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[int]:
    """`count` tokens that follow the prompt; each sees at most `window` tokens before it."""
    width = min(window, 2 ** math.ceil(math.log2(max(len(prompt) + count, 2))))
    step = jax.jit(program.in_mesh(_next_token(program, temperature)))
    text = list(prompt)
    for i in range(count):
        seen = text[-width:]
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(seen)] = seen
        key = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i))
        batch = {"tokens": tokens, "last": np.int32(len(seen) - 1), "key": np.asarray(key)}
        text.append(int(step(state, batch)))
        yield text[-1]


def _next_token(program: Program, temperature: float) -> Any:
    def draw(model: Any, batch: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(model(batch["tokens"])[0], batch["last"], 0, False)
        row = row.astype(jnp.float32)
        if temperature > 0:
            key = jax.random.wrap_key_data(batch["key"])
            row = row / temperature + jax.random.gumbel(key, row.shape)
        # As a metric of a loss; ids are exact in fp32 up to 2^24.
        return jnp.zeros(()), jnp.ones(()), {"token": jnp.argmax(row)}

    objective = replace(program.objective, loss_fn=draw)

    def step(state: TrainState, batch: Any) -> jax.Array:
        sources = state.sources(program.table)
        loss, _ = objective(sources, state.variables, batch, state.step, 0, False)
        return loss.metrics["token"]

    return step


def sample_text(engine: Engine, corpus: Corpus, *, seed: int = 0) -> Iterator[str]:
    """The config's prompt and what the model makes follow it, in pieces as they come.

    Raises:
      ModelError: the data has no tokenizer, so this is no language model.
    """
    run, tokenizer = engine.config.run, corpus.tokenizer
    if tokenizer is None:
        raise ModelError("sample: the data has no tokenizer, so the model writes no text")
    ids = [int(i) for i in tokenizer.encode(run.sample_prompt)]
    window = corpus.train.batch(0, 1)["tokens"].shape[1] - 1
    drawn = sample_tokens(
        *engine.runnable,
        ids,
        run.sample_tokens,
        window=window,
        temperature=run.sample_temperature,
        seed=seed,
    )
    shown = ""
    for token in itertools.chain([None], drawn):
        if token is not None:
            ids.append(token)
        text = tokenizer.decode(ids)  # of all, because a character may have several tokens
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]
