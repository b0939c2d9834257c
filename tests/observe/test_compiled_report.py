"""The report of a compiled step: its bytes are those of the arrays, and it prints itself."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspeed.observe import largest_buffers, report
from tests.observe.programs import array, constrain


def compile_step(mesh, donate=True):
    def step(w, x):
        gradient = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return constrain(w - 0.1 * gradient, mesh, "data", "tensor")

    return (
        jax.jit(step, donate_argnums=0 if donate else ())
        .lower(
            array(mesh, (256, 128), P("data", "tensor")),
            array(mesh, (64, 256), P(("replica", "data"))),
        )
        .compile()
    )


def test_bytes_are_those_of_each_devices_shards(mesh):
    made = report(compile_step(mesh), mesh)
    weight, batch = 256 * 128 * 4 // 4, 64 * 256 * 4 // 4
    assert made.argument_bytes == weight + batch
    assert made.output_bytes == weight
    assert made.temp_bytes > 0
    assert made.host_bytes == 0


def test_a_donated_argument_is_aliased(mesh):
    assert report(compile_step(mesh), mesh).alias_bytes == 256 * 128 * 4 // 4
    assert report(compile_step(mesh, donate=False), mesh).alias_bytes == 0


def test_it_carries_costs_and_collectives(mesh):
    made = report(compile_step(mesh), mesh, compile_seconds=1.5)
    # Two products, each [64 / 4 samples, 256] with [256, 128 / tensor 2].
    assert made.flops == 2 * (2 * (64 // 4) * 256 * (128 // 2))
    assert made.bytes_accessed > made.argument_bytes
    assert any(one.kind == "all-gather" and one.axis == ("data",) for one in made.collectives)
    assert made.compile_seconds == 1.5
    assert (made.uncounted, made.unknown_loops) == ((), ())


def test_it_prints_itself_with_a_row_for_like_collectives(mesh):
    made = report(compile_step(mesh), mesh, compile_seconds=1.5)
    text = str(made)
    assert "argument bytes" in text
    assert "49.2 kB" in text  # 32,768 of the weight and 16,384 of the batch
    assert "1.50 s" in text
    for one in made.collectives:
        assert one.kind in text
        assert " x ".join(one.axis) in text


def test_largest_buffers_show_what_was_gathered(mesh):
    """The weight is stored in quarters; what the step gathers of it is the largest array."""
    largest = largest_buffers(compile_step(mesh).as_text(), count=1)[0]
    assert (largest.dtype, sorted(largest.shape)) == ("f32", [64, 256])
    assert largest.bytes == 256 * 64 * 4


def test_what_a_fusion_never_stores_is_no_buffer():
    """f32 products that are only compared: booleans are what is stored."""
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    text = jax.jit(lambda x: x[:, None] * x > 0.5).lower(x).compile().as_text()
    assert "f32[1000,1000]" in text  # inside the fusion
    largest = largest_buffers(text, count=1)[0]
    assert (largest.dtype, largest.shape) == ("pred", (1000, 1000))
