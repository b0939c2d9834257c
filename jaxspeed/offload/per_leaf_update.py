"""Per-leaf optimizer updates, extracted from the traced update of all parameters.

State in host memory is updated one parameter at a time, which is valid only if the update of one
reads no other. The jaxpr proves it: the parameters on which each equation depends are propagated
through the program. Values that depend on none (counts, learning rates, bias corrections) are
shared and evaluated once.

Where a parameter's update is element-wise, the same equations also run on any slice of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from jaxspeed.jaxpr.evaluate import evaluate, run_equation
from jaxspeed.jaxpr.primitives import ELEMENTWISE
from jaxspeed.jaxpr.slicing import sub_jaxpr
from jaxspeed.jaxpr.traverse import is_var


class Slot(NamedTuple):
    """One input or output of an update."""

    role: str  # grad, opt or param
    path: str
    owner: str | None  # the parameter to which it belongs; None: shared


class LeafProgram(NamedTuple):
    """The update of one parameter as a jaxpr; its outputs are its state, then the parameter."""

    jaxpr: Any
    inputs: Sequence[Slot]  # followed by the shared values
    shared: Sequence[Any]  # variables
    outputs: Sequence[Slot]
    elementwise: bool

    def on_slice(self, shape: tuple[int, ...], full: tuple[int, ...]) -> "LeafProgram":
        """The same operations on a slice of the parameter."""
        if shape == full:
            return self
        assert self.elementwise
        eqns = [_resized(eqn, shape, full) for eqn in self.jaxpr.eqns]
        return self._replace(jaxpr=self.jaxpr.replace(eqns=eqns))


@dataclass(frozen=True)
class Separated:
    """A traced update of all parameters, with one slot per input and output."""

    jaxpr: Any
    consts: Sequence[Any]
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]

    @cached_property
    def owners(self) -> dict[Any, frozenset[str]]:
        """Parameters on which each variable depends."""
        none: frozenset[str] = frozenset()
        owners = dict.fromkeys(self.jaxpr.constvars, none)
        for var, slot in zip(self.jaxpr.invars, self.inputs, strict=True):
            owners[var] = frozenset([slot.owner]) if slot.owner else none
        for eqn in self.jaxpr.eqns:
            sets = {owners[v] for v in eqn.invars if is_var(v)}
            union = sets.pop() if len(sets) == 1 else none.union(*sets)
            owners.update(dict.fromkeys(eqn.outvars, union))
        return owners

    def mixed(self) -> tuple[Slot, frozenset[str]] | None:
        """An output that depends on parameters other than its owner, and those; or None."""
        for var, slot in zip(self.jaxpr.outvars, self.outputs, strict=True):
            others = self._owners(var) - {slot.owner}
            if others:
                return slot, others
        return None

    def _owners(self, atom: Any) -> frozenset[str]:
        return self.owners[atom] if is_var(atom) else frozenset()

    @cached_property
    def _producers(self) -> dict[Any, int]:
        return {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

    @cached_property
    def _by_owner(self) -> dict[str | None, list[tuple[Any, Slot]]]:
        by_owner: dict[str | None, list[tuple[Any, Slot]]] = {}
        for var, slot in zip(self.jaxpr.outvars, self.outputs, strict=True):
            by_owner.setdefault(slot.owner, []).append((var, slot))
        return by_owner

    def leaf(self, owner: str, shape: tuple[int, ...]) -> LeafProgram:
        """The update of one parameter of this shape."""
        outs = self._by_owner[owner]
        slots = dict(zip(self.jaxpr.invars, self.inputs, strict=True))
        numbers: set[int] = set()
        inputs: dict[Any, Slot] = {}
        shared: dict[Any, None] = {}
        pending = [var for var, _ in outs if is_var(var)]
        while pending:
            var = pending.pop()
            number = self._producers.get(var)
            is_of_leaf = self.owners[var] or (shape and var.aval.shape == shape)
            if number is None and self.owners[var]:
                inputs[var] = slots[var]
            elif number is None or not is_of_leaf:
                shared[var] = None
            elif number not in numbers:
                numbers.add(number)
                pending += [v for v in self.jaxpr.eqns[number].invars if is_var(v)]
        eqns = [self.jaxpr.eqns[number] for number in sorted(numbers)]
        elementwise = bool(shape) and all(_is_elementwise(eqn, shape) for eqn in eqns)
        elementwise &= all(v.aval.shape == shape for v in inputs)
        elementwise &= all(v.aval.shape == shape for v, _ in outs)
        jaxpr = sub_jaxpr(self.jaxpr, eqns, [*inputs, *shared], [var for var, _ in outs])
        return LeafProgram(
            jaxpr, list(inputs.values()), list(shared), [s for _, s in outs], elementwise
        )

    def shared(self, values: Sequence[Any]) -> "Shared":
        """The shared values, from the values of the inputs (None for inputs of one parameter)."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env |= {
            var: value
            for var, value in zip(self.jaxpr.invars, values, strict=True)
            if value is not None
        }
        return Shared(self, env)


class Shared:
    """Shared values of an update, evaluated lazily and once."""

    def __init__(self, of: Separated, env: dict[Any, Any]) -> None:
        self._of, self._env = of, env

    def __call__(self, var: Any) -> Any:
        if not is_var(var):
            return var.val
        if var not in self._env:
            eqn = self._of.jaxpr.eqns[self._of._producers[var]]
            values = run_equation(self._of.jaxpr, eqn, self)
            self._env.update(zip(eqn.outvars, values, strict=True))
        return self._env[var]

    def outputs(self) -> dict[str, Any]:
        """The updated optimizer leaves that belong to no parameter, by path."""
        return {slot.path: self(var) for var, slot in self._of._by_owner.get(None, [])}


def separate(
    update: Callable[..., Any],
    args: Sequence[Any],
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
) -> Separated:
    """Trace `update(*args)` on shapes; one slot per leaf of `args` and of the result."""
    closed = jax.make_jaxpr(update)(*args)
    flat = jax.make_jaxpr(lambda *leaves: evaluate(closed.jaxpr, closed.consts, leaves))(
        *jax.tree.leaves(args)
    )
    return Separated(flat.jaxpr, flat.consts, inputs, outputs)


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    shapes = {v.aval.shape for v in eqn.invars}
    if eqn.primitive.name == "broadcast_in_dim":
        return shapes == {()} and eqn.params["shape"] == shape
    return (
        eqn.primitive.name in ELEMENTWISE
        and shapes <= {(), shape}
        and all(v.aval.shape == shape for v in eqn.outvars)
    )


def _resized(eqn: Any, shape: tuple[int, ...], full: tuple[int, ...]) -> Any:
    if eqn.primitive.name != "broadcast_in_dim":
        return eqn
    assert eqn.params["shape"] == full
    return eqn.replace(params={**eqn.params, "shape": shape})
