"""gpt2 in programs for a TPU v5e:2x4: ZeRO 3 never has a whole head, nor all logits.

The head is 8192 x 512, a device has 256 tokens, and the loss goes through the vocabulary in eight
chunks. A table that is the head as well (gpt2's) is looked up without being gathered.
"""

import math
from collections import Counter
from typing import Any

import pytest

from tests.support.topology import run_on_topology
from tests.system.measured import CHUNKS, DEPTH, EMBED, SEQ, VOCABULARY, collectives_of

TOKENS = 2 * SEQ  # of one device
HEAD = VOCABULARY * EMBED
LOGITS = VOCABULARY * TOKENS  # of one device's own samples

CASES = {"untied, 1": 1, "tied, 2": 2}  # name: micro-batches
COVERING = "tied, 2"


def cases(*names: str) -> list[Any]:
    return [pytest.param(n, marks=() if n == COVERING else pytest.mark.full) for n in names]


def compiled(name: str) -> Any:
    names = [COVERING] if name == COVERING else ["untied, 1", "stage 2"]
    return run_on_topology("tests.system.tpu:heads", "v5e:2x4", names=names)[name]


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases(*CASES))
def test_no_buffer_is_as_large_as_the_head_or_the_logits(name):
    """Nothing is half as large as either: the largest array of the program is another's."""
    sizes = [math.prod(b["shape"]) for b in compiled(name)["largest"]]
    assert max(sizes) < min(HEAD, LOGITS)
    assert max(sizes) >= EMBED * 4 * EMBED // 2, "an mlp's weights are larger than all of these"


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases(*CASES))
def test_the_head_is_gathered_a_chunk_at_a_time_in_each_pass(name):
    chunk = HEAD // CHUNKS
    found = [c for c in collectives_of(compiled(name)) if c.elements == chunk]
    runs = Counter()
    for c in found:
        runs[c.kind] += c.runs
    micro_batches = CASES[name]
    assert runs == {
        "all-gather": 2 * CHUNKS * micro_batches,
        "reduce-scatter": CHUNKS * micro_batches,
    }


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases(*CASES))
def test_a_lookup_moves_what_was_looked_up(name):
    """An activation crosses once forward and once backward, and the ids; the table does not."""
    found = collectives_of(compiled(name))
    moved = [c for c in found if c.kind == "all-to-all"]
    assert [(c.elements, c.runs) for c in moved] == [(TOKENS * EMBED, CASES[name])] * 2
    assert max(c.elements for c in found if c.kind == "all-gather") < HEAD / 2
    assert max(c.elements for c in found if c.kind == "all-reduce") < HEAD / 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases("stage 2", "tied, 2"))
def test_each_matrix_is_reduce_scattered_once_a_micro_batch(name):
    """All of it: 12 embed^2 a block, the head, the positions. Vectors are small: all-reduced."""
    found = [c for c in collectives_of(compiled(name)) if c.in_accumulation]
    matrices = DEPTH * 12 * EMBED**2 + HEAD + SEQ * EMBED
    scattered = sum(c.elements * c.runs for c in found if c.kind == "reduce-scatter")
    assert scattered == 2 * matrices
    vectors = DEPTH * 13 * EMBED + 2 * EMBED  # biases 4 + 5, norms 4; the last norm
    reduced = sum(c.elements * c.runs for c in found if c.kind == "all-reduce")
    assert reduced < 2 * 3 * vectors + 100, "three times: stage 3 gathers some of them so"
