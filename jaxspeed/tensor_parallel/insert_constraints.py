"""Insertion of sharding constraints at the shard boundaries of a traced program.

Grouped convolutions run in a shard_map, each device on its samples: XLA partitions their gradient
wrongly (jax 0.10.2, CPU, with Shardy and without), or aborts (jax 0.11.2 and 0.12.0.1, CPU: "Check
failed: ShapeUtil::Compatible").
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.axes import TENSOR
from jaxspeed.jaxpr.primitives import CUSTOM_DERIVATIVE
from jaxspeed.jaxpr.rewriter import LEAVE, Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import Body, Jaxpr, JaxprEqn, Var, is_marked, is_var, product_of
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.tensor_parallel.activation_layout import (
    ActivationLayout,
    BoundaryLayouts,
    context_mesh,
)
from jaxspeed.tensor_parallel.boundary_ops import columns, enter, leave
from jaxspeed.tensor_parallel.collective_matmul import RingMatmul, ring_columns, ring_row
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, propagate_dims
from jaxspeed.tensor_parallel.shard_boundaries import ShardedProgram, dims_sharded_over

log = logging.getLogger("jaxspeed")


def with_boundary_constraints(
    jaxpr: Jaxpr,
    parameters: Mapping[str, Var],
    batch: Sequence[Var],
    specs: Mapping[str, Any],
    mesh: Mesh,
    layout: ActivationLayout,
    unit_of: Callable[[JaxprEqn], Any] = lambda eqn: None,
) -> Jaxpr:
    """A traced program with constraints at its shard boundaries.

    `parameters` are its variables by path, sharded by `specs`; `batch` those whose first dims are
    samples. `unit_of` returns the unit of an equation: matmuls of one activation in different units
    are not merged.
    """
    if mesh.shape[TENSOR] == 1:
        return jaxpr
    propagated = propagate_dims(jaxpr, parameters, batch)
    program = ShardedProgram(
        propagated, dims_sharded_over(TENSOR, specs), mesh.shape[TENSOR], propagated.samples
    )
    if layout.sequence_parallel and program.dims and not program.sequences:
        warn_no_sequence_dim()
    layouts = BoundaryLayouts(program, context_mesh(mesh), layout)
    boundaries = _Boundaries(layouts, unit_of)
    return boundaries.run(jaxpr, scope=boundaries.of(propagated.top))


@functools.cache
def warn_no_sequence_dim() -> None:
    """Warn once; the loss is traced several times."""
    log.warning(
        "parallel.sequence_parallel_activations has no effect on this model: the outputs of its "
        "sharded matmuls have no dim between samples and features, as in [batch, sequence, "
        "features] (samples and sequence merged into one dim cannot be sharded separately)"
    )


@dataclass
class _Scope:
    """One call of a function.

    Attributes:
      groups: the column matmuls that share one all-gather of an activation, by the position of the
        first one.
      entered: an activation -> its variable inside the sharded region.
    """

    frame: CallFrame
    groups: dict[int, list[int]]
    entered: dict[Any, Atom] = field(default_factory=dict)

    @cached_property
    def makers(self) -> dict[Var, int]:
        return {v: i for i, e in enumerate(self.frame.jaxpr.eqns) for v in e.outvars}


class _Boundaries(Rewriter[None]):
    """The rewriting of one program; each call of a function is written by itself."""

    def __init__(self, layouts: BoundaryLayouts, unit_of: Callable[[JaxprEqn], Any]) -> None:
        super().__init__()
        self.layouts, self.program, self.unit_of = layouts, layouts.program, unit_of

    def of(self, frame: CallFrame) -> _Scope:
        """Group column matmuls of one activation.

        A group is of one unit, so that ZeRO 3 gathers no other unit's weights for it.
        """
        found: dict[tuple[Any, Any], list[int]] = {}
        for position, eqn in enumerate(frame.jaxpr.eqns):
            product = product_of(eqn)
            is_matmul = product is not None and product.primitive.name == "dot_general"
            if is_matmul and (at := self.program.enters(frame, eqn)):
                x = eqn.invars[at[0]]
                layout = self.layouts.of(frame, x)
                if layout.saved != layout.replicated and frame.is_weight(eqn.invars[1 - at[0]]):
                    found.setdefault((x, self.unit_of(eqn)), []).append(position)
        return _Scope(frame, {positions[0]: positions for positions in found.values()})

    def scope(self, program: Rewriting[None], body: Body) -> Any:
        frames = program.scope.frame.inner.get(program.position, ())
        return next((self.of(f) for f in frames if f.jaxpr is body.jaxpr), LEAVE)

    def enter(self, program: Rewriting[None], eqn: JaxprEqn) -> bool:
        inner = program.scope.frame.inner
        return program.position in inner and eqn.primitive.name not in CUSTOM_DERIVATIVE

    def other(self, program: Rewriting[None], eqn: JaxprEqn) -> Sequence[None]:
        scope: _Scope = program.scope
        if program.position in scope.groups:
            self._columns(program, scope, scope.groups[program.position])
        elif is_grouped(eqn) and self.program.sharded_dim(scope.frame, eqn.outvars[0]) is None:
            self._grouped(program, scope.frame, eqn)
        else:
            self._plain(program, scope, eqn)
        return [None] * len(eqn.outvars)

    def _plain(self, program: Rewriting[None], scope: _Scope, eqn: JaxprEqn) -> None:
        frame = scope.frame
        operands = [program.atom(v) for v in eqn.invars]
        for i in self.program.enters(frame, eqn):
            v = eqn.invars[i]
            if v not in scope.entered:
                entering = enter(self.layouts.of(frame, v))
                (scope.entered[v],) = program.splice(entering, [program.atom(v)], eqn)
            operands[i] = scope.entered[v]
        if not self.program.leaves(frame, eqn):
            program.emit(eqn, operands)
            return
        (out,) = eqn.outvars
        if (ring := self.layouts.ring(frame, out)) and (row := self._row_of(frame, eqn)):
            side, matmul = row
            multiply = partial(ring_row, matmul=matmul, **ring)
            pair = [operands[side], operands[1 - side]]
            program.replace([out], program.splice(multiply, pair, eqn))
            return
        # Readers get the reduced array in place of the partial sum.
        program.emit(eqn, operands)
        leaving = leave(self.layouts.of(frame, out))
        program.replace([out], program.splice(leaving, [program.atom(out)], eqn))

    def _grouped(self, program: Rewriting[None], frame: CallFrame, eqn: JaxprEqn) -> None:
        image: Any = eqn.invars[0]
        dim = eqn.params["dimension_numbers"].lhs_spec[0]
        is_samples = self.program.is_samples(frame.of(image)[dim])
        samples = self.layouts.samples(image.aval.shape[dim]) if is_samples else None
        function = per_device_convolution(eqn, samples, {*free_axes(self.layouts.mesh)})
        program.replace(
            eqn.outvars, program.splice(function, [*map(program.atom, eqn.invars)], eqn)
        )

    # -- column matmuls of one activation ---------------------------------------------------------

    def _columns(self, program: Rewriting[None], scope: _Scope, positions: Sequence[int]) -> None:
        frame = scope.frame
        eqns = [frame.jaxpr.eqns[p] for p in positions]
        program.done.update(positions)
        pairs = [(eqn, self.program.enters(frame, eqn)[0]) for eqn in eqns]
        weights = [eqn.invars[1 - side] for eqn, side in pairs]
        for w in weights:
            self._hoist(program, scope, w)
        eqn, side = pairs[0]
        x = eqn.invars[side]
        ring = self.layouts.ring(frame, x)
        marked = any(map(is_marked, eqns))  # a function of arrays of these shapes
        if ring and all(self._has_equal_shards(frame, w) for w in weights) and not marked:
            matmuls = [self._ring_matmul(frame, *pair) for pair in pairs]
            function: Any = lambda x, *weights: ring_columns(x, weights, matmuls, **ring)  # noqa: E731
        else:
            function = columns([bound(*pair) for pair in pairs], self.layouts.of(frame, x))
        results = program.splice(function, [*map(program.atom, (x, *weights))], eqn)
        program.replace([eqn.outvars[0] for eqn in eqns], results)

    def _hoist(self, program: Rewriting[None], scope: _Scope, weight: Any) -> None:
        """Write the equations of a weight, which depends on parameters alone, ahead of order."""
        position = scope.makers.get(weight) if is_var(weight) else None
        if position is not None and position not in program.done:
            for v in scope.frame.jaxpr.eqns[position].invars:
                self._hoist(program, scope, v)
            program.write(position)

    # -- matmuls around a ring --------------------------------------------------------------------

    def _row_of(self, frame: CallFrame, eqn: JaxprEqn) -> tuple[int, RingMatmul] | None:
        """(position of the activation, ring matmul) of a row matmul, or None."""
        weights = [frame.is_weight(v) for v in eqn.invars]
        if eqn.primitive.name != "dot_general" or sorted(weights) != [False, True]:
            return None
        side = weights.index(False)
        x, weight = eqn.invars[side], eqn.invars[1 - side]
        dims = [self.program.sharded_dim(frame, v) for v in (x, weight)]
        if None in dims or self.program.sequence_dim(frame, x) is None:
            return None
        if not self._has_equal_shards(frame, weight):
            return None
        return side, self._ring_matmul(frame, eqn, side)

    def _has_equal_shards(self, frame: CallFrame, weight: Any) -> bool:
        """Whether a weight has equal shards; a padded vocabulary, read unpadded, has not."""
        dim = self.program.sharded_dim(frame, weight)
        return dim is not None and weight.aval.shape[dim] % self.program.num_shards == 0

    def _ring_matmul(self, frame: CallFrame, eqn: JaxprEqn, side: int) -> RingMatmul:
        """The matmul of the activation, operand number `side`, and a sharded weight."""
        program = self.program
        x, weight, y = eqn.invars[side], eqn.invars[1 - side], eqn.outvars[0]
        x_seq, y_seq = program.sequence_dim(frame, x), program.sequence_dim(frame, y)
        w_sharded = program.sharded_dim(frame, weight)
        assert x_seq is not None and y_seq is not None and w_sharded is not None
        return RingMatmul(
            bound(eqn, side),
            x_seq,
            y_seq,
            w_sharded,
            x_sharded=program.sharded_dim(frame, x),
            y_sharded=program.sharded_dim(frame, y),
        )


def bound(eqn: Any, side: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A matmul as a function of the activation, operand number `side`, and the weight."""

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        operands = (x, weight) if side == 0 else (weight, x)
        return eqn.primitive.bind(*operands, **eqn.params)

    return matmul


# -- grouped convolutions with a replicated kernel: each device computes its samples ---------------

GROUPS = ("feature_group_count", "batch_group_count")


def is_grouped(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "conv_general_dilated" and any(eqn.params[g] != 1 for g in GROUPS)


def per_device_convolution(
    eqn: Any, samples: Any, axes: set[str]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The convolution of an equation, manual over `axes`; `samples` shard the batch."""
    numbers = eqn.params["dimension_numbers"]

    def along(dim: int, ndim: int) -> PartitionSpec:
        return PartitionSpec(*(samples if d == dim else None for d in range(ndim)))

    ndim = len(eqn.invars[0].aval.shape)
    return jax.shard_map(
        lambda x, w: eqn.primitive.bind(x, w, **eqn.params),
        in_specs=(along(numbers.lhs_spec[0], ndim), PartitionSpec()),
        out_specs=along(numbers.out_spec[0], ndim),
        axis_names=axes,
        check_vma=False,
    )
