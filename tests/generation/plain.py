"""Generation in plain Flax on one device: a loop that computes all logits again for each token."""

import jax
import numpy as np
from flax import nnx

from jaxspeed import models

WIDTH = 96


def logits_of(engine, family):
    """A function from tokens [rows, seq] to logits [rows, seq, vocab], with the same parameters."""
    section = engine.config.model
    factory = models.build(family, section.preset, section.config).factory
    graph, state = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    values = {path: np.asarray(x) for path, x in engine.parameters.items()}
    variables = {path: np.asarray(x) for path, x in engine.state.variables.items()}
    for keys, variable in nnx.to_flat_state(state):
        path = "/".join(map(str, keys))
        if path in values:
            variable.set_value(values[path].astype(engine.placements[path].read.dtype))
        else:
            variable.set_value(variables[path])
    state = jax.device_put(state, jax.devices()[0])
    call = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    return lambda tokens: call(state, tokens)


def greedy(engine, family, prompts, count, context=None):
    """The most likely tokens after each prompt, one prompt at a time."""
    logits = logits_of(engine, family)
    found = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(count):
            seen = text if context is None else visible(text, context)
            tokens = np.zeros((1, context or WIDTH), np.int32)  # what follows is not seen
            tokens[0, : len(seen)] = seen
            text.append(int(np.asarray(logits(tokens)[0])[len(seen) - 1].argmax()))
        found.append(tuple(text[len(prompt) :]))
    return found


def visible(text, context):
    """All of a text that fits; of a longer one its last half and what has followed since."""
    start = 0
    while len(text) - start > context:
        start += context // 2
    return text[start:]
