"""Tensor parallelism: the families train as on one device, whatever is cut and how.

Every model with 8 heads x tensor 2, 4, 8 x ZeRO stages 0 to 3, activations between the cuts whole or
cut along the sequence. One point in nine covers every pair; the rest is marked `full`.
"""

import functools
import itertools

import numpy as np
import pytest

from tests.train.cases import family, language, pictures
from tests.train.parity import (
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    run,
    whole_difference,
)

EIGHT = {"hidden_size": 32, "num_attention_heads": 8, "initializer_range": 0.2}
TEXT = {"vocab_size": 32, "max_position_embeddings": 8} | EIGHT
KEY_HEADS = (8, 4, 2, 1)
CASES = {
    "gpt2": family("gpt2", language, zero=("k_proj/bias",), **TEXT),
    "vit": family(
        "vit",
        pictures,
        zero=("k_proj/bias",),
        image_size=8,
        patch_size=4,
        num_classes=4,
        **EIGHT,
    ),
    **{
        f"llama, {heads} key heads": family(
            "llama",
            language,
            num_key_value_heads=heads,
            intermediate_size=32,
            tie_word_embeddings=heads < 4,
            **TEXT,
        )
        for heads in KEY_HEADS
    },
}
TENSOR, STAGES, BETWEEN = (2, 4, 8), (0, 1, 2, 3), (False, True)


def grid():
    """Case i, stage j, tensor k: unmarked where i + j = k mod 3, whole and cut in turns."""
    points = itertools.product(enumerate(CASES), STAGES, enumerate(TENSOR), BETWEEN)
    for (i, name), stage, (k, tensor), sequence in points:
        covering = (i + stage) % 3 == k and bool((i + stage // 2) % 2) == sequence
        yield pytest.param(
            name,
            tensor,
            stage,
            sequence,
            id=f"{name}-tensor{tensor}-stage{stage}-{'cut' if sequence else 'whole'}",
            marks=() if covering else pytest.mark.full,
        )


ACCUMULATION = 2


@functools.lru_cache
def on_one_device(name, ranks):
    return plain(CASES[name], ACCUMULATION, "sgd", ranks=ranks)


@pytest.mark.parametrize(("name", "tensor", "stage", "sequence"), grid())
def test_tensor_parallel_training_is_training_on_one_device(name, tensor, stage, sequence):
    case, data = CASES[name], 8 // tensor
    ours = run(
        case,
        stage,
        ACCUMULATION,
        "sgd",
        mesh={"data": data, "tensor": tensor},
        parallel={"sequence_parallel_activations": sequence},
    )
    reference = on_one_device(name, data)
    assert_losses_equal(ours, reference, 1e-5)
    np.testing.assert_allclose(ours.norms, reference.norms, rtol=1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, reference) <= 1e-5
    assert max(leaf_differences(case, ours, reference).values()) <= 1e-5
