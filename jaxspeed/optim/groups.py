"""Parameter groups by path pattern: learning-rate factor, weight decay, frozen leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxspeed.config.patterns import match
from jaxspeed.optim.norms_and_biases import is_norm_or_bias

Match = Callable[[str, str], bool]  # (pattern, path) -> whether it matches


class GroupLike(Protocol):
    """Interface of a parameter group: the config's class, and `PathGroup`."""

    @property
    def pattern(self) -> str: ...
    @property
    def lr_factor(self) -> float: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def frozen(self) -> bool: ...


class PathGroup(NamedTuple):
    """The settings of the leaves that match a pattern."""

    pattern: str
    lr_factor: float = 1.0  # times the schedule's learning rate
    weight_decay: float | None = None  # None: the optimizer's
    frozen: bool = False


@dataclass(frozen=True)
class PathRules:
    """Per-leaf optimizer settings, looked up by path. The first group that matches wins."""

    groups: Sequence[GroupLike] = ()
    exclude_norms_and_biases: bool = False
    match: Match = match

    def group(self, path: str) -> GroupLike | None:
        """The group that a leaf belongs to, if any."""
        return next((group for group in self.groups if self.match(group.pattern, path)), None)

    def lr_factor(self, path: str) -> float:
        """The learning-rate factor of a leaf; 0 if frozen."""
        group = self.group(path)
        if group is None:
            return 1.0
        return 0.0 if group.frozen else group.lr_factor

    def weight_decay(self, path: str, default: float) -> float:
        """The weight decay of a leaf.

        The exclusion of norms and biases has priority over groups, since a group that matches a
        layer is not meant to include the layer's biases.
        """
        if self.exclude_norms_and_biases and is_norm_or_bias(path):
            return 0.0
        group = self.group(path)
        return default if group is None or group.weight_decay is None else group.weight_decay

    def frozen(self, path: str) -> bool:
        """Whether a leaf keeps its initial value."""
        group = self.group(path)
        return group is not None and group.frozen
