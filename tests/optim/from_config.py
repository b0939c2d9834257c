"""Optimizers, schedules and loss scales as a config's keys give them, without a model."""

from collections.abc import Iterable
from typing import Any

from jaxspeed.config import Config
from jaxspeed.placement import Leaf
from jaxspeed.train_state.optimizer import RunOptimizer, optimizer_of


def built(
    type_: str = "SGD",
    params: dict[str, Any] | None = None,
    leaves: Iterable[Leaf] = (),
    **sections: Any,
) -> RunOptimizer:
    """The optimizer of a config with this section; `groups` and the like go into the section."""
    own = {"groups", "exclude_norms_and_biases", "ema_decay"} & sections.keys()
    section = {"type": type_, "params": params or {}, **{name: sections.pop(name) for name in own}}
    return optimizer_of(Config(optimizer=section, **sections), None, {x.path: x for x in leaves})
