"""The choice of how one attention runs over the axis `seq`."""

import re
from contextlib import nullcontext

import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.hardware import read_chips
from jaxspeed.hardware.chip import assumed
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel import SequenceSettings
from jaxspeed.sequence_parallel.choose_form import choose_form

pytestmark = pytest.mark.fast

CAUSAL = AttentionForm(1.0, Mask(True, None))
FULL = AttentionForm(1.0, Mask(False, None))
GENERAL = AttentionForm(1.0, Mask(False, None), rows=(2,))


V5P, H100 = (read_chips()[name] for name in ("v5p", "h100"))


def chosen(heads, keys, devices, kind="auto", seq=131072, form=CAUSAL, tensor=1, chip=None):
    settings = SequenceSettings(kind=kind)
    q, k = ((1, seq, n, 128) for n in (heads, keys))
    with assumed(chip) if chip else nullcontext():
        return choose_form(form, q, k, settings, devices, tensor)


def volume(heads, keys, devices):
    """The issue's formulas, in tokens x head_dim: (Ulysses, ring)."""
    g = max(keys, devices) / heads
    share = (devices - 1) / devices
    return (2 + 2 * g) * heads / devices * share, 2 * keys * share


@pytest.mark.parametrize(
    ("heads", "keys", "devices"),
    [(32, 32, 8), (32, 8, 8), (32, 8, 2), (64, 8, 4), (32, 1, 8), (16, 1, 16), (128, 2, 4)],
)
def test_auto_receives_least(heads, keys, devices):
    how, why = chosen(heads, keys, devices)
    ulysses, ring = volume(heads, keys, devices)
    assert how.kind in ("both", "ulysses" if ulysses <= ring else "ring")
    assert f"{ulysses:.3g}" in why and f"{ring:.3g}" in why


@pytest.mark.parametrize(("seq", "kinds"), [(131072, ["ring"]), (2048, ["both", "ulysses"])])
def test_a_ring_costs_nothing_where_its_hops_take_less_than_their_blocks(seq, kinds):
    """All-to-alls send fewer bytes here, but never overlap."""
    assert chosen(32, 8, 8, form=FULL, seq=131072)[0].kind == "ulysses"
    how, why = chosen(32, 8, 8, form=FULL, seq=seq, chip=V5P)
    assert how.kind in kinds
    hop = 2 * 8 * 128 * (seq / 8) * 2 / (V5P.link * V5P.reached["links"])
    block = 4 * 32 * 128 * (seq / 8) ** 2 / (V5P.flops["bf16"] * V5P.reached["attention"])
    assert f"ring {1e3 * 7 * max(0, hop - block):.3g}" in why and "v5p" in why


def test_devices_of_contiguous_ranges_wait_for_the_last_under_a_causal_mask():
    assert chosen(32, 8, 8, chip=V5P)[0].kind == "ulysses"


@pytest.mark.parametrize(("seq", "kind"), [(131_072, "ring"), (3_702_784, "ulysses")])
def test_memory_decides_where_a_ring_gains_less_than_a_hundredth(seq, kind):
    """All-to-alls grow with the tokens, the attention with their square."""
    form = AttentionForm(1.0, Mask(True, None), zigzag=True)
    how, why = chosen(32, 8, 8, form=form, seq=seq, chip=H100)
    elements = volume(32, 8, 8)[0] * seq * 128
    exposed = 2 * elements / (H100.link * H100.links * H100.reached["links"])
    flops = 4 * 32 * 128 * seq**2 / 2 / 8
    compute = flops / (H100.flops["bf16"] * H100.reached["attention"])
    assert how.kind == kind == ("ulysses" if exposed < 0.01 * compute else "ring")
    assert why.startswith("the least memory: ring exposes less by under 1% ") == (kind != "ring")
    assert f"ulysses {1e3 * exposed:.3g}" in why and "ring 0" in why


def test_over_the_network_bytes_take_longer():
    """A window is short beside a hop: 16 H100s are two nodes."""
    window = AttentionForm(1.0, Mask(True, 256))
    times = [
        float(re.search(r"ring ([^,)]+)", chosen(32, 8, n, form=window, chip=H100)[1])[1])
        for n in (8, 16)
    ]
    assert times[1] > 4 * times[0] > 0


def test_heads_that_the_axis_does_not_divide_make_a_ring():
    how, why = chosen(6, 6, 4)
    assert how.kind in ("ring", "both") and "ulysses" not in why
    assert chosen(5, 5, 4)[0].kind == "ring"


def test_the_heads_of_a_tensor_shard_count():
    assert chosen(8, 8, 8)[0].kind == "ulysses"
    assert chosen(8, 8, 8, tensor=8)[0].kind == "ring"


def test_few_tokens_make_no_ring():
    how, why = chosen(5, 5, 4, seq=64)
    assert how.kind == "gather" and "fewer than 256 tokens a device" in why


def test_a_general_mask_is_gathered():
    how, why = chosen(32, 8, 8, form=GENERAL)
    assert how.kind == "gather" and "general" in why


@pytest.mark.parametrize("kind", ["gather", "ulysses", "ring", "both"])
def test_the_config_decides(kind):
    how, why = chosen(32, 8, 8, kind)
    assert how.kind == kind and why == "parallel.sequence.kind says so"
    assert how.ulysses == (4 if kind == "both" else 1)


@pytest.mark.parametrize(
    ("kind", "heads", "form", "text"),
    [
        ("ulysses", 6, CAUSAL, "6 query heads do not divide by 8 devices"),
        ("both", 5, CAUSAL, "5 query heads do not divide by 4 devices"),
        ("ring", 32, GENERAL, "use gather or auto"),
    ],
)
def test_what_a_kind_cannot_take_is_refused(kind, heads, form, text):
    with pytest.raises(ConfigError, match=f"parallel.sequence.kind {kind}: .*{text}"):
        chosen(heads, heads, 8, kind, form=form)
