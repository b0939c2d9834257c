"""State of a run between its servers and this process: split by owner, and joined again.

Arrays have their checkpoint names. Arrays of a parameter are partitioned like the parameter; counts
and rates are the same on all servers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.leaves import as_state, key_data, saved_arrays, saved_leaves
from jaxspeed.checkpoint.restore import donatable_arrays
from jaxspeed.objective.train_state import Arrays, TrainState, owner_of
from jaxspeed.parameter_server.ray.ownership import OwnedParams
from jaxspeed.parameter_server.ray.worker_functions import join_rows
from jaxspeed.train.program import Program

_VARIABLES = "variables/"


def split_state(
    program: Program, state: TrainState, shares: Sequence[OwnedParams]
) -> tuple[list[Arrays], Arrays]:
    """(each server's arrays by name; the model's variables by path, for the workers)."""
    every = {name: np.asarray(key_data(x)) for name, x in saved_arrays(program, state).items()}
    variables = {n.removeprefix(_VARIABLES): x for n, x in every.items() if _is_variable(n)}
    rest = {name: x for name, x in every.items() if not _is_variable(name)}
    return [_of_server(rest, owned, program) for owned in shares], variables


def _is_variable(name: str) -> bool:
    return name.startswith(_VARIABLES)


def variables_of(program: Program, seed: int) -> Arrays:
    """The variables of a fresh model, by path, as host arrays."""
    fresh = jax.jit(lambda seed: jax.tree.map(key_data, program.model.init(seed)[1]))(seed)
    return {path: np.asarray(x) for path, x in fresh.items()}


def _of_server(arrays: Arrays, owned: OwnedParams, program: Program) -> Arrays:
    found: Arrays = {}
    for name, value in arrays.items():
        owner = owner_of(name, program.table.rows)
        if owner is None:
            found[name] = value
        elif owner in owned:
            rows = owned[owner]
            found[name] = rows.of(value) if value.shape == rows.shape else value
    return found


def join_state(
    program: Program, given: Sequence[Arrays], shares: Sequence[OwnedParams], variables: Arrays
) -> TrainState:
    """The state in this process, from the servers' arrays."""
    full: Arrays = {_VARIABLES + path: x for path, x in variables.items()}
    for name in dict.fromkeys(name for arrays in given for name in arrays):
        owner = owner_of(name, program.table.rows)
        if owner is None:
            full[name] = given[0][name]
            continue
        has = [i for i, arrays in enumerate(given) if name in arrays]
        parts = [{owner: given[i][name]} for i in has]
        full[name] = join_rows([shares[i] for i in has], parts)[owner]
    leaves = saved_leaves(program)
    read = {name: jnp.asarray(full[name]) for name in leaves}
    saved, params = donatable_arrays(program, read, leaves)
    return as_state(program, saved, params)
