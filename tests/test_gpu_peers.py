"""`benchmarks/gpu_peers.py` without a GPU: equal losses of the systems, and what it prints."""

import argparse
import os
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import models
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.metrics.mfu import language_flops
from jaxspeed.ops import gpu
from tests.support.covering import covering

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script that is run there
gpu_peers, kernel_kinds, peers_jax, peers_work = map(
    import_module, ("gpu_peers", "kernel_kinds", "peers_jax", "peers_work")
)

STEPS = 5
ROUNDING = 2e-6  # of losses in fp32, relative
ARGUMENTS = argparse.Namespace(
    device="cpu", steps=1, torch_compile="none", torch_attention="default", profile=False,
    torch_python=sys.executable, rounds=2, minutes=1.0, json=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return gpu_peers.configs("cpu")


@pytest.fixture(scope="module", params=covering(["gpt2", "llama"], ["llama"]))
def of_jaxspeed(request, tiny, tmp_path_factory):
    """(work, file of the initial weights, losses)."""
    config = tiny[request.param]
    work = gpu_peers.work_of(config)
    weights = str(tmp_path_factory.mktemp("weights") / "weights.safetensors")
    engine = jaxspeed.initialize(config=config, devices=jax.devices()[:1])
    peers_work.save_weights(weights, engine.parameters)
    given = [tokens for tokens, _ in zip(peers_work.batches(work), range(STEPS))]
    losses = [float(engine.train_batch({"tokens": tokens})["loss"]) for tokens in given]
    return work, weights, losses


@pytest.mark.sampled
def test_plain_jax_has_the_losses_of_jaxspeed(of_jaxspeed):
    work, weights, expected = of_jaxspeed
    step = peers_jax.plain_jax_step(weights, work, scanned=True)
    losses = [float(step(tokens)) for tokens, _ in zip(peers_work.batches(work), range(STEPS))]
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)


@pytest.mark.sampled
def test_torch_has_the_losses_of_jaxspeed(of_jaxspeed, references):
    work, weights, expected = of_jaxspeed
    python = str(references.interpreter("torch"))
    arguments = argparse.Namespace(**vars(ARGUMENTS) | {"torch_python": python})
    found = gpu_peers.run_apart("torch", {}, work, weights, arguments, 300)
    np.testing.assert_allclose(found["losses"], expected, rtol=ROUNDING)


def test_without_a_gpu_it_prints_one_line():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_peers.py"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"benchmarks/gpu_peers.py: {gpu_peers.NO_GPU}\n"


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama"])
def test_the_formula_of_mfu_is_that_of_a_run(name):
    config = gpu_peers.configs("cuda")[name]
    model, work = config["model"], gpu_peers.work_of(config)
    built = models.build(model["family"], model.get("preset"), model["config"])
    params = nnx.state(nnx.eval_shape(lambda: built.factory(nnx.Rngs(0))), nnx.Param)
    flat = [
        SimpleNamespace(shape=x.get_value().shape, names=tuple(x.get_metadata()["logical_axes"]))
        for _, x in nnx.to_flat_state(params)
    ]
    expected = language_flops(built.config, flat, work.seq)
    assert expected is not None
    assert peers_work.flops_per_token(work) == expected.per_item


@pytest.mark.fast
@pytest.mark.parametrize("name", ["gpt2-xl", "llama"])
def test_plain_jax_runs_cudnn_once_forward_where_attention_is_saved(name):
    config = gpu_peers.configs("cuda")[name]
    work, model = gpu_peers.work_of(config), config["model"]
    built = models.build(model["family"], model.get("preset"), model["config"])
    state = nnx.state(nnx.eval_shape(lambda: built.factory(nnx.Rngs(0))), nnx.Param)
    params = {".".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(state)}
    tokens = jax.ShapeDtypeStruct((work.batch, work.seq + 1), jnp.int32)
    with gpu.assumed((9, 0)):
        loss = peers_jax.plain_jax_loss(work, scanned=True, attention="cudnn")
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(params, tokens)
    found = Counter(primitives(traced.jaxpr))
    assert found["dot_product_attention_fwd_wrapper"] == 1
    assert found["dot_product_attention_bwd_wrapper"] == 1


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in bodies(eqn):
            yield from primitives(body.jaxpr)


# -- rounds, and what does not fit -----------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch):
    """The systems that were run, in order; `failing` ones fail, and each `takes` some seconds."""
    state = SimpleNamespace(order=[], failing=set(), clock=0.0, takes=1.0)

    def run_apart(system, config, work, weights, args, patience):
        state.order.append(system)
        state.clock += state.takes
        Path(weights).touch()
        if system in state.failing:
            return {"failed": "ImportError: no such module"}
        losses = [4.0, 3.0 if system == "jaxspeed" else 3.0003]
        return {
            "device": "NVIDIA H200",
            "losses": losses,
            "first_step_seconds": 9.0,
            "step_seconds": 0.1 * len(state.order),
            "waited_seconds": 0.2,
        }

    monkeypatch.setattr(gpu_peers, "run_apart", run_apart)
    monkeypatch.setattr(gpu_peers.time, "monotonic", lambda: state.clock)
    return state


def measured(tiny, tmp_path, capsys, systems=gpu_peers.SYSTEMS, **changed):
    arguments = argparse.Namespace(**vars(ARGUMENTS) | changed)
    gpu_peers.measure({"gpt2": tiny["gpt2"]}, systems, arguments, tmp_path)
    return capsys.readouterr().out


@pytest.mark.fast
def test_every_other_round_is_backwards(runs, tiny, tmp_path, capsys):
    shown = measured(tiny, tmp_path, capsys)
    assert runs.order == [*gpu_peers.SYSTEMS, *reversed(gpu_peers.SYSTEMS)]
    rows = [line for line in shown.splitlines() if line.startswith(("| plain", "| torch"))]
    # Rounds of 0.2 and 0.5 s, of 0.3 and 0.4: medians and ranges, 4 x 32 tokens a step.
    assert rows[0].startswith("| plain JAX | 350.0 (200.0 to 500.0) | 366 |")
    assert rows[1].startswith("| torch | 350.0 (300.0 to 400.0) | 366 |")
    assert "largest relative difference of those losses: 1.0e-04" in shown


@pytest.mark.fast
def test_what_does_not_fit_is_said_by_name(runs, tiny, tmp_path, capsys):
    runs.takes = 13.0  # four of them in a minute
    shown = measured(tiny, tmp_path, capsys)
    assert len(runs.order) == 4
    late = "not measured, as 1 minutes were over: round 2: gpt2, plain JAX; round 2: gpt2, jaxspeed"
    assert late in shown


@pytest.mark.fast
def test_a_system_that_fails_is_said_by_name(runs, tiny, tmp_path, capsys):
    runs.failing = {"torch"}
    shown = measured(tiny, tmp_path, capsys)
    assert runs.order.count("torch") == 1
    assert "failed: round 1: gpt2, torch: ImportError: no such module" in shown
    assert "| loss of step | jaxspeed | plain JAX |" in shown


@pytest.mark.fast
def test_jaxspeed_runs_first_for_its_weights(runs, tiny, tmp_path, capsys):
    shown = measured(tiny, tmp_path, capsys, systems=("torch",), rounds=1)
    assert runs.order == ["jaxspeed", "torch"]
    assert "| jaxspeed" not in shown


# -- time by kind of kernel ------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_27", "attention"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("gemm_fusion_dot_17_0", "matmul"),
        ("MemcpyD2D", "memory copy or set"),
        ("input_scatter_fusion", "scatter, gather, sort"),
        ("loop_dynamic_update_slice_fusion", "scatter, gather, sort"),
        ("triton_softmax_3_0", "softmax or norm (Triton)"),
        ("input_add_reduce_fusion_2", "reduction"),
        ("wrapped_transpose", "transpose"),
        ("input_transpose_fusion_4", "transpose"),
        ("loop_multiply_fusion_12", "elementwise"),
        ("wrapped_convert", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
        ("RedzoneAllocatorKernel", "other"),
    ],
)
def test_the_kind_of_a_kernel(name, kind):
    assert kernel_kinds.kind_of(name) == kind


def line(name, *events):
    given = [
        SimpleNamespace(name=kernel, start_ns=start, duration_ns=duration, stats=[("hlo_op", op)])
        for kernel, start, duration, op in events
    ]
    return SimpleNamespace(name=name, events=given)


@pytest.mark.fast
def test_times_are_a_step_s_and_of_one_gpu_s_streams():
    stream = line(
        "Stream #7(Compute)", ("nvjet_a", 0, 4e6, "dot.1"), ("nvjet_a", 9e6, 4e6, "dot.1")
    )
    other = line("Stream #8(Memcpy)", ("MemcpyH2D", 3e6, 2e6, ""))  # 1 ms beside the first
    again = line("XLA Ops", ("dot.1", 0, 4e6, "dot.1"))
    trace = SimpleNamespace(
        planes=[
            SimpleNamespace(name="/host:CPU", lines=[line("python", ("step", 0, 9e9, "step"))]),
            SimpleNamespace(name="/device:GPU:1", lines=[stream]),
            SimpleNamespace(name="/device:GPU:0", lines=[again, stream, other]),
        ]
    )
    found = kernel_kinds.summary(kernel_kinds.kernels(trace), steps=2)
    assert found["kinds"] == {"matmul": 4.0, "memory copy or set": 1.0}
    assert found["span"] == 6.5
    assert found["busy"] == 4.5
    assert found["kernels"][0] == ["matmul", "nvjet_a", "dot.1", 1.0, 4.0]
    shown = kernel_kinds.table(found)
    assert "| matmul | 4.000 | 61.5% |" in shown
    assert "| no kernel runs | 2.000 | 30.8% |" in shown


def test_a_trace_of_a_cpu_has_its_products():
    product = jax.jit(lambda x: x @ x)
    x = jnp.ones((512, 512))
    product(x).block_until_ready()
    found = kernel_kinds.profiled(lambda _: product(x), steps=2)
    assert 0 < found["busy"] <= found["span"]
    assert found["kinds"]
