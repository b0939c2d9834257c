"""Proposal of inferred sharding: sharded and replicated parameters, and their collectives."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import Communication, ring_bytes
from jaxspeed.config import match
from jaxspeed.hardware.chip import Chip, read_chips
from jaxspeed.placement.apply_layer_specs import Use
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.show import as_text, scaled_text
from jaxspeed.placement.show import together as under
from jaxspeed.tensor_parallel.boundary_costs import totals
from jaxspeed.tensor_parallel.proposed_patterns import ShardedDim, as_layer_specs, by_layer_pattern


@dataclass(frozen=True)
class ShardingProposal:
    """Sharding of a model's parameters over the tensor axis, inferred from its traced program.

    Attributes:
      tensor: number of shards.
      leaves: all parameters of the model.
      sharded: by path, the sharded parameters.
      replicated: by path, the matmul weights that stay replicated, with the reason.
      sends: the collectives of one forward and backward pass, of full arrays.
      uses: contracted and free dims of parameters in matmuls.
      sharded_flops: FLOPs of the sharded matmuls in one forward and backward pass.
      all_flops: of all matmuls.
    """

    tensor: int
    leaves: tuple[Leaf, ...]
    sharded: Mapping[str, ShardedDim]
    replicated: Mapping[str, str]
    sends: tuple[Communication, ...]
    uses: Mapping[str, Use]
    sharded_flops: int = 0
    all_flops: int = 0

    @property
    def names(self) -> dict[str, tuple[str | None, ...]]:
        """Logical dim names of the sharded parameters."""
        shapes = {leaf.path: leaf.shape for leaf in self.leaves}
        return {
            path: tuple(
                ("vocab" if at.vocabulary else "tensor") if d == at.dim else None
                for d in range(len(shapes[path]))
            )
            for path, at in self.sharded.items()
        }

    @cached_property
    def layer_specs(self) -> dict[str, str | dict[str, Any]]:
        """Path patterns for the config that shard the same."""
        return as_layer_specs(self.leaves, self.sharded, self.uses)

    @property
    def config(self) -> dict[str, Any]:
        """The section of a config that sets this sharding."""
        partition = {"partition_config": {"layer_specs": self.layer_specs}}
        return {"tensor_parallel": {"autotp_size": self.tensor, **partition}}

    @property
    def share(self) -> float:
        """The share of the matmul weights' elements that is sharded."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in self.leaves}
        sharded = sum(sizes[path] for path in self.sharded)
        return sharded / max(1, sharded + sum(sizes[path] for path in self.replicated))

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that a device does not compute, per byte that it sends in collectives."""
        saved = self.sharded_flops * (1 - 1 / self.tensor)
        return saved / max(1.0, sum(map(ring_bytes, self.sends)))

    def pays_on(self, chip: Chip) -> bool:
        """Whether sharding saves more time than its collectives take, if nothing overlaps."""
        return self.flops_per_byte > self._balance(chip)

    def _balance(self, chip: Chip) -> float:
        """FLOPs that a chip computes in the time of sending a byte along one axis of devices."""
        dtype = "fp32" if {send.dtype for send in self.sends} == {"f32"} else "bf16"
        sent = chip.link * min(chip.links, 2) * chip.reached["links"]  # a ring sends both ways
        return chip.flops[dtype] * chip.reached["products"] / sent

    def __rich__(self) -> Group:
        section = json.dumps(self.config, indent=2)
        return under(
            Text(f"tensor {self.tensor}: {self.share:.0%} of the matmul weights are sharded"),
            *([self._table()] if self.sharded else []),
            *(Text(f" {line}") for line in self._lines()),
            *([Text(), Text(" in the config:"), Text(section)] if self.sharded else []),
        )

    def __str__(self) -> str:
        return as_text(self, width=100)

    def _table(self) -> Table:
        shown = Table(box=None)
        for name in ("parameters", "type", "shape", "per device"):
            shown.add_column(name, overflow="fold")
        left = dict(self.sharded)
        for pattern, spec in self.layer_specs.items():
            covered = [path for path in left if match(pattern, path)]
            if not covered:  # an exception from a later pattern, to be replicated
                continue
            leaf = max(
                (leaf for leaf in self.leaves if leaf.path in covered),
                key=lambda leaf: math.prod(leaf.shape),
            )
            dim = self.sharded[leaf.path].dim
            type_ = spec if isinstance(spec, str) else f"{spec['type']}, dim {spec['dim']}"
            shard = [-(-n // self.tensor) if d == dim else n for d, n in enumerate(leaf.shape)]
            shown.add_row(pattern, type_, _sizes(leaf.shape), _sizes(shard))
            for path in covered:
                del left[path]
        return shown

    def _lines(self) -> Iterator[str]:
        sums = totals(self.sends)
        for (kind, backward), (count, elements) in sorted(sums.items(), key=lambda kv: kv[0][1]):
            when = "backward" if backward else "forward"
            what = kind if count == 1 else f"{kind}s"
            yield f"{when}: {count} {what} of {_count(elements)} elements in total"
        if self.sharded:
            yield from self._worth()
        shapes = {leaf.path: leaf.shape for leaf in self.leaves}
        by_reason: dict[tuple[str, str, tuple[int, ...]], None] = {}
        for shown, paths in by_layer_pattern(list(self.replicated)).items():
            for path in paths:
                by_reason[shown, self.replicated[path], shapes[path]] = None
        for shown, reason, shape in by_reason:
            yield f"replicated: {shown} [{_sizes(shape)}]: {reason}"
        accounted = {*self.sharded, *self.replicated}
        others = [leaf for leaf in self.leaves if leaf.path not in accounted]
        if others:
            number = sum(math.prod(x.shape) for x in others)
            unit = "element" if number == 1 else "elements"
            yield f"replicated, in no matmul: {len(others)} more, {_count(number)} {unit}"

    def _worth(self) -> Iterator[str]:
        """Whether it saves time, or only memory, on some chips."""
        chips = read_chips()
        by_pays: dict[bool, list[str]] = {}
        for chip in map(chips.__getitem__, SHOWN):
            text = f"{chip.name} ({_count(round(self._balance(chip)))})"
            by_pays.setdefault(self.pays_on(chip), []).append(text)
        yield (
            f"time: {self.sharded_flops / max(1, self.all_flops):.0%} of the matmul FLOPs are "
            f"sharded, {_count(round(self.flops_per_byte))} less on a device per byte that it sends"
        )
        lines = {True: "saves time on", False: "saves memory, and costs time, on"}
        for pays, names in by_pays.items():
            yield f"{lines[pays]} {', '.join(names)}"


SHOWN = ("v5e", "v5p", "v6e", "h100")  # chips for which a proposal says whether it pays


def _count(n: int) -> str:
    return scaled_text(n, "").strip()


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))
