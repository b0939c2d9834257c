"""Adapters that are loaded and not in use, with the moments and averages of each.

An adapter has all of a train state that is trained: its factors, the parameters that are trained
beside them, their moments and the optimizer's counts of their updates, and their moving averages.
The step, the schedules that count it and the loss scale are the run's; rounding errors of rings are
carried from step to step of one adapter alone. What is not in use stays where the placement table
has it, sharded as in the state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxspeed.checkpoint.leaves import Arrays, SavedLeaf, as_state, saved_arrays
from jaxspeed.placement.owned import BY_MATRIX
from jaxspeed.train.program import Program
from jaxspeed.train_state.opt_layout import owner_of
from jaxspeed.train_state.state import TrainState

PREFIX = "adapters/"  # of the names of their arrays in a checkpoint: adapters/NAME/...


@dataclass(frozen=True)
class OtherAdapter:
    """An adapter that is not in use.

    Attributes:
      arrays: by their names in a state (`checkpoint/leaves.py`); parameters alone if it was never
        in use.
      params: the parameters that layers read, where these are cast from the updated ones.
    """

    arrays: Arrays
    params: Arrays

    @property
    def has_moments(self) -> bool:
        """Whether it was in use."""
        return not all(name.startswith("params/") for name in self.arrays)


def other_adapter(program: Program, values: Mapping[str, object]) -> OtherAdapter:
    """An adapter of these values by path, that was never trained here."""
    params, master = program.storage.placed(values)
    arrays = {f"params/{path}": x for path, x in (params | master).items()}
    return OtherAdapter(arrays, {path: params[path] for path in params.keys() & master.keys()})


def exchanged(
    program: Program, state: TrainState, other: OtherAdapter
) -> tuple[TrainState, OtherAdapter]:
    """(the state with another adapter, the one that was in use)."""
    names, saved = names_of_adapter(program), saved_arrays(program, state)
    both = [row.path for row in program.table if row.master and row.param]
    params = {path: state.params[path] for path in both}
    taken = OtherAdapter(
        {name: saved[name] for name in names},
        {path: x for path, x in params.items() if f"params/{path}" in names},
    )

    def with_arrays(arrays: Arrays) -> TrainState:
        return as_state(program, {**saved, **arrays}, {**params, **other.params})

    new = with_arrays(other.arrays)
    if not other.has_moments:
        rest = program.storage.rest(new.params, new.master)
        fresh = saved_arrays(program, replace(new, opt=rest["opt"], ema=rest["ema"]))
        new = with_arrays({name: fresh[name] for name in names})
    if new.ring_errors:
        zeros = jax.jit(_zeros, out_shardings=program.shardings.ring_errors)
        new = replace(new, ring_errors=zeros(new.ring_errors))
    return new, taken


def _zeros(arrays: Arrays) -> Arrays:
    return jax.tree.map(jnp.zeros_like, arrays)


def names_of_adapter(program: Program) -> frozenset[str]:
    """What an adapter has of a state, by name.

    Of the optimizer's leaves those of parameters, and the counts beside them: Adam's belongs to its
    moments, whose bias it corrects, and that of a schedule to the run.
    """
    rows = {row.path: row for row in program.table if row.leaf.trainable}
    places, of_moments = program.layout.places, set()
    owners = {path: owner_of(path, rows) for path in places}
    for path, owner in owners.items():
        if owner is not None:
            before = path.removesuffix(owner).partition(f"/{BY_MATRIX}/")[0]
            of_moments.add(before.rstrip("/").rpartition("/")[0])
    opt = [p for p, owner in owners.items() if owner or p.rpartition("/")[0] in of_moments]
    shapes = program.state
    return frozenset(
        [
            *(f"params/{path}" for path in rows),
            *(f"opt/{path}" for path in opt),
            *(f"ema/{path}" for path in shapes.ema),
        ]
    )


def leaves_of_others(
    leaves: Mapping[str, SavedLeaf], program: Program, have_moments: Mapping[str, bool]
) -> dict[str, SavedLeaf]:
    """The saved leaves of adapters that are not in use, from those of a state.

    `have_moments` says of each, by name, whether it has more than parameters.
    """
    names = names_of_adapter(program)
    return {
        f"{PREFIX}{adapter}/{name}": replace(
            leaf, parts={f"{PREFIX}{adapter}/{part}": of for part, of in leaf.parts.items()}
        )
        for adapter, trained in have_moments.items()
        for name, leaf in leaves.items()
        if name in names and (trained or name.startswith("params/"))
    }
