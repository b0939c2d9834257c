"""Programs that known bugs of JAX and XLA make wrong or slow, and whether they are right here.

Each is small, and compared with NumPy in fp64.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspeed.known_jax_bugs.table import AVOIDED, KNOWN_BUGS, KnownBug

Devices = Sequence[jax.Device]

_MOST_ERROR = 1e-5  # of fp32 numbers, relative to the largest
_MOST_SECONDS = 0.05  # 40,000 updates take 0.0003 s, and 0.6 s where each rewrites the array


@dataclass(frozen=True)
class BugProgram:
    """A program that a bug is seen in.

    Attributes:
      source: the bug's, of the table.
      devices: how many it needs.
      shows: what the number of `run` is.
      run: its error or its seconds on these devices.
      most: the largest number that is right.
    """

    source: str
    devices: int
    shows: str
    run: Callable[[Devices], float]
    most: float = _MOST_ERROR

    @property
    def bug(self) -> KnownBug:
        return next(bug for bug in KNOWN_BUGS if bug.source == self.source)

    def judged(self, devices: Devices) -> str:
        """`right`, `WRONG` with the number, or why it is not run."""
        here, platforms = devices[0].platform, self.bug.platforms
        if here not in platforms:
            return f"not run: it concerns {', '.join(platforms)}, and the devices are {here}"
        if len(devices) < self.devices:
            return f"not run: it needs {self.devices} devices, and there are {len(devices)}"
        error = self.run(devices[: self.devices])
        verdict = "right" if error <= self.most else "WRONG"
        avoided = AVOIDED.get(self.bug.affects)
        concerns = f"; {avoided}" if avoided else ""
        return f"{verdict}: {self.shows} {error:.1e}, of at most {self.most:.0e}{concerns}"


def judged(devices: Devices) -> dict[str, str]:
    """The verdict on each program, by its bug's source."""
    return {program.source: program.judged(devices) for program in PROGRAMS}


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _error(computed: jax.Array, right: np.ndarray) -> float:
    """The largest difference, in terms of the largest right number."""
    computed64 = np.asarray(computed).astype(np.float64)
    return float(np.max(np.abs(computed64 - right)) / np.max(np.abs(right)))


def _squares_of_rows(devices: Devices, rows: int = 40_000) -> float:
    """The largest error of a row's number, relative to that row's."""
    x, weight = _numbers(rows, 3), _numbers(3, 3, seed=1)
    computed = jax.jit(jax.vmap(lambda row: jnp.sum((weight @ row) ** 2)))(
        jax.device_put(x, devices[0])
    )
    right = ((x.astype(np.float64) @ weight.astype(np.float64).T) ** 2).sum(axis=1)
    return float(np.max(np.abs(np.asarray(computed).astype(np.float64) - right) / right))


def _gradient_of_a_sharded_table(devices: Devices) -> float:
    """Rows and tokens are sharded over `tensor`, tokens and columns over `data`."""
    P = PartitionSpec
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2)
    ids = np.random.default_rng(0).integers(0, 5, (4, 4)).astype(np.int32)
    d_out = _numbers(4, 4, 8)
    right = np.zeros((16, 8))
    np.add.at(right, ids, d_out.astype(np.float64))

    def loss(table: jax.Array, ids: jax.Array, d_out: jax.Array) -> jax.Array:
        gathered = jax.sharding.reshard(table, P("tensor", None, reduced={"data"}))
        looked_up = gathered.at[ids].get(out_sharding=P("data", "tensor", None))
        return jnp.sum(looked_up * d_out)

    def placed(x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss))(
            placed(np.zeros((16, 8), np.float32), P("tensor", "data")),
            placed(ids, P("data", "tensor")),
            placed(d_out, P("data", "tensor", None)),
        )
    return _error(gradient, right)


def _gradient_of_offloaded_residuals(devices: Devices) -> float:
    """The gradient of a scan whose residuals are in host memory."""
    steps, width = 6, 16
    weights, x = _numbers(steps, width) + 2, _numbers(width, seed=1)

    def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return checkpoint_name(jnp.sin(x), "sine") * weight, None

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["sine"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(jax.checkpoint(step, policy=policy), jnp.asarray(x), weights)[0])

    gradient = jax.jit(jax.grad(loss))(jax.device_put(weights, devices[0]))
    states = [x.astype(np.float64)]
    for weight in weights.astype(np.float64):
        states.append(np.sin(states[-1]) * weight)
    right = np.zeros((steps, width))
    d_x = np.ones(width)
    for i in reversed(range(steps)):
        right[i] = d_x * np.sin(states[i])
        d_x = d_x * weights[i].astype(np.float64) * np.cos(states[i])
    return _error(gradient, right)


def _small_updates(devices: Devices, count: int = 40_000) -> float:
    """Seconds of a loop that writes one number of an array after the other."""

    def write(i: jax.Array, x: jax.Array) -> jax.Array:
        return x.at[i + 1].set(x[i] * 0.5 + 1)

    run = jax.jit(lambda x: lax.fori_loop(0, count - 1, write, x))
    x = jax.device_put(np.zeros(count, np.float32), devices[0])
    seconds = []
    for _ in range(4):  # the first compiles
        begun = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _gradient_of_a_ragged_exchange(devices: Devices) -> float:
    """Each device sends one row or two to each other one; infinite where it does not compile."""
    count, width = len(devices), 8
    at = np.arange(count, dtype=np.int32)
    sent = 1 + (at[:, None] + 2 * at) % 2  # [from, to]
    x, scale = _numbers(count, 2 * count, width), _numbers(count, 2 * count, width, seed=1)
    by_rank = PartitionSpec("data")
    mesh = Mesh(np.array(devices), ("data",), (AxisType.Auto,))

    def exchange(x: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        starts, offset = 2 * jnp.asarray(at), 2 * lax.axis_index("data")
        sizes = starts, sent[0], jnp.full(count, offset, jnp.int32), received[0]
        return lax.ragged_all_to_all(x[0], jnp.zeros_like(x[0]), *sizes, axis_name="data")[None]

    def loss(x: jax.Array) -> jax.Array:
        exchanged = jax.shard_map(exchange, mesh=mesh, in_specs=(by_rank,) * 3, out_specs=by_rank)
        return jnp.sum(exchanged(x, jnp.asarray(sent), jnp.asarray(sent.T)) ** 2 * scale) / 2

    right = np.zeros(x.shape)
    for source, target in np.ndindex(count, count):
        for row in range(sent[source, target]):
            place = 2 * target + row
            factor = scale[target, 2 * source + row].astype(np.float64)
            right[source, place] = x[source, place] * factor
    try:
        gradient = jax.jit(jax.grad(loss))(jax.device_put(x, NamedSharding(mesh, by_rank)))
    except jax.errors.JaxRuntimeError:
        return np.inf
    return _error(gradient, right)


def _rows_of_no_group(devices: Devices) -> float:
    """NaN or infinity counts as an infinite error."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    x, weight = _numbers(512, 128), _numbers(2, 128, 128, seed=1)
    x, weight, sizes = jax.device_put((x, weight, np.array([40, 60], np.int32)), devices[0])
    rows = np.asarray(gmm(x, weight, sizes, interpret=devices[0].platform == "cpu"))[128:]
    return float(np.max(np.abs(rows))) if np.all(np.isfinite(rows)) else np.inf


def _scatters_of_a_loop(devices: Devices) -> float:
    """The sum over a loop of an embedding's gradients, each from tokens on two devices."""
    mesh = Mesh(np.array(devices), ("data",), (AxisType.Auto,))
    ids = np.random.default_rng(0).integers(0, 12, (2, 8)).astype(np.int32)
    d_out = _numbers(2, 8, 256)
    right = np.zeros((96, 256))
    np.add.at(right, ids, d_out.astype(np.float64))

    def total(ids: jax.Array, d_out: jax.Array) -> jax.Array:
        def add(so_far: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return so_far + jnp.zeros_like(so_far).at[part[0]].add(part[1]), None

        return lax.scan(add, jnp.zeros((96, 256)), (ids, d_out))[0]

    by_token = NamedSharding(mesh, PartitionSpec(None, "data"))
    run = jax.jit(total, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return _error(run(jax.device_put(ids, by_token), jax.device_put(d_out, by_token)), right)


def _by_positions(
    devices: Devices, loss: Callable[..., jax.Array], x: np.ndarray, *rest: np.ndarray
) -> list[jax.Array]:
    """The gradients of a loss whose first argument [batch, position] is sharded by position."""
    mesh = Mesh(np.array(devices).reshape(2, -1), ("seq", "tensor"), (AxisType.Auto,) * 2)
    placed = NamedSharding(mesh, PartitionSpec(None, "seq")), NamedSharding(mesh, PartitionSpec())
    arguments = [jax.device_put(x, placed[0]), *(jax.device_put(y, placed[1]) for y in rest)]
    return jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)


def _gradient_of_a_kernel(devices: Devices) -> float:
    """A causal convolution's kernel of three positions: the two before and the position itself."""
    x, kernel = _numbers(2, 16), _numbers(3, seed=1)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        of_dims = ("NWC", "WIO", "NWC")
        image, window = x[..., None], kernel[:, None, None]
        y = lax.conv_general_dilated(image, window, (1,), [(2, 0)], dimension_numbers=of_dims)
        return jnp.sum(jnp.square(y)) / 2

    padded = np.pad(x.astype(np.float64), ((0, 0), (2, 0)))
    taps = np.stack([padded[:, i : i + 16] for i in range(3)])
    right = np.einsum("tbs,ubs,u->t", taps, taps, kernel.astype(np.float64))
    return _error(_by_positions(devices, loss, x, kernel)[1], right)


def _gradient_of_maxima(devices: Devices) -> float:
    """Maxima of each position and the two before."""
    x = _numbers(2, 16)

    def loss(x: jax.Array) -> jax.Array:
        largest = lax.reduce_window(x, -np.inf, lax.max, (1, 3), (1, 1), [(0, 0), (2, 0)])
        return jnp.sum(jnp.square(largest)) / 2

    right = np.zeros(x.shape)
    for sample, last in np.ndindex(*x.shape):
        first = max(last - 2, 0)
        right[sample, first + np.argmax(x[sample, first : last + 1])] += 1
    return _error(_by_positions(devices, loss, x)[0], right * x)


_JAX, _XLA = "https://github.com/jax-ml/jax", "https://github.com/openxla/xla"
_SPMD, _MARIN = f"{_XLA}/blob/main/xla/service/spmd", "https://github.com/marin-community/marin"
_error_of = functools.partial(BugProgram, shows="an error of")

PROGRAMS = (
    _error_of(f"{_JAX}/issues/39103", 1, run=_squares_of_rows),
    _error_of(f"{_XLA}/issues/42481", 4, run=_gradient_of_a_sharded_table),
    _error_of(f"{_XLA}/pull/46231", 1, run=_gradient_of_offloaded_residuals),
    BugProgram(f"{_JAX}/issues/40101", 1, "seconds", _small_updates, _MOST_SECONDS),
    _error_of(f"{_JAX}/issues/34755", 2, run=_gradient_of_a_ragged_exchange),
    _error_of(f"{_MARIN}/issues/8077", 2, run=_gradient_of_a_ragged_exchange),
    _error_of(f"{_XLA}/issues/47283", 33, run=_gradient_of_a_ragged_exchange),
    _error_of(
        f"{_JAX}/blob/main/jax/experimental/pallas/ops/tpu/megablox/gmm.py",
        1,
        run=_rows_of_no_group,
    ),
    _error_of(f"{_XLA}/issues/49143", 2, run=_scatters_of_a_loop),
    _error_of(f"{_SPMD}/convolution_handler.cc", 4, run=_gradient_of_a_kernel),
    _error_of(f"{_SPMD}/spmd_partitioner.cc", 2, run=_gradient_of_maxima),
)
