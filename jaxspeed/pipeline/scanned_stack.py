"""Blocks with stacked parameters: the body of the one scan over them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.primitives import CASTS
from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.jaxpr.traverse import bodies, consts_and_carry, is_var
from jaxspeed.pipeline.repeated_blocks import Blocks, Rows, Weights


def scanned(jaxpr: Any, stack: Mapping[Any, str]) -> Blocks:
    """The blocks of a program that scans along the stacked parameters `stack`."""
    stacked, casts = _casts_of(jaxpr, stack)
    readers = [e for e in jaxpr.eqns if any(is_var(v) and v in stacked for v in e.invars)]
    scan = _the_scan([e for e in readers if e not in casts], stacked, stack)
    (body,) = bodies(scan)
    assert not len(body.consts), "constants of a scan are arguments of it"
    first_xs = body.num_consts + body.num_carry
    others = tuple(e for e in jaxpr.eqns if e is not scan and e not in casts)
    if read_by(jaxpr.replace(eqns=list(others))) & set(scan.outvars[body.num_carry :]):
        raise ModelError(
            "the loss reads something that every block hands out beside its activations (a loss of "
            "its own, new statistics): a pipeline passes on only what travels with them; let the "
            "scan carry it"
        )
    return Blocks(
        body.trips,
        body.jaxpr.replace(outvars=body.jaxpr.outvars[: body.num_carry]),
        tuple(scan.invars[: body.num_consts]),
        tuple(scan.invars[body.num_consts : first_xs]),
        tuple(scan.outvars[: body.num_carry]),
        tuple(
            Weights(*stacked[v]) if is_var(v) and v in stacked else Rows((v,))
            for v in scan.invars[first_xs:]
        ),
        others,
        min(int(scan.params["unroll"]), body.trips),
    )


def _casts_of(jaxpr: Any, stack: Mapping[Any, str]) -> tuple[dict[Any, Any], list[Any]]:
    """{variable: (a parameter's name, casts)} of stacked parameters and their casts, and those."""
    found: dict[Any, Any] = {v: (name, ()) for v, name in stack.items()}
    casts = []
    for eqn in jaxpr.eqns:
        v = eqn.invars[0] if len(eqn.invars) == 1 else None
        if eqn.primitive.name in CASTS and v is not None and is_var(v) and v in found:
            name, before = found[v]
            found[eqn.outvars[0]] = (name, (*before, eqn))
            casts.append(eqn)
    return found, casts


def _the_scan(eqns: Sequence[Any], stacked: Mapping[Any, Any], stack: Mapping[Any, str]) -> Any:
    """The one equation that reads the stack, if it is a scan along it."""
    names = ", ".join(list(stack.values())[:3])
    if not eqns:
        raise ModelError(f"mesh.pipe: the loss does not read the stacked blocks ({names}, ...)")
    for eqn in eqns:
        if eqn.primitive.name != "scan":
            name = next(stacked[v][0] for v in eqn.invars if is_var(v) and v in stacked)
            raise ModelError(
                "mesh.pipe cuts stacked blocks where one scan walks along them, and the stacked "
                f"{name} is read by a {eqn.primitive.name} outside of a scan; keep the blocks as a "
                "list, or scan"
            )
    if len(eqns) > 1:
        raise ModelError(
            f"mesh.pipe: the stacked blocks ({names}, ...) are walked along {len(eqns)} times; a "
            "pipeline goes through them once"
        )
    (scan,) = eqns
    first_xs = sum(consts_and_carry(scan))
    if any(is_var(v) and v in stacked for v in scan.invars[:first_xs]):
        raise ModelError(
            "mesh.pipe: each block reads the weights of all blocks, so they cannot be cut apart"
        )
    if scan.params["reverse"]:
        raise ModelError(
            "mesh.pipe: the scan walks from the last layer to the first; turn it round"
        )
    return scan
