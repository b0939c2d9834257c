"""The state of a run between its servers and one process: taken apart, and put together again.

Arrays go by the names that checkpoints have. What belongs to a parameter is cut as its owner's
piece is; counts and rates are the same on all servers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspeed.checkpoint.leaves import as_state, key_data, saved_arrays, saved_leaves
from jaxspeed.checkpoint.restore import donatable_arrays
from jaxspeed.objective.train_state import Arrays, TrainState, owner_of
from jaxspeed.parameter_server.ray.ownership import Pieces
from jaxspeed.parameter_server.ray.worker_functions import joined
from jaxspeed.train.program import Program

_VARIABLES = "variables/"


def taken_apart(
    program: Program, state: TrainState, shares: Sequence[Pieces]
) -> tuple[list[Arrays], Arrays]:
    """(what each server takes, by name; the model's variables by path, which workers take)."""
    every = {name: np.asarray(key_data(x)) for name, x in saved_arrays(program, state).items()}
    variables = {n.removeprefix(_VARIABLES): x for n, x in every.items() if _is_variable(n)}
    rest = {name: x for name, x in every.items() if not _is_variable(name)}
    return [_of_server(rest, pieces, program) for pieces in shares], variables


def _is_variable(name: str) -> bool:
    return name.startswith(_VARIABLES)


def variables_of(program: Program, seed: int) -> Arrays:
    """The variables of a fresh model, by path, as they travel."""
    fresh = jax.jit(lambda seed: jax.tree.map(key_data, program.model.init(seed)[1]))(seed)
    return {path: np.asarray(x) for path, x in fresh.items()}


def _of_server(arrays: Arrays, pieces: Pieces, program: Program) -> Arrays:
    found: Arrays = {}
    for name, value in arrays.items():
        owner = owner_of(name, program.table.rows)
        if owner is None:
            found[name] = value
        elif owner in pieces:
            piece = pieces[owner]
            found[name] = piece.of(value) if value.shape == piece.shape else value
    return found


def put_together(
    program: Program, given: Sequence[Arrays], shares: Sequence[Pieces], variables: Arrays
) -> TrainState:
    """The state of one process, of what the servers gave."""
    whole: Arrays = {_VARIABLES + path: x for path, x in variables.items()}
    for name in dict.fromkeys(name for arrays in given for name in arrays):
        owner = owner_of(name, program.table.rows)
        if owner is None:
            whole[name] = given[0][name]
            continue
        has = [i for i, arrays in enumerate(given) if name in arrays]
        parts = [{owner: given[i][name]} for i in has]
        whole[name] = joined([shares[i] for i in has], parts)[owner]
    leaves = saved_leaves(program)
    read = {name: jnp.asarray(whole[name]) for name in leaves}
    kept, params = donatable_arrays(program, read, leaves)
    return as_state(program, kept, params)
