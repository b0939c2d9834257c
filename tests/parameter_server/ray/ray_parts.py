"""Server and worker functions in this process, and the small runs of tests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspeed.config import load_config
from jaxspeed.parameter_server.ray.actors import ServerActor, WorkerActor
from jaxspeed.parameter_server.ray.build import BuildArguments
from jaxspeed.parameter_server.ray.ray_engine import program_of
from jaxspeed.parameter_server.ray.server_state import variables_of
from jaxspeed.train_state.state import TrainState

CONFIG: dict[str, Any] = {
    "mesh": {"data": 2},
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
}
LLAMA: dict[str, Any] = {
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


def small_language() -> tuple[Any, Any]:
    """A model of four leaves and its loss. Closures, so that they travel by value."""

    def init(key: jax.Array) -> dict[str, Any]:
        table, up, down = jax.random.split(key, 3)
        mlp = {
            "up": jax.random.normal(up, (16, 32)) / 4,
            "down": jax.random.normal(down, (32, 16)) / 6,
        }
        embed = jax.random.normal(table, (64, 16)) / 4
        return {"embed": embed, "mlp": mlp, "norm": {"scale": jnp.ones(16)}}

    def apply(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        h = params["embed"][ids]
        h = h + jnp.tanh(h @ params["mlp"]["up"]) @ params["mlp"]["down"]
        return (h * params["norm"]["scale"]) @ params["embed"].T

    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        ids, mask = batch["tokens"], batch["mask"][:, 1:]
        logits = model(ids[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
        return (losses * mask).sum(), mask.sum().astype(jnp.float32)

    return (init, apply), loss


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
        if "model" not in given:
            passed["model"], passed["loss_fn"] = small_language()
        self.program, build = program_of(loaded, BuildArguments(**passed))
        self.layout = build.layout
        self.servers = [ServerActor() for _ in range(self.layout.servers)]
        self.worker = WorkerActor()
        variables = variables_of(self.program, 0)
        begun = []
        for number, server in enumerate(self.servers):
            server.build(build, number)
            begun.append(server.fresh(0))
        self.published = [published for published, _ in begun]
        self.worker.begin(self.worker.build(build), variables, *(frozen for _, frozen in begun))
        self.variables = variables

    def pushed(self, batch: dict[str, np.ndarray]) -> list[Any]:
        """Of each worker: its pushes by bucket and server, then (losses, scale)."""
        workers, done = self.program.workers, []
        for part in range(workers):
            rows = {name: np.split(x, workers)[part] for name, x in batch.items()}
            done.append(self.worker.gradients(0, part, rows, *self.published))
        return done

    def reduced(self, done: list[Any], bucket: int = 0) -> list[Any]:
        """What each server reduced of all pushes."""
        losses, scale = [one[-1][0] for one in done], done[0][-1][1]
        first = bucket * self.layout.servers
        return [
            server.reduce(1.0, scale, losses, *(one[first + i] for one in done))
            for i, server in enumerate(self.servers)
        ]

    def step(self, batch: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """One round; the metrics of each server."""
        done, count = self.pushed(batch), len(self.layout.buckets)
        if not count:
            reduced = self.reduced(done)
            applied = [server.apply(*reduced) for server in self.servers]
            self.published = [published for published, _ in applied]
            return [metrics for _, metrics in applied]
        every: list[Any] = []
        self.published = []
        for bucket in range(count):
            every += self.reduced(done, bucket)
            last = bucket == count - 1
            given = every if last else []
            applied = [server.apply_bucket(last, *given) for server in self.servers]
            self.published += [published for published, _ in applied]
        return [metrics for _, metrics in applied]

    @property
    def states(self) -> list[TrainState]:
        return [server._state for server in self.servers]

    def state(self) -> TrainState:
        """The whole of it."""
        given = [server.get_state() for server in self.servers]
        return self.layout.join_state(self.program, given, self.variables)
