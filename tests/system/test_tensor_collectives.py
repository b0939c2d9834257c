"""What the tensor axis exchanges, and what a device holds: read from TPU programs.

Shoeybi et al. (arXiv:1909.08053) count two all-reduces of one activation forward and two backward
in a transformer block. With activations cut along the sequence between them (Korthikanti et al.,
arXiv:2205.05198) each is an all-gather and a reduce-scatter, and the backward pass gathers once
more what it multiplies gradients with, because only the cut form was kept.
"""

import math
from collections import Counter
from typing import Any

import jax
import pytest

from tests.support.topology import run_on_topology
from tests.system import cut_blocks
from tests.system.cut_blocks import ACTIVATION, CASES, EMBED, LAYERS, SEQ
from tests.system.measured import collectives_of

WHOLE = {("all-reduce", "forward"): 2, ("all-reduce", "backward"): 2}
CUT = {
    ("all-gather", "forward"): 2,
    ("reduce-scatter", "forward"): 2,
    ("all-gather", "backward"): 2 + 2,
    ("reduce-scatter", "backward"): 2,
}
# Outside of the blocks: the vocabulary's lookup and the head.
ENDS_WHOLE = {("all-reduce", "forward"): 1, ("all-reduce", "backward"): 1}
ENDS_CUT = {
    ("reduce-scatter", "forward"): 1,  # of what was looked up
    ("all-gather", "forward"): 1,  # for the head
    ("reduce-scatter", "backward"): 1,
    ("all-gather", "backward"): 1,
}


# At stage 3 the table is cut by columns too, and each device looks up its columns for the tokens of
# all: the sum over its rows is whole before it goes back to them.
ENDS_CUT_STAGE_3 = ENDS_CUT | {
    ("reduce-scatter", "forward"): 0,
    ("all-reduce", "forward"): 1,
}

COVERING, SAMPLED = ["llama, cut"], ["llama, whole, stage 3", "llama, ring"]
APART = "vit", "recomputed"  # have tests of their own


def cases(word: str) -> list[Any]:
    """The cases with this word in their name; those that do not cover are marked `full`."""
    return [
        pytest.param(
            name,
            marks=()
            if name in COVERING
            else pytest.mark.sampled
            if name in SAMPLED
            else pytest.mark.full,
        )
        for name in CASES
        if word in name and not any(other in name for other in APART)
    ]


def compiled(name: str) -> Any:
    names = COVERING if name in COVERING else [n for n in CASES if n not in COVERING]
    return run_on_topology("tests.system.cut_blocks:blocks", "v5e:2x4", names=names)[name]


def crossings(found: dict[str, Any], activation: int = ACTIVATION) -> Counter[Any]:
    """{(kind, pass): how often it runs}, of what moves whole activations over the tensor axis.

    What is as large and is no such activation counts under its own size.
    """
    counted: Counter[Any] = Counter()
    for c in collectives_of(found):
        if "tensor" in c.axes and c.elements >= activation / 8:
            way = "backward" if "transpose" in c.site else "forward"
            is_one = c.axes == ("tensor",) and c.elements == activation
            counted[(c.kind, way) if is_one else (c.kind, way, c.elements)] += c.runs
    return counted


def small(found: dict[str, Any]) -> list[Any]:
    """What else crosses the axis."""
    return [c for c in collectives_of(found) if "tensor" in c.axes and c.elements < ACTIVATION / 8]


def expected(block: dict[Any, int], ends: dict[Any, int]) -> Counter[Any]:
    return Counter({k: LAYERS * n for k, n in block.items()}) + Counter(ends)  # without zeros


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases("whole"))
def test_a_block_all_reduces_twice_in_each_pass(name):
    assert crossings(compiled(name)) == expected(WHOLE, ENDS_WHOLE)


@pytest.mark.parametrize("name", cases("cut"))
def test_with_sequence_parallel_activations_they_are_gathers_and_scatters(name):
    ends = ENDS_CUT_STAGE_3 if "stage 3" in name else ENDS_CUT
    assert crossings(compiled(name)) == expected(CUT, ends)


@pytest.mark.full
def test_matmuls_that_gather_their_own_weights_are_summed_before_they_are_all_reduced():
    """The backward pass computes the first sum of each block again."""
    backward = WHOLE["all-reduce", "backward"] + 1
    block = WHOLE | {("all-reduce", "backward"): backward}
    found = crossings(compiled("llama, stage 3, recomputed"), 2 * ACTIVATION)
    assert found == expected(block, ENDS_WHOLE)


@pytest.mark.full
def test_a_vision_transformer_has_no_vocabulary_and_exchanges_in_its_blocks_alone():
    found = [c for c in collectives_of(compiled("vit, whole")) if "tensor" in c.axes]
    big = [c for c in found if c.elements > ACTIVATION / 8]
    assert sum(c.runs for c in big) == 4 * LAYERS
    assert {c.kind for c in big} == {"all-reduce"}


@pytest.mark.parametrize("name", cases(""))
def test_what_else_crosses_is_as_small_as_a_norm_or_a_tokens_sums(name):
    tokens = ACTIVATION // EMBED
    norms_and_biases = EMBED * (5 * LAYERS + 2)  # at most, combined into one
    for c in small(compiled(name)):
        are_ids = c.dtype == "s32" and "stage 3" in name  # each device looks up those of all
        assert c.elements <= max(2 * tokens, norms_and_biases), c
        assert c.kind == "all-reduce" or are_ids, c


@pytest.mark.sampled
def test_a_ring_sends_chunks_and_gathers_nothing_in_a_block():
    found = collectives_of(compiled("llama, ring"))
    ways = 4
    sent = [c for c in found if c.kind == "collective-permute"]
    # Forward two gather rings and two scatter rings of 3 steps; backward the same, with the two
    # gathers for the weights' gradients going round as well.
    assert sum(c.runs for c in sent) == LAYERS * (4 + 4 + 2) * (ways - 1)
    assert {c.elements for c in sent} == {ACTIVATION // ways}
    whole = [c for c in found if "tensor" in c.axes and c.elements >= ACTIVATION]
    assert sum(c.runs for c in whole) == sum(ENDS_CUT.values())


# -- each constraint is needed --------------------------------------------------------------------


@pytest.fixture(scope="module")
def dropped() -> dict[str, Any]:
    return run_on_topology("tests.system.cut_blocks:dropped", "v5e:2x4")


def is_right(site: str, found: dict[str, Any]) -> bool:
    if site == "tensor.enter":  # else the last norm's gradient is made of parts of the sequence
        return not any(c.dtype == "bf16" for c in small(found))
    activation = ACTIVATION
    if site == "tensor.columns":
        activation = cut_blocks.WIDE_MICRO * SEQ * cut_blocks.NARROW["hidden_size"]
    return crossings(found, activation) == expected(CUT, ENDS_CUT)


@pytest.mark.full
@pytest.mark.parametrize("site", cut_blocks.DROPPED)
def test_a_crossing_that_is_not_written_is_missed(dropped, site):
    assert is_right(site, dropped[site]["kept"])
    assert not is_right(site, dropped[site]["dropped"])


# -- what a device holds --------------------------------------------------------------------------


def test_a_device_stores_its_part_of_each_blocks_weights():
    """Kernels and the biases of what they give by 1/T; norms and the biases of sums are whole."""
    program, _ = cut_blocks.block_program(jax.devices())
    for path, stored in program.state.sources(program.table).items():
        if path.startswith("blocks/"):
            is_whole = "norm" in path or path.endswith(("o_proj/bias", "down/bias"))
            own = math.prod(stored.sharding.shard_shape(stored.shape))
            assert own == math.prod(stored.shape) // (1 if is_whole else 4), path


@pytest.mark.full
def test_a_device_keeps_its_part_of_a_blocks_activations():
    """Bytes that one layer more takes, on 4 tensor ranks against 1, the batch of a rank equal."""
    held = run_on_topology("tests.system.cut_blocks:held", "v5e:2x4")
    assert held["tensor 4, cut"] <= 1.05 * held["tensor 1"] / 4
    assert held["tensor 4, whole"] >= 1.5 * held["tensor 4, cut"]  # what cutting them is for
    assert held["tensor 1"] > 4 * cut_blocks.HELD_WEIGHTS  # large enough for them to weigh
