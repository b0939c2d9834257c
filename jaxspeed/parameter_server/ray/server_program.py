"""The program of one server: that of its rows of the parameters.

It is an ordinary Program over a model of these rows alone, so its state, update, precision, skips,
moving average and checkpoints are those of every other run. Only the global norm is not computed
locally: each server sums the squares of its gradients, and all receive all sums.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax

from jaxspeed.errors import ConfigError
from jaxspeed.objective import Model
from jaxspeed.objective.precision import precision_of
from jaxspeed.objective.train_state import Arrays, OptLayout, native_tree, owner_of
from jaxspeed.offload import Separated
from jaxspeed.offload.offloaded_update import StreamedUpdate
from jaxspeed.parameter_server.ray.ownership import (
    AssignableParam,
    OwnedParams,
    OwnedRows,
    assign_params,
)
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.table import build_table, device_memory_kind
from jaxspeed.train.program import Program
from jaxspeed.train.update import Update


def assign_to_servers(program: Program, servers: int) -> list[dict[str, OwnedRows]]:
    """The parameters of each server.

    Raises:
      ConfigError: the update of one parameter reads another's, or there are too many servers.
    """
    table, model, layout = program.table, program.model, program.layout
    transform = program.optimizer.transform
    update = StreamedUpdate(table, model, layout, transform, False, None).full_update
    _refuse_mixed(update)
    assigned = assign_params(_parameters(program, update), servers)
    idle = sum(not owned for owned in assigned)
    if idle:
        raise ConfigError(
            f"parallel.servers: {servers}, and {idle} of them would own nothing of this model's "
            f"{len(table)} parameters; {servers - idle} would do"
        )
    return assigned


def _refuse_mixed(update: Separated) -> None:
    mixed = update.mixed()
    if mixed is None:
        return
    slot, others = mixed
    raise ConfigError(
        f"parallel.servers: the optimizer's update of {slot.owner or slot.path} reads other "
        f"parameters ({', '.join(sorted(others)[:3])}), which another server may own. Clipping by "
        "the global norm is gradient_clipping; what else mixes parameters has to be left out"
    )


def _parameters(program: Program, update: Separated) -> list[AssignableParam]:
    """The parameters to assign, each with the bytes of its arrays on its owner."""
    table = program.table
    moments = dict.fromkeys(table.rows, 0)
    for path, (shape, _, at) in program.layout.places.items():
        owner = owner_of(path, table.rows)
        if owner is not None:
            moments[owner] += math.prod(shape) * at.dtype.itemsize
    found = []
    for row in table:
        each = sum(at.dtype.itemsize for at in (row.param, row.master) if at)
        leaf = row.leaf
        elementwise = not leaf.trainable or update.leaf(leaf.path, leaf.shape).elementwise
        found.append(
            AssignableParam(
                leaf.path,
                leaf.shape,
                math.prod(leaf.shape) * each + moments[leaf.path],
                elementwise,
            )
        )
    return found


@dataclass(frozen=True)
class ServerModel:
    """The model of a server: the parameters that it owns. It is never called."""

    model: Model
    owned: OwnedParams

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        found = {leaf.path: leaf for leaf in self.model.leaves}
        return tuple(replace(found[p], shape=x.shard_shape) for p, x in self.owned.items())

    @property
    def variables(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {}

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        """The rows of the same fresh model on every server."""
        values, _ = self.model.init(seed)
        return {path: rows.of(values[path]) for path, rows in self.owned.items()}, {}

    def notes(self, compute_dtype: Any) -> Sequence[str]:
        return self.model.notes(compute_dtype)

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return self.model.native(flat, absent)

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        raise NotImplementedError("servers compute no loss")

    def mutated(self, bound: Any, params: Arrays) -> Arrays:
        raise NotImplementedError("servers compute no loss")

    def protect(self, bound: Any) -> None:
        raise NotImplementedError("servers compute no loss")

    def naming(self, bound: Any) -> AbstractContextManager[None]:
        raise NotImplementedError("servers compute no loss")


@dataclass(frozen=True)
class ServerUpdate(Update):
    """The update of a server, with the global norm over all servers given."""

    norm: Any = None

    def _norm(self, grads: Arrays) -> jax.Array:
        assert self.norm is not None
        norm: jax.Array = self.norm
        return norm


def program_of_server(program: Program, owned: OwnedParams, factor: float = 1) -> Program:
    """A one-device program restricted to a server's parameters; gradients count times `factor`."""
    model: Model = ServerModel(program.model, owned)
    table = build_table(model.leaves, program.mesh, precision=precision_of(program.config))
    transform = program.optimizer.transform
    trained = {
        row.path: jax.ShapeDtypeStruct(row.leaf.shape, row.updated.dtype)
        for row in table
        if row.leaf.trainable
    }
    abstract = jax.eval_shape(transform.init, native_tree(model, trained))
    layout = OptLayout.of(table, abstract, device_memory_kind(program.mesh))
    table = table.with_state(layout.places, {})
    objective = replace(program.objective, model=model, table=table)
    given = {field.name: getattr(program.update, field.name) for field in fields(Update)}
    given |= {"table": table, "model": model, "layout": layout, "gradient_factor": factor}
    gradients = replace(program.gradients, objective=objective)
    update = ServerUpdate(**given)
    return replace(program, objective=objective, gradients=gradients, update=update)
