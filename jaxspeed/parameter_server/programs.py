"""Programs of a run with a parameter server: of its servers, of its workers, and their configs.

The servers' is a Program whose table, state and update are those of ZeRO 3 over the servers.
Workers compute the gradients, each on `replica` x `tensor` devices, and a batch is sharded over
them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import DATA, TENSOR, axis_names
from jaxspeed.communication import PULL, PUSH, Communication
from jaxspeed.config import Batch, Config
from jaxspeed.errors import BatchError, ConfigError, PlacementError
from jaxspeed.interop import saved_adapter
from jaxspeed.interop.exporting import other_names
from jaxspeed.parameter_server.param_split import split_evenly
from jaxspeed.parameter_server.server import ServerStep
from jaxspeed.parameter_server.staleness import Rule
from jaxspeed.parameter_server.worker import WorkerStep
from jaxspeed.placement.mesh import build_mesh, checked_devices
from jaxspeed.placement.paths import counted, listed
from jaxspeed.placement.precision import dtype_named
from jaxspeed.placement.rows import Row, reduction_dtype
from jaxspeed.placement.show import bytes_text
from jaxspeed.train.bucketed_update import bucket_paths
from jaxspeed.train.build import build_program
from jaxspeed.train.phases import METRICS, STATE, StepPhase
from jaxspeed.train.program import Program
from jaxspeed.user_models.batches import WithExtra

# Names of the values that the phases read and write.
PART = ("pulled", "variables", "part", "step", "scale", "first")
UPDATE = ((STATE, "sums", "factor", "norm"), (STATE, METRICS))
BUCKET = ("arrays", "shared", "gradients")

Built = Callable[[Config, Sequence[jax.Device] | None], Program]


@dataclass(frozen=True)
class ServerTraffic:
    """The servers of a program, and what a worker exchanges with them."""

    servers: int
    workers: int
    pace: str  # how the workers are synchronized, as text
    pull: Communication  # per worker and version: each trained parameter as layers read it
    push: Communication  # per worker and part: each gradient in the dtype in which it is sent


@dataclass(frozen=True, kw_only=True)
class ServedProgram(Program):
    """The program of the servers' state, whose steps are several programs."""

    workers: int
    servers: int
    rule: Rule

    def __post_init__(self) -> None:
        if self.computed_arrays:
            names = listed([name for entry in self.computed_arrays for name in entry.writes])
            raise ConfigError(
                f"objective: it reads {names}, which a program of all devices computes, and "
                'parallel.data_reduction "parameter_server" has none; write "xla"'
            )

    @property
    def ranks(self) -> int:
        return self.workers * self.config.mesh.replica

    @property
    def numbered_micro_batches(self) -> int:
        return self.batch.accumulation * self.workers

    @property
    def on_one_mesh(self) -> bool:
        return False

    @property
    def serving(self) -> ServerTraffic:
        """What a worker pulls and pushes: trained parameters as layers read them, and gradients."""
        trained = [row for row in self.table if row.leaf.trainable]
        wire = dtype_named(self.config.communication_data_type)

        def sent(row: Row) -> Any:
            assert row.grad is not None
            dtype = row.grad.dtype if self.batch.accumulation > 1 else row.read.dtype
            return jnp.dtype(reduction_dtype(dtype, wire))

        def of(kind: str, purpose: str, dtype: Callable[[Row], Any]) -> Communication:
            arrays = [(self._sent_elements(row), dtype(row)) for row in trained]
            return Communication.of_arrays(kind, (), arrays, 1, source="formula", purpose=purpose)

        pull = of(PULL, "parameters", lambda row: row.read.dtype)
        push = of(PUSH, "gradients", sent)
        return ServerTraffic(self.servers, self.workers, self.rule.pace, pull, push)

    holder = "server"

    @property
    def place(self) -> str:
        if self.in_this_process:
            return super().place
        return f"in {counted(self.workers + self.servers, 'process', 'es')}"

    @property
    def exchange_figures(self) -> dict[str, dict[str, Any]]:
        serving = self.serving
        figures = {
            "servers": serving.servers,
            "workers": serving.workers,
            "bytes_down": serving.pull.bytes,
            "bytes_up": serving.push.bytes,
        }
        return {"server": figures}

    @property
    def exchange_text(self) -> str:
        serving = self.serving
        down, up = bytes_text(serving.pull.bytes), bytes_text(serving.push.bytes)
        servers, workers = counted(serving.servers, "server"), counted(serving.workers, "worker")
        return (
            f"[bold]{servers}, {workers}[/] {serving.pace}; each worker pulls {down} and pushes "
            f"{up} per version"
        )

    def freed_by_more(self, state_bytes: int) -> tuple[int, str]:
        saved = state_bytes - state_bytes * self.mesh.size // (self.mesh.size + 1)
        return saved, f"one more of parallel.servers frees {bytes_text(saved)} per server"

    def _sent_elements(self, row: Row) -> int:
        return math.prod(row.leaf.shape)

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

    def given_for_one_mesh(self) -> dict[str, Any]:
        return without_servers(self.config.given)

    def as_one_rank(self, x: np.ndarray) -> np.ndarray:
        """Each worker's part is contiguous in the batch; within it, each replica's."""
        if not x.shape:
            return x
        replicas, count = self.config.mesh.replica, self.batch.accumulation
        parts = x.reshape(self.workers, replicas, count, -1, *x.shape[1:])
        return np.swapaxes(parts, 1, 2).reshape(x.shape)


@dataclass(frozen=True, kw_only=True)
class LocalProgram(ServedProgram):
    """A parameter server on the devices of this process."""

    worker_programs: tuple[Program, ...]  # of the first worker, or of each where they have meshes
    paces: tuple[float, ...]  # simulated seconds of a worker's compute
    worker_meshes: tuple[Mesh, ...]

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        return tuple(device for mesh in self.worker_meshes for device in mesh.devices.flat)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return (*self.worker_devices, *self.mesh.devices.flat)

    @cached_property
    def server(self) -> ServerStep:
        """The programs that the servers run together."""
        return ServerStep(self, bucket_paths(self))

    @cached_property
    def worker_steps(self) -> tuple[WorkerStep, ...]:
        splits = split_evenly(self.table)
        return tuple(WorkerStep(program, splits, self.workers) for program in self.worker_programs)

    def worker(self, number: int) -> WorkerStep:
        """The programs of one worker."""
        return self.worker_steps[number if len(self.worker_steps) > 1 else 0]

    @cached_property
    def batch_mesh(self) -> Mesh:
        """The mesh of all workers, over which a batch is sharded; each has consecutive rows."""
        tensor = self.config.mesh.tensor
        devices = np.array(self.worker_devices).reshape(-1, tensor)
        return Mesh(devices, (DATA, TENSOR))

    def batch_shardings(self, batch: Any) -> Any:
        def at(x: Any) -> NamedSharding:
            return NamedSharding(self.batch_mesh, PartitionSpec(*[DATA] * bool(x.shape)))

        return jax.tree.map(at, batch)

    def parts(self, placed: Any) -> list[Any]:
        """The workers' parts of a sharded batch, by worker."""

        def parts(x: jax.Array) -> list[jax.Array]:
            by_device = {shard.device: shard.data for shard in x.addressable_shards}
            return [self._part(x, by_device, worker) for worker in range(self.workers)]

        leaves, tree = jax.tree.flatten(placed)
        return [jax.tree.unflatten(tree, part) for part in zip(*map(parts, leaves), strict=True)]

    def _part(self, x: jax.Array, by_device: dict[Any, jax.Array], worker: int) -> jax.Array:
        mesh = self.worker_meshes[worker]
        parts = [by_device[device] for device in mesh.devices.flat]
        if len(parts) == 1:
            return parts[0]
        shape = (x.shape[0] // self.workers, *x.shape[1:]) if x.shape else ()
        at = self.worker(worker).program.batch_shardings(jax.ShapeDtypeStruct(shape, x.dtype))
        return jax.make_array_from_single_device_arrays(shape, at, parts)

    def _sent_elements(self, row: Row) -> int:
        return math.prod(row.shape(row.source))

    @cached_property
    def phases(self) -> tuple[StepPhase, ...]:
        """A worker's gradients, then the servers' update; in buckets there is one for each."""
        worker, mesh = self.worker(0), self.mesh
        gradients = StepPhase(
            "gradients of a worker", worker.gradients, PART, ("pushed",), mesh=worker.program.mesh
        )
        buckets = self.server.buckets
        if buckets is None:
            return gradients, StepPhase("update", self.server.apply, *UPDATE, (STATE,), mesh=mesh)
        count = len(self.server.bucket_paths)
        return gradients, *(
            StepPhase(
                f"update {number} of {count}",
                buckets.update,
                tuple(f"{name} {number}" for name in BUCKET),
                (f"arrays {number}", f"published {number}", f"squares {number}"),
                (f"arrays {number}",),
                mesh,
            )
            for number in range(1, count + 1)
        )

    def values(self, batch: Any) -> dict[str, Any]:
        """The shapes of what a worker and the servers read."""
        worker = self.worker(0)
        arguments = dict(zip(PART, worker.abstract(batch, self.workers), strict=True))
        pushed = jax.eval_shape(worker.gradients, *arguments.values())
        if self.server.buckets is None:
            every = [row.path for row in self.table if row.leaf.trainable]
            return arguments | dict(
                zip(UPDATE[0], self.server.abstract(pushed, every), strict=True)
            )
        for number, paths in enumerate(self.server.bucket_paths, 1):
            names = (f"{name} {number}" for name in BUCKET)
            arguments |= dict(zip(names, self.server.abstract(pushed, paths), strict=True))
        return arguments


def apart(
    devices: Sequence[jax.Device] | None, servers: int
) -> tuple[list[jax.Device], list[jax.Device]]:
    """Split devices into (workers, servers); the last ones are the servers."""
    available = checked_devices(jax.devices() if devices is None else devices)
    if servers >= len(available):
        works = (
            f"at most {len(available) - 1} would do"
            if len(available) > 1
            else "more devices would do"
        )
        raise PlacementError(
            f"parallel.servers is {servers} of {len(available)} devices, and at least one has to "
            f"be a worker: {works}"
        )
    return available[:-servers], available[-servers:]


def batch_of(config: Config) -> Batch:
    """The batch of a config on all visible devices."""
    if config.parallel.data_reduction == "parameter_server":
        on_workers, _ = apart(None, config.parallel.servers)
        return config.batch(len(on_workers) // config.mesh.tensor, 1)
    mesh = build_mesh(config.mesh.model_dump(), None)
    return config.batch_on(mesh.shape)


def build(
    config: Config,
    model: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    **arguments: Any,
) -> Program:
    """The program of any config; `arguments` are the other ones of `build_program`."""

    if config.lora:
        arguments["other_names"] = partial(other_names, config, model)
    if config.lora and config.lora.adapter:
        arguments["saved"] = saved_adapter(config.lora.adapter, config, model)

    def built(config: Config, devices: Sequence[jax.Device] | None) -> Program:
        return build_program(config, model, loss_fn, devices=devices, **arguments)

    if config.parallel.data_reduction == "parameter_server":
        return build_served(config, devices, built)
    return built(config, devices)


def build_served(config: Config, devices: Sequence[jax.Device] | None, built: Built) -> Program:
    """A program of servers and workers; `built(config, devices)` builds one on one mesh.

    Raises:
      ConfigError, PlacementError: the config does not fit these devices.
    """
    parallel, mesh = config.parallel, config.mesh
    if jax.process_count() > 1:
        raise ConfigError(
            f'parallel.data_reduction: "parameter_server" in {jax.process_count()} processes. Here '
            "one process drives all devices; across machines it runs on Ray: "
            "jaxspeed train CONFIG --engine ray"
        )
    on_workers, on_servers = apart(devices, parallel.servers)
    per_worker = mesh.replica * mesh.tensor  # devices of a worker
    workers, rest = divmod(len(on_workers), per_worker)
    there = f"{len(on_workers) + len(on_servers)} devices without {len(on_servers)} servers"
    if rest:
        raise PlacementError(
            f"mesh.replica x mesh.tensor is {per_worker}, the devices of each worker, and {there} "
            f"leave {len(on_workers)}: leave a multiple of {per_worker}"
        )
    if mesh.data not in (-1, workers):
        raise PlacementError(
            f"mesh.data is {mesh.data}, and {there} leave {workers} workers: write {workers}, or "
            "leave it out"
        )
    batch = config.batch(workers * mesh.replica, 1)
    paces = tuple(parallel.worker_pace) or (1.0,) * workers
    if len(paces) != workers:
        raise ConfigError(
            f"parallel.worker_pace: {len(paces)} paces, and there are {workers} workers ({there})"
        )
    owner = built(server_config(config), on_servers)
    groups = [on_workers[i * per_worker : (i + 1) * per_worker] for i in range(workers)]
    of_worker = worker_config(config, batch)
    # Programs of one device run on any; those of a mesh only there.
    programs = tuple(
        built(of_worker, group) for group in (groups if per_worker > 1 else groups[:1])
    )
    alone = [
        Mesh(np.array(g).reshape(programs[0].mesh.devices.shape), axis_names()) for g in groups
    ]
    factor = gradient_factor(config, workers)
    return LocalProgram(
        config=config,
        batch=batch,
        traced_loss=owner.traced_loss,
        gradients=owner.gradients,
        update=replace(owner.update, gradient_factor=factor),
        source=replace(owner.source, build=build),
        workers=workers,
        servers=len(on_servers),
        rule=rule_of(config),
        worker_programs=programs,
        paces=paces,
        worker_meshes=tuple(p.mesh for p in programs) if per_worker > 1 else tuple(alone),
    )


# -- configs ---------------------------------------------------------------------------------------


def rule_of(config: Config) -> Rule:
    parallel = config.parallel
    return Rule(parallel.max_staleness, parallel.on_stale, parallel.staleness_decay)


def gradient_factor(config: Config, workers: int) -> int:
    """What multiplies the mean gradients: the data ranks, where synchronous ones are summed."""
    summed = config.gradient_allreduce_op == "sum" and rule_of(config).synchronous
    return workers * config.mesh.replica if summed else 1


def server_config(config: Config) -> Config:
    """The config of the servers: masters and moments sharded over all of them, however small."""
    offload = config.zero_optimization.offload_optimizer.model_dump(exclude_unset=True)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload}
    return _without_mesh(config, {"train_micro_batch_size_per_gpu": 1}, zero)


def worker_config(config: Config, batch: Batch, model_axes: bool = True) -> Config:
    """The config of one worker alone; without the model axes, on one device."""
    sizes = {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    mesh = {"replica": config.mesh.replica, DATA: 1, TENSOR: config.mesh.tensor}
    return _without_mesh(config, sizes, {"stage": 0}, mesh if model_axes else {})


def _without_mesh(
    config: Config, batch: dict[str, int], zero: dict[str, Any], mesh: dict[str, int] | None = None
) -> Config:
    """A config for a part of the devices, without the keys of the global mesh and batch."""
    settings = config.given
    for key in (
        "mesh",
        "data_parallel_size",
        "elasticity",
        "gradient_allreduce_op",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        settings.pop(key, None)
    if not mesh or mesh[TENSOR] == 1:
        settings.pop("tensor_parallel", None)
    mesh = {axis: size for axis, size in (mesh or {}).items() if size > 1}
    settings |= {"mesh": {**mesh, DATA: 1}} if mesh else {}
    return Config.load({**without_servers(settings), "zero_optimization": zero, **batch})


def without_servers(settings: dict[str, Any]) -> dict[str, Any]:
    """The config as given, without the keys of a parameter server."""
    server_keys = ("data_reduction", "servers", "max_staleness", "on_stale", "staleness_decay")
    parallel = settings.get("parallel", {})
    others = {key: x for key, x in parallel.items() if key not in (*server_keys, "worker_pace")}
    return {**settings, "parallel": others}
