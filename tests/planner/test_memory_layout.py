"""Where the estimate places arrays: tiles, the heap, on-chip memory, unrolled loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.memory.heap import heap_bytes
from jaxspeed.planner.memory.liveness import peaks
from jaxspeed.planner.memory.on_chip import MAX_COPIES, NO_USE, ChipUse, OnChip
from jaxspeed.planner.memory.op_order import OrderedScope
from jaxspeed.planner.trace.bf16_demotion import narrow_values
from jaxspeed.planner.trace.materialization import ScopeAnalysis
from jaxspeed.planner.trace.tiles import Sizes, kernel_layouts, nbytes
from jaxspeed.planner.trace.trace_ir import all_ops, open_program

pytestmark = pytest.mark.fast
CHIP = target_of("v5e:2x2").chip
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def test_a_kernels_last_dim_is_padded_to_128_columns():
    shape = (8, 12, 4096, 64)
    assert nbytes(shape, jnp.float32, True) == 4 * np.prod(shape)
    assert nbytes(shape, jnp.float32, True, 3) == 2 * 4 * np.prod(shape)


def test_an_array_between_two_kernels_has_the_nearer_ones_layout():
    def kernel(x):
        def copy(read, write):
            write[...] = read[...]

        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def step(x):
        x = kernel(x)
        for elementwise in (jnp.sin, jnp.exp, jnp.tanh, jnp.abs):
            x = elementwise(x)
        return kernel(x.T)

    for _ in range(5):  # whatever the hashes of the values are
        traced = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((16, 256), jnp.float32))
        scope = open_program(traced, "tpu")
        layouts = kernel_layouts(scope)
        found = {op.name: layouts[op.outs[0]] for op in scope.ops}
        assert (found["sin"], found["exp"], found["abs"]) == (1, 1, 0)


def test_the_heap_has_holes():
    live = [(1, 2, 1), (0, 3, 4), (4, 5, 2), (4, 5, 3), (3, 5, 4)]
    assert max(sum(n for a, b, n in live if a <= t <= b) for t in range(6)) == 9
    assert heap_bytes(live) == 10


def test_buffers_that_never_meet_share_their_place():
    assert heap_bytes([(0, 1, 5), (2, 3, 7), (4, 5, 6)]) == 7
    assert heap_bytes([(0, 3, 5), (2, 3, 7)]) == 12


BUFFERS = st.tuples(st.integers(0, 20), st.integers(0, 9), st.integers(1, 40)).map(
    lambda each: (each[0], each[0] + each[1], each[2])
)


@given(st.lists(BUFFERS, max_size=30))
def test_a_heap_holds_what_is_live_at_a_time(buffers):
    live = max((sum(n for a, b, n in buffers if a <= t <= b) for t in range(30)), default=0)
    assert live <= heap_bytes(buffers) <= sum(size for *_, size in buffers)


ALL = CHIP.on_chip / CHIP.bandwidth  # seconds of a copy of all on-chip memory


@pytest.mark.parametrize("size", [CHIP.on_chip // 2, 1000])
def test_an_array_is_on_chip_if_it_fits_and_is_read_soon(size):
    """How soon does not depend on its size: of a small mixer, arrays of 1.5 and 5.9 MB that wait
    for less than 761 operations were on the chip, those for more than 940 were not (v6e)."""

    def away(between: float, size: int, uses=()) -> tuple[int, int] | None:
        memory = OnChip(CHIP, [0.0, between, between, 0.0], [NO_USE] * 4, 0)
        return memory.place(0, 3, uses, size)

    assert away(0.0, size) is None
    assert away(0.0, 2 * CHIP.on_chip) == (0, 3)
    assert away(MAX_COPIES * ALL, size) == (0, 3)
    # Together too long, but another operation reads it in between.
    assert away(0.7 * MAX_COPIES * ALL, size) == (0, 3)
    assert away(0.7 * MAX_COPIES * ALL, size, uses=[2]) is None


def test_an_array_that_waits_in_a_loop_is_on_chip_if_its_waits_there_are_short():
    memory = OnChip(CHIP, [0.0] * 4, [NO_USE] * 4, 0)
    assert memory.place(0, 3, [1], 1000, lambda i: MAX_COPIES * ALL * (i == 1)) is None
    assert memory.place(0, 3, [1], 1000, lambda i: 1.1 * MAX_COPIES * ALL * (i == 1)) == (0, 3)


def test_the_largest_arrays_are_on_chip_first_those_of_inner_loops_included():
    loop = ChipUse(bytes=CHIP.on_chip - 100, largest=1000)
    memory = OnChip(CHIP, [0.0] * 3, [NO_USE, loop, NO_USE], 0)
    assert memory.place(0, 2, [], 101) == (0, 2)
    assert memory.place(0, 2, [], 100) is None
    assert memory.used == CHIP.on_chip
    assert memory.place(0, 2, [], 1001) is None
    assert memory.used == CHIP.on_chip, "the loop has less"
    full = OnChip(CHIP, [0.0] * 3, [NO_USE, loop, NO_USE], CHIP.on_chip - 1000)
    assert full.place(0, 2, [], 1001) == (0, 2), "enclosing scopes hold the rest"


@pytest.mark.parametrize("large", [False, True])
def test_a_loop_has_the_on_chip_memory_that_larger_arrays_around_it_leave(large):
    room = CHIP.on_chip // 4

    def step(x, small):
        around = jnp.sort(x)
        body = lambda c, _: (jnp.sort(jnp.sort(c)), None)  # noqa: E731
        return (around * jax.lax.scan(body, small, None, 3)[0].max()).sum()

    sizes = (room - 1000 if large else 1000, room // 3)
    given = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    scope = open_program(jax.make_jaxpr(step)(*given), "tpu")
    device, _ = peaks(scope, Sizes({}, True, chip=CHIP))
    assert any(array.depth for array in device.arrays if array.bytes > 1 << 20) is large
    assert 0 <= device.chip.largest - 4 * max(sizes) < 1 << 16, "in tiles"


@pytest.mark.parametrize(("size", "fetch"), [(1 << 20, 1), (2 << 20, 8)])
def test_copies_between_the_memories_are_counted(size, fetch):
    """Large arrays are copied in four slices, of two tuples each."""
    long = 2 * MAX_COPIES * ALL
    memory = OnChip(CHIP, [0.0, ALL, 0.0, long, 0.0], [NO_USE] * 5, 0)
    # On the chip until 2, then not, then fetched for its last use.
    assert memory.place(0, 4, [2, 4], size) == (2, 4)
    assert memory.tuples == 1 + fetch
    memory = OnChip(CHIP, [0.0, ALL, 0.0, long, 0.0], [NO_USE] * 5, 0)
    memory.place(0, 4, [2, 4], size, computed=False)
    assert memory.tuples == 2 * fetch, "fetched for each use, which are far from each other"
    memory = OnChip(CHIP, [0.0, ALL, 0.0, ALL, 0.0], [NO_USE] * 5, 0)
    memory.place(0, 4, [2, 4], size, computed=False)
    assert memory.tuples == fetch, "fetched for one use, it stays until the next"


@pytest.mark.parametrize(
    ("step", "in_device_memory"),
    [
        (lambda x: jnp.sort(jnp.sort(x)).sum(), []),
        (lambda x: jax.device_put(jnp.sort(x), HOST), ["sort"]),
        (lambda x: jnp.sort(jax.device_put(jax.device_put(x, HOST), DEVICE)).sum(), ["device_put"]),
    ],
    ids=["stays", "goes", "comes"],
)
def test_what_comes_from_host_memory_or_goes_there_is_in_device_memory(step, in_device_memory):
    given = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    device, _ = peaks(open_program(jax.make_jaxpr(step)(given), "tpu"), Sizes({}, True, chip=CHIP))
    assert [array.op.name for array in device.arrays if array.op and array.bytes > 1000] == (
        in_device_memory
    )


def test_only_readers_that_need_it_in_memory_extend_a_capped_logits_life():
    """The others compute it again from its source, as XLA:TPU does; XLA:GPU does not."""

    def step(x, w, labels):
        logits = jnp.tanh(x @ w) * 30  # as gemma's
        label = jnp.take_along_axis(logits, labels, -1)
        return label, jax.nn.logsumexp(logits, -1), logits.max()

    shapes = [((64, 16), jnp.float32), ((16, 512), jnp.float32), ((64, 1), jnp.int32)]
    traced = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    scope = open_program(traced, "tpu")
    for library in (False, True):
        analysis = ScopeAnalysis(scope, Sizes({}, not library, library=library), (), 0, {})
        analysis.analyze()
        capped = next(
            op.outs[0] for op in scope.ops if op.name == "mul" and op.outs[0].size == 1 << 15
        )
        by = {scope.ops[i].name for i in analysis.readers[capped]}
        assert capped in analysis.materialized
        assert (by == {"gather"}) is not library


def test_an_unrolled_scan_is_its_trips_in_a_row():
    def step(unroll):
        def loss(w, x):
            body = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
            return jax.lax.scan(body, x, w, unroll=unroll)[0].sum()

        shapes = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((3, 8, 8), (4, 8))]
        return open_program(jax.make_jaxpr(jax.grad(loss))(*shapes), "tpu")

    names = {unroll: [op.name for op in all_ops(step(unroll))] for unroll in (1, 3)}
    assert "scan" in names[1] and "scan" not in names[3]
    # Forward, gradients of the weights, and of each layer's input but the first's.
    assert names[3].count("dot_general") == 3 + 3 + 2


def test_a_scan_of_one_trip_is_its_body():
    """Compilers inline such a loop, and fuse what is around it with its operations."""

    def step(scan):
        def loss(w, x):
            body = lambda x, w: (jnp.tanh(x @ w), jnp.exp(x))  # noqa: E731
            y, other = jax.lax.scan(body, x, w) if scan else body(x, w[0])
            return y.sum() + other.sum()

        shapes = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((1, 256, 256), (512, 256))]
        return open_program(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes), "cuda")

    both = [step(scan) for scan in (True, False)]
    assert not any(op.name == "scan" for op in all_ops(both[0]))
    one, other = (peaks(scope, Sizes({}, False, library=True))[0].bytes for scope in both)
    assert one == other


def test_an_operation_runs_early_only_if_what_it_frees_has_no_other_reader():
    def step(x):
        large = jnp.sort(x)
        return jnp.cumsum(large).max(), jnp.cumprod(large).max()

    given = jax.ShapeDtypeStruct((1000,), jnp.float32)
    scope = open_program(jax.make_jaxpr(step)(given), "tpu")
    found = OrderedScope(scope, Sizes({}, True), (), 0, {})
    found.analyze()
    at = dict(zip((op.name for op in scope.ops), found.times(set()), strict=True))
    assert at["sort"] < at["cumsum"] < at["cumprod"]


@pytest.mark.parametrize(
    ("trips", "platform", "loops"), [(2, "tpu", 0), (3, "tpu", 1), (2, "cuda", 1)]
)
def test_a_tpus_loop_of_two_trips_that_fetches_from_host_memory_is_no_loop(trips, platform, loops):
    def step(x, w):
        body = lambda x, _: (jnp.tanh(x @ jax.device_put(w, DEVICE)), None)  # noqa: E731
        return jax.lax.scan(body, x, None, trips)[0]

    def traced(x, w):
        return step(x, jax.device_put(w, HOST))

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    scope = open_program(jax.make_jaxpr(traced)(shape, shape), platform)
    assert sum(op.name == "scan" for op in all_ops(scope)) == loops


def of_platform(platform):
    return Sizes({}, platform == "tpu", library=platform == "cuda")


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_a_tpu_sends_an_array_to_host_memory_as_late_as_it_is_fetched(platform):
    def step(x):
        sent = jax.device_put(jnp.sort(x), HOST)
        other = jnp.cumsum(jnp.cumprod(x))  # meanwhile
        return other.sum() + jax.device_put(sent, DEVICE), sent

    given = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    scope = open_program(jax.make_jaxpr(step)(given), platform)
    device, _ = peaks(scope, of_platform(platform))
    assert (device.bytes >= 3 * (4 << 20)) is (platform == "tpu")


@pytest.mark.parametrize(("version", "arrays"), [((0, 11, 2), 3), ((0, 12, 0), 2)])
def test_a_gpus_loop_has_its_results_before_it_up_to_jax_0_11(version, arrays, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)

    def step(x):
        first = jnp.cumsum(jnp.sort(x)).sum()  # both arrays end before the loop
        return jax.lax.scan(lambda c, _: (c, jnp.sin(c) + jnp.zeros(1 << 10)), first, None, 1 << 10)

    given = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    scope = open_program(jax.make_jaxpr(step)(given), "cuda")
    device, _ = peaks(scope, of_platform("cuda"))
    assert (device.bytes >> 22) == arrays


def test_equal_operations_with_literals_are_merged():
    def step(x):
        return jnp.sort(x * 2.0) + jnp.cumsum(x * 2.0) + jnp.cumprod(x * 3.0)

    given = jax.ShapeDtypeStruct((8,), jnp.float32)
    scope = open_program(jax.make_jaxpr(step)(given), "cpu")
    assert sum(op.name == "mul" for op in scope.ops) == 2


@pytest.mark.parametrize(("read", "stored"), [(jnp.bfloat16, 2), (jnp.float32, 4)])
def test_an_array_in_fp32_of_which_only_16_bits_are_read_is_stored_in_16_bits(read, stored):
    def step(x):
        wide = jax.lax.optimization_barrier(x.astype(jnp.float32))
        return jnp.sort(wide.astype(read))

    given = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
    scope = open_program(jax.make_jaxpr(step)(given), "tpu")
    sizes = Sizes({}, True, narrow_values(scope))
    (wide,) = (op.outs[0] for op in scope.ops if op.name == "optimization_barrier")
    assert sizes.of(wide) == stored * 8 * 128
