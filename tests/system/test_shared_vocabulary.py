"""Devices that share a vocabulary or heads, in programs for a TPU v5e:2x4: what they exchange.

Sums of tokens, once; one activation in each pass; never logits, and never a head or a table. The
vocabulary is one that neither the devices divide nor the chunks of the loss.
"""

import math
from collections import Counter
from typing import Any

import pytest

from tests.support.topology import run_on_topology
from tests.system.measured import collectives_of
from tests.system.tpu_vocabulary import (
    CHUNK,
    EMBED,
    HEAD_DIM,
    HEADS,
    SAMPLES,
    SEQ,
    TENSOR,
    VOCABULARY,
)

ROWS = math.ceil(VOCABULARY / TENSOR)  # of one device
TOKENS = SAMPLES * TENSOR // 8 * SEQ  # of one device


def exchanged(found: dict[str, Any], axis: str, smallest: int = 1) -> Counter:
    """{(kind, elements): runs} of what crosses one axis."""
    runs: Counter = Counter()
    for c in collectives_of(found):
        if c.axes == (axis,) and c.elements >= smallest:
            runs[c.kind, c.elements] += c.runs
    return runs


# -- the loss -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losses() -> dict[str, Any]:
    return run_on_topology("tests.system.tpu_vocabulary:losses", "v5e:2x4")


def test_the_loss_exchanges_sums_of_tokens_and_one_gradient_whatever_the_chunks(losses):
    """The maximum of each token, its sums in one message, and the gradient of the hidden states."""
    assert exchanged(losses["cut"], "tensor") == {
        ("all-reduce", TOKENS): 2,
        ("all-reduce", TOKENS * EMBED): 1,
    }


def test_a_head_that_is_stored_whole_is_shared_all_the_same(losses):
    """By a constraint, without which every device would have all logits."""
    assert exchanged(losses["whole"], "tensor")["all-reduce", TOKENS] == 2
    assert not exchanged(losses["whole, dropped"], "tensor", smallest=TOKENS)


# -- a model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return run_on_topology("tests.system.tpu_vocabulary:model", "v5e:2x4")


@pytest.mark.full
def test_under_stage_3_no_buffer_is_as_large_as_a_devices_part_of_the_head_or_the_logits(program):
    sizes = [math.prod(b["shape"]) for b in program["largest"]]
    assert max(sizes) < min(ROWS * EMBED, ROWS * TOKENS)


@pytest.mark.full
def test_under_stage_3_a_devices_part_of_the_head_is_gathered_a_chunk_at_a_time(program):
    found = exchanged(program, "data", smallest=CHUNK * EMBED)
    chunks = math.ceil(ROWS / CHUNK)
    assert found["all-gather", CHUNK * EMBED] == 2 * chunks
    assert found["reduce-scatter", CHUNK * EMBED] == chunks
    assert max(n for kind, n in found if kind == "all-gather") < ROWS * EMBED / 2


@pytest.mark.full
def test_a_lookup_in_a_table_cut_both_ways_moves_what_was_looked_up(program):
    """Each device its rows and columns for all tokens: summed over tensor, then to their ranks."""
    activation = TOKENS * EMBED  # of one rank, or of all ranks a fourth of the columns
    to_ranks = exchanged(program, "data", smallest=activation)
    assert {key: n for key, n in to_ranks.items() if key[0] == "all-to-all"} == {
        ("all-to-all", activation): 2
    }
    # Two in each pass of a block, the lookup's, and that of the head's input.
    assert exchanged(program, "tensor", smallest=activation) == {("all-reduce", activation): 10}


# -- attention ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attentions() -> dict[str, Any]:
    return run_on_topology("tests.system.tpu_vocabulary:attentions", "v5e:2x4")


@pytest.mark.sampled
@pytest.mark.parametrize("name", HEADS)
def test_key_heads_that_devices_do_not_divide_cost_the_sum_of_their_gradients(attentions, name):
    """One activation in each pass, and with the second one the gradients of keys and values."""
    tensor, _, kv_heads, _ = HEADS[name]
    tokens = SAMPLES * tensor // 8 * SEQ
    found = exchanged(attentions[name], "tensor")
    assert {kind for kind, _ in found} == {"all-reduce"}
    total = sum(elements * runs for (_, elements), runs in found.items())
    assert total == 2 * tokens * EMBED + 2 * tokens * kv_heads * HEAD_DIM
