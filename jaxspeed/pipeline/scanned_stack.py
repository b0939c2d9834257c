"""Repeated blocks with stacked parameters: the body of the one scan over them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.inline_calls import with_calls_inlined
from jaxspeed.jaxpr.primitives import CASTS
from jaxspeed.jaxpr.slicing import read_by
from jaxspeed.jaxpr.traverse import bodies, consts_and_carry, is_var
from jaxspeed.pipeline.repeated_blocks import BlockInputs, BlockWeights, RepeatedBlocks
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.stacks import Stack
from jaxspeed.traced_loss.loss_program import LossProgram


def scanned_stacks(closed: Any, parameters: Mapping[Any, str]) -> list[Stack]:
    """The stacks over which a traced loss scans; `parameters` are paths of its variables."""
    jaxpr = with_calls_inlined(closed.jaxpr, set(parameters))
    dims: dict[Any, int] = {}
    stacked, _ = _casts_of(jaxpr, parameters, dims)
    stacks = []
    for scan in (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"):
        xs = [v for v in scan.invars[sum(consts_and_carry(scan)) :] if is_var(v) and v in stacked]
        paths = [stacked[v][0] for v in xs]
        if paths and scan.params["length"] > 1:
            layers = {path: dims[v] for path, v in zip(paths, xs, strict=True) if dims.get(v)}
            leaves = {path: (path,) for path in paths}
            stacks.append(Stack(scan.params["length"], leaves, dims=layers))
    return stacks


def with_scanned_layers(leaves: Sequence[Leaf], program: LossProgram) -> tuple[Leaf, ...]:
    """Name the layers of parameters without names over which a traced loss scans."""
    paths = {v: path for path, v in program.parameters.items()}
    stacks = scanned_stacks(program.closed, paths)
    scanned = {path for stack in stacks for path in stack.paths if not stack.layers_dim(path)}

    def named(leaf: Leaf) -> Leaf:
        if leaf.path not in scanned or leaf.names[:1] not in ((), (None,)):
            return leaf
        rest = (*leaf.names[1:], *[None] * len(leaf.shape))
        return replace(leaf, names=("layers", *rest[: len(leaf.shape) - 1]))

    return tuple(map(named, leaves))


def scanned_blocks(jaxpr: Any, stack: Mapping[Any, str]) -> RepeatedBlocks:
    """The blocks of a program that scans along the stacked parameters `stack`."""
    stacked, casts = _casts_of(jaxpr, stack, {})
    readers = [e for e in jaxpr.eqns if any(is_var(v) and v in stacked for v in e.invars)]
    scan = _the_scan([e for e in readers if e not in casts], stacked, stack)
    (body,) = bodies(scan)
    assert not len(body.consts), "constants of a scan are arguments of it"
    first_xs = body.first_xs
    others = tuple(e for e in jaxpr.eqns if e is not scan and e not in casts)
    if read_by(jaxpr.replace(eqns=list(others))) & set(scan.outvars[body.num_carry :]):
        raise ModelError(
            "mesh.pipe: the loss reads a per-layer output of the scan (an auxiliary loss, new "
            "statistics), and a pipeline sends only the scan's carry from stage to stage; put it "
            "into the carry"
        )
    return RepeatedBlocks(
        body.trips,
        body.jaxpr.replace(outvars=body.jaxpr.outvars[: body.num_carry]),
        tuple(scan.invars[: body.num_consts]),
        tuple(scan.invars[body.num_consts : first_xs]),
        tuple(scan.outvars[: body.num_carry]),
        tuple(
            BlockWeights(*stacked[v]) if is_var(v) and v in stacked else BlockInputs((v,))
            for v in scan.invars[first_xs:]
        ),
        others,
        min(int(scan.params["unroll"]), body.trips),
    )


def _casts_of(
    jaxpr: Any, stack: Mapping[Any, str], dims: dict[Any, int]
) -> tuple[dict[Any, Any], list[Any]]:
    """({variable: (parameter name, casts)} of stacked parameters and their casts, the casts).

    So is a transpose that has moved the layers' dim to the front: a stage's weights have it there.
    `dims` receives its place in the parameter.
    """
    stacked: dict[Any, Any] = {v: (name, ()) for v, name in stack.items()}
    casts = []
    for eqn in jaxpr.eqns:
        v = eqn.invars[0] if len(eqn.invars) == 1 else None
        if v is None or not is_var(v) or v not in stacked:
            continue
        name, before = stacked[v]
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if eqn.primitive.name in CASTS:
            stacked[out] = (name, (*before, eqn))
            dims[out] = dims.get(v, 0)
        elif eqn.primitive.name == "transpose" and not dims.get(v):
            first, *rest = eqn.params["permutation"]
            if list(rest) != sorted(rest):
                continue
            stacked[out], dims[out] = stacked[v], first
        else:
            continue
        casts.append(eqn)
    return stacked, casts


def _the_scan(eqns: Sequence[Any], stacked: Mapping[Any, Any], stack: Mapping[Any, str]) -> Any:
    """The one equation that reads the stack; refused unless it is a scan over it."""
    names = ", ".join(list(stack.values())[:3])
    if not eqns:
        raise ModelError(f"mesh.pipe: the loss does not read the stacked blocks ({names}, ...)")
    for eqn in eqns:
        if eqn.primitive.name != "scan":
            name = next(stacked[v][0] for v in eqn.invars if is_var(v) and v in stacked)
            raise ModelError(
                "mesh.pipe splits stacked blocks where one scan runs over them, and the stacked "
                f"{name} is read by a {eqn.primitive.name} outside of a scan; store the blocks as "
                "a list, or scan over them"
            )
    if len(eqns) > 1:
        raise ModelError(
            f"mesh.pipe: the stacked blocks ({names}, ...) are scanned {len(eqns)} times; a "
            "pipeline runs them once"
        )
    (scan,) = eqns
    first_xs = sum(consts_and_carry(scan))
    if any(is_var(v) and v in stacked for v in scan.invars[:first_xs]):
        raise ModelError(
            "mesh.pipe: each block reads the weights of all blocks, so they cannot be split into "
            "stages"
        )
    if scan.params["reverse"]:
        raise ModelError(
            "mesh.pipe: the scan runs from the last layer to the first (reverse=True); stack the "
            "layers in the order in which they run"
        )
    return scan
