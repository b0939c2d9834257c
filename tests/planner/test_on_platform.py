"""A plan is of the program that its target would run, though it is traced on a CPU."""

import jax
import jax.numpy as jnp
import pytest

from jaxspeed.config import Config
from jaxspeed.planner.trace import read_step
from jaxspeed.planner.trace.trace_ir import all_ops, open_program
from jaxspeed.planner.trace.traced_step import as_on, with_overlap
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.planner.grid import GPT2, Point

SIZES = {**GPT2, "num_hidden_layers": 2, "hidden_size": 512}
CUT = {"mesh": {"tensor": 4}, "parallel": {"sequence_parallel_activations": True}}


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "model": {"family": "gpt2", "config": SIZES},
}


def config(**more):
    return Config.load({**CONFIG, **more})


@pytest.mark.parametrize(("platform", "kernel"), [("cuda", "dot_product"), ("tpu", "pallas")])
def test_attention_is_the_platforms_kernel(platform, kernel):
    with as_on(platform):
        program = build_program(config(), *resolve_model(config()), devices=jax.devices()[:2])
    batch = {"tokens": jax.ShapeDtypeStruct((program.batch.train, 1025), "int32")}
    (step,) = read_step(program, batch, platform).phases
    assert sum(op.name.startswith(kernel) for op in all_ops(step.scope)) >= 2


@pytest.mark.parametrize(("target", "multiplies"), [("v3:2x2", False), ("v4:2x2x1", True)])
def test_a_kernel_gets_bf16_where_the_target_multiplies_it(target, multiplies):
    (step,) = Point("", target, CONFIG, seq=128).step().phases
    kernels = [op for op in all_ops(step.scope) if op.name == "pallas_call"]
    assert kernels and multiplies == any(v.dtype == "bfloat16" for op in kernels for v in op.values)


def test_cudnn_is_looked_up_again_afterwards():
    from jax._src.cudnn import fused_attention_stablehlo as asked

    before = asked.check_cudnn_version
    with as_on("cuda"):
        assert asked.check_cudnn_version is not before
    assert asked.check_cudnn_version is before


def test_auto_overlap_is_the_targets():
    assert with_overlap(config(**CUT), "tpu").tensor_overlap == "ring"
    assert with_overlap(config(**CUT), "cuda").tensor_overlap == "none"
    replicated = config(mesh={"tensor": 4})
    assert with_overlap(replicated, "tpu") is replicated


def test_a_carry_of_an_inner_loop_that_only_the_next_trip_reads_stays():
    """The loop around it is looked through more than once, and no look may remove too much."""

    def inner(carry, _):
        return (jnp.sin(carry[0]), jnp.cos(carry[1])), jnp.tan(carry[0])

    def outer(carry, _):
        (first, second), _ = jax.lax.scan(inner, carry, None, length=3)
        return (first + carry[1], second), None

    def result(x, y):
        return jax.lax.scan(outer, (x, y), None, length=5)[0][0]

    scope = open_program(jax.make_jaxpr(result)(1.0, 1.0), "tpu")
    names = {op.name for op in all_ops(scope)}
    assert {"sin", "cos", "add"} <= names and "tan" not in names
    assert sum(len(op.ins) for op in all_ops(scope) if op.name == "scan") == 4
