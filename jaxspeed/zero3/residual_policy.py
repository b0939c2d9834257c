"""Residual policy of a unit: what is saved for its backward pass; the rest is rematerialized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Function = Callable[..., Any]


@dataclass(frozen=True)
class ResidualPolicy:
    """What is kept of a unit, beside what it was handed, and how all of it waits.

    `put` and `get` are the way of a kept activation to where it waits, and back: in host memory, or
    cut over more devices. They are told whether it is one that the unit was handed.
    """

    policy: Function | None = None  # of jax.checkpoint; None: nothing else is kept
    every: int = 1  # so many units, one after the other, are made again together
    put: Callable[[Any, bool], Any] | None = None
    get: Callable[[Any, bool], Any] | None = None

    def again(self, fn: Function, in_loop: bool) -> Function:
        """The function, of whose inner values only those of the policy are kept.

        In a loop the two passes are loops of their own, which no compiler makes one of.
        """
        return jax.checkpoint(fn, policy=self.policy, prevent_cse=not in_loop)

    def store(self, kept: Sequence[Any], waiting: Sequence["Waiting"]) -> list[Any]:
        """What waits for the backward pass."""
        return _moved(self.put, kept, waiting)

    def fetch(self, kept: Sequence[Any], waiting: Sequence["Waiting"]) -> list[Any]:
        """What `store` was given."""
        return _moved(self.get, kept, waiting)


class Waiting(NamedTuple):
    """What is to be known of a value that a unit keeps."""

    handed: bool  # it is an input, as it came
    own: bool  # no other unit keeps it too


def _moved(
    move: Callable[[Any, bool], Any] | None, kept: Sequence[Any], waiting: Sequence[Waiting]
) -> list[Any]:
    return [
        move(x, how.handed) if move and how.own and _is_activation(x) else x
        for x, how in zip(kept, waiting, strict=True)
    ]


def _is_activation(x: Any) -> bool:
    return x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.inexact)
