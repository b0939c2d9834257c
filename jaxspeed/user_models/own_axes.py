"""Axis names that a model brings: of collectives, and of sharding constraints.

`jax.lax.pmean(x, "batch")` and `BatchNorm(axis_name="batch")` mean the entire micro-batch. The loss
is one program for all devices, so such an axis has size 1. Constraints over mesh axes that this
library does not have (`fsdp`, `tp`) are dropped: they change no number, and activations are sharded
by the config.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
from jax.sharding import NamedSharding

from jaxspeed.axes import axis_names
from jaxspeed.errors import ModelError

_COLLECTIVE = re.compile(r"unbound axis name: (\w+)")
# Of a constraint by a PartitionSpec, with another mesh in context or with none.
_CONSTRAINT = re.compile(r"Resource axis: \w+ of .* is not found in mesh|requires a non-empty mesh")
_MAPPED = "mapped output"
_lock = RLock()


@jax.tree_util.register_static
@dataclass(frozen=True)
class OwnAxes:
    """What a model brought along."""

    collective: tuple[str, ...]  # axes of its collectives
    constraints: tuple[str, ...]  # shardings to which it constrains, as text


def with_own_axes(function: Callable[..., Any]) -> Callable[..., tuple[Any, OwnAxes]]:
    """The function of arrays, which knows the axis names of its model: (its result, the names).

    An unbound name is an error in JAX, after which the function runs again.
    """

    def call(*args: Any) -> tuple[Any, OwnAxes]:
        names: tuple[str, ...] = ()
        while True:
            inside = function
            for name in names:
                inside = _over_one(inside, name)
            try:
                with _own_constraints_dropped() as dropped:
                    result = inside(*args)
            except (ModelError, NameError) as error:
                cause = error.__cause__ if isinstance(error, ModelError) else error
                match = _COLLECTIVE.search(str(cause))
                if not match or match[1] in names:
                    raise
                names = (*names, match[1])
            else:
                return result, OwnAxes(names, tuple(sorted(dropped)))

    return call


def _over_one(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function inside an axis of size 1."""

    def over(out_axes: Any, args: Any) -> Any:
        mapped = jax.vmap(function, in_axes=None, out_axes=out_axes, axis_size=1, axis_name=name)
        return mapped(*args)

    def call(*args: Any) -> Any:
        try:
            return over(None, args)  # no array gets a dim for the axis
        except ValueError as error:
            if _MAPPED not in str(error):
                raise
        return jax.tree.map(lambda x: x[0], over(0, args))  # axis_index, all_gather

    return call


@contextlib.contextmanager
def _own_constraints_dropped() -> Iterator[set[str]]:
    """Context in which constraints on other meshes do nothing; yields what they asked for.

    Names of a parameter's dims constrain nothing either, whose axes this mesh may have: `unbox` is
    also called for an array that is not reshaped yet (DenseGeneral, flax 0.12.12). These are
    replaced: a constraint on another mesh is an error before it is an equation of a trace.
    """
    original = jax.lax.with_sharding_constraint
    dropped: set[str] = set()

    def constrained(x: Any, shardings: Any) -> Any:
        user_shardings = [
            at
            for at in jax.tree.leaves(shardings)
            if isinstance(at, NamedSharding) and not {*at.mesh.axis_names} <= {*axis_names()}
        ]
        if not user_shardings:
            try:
                return original(x, shardings)
            except (ValueError, RuntimeError) as error:
                if not _CONSTRAINT.search(str(error)):
                    raise
        dropped.add(str(user_shardings[0].spec if user_shardings else shardings))
        return x

    def unboxed(box: Any, apply_constraint: bool = True) -> Any:
        return box.value

    with (
        _lock,
        mock.patch.object(jax.lax, "with_sharding_constraint", constrained),
        mock.patch.object(nn.Partitioned, "unbox", unboxed),
        mock.patch.object(nn.LogicallyPartitioned, "unbox", unboxed),
    ):
        yield dropped
