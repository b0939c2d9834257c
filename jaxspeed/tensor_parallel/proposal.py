"""Result of inference: which parameters are sharded, what is sent, what stays replicated."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.communication import Communication
from jaxspeed.config import match
from jaxspeed.placement.apply_layer_specs import Use
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.show import as_text, scaled_text
from jaxspeed.placement.show import together as under
from jaxspeed.tensor_parallel.boundary_costs import together
from jaxspeed.tensor_parallel.proposed_patterns import ShardedDim, alike, as_layer_specs


@dataclass(frozen=True)
class Proposal:
    """Cuts of a model's parameters over the tensor axis, inferred from its traced program.

    Attributes:
      tensor: into how many parts.
      leaves: all parameters of the model.
      cuts: by path, those that are cut.
      whole: by path, the weights of products that are not cut, and why.
      sends: what the cuts make the devices send each other in one forward and backward pass, of
        whole arrays.
      uses: how parameters stand in products.
    """

    tensor: int
    leaves: tuple[Leaf, ...]
    cuts: Mapping[str, ShardedDim]
    whole: Mapping[str, str]
    sends: tuple[Communication, ...]
    uses: Mapping[str, Use]

    @property
    def names(self) -> dict[str, tuple[str | None, ...]]:
        """Logical names for the dims of what is cut."""
        shapes = {leaf.path: leaf.shape for leaf in self.leaves}
        return {
            path: tuple(
                ("vocab" if cut.vocabulary else "tensor") if d == cut.dim else None
                for d in range(len(shapes[path]))
            )
            for path, cut in self.cuts.items()
        }

    @cached_property
    def layer_specs(self) -> dict[str, str | dict[str, Any]]:
        """Patterns for the config that cut the same."""
        return as_layer_specs(self.leaves, self.cuts, self.uses)

    @property
    def config(self) -> dict[str, Any]:
        """The part of a config that keeps the proposal."""
        partition = {"partition_config": {"layer_specs": self.layer_specs}}
        return {"tensor_parallel": {"autotp_size": self.tensor, **partition}}

    @property
    def share(self) -> float:
        """Of the elements of the products' weights, those that are cut."""
        sizes = {leaf.path: math.prod(leaf.shape) for leaf in self.leaves}
        cut = sum(sizes[path] for path in self.cuts)
        return cut / max(1, cut + sum(sizes[path] for path in self.whole))

    def __rich__(self) -> Group:
        kept = json.dumps(self.config, indent=2)
        return under(
            Text(f"tensor {self.tensor}: {self.share:.0%} of the products' weights are cut"),
            *([self._table()] if self.cuts else []),
            *(Text(f" {line}") for line in self._lines()),
            *([Text(), Text(" to keep it, in the config:"), Text(kept)] if self.cuts else []),
        )

    def __str__(self) -> str:
        return as_text(self, width=100)

    def _table(self) -> Table:
        shown = Table(box=None)
        for name in ("parameters", "cut as", "shape", "a device"):
            shown.add_column(name, overflow="fold")
        left = dict(self.cuts)
        for pattern, word in self.layer_specs.items():
            covered = [path for path in left if match(pattern, path)]
            if not covered:  # an exception: what a later pattern covers stays whole
                continue
            leaf = max(
                (leaf for leaf in self.leaves if leaf.path in covered),
                key=lambda leaf: math.prod(leaf.shape),
            )
            dim = self.cuts[leaf.path].dim
            said = word if isinstance(word, str) else f"{word['type']}, dim {word['dim']}"
            part = [-(-n // self.tensor) if d == dim else n for d, n in enumerate(leaf.shape)]
            shown.add_row(pattern, said, _sizes(leaf.shape), _sizes(part))
            for path in covered:
                del left[path]
        return shown

    def _lines(self) -> Iterator[str]:
        sums = together(self.sends)
        for (kind, backward), (count, elements) in sorted(sums.items(), key=lambda kv: kv[0][1]):
            when = "backward" if backward else "forward"
            what = kind if count == 1 else f"{kind}s"
            yield f"{when}: {count} {what} of {_count(elements)} elements in all"
        shapes = {leaf.path: leaf.shape for leaf in self.leaves}
        by_reason: dict[tuple[str, str, tuple[int, ...]], None] = {}
        for shown, paths in alike(list(self.whole)).items():
            for path in paths:
                by_reason[shown, self.whole[path], shapes[path]] = None
        for shown, reason, shape in by_reason:
            yield f"left whole: {shown} [{_sizes(shape)}]: {reason}"
        others = [x for x in self.leaves if x.path not in self.cuts and x.path not in self.whole]
        if others:
            number = sum(math.prod(x.shape) for x in others)
            unit = "element" if number == 1 else "elements"
            yield (
                f"whole, in no product, along whole dims: {len(others)} more, "
                f"{_count(number)} {unit}"
            )


def _count(n: int) -> str:
    return scaled_text(n, "").strip()


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))
