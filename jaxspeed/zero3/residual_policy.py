"""Residual policy of a unit: what is saved for backward and where; the rest is rematerialized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Function = Callable[..., Any]


@dataclass(frozen=True)
class ResidualPolicy:
    """Residuals that a unit saves besides its inputs, and where all of them are stored.

    `put(x, is_input)` moves a saved activation to its storage (host memory, or sharded over more
    devices), and `get(x, is_input)` moves it back.
    """

    policy: Function | None = None  # of jax.checkpoint; None: only inputs are saved
    every: int = 1  # number of consecutive units that are rematerialized together
    put: Callable[[Any, bool], Any] | None = None
    get: Callable[[Any, bool], Any] | None = None

    def rematerialized(self, fn: Function, in_loop: bool) -> Function:
        """`jax.checkpoint` of the function with the policy.

        In a loop, forward and backward are separate loops, which no compiler merges: CSE may stay.
        """
        return jax.checkpoint(fn, policy=self.policy, prevent_cse=not in_loop)

    def store(self, saved: Sequence[Any], kinds: Sequence["Residual"]) -> list[Any]:
        """Move the saved residuals to their storage."""
        return _moved(self.put, saved, kinds)

    def fetch(self, saved: Sequence[Any], kinds: Sequence["Residual"]) -> list[Any]:
        """Move the residuals back: the inverse of `store`."""
        return _moved(self.get, saved, kinds)


class Residual(NamedTuple):
    """Which kind of value a unit saves."""

    is_input: bool  # an unchanged input of the unit
    unshared: bool  # no other unit saves it


def _moved(
    move: Callable[[Any, bool], Any] | None, saved: Sequence[Any], kinds: Sequence[Residual]
) -> list[Any]:
    return [
        move(x, kind.is_input) if move and kind.unshared and _is_activation(x) else x
        for x, kind in zip(saved, kinds, strict=True)
    ]


def _is_activation(x: Any) -> bool:
    return x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.inexact)
