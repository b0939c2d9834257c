"""Optimizers with 8-bit moments: as by definition, in NumPy, on every mesh and stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.planner.memory import memory_of
from jaxspeed.quantization import moments as codecs
from tests.support.covering import covering
from tests.train import eight_bit
from tests.train.eight_bit import (
    ENCODED,
    LAYERS,
    assert_as_by_definition,
    batch,
    coded,
    count,
    engine,
    moments,
)

ALONE = {"devices": jax.devices()[:1]}
GRID = [
    (optimizer, stage, tensor, pipe, offload)
    for optimizer in ("AdamW8bit", "Lion8bit")
    for stage in range(4)
    for tensor in (1, 2)
    for pipe in (1, 2)
    for offload in (False, True)
]
FEW = [("AdamW8bit", 3, 2, 1, False), ("AdamW8bit", 1, 1, 2, True), ("Lion8bit", 2, 2, 1, True)]


@pytest.mark.default_cases("AdamW8bit-3-2-1-False")
@pytest.mark.parametrize(("optimizer", "stage", "tensor", "pipe", "offload"), covering(GRID, FEW))
def test_ten_updates_are_those_of_the_definition(optimizer, stage, tensor, pipe, offload):
    made = engine(
        optimizer,
        stage,
        offload,
        mesh={"tensor": tensor, "pipe": pipe},
        gradient_accumulation_steps=2,
    )
    for step in range(10):
        made.train_batch(batch(step))
        if step in (0, 9):
            assert_as_by_definition(made, optimizer.removesuffix("8bit"), step + 1)
    for path, stored in moments(made).items():
        if isinstance(stored, dict):
            assert all(in_host(x.sharding) == offload for x in stored.values()), path


@pytest.fixture(scope="module")
def alone():
    """AdamW8bit on one device, after three updates."""
    made = engine("AdamW8bit", **ALONE)
    for step in range(3):
        made.train_batch(batch(step))
    return made


def test_the_reference_tells_a_wrong_scale(alone, monkeypatch):
    assert_as_by_definition(alone, "AdamW", 3)
    largest = codecs._largest

    def of_a_layer(*args):
        found = largest(*args)
        dims = tuple(range(1, found.ndim))
        return jnp.broadcast_to(found.max(dims, keepdims=True), found.shape)

    monkeypatch.setattr(codecs, "_largest", of_a_layer)
    made = engine("AdamW8bit", **ALONE)
    for step in range(3):
        made.train_batch(batch(step))
    with pytest.raises(AssertionError):
        assert_as_by_definition(made, "AdamW", 3)


def test_the_bytes_of_the_state(alone):
    """Live buffers on one device; on several the table's and the estimate's."""
    arrays = [x for x in jax.tree.leaves(alone.state.opt) if x.ndim]
    shapes = {path: alone.parameters[path].shape for path in alone.parameters}
    encoded = [2 * (n + 4 * blocks) for n, blocks in (count(shapes[path]) for path in ENCODED)]
    wide = [8 * int(np.prod(shape)) for path, shape in shapes.items() if path not in ENCODED]
    assert sum(x.nbytes for x in arrays) == sum(encoded) + sum(wide)
    counts = sum(x.nbytes for x in jax.tree.leaves(alone.state.opt) if not x.ndim)
    assert alone.placements.bytes_by_role()["opt"][0] == sum(encoded) + sum(wide) + counts
    components = {c.name: c.bytes for c in memory_of(alone.program, batch(0)).components}
    assert components["optimizer"] == sum(encoded) + sum(wide) + counts
    assert "8-bit signed by layer of f32" in str(alone.placements)
    lion = [x for x in jax.tree.leaves(engine("Lion8bit", **ALONE).state.opt) if x.ndim]
    assert 2 * sum(x.nbytes for x in lion) == sum(encoded) + sum(wide)


def test_a_skipped_step_changes_no_code():
    made = engine(
        "AdamW8bit", 2, devices=jax.devices()[:2], fp16={"enabled": True, "loss_scale": 128.0}
    )
    made.train_batch(batch(0))
    before = jax.device_get(made.state.opt)
    bad = batch(1)
    bad["x"][0, 0] = np.inf
    assert made.train_batch(bad)["skipped"]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(made.state.opt))


@pytest.mark.sampled
def test_it_agrees_with_one_device_in_bf16_with_frozen_layers_groups_and_an_average():
    groups = [
        {"pattern": "layers[0:1]", "frozen": True},
        {"pattern": "head", "lr_factor": 0.5},
    ]
    made = engine(
        "AdamW8bit",
        3,
        bf16={"enabled": True},
        mesh={"tensor": 2},
        optimizer_={"groups": groups, "ema_decay": 0.5},
    )
    first = {path: np.asarray(x) for path, x in made.parameters.items()}
    made.train_batch(batch(0))
    assert made.check(batch(1)).ok
    made.train_batch(batch(1))
    found = {path: x for path, x in moments(made).items() if isinstance(x, dict)}
    assert set(found) == {f"{m}/{path}/[1:2]" for m in ("mu", "nu") for path in ENCODED}
    for path in ENCODED:
        np.testing.assert_array_equal(made.parameters[path][0], first[path][0])
        assert np.abs(made.parameters[path][1] - first[path][1]).max() > 1e-4
        average = np.asarray(made.ema_parameters[path][1])
        assert np.abs(average - first[path][1]).max() > 1e-4


@pytest.mark.sampled
def test_a_parameter_server_has_8_bit_moments():
    kind = {"data_reduction": "parameter_server", "servers": 2}
    made = engine("AdamW8bit", parallel=kind, devices=jax.devices()[:6], train_batch_size=16)
    for step in range(3):
        made.train_batch(batch(step))
    assert_as_by_definition(made, "AdamW", 3)


@pytest.mark.parametrize(
    ("word", "optimizer"),
    [
        ("adamw_8bit", "AdamW8bit"),
        ("adamw_bnb_8bit", "AdamW8bit"),
        ("paged_adamw_8bit", "PagedAdamW8bit"),
        ("lion_8bit", "Lion8bit"),
        ("paged_lion_8bit", "PagedLion8bit"),
        ("pagedadam8bit", "PagedAdam8bit"),
    ],
)
def test_the_names_in_bitsandbytes_and_in_trainers(word, optimizer):
    from jaxspeed.config import load_config

    config = load_config({"train_batch_size": 8, "optimizer": {"type": word}})
    assert config.optimizer.type == optimizer
    paged = optimizer.startswith("Paged")
    assert config.zero_optimization.offload_optimizer.device == ("cpu" if paged else "none")
    assert any("in host memory and streamed" in note for note in config.notes) == paged
    resident = {"zero_optimization": {"offload_optimizer": {"device": "none"}}}
    kept = load_config({"train_batch_size": 8, "optimizer": {"type": word}, **resident})
    assert kept.zero_optimization.offload_optimizer.device == "none"
    assert any("its state stays on the device" in note for note in kept.notes) == paged
    assert config.optimizer.params["min_8bit_size"] == 4096
    assert config.optimizer.params["weight_decay"] == (0.01 if "adamw" in word else 0)


def test_what_it_excludes_is_refused():
    from jaxspeed.config import load_config

    given = {"train_batch_size": 8, "optimizer": {"type": "AdamW8bit"}}
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    with pytest.raises(ConfigError, match="bf16_optimizer_states"):
        load_config({**given, "bf16": bf16})
    zero = {"offload_optimizer": {"device": "cpu", "where": "host"}}
    with pytest.raises(ConfigError, match='where: found "host", while optimizer'):
        load_config({**given, "zero_optimization": zero})
    params = {"percentile_clipping": 5, "block_wise": False}
    with pytest.raises(ConfigError, match=r"(?s)percentile_clipping.*block_wise|block_wise"):
        load_config({"train_batch_size": 8, "optimizer": {"type": "AdamW8bit", "params": params}})


def test_min_8bit_size_is_the_smallest_layer_with_8_bit_moments():
    given = {"params": {"lr": 1e-3, "min_8bit_size": 4609}}
    made = engine("AdamW8bit", optimizer_=given, **ALONE)
    assert not any(isinstance(x, dict) for x in moments(made).values())


def test_which_moments_have_8_bits():
    from jaxspeed.placement import Leaf

    def chosen(path, shape, names=(), dtype="float32"):
        leaf = Leaf(path, shape, jnp.dtype(dtype), names)
        return path in codecs.rule_of_moments([leaf], 4096).stacked

    assert chosen("up/kernel", (64, 64)) and not chosen("up/kernel", (64, 63))
    assert chosen("bias", (4096,)) and not chosen("norm/scale", (4095,))
    assert not chosen("up/kernel", (8, 64, 63), ("layers", None, None)), "of one layer"
    assert chosen("up/kernel", (8, 64, 64), ("layers", None, None))
    assert not chosen("embed/embedding", (80, 64)) and not chosen("transformer/wte", (80, 64))
    assert not chosen("tokens/table", (80, 64), ("vocab", "embed"))
    assert chosen("head/kernel", (64, 80), ("embed", "vocab")) and chosen("lm_head", (64, 80))
    assert chosen("patch_embed/kernel", (64, 64)), "a convolution"
    assert not chosen("w", (64, 64), dtype="complex64")
    rule = codecs.rule_of_moments([Leaf("a/nu", (64, 64), jnp.dtype("float32"))], 4096)
    kinds = [rule.codec_for("opt", f"0/{m}/a/nu", "a/nu").signed for m in ("mu", "nu")]
    assert kinds == [True, False] and rule.codec_for("param", "a/nu") is None


@pytest.mark.full
def test_a_tiny_llama_ends_within_one_percent_of_adamws_loss():
    """The mean of three seeds, on held-out text."""
    losses = {"AdamW": [], "AdamW8bit": []}
    for optimizer, found in losses.items():
        for seed in range(3):
            found.append(eight_bit.held_out_loss(optimizer, seed))
    exact, rounded = (np.mean(found) for found in losses.values())
    assert exact < 2.6, "it learned"
    assert abs(rounded / exact - 1) < 0.01, losses


@pytest.mark.sampled
def test_adam8bit_with_a_coupled_decay_is_adam_on_the_decoded_moments():
    params = {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}
    made = engine("Adam8bit", optimizer_={"params": params}, **ALONE)
    start = {path: np.asarray(x) for path, x in made.parameters.items()}
    made.train_batch(batch(0))
    plain = optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3))

    def mean(params, given):
        nested = {"embed": params["embed"], "head": params["head"]}
        nested["layers"] = {name: params[f"layers/{name}"] for name in ("up", "down")}
        apply = eight_bit.apply
        total, weight = eight_bit.loss(lambda x, tokens: apply(nested, x, tokens), given)
        return total / weight

    grads = jax.grad(mean)(start, batch(0))
    updates, state = plain.update(grads, plain.init(start), start)
    expected = optax.apply_updates(start, updates)
    for path, x in expected.items():
        np.testing.assert_allclose(made.parameters[path], x, rtol=0, atol=1e-6, err_msg=path)
    mu = moments(made)["mu/layers/up"]
    codes, scales, _ = coded(np.asarray(state[1][0].mu["layers/up"]), signed=True)
    np.testing.assert_allclose(np.asarray(mu["scales"]).reshape(LAYERS, -1), scales, rtol=1e-6)
    assert (np.abs(np.asarray(mu["codes"]).astype(int) - codes) > 0).sum() <= 3
