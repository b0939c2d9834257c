"""What the tests of the ring compile for a TPU topology, all in one child process."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.hlo.parser import Instruction, Module, parse
from jaxspeed.tensor_parallel.collective_matmul import RingMatmul, ring_columns, ring_row

BATCH, SEQ, EMBED, MLP, TENSOR = 4, 4096, 1024, 1024, 4


def times(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


INTO = RingMatmul(times, 1, 1, w_sharded=1, x_sharded=None, y_sharded=2)
OUT = RingMatmul(times, 1, 1, w_sharded=0, x_sharded=2, y_sharded=None)


def compile_all(devices: list[jax.Device]) -> dict[str, Any]:
    axes = ("data", "tensor")
    mesh = jax.make_mesh(
        (len(devices) // TENSOR, TENSOR), axes, devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    row, columns = row_program(mesh), columns_program(mesh)
    local = BATCH // mesh.shape["data"] * SEQ * 2  # bytes of one column of bf16
    return {
        "rows": permutes(row),
        "columns": permutes(columns),
        "products_that_wait": products_of_arrivals(row),
        "temp_bytes": {str(n): stack_program(mesh, n) for n in (16, 32)},
        "saved_bytes_a_layer": local * (EMBED + MLP) // TENSOR,
        "gathered_bytes": local * EMBED,
    }


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def row_program(mesh: Mesh) -> Module:
    h = array(mesh, (BATCH, SEQ, 4 * MLP), "data", None, "tensor")
    w = array(mesh, (4 * MLP, EMBED), "tensor")
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda h, w: ring_row(h, w, OUT)).lower(h, w).compile()
    return parse(compiled.as_text() or "")


def columns_program(mesh: Mesh) -> Module:
    x = array(mesh, (BATCH, SEQ, EMBED), "data", "tensor")
    w = array(mesh, (EMBED, 4 * MLP), None, "tensor")
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x, w: ring_columns(x, [w], [INTO])).lower(x, w).compile()
    return parse(compiled.as_text() or "")


def stack_program(mesh: Mesh, layers: int) -> int:
    """Temp bytes of the gradients of scanned layers, each a column and a row product."""

    def loss(ups: jax.Array, downs: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> Any:
            (h,) = ring_columns(x, [w[0]], [INTO])
            return ring_row(h, w[1], OUT), None

        y, _ = lax.scan(layer, x, (ups, downs))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    ups = array(mesh, (layers, EMBED, MLP), None, None, "tensor")
    downs = array(mesh, (layers, MLP, EMBED), None, "tensor")
    x = array(mesh, (BATCH, SEQ, EMBED), "data", "tensor")
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(ups, downs, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


# -- what is read from a schedule -----------------------------------------------------------------


def permutes(module: Module) -> dict[str, int]:
    """How many permutes there are, and how many have a product between start and done."""
    under_way: set[str] = set()
    covered: set[str] = set()
    count = 0
    for instruction in module.entry.instructions.values():  # in the order of the schedule
        if instruction.opcode == "collective-permute-start":
            under_way.add(instruction.name)
            count += 1
        elif instruction.opcode == "collective-permute-done":
            under_way.discard(instruction.operands[0])
        elif holds_product(module, instruction):
            covered |= under_way
    return {"count": count, "covered": len(covered)}


def products_of_arrivals(module: Module) -> list[str]:
    """The products that read what a permute brings."""
    return [
        instruction.name
        for instruction in module.entry.instructions.values()
        if holds_product(module, instruction)
        and any(
            value.opcode == "collective-permute-done"
            for value in module.entry.operands(instruction)
        )
    ]


def holds_product(module: Module, instruction: Instruction) -> bool:
    return any(one.opcode in ("dot", "convolution") for one in contents(module, instruction))


def contents(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    if instruction.opcode == "fusion":
        for name in instruction.called("calls"):
            for inside in module.computations[name].instructions.values():
                yield from contents(module, inside)
