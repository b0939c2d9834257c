"""What a mixture exchanges in programs compiled for absent TPUs, and how large its arrays are."""

import math
from collections import Counter

import pytest

from jaxspeed.ops.moe.dispatch import pair_rows
from tests.moe.tpu_mixtures import BATCH, EMBED, EXPERTS, MLP, SEQ, K
from tests.support.topology import run_on_topology

PAIRS = BATCH * SEQ * K  # of a device
LAYER = [("v5p:2x2x1", {"expert": 4}), ("v6e:2x4", {"data": 2, "expert": 2, "tensor": 2})]


@pytest.mark.parametrize(("topology", "sizes"), LAYER[:1])
def test_exchanges_of_a_layer(topology, sizes):
    """Two forward and three backward outside of the further rounds, and as many in their loop."""
    check(topology, sizes)


@pytest.mark.full
@pytest.mark.parametrize(("topology", "sizes"), LAYER[1:])
def test_exchanges_of_a_layer_beside_data_and_tensor(topology, sizes):
    check(topology, sizes)


def check(topology, sizes):
    found = run_on_topology("tests.moe.tpu_mixtures:exchanges", topology, sizes=sizes)
    over_expert = [
        (kind, elements, "while" in site, "transpose" in site)
        for kind, axes, elements, _, site in found["collectives"]
        if axes == ["expert"]
    ]
    rows, buffer = (n * EMBED for n in (PAIRS, sizes["expert"] * pair_rows(PAIRS, sizes["expert"])))
    assert max(elements for kind, elements, *_ in over_expert) == buffer
    large = Counter(x[1:] for x in over_expert if x[1] >= rows)
    in_loop, backward = (False, True), (False, True)
    assert large == {
        (rows, loop, is_backward): 1 + is_backward for loop in in_loop for is_backward in backward
    } | {(buffer, loop, is_backward): 1 for loop in in_loop for is_backward in backward}
    assert {kind for kind, elements, *_ in over_expert if elements >= rows} == {"ragged-all-to-all"}
    small = [elements for _, elements, *_ in over_expert if elements < rows]
    assert max(small) <= buffer // EMBED, "counts, offsets and the weights of the sum"
    # Of a device's rows [buffer, mlp]: a dense form has an array of all experts.
    largest = max(math.prod(shape) for _, shape in found["largest"])
    parts = sizes.get("tensor", 1)
    weights = EXPERTS // sizes["expert"] * EMBED * MLP // parts
    assert largest <= max(buffer // EMBED * MLP // parts, weights)


@pytest.mark.full
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_kernels_compile_with_the_sizes_of_real_models(topology):
    """Three kernels each: of the product, of the rows' gradient and of the weights'."""
    found = run_on_topology("tests.moe.tpu_mixtures:kernels", topology)
    assert len(found) == 8 and all(kernels == 3 for _, kernels in found.values())
