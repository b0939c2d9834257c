"""Programs of a run with a parameter server: two meshes, and several compiled programs.

A ServedProgram is the servers' Program: their table, state and update are those of ZeRO 3 over the
servers. Workers compute the gradients, and a batch is sharded over them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.communication import PULL, PUSH, Communication
from jaxspeed.config import Config
from jaxspeed.errors import BatchError, ConfigError, JaxspeedError, PlacementError
from jaxspeed.objective.accumulate import Sums, accumulate, per_weight, running_mean
from jaxspeed.objective.batches import WithExtra
from jaxspeed.objective.train_state import Arrays, TrainState
from jaxspeed.parameter_server.bucketed_update import UpdateBuckets, buckets_of
from jaxspeed.parameter_server.staleness import Rule
from jaxspeed.parameter_server.worker_step import WorkerStep, server_shards, wire_of
from jaxspeed.placement.mesh import apart, build_mesh
from jaxspeed.placement.rows import Row, reduction_dtype
from jaxspeed.placement.table import PlacementTable
from jaxspeed.train.build import build_program
from jaxspeed.train.gradients import batch_specs
from jaxspeed.train.program import Metrics, Program, ServerTraffic

Built = Callable[[Config, Sequence[jax.Device] | None], Program]


@dataclass(frozen=True, kw_only=True)
class ServedProgram(Program):
    """`fold(sums, sums)`, `apply(state, sums, factor)` and `publish(state)` run on the servers."""

    worker_program: Program  # of one worker, on the first worker's device
    rule: Rule
    paces: tuple[float, ...]  # simulated seconds of a worker's compute
    worker_devices: tuple[jax.Device, ...]

    @property
    def ranks(self) -> int:
        return len(self.worker_devices)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return (*self.worker_devices, *self.mesh.devices.flat)

    @cached_property
    def worker(self) -> WorkerStep:
        """The programs that each worker runs."""
        return WorkerStep(self.worker_program, server_shards(self.table))

    @cached_property
    def batch_mesh(self) -> Mesh:
        """The mesh of all workers, over which a batch is sharded."""
        return build_mesh({}, self.worker_devices)

    def batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.batch_mesh, spec), batch_specs(batch))

    def read_batch(
        self, batch: Any, size: int | None, extra: Any = None, abstract: bool = False
    ) -> Any:
        read = super().read_batch(batch, size, extra, abstract)
        if isinstance(read, WithExtra):
            raise BatchError(
                'parallel.data_reduction "parameter_server": workers take no extra arrays, only '
                'parts of a batch; use "xla", or scalars in the batch'
            )
        return read

    def parts(self, placed: Any) -> list[Any]:
        """The workers' parts of a sharded batch, by worker."""

        def parts(x: jax.Array) -> list[jax.Array]:
            by_device = {shard.device: shard.data for shard in x.addressable_shards}
            return [by_device[device] for device in self.worker_devices]

        leaves, tree = jax.tree.flatten(placed)
        return [jax.tree.unflatten(tree, part) for part in zip(*map(parts, leaves), strict=True)]

    # -- programs of the servers------------------------------------------------------------------

    @cached_property
    def fold(self) -> Callable[[Sums, Sums], Sums]:
        """The weighted mean of two workers' sums; donates the first one's gradients."""

        def fold(grads: Arrays, seen: Sums, new: Sums) -> Sums:
            return folded(seen._replace(grads=grads), new)

        compiled = jax.jit(self.in_mesh(fold), donate_argnums=0)
        return lambda seen, new: compiled(seen.grads, seen._replace(grads={}), new)

    @cached_property
    def apply(self) -> Any:
        """`(state, sums, factor) -> (state, metrics)`: one update; donates the state."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            self.in_mesh(self.applied),
            donate_argnums=0,
            out_shardings=(self.shardings, replicated),
        )

    def applied(self, state: TrainState, sums: Sums, factor: Any) -> tuple[TrainState, Metrics]:
        """Update with gradients times `factor`, which is 1 except for damped stale ones."""
        damped = {path: grad * factor.astype(grad.dtype) for path, grad in sums.grads.items()}
        return self.update(state, sums._replace(grads=damped), state.variables)

    @cached_property
    def mean_loss(self) -> Callable[[Sums], Metrics]:
        """Loss, weight and metrics of sums without gradients."""

        def mean(sums: Sums) -> Metrics:
            loss = per_weight(sums.total, sums.weight)
            return {**sums.metrics, "loss": loss, "weight": sums.weight}

        return jax.jit(mean)

    @cached_property
    def buckets(self) -> UpdateBuckets | None:
        """The buckets of a synchronous update; None where it depends on all gradients."""
        return buckets_of(self)

    @cached_property
    def publish(self) -> Callable[[TrainState], Arrays]:
        """The parameters that workers pull: sharded over servers, in the dtype that layers read."""
        rows = [row for row in self.table if row.source.dtype != row.read.dtype]
        at = {row.path: self.table.sharding(row.source) for row in rows}

        def cast(masters: Arrays) -> Arrays:
            return {row.path: masters[row.path].astype(row.read.dtype) for row in rows}

        compiled = jax.jit(cast, out_shardings=at)

        def publish(state: TrainState) -> Arrays:
            sources = state.sources(self.table)
            return {**sources, **compiled({row.path: sources[row.path] for row in rows})}

        return publish

    @property
    def serving(self) -> ServerTraffic:
        def stored(row: Row) -> int:
            return math.prod(row.shape(row.source))

        sends = pull_and_push(self, self.worker_program.table, stored)
        return ServerTraffic(self.mesh.size, self.rule.pace, *sends)

    @property
    def ranks_draw_apart(self) -> bool:
        return True

    def given_for_one_mesh(self) -> dict[str, Any]:
        return without_servers(self.config.given)

    def traced_step(self, batch: Any) -> tuple[Any, Mesh]:
        """One worker's computation: the step without the update."""
        worker = self.worker
        return worker.gradients.trace(*worker.abstract(batch, self.ranks)), self.worker_program.mesh

    def as_one_rank(self, x: np.ndarray) -> np.ndarray:
        return x  # each worker's part is contiguous in the batch

    @property
    def step(self) -> Any:
        raise JaxspeedError(
            'engine.step: with parallel.data_reduction "parameter_server" a step is several '
            "programs on several meshes, so there is no one function; call engine.train_batch"
        )


def pull_and_push(
    program: Program, worker_program: PlacementTable, elements: Callable[[Row], int]
) -> tuple[Communication, Communication]:
    """What a worker pulls of each version and pushes of each part.

    Each trained parameter as layers read it; each gradient in the dtype in which it is sent.
    """
    trained = [row for row in program.table if row.leaf.trainable]
    wire = wire_of(program.config)

    def sent(row: Row) -> Any:
        grad = worker_program[row.path].grad
        assert grad is not None
        made = grad.dtype if program.batch.accumulation > 1 else row.read.dtype
        return jnp.dtype(reduction_dtype(made, wire))

    def of(kind: str, purpose: str, dtype: Callable[[Row], Any]) -> Communication:
        arrays = [(elements(row), dtype(row)) for row in trained]
        return Communication.of_arrays(kind, (), arrays, 1, source="formula", purpose=purpose)

    pull = of(PULL, "parameters", lambda row: row.read.dtype)
    return pull, of(PUSH, "gradients", sent)


def folded(seen: Sums, new: Sums) -> Sums:
    """The weighted mean of two workers' sums, as micro-batches accumulate."""
    sums, share = accumulate(seen, new)
    grads = {path: running_mean(x, new.grads[path], share) for path, x in seen.grads.items()}
    return sums._replace(grads=grads)


def build(
    config: Config,
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    **given: Any,
) -> Program:
    """The program of any config; `given` are the other arguments of `build_program`."""

    def built(config: Config, devices: Sequence[jax.Device] | None) -> Program:
        return build_program(config, model, loss_fn, devices=devices, **given)

    if config.parallel.data_reduction == "parameter_server":
        return build_served(config, devices, built)
    return built(config, devices)


def build_served(config: Config, devices: Sequence[jax.Device] | None, built: Built) -> Program:
    """A program of servers and workers; `built(config, devices)` builds one on one mesh.

    Raises:
      ConfigError, PlacementError: the config does not fit these devices.
    """
    parallel = config.parallel
    if jax.process_count() > 1:
        raise ConfigError(
            f'parallel.data_reduction: "parameter_server" in {jax.process_count()} processes. Here '
            "one process drives all devices; across machines it runs on Ray: "
            "jaxspeed train CONFIG --engine ray"
        )
    workers, servers = apart(devices, parallel.servers)
    ranks = len(workers)
    if config.mesh.data not in (-1, ranks):
        raise PlacementError(
            f"mesh.data is {config.mesh.data}, and {ranks + len(servers)} devices without "
            f"{len(servers)} servers leave {ranks} workers: write {ranks}, or leave it out"
        )
    batch = config.batch(ranks, 1)
    paces = tuple(parallel.worker_pace) or (1.0,) * ranks
    if len(paces) != ranks:
        raise ConfigError(
            f"parallel.worker_pace: {len(paces)} paces, and there are {ranks} workers "
            f"({ranks + len(servers)} devices without {len(servers)} servers)"
        )
    rule = Rule(parallel.max_staleness, parallel.on_stale, parallel.staleness_decay)
    owner = built(_server_config(config), servers)
    worker_program = built(worker_config(config, batch.micro, batch.accumulation), workers[:1])
    summed = config.gradient_allreduce_op == "sum" and rule.synchronous
    parts = {name: getattr(owner, name) for name in ("objective", "gradients")}
    return ServedProgram(
        config=config,
        batch=batch,
        update=replace(owner.update, gradient_factor=ranks if summed else 1),
        worker_program=worker_program,
        rule=rule,
        paces=paces,
        worker_devices=tuple(workers),
        source=replace(owner.source, build=build),
        **parts,
    )


def _server_config(config: Config) -> Config:
    """The config of the servers: masters and moments sharded over all of them, however small."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return _on_one_mesh(config, zero, {"train_micro_batch_size_per_gpu": 1})


def worker_config(config: Config, micro: int, accumulation: int) -> Config:
    """The config of one worker alone."""
    batch = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return _on_one_mesh(config, {"stage": 0}, batch)


def _on_one_mesh(config: Config, zero: dict[str, Any], batch: dict[str, int]) -> Config:
    """A config for a part of the devices, without the keys of the global mesh and batch."""
    given = config.given
    for key in (
        "mesh",
        "data_parallel_size",
        "elasticity",
        "gradient_allreduce_op",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        given.pop(key, None)
    return Config.load({**without_servers(given), "zero_optimization": zero, **batch})


def without_servers(given: dict[str, Any]) -> dict[str, Any]:
    """The config as given, without the keys of a parameter server."""
    own = ("data_reduction", "servers", "max_staleness", "on_stale", "staleness_decay")
    parallel = given.get("parallel", {})
    others = {key: x for key, x in parallel.items() if key not in (*own, "worker_pace")}
    return {**given, "parallel": others}
