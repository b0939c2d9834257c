"""The choice of how one attention runs over the axis `seq`, and the reason.

With N tokens, P devices, h heads and k key heads of a tensor shard, a device receives in the
forward pass, in units of N head_dim elements:

    ring, gather   2 k (P - 1) / P
    Ulysses        (2 h + 2 max(k, P)) / P (P - 1) / P
    both           Ulysses in groups of u, and between these a ring of P / u of its keys
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspeed.errors import ConfigError
from jaxspeed.ops.attention_call import AttentionForm
from jaxspeed.ops.sequence_attention import Kind, Layout, SequenceForm
from jaxspeed.sequence_parallel.settings import SequenceSettings

SHORT = 256  # tokens of a device: with fewer a ring's hops take as long as their latency


@dataclass(frozen=True)
class Heads:
    """The heads of a tensor shard, and the devices of the axis."""

    query: int
    key: int
    devices: int

    def exchanges_heads(self, group: int) -> bool:
        """Whether groups of so many devices can exchange heads: Ulysses'."""
        keys = self.key % group == 0 or group % self.key == 0
        return self.query % group == 0 and keys

    @property
    def group(self) -> int:
        """The largest groups of `both`; 1 if there are none."""
        sizes = (n for n in range(self.devices // 2, 1, -1) if self.devices % n == 0)
        return next(filter(self.exchanges_heads, sizes), 1)

    def received(self, kind: Kind) -> float:
        """What a device receives in the forward pass, in tokens x head_dim."""
        devices, group = self.devices, self.devices if kind == "ulysses" else self.group
        if kind in ("gather", "ring"):
            return 2 * self.key * (1 - 1 / devices)
        keys = max(self.key, group)
        by_group = (2 * self.query + 2 * keys) / devices * (1 - 1 / group)
        return by_group + 2 * keys / group * (1 - group / devices)


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
    split = q[2] % tensor == 0 == k[2] % tensor
    heads = Heads(*((n // tensor if split else n) for n in (q[2], k[2])), devices)
    layout: Layout = "zigzag" if settings.layout == "zigzag" else "contiguous"
    asked = settings.kind
    if form.rows is not None:
        if asked not in ("auto", "gather"):
            raise ConfigError(
                f"parallel.sequence.kind {asked}: an attention has a mask or a bias that is none "
                "of causal, window, segments and padding, which only gather computes; write "
                '"gather", or "auto" to choose for each attention'
            )
        return SequenceForm("gather", layout), "its mask or bias is a general one"
    if asked == "auto":
        kind, why = _least(heads, q[1], k[1])
    else:
        kind, why = asked, "parallel.sequence.kind"
        _refuse(kind, heads)
    return SequenceForm(kind, layout, heads.group if kind == "both" else 1), why


def _least(heads: Heads, queries: int, keys: int) -> tuple[Kind, str]:
    """The kind that receives least."""
    devices = heads.devices
    all_keys: Kind = "ring" if min(queries, keys) >= SHORT * devices else "gather"
    possible: list[Kind] = [all_keys]
    if heads.group > 1 and all_keys == "ring":
        possible.insert(0, "both")
    if heads.exchanges_heads(devices):
        possible.insert(0, "ulysses")
    kind = min(possible, key=heads.received)
    others = ", ".join(
        f"{other} {heads.received(other):.3g}" for other in possible if other != kind
    )
    why = f"a device receives {heads.received(kind):.3g} x tokens x head_dim"
    if others:
        return kind, f"{why} ({others})"
    of = f"{heads.query} heads and {heads.key} key heads over {devices} devices"
    short = "" if all_keys == "ring" else f", and fewer than {SHORT} tokens a device"
    return kind, f"{of} cannot be exchanged{short}; {why}"


def _refuse(kind: Kind, heads: Heads) -> None:
    """Raise ConfigError for heads that the axis does not divide."""
    devices, given = heads.devices, f"{heads.query} query heads and {heads.key} key heads"
    if kind == "ulysses" and not heads.exchanges_heads(devices):
        fits = [n for n in range(1, devices) if heads.exchanges_heads(n)]
        raise ConfigError(
            f"parallel.sequence.kind ulysses: {given} (of a tensor shard) cannot be exchanged over "
            f"mesh.seq {devices}; mesh.seq {max(fits)} can, or write "
            f'"{"both" if heads.group > 1 else "ring"}"'
        )
    if kind == "both" and heads.group == 1:
        raise ConfigError(
            f"parallel.sequence.kind both: no groups of 2 to {math.ceil(devices / 2)} of mesh.seq "
            f'{devices} devices can exchange {given} (of a tensor shard); write "ring" or "gather"'
        )
