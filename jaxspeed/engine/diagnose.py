"""`engine.diagnose`: the first input, parameter, layer or gradient with a NaN or infinity.

The loss is traced with module scopes and evaluated with a flag for every output of a module call:
whether it is finite. (Values that are infinite only inside of a call, such as a mask of minus
infinity, do no harm: but a router's logits have a flag of their own.) A scanned stack has a flag
per layer.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed.jaxpr.evaluate import bindings, run_equation, run_scan
from jaxspeed.jaxpr.module_scopes import Call, calls_in
from jaxspeed.jaxpr.traverse import equations, is_var, sliceable_bodies
from jaxspeed.ops.moe.routing import LOGITS
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.batches import with_extra

Flags = list[tuple[str, Any]]  # (label, not finite: bool [] or, in a scan, [length])
# Values inside of a call that have to be finite, by their `checkpoint_name`.
_NAMED = {LOGITS: "the router's logits"}


@dataclass(frozen=True)
class Diagnosis:
    """The first non-finite batch entry, parameter and layer; None where all values are finite."""

    batch: str | None
    parameter: str | None
    layer: str | None
    gradients: tuple[str, ...]  # parameters whose gradient is not finite

    @property
    def finite(self) -> bool:
        """Whether nothing was found."""
        return not (self.batch or self.parameter or self.layer or self.gradients)

    def __str__(self) -> str:
        if self.finite:
            return "all values are finite: batch, parameters, outputs of all layers, gradients"
        findings = []
        if self.batch:
            findings.append(f"the batch is not finite: {self.batch}")
        if self.parameter:
            findings.append(f"the first parameter that is not finite: {self.parameter}")
        if self.layer:
            findings.append(f"the first layer whose output is not finite: {self.layer}")
        if self.gradients:
            count = len(self.gradients)
            findings.append(
                f"{count} gradients are not finite, the one nearest the loss: {self.gradients[-1]}"
            )
        return "; ".join(findings)


def diagnose(program: Program, state: TrainState, batch: Any) -> Diagnosis:
    """Evaluate one step with flags, without updating the state."""
    labels: list[str] = []

    def look(state: TrainState, batch: Any) -> Any:
        stored = state.sources(program.table)
        values = {row.path: row.decoded(row.source, stored[row.path]) for row in program.table}
        sources = {path: x.astype(program.table[path].read.dtype) for path, x in values.items()}
        variables, samples = with_extra(state.variables, batch)
        variables = program.traced_loss.with_squares(stored, variables)
        flags = _forward_flags(program, sources, state.step, variables, samples)
        labels[:] = [label for label, _ in flags]
        sums, _ = program.gradients(stored, variables, samples, state.step, state.loss_scale.scale)
        return (
            nonfinite_flags(batch),
            nonfinite_flags(values),
            [flag for _, flag in flags],
            nonfinite_flags(sums.grads),
        )

    of_batch, of_params, of_layers, of_grads = jax.device_get(
        jax.jit(program.in_mesh(look))(state, batch)
    )
    paths = [row.path for row in program.table if row.leaf.trainable]
    return Diagnosis(
        next((path for path, bad in flat_with_paths(of_batch).items() if bad), None),
        next((row.path for row in program.table if of_params[row.path]), None),
        _first(list(zip(labels, of_layers, strict=True))),
        tuple(path for path in paths if of_grads[path]),
    )


def _forward_flags(program: Program, sources: Any, step: Any, variables: Any, batch: Any) -> Flags:
    """The flags of one forward pass over the full batch."""
    rest = (variables, program.traced_loss.cast(batch), step, jnp.int32(0))
    traced = program.traced_loss.trace(rest, train=True)
    values = sources | program.table.joined(sources)
    args = [*(values[path] for path in traced.parameters), *jax.tree.leaves(rest)]
    return _run(traced.closed.jaxpr, traced.closed.consts, args)[1]


def _run(jaxpr: Any, consts: Any, args: Any, within: Call | None = None) -> tuple[list[Any], Flags]:
    """Evaluate, with a flag for every output of an innermost module call, and named value.

    `within` is the innermost call around the program.
    """
    env, flags = bindings(jaxpr, consts, args), []
    leaving = _leaving(jaxpr, within) if within is None or _has_calls(jaxpr) else {}
    for eqn in jaxpr.eqns:
        values = [env[v] if is_var(v) else v.val for v in eqn.invars]
        outs, inner = _run_eqn(jaxpr, eqn, values, within)
        flags += inner
        env.update(zip(eqn.outvars, outs, strict=True))
        if _is_named(eqn):
            label = f"{_label(_call(eqn, within))}: {_NAMED[eqn.params['name']]}"
            flags.append((label, ~jnp.isfinite(outs[0]).all()))
        for var, out in zip(eqn.outvars, outs, strict=True):
            if var in leaving and jnp.issubdtype(out.dtype, jnp.inexact):
                flags.append((leaving[var], ~jnp.isfinite(out).all()))
    return [env[v] if is_var(v) else v.val for v in jaxpr.outvars], flags


def _run_eqn(
    jaxpr: Any, eqn: Any, values: list[Any], within: Call | None
) -> tuple[list[Any], Flags]:
    name, bodies = eqn.primitive.name, sliceable_bodies(eqn)
    if name == "cond" or not any(_has_calls(body.jaxpr, or_named=True) for body in bodies):
        operands = {v: x for v, x in zip(eqn.invars, values, strict=True) if is_var(v)}
        return run_equation(jaxpr, eqn, operands.__getitem__), []
    (body,), within = bodies, _call(eqn, within)
    if name != "scan":
        return _run(body.jaxpr, body.consts, values, within)
    labels: list[str] = []

    def run(*args: Any) -> list[Any]:
        outs, flags = _run(body.jaxpr, body.consts, args, within)
        labels[:] = [label for label, _ in flags]
        return [*outs, *(flag for _, flag in flags)]

    results, count = run_scan(eqn, body, run, values), len(eqn.outvars)
    return results[:count], list(zip(labels, results[count:], strict=True))


def _call(eqn: Any, within: Call | None) -> Call | None:
    """The innermost module call of an equation."""
    return next(reversed(calls_in(str(eqn.source_info.name_stack))), within)


def _label(call: Call | None) -> str:
    if call is None:
        return "outside of the layers (the loss)"
    return f"{call.path} ({call.kind})" if call.path else call.kind


def _is_named(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] in _NAMED


def _leaving(jaxpr: Any, within: Call | None) -> dict[Any, str]:
    """{variable: module call} for the variables used outside of the innermost call around them."""
    calls = {id(eqn): calls_in(str(eqn.source_info.name_stack)) for eqn in jaxpr.eqns}
    used_by: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if is_var(v):
                used_by.setdefault(v, []).append({c.serial for c in calls[id(eqn)]})
    outputs = {v for v in jaxpr.outvars if is_var(v)}
    labels = {}
    for eqn in jaxpr.eqns:
        eqn_calls = calls[id(eqn)]
        serial = eqn_calls[-1].serial if eqn_calls else -1
        for v in eqn.outvars:
            if v in outputs or any(serial not in users for users in used_by.get(v, [])):
                labels[v] = _label(eqn_calls[-1] if eqn_calls else within)
    return labels


def _has_calls(jaxpr: Any, or_named: bool = False) -> bool:
    """Whether a program has module calls, or values that are flagged by name."""
    return any(
        calls_in(str(eqn.source_info.name_stack)) or (or_named and _is_named(eqn))
        for eqn in equations(jaxpr.eqns, sliceable_bodies)
    )


def _first(flags: Flags) -> str | None:
    """The earliest flagged label; in a scan, the first call of the first flagged layer."""
    best: tuple[float, str] | None = None
    for label, flag in flags:
        if flag.ndim == 0:
            if flag and best is None:
                return label
        elif flag.any():
            layer = int(flag.reshape(flag.shape[0], -1).any(1).argmax())
            if best is None or layer < best[0]:
                best = (layer, f"layer {layer}: {label}")
        if best is not None and flag.ndim == 0:
            break
    return best[1] if best and best[0] < math.inf else None


# -- non-finite arrays of a tree ------------------------------------------------------------------


def nonfinite_flags(tree: Any) -> Any:
    """For each leaf, whether it has a NaN or an infinity; can be traced."""

    def flag(leaf: Any) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return jnp.asarray(False)
        return ~jnp.isfinite(leaf).all()

    return jax.tree.map(flag, tree)
