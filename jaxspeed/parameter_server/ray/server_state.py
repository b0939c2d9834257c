"""The state of one server process: that of its pieces of the parameters.

Its program is an ordinary one over a model of these pieces alone, so its state, update, precision,
skips, moving average and checkpoints are those of every other run.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.leaves import as_state, key_data, saved_arrays, saved_leaves
from jaxspeed.checkpoint.restore import donatable_arrays
from jaxspeed.errors import ConfigError
from jaxspeed.parameter_server.param_split import (
    AssignableParam,
    Piece,
    Splits,
    owned_by,
    split_by_bytes,
)
from jaxspeed.placement.precision import precision_of
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.table import PlacementTable, build_table, device_memory_kind
from jaxspeed.train.bucketed_update import bucket_paths, separated_update
from jaxspeed.train.program import Program
from jaxspeed.train.update import Update
from jaxspeed.train_state.opt_layout import OptLayout, owner_of
from jaxspeed.train_state.state import Arrays, TrainState, native_tree
from jaxspeed.user_models import Model
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.protocol import CachedModel

_VARIABLES = "variables/"


@dataclass(frozen=True)
class ServerLayout:
    """What each server reduces and publishes, and whether it stores only that."""

    servers: int
    splits: Splits
    # Whether the update of one parameter reads others: then every server stores and updates all of
    # them alike, from the gradients that all have reduced.
    mixed: bool
    buckets: Sequence[Sequence[str]]  # of an update in parts; () where it needs all gradients

    @classmethod
    def of(cls, program: Program, servers: int, synchronous: bool) -> "ServerLayout":
        """The layout for a program's parameters and optimizer.

        Raises:
          ConfigError: there are too many servers.
        """
        update = separated_update(program).full_update
        mixed = update.mixed() is not None
        moments = dict.fromkeys(program.table.rows, 0)
        for path, leaf in program.layout.places.items():
            owner = owner_of(path, program.table.rows)
            if owner is not None:
                moments[owner] += math.prod(leaf.shape) * leaf.placement.dtype.itemsize
        params = []
        for row in program.table:
            path, shape = row.path, row.leaf.shape
            element_bytes = sum(at.dtype.itemsize for at in (row.param, row.master) if at)
            nbytes = math.prod(shape) * element_bytes + moments[path]
            any_rows = mixed or not row.leaf.trainable or update.leaf(path, shape).elementwise
            params.append(AssignableParam(path, shape, nbytes, any_rows))
        splits = split_by_bytes(params, servers)
        idle = sum(not owned_by(splits, server) for server in range(servers))
        if idle:
            raise ConfigError(
                f"parallel.servers: {servers}, and {idle} of them would own nothing of this "
                f"model's {len(program.table)} parameters; {servers - idle} would do"
            )
        return cls(servers, splits, mixed, bucket_paths(program) if synchronous else ())

    def owned(self, server: int) -> dict[str, Piece]:
        return owned_by(self.splits, server)

    # -- the state, by the names of a checkpoint --------------------------------------------------

    def split_state(self, program: Program, state: TrainState) -> tuple[list[Arrays], Arrays]:
        """(each server's arrays by name; the model's variables by path, for the workers).

        Arrays of a parameter are split like the parameter; counts and rates are on all servers.
        """
        every = {name: np.asarray(key_data(x)) for name, x in saved_arrays(program, state).items()}
        variables = {n.removeprefix(_VARIABLES): x for n, x in every.items() if _is_variable(n)}
        rest = {name: x for name, x in every.items() if not _is_variable(name)}
        return [self._of_server(rest, server, program) for server in range(self.servers)], variables

    def _of_server(self, arrays: Arrays, server: int, program: Program) -> Arrays:
        if self.mixed:
            return arrays
        owned, of_server = self.owned(server), {}
        for name, value in arrays.items():
            owner = owner_of(name, program.table.rows)
            if owner is None:
                of_server[name] = value
            elif owner in owned:
                split = self.splits[owner]
                same = value.shape == split.shape
                of_server[name] = split.take(value, owned[owner]) if same else value
        return of_server

    def join_state(
        self, program: Program, by_server: Sequence[Arrays], variables: Arrays
    ) -> TrainState:
        """The state in this process, from the servers' arrays."""
        full: Arrays = {_VARIABLES + path: x for path, x in variables.items()}
        for name in dict.fromkeys(name for arrays in by_server for name in arrays):
            owner = owner_of(name, program.table.rows)
            if owner is None or self.mixed:
                full[name] = by_server[0][name]
                continue
            split = self.splits[owner]
            pieces = [by_server[piece.server][name] for piece in split.pieces]
            full[name] = split.join(pieces) if len(pieces) > 1 else pieces[0]
        return restored(program, full)


def _is_variable(name: str) -> bool:
    return name.startswith(_VARIABLES)


def variables_of(program: Program, seed: int) -> Arrays:
    """The variables of a fresh model, by path, as host arrays."""
    fresh = jax.jit(lambda seed: jax.tree.map(key_data, program.model.init(seed)[1]))(seed)
    return {path: np.asarray(x) for path, x in fresh.items()}


def restored(program: Program, arrays: Mapping[str, Any]) -> TrainState:
    """The state of these arrays by name, in buffers that updates can donate."""
    leaves = saved_leaves(program)
    read = {name: jnp.asarray(arrays[name]) for name in leaves}
    return as_state(program, *donatable_arrays(program, read, leaves))


@dataclass(frozen=True)
class ServerModel:
    """The model of a server: the pieces that it owns. It is never called."""

    model: Model
    table: PlacementTable  # of the parameters that are divided among servers
    splits: Splits
    owned: Mapping[str, Piece]
    weights: Weights | None = None  # `ray_resources` refuses them

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        leaves = {row.path: row.leaf for row in self.table}
        shapes = {path: self.splits[path].shape_of(piece) for path, piece in self.owned.items()}
        return tuple(
            replace(leaves[path], shape=shape, range=None) for path, shape in shapes.items()
        )

    @property
    def needs_values(self) -> str | None:
        return self.model.needs_values

    @property
    def variables(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {}

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        """The pieces of the same fresh model on every server."""
        values = self.table.in_rows(self.model.init(seed)[0])
        return {path: self.splits[path].take(values[path], p) for path, p in self.owned.items()}, {}

    def notes(self, compute_dtype: Any) -> Sequence[str]:
        return self.model.notes(compute_dtype)

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return self.model.native(flat, absent)

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        raise NotImplementedError("servers compute no loss")

    def mutated(self, bound: Any, params: Arrays) -> Arrays:
        raise NotImplementedError("servers compute no loss")

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        return {}  # `refuse_mixed_samples` refuses others

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> CachedModel | None:
        return None

    def cached_values(self, bound: Any) -> Arrays:
        raise NotImplementedError("servers compute no loss")

    def protect(self, bound: Any) -> None:
        raise NotImplementedError("servers compute no loss")

    def naming(self, bound: Any) -> AbstractContextManager[None]:
        raise NotImplementedError("servers compute no loss")


def program_of_server(
    program: Program, layout: ServerLayout, server: int, factor: float = 1
) -> Program:
    """A one-device program restricted to a server's pieces; gradients count times `factor`."""
    undivided = {path: replace(s, dim=None) for path, s in layout.splits.items()}
    every = {path: Piece(server, 0, 0) for path in layout.splits}
    splits, owned = (undivided, every) if layout.mixed else (layout.splits, layout.owned(server))
    model: Model = ServerModel(program.model, program.table, splits, owned)
    table = build_table(model.leaves, program.mesh, precision=precision_of(program.config))
    transform = program.optimizer.transform
    trained = {
        row.path: jax.ShapeDtypeStruct(row.leaf.shape, row.updated.dtype)
        for row in table
        if row.leaf.trainable
    }
    abstract = jax.eval_shape(transform.init, native_tree(model, trained))
    opt = OptLayout.of(table, abstract, device_memory_kind(program.mesh))
    table = table.with_state(opt.places, {})
    traced_loss = replace(program.traced_loss, model=model, table=table)
    values = {field.name: getattr(program.update, field.name) for field in fields(Update)}
    values |= {"table": table, "model": model, "layout": opt, "gradient_factor": factor}
    gradients = replace(program.gradients, traced_loss=traced_loss)
    return replace(program, traced_loss=traced_loss, gradients=gradients, update=Update(**values))
