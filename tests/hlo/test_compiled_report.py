"""The report of a compiled step: its bytes are those of the arrays, and it prints itself."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspeed.communication import FROM_HOST, TO_HOST, Communication
from jaxspeed.hlo import largest_buffers, report
from jaxspeed.offload.transfer_report import HostTransfers, TransferReport
from tests.hlo.hlo_programs import array, constrain


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


def test_on_a_cpu_offloaded_bytes_are_those_of_the_table(mesh):
    made = report(compile_step(mesh), mesh, waiting={"master": 1_000_000, "grad": 5_000_000})
    assert not made.separates_host
    text = str(made)
    assert "of these arguments in host memory*" in text and "1 MB" in text
    assert "* from the placement table: XLA:CPU counts host memory as device memory" in text
    assert "in host memory*" not in str(report(compile_step(mesh), mesh)), "nothing waits there"


class Unprintable:
    """A compiled program as libtpu has them whose updates of host memory it cannot print."""

    def __init__(self, compiled):
        self.memory_analysis = compiled.memory_analysis

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update should have 1 operands\nat ...")


def test_without_a_text_the_bytes_are_reported_and_the_rest_is_unknown(mesh):
    compiled = compile_step(mesh)
    whole, made = report(compiled, mesh), report(Unprintable(compiled), mesh)
    assert (made.argument_bytes, made.temp_bytes) == (whole.argument_bytes, whole.temp_bytes)
    assert (made.flops, made.bytes_accessed, made.collectives) == (None, None, None)
    assert made.figures()["collectives"] is None
    text = " ".join(str(made).split())
    assert "flops, bytes accessed and collectives are unknown" in text
    assert "async-update should have 1 operands" in text


def test_what_crosses_is_timed_against_the_compilers_flops(mesh):
    moves = [
        Communication(kind, (), 16_000_000, 1, "trace", purpose="optimizer")
        for kind in (TO_HOST, FROM_HOST)
    ]
    moved = TransferReport(HostTransfers(moves, {}), "TPU v5p", 1.0)
    made = report(compile_step(mesh), mesh, transfer=moved)
    assert made.transfer and (made.transfer.flops, made.transfer.flops_from) == (
        made.flops,
        "as compiled",
    )
    assert "transfers 2 ms = 32 MB (traced step) / 16 GB/s" in str(made)


def test_a_donated_argument_is_aliased(mesh):
    assert report(compile_step(mesh), mesh).alias_bytes == 256 * 128 * 4 // 4
    assert report(compile_step(mesh, donate=False), mesh).alias_bytes == 0


def test_it_carries_costs_and_collectives(mesh):
    made = report(compile_step(mesh), mesh, compile_seconds=1.5)
    # Two products, each [64 / 4 samples, 256] with [256, 128 / tensor 2].
    assert made.flops == 2 * (2 * (64 // 4) * 256 * (128 // 2))
    assert made.bytes_accessed > made.argument_bytes
    assert any(one.kind == "all-gather" and one.axes == ("data",) for one in made.collectives)
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
        assert " x ".join(one.axes) in text


def test_loops_without_a_known_length_are_a_sentence_without_their_names(mesh):
    text = str(dataclasses.replace(report(compile_step(mesh), mesh), unknown_loops=("jit(f)/a",)))
    assert "of 1 loop without a fixed length, one iteration is counted" in text
    assert "jit(f)" not in text


def test_what_is_unknown_or_absent_has_no_figure(mesh):
    """A GPU's program from the compilation cache has no peak; a single device no collectives."""
    made = report(compile_step(mesh), mesh)
    assert "peak bytes" in str(made)
    text = str(dataclasses.replace(made, peak_bytes=None, collectives=()))
    assert "peak bytes" not in text
    assert re.search(r"collectives +none", text)
    assert "in program" not in text


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
