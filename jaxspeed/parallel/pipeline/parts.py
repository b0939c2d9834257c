"""A traced loss, cut at the scan over its stacked blocks: before, the stack, after.

    before(inputs) -> carry          what the first block reads: the embedding
    block(carry, layer) -> carry     one trip of the scan
    after(inputs, carry) -> outs     what is made of what the last block gave: head and loss

What a block reads beside its own weights and the carry (rotations, segments, keys of dropout) is
computed from the inputs again wherever it is needed, and so is what `after` reads of `before`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from jaxspeed.errors import ModelError
from jaxspeed.placement.units.jaxprs import INLINED, as_function, is_var, open_jaxpr, part
from jaxspeed.placement.units.slicing import consts_and_carry

CASTS = ("convert_element_type", "copy")


@dataclass(frozen=True)
class Weights:
    """A stacked parameter as the scan reads it: the parameter's place, and the casts on the way."""

    place: int
    casts: tuple[Any, ...] = ()

    def cast(self, x: jax.Array) -> jax.Array:
        for eqn in self.casts:
            x = eqn.primitive.bind(x, **eqn.params)
        return x


@dataclass(frozen=True)
class Parts:
    """The three parts, as programs of the same inputs: the constants, then the loss's arguments."""

    constants: Sequence[Any]
    inputs: Sequence[Any]
    before: Any
    after: Any  # its inputs are followed by the carry
    context: Any  # some inputs -> what every block reads, and one row a layer of what each reads
    context_reads: Sequence[int]  # which inputs those are
    scan: Any
    layers: int
    reads: tuple[Weights | None, ...]  # for each array scanned over; None: of the context

    @property
    def shared(self) -> int:
        """How many arrays every block reads."""
        return consts_and_carry(self.scan)[0]

    @property
    def carry(self) -> list[jax.ShapeDtypeStruct]:
        consts, carried = consts_and_carry(self.scan)
        atoms = self.scan.invars[consts : consts + carried]
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in atoms]

    def stage(
        self,
        rows: int,
        weights: Mapping[int, Any],
        context: Sequence[Any],
        first: Any,
        carry: Sequence[Any],
        *,
        padded: bool = False,
        recompute: bool = False,
    ) -> list[Any]:
        """`rows` blocks, from layer `first` on.

        `weights` are the stacked parameters by their place among the inputs, [rows, ...], and
        `context` the inputs that `context_reads` names. Where the stack is `padded`, a block past
        the last layer is none: the carry goes through.
        """
        values = as_function(self.context)(*context)
        shared, of_layers = values[: self.shared], iter(values[self.shared :])
        numbers = first + jnp.arange(rows)
        within = jnp.minimum(numbers, self.layers - 1)
        xs = [next(of_layers)[within] if r is None else weights[r.place] for r in self.reads]

        def block(carry: list[Any], layer: tuple[Any, list[Any]]) -> tuple[list[Any], None]:
            number, slices = layer
            if not padded:
                return self._block(shared, carry, slices), None
            real = number < self.layers
            # Selected on the way in as well, so that no gradient of what is no layer comes
            # through, be it NaN.
            into = [jnp.where(real, x, jax.lax.stop_gradient(x)) for x in carry]
            outs = self._block(shared, into, slices)
            return [jnp.where(real, a, b) for a, b in zip(outs, carry, strict=True)], None

        step = jax.checkpoint(block, prevent_cse=False) if recompute else block
        unroll = min(int(self.scan.params["unroll"]), rows)
        return jax.lax.scan(step, list(carry), (numbers, xs), unroll=unroll)[0]

    def _block(
        self, shared: Sequence[Any], carry: Sequence[Any], layer: Sequence[Any]
    ) -> list[Any]:
        """One block: the carry after it."""
        cast = [x if r is None else r.cast(x) for r, x in zip(self.reads, layer, strict=True)]
        jaxpr, consts = open_jaxpr(self.scan.params["jaxpr"])
        block = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, list(consts)))
        return list(block(*shared, *carry, *cast)[: len(carry)])


def parts_of(closed: Any, stack: Mapping[Any, str]) -> Parts:
    """Cut a traced loss at the scan over the stacked parameters `stack` (variable -> path).

    Raises:
      ModelError: where the program does not fall into the three parts, with the reason.
    """
    jaxpr = _opened(closed.jaxpr, set(stack))
    stacked, casts = _casts_of(jaxpr, stack)
    scans = [e for e in jaxpr.eqns if any(is_var(v) and v in stacked for v in e.invars)]
    scans = [e for e in scans if e not in casts]
    scan = _the_scan(scans, stacked, stack)
    num_consts, num_carry = consts_and_carry(scan)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    place = {v: i for i, v in enumerate(inputs)}
    xs = scan.invars[num_consts + num_carry :]
    reads = tuple(
        Weights(place[stacked[v][0]], stacked[v][1]) if is_var(v) and v in stacked else None
        for v in xs
    )
    eqns = [e for e in jaxpr.eqns if e is not scan and e not in casts]
    rows = [v for v, read in zip(xs, reads, strict=True) if read is None]
    carried, per_layer = scan.outvars[:num_carry], set(scan.outvars[num_carry:])
    after = _slice(jaxpr, eqns, [*inputs, *carried], list(jaxpr.outvars))
    context = _slice(jaxpr, eqns, inputs, [*scan.invars[:num_consts], *rows])
    read = {v for e in context.eqns for v in e.invars if is_var(v)}
    read |= {v for v in context.outvars if is_var(v)}
    of_context = [i for i, v in enumerate(inputs) if v in read]
    _check_after(after, per_layer, inputs, jaxpr)
    return Parts(
        closed.consts,
        inputs,
        _slice(jaxpr, eqns, inputs, scan.invars[num_consts : num_consts + num_carry]),
        after,
        context.replace(invars=[inputs[i] for i in of_context]),
        of_context,
        scan,
        scan.params["length"],
        reads,
    )


def _slice(jaxpr: Any, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """The part of a program that computes `outputs` from `inputs`."""
    known = set(inputs)
    live = {v for v in outputs if is_var(v) and v not in known}
    kept = []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if is_var(v) and v not in known)
    return part(jaxpr, kept[::-1], inputs, outputs)


def _opened(jaxpr: Any, stack: set[Any]) -> Any:
    """The program with those calls inlined that the stack goes through on its way to its scan."""
    while True:
        call = next(
            (
                e
                for e in jaxpr.eqns
                if e.primitive.name in INLINED and any(is_var(v) and v in stack for v in e.invars)
            ),
            None,
        )
        if call is None:
            return jaxpr
        jaxpr = _inlined(jaxpr, call)


def _inlined(jaxpr: Any, call: Any) -> Any:
    """The program with one call replaced by what it calls."""
    inner, consts = open_jaxpr(call.params["jaxpr"])
    if len(consts):  # closed over arrays: JAX hoists them, so there are none
        raise ModelError("the call that holds the model's blocks keeps constants of its own")
    names: dict[Any, Any] = dict(zip(inner.invars, call.invars, strict=True))

    def outer(atom: Any) -> Any:
        return names.get(atom, atom) if is_var(atom) else atom

    passed = {out: outer(v) for v, out in zip(inner.outvars, call.outvars, strict=True)}
    prefix = call.source_info.name_stack
    eqns = []
    for eqn in inner.eqns:
        info = eqn.source_info.replace(name_stack=prefix + eqn.source_info.name_stack)
        eqns.append(eqn.replace(invars=[outer(v) for v in eqn.invars], source_info=info))

    def renamed(eqn: Any) -> Any:
        return eqn.replace(
            invars=[passed.get(v, v) if is_var(v) else v for v in eqn.invars],
        )

    at = next(i for i, e in enumerate(jaxpr.eqns) if e is call)
    all_eqns = [*jaxpr.eqns[:at], *eqns, *map(renamed, jaxpr.eqns[at + 1 :])]
    outvars = [passed.get(v, v) if is_var(v) else v for v in jaxpr.outvars]
    return jaxpr.replace(eqns=all_eqns, outvars=outvars)


def _casts_of(jaxpr: Any, stack: Mapping[Any, str]) -> tuple[dict[Any, Any], list[Any]]:
    """{variable: (the parameter, casts)} of stacked parameters and their casts; and those casts."""
    found: dict[Any, Any] = {v: (v, ()) for v in stack}
    casts = []
    for eqn in jaxpr.eqns:
        v = eqn.invars[0] if len(eqn.invars) == 1 else None
        if eqn.primitive.name in CASTS and v is not None and is_var(v) and v in found:
            root, before = found[v]
            found[eqn.outvars[0]] = (root, (*before, eqn))
            casts.append(eqn)
    return found, casts


def _the_scan(eqns: Sequence[Any], stacked: Mapping[Any, Any], stack: Mapping[Any, str]) -> Any:
    """The one equation that reads the stack, if it is a scan over it."""
    names = ", ".join(list(stack.values())[:3])
    if not eqns:
        raise ModelError(f"the loss does not read the stacked blocks ({names}, ...)")
    for eqn in eqns:
        if eqn.primitive.name != "scan":
            raise ModelError(
                "mesh.pipe cuts the stacked blocks where one scan walks along them, and "
                f"{next(stack[stacked[v][0]] for v in eqn.invars if is_var(v) and v in stacked)} "
                f"is read by a {eqn.primitive.name} outside of it"
            )
    if len(eqns) > 1:
        raise ModelError(f"the stacked blocks ({names}, ...) are walked along {len(eqns)} times")
    (scan,) = eqns
    first_xs = sum(consts_and_carry(scan))
    if any(is_var(v) and v in stacked for v in scan.invars[:first_xs]):
        raise ModelError("each block reads the weights of all blocks: they cannot be cut apart")
    if scan.params["reverse"]:
        raise ModelError("the scan over the stacked blocks is a reverse one; turn the stack round")
    return scan


def _check_after(after: Any, per_layer: set[Any], inputs: Sequence[Any], jaxpr: Any) -> None:
    """What each block gives beside the carry must not be read."""
    read = {v for e in after.eqns for v in e.invars if is_var(v)} | set(
        v for v in after.outvars if is_var(v)
    )
    if read & per_layer:
        raise ModelError(
            "the loss reads something that every block hands out beside its activations (a loss of "
            "its own, new statistics): let it travel with the activations, as a part of what the "
            "scan carries"
        )
