"""Insertion of sharding constraints: at shard boundaries, and along sequences.

Over `seq` all activations are sharded along their sequence. The constraint is on the results of
products, lookups and draws, of what moves positions, and on what a loop carries; element-wise
operations have the sharding of their operands.

Operations with windows that XLA partitions wrongly run in a shard_map (`windows.py`), or are not
sharded along them.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspeed.axes import EXPERT, SEQ, TENSOR, product, sample_axes
from jaxspeed.jaxpr.evaluate import derivative
from jaxspeed.jaxpr.primitives import (
    ATTENTION,
    CUSTOM_DERIVATIVE,
    PRODUCTS,
    SCATTERS,
    WINDOW_SELECTIONS,
)
from jaxspeed.jaxpr.rewriter import LEAVE, Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import (
    Body,
    Jaxpr,
    JaxprEqn,
    Var,
    is_marked,
    is_var,
    product_of,
    runs,
    shape_of,
)
from jaxspeed.ops.attention_call import SEQUENCE_SCOPE
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.specs import spec_axes
from jaxspeed.tensor_parallel.activation_layout import (
    ActivationLayout,
    BoundaryLayouts,
    context_mesh,
)
from jaxspeed.tensor_parallel.boundary_ops import (
    columns,
    enter,
    from_experts,
    gather_for_experts,
    leave,
    sum_over_experts,
    to_experts,
)
from jaxspeed.tensor_parallel.collective_matmul import RingMatmul, ring_columns, ring_row
from jaxspeed.tensor_parallel.dim_propagation import CallFrame, propagate_dims
from jaxspeed.tensor_parallel.sequence_dims import SequenceDims, continued
from jaxspeed.tensor_parallel.shard_boundaries import ShardedProgram, dims_sharded_over
from jaxspeed.tensor_parallel.windows import (
    WINDOWED,
    WINDOWS_SCOPE,
    dims_of_features,
    moving_dims,
    per_device,
    windows_of,
)

log = logging.getLogger("jaxspeed")


GROUPS = ("feature_group_count", "batch_group_count")

# An attention over the sequence axis: (its equation, whether the dims 1 of its operands are
# sharded, the call that runs it) -> a function of its operands; None leaves it to the compiler.
Attend = Callable[[JaxprEqn, Sequence[bool], CallFrame], Callable[..., jax.Array] | None]


@dataclass(frozen=True)
class Sequences:
    """The sequences of a program.

    Attributes:
      positions: the sequence dim of inputs of the program.
      attend: what replaces each attention.
      also: axes that shard the samples beside those of all samples.
    """

    positions: Mapping[Var, int]
    attend: Attend
    also: tuple[str, ...] = ()


def with_boundary_constraints(
    jaxpr: Jaxpr,
    parameters: Mapping[str, Var],
    batch: Sequence[Var],
    specs: Mapping[str, Any],
    mesh: Mesh,
    layout: ActivationLayout,
    unit_of: Callable[[JaxprEqn], Any] = lambda eqn: None,
    sequence: Sequences | None = None,
) -> Jaxpr:
    """A traced program with constraints at its shard boundaries, and along its sequences.

    `parameters` are its variables by path, sharded by `specs`; `batch` those whose first dims are
    samples. `unit_of` returns the unit of an equation: matmuls of one activation in different units
    are not merged.
    """
    context = context_mesh(mesh)
    if sequence and (not sequence.positions or free_axes(context).get(SEQ, 1) == 1):
        sequence = None
    of_axis = {axis: dims_sharded_over(axis, specs) for axis in (TENSOR, EXPERT)}
    windows = _beside_samples(context) > 1 and any(runs(eqn, WINDOWED) for eqn in jaxpr.eqns)
    if mesh.shape[TENSOR] == 1 and not of_axis[EXPERT] and not sequence and not windows:
        return jaxpr
    propagated = propagate_dims(jaxpr, parameters, batch)
    program, experts = (
        ShardedProgram(propagated, of_axis[axis], mesh.shape[axis], propagated.samples)
        for axis in (TENSOR, EXPERT)
    )
    if layout.sequence_parallel and program.dims and not program.sequences:
        warn_no_sequence_dim()
    dims: SequenceDims | None = None
    attend: Attend | None = None
    also: tuple[str, ...] = ()
    if sequence:
        dims = SequenceDims(propagated, sequence.positions, mesh.shape[SEQ])
        attend, also = sequence.attend, sequence.also
    layouts = BoundaryLayouts(program, context, layout, experts, dims, also)
    boundaries = _Boundaries(layouts, unit_of, attend)
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
      entered: an activation, and whether the region is in an expert -> its variable inside.
      carried: the values that a loop carries to its next trip.
      at_experts: an activation of tokens, and whether it is sharded by expert -> its variable.
    """

    frame: CallFrame
    groups: dict[int, list[int]]
    entered: dict[tuple[Any, bool], Atom] = field(default_factory=dict)
    at_experts: dict[tuple[Any, bool], Atom] = field(default_factory=dict)
    carried: frozenset[Var] = frozenset()

    @cached_property
    def makers(self) -> dict[Var, int]:
        return {v: i for i, e in enumerate(self.frame.jaxpr.eqns) for v in e.outvars}


class _Boundaries(Rewriter[bool]):
    """The rewriting of one program; each call of a function is written by itself.

    The state of a value is whether it is sharded by expert (`boundary_ops.ExpertLayout`): what is
    computed from products with sharded experts, until an operation ends their dim.
    """

    def __init__(
        self,
        layouts: BoundaryLayouts,
        unit_of: Callable[[JaxprEqn], Any],
        attend: Attend | None = None,
    ) -> None:
        super().__init__()
        self.attend = attend
        self.layouts, self.program, self.unit_of = layouts, layouts.program, unit_of
        self.experts = layouts.experts

    def constant(self, atom: Atom) -> bool:
        return False

    def unknown(self, atom: Atom) -> bool:
        return False

    def derived(self, states: Sequence[bool], out: Var) -> bool:
        return any(states)

    def of(self, frame: CallFrame) -> _Scope:
        """Group column matmuls of one activation.

        A group is of one unit, so that ZeRO 3 gathers no other unit's weights for it.
        """
        groups: dict[Any, list[int]] = {}
        for position, eqn in enumerate(frame.jaxpr.eqns):
            product = product_of(eqn)
            is_matmul = product is not None and product.primitive.name == "dot_general"
            if is_matmul and (at := self.program.enters(frame, eqn)):
                x, other = eqn.invars[at[0]], eqn.invars[1 - at[0]]
                layout = self.layouts.of(frame, x)
                if layout.saved != layout.replicated and frame.is_weight(other):
                    key = x, self.unit_of(eqn), self._has_experts(frame, other)
                    groups.setdefault(key, []).append(position)
        return _Scope(frame, {positions[0]: positions for positions in groups.values()})

    def scope(self, program: Rewriting[bool], body: Body) -> Any:
        frames = program.scope.frame.inner.get(program.position, ())
        for frame in frames:
            if frame.jaxpr is body.jaxpr:
                carried = filter(is_var, body.jaxpr.outvars[: body.num_carry])
                return replace(self.of(frame), carried=frozenset(carried))
        return LEAVE

    def enter(self, program: Rewriting[bool], eqn: JaxprEqn) -> bool:
        inner = program.scope.frame.inner
        opaque = (*CUSTOM_DERIVATIVE, ATTENTION)
        return program.position in inner and eqn.primitive.name not in opaque

    def equation(self, program: Rewriting[bool], eqn: JaxprEqn) -> Sequence[bool]:
        if eqn.primitive.name == ATTENTION and self._attention(program, eqn):
            return [self.unknown(v) for v in eqn.outvars]
        states = super().equation(program, eqn)
        if self.layouts.sequence and eqn.primitive.name != "sharding_constraint":
            self._along_sequence(program, program.position, states)
        return states

    def other(self, program: Rewriting[bool], eqn: JaxprEqn) -> Sequence[bool]:
        scope: _Scope = program.scope
        if program.position in scope.groups:
            self._columns(program, scope, scope.groups[program.position])
        elif function := self._per_device(scope.frame, eqn):
            operands = [program.atom(v) for v in eqn.invars]
            like = _in_scope(eqn, WINDOWS_SCOPE)
            program.replace(eqn.outvars, program.splice(function, operands, like))
        elif any(along := self._windowed(scope.frame, program.position)):
            self._unsharded(program, eqn, along)
        else:
            self._plain(program, scope, eqn)
        return [program.state(v) for v in eqn.outvars]

    def _plain(self, program: Rewriting[bool], scope: _Scope, eqn: JaxprEqn) -> None:
        frame = scope.frame
        inside, sums = self._inside_experts(program, frame, eqn)
        operands = self._operands(program, scope, eqn, inside)
        for i in self.program.enters(frame, eqn):
            v = eqn.invars[i]
            if (v, inside) not in scope.entered:
                entering = enter(self.layouts.of(frame, v, inside))
                (scope.entered[v, inside],) = program.splice(entering, [operands[i]], eqn)
            operands[i] = scope.entered[v, inside]
        for v in eqn.outvars if inside else ():
            program.set_state(v, self.experts.sharded_dim(frame, v) is not None)
        if sums:  # over `tensor` too, if the operation leaves its region
            program.emit(eqn, operands)
            (out,) = eqn.outvars
            summing = sum_over_experts(self.layouts.around_experts(frame, out))
            program.replace([out], program.splice(summing, [program.atom(out)], eqn))
            return
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
        leaving = leave(self.layouts.of(frame, out, inside))
        program.replace([out], program.splice(leaving, [program.atom(out)], eqn))

    # -- windows that move along sharded dims ------------------------------------------------------

    def _per_device(self, frame: CallFrame, eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
        """A windowed operation, each device on its part; None leaves it as it is."""
        windows, sequence = windows_of(eqn), self.layouts.sequence
        if not windows or eqn.primitive.name in WINDOW_SELECTIONS or is_marked(eqn):
            return None
        arrays: list[Any] = [*eqn.invars, *eqn.outvars]
        tensor = [self.program.sharded_dim(frame, v) for v in arrays]
        along: Any = [None] * len(arrays)
        if sequence and any(w.moves for w in windows):
            along = [sequence.of(frame, v) for v in arrays]
        of_seq = (w for w in windows if (w.dim, w.out) == (along[0], along[-1]) and not w.dilated)
        window = None if any(d is not None for d in along[1:-1]) else next(of_seq, None)
        groups = [eqn.params[key] for key in GROUPS if key in eqn.params]
        beside = _beside_samples(self.layouts.mesh, () if tensor[-1] is None else (TENSOR,))
        if window is None and (max(groups, default=1) == 1 or beside == 1):
            return None
        conv = eqn.params.get("dimension_numbers")
        samples = (conv.lhs_spec[0], conv.out_spec[0]) if conv else (0, 0)
        shards = None
        if all(self.program.is_samples(frame.of(arrays[i])[samples[i]]) for i in (0, -1)):
            shards = self.layouts.samples(shape_of(arrays[0])[samples[0]], also=self.layouts.also)
        features = dims_of_features(eqn, self.program.num_shards, tensor)
        axes: list[Any] = [{d: TENSOR} if d is not None else {} for d in features]
        for i in (0, -1):
            axes[i] |= {samples[i]: shards} | ({along[i]: SEQ} if window else {})
        return per_device(eqn, axes, free_axes(self.layouts.mesh), window)

    def _windowed(self, frame: CallFrame, position: int) -> list[tuple[int, ...]]:
        """The dims of operands and results that must not be sharded: windows move along them.

        Of a function with a derivative of its own that has windows, the sequence dims.
        """
        eqn, sequence = frame.jaxpr.eqns[position], self.layouts.sequence
        arrays: list[Any] = [*eqn.invars, *eqn.outvars]
        dims = [self._sequence_dims(frame, v) for v in arrays]
        if eqn.primitive.name in CUSTOM_DERIVATIVE:
            return dims if any(dims) and _has_windows(eqn) else []
        if not any(w.moves for w in windows_of(eqn)):
            return []
        moving, triples = moving_dims(eqn), zip(arrays, dims, moving_dims(eqn), strict=True)
        meets = ({self.program.sharded_dim(frame, v), *seq} & {*at} for v, seq, at in triples)
        return moving if sequence or any(meets) else []

    def _sequence_dims(self, frame: CallFrame, v: Any) -> tuple[int, ...]:
        dims = [self.layouts.sequence.of(frame, v)] if self.layouts.sequence else []
        if self.layouts.layout.sequence_parallel:
            dims.append(self.program.sequence_dim(frame, v))
        return tuple(d for d in dims if d is not None)

    def _unsharded(
        self, program: Rewriting[bool], eqn: JaxprEqn, dims: Sequence[tuple[int, ...]]
    ) -> None:
        """Write an operation, with these dims of its operands and results unsharded."""

        def without(atom: Atom, unsharded: tuple[int, ...]) -> Atom:
            if not unsharded or not is_var(atom):
                return atom
            ndim = len(shape_of(atom))
            spec = (None if d in unsharded else PartitionSpec.UNCONSTRAINED for d in range(ndim))
            at = NamedSharding(self.layouts.mesh, PartitionSpec(*spec))
            return program.splice(partial(_in_windows, at=at), [atom], eqn)[0]

        atoms = map(program.atom, (*eqn.invars, *eqn.outvars))
        pairs = zip(atoms, dims, strict=True)
        program.emit(eqn, [without(*next(pairs)) for _ in eqn.invars])
        program.replace(eqn.outvars, [without(*pair) for pair in pairs])

    # -- along the sequence -----------------------------------------------------------------------

    def _along_sequence(
        self, program: Rewriting[bool], position: int, states: Sequence[bool]
    ) -> None:
        """Shard the results of an operation along the sequence, where the compiler might not."""
        scope: _Scope = program.scope
        frame, eqn, dims = scope.frame, scope.frame.jaxpr.eqns[position], self.layouts.sequence
        assert dims is not None
        decides = _decides(eqn, position in frame.inner)
        if eqn.primitive.name == "reshape":
            decides = any(dims.merged(n) for v in (*eqn.invars, *eqn.outvars) for n in frame.of(v))
        for v, by_expert in zip(eqn.outvars, states, strict=True):
            at = None
            if frame.is_weight(v):
                at = self._undivided(frame, v)
            elif decides or v in scope.carried:
                at = self.layouts.along_sequence(frame, v, by_expert)
            if at is not None:
                shard = partial(_along, at=at)
                program.replace([v], program.splice(shard, [program.atom(v)], eqn))

    def _undivided(self, frame: CallFrame, v: Var) -> NamedSharding | None:
        """The sharding of what is read of weights for each position, if `seq` does not divide it.

        It is unsharded along the sequence. Its gradient is summed over the samples, and XLA adds
        what it padded the sum with to row 0 of the weights where samples are sharded, too (jax
        0.11.2 and 0.12.0.1).
        """
        at = self.layouts.along_sequence(frame, v)
        if at is None:
            return None
        shards = at.mesh.shape[SEQ]
        spec = [
            None if SEQ in spec_axes((entry,)) and size % shards else entry
            for entry, size in zip(at.spec, shape_of(v), strict=True)
        ]
        return NamedSharding(at.mesh, PartitionSpec(*spec)) if spec != [*at.spec] else None

    def _attention(self, program: Rewriting[bool], eqn: JaxprEqn) -> bool:
        """Replace an attention; False leaves it as it is."""
        sequence, frame = self.layouts.sequence, program.scope.frame
        if self.attend is None or sequence is None:
            return False
        attend = self.attend(eqn, [sequence.of(frame, v) == 1 for v in eqn.invars], frame)
        if attend is None:
            return False
        operands = [program.as_traced(v, eqn) for v in eqn.invars]
        like = _in_scope(eqn, SEQUENCE_SCOPE)
        program.replace(eqn.outvars, program.splice(attend, operands, like))
        return True

    # -- around experts ---------------------------------------------------------------------------

    def _has_experts(self, frame: CallFrame, atom: Any) -> bool:
        """Whether an atom is computed from experts' weights alone, and sharded as they are."""
        made_of_experts = not frame.sources(atom).isdisjoint(self.experts.dims)
        return made_of_experts and self.experts.sharded_dim(frame, atom) is not None

    def _inside_experts(
        self, program: Rewriting[bool], frame: CallFrame, eqn: JaxprEqn
    ) -> tuple[bool, bool]:
        """Whether an operation runs on arrays sharded by expert, and gives sums over the experts.

        An operation that ends their dim can do either: sum on the experts' devices and send partial
        sums of all tokens, or send the rows back first. The one that sends less is chosen: with a
        capacity the rows, where every expert computes every token the sums.
        """
        dim = self.experts.sharded_dim
        weights = [self._has_experts(frame, v) for v in eqn.invars]
        held = [program.state(v) for v in eqn.invars]
        if not any((*weights, *held)) or all(map(frame.is_weight, eqn.outvars)):
            return False, False
        if any(dim(frame, v) is not None for v in eqn.outvars):
            return True, False
        if product_of(eqn) is None and eqn.primitive.name != "reduce_sum":
            return False, False
        rows = [v for v in eqn.invars if dim(frame, v) is not None and not frame.is_weight(v)]
        back, there = (
            sum(math.prod(shape_of(v)) for v in rows if program.state(v) is inside)
            for inside in (True, False)
        )
        partial_sums = self.experts.num_shards * math.prod(shape_of(eqn.outvars[0]))
        sums = any(weights) or partial_sums + there < back
        return sums, sums

    def _operands(
        self, program: Rewriting[bool], scope: _Scope, eqn: JaxprEqn, inside: bool
    ) -> list[Atom]:
        """The operands of an operation, sent to the experts' devices or back."""
        frame, operands = scope.frame, [program.atom(v) for v in eqn.invars]
        for i, v in enumerate(eqn.invars):
            if program.state(v) == inside or not is_var(v) or frame.is_weight(v):
                continue
            rows = self.experts.sharded_dim(frame, v) is not None
            if not rows and product_of(eqn) is None:
                continue  # broadcast along the experts
            if (v, inside) not in scope.at_experts:
                send = (to_experts if inside else from_experts) if rows else gather_for_experts
                function = send(self.layouts.around_experts(frame, v))
                (scope.at_experts[v, inside],) = program.splice(function, [operands[i]], eqn)
            operands[i] = scope.at_experts[v, inside]
        return operands

    # -- column matmuls of one activation ---------------------------------------------------------

    def _columns(self, program: Rewriting[bool], scope: _Scope, positions: Sequence[int]) -> None:
        frame = scope.frame
        eqns = [frame.jaxpr.eqns[p] for p in positions]
        program.done.update(positions)
        pairs = [(eqn, self.program.enters(frame, eqn)[0]) for eqn in eqns]
        weights = [eqn.invars[1 - side] for eqn, side in pairs]
        for w in weights:
            self._hoist(program, scope, w)
        eqn, side = pairs[0]
        x, inside = eqn.invars[side], self._inside_experts(program, frame, eqns[0])[0]
        for v in (v for eqn in eqns for v in eqn.outvars if inside):
            program.set_state(v, True)
        ring = self.layouts.ring(frame, x)
        marked = any(map(is_marked, eqns))  # a function of arrays of these shapes
        if ring and all(self._has_equal_shards(frame, w) for w in weights) and not marked:
            matmuls = [self._ring_matmul(frame, *pair) for pair in pairs]
            function: Any = lambda x, *weights: ring_columns(x, weights, matmuls, **ring)  # noqa: E731
        else:
            function = columns([bound(*pair) for pair in pairs], self.layouts.of(frame, x, inside))
        operand = self._operands(program, scope, eqn, inside)[side]
        results = program.splice(function, [operand, *map(program.atom, weights)], eqn)
        program.replace([eqn.outvars[0] for eqn in eqns], results)
        for position in positions[1:] if self.layouts.sequence else ():
            self._along_sequence(program, position, [inside])

    def _hoist(self, program: Rewriting[bool], scope: _Scope, weight: Any) -> None:
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


def _along(x: jax.Array, at: NamedSharding) -> jax.Array:
    return constrain(x, at, "sequence")


def _has_windows(eqn: JaxprEqn) -> bool:
    """Whether a pass of a function with a derivative of its own has windows."""
    return any(runs(e, WINDOWED) for e in (eqn, *derivative(eqn).jaxpr.eqns))


def _in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    """What inserted equations have the source info of; reports read the scope."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


def _beside_samples(mesh: Any, also: tuple[str, ...] = ()) -> int:
    """The number of devices along the axes that shard neither samples nor `also`."""
    free = free_axes(mesh)
    return product([axis for axis in free if axis not in (*sample_axes(), *also)], free)


def _in_windows(x: jax.Array, at: NamedSharding) -> jax.Array:
    return constrain(x, at, "windows")


def _decides(eqn: JaxprEqn, has_frames: bool) -> bool:
    """Whether the compiler may shard the results of an operation otherwise than its operands."""
    name = eqn.primitive.name
    if name in DRAWS:
        return is_threefry(eqn)
    return (
        product_of(eqn) is not None
        or name in ("gather", *SCATTERS)
        or (name in CUSTOM_DERIVATIVE and runs(eqn, PRODUCTS))
        or any(True for _ in continued(eqn, has_frames))
    )


DRAWS = ("random_bits", "random_gamma")  # all of jax.random comes down to these, on keys


def is_threefry(eqn: JaxprEqn) -> bool:
    """Whether draws do not depend on the sharding, as those of other generators (`rbg`) do."""
    key: Any = eqn.invars[0].aval
    return bool(key.dtype == _threefry_key().dtype)


@functools.cache
def _threefry_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))


def bound(eqn: Any, side: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A matmul as a function of the activation, operand number `side`, and the weight."""

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        operands = (x, weight) if side == 0 else (weight, x)
        return eqn.primitive.bind(*operands, **eqn.params)

    return matmul
