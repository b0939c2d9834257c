"""Text generation: one token at a time, by the program's objective in evaluation mode.

The full window is recomputed for each token (the reference models have no KV cache), within the
memory of a step: under ZeRO 3 the weights are gathered one unit at a time here as well.
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
    """`count` tokens after the prompt, each computed from at most `window` tokens before it."""
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
        # Returned as a metric of the loss; ids are exact in fp32 up to 2^24.
        return jnp.zeros(()), jnp.ones(()), {"token": jnp.argmax(row)}

    objective = replace(program.objective, loss_fn=draw)

    def step(state: TrainState, batch: Any) -> jax.Array:
        sources = state.sources(program.table)
        loss, _ = objective(sources, state.variables, batch, state.step, 0, False)
        return loss.metrics["token"]

    return step


def sample_text(engine: Engine, corpus: Corpus, *, seed: int = 0) -> Iterator[str]:
    """The config's prompt and its continuation by the model, streamed.

    Raises:
      ModelError: the data has no tokenizer, so this is not a language model.
    """
    run, tokenizer = engine.config.run, corpus.tokenizer
    if tokenizer is None:
        raise ModelError("sample: the data has no tokenizer, so the model cannot generate text")
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
        text = tokenizer.decode(ids)  # of all ids, because a character may span several tokens
        if not text.endswith("�"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]
