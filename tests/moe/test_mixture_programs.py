"""What mixtures exchange in programs compiled for absent devices, and how large arrays are."""

import functools
import importlib.util
import math
from collections import Counter

import pytest

from jaxspeed.hardware.targets import target_of
from jaxspeed.ops.moe.dispatch import pair_rows
from jaxspeed.planner.compile import in_child
from tests.moe.tpu_mixtures import BATCH, EMBED, EXPERTS, LAYERS, MLP, SEQ, K, program
from tests.support.topology import run_on_topology
from tests.system.measured import collectives_of, measure_on_gpus

PAIRS = BATCH * SEQ * K  # of a device
RAGGED = "ragged-all-to-all"
LAYER = [("v5p:2x2x1", {"expert": 4}), ("v6e:2x4", {"data": 2, "expert": 2, "tensor": 2})]


@pytest.mark.sampled
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
    assert {kind for kind, elements, *_ in over_expert if elements >= rows} == {RAGGED}
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


needs_cuda = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, in_child.CUDA_PLUGINS)),
    reason="needs jax[cuda13] (3.4 GB) to compile for a GPU",
)


def step_for(target, **given):
    if target.startswith("h100"):
        return measure_on_gpus(target_of(target), functools.partial(program, **given))
    return run_on_topology("tests.moe.tpu_mixtures:step", target, **given)


@pytest.mark.full
@pytest.mark.parametrize("target", [pytest.param("h100:32", marks=needs_cuda), "v6e:16x16"])
def test_exchanges_of_a_step(target):
    """Those of a layer, in the scan over layers, and as many in the loop of further rounds."""
    groups = 8
    found = step_for(target, mesh={"expert": groups})
    over_expert = [c for c in collectives_of(found) if c.axes == ("expert",)]
    rows, buffer = PAIRS * EMBED, groups * pair_rows(PAIRS, groups) * EMBED
    assert max(c.elements for c in over_expert) == buffer
    large = Counter(
        (c.elements, c.site.count("while") > 1, "transpose" in c.site)
        for c in over_expert
        if c.elements >= rows
    )
    kind, there = ("all-to-all", buffer) if target.startswith("h100") else (RAGGED, rows)
    assert {c.kind for c in over_expert if c.elements >= rows} == {kind}
    expected = Counter()
    for further in (False, True):
        # Forward: tokens, results. Backward: tokens again, gradients of results, those of tokens.
        for elements, is_backward in (
            *((there, False), (buffer, False)),
            *((there, True), (there, True), (buffer, True)),
        ):
            expected[elements, further, is_backward] += 1
    assert large == expected
    small = [c.elements for c in over_expert if c.elements < rows]
    assert max(small) <= buffer // EMBED, "counts, offsets and the weights of the sum"
    # A dense form has an array of all rows and all experts.
    stacks = LAYERS * EXPERTS // groups * EMBED * MLP
    arrays = [math.prod(b["shape"]) for b in found["largest"] if b["dtype"] in ("bf16", "f32")]
    assert max(arrays) <= max(stacks, buffer // EMBED * MLP)


@needs_cuda
@pytest.mark.full
def test_data_expert_tensor_and_pipe_compile_together_for_gpus():
    mesh = {"pipe": 2, "expert": 2, "tensor": 2}  # data takes the others
    found = step_for("h100:32", mesh=mesh, accumulation=4)
    kinds = {(c.kind, c.axes) for c in collectives_of(found)}
    assert {axis for _, axes in kinds for axis in axes} == {"data", "expert", "tensor", "pipe"}
    assert any("all-to-all" in kind and axes == ("expert",) for kind, axes in kinds)
