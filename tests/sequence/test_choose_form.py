"""The choice of how one attention runs over the axis `seq`."""

import pytest

from jaxspeed.errors import ConfigError
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.mask import Mask
from jaxspeed.sequence_parallel import SequenceSettings
from jaxspeed.sequence_parallel.choose_form import choose_form

pytestmark = pytest.mark.fast

CAUSAL = AttentionForm(1.0, Mask(True, None))
GENERAL = AttentionForm(1.0, Mask(False, None), rows=(2,))


def chosen(heads, keys, devices, kind="auto", seq=131072, form=CAUSAL, tensor=1):
    settings = SequenceSettings(kind=kind)
    return choose_form(form, (1, seq, heads, 128), (1, seq, keys, 128), settings, devices, tensor)


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
