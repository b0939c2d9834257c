"""A vocabulary that the tensor axis does not divide trains as on one device, at every stage.

257 words over tensor 2 are 129 rows a device, the last of which is padding on the second one. The
head is the embedding too, and goes through the loss in chunks that do not divide 129.
"""

from functools import cache

import numpy as np
import pytest

from jaxspeed.placement.paths import flat_with_paths
from tests.train.cases import KEYS, SEQ, family
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    run,
    whole_difference,
)

WORDS, CHUNK = 257, 50
MESH = {"data": 4, "tensor": 2}
TABLE = "embed/table"


def sentences(rng, samples):
    """Each word is the one before plus three, from the vocabulary's last words into its first."""
    start = rng.integers(WORDS - 8, WORDS, (samples, 1))
    tokens = (start + 3 * np.arange(SEQ + 1)) % WORDS
    mask = rng.random((samples, SEQ)) < 0.67
    return {"tokens": tokens.astype(np.int32), "mask": mask.astype(np.int32)}


SIZES = {"vocab_size": WORDS, "max_position_embeddings": SEQ, "initializer_range": 0.2}
CASE = family("gpt2", sentences, KEYS, vocab_chunk=CHUNK, **SIZES)


@cache
def reference(optimizer, accumulation):
    return plain(CASE, accumulation, optimizer, ranks=MESH["data"])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "optimizer", "accumulation"),
    [
        (3, "sgd", 2),
        pytest.param(0, "sgd", 2, marks=pytest.mark.full),
        pytest.param(3, "adam", 2, marks=pytest.mark.full),
        pytest.param(1, "adam", 2, marks=pytest.mark.full),
        pytest.param(2, "sgd", 2, marks=pytest.mark.full),
        pytest.param(1, "sgd", 2, marks=pytest.mark.full),
        pytest.param(0, "adam", 2, marks=pytest.mark.full),
        pytest.param(2, "adam", 2, marks=pytest.mark.full),
    ],
)
def test_a_padded_vocabulary_trains_as_one_device_does(stage, optimizer, accumulation):
    ours = run(CASE, stage, accumulation, optimizer, mesh=MESH)
    wanted = reference(optimizer, accumulation)
    assert_losses_equal(ours, wanted, 1e-5)
    assert_loss_fell(ours)
    assert whole_difference(CASE, ours, wanted) <= 1e-4
    if optimizer == "sgd":
        assert max(leaf_differences(CASE, ours, wanted).values()) <= 1e-5
    np.testing.assert_allclose(ours.norms, wanted.norms, rtol=1e-5)
    assert_padding_stays_zero(ours.engine, stage, moments={"sgd": 1, "adam": 2}[optimizer])


def assert_padding_stays_zero(engine, stage, moments):
    """In the table and its moments."""
    found = [x for p, x in flat_with_paths(engine.state.opt).items() if p.endswith(TABLE)]
    assert len(found) == moments
    for role, stored in enumerate((engine.state.params[TABLE], *found)):
        assert stored.shape == (258, 16)
        assert np.any(np.asarray(stored)[:257]) and not np.any(np.asarray(stored)[257:])
        sizes = {shard.data.shape for shard in stored.addressable_shards}
        sharded = stage == 3 or (role and stage)  # moments from stage 1 on
        assert sizes == {(129, 16 // (4 if sharded else 1))}
    assert engine.parameters[TABLE].shape == (257, 16)
