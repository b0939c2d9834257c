"""Components of the memory estimate of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.planner.memory import memory_of
from jaxspeed.planner.trace.partitioning import propagate_shardings
from jaxspeed.planner.trace.trace_ir import open_program
from tests.planner.grid import GPT2, points

POINTS = {point.name: point for point in points()}
LAYERS, WIDTH = GPT2["num_hidden_layers"], GPT2["hidden_size"]


@functools.cache
def build(name):
    return POINTS[name].program(jax.devices())


@functools.cache
def of_tpu(name):
    return memory_of(*build(name), "tpu")


def by_name(memory, **which):
    return {
        c.name: c.bytes
        for c in memory.components
        if all(getattr(c, key) == value for key, value in which.items())
    }


def elements(name):
    program, _ = build(name)
    return sum(x.size for x in jax.tree.leaves(program.state.master or program.state.params))


def test_components_add_up_and_print():
    memory = of_tpu("gpt2: host optimizer")
    of_device = [c.bytes for c in memory.components if not c.host]
    assert sum(of_device) == memory.device == memory.state + memory.temporary
    assert sum(c.bytes for c in memory.components if c.host) == memory.host
    for component in memory.components:
        assert component.name in str(memory)


def test_offloaded_masters_and_moments_are_in_host_memory():
    waiting = by_name(of_tpu("gpt2: host optimizer"), host=True, lasting=True)
    each = elements("gpt2: host optimizer") // 4  # sharded over 4 data ranks, under stage 1
    assert waiting["masters"] == pytest.approx(4 * each, rel=0.01)
    assert waiting["optimizer"] == pytest.approx(8 * each, rel=0.01)


def test_full_recompute_saves_the_inputs_of_the_blocks():
    saved = by_name(of_tpu("gpt2: full"))["saved activations"]
    inputs = LAYERS * 8 * 960 * WIDTH * 2
    assert inputs <= saved < 1.2 * inputs


def test_accumulated_gradients_are_fp32_and_replicated_under_stage_0():
    name = "mixer: 4 micro-batches"
    gradients = by_name(of_tpu(name))["gradients"]
    assert gradients == pytest.approx(4 * elements(name), rel=0.02)


def test_stage_2_shards_the_gradients():
    name = "mixer: 4 micro-batches, stage 3, full"
    gradients = by_name(of_tpu(name))["gradients"]
    assert gradients == pytest.approx(4 * elements(name) / 4, rel=0.05)


def test_the_platform_decides_whether_scores_are_held():
    program, batch = build("llama: stage 0")
    with_kernel, without = (memory_of(program, batch, p) for p in ("tpu", "cpu"))
    scores = 8 * 8 * 1024 * 1024 * 4  # of a layer, of 8 samples and 8 heads, in fp32
    # Of activations: the peaks are at different places, one in the loss with its logits.
    activations = ("saved activations", "working set")
    held = [
        sum(each.bytes for each in memory.components if each.name in activations)
        for memory in (with_kernel, without)
    ]
    assert held[1] - held[0] > scores
    assert memory_of(program, batch).device == without.device


@pytest.mark.parametrize("chain", [True, False])
def test_of_a_chain_of_constraints_the_last_determines_what_is_saved(chain):
    """Checked with XLA: the first says that the product is replicated, the second shards it."""
    mesh = Mesh(np.array(jax.devices()[:4]), "x")

    def placed(y, *spec):
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec(*spec)))

    def step(x, w):
        def body(x, _):
            saved = x @ w
            y = placed(placed(saved), "x") if chain else placed(saved)
            return placed(jnp.tanh(y)), saved

        return jax.lax.scan(body, x, None, 3)[1]

    given = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((64, 32), (32, 32))]
    scope = open_program(jax.make_jaxpr(step)(*given), "cpu")
    propagate_shardings(scope, [PartitionSpec()] * 2, {"x": 4})
    compiled = jax.jit(step, in_shardings=NamedSharding(mesh, PartitionSpec())).lower(*given)
    assert ("x" in compiled.compile().output_shardings.spec) is chain
    assert (scope.outs[0].spec == [(), ("x",), ()]) is chain
