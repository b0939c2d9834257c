"""Where the estimate places arrays: tiles, the heap, on-chip memory, unrolled loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.memory.heap import heap_bytes
from jaxspeed.planner.memory.on_chip import MAX_COPIES, OnChip
from jaxspeed.planner.memory.tiles import kernel_layouts, nbytes
from jaxspeed.planner.memory.trace_ir import all_ops, open_program

pytestmark = pytest.mark.fast
CHIP = target_of("v5e:2x2").chip


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


def test_an_array_is_on_chip_if_it_fits_and_is_read_soon():
    size = CHIP.on_chip // 2
    copy = size / CHIP.bandwidth

    def away(between: float, size: int, uses=()) -> tuple[int, int] | None:
        seconds = [0.0, between, between, 0.0]
        memory = OnChip(CHIP, seconds, [0] * 4, [False] * 4)
        return memory.place(0, 3, uses, size)

    assert away(0.0, size) is None
    assert away(0.0, 2 * CHIP.on_chip) == (0, 3)
    assert away(MAX_COPIES * copy, size) == (0, 3)
    # Seven and seven copies long: together too long, but another operation reads it in between.
    assert away(0.7 * MAX_COPIES * copy, size) == (0, 3)
    assert away(0.7 * MAX_COPIES * copy, size, uses=[2]) is None


def test_inner_loops_use_on_chip_memory_first():
    memory = OnChip(CHIP, [0.0] * 3, [0, CHIP.on_chip - 100, 0], [False, True, False])
    assert memory.place(0, 2, [], 101) == (0, 2)
    assert memory.place(0, 2, [], 100) is None
    assert memory.used == CHIP.on_chip


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
