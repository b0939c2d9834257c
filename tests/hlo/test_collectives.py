"""Collectives of programs that were written to hold them, compiled for 8 simulated devices."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.communication import Communication, ring_bytes, ring_elements
from jaxspeed.errors import PlacementError
from jaxspeed.hlo import collectives, loop_carry_bytes, loop_carry_shapes, unknown_loops
from tests.hlo.hlo_programs import (
    array,
    compiled_text,
    constrain,
    manual,
    mesh_of,
    reduced_once,
    zero2,
)

ROWS, COLS = 64, 32
BYTES = ROWS * COLS * 4


def only(text, mesh):
    (one,) = collectives(text, mesh)
    return one


@pytest.mark.parametrize("axis", ["replica", "data", "tensor"])
@pytest.mark.parametrize(
    ("kind", "collective", "payload"),
    [
        ("all-reduce", lambda x, axis: lax.psum(x, axis), BYTES),
        ("reduce-scatter", lambda x, axis: lax.psum_scatter(x, axis, tiled=True), BYTES),
        ("all-gather", lambda x, axis: lax.all_gather(x, axis, tiled=True), 2 * BYTES),
        ("all-to-all", lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), BYTES),
        ("collective-permute", lambda x, axis: lax.ppermute(x, axis, [(0, 1), (1, 0)]), BYTES),
    ],
)
def test_kind_axis_and_payload(mesh, kind, collective, payload, axis):
    one = only(manual(mesh, lambda x: collective(x, axis), ROWS, COLS), mesh)
    assert (one.kind, one.axes, one.bytes, one.dtype) == (kind, (axis,), payload, "f32")
    assert (one.elements, one.leaves, one.runs) == (payload // 4, 1, 1)
    assert not one.in_accumulation
    assert one.group_size == (8 if kind == "collective-permute" else 2)
    assert "shard_map" in one.site


@pytest.mark.parametrize(
    "axes",
    [("replica", "data"), ("data", "tensor"), ("replica", "tensor"), ("replica", "data", "tensor")],
)
def test_a_collective_over_several_axes_names_them_in_the_meshs_order(mesh, axes):
    one = only(manual(mesh, lambda x: lax.psum(x, axes[::-1])), mesh)
    assert (one.axes, one.group_size) == (axes, 2 ** len(axes))


def test_the_mesh_counts_and_not_the_device_numbers():
    """Groups are of positions in the mesh, whose devices may stand in any order."""
    mesh = mesh_of(jax.devices()[::-1], data=4, tensor=2)
    one = only(manual(mesh, lambda x: lax.psum(x, "data")), mesh)
    assert (one.axes, one.group_size) == (("data",), 4)


def test_a_program_without_its_collective_has_none(mesh):
    assert collectives(manual(mesh, lambda x: x * 2), mesh) == []


def test_an_axis_of_size_one_communicates_nothing(mesh):
    assert collectives(manual(mesh, lambda x: lax.psum(x, "pipe")), mesh) == []


def test_what_a_device_sends_to_itself_is_not_sent(mesh):
    one = only(manual(mesh, lambda x: lax.ppermute(x, ("data", "tensor"), [(0, 0), (1, 2)])), mesh)
    # One pair of two devices in each of the two replicas.
    assert (one.kind, one.axes, one.group_size) == ("collective-permute", ("data", "tensor"), 2)


def test_another_meshs_program_is_refused(mesh):
    text = manual(mesh, lambda x: lax.psum(x, "data"))
    with pytest.raises(PlacementError, match=r"8 devices.*4"):
        collectives(text, mesh_of(jax.devices(), data=4))


def test_scans_multiply_their_trip_counts(mesh):
    def body(x):
        def outer(h, _):
            h = lax.scan(lambda g, _: (lax.psum(g, "tensor") / 2, None), h, None, length=5)[0]
            return lax.ppermute(h, "data", [(0, 1), (1, 0)]), None

        return lax.psum(lax.scan(outer, x, None, length=3)[0], "replica")

    runs = {one.axes: one.runs for one in collectives(manual(mesh, body), mesh)}
    assert runs == {("tensor",): 15, ("data",): 3, ("replica",): 1}


def test_a_loop_of_unknown_length_is_said_to_be(mesh):
    def body(x):
        return lax.while_loop(lambda h: h.sum() < 1e3, lambda h: lax.psum(h, "data") + 1, x)

    text = manual(mesh, body)
    assert [one.runs for one in collectives(text, mesh)] == [1]
    assert len(unknown_loops(text)) == 1


def test_both_branches_of_a_conditional_count(mesh):
    def body(x):
        return lax.cond(x.sum() > 0, lambda: lax.psum(x, "data"), lambda: lax.psum(x * 2, "tensor"))

    found = collectives(manual(mesh, body), mesh)
    assert {one.axes for one in found} == {("data",), ("tensor",)}


def test_combined_leaves_are_one_collective(mesh):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    text = compiled_text(
        jax.grad(loss),
        [array(mesh, (32, 32), P())] * 5,
        array(mesh, (64, 32), P(("replica", "data"))),
    )
    one = only(text, mesh)
    assert (one.kind, one.axes, one.leaves) == ("all-reduce", ("replica", "data"), 5)
    assert (one.bytes, one.elements) == (5 * 32 * 32 * 4, 5 * 32 * 32)


def test_automatic_sharding_names_the_axis_too(mesh):
    """x @ w with the contracted dim cut over `tensor`: partial sums are reduced over it."""
    text = compiled_text(
        lambda x, w: constrain(x @ w, mesh),
        array(mesh, (16, 64), P(None, "tensor")),
        array(mesh, (64, 48), P("tensor")),
    )
    one = only(text, mesh)
    assert (one.kind, one.axes, one.bytes) == ("all-reduce", ("tensor",), 16 * 48 * 4)


def accumulation(mesh, scope, reduce_inside, micro_batches=4):
    """Gradients of `micro_batches` turns, reduced over `data` in the loop or after it."""

    def body(x):
        def micro_batch(total, shift):
            gradient = lax.scan(lambda h, _: (jnp.sin(h), None), x + shift, None, length=3)[0]
            return total + (lax.psum(gradient, "data") if reduce_inside else gradient), None

        with jax.named_scope(scope):
            total, _ = lax.scan(micro_batch, jnp.zeros_like(x), jnp.arange(float(micro_batches)))
        return total if reduce_inside else lax.psum(total, "data")

    return manual(mesh, body)


def test_inside_and_after_the_accumulation_loop_are_told_apart(mesh):
    inside = only(accumulation(mesh, "micro_batches", reduce_inside=True), mesh)
    after = only(accumulation(mesh, "micro_batches", reduce_inside=False), mesh)
    assert (inside.in_accumulation, inside.runs) == (True, 4)
    assert (after.in_accumulation, after.runs) == (False, 1)


def test_another_loop_is_not_the_accumulation_loop(mesh):
    one = only(accumulation(mesh, "something_else", reduce_inside=True), mesh)
    assert (one.in_accumulation, one.runs) == (False, 4)


def test_a_scan_over_layers_is_not_the_accumulation_loop():
    """Without accumulation there is no loop over micro-batches; that over layers is none."""
    mesh = mesh_of(jax.devices(), data=4, tensor=2)

    def loss(w, x):
        return (lax.scan(lambda h, wi: (jnp.tanh(h @ wi), None), x, w)[0] ** 2).sum()

    def step(w, x):
        with jax.named_scope("micro_batches"):
            return jax.grad(loss)(w, x)

    text = compiled_text(
        step, array(mesh, (3, 64, 64), P(None, None, "tensor")), array(mesh, (32, 64), P("data"))
    )
    found = collectives(text, mesh)
    assert max(one.runs for one in found) == 3
    assert not any(one.in_accumulation for one in found)
    assert loop_carry_shapes(text) == []


def test_zero2_step_holds_what_it_should():
    mesh = mesh_of(jax.devices(), data=4, tensor=2)
    text = zero2(mesh, layers=4, micro_batches=3, width=128)
    gradients = [
        one
        for one in collectives(text, mesh)
        if one.axes == ("data",) and one.in_accumulation and one.bytes > 4
    ]
    # XLA:CPU has no reduce-scatter of its own: an all-reduce of each layer's gradient.
    assert [(one.kind, one.runs) for one in gradients] == [("all-reduce", 12)]
    assert gradients[0].bytes == 128 * 128 // 2 * 4
    after = [one for one in collectives(text, mesh) if not one.in_accumulation]
    assert [(one.kind, one.axes, one.runs) for one in after] == [("all-gather", ("data",), 1)]
    carry = loop_carry_shapes(text)
    assert sorted(carry) == [("f32", (3,)), ("f32", (4, 32, 64)), ("s32", ())]
    assert loop_carry_bytes(text) == (3 + 4 * 32 * 64 + 1) * 4


def test_reducing_once_leaves_the_loop_without_a_collective():
    mesh = mesh_of(jax.devices(), data=4, tensor=2)
    text = reduced_once(mesh, leaves=3, micro_batches=4, width=64)
    found = collectives(text, mesh)
    assert found
    assert not any(one.in_accumulation for one in found)
    assert loop_carry_shapes(text).count(("f32", (64, 64))) == 3


def ring_of(devices, payload, kind):
    """Elements that one device sends, step by step around a ring."""
    chunk, sent = payload / devices, 0.0
    passes = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}[kind]
    for _ in range(passes):
        for _ in range(devices - 1):
            sent += chunk
    return sent


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_ring_volume_is_what_a_ring_sends(kind, devices):
    one = Communication(kind, ("data",), 4096, 3, "hlo", "f32", 1024, group_size=devices)
    assert ring_elements(one) == pytest.approx(3 * ring_of(devices, 1024, kind), rel=1e-12)
    assert ring_bytes(one) == pytest.approx(4 * ring_elements(one), rel=1e-12)
    assert ring_elements(dataclasses.replace(one, runs=1)) * 3 == pytest.approx(ring_elements(one))


def test_what_xla_gpu_prints(mesh):
    """Asynchronous operations, wrapped and not, count at their start; a broadcast is told too."""
    text = (
        "HloModule m, num_partitions=8\n\n"
        "%add (a: f32[], b: f32[]) -> f32[] {\n"
        "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        "%wrapped (p: f32[64]) -> f32[32] {\n"
        "  %p = f32[64]{0} parameter(0)\n"
        "  ROOT %rs = f32[32]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8],"
        " use_global_device_ids=true, channel_id=2, dimensions={0}, to_apply=%add\n}\n\n"
        "ENTRY %e (x: f32[64]) -> (f32[128], f32[32], f32[64]) {\n"
        "  %x = f32[64]{0} parameter(0)\n"
        "  %s = (f32[64]{0}, f32[128]{0}) all-gather-start(%x), replica_groups=[4,2]<=[4,2]T(0,1),"
        " use_global_device_ids=true, channel_id=1, dimensions={0}\n"
        "  %d = f32[128]{0} all-gather-done(%s)\n"
        "  %as = ((f32[64]{0}), f32[32]{0}, u32[]) async-start(%x), calls=%wrapped\n"
        "  %au = ((f32[64]{0}), f32[32]{0}, u32[]) async-update(%as), calls=%wrapped\n"
        "  %ad = f32[32]{0} async-done(%au), calls=%wrapped\n"
        "  %cb = f32[64]{0} collective-broadcast(%x), channel_id=3,"
        " replica_groups={{0,2},{1,3},{4,6},{5,7}}\n"
        "  ROOT %t = (f32[128]{0}, f32[32]{0}, f32[64]{0}) tuple(%d, %ad, %cb)\n}\n"
    )
    found = [(one.kind, one.axes, one.bytes) for one in collectives(text, mesh)]
    assert found == [
        ("all-gather", ("tensor",), 512),
        ("reduce-scatter", ("tensor",), 256),
        ("collective-broadcast", ("data",), 256),
    ]
