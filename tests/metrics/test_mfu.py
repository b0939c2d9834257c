"""Model flops against published figures, against XLA's own count, and one way against the other."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspeed import models
from jaxspeed.hardware.chip import peak_flops
from jaxspeed.metrics import NAMES, language_flops, traced_flops, utilisation


class Leaf:
    def __init__(self, variable):
        self.shape = variable.shape
        self.names = variable.get_metadata().get("logical_axes", ())


def family(name, preset, **sizes):
    """(config, leaves, factory, loss)."""
    built = models.build(name, preset, sizes)
    model = nnx.eval_shape(lambda: built.factory(nnx.Rngs(0)))
    leaves = [Leaf(v) for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return built.config, leaves, built


def traced(built, batch):
    graph, state = nnx.split(nnx.eval_shape(lambda: built.factory(nnx.Rngs(0))))

    def loss(state, batch):
        return built.loss(nnx.merge(graph, state), batch)

    samples = jax.tree.leaves(batch)[0].shape[0]
    return traced_flops(loss, state, batch, samples=samples)


# -- a language model's formula -----------------------------------------------------------------


def test_gpt3_needs_what_its_paper_says():
    """Brown et al. (arXiv:2005.14165), table D.1: 3.14e23 for 300e9 tokens, no attention."""
    config, leaves, _ = family("gpt2", "gpt3-175b")
    counted = language_flops(config, leaves, 2048)
    attention = 12 * 96 * 96 * 128 * 2048
    assert counted.per_item - attention == pytest.approx(3.14e23 / 300e9, rel=0.005)
    assert counted.item == "token"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    ],
)
def test_the_formula_is_three_forward_passes_of_the_traced_model(name, sizes):
    config, leaves, built = family(name, "tiny", hidden_size=128, num_hidden_layers=3, **sizes)
    batch = {"tokens": jax.ShapeDtypeStruct((2, 97), jnp.int32)}
    by_formula = language_flops(config, leaves, 96)
    by_tracing = traced(built, batch)
    # Biases and norms are parameters but no products: N counts them, the trace does not.
    small = sum(6 * leaf.shape[-1] * 10 * 3 for leaf in leaves if len(leaf.shape) < 3)
    assert 0 <= by_formula.per_item * 96 - by_tracing.per_item <= small * 96
    assert by_formula.per_item * 96 == pytest.approx(by_tracing.per_item, rel=0.02)


@pytest.mark.parametrize(
    ("name", "preset", "active", "per_head"),
    [
        ("mixtral", "mixtral-8x7b", 12.9e9, 2 * 128),  # arXiv:2401.04088
        ("deepseek", "deepseek-v3", 37e9, 192 + 128),  # arXiv:2412.19437
    ],
)
def test_of_experts_the_active_ones_count(name, preset, active, per_head):
    """As the papers have them; N has no embedding, 1% of them."""
    config, leaves, _ = family(name, preset)
    counted = language_flops(config, leaves, 4096)
    heads = config.num_hidden_layers * config.num_attention_heads
    attention = 6 * heads * per_head * 4096
    assert (counted.per_item - attention) / 6 == pytest.approx(active, rel=0.03)
    k, experts = config.num_experts_per_tok, config.num_experts
    assert f"with {k} of {experts} experts" in counted.formula


def test_a_window_bounds_what_a_token_attends_to():
    config, leaves, _ = family("llama", "tiny", sliding_window=32)
    whole, _, _ = family("llama", "tiny")
    assert language_flops(config, leaves, 128) == language_flops(whole, leaves, 32)


def test_a_model_without_these_sizes_has_no_such_formula():
    config, leaves, _ = family("vit", "tiny")
    assert language_flops(config, leaves, 16) is None
    assert language_flops(object(), leaves, 16) is None


# -- tracing ------------------------------------------------------------------------------------


def test_a_vision_model_s_flops_are_near_its_paper_s():
    """ViT-B/16 at 224 pixels is quoted with 17.6 G multiply-adds a forward pass (timm, DeiT)."""
    _, _, built = family("vit", "vit-b16")
    batch = {
        "images": jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    assert traced(built, batch).per_item == pytest.approx(3 * 2 * 17.6e9, rel=0.01)


# -- utilisation --------------------------------------------------------------------------------


def test_mfu_is_the_share_of_all_devices_peak_and_its_formula_is_named():
    config, leaves, _ = family("gpt2", "gpt2")
    flops = language_flops(config, leaves, 1024)
    told = utilisation(flops, 200_000, "NVIDIA H100 80GB HBM3", 4)
    assert told["model_flops_per_second"] == flops.per_item * 200_000
    assert told["mfu"] == pytest.approx(flops.per_item * 200_000 / (4 * 989.5e12))
    assert told["mfu_formula"].startswith("6 N + 12 L H Q T per token")
    assert "causal attention counted in full" in told["mfu_formula"]
    assert set(told) <= set(NAMES)


def test_there_is_no_mfu_on_a_cpu_but_there_are_flops():
    config, leaves, _ = family("gpt2", "tiny")
    told = utilisation(
        language_flops(config, leaves, 64), 100, jax.devices("cpu")[0].device_kind, 8
    )
    assert told["mfu"] is None and told["model_flops_per_second"] > 0


def test_tpu_peaks_are_those_of_jax_s_own_table():
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    kinds = ("TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
    for kind in kinds:
        version = info.chip_version_from_device_kind(kind)
        of_core = info.get_tpu_info_for_chip(version, 1)
        cores = version.num_physical_tensor_cores_per_chip
        assert peak_flops(kind) == pytest.approx(of_core.bf16_ops_per_second * cores, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
    ],
)
def test_a_gpu_is_known_by_its_name(kind, teraflops):
    assert peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H20", "NVIDIA H2000", "TPU v99", "Tesla T4", ""])
def test_of_an_unknown_device_no_peak_is_claimed(kind):
    assert peak_flops(kind) is None
