"""Initialise a large model on 8 simulated devices, and tell how much memory the process took.

Run as a program: `python -m tests.system.resident '{"hidden_size": 512, ...}'` prints JSON.
"""

import json
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jaxspeed
from tests.system import stacks


def peak_rss() -> int:
    """Bytes that were resident at the process's peak (Linux counts kB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(sizes: dict[str, Any]) -> dict[str, Any]:
    """Peak RSS before and after, the state's bytes, and the largest array on any device."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))  # the runtime, the compiler
    baseline = peak_rss()
    config = stacks.config_of(3, mixed=False).model_dump(exclude_unset=True)
    config["model"] = {"family": "gpt2", "config": sizes}
    engine = jaxspeed.initialize(config=config)
    jax.block_until_ready(engine.state)
    leaves = jax.tree.leaves((engine.state.params, engine.state.opt))
    return {
        "baseline": baseline,
        "peak": peak_rss(),
        "state": sum(x.nbytes for x in leaves),
        "parameters": sum(x.size for x in engine.state.params.values()),
        "whole": [p for p, x in engine.state.params.items() if x.is_fully_replicated],
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
