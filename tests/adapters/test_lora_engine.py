"""An engine with adapters: what it stores and sends, starts from, checks, saves and loads."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxspeed.errors import CheckpointError, ConfigError
from jaxspeed.quantization.codecs import FourBit
from jaxspeed.user_models.pretrained_model import Pretrained
from tests.adapters.lora_loop import LR, adapted_cases, merged, split_of, train_plainly
from tests.support.covering import covering

CASES = adapted_cases()
PAIR, EXPERTS = CASES["pair"], CASES["experts"]


def one():
    return jax.devices()[:1]


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full)])
def test_frozen_parameters_cost_nothing(stage):
    engine = PAIR.engine(stage, gradient_accumulation_steps=1)
    base, adapters = split_of(engine.parameters)
    own, total = nbytes(adapters), nbytes({**base, **adapters})
    assert own < total / 2
    roles = engine.placements.bytes_by_role()
    assert roles["param"][0] == total and roles["grad"][0] == own
    step_counts = 2 * 4 * 2  # Optax's counts of updates
    assert 2 * own <= roles["opt"][0] <= 2 * own + step_counts
    moments = [x for x in jax.tree.leaves(engine.state.opt) if x.ndim]
    specs = {path: engine.placements.rows[path].opt.spec for path in adapters}
    padded = [
        math.prod(-(-n // 8) * 8 if axis else n for n, axis in zip(x.shape, specs[path]))
        for path, x in adapters.items()
    ]
    assert sum(x.nbytes for x in moments) == 2 * 4 * sum(padded)
    assert stage or 4 * sum(padded) == own
    sent = engine.compiled(PAIR.batches(1)[0]).collectives
    reduced = sum(c.bytes * c.runs for c in sent if c.kind in ("all-reduce", "reduce-scatter"))
    scalars = 128  # the loss, its weight, the norm
    assert own <= reduced <= own + scalars


def test_adapters_start_without_an_effect_unless_asked_otherwise():
    batch = PAIR.batches(1)[0]

    def loss_of(**lora):
        engine = PAIR.engine(devices=one(), lora=lora)
        return float(engine.eval_batch(batch)["loss"]), split_of(engine.parameters)

    plain, (base, adapters) = loss_of(init_lora_weights=True)
    gaussian, (_, drawn) = loss_of(init_lora_weights="gaussian")
    changed, _ = loss_of(init_lora_weights=False)
    total, weight = PAIR.loss(PAIR.bound(base), batch)
    assert plain == gaussian == pytest.approx(float(total / weight), rel=1e-6)
    assert changed != plain
    path = "lora/layers/0/up/A"
    assert not np.array_equal(adapters[path], drawn[path])


class Weights:
    """Values of a model's parameters, to be read instead of drawn."""

    origin, variables, initialized = None, (), ()

    def __init__(self, values):
        self.values = values

    def check(self, parameters):
        assert parameters == {path: x.shape for path, x in self.values.items()}

    def read(self, path, index, dtype):
        return np.array(self.values[path][index], dtype)


@pytest.mark.sampled
def test_adapters_start_without_an_effect_on_weights_from_elsewhere(tmp_path):
    """With DoRA, whose magnitudes are those of the weights."""
    batch, lora = PAIR.batches(1)[0], {"use_dora": True, "init_lora_weights": True}
    other = PAIR.engine(devices=one(), run={"seed": 7}, lora=None)
    values = split_of(other.parameters)[0]
    expected = pytest.approx(float(other.eval_batch(batch)["loss"]), rel=1e-6)
    model = Pretrained(PAIR.model, Weights(values))
    read = replace(PAIR, model=model).engine(3, devices=jax.devices()[:2], lora=lora)
    assert float(read.eval_batch(batch)["loss"]) == expected
    assigned = PAIR.engine(devices=one(), lora=lora)
    assigned.parameters = values
    assert float(assigned.eval_batch(batch)["loss"]) == expected
    other.save_checkpoint(tmp_path)
    other.wait()
    restored = PAIR.engine(devices=one(), lora=lora)
    assert float(restored.eval_batch(batch)["loss"]) != expected
    restored.load_checkpoint(tmp_path, weights_only=True)
    assert float(restored.eval_batch(batch)["loss"]) == expected


@pytest.mark.sampled
def test_padding_of_smaller_ranks_is_zero_and_stays_zero():
    """So it is absent from the gradients' norm and from the weight decay."""
    engine = EXPERTS.engine(
        devices=one(),
        lora={"rank_pattern": {"blocks[0]/up": 3}, "alpha_pattern": {"blocks[0]/up": 4.5}},
    )
    base, adapters = split_of(engine.parameters)
    batches = EXPERTS.batches(3)
    losses = [engine.train_batch(batch)["loss"] for batch in batches]
    expected, own = train_plainly(EXPERTS, {**base, **adapters}, batches, 1.5)
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5)
    _, trained = split_of(engine.parameters)
    a, b = "lora/blocks/up/A", "lora/blocks/up/B"
    assert trained[a].shape == (2, 3, 12, 3)
    for values in (adapters, trained):
        assert not values[a][1, ..., 2].any() and not values[b][1, :, 2].any()
        assert values[a][0, ..., 2].all() and values[b][0, :, 2].all()
    for path, value in trained.items():
        np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_saved_modules_and_biases_are_trained_too():
    engine = PAIR.engine(devices=one(), lora={"modules_to_save": ["head"]})
    linen = CASES["linen"].engine(devices=one(), lora={"bias": "lora_only"})
    assert trained_by(engine) == {"head"}
    assert trained_by(linen) == {
        f"blocks_{i}/{name}/bias" for i in (0, 1) for name in ("up", "down")
    }
    base, adapters = split_of(engine.parameters)
    batches = PAIR.batches(3)
    losses = [engine.train_batch(batch)["loss"] for batch in batches]
    expected, own = train_plainly(
        PAIR, {**base, **adapters}, batches, 1.5, lambda p: p.startswith("lora/") or p == "head"
    )
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5)
    np.testing.assert_allclose(engine.parameters["head"], own["head"], rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("stage, pipe", covering([(3, 1), (1, 2)], [(1, 2)]))
def test_biases_of_the_adapted_layers_of_a_stack_are_trained_alone(stage, pipe):
    gpt2 = CASES["gpt2"]
    lora = {"bias": "lora_only", "target_modules": ["mlp"], "layers_to_transform": [1]}
    engine = gpt2.engine(stage, pipe=pipe, lora=lora)
    start = {path: np.asarray(x) for path, x in engine.parameters.items()}
    biases = {path for path in start if path.endswith("bias") and "/mlp/" in path}
    assert len(biases) == 2 and all(len(start[path]) == 2 for path in biases)

    def merge(values, scale):
        fixed = {path: values[path].at[:1].set(start[path][:1]) for path in biases}
        return merged({**values, **fixed}, scale)

    batches = gpt2.batches(3)
    losses = [engine.train_batch(batch)["loss"] for batch in batches]
    expected, own = train_plainly(
        gpt2, start, batches, 1.5, lambda p: p.startswith("lora/") or p in biases, merge
    )
    np.testing.assert_allclose(np.array(losses), expected, rtol=1e-5)
    for path, value in engine.parameters.items():
        if path in biases:
            np.testing.assert_array_equal(value[:1], start[path][:1], err_msg=path)
            np.testing.assert_allclose(value[1:], own[path][1:], rtol=1e-5, atol=1e-5)
            assert not np.array_equal(value[1:], start[path][1:])
        elif path.startswith("lora/"):
            np.testing.assert_allclose(value, own[path], rtol=1e-5, atol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(value, start[path], err_msg=path)


def trained_by(engine):
    rows = (row for row in engine.placements if row.leaf.trainable and not row.leaf.adapts)
    return {row.path for row in rows}


@pytest.mark.sampled
def test_the_module_has_merged_weights_and_check_passes():
    linen = CASES["linen"]
    engine = linen.engine(3, devices=jax.devices()[:2], lora={"use_dora": True})
    batch = linen.batches(1)[0]
    report = engine.check(batch)
    assert report.ok, str(report)
    assert any(path.endswith("magnitude") for path in split_of(engine.parameters)[1])
    engine.train_batch(batch)
    total, weight = linen.loss(engine.module, batch)
    applied = float(engine.eval_batch(batch)["loss"])
    assert applied == pytest.approx(float(total / weight), rel=1e-5)


@pytest.mark.sampled
def test_dropout_is_of_training_and_depends_on_no_mesh():
    linen, batch = CASES["linen"], CASES["linen"].batches(1)[0]
    lora = {"lora_dropout": 0.5}
    few, many = linen.engine(devices=one(), lora=lora), linen.engine(3, lora=lora)
    without = linen.engine(devices=one())
    many.parameters = without.parameters = split_of(few.parameters)[0] | split_of(few.parameters)[1]
    evaluated = [float(e.eval_batch(batch)["loss"]) for e in (few, many, without)]
    np.testing.assert_allclose(evaluated, evaluated[0], rtol=1e-6)
    with pytest.raises(ConfigError, match=r"check: lora.lora_dropout is 0.5"):
        few.check(batch)
    # The micro-batches of one rank and of eight have other samples.
    one_micro_batch = {"gradient_accumulation_steps": 1}
    few = linen.engine(devices=one(), lora=lora, **one_micro_batch)
    many = linen.engine(3, lora=lora, **one_micro_batch)
    losses = [[float(e.train_batch(batch)["loss"]) for _ in range(2)] for e in (few, many)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][0] != pytest.approx(evaluated[0], rel=1e-3)


def test_an_adapter_is_saved_loaded_and_chosen_among_several(tmp_path):
    batch = PAIR.batches(1)[0]
    first = PAIR.engine(devices=one(), run={"seed": 3})
    other = PAIR.engine(devices=one(), run={"seed": 3}, lora={"init_lora_weights": True})
    first.train_batch(batch)
    first.save_adapter(tmp_path / "a")
    losses = {
        name: float(e.eval_batch(batch)["loss"]) for name, e in (("a", first), ("default", other))
    }
    assert losses["a"] != losses["default"]
    other.load_adapter(tmp_path / "a", "a")
    for name in ("a", "default", "a"):
        other.use_adapter(name)
        assert float(other.eval_batch(batch)["loss"]) == pytest.approx(losses[name], rel=1e-6)
    with pytest.raises(ConfigError, match="use_adapter: 'b' is not loaded; there are a, default"):
        other.use_adapter("b")
    smaller = PAIR.engine(devices=one(), lora={"r": 1})
    with pytest.raises(
        ConfigError, match=r"load_adapter: its weights, ranks and alphas .* differ in"
    ):
        smaller.load_adapter(tmp_path / "a", "a")
    started = PAIR.engine(devices=one(), lora={"adapter": str(tmp_path / "a")})
    assert float(started.eval_batch(batch)["loss"]) == pytest.approx(losses["a"], rel=1e-6)
    with pytest.raises(
        ConfigError, match=r"lora.adapter: .* has its own settings, and lora.r is 4"
    ):
        PAIR.engine(devices=one(), lora={"adapter": str(tmp_path / "a"), "r": 4})


@pytest.mark.sampled
def test_a_loaded_adapter_has_its_bases_made_in_its_first_step(tmp_path):
    """SOAP's count, beside the state of matrices, is of the adapter, not of the run."""
    params = {"lr": LR, "weight_decay": 0, "precondition_frequency": 10}
    settings = {"devices": one(), "optimizer": {"type": "SOAP", "params": params}}
    batches = PAIR.batches(6)
    engine = PAIR.engine(**settings)
    for batch in batches[:3]:
        engine.train_batch(batch)
    engine.save_adapter(tmp_path)
    engine.load_adapter(tmp_path, "a")
    engine.use_adapter("a")
    fresh = PAIR.engine(**settings, lora={"adapter": str(tmp_path)})
    losses = [[float(e.train_batch(b)["loss"]) for b in batches[3:]] for e in (engine, fresh)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
def test_the_base_alone_is_evaluated_without_an_adapter(tmp_path, lora):
    batch = PAIR.batches(1)[0]
    engine = PAIR.engine(3, devices=jax.devices()[:2], lora=lora)
    total, weight = PAIR.loss(PAIR.bound(split_of(engine.parameters)[0]), batch)
    engine.train_batch(batch)
    adapted, before = float(engine.eval_batch(batch)["loss"]), split_of(engine.parameters)
    engine.use_adapter(None)
    base = float(engine.eval_batch(batch)["loss"])
    assert base == pytest.approx(float(total / weight), rel=1e-5) and base != adapted
    for call in (
        lambda: engine.train_batch(batch),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.save_adapter(tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"no adapter is in use .* choose one first: default"):
            call()
    with pytest.raises(ConfigError, match="'b' is not loaded; there are default"):
        engine.use_adapter("b")
    engine.use_adapter("default")
    jax.tree.map(np.testing.assert_array_equal, split_of(engine.parameters), before)
    engine.train_batch(batch)


def test_a_base_that_was_changed_is_not_shown_as_one():
    engine = PAIR.engine(devices=one(), lora={"modules_to_save": ["head"]})
    with pytest.raises(ConfigError, match=r"use_adapter\(None\): head are trained beside"):
        engine.use_adapter(None)
    plain = PAIR.engine(devices=one(), lora=None)
    with pytest.raises(ConfigError, match=r"use_adapter\(None\): the config has no section lora"):
        plain.use_adapter(None)


@pytest.mark.default_cases("saved0-own0-it alone has head; ", "saved1-own1-it lacks head; ")
@pytest.mark.parametrize(
    "saved, own, expected",
    [
        ({"modules_to_save": ["head"]}, {"exclude_modules": ["head"]}, "it alone has head; "),
        ({"exclude_modules": ["head"]}, {"modules_to_save": ["head"]}, "it lacks head; "),
        ({}, {"use_dora": True}, r"it lacks lora/.*/magnitude"),
    ],
)
def test_an_adapter_of_other_parts_is_not_loaded(tmp_path, saved, own, expected):
    """What the one has alone would stay when the other is chosen."""
    PAIR.engine(devices=one(), lora=saved).save_adapter(tmp_path / "a")
    engine = PAIR.engine(devices=one(), lora=own)
    with pytest.raises(ConfigError, match=f"load_adapter: {expected}"):
        engine.load_adapter(tmp_path / "a", "a")


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_is_not_restored_with_other_scales(tmp_path, weights_only):
    """The arrays have the same shapes, and would be those of another model."""
    first = PAIR.engine(devices=one())
    first.save_checkpoint(tmp_path)
    first.wait()
    other = PAIR.engine(devices=one(), lora={"use_rslora": True})
    with pytest.raises(CheckpointError, match=r"were saved with other ranks .* and \[1.5\]"):
        other.load_checkpoint(tmp_path, weights_only=weights_only)


def test_a_quantized_base_is_not_decoded_to_choose_an_adapter(tmp_path, monkeypatch):
    engine = PAIR.engine(3, devices=jax.devices()[:2], model={"quantize": {"weights": "nf4"}})
    engine.save_adapter(tmp_path / "a")
    engine.load_adapter(tmp_path / "a", "a")
    monkeypatch.setattr(FourBit, "decode", None)
    engine.use_adapter("a")
    engine.use_adapter("default")


def test_what_is_trained_is_said_once():
    with pytest.raises(ConfigError, match="lora: it decides what is trained"):
        PAIR.engine(devices=one(), trainable=["**"])
