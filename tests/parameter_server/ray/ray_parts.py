"""Servers and workers as functions in this process, and the small runs that tests give them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.leaves import key_data
from jaxspeed.config import load_config
from jaxspeed.objective.train_state import TrainState
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.ray_engine import program_of
from jaxspeed.parameter_server.ray.resources import staff_of
from jaxspeed.parameter_server.ray.server_functions import ServerFunctions, together
from jaxspeed.parameter_server.ray.server_program import program_of_share
from jaxspeed.parameter_server.ray.state_transfer import put_together
from jaxspeed.parameter_server.ray.worker_functions import Working

CONFIG: dict[str, Any] = {
    "model": {
        "family": "llama",
        "config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 64,
            "max_position_embeddings": 16,
        },
    },
    "mesh": {"data": 2},
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
}
DROPPING: dict[str, Any] = {
    "family": "gpt2",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "dropout": 0.2,
    },
}
SERVED = {"data_reduction": "parameter_server", "servers": 2}


def config(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "parallel": SERVED, **changes}


def plain(**changes: Any) -> dict[str, Any]:
    """The same run without servers: data parallelism."""
    return {**CONFIG, **changes}


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """With masks, so that parts weigh differently."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, 64, (8, 17)).astype(np.int32),
            "mask": (rng.random((8, 17)) < 0.7).astype(np.int32),
        }
        for _ in range(count)
    ]


class Parts:
    """All processes of a run, called one after the other."""

    def __init__(self, given: dict[str, Any], **passed: Any) -> None:
        loaded = load_config(given)
        staff = staff_of(loaded)
        roles = (staff.alone, staff.workers, staff.servers, staff.platform, staff.factor)
        build = Build(*roles, **passed)
        self.program = program_of(loaded, staff, build)
        self.shares = list(self.program.servers)
        alone, _ = build.program(jax.devices()[0])
        self.servers = [
            ServerFunctions(program_of_share(alone, s, staff.factor)) for s in self.shares
        ]
        self.states = [one.program.init(0) for one in self.servers]
        self.worker = Working(alone, self.shares)
        self.variables = alone.init(0).variables

    def step(self, batch: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """One round; the metrics of each server."""
        ranks = self.program.ranks
        pairs = list(zip(self.servers, self.states, strict=True))
        published = [one.published(state) for one, state in pairs]
        frozen = self.worker.joined([one.frozen(state) for one, state in pairs])
        sources = self.worker.sources(published, frozen)
        done = []
        for part in range(ranks):
            rows = {name: np.split(x, ranks)[part] for name, x in batch.items()}
            given = (sources, self.variables, rows, published[0].step, part, published[0].scale)
            done.append(self.worker.gradients(*given))
        told, shares = together([one for _, one in done])
        reduced = [
            server.reduce([pushes[i] for pushes, _ in done], shares, state.loss_scale.scale)
            for i, (server, state) in enumerate(pairs)
        ]
        squares = jnp.stack([one for _, one in reduced])
        applied = [
            server.apply(state, grads, squares, told)
            for (server, state), (grads, _) in zip(pairs, reduced, strict=True)
        ]
        self.states = [state for state, _ in applied]
        return [metrics for _, metrics in applied]

    def state(self) -> TrainState:
        """The whole of it."""
        pairs = zip(self.servers, self.states, strict=True)
        given = [one.given(state) for one, state in pairs]
        variables = {path: np.asarray(key_data(x)) for path, x in self.variables.items()}
        return put_together(self.program, given, self.shares, variables)
