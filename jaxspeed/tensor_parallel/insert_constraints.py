"""Insertion of sharding constraints at the shard boundaries of a traced program.

Equations are replaced one by one. New ones have the source info of those that they replace, so that
a unit's equations stay together and ZeRO 3 can split the result into segments.

Grouped convolutions run in a shard_map, each device on its samples: XLA partitions their gradient
wrongly (jax 0.10.2, CPU, with Shardy and without), or aborts (jax 0.11.2 and 0.12.0.1, CPU: "Check
failed: ShapeUtil::Compatible").
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.axes import TENSOR
from jaxspeed.jaxpr.inline_calls import Spliced
from jaxspeed.jaxpr.primitives import CUSTOM_DERIVATIVE
from jaxspeed.jaxpr.traverse import is_var, open_jaxpr, with_functions, with_jaxpr
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
    jaxpr: Any,
    parameters: Mapping[str, Any],
    batch: Sequence[Any],
    specs: Mapping[str, Any],
    mesh: Mesh,
    layout: ActivationLayout,
    unit_of: Callable[[Any], Any] = lambda eqn: None,
) -> Any:
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
    return _Inserter(layouts, propagated.top, unit_of).run()


@functools.cache
def warn_no_sequence_dim() -> None:
    """Warn once; the loss is traced several times."""
    log.warning(
        "parallel.sequence_parallel_activations has no effect on this model: the outputs of its "
        "sharded matmuls have no dim between samples and features, as in [batch, sequence, "
        "features] (samples and sequence merged into one dim cannot be sharded separately)"
    )


class _Inserter:
    """The rewrite of one function."""

    def __init__(
        self, layouts: BoundaryLayouts, frame: CallFrame, unit_of: Callable[[Any], Any]
    ) -> None:
        self.layouts, self.program, self.frame = layouts, layouts.program, frame
        self.jaxpr, self.unit_of = frame.jaxpr, unit_of
        self.eqns: list[Any] = []
        self.entered: dict[Any, Any] = {}  # activation -> its variable inside the sharded region
        self.done: set[int] = set()  # positions of the equations that are written
        self.makers = {v: i for i, e in enumerate(self.jaxpr.eqns) for v in e.outvars}
        self.groups = self._groups()

    def run(self) -> Any:
        for position in range(len(self.jaxpr.eqns)):
            self._write(position)
        return self.jaxpr.replace(eqns=self.eqns)

    def _write(self, position: int) -> None:
        if position in self.done:
            return
        self.done.add(position)
        eqn = self.jaxpr.eqns[position]
        if position in self.frame.inner and eqn.primitive.name not in CUSTOM_DERIVATIVE:
            self.eqns.append(self._nested(position, eqn))
        elif position in self.groups:
            self._write_columns(self.groups[position])
        elif is_grouped(eqn) and self.program.sharded_dim(self.frame, eqn.outvars[0]) is None:
            self._write_grouped(eqn)
        else:
            self._write_plain(eqn)

    def _write_plain(self, eqn: Any) -> None:
        program, frame = self.program, self.frame
        entering = {eqn.invars[i] for i in program.enters(frame, eqn)}
        for v in entering - self.entered.keys():
            boundary = Spliced.of(enter(self.layouts.of(frame, v)), [v])
            self.eqns += boundary.eqns([v], boundary.outs, eqn)
            self.entered[v] = boundary.outs[0]
        if entering:
            invars = [self.entered[v] if is_var(v) and v in entering else v for v in eqn.invars]
            eqn = eqn.replace(invars=invars)
        if not program.leaves(frame, eqn):
            self.eqns.append(eqn)
            return
        (out,) = eqn.outvars
        if (ring := self.layouts.ring(self.frame, out)) and (row := self._row_of(eqn)):
            side, matmul = row
            operands = [eqn.invars[side], eqn.invars[1 - side]]
            multiply = Spliced.of(partial(ring_row, matmul=matmul, **ring), operands)
            self.eqns += multiply.eqns(operands, [out], eqn)
            return
        # The partial sum gets a new variable; readers keep the one of the reduced array.
        boundary = Spliced.of(leave(self.layouts.of(frame, out)), [out])
        self.eqns.append(eqn.replace(outvars=boundary.ins))
        self.eqns += boundary.eqns(boundary.ins, [out], eqn)

    def _write_grouped(self, eqn: Any) -> None:
        image = eqn.invars[0]
        dim = eqn.params["dimension_numbers"].lhs_spec[0]
        is_samples = self.program.is_samples(self.frame.of(image)[dim])
        samples = self.layouts.samples(image.aval.shape[dim]) if is_samples else None
        function = per_device_convolution(eqn, samples, {*free_axes(self.layouts.mesh)})
        self.eqns += Spliced.of(function, eqn.invars).eqns(eqn.invars, eqn.outvars, eqn)

    # -- column matmuls of one activation ---------------------------------------------------------

    def _groups(self) -> dict[int, list[int]]:
        """Groups of column matmuls that share one all-gather of an activation, by first position.

        A group is of one unit, so that ZeRO 3 gathers no other unit's weights for it.
        """
        program, frame = self.program, self.frame
        found: dict[tuple[Any, Any], list[int]] = {}
        for position, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive.name == "dot_general" and (at := program.enters(frame, eqn)):
                x = eqn.invars[at[0]]
                layout = self.layouts.of(frame, x)
                if layout.saved != layout.replicated and frame.is_weight(eqn.invars[1 - at[0]]):
                    found.setdefault((x, self.unit_of(eqn)), []).append(position)
        return {positions[0]: positions for positions in found.values()}

    def _write_columns(self, positions: Sequence[int]) -> None:
        eqns = [self.jaxpr.eqns[p] for p in positions]
        self.done.update(positions)
        sides = [self.program.enters(self.frame, eqn)[0] for eqn in eqns]
        weights = [eqn.invars[1 - side] for eqn, side in zip(eqns, sides, strict=True)]
        for w in weights:
            self._hoist(w)
        x = eqns[0].invars[sides[0]]
        pairs = list(zip(eqns, sides, strict=True))
        ring = self.layouts.ring(self.frame, x)
        if ring and all(self._has_equal_shards(w) for w in weights):
            matmuls = [self._ring_matmul(*pair) for pair in pairs]
            function: Any = lambda x, *weights: ring_columns(x, weights, matmuls, **ring)  # noqa: E731
        else:
            function = columns([bound(*pair) for pair in pairs], self.layouts.of(self.frame, x))
        new = Spliced.of(function, [x, *weights])
        self.eqns += new.eqns([x, *weights], [eqn.outvars[0] for eqn in eqns], eqns[0])

    def _hoist(self, weight: Any) -> None:
        """Write the equations of a weight, which depends on parameters alone, ahead of order."""
        position = self.makers.get(weight) if is_var(weight) else None
        if position is not None and position not in self.done:
            for v in self.jaxpr.eqns[position].invars:
                self._hoist(v)
            self._write(position)

    # -- matmuls around a ring --------------------------------------------------------------------

    def _row_of(self, eqn: Any) -> tuple[int, RingMatmul] | None:
        """(position of the activation, ring matmul) of a row matmul, or None."""
        weights = [self.frame.is_weight(v) for v in eqn.invars]
        if eqn.primitive.name != "dot_general" or sorted(weights) != [False, True]:
            return None
        side = weights.index(False)
        x, weight = eqn.invars[side], eqn.invars[1 - side]
        dims = [self.program.sharded_dim(self.frame, v) for v in (x, weight)]
        if None in dims or self.program.sequence_dim(self.frame, x) is None:
            return None
        if not self._has_equal_shards(weight):
            return None
        return side, self._ring_matmul(eqn, side)

    def _has_equal_shards(self, weight: Any) -> bool:
        """Whether a weight has equal shards; a padded vocabulary, read unpadded, has not."""
        dim = self.program.sharded_dim(self.frame, weight)
        return dim is not None and weight.aval.shape[dim] % self.program.num_shards == 0

    def _ring_matmul(self, eqn: Any, side: int) -> RingMatmul:
        """The matmul of the activation, operand number `side`, and a sharded weight."""
        program, frame = self.program, self.frame
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

    # -- inner programs ---------------------------------------------------------------------------

    def _nested(self, position: int, eqn: Any) -> Any:
        written = {
            id(f.jaxpr): _Inserter(self.layouts, f, self.unit_of).run()
            for f in self.frame.inner[position]
        }

        def new(closed: Any) -> Any:
            jaxpr, _ = open_jaxpr(closed)
            return with_jaxpr(closed, written.get(id(jaxpr), jaxpr))

        return with_functions(eqn, new)


def bound(eqn: Any, side: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A matmul as a function of the activation, operand number `side`, and the weight."""

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        operands = (x, weight) if side == 0 else (weight, x)
        return eqn.primitive.bind(*operands, **eqn.params)

    return matmul


# -- grouped convolutions with a replicated kernel: each device computes its samples ---------------

GROUPS = ("feature_group_count", "batch_group_count")


def is_grouped(eqn: Any) -> bool:
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
