"""ZeRO 3 gathers one layer at a time, forward and backward, in programs for a TPU v5e:2x4."""

from typing import Any

import pytest

from jaxspeed.communication import Communication
from tests.support.covering import covering
from tests.support.topology import run_on_topology
from tests.system.measured import LAYERS, WIDTH, collectives_of
from tests.system.stacks import FORMS
from tests.system.tpu import DEEP_BATCH, DEEP_WIDTH

DEVICES = 8
MATRIX = DEEP_WIDTH * DEEP_WIDTH
LAYER_BYTES = 2 * MATRIX  # gathered, in bf16
SAVED_BYTES = 2 * DEEP_BATCH * DEEP_WIDTH  # a layer's input on one device, in bf16
STATE_BYTES = (4 + 8) * MATRIX // DEVICES  # the shards of a layer's master and moments
GRAD_BYTES = 4 * MATRIX // DEVICES  # and of its gradient


# Of so many layers, and of twice as many.
FEW = covering([4, 8, 16], [4])


def deep(form: str, few: int) -> Any:
    return run_on_topology("tests.system.tpu:depths", "v5e:2x4", form=form, few=few)


@pytest.fixture(scope="module")
def every_form() -> dict[str, Any]:
    return run_on_topology("tests.system.tpu:forms", "v5e:2x4")


def of_kind(found: dict[str, Any], kind: str, at_least: int) -> list[Communication]:
    return [c for c in collectives_of(found) if c.kind == kind and c.elements >= at_least]


@pytest.mark.parametrize("few", FEW)
def test_two_gathers_and_one_reduce_scatter_a_layer(few):
    for layers in (few, 2 * few):
        found = deep("listed", few)[f"listed, {layers}"]
        gathers = of_kind(found, "all-gather", MATRIX // DEVICES)
        scatters = of_kind(found, "reduce-scatter", MATRIX // DEVICES)
        assert [c.elements for c in gathers] == [MATRIX] * 2 * layers, "one layer at a time"
        assert [c.elements for c in scatters] == [MATRIX] * layers
        assert not of_kind(found, "all-reduce", MATRIX // DEVICES)
        assert not of_kind(found, "all-to-all", 1), "weights move, activations do not"


def growth(form: str, few: int) -> dict[str, int]:
    """What as many layers more cost, in bytes a device."""
    names, found = ("argument_bytes", "temp_bytes", "peak_bytes"), deep(form, few)
    twice, once = (found[f"{form}, {layers}"] for layers in (2 * few, few))
    return {name: twice[name] - once[name] for name in names}


@pytest.mark.parametrize("few", FEW)
def test_a_layer_more_costs_its_shards_and_its_saved_input(few):
    """Peak(2 n) - peak(n) is at most n x (shards + saved input) + one gathered layer.

    n x (6.3 MB of master and moments + 2.1 MB of gradient + 2.1 MB saved) + 8.4 MB. What the
    derivative of tanh needs is the layer's output, which is the next one's saved input. Were the
    layers gathered together, or kept for the backward pass, n x 8.4 MB would come on top.
    """
    more = growth("listed", few)
    assert more["argument_bytes"] == pytest.approx(few * STATE_BYTES, rel=1e-3)
    assert more["peak_bytes"] <= few * (STATE_BYTES + GRAD_BYTES + SAVED_BYTES) + LAYER_BYTES
    assert more["temp_bytes"] <= few * (GRAD_BYTES + SAVED_BYTES) + LAYER_BYTES


@pytest.mark.full
def test_a_scanned_layer_more_costs_its_shards_and_what_the_scan_saves():
    """A scan stacks inputs and outputs apart, though one is the other shifted: 2 x 2.1 MB."""
    more = growth("scanned", 16)
    saved = 2 * SAVED_BYTES
    assert more["argument_bytes"] == pytest.approx(16 * STATE_BYTES, rel=1e-3)
    assert more["peak_bytes"] <= 16 * (STATE_BYTES + GRAD_BYTES + saved) + LAYER_BYTES


@pytest.mark.sampled
@pytest.mark.parametrize("form", FORMS)
def test_lists_stacks_linen_and_functions_have_the_same_schedule(every_form, form):
    found = every_form[form]
    matrix = WIDTH * WIDTH
    for kind, each in (("all-gather", 2), ("reduce-scatter", 1)):
        moved = of_kind(found, kind, matrix // DEVICES)
        assert {c.elements for c in moved} == {matrix}, "one layer at a time"
        assert sum(c.runs for c in moved) == each * LAYERS
        assert len(moved) == (each if form == "scanned" else each * LAYERS)
