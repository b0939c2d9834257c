"""An evaluation counts every sample once, whatever the loss, the batch size and the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed import models
from jaxspeed.config.run_sections import Data, SourceSection
from jaxspeed.data import ByteTokenizer, ModelLimits, Split, limits_of
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.data.samples import ArrayRows
from jaxspeed.run.evaluation import evaluate
from tests.engine import tiny
from tests.support.covering import covering

COUNT = 21  # of the samples: no multiple of the ranks, nor of a batch
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8}
VIT |= {"patch_size": 4, "num_channels": 1, "num_classes": 3}
MLP = {"input_size": tiny.FEATURES, "hidden_size": 16, "num_classes": 3}
MESHES = {
    "one device": (1, {}),
    "8 ranks": (8, {}),
    "tensor 2": (8, {"mesh": {"tensor": 2}}),
    "pipe 2": (8, {"mesh": {"pipe": 2}}),
    "servers": (4, {"parallel": {"data_reduction": "parameter_server"}}),
}
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(COUNT, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, COUNT).astype(np.int32)
X = RNG.normal(size=(COUNT, tiny.FEATURES)).astype(np.float32)
Y = RNG.normal(size=(COUNT, 3)).astype(np.float32)


def engine(family, sizes, mesh):
    devices, settings = MESHES[mesh]
    given = {
        "model": {"family": family, "config": sizes},
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **settings,
    }
    return jaxspeed.initialize(config=given, devices=jax.devices()[:devices])


def logits(family, sizes, x):
    """Of a fresh model in plain Flax."""
    from flax import nnx

    return np.asarray(models.build(family, None, sizes).factory(nnx.Rngs(0))(x), np.float64)


def cross_entropies(logits, labels):
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -logp[np.arange(len(labels)), labels]


def split(**arrays):
    return Split([ArrayRows(arrays)], seed=0, shuffle=False)


@pytest.mark.default_cases("8 ranks")
@pytest.mark.parametrize("mesh", covering(MESHES, ["one device", "8 ranks", "pipe 2"]))
def test_loss_and_accuracy_of_a_classifier_are_those_of_plain_flax(mesh, tmp_path):
    labels = LABELS.copy()
    labels[[3, 19]] = -100  # these do not count
    for name, some in (("a", slice(0, 9)), ("b", slice(9, None))):
        np.savez(tmp_path / f"{name}.npz", images=IMAGES[some], labels=LABELS[some])
    limits = limits_of(models.build("vit", None, VIT).config)
    files = evaluation_parts(Data(), SourceSection(paths=[str(tmp_path)]), limits, None)
    ours, out = engine("vit", VIT, mesh), logits("vit", VIT, IMAGES)
    losses, right = cross_entropies(out, LABELS), out.argmax(-1) == LABELS
    assert [*files] == [str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]
    for part, some in zip(files.values(), (slice(0, 9), slice(9, None))):
        found = evaluate(ours, Split([part], seed=0, shuffle=False))
        assert found.weight == len(LABELS[some])
        assert found.means["loss"] == pytest.approx(losses[some].mean(), rel=1e-5)
        assert found.means["accuracy"] == pytest.approx(right[some].mean(), rel=1e-6)
    some = evaluate(ours, split(images=IMAGES, labels=labels))
    assert some.weight == COUNT - 2
    assert some.means["accuracy"] == pytest.approx(right[labels >= 0].mean(), rel=1e-6)


def test_data_of_another_kind_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    np.savez(tmp_path / "b.npz", images=IMAGES, labels=LABELS)
    images = limits_of(models.build("vit", None, VIT).config)
    with pytest.raises(jaxspeed.DataError, match="the model reads images"):
        evaluation_parts(Data(), SourceSection(paths=[str(tmp_path)]), images, ByteTokenizer())
    tokens, data = ModelLimits("tokens", 16, 256), Data(source="tokens", path="ids.npy")
    with pytest.raises(jaxspeed.DataError, match="the model reads tokens"):
        evaluation_parts(data, SourceSection(paths=[str(tmp_path / "b.npz")]), tokens, None)
    with pytest.raises(jaxspeed.DataError, match=r"no tokenizer; set data\.tokenizer"):
        evaluation_parts(data, SourceSection(paths=[str(tmp_path / "a.txt")]), tokens, None)


@pytest.mark.parametrize("mesh", covering(MESHES, ["8 ranks"]))
def test_the_mlp_counts_classes_and_real_targets_once(mesh):
    ours, out = engine("mlp", MLP, mesh), logits("mlp", MLP, X)
    found = evaluate(ours, split(x=X, y=LABELS))
    assert found.weight == COUNT
    assert found.means["loss"] == pytest.approx(cross_entropies(out, LABELS).mean(), rel=1e-5)
    assert found.means["accuracy"] == pytest.approx((out.argmax(-1) == LABELS).mean(), rel=1e-6)
    if mesh != "servers":  # which trace the loss once
        found = evaluate(ours, split(x=X, y=Y))
        assert found.weight == COUNT and found.means.keys() == {"loss"}
        assert found.means["loss"] == pytest.approx(((out - Y) ** 2).mean(), rel=1e-5)


def mean_of_squares(model, batch):
    return jnp.mean(jnp.square(model(batch["x"])[:, 0] - batch["y"]))


def with_a_metric(model, batch):
    total, weight = tiny.squared_error(model, batch)
    return total, weight, {"double": 2 * total / weight}


def mixing(model, batch):
    out = model(batch["x"])[:, 0]
    return jnp.mean(jnp.square(out - out.mean()))


@pytest.mark.parametrize("loss", [mean_of_squares, with_a_metric])
@pytest.mark.parametrize("count", [3, COUNT])
def test_samples_that_the_ranks_cannot_share_count_in_any_loss(loss, count):
    given, small = tiny.batch(COUNT), tiny.engine(loss_fn=loss)
    given = {name: x[:count] for name, x in given.items()}
    out = np.asarray(small.module(given["x"]), np.float64)[:, 0]
    found = evaluate(small, split(**given))
    expected = np.mean((out - given["y"]) ** 2)
    assert found.weight == count
    assert found.means["loss"] == pytest.approx(expected, rel=1e-5)
    if loss is with_a_metric:
        assert found.means["double"] == pytest.approx(2 * expected, rel=1e-5)


def test_samples_of_a_loss_that_mixes_them_are_omitted_with_the_reason(caplog):
    small = tiny.engine(loss_fn=mixing)
    with caplog.at_level("INFO", "jaxspeed"):
        assert evaluate(small, split(**tiny.batch(COUNT))).weight == COUNT // 8 * 8
    assert f"omits 5 of {COUNT}" in caplog.text and "mixes" in caplog.text
    with pytest.raises(jaxspeed.DataError, match="3 samples to evaluate on are fewer than the 8"):
        evaluate(small, split(**tiny.batch(3)))
