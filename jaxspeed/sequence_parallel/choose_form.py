"""The choice of how one attention runs over the axis `seq`, and the reason.

With N tokens, P devices, h heads and k key heads of a tensor shard, a device receives in the
forward pass, in units of N head_dim elements:

    ring, gather   2 k (P - 1) / P
    Ulysses        (2 h + 2 max(k, P)) / P (P - 1) / P
    both           Ulysses in groups of u, and between these a ring of P / u of its keys

A ring also holds partial results in fp32. What it sends is hidden behind compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspeed.errors import ConfigError
from jaxspeed.hardware import Chip, chip_for
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.free_axes import device_kind
from jaxspeed.ops.sequence_attention import Kind, Layout, SequenceForm, refusal
from jaxspeed.sequence_parallel.settings import SequenceSettings

SHORT = 256  # tokens of a device: with fewer a ring's hops take as long as their latency
# Of an attention's time. A ring holds partial results, in fp32: it is not worth them for less.
NO_DIFFERENCE = 0.01


def choose_form(
    form: AttentionForm,
    q: Sequence[int],
    k: Sequence[int],
    settings: SequenceSettings,
    devices: int,
    tensor: int = 1,
) -> tuple[SequenceForm, str]:
    """How an attention of q [batch, seq, heads, head_dim] and such k runs, and why.

    Raises ConfigError if the config asks for a kind that it cannot have.
    """
    layout: Layout = "zigzag" if form.zigzag else "contiguous"
    groups = [n for n in range(devices // 2, 1, -1) if devices % n == 0]
    every = {kind: [SequenceForm(kind, layout)] for kind in _KINDS} | {
        "both": [SequenceForm("both", layout, n) for n in groups]
    }

    def why_not(how: SequenceForm) -> str | None:
        sizes = {"heads": q[2], "seq": q[1], "kv_seq": k[1], "parts": devices, "tensor": tensor}
        return refusal(form, how, **sizes)

    if settings.kind != "auto":
        asked = every[settings.kind]
        forms = [how for how in asked if why_not(how) is None]
        if not forms:
            none = f"seq {devices} has no groups of devices: use ulysses, ring or gather"
            reason = why_not(asked[0]) if asked else none
            raise ConfigError(f"parallel.sequence.kind {settings.kind}: {reason}")
        return forms[0], "parallel.sequence.kind says so"
    if form.rows is not None:
        return SequenceForm("gather", layout), "its mask or bias is a general one"

    split = q[2] % tensor == 0 == k[2] % tensor
    heads, keys = (n // tensor if split else n for n in (q[2], k[2]))
    is_long = min(q[1], k[1]) >= SHORT * devices
    kinds: tuple[Kind, ...] = ("ulysses", "both", "ring") if is_long else ("ulysses", "gather")
    possible = [how for kind in kinds for how in every[kind] if why_not(how) is None]
    if not possible:
        possible = every["gather"]
    received = {how: sum(_received(heads, keys, devices, how.group(devices))) for how in possible}
    short = "" if is_long else f"; fewer than {SHORT} tokens a device make no ring"
    chip = chip_for(device_kind())
    if chip is None:
        parts = [f"{name_of(how)} {bytes_:.3g}" for how, bytes_ in received.items()]
        why = f"a device receives least (tokens x head_dim: {', '.join(parts)}){short}"
        return min(possible, key=received.__getitem__), why
    lengths = q[1], k[1], q[3]
    exposed = {
        how: _exposed(form, how, lengths, (heads, keys), devices, tensor, chip) for how in possible
    }
    parts = [f"{name_of(how)} {1e3 * seconds:.3g}" for how, seconds in exposed.items()]
    times = f"(ms forward per sample on {chip.name}: {', '.join(parts)}){short}"
    best = min(possible, key=lambda how: (exposed[how], received[how]))
    computed = form.mask.share(q[1], k[1]) * _computed(lengths, heads, chip) / devices
    for how in possible:
        alone = how.kind == "ulysses" != best.kind
        if alone and exposed[how] - exposed[best] < NO_DIFFERENCE * computed:
            gain = f"{name_of(best)} exposes less by under {NO_DIFFERENCE:.0%} of the attention"
            return how, f"the least memory: {gain} {times}"
    return best, f"the least exposed time {times}"


def _computed(lengths: tuple[float, float, int], heads: float, chip: Chip) -> float:
    """Seconds of a forward pass in which every query sees every key."""
    seq, kv_seq, width = lengths
    return 4 * heads * seq * kv_seq * width / (chip.flops["bf16"] * chip.reached["attention"])


_KINDS: tuple[Kind, ...] = ("gather", "ring", "ulysses")


def name_of(how: SequenceForm) -> str:
    return f"both in groups of {how.ulysses}" if how.kind == "both" else how.kind


def _received(heads: int, keys: int, devices: int, group: int) -> tuple[float, float]:
    """What a device receives in the forward pass, with groups of so many that exchange heads.

    By all-to-alls, and as keys and values of others.
    """
    keys = max(keys, group)
    exchanged = (2 * heads + 2 * keys) / devices * (1 - 1 / group)
    return exchanged, 2 * keys / group * (1 - group / devices)


def _exposed(
    form: AttentionForm,
    how: SequenceForm,
    lengths: tuple[int, int, int],
    counts: tuple[int, int],
    devices: int,
    tensor: int,
    chip: Chip,
) -> float:
    """Seconds of a sample's forward pass in which devices wait, with bf16 operands.

    All-to-alls and gathers do not overlap with compute; a ring's hop does with the block of the one
    before. Under a causal mask the last of contiguous ranges has most blocks, and the others wait.

    Args:
      lengths: positions of queries and of keys, head_dim.
      counts: query and key heads of a tensor shard.
    """
    (seq, kv_seq, width), (heads, keys) = lengths, counts
    is_near = bool(chip.torus_dims) or devices * tensor <= chip.node
    speed = chip.link * chip.reached["links"] * (1 if chip.torus_dims else chip.links)
    if not is_near:
        speed = chip.outside * chip.reached["outside"]
    group = how.group(devices)
    exchanged, of_keys = (
        2 * seq * width * received / speed for received in _received(heads, keys, devices, group)
    )
    groups = devices // group
    block = _computed((seq / groups, kv_seq / groups, width), heads / group, chip)
    hops = groups - 1
    overlapped = 0.0 if how.kind == "gather" else hops * block * form.mask.share(seq, kv_seq)
    triangle = form.mask.causal and form.mask.window is None and how.layout == "contiguous"
    return exchanged + max(0.0, of_keys - overlapped) + hops / 2 * block * triangle
