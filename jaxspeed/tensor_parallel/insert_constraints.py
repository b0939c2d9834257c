"""Insertion of sharding constraints at the shard boundaries of a traced program.

Equations are replaced one by one, each new one under the name of the one that it stands for, so
that a unit's equations stay together and ZeRO 3 can slice the result.

Grouped convolutions are run manually, each device its own samples: XLA partitions their gradient
wrongly (jax 0.10.2, CPU, with Shardy and without).
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxspeed.jaxpr.inline_calls import Spliced
from jaxspeed.jaxpr.primitives import CUSTOM_DERIVATIVE
from jaxspeed.jaxpr.traverse import is_var, open_jaxpr, with_functions, with_jaxpr
from jaxspeed.ops.free_axes import TENSOR, free_axes
from jaxspeed.tensor_parallel.activation_layout import Sides, Style, context_mesh
from jaxspeed.tensor_parallel.boundary_ops import columns, enter, leave
from jaxspeed.tensor_parallel.collective_matmul import Product, ring_columns, ring_row
from jaxspeed.tensor_parallel.dim_propagation import Frame, follow
from jaxspeed.tensor_parallel.shard_boundaries import ShardedProgram, dims_cut_over

log = logging.getLogger("jaxspeed")


def with_crossings(
    jaxpr: Any,
    parameters: Mapping[str, Any],
    batch: Sequence[Any],
    specs: Mapping[str, Any],
    mesh: Mesh,
    style: Style,
    unit_of: Callable[[Any], Any] = lambda eqn: None,
) -> Any:
    """A traced program with its crossings in it.

    `parameters` are its variables by path, cut as `specs` say; `batch` those whose first dims are
    samples. `unit_of` tells the unit of an equation: the products of one activation in two units
    are not written as one.
    """
    if mesh.shape[TENSOR] == 1:
        return jaxpr
    followed = follow(jaxpr, parameters, batch)
    cut = ShardedProgram(
        followed, dims_cut_over(TENSOR, specs), mesh.shape[TENSOR], followed.samples
    )
    if style.sequence_parallel and cut.dims and not cut.sequences:
        warn_that_nothing_is_a_sequence()
    return _Writing(Sides(cut, context_mesh(mesh), style), followed.top, unit_of).run()


@functools.cache
def warn_that_nothing_is_a_sequence() -> None:
    """Once: the loss is traced several times."""
    log.warning(
        "parallel.sequence_parallel_activations does nothing for this model: what leaves its cut "
        "products has no dim between samples and features, as [batch, sequence, features] has "
        "(samples and sequence folded into one dim cannot be cut apart)"
    )


class _Writing:
    """One function under way."""

    def __init__(self, sides: Sides, frame: Frame, unit_of: Callable[[Any], Any]) -> None:
        self.sides, self.frame, self.jaxpr, self.unit_of = sides, frame, frame.jaxpr, unit_of
        self.eqns: list[Any] = []
        self.entered: dict[Any, Any] = {}  # an activation -> itself as it enters the cut
        self.done: set[int] = set()  # positions that are written already
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
        elif is_grouped(eqn) and self.sides.cut.dim(self.frame, eqn.outvars[0]) is None:
            self._write_grouped(eqn)
        else:
            self._write_plain(eqn)

    def _write_plain(self, eqn: Any) -> None:
        cut, frame = self.sides.cut, self.frame
        entering = {eqn.invars[i] for i in cut.enters(frame, eqn)}
        for v in entering - self.entered.keys():
            move = Spliced.of(enter(self.sides.between(frame, v)), [v])
            self.eqns += move.eqns([v], move.outs, eqn)
            self.entered[v] = move.outs[0]
        if entering:
            invars = [self.entered[v] if is_var(v) and v in entering else v for v in eqn.invars]
            eqn = eqn.replace(invars=invars)
        if not cut.leaves(frame, eqn):
            self.eqns.append(eqn)
            return
        (out,) = eqn.outvars
        if (ring := self.sides.ring(self.frame, out)) and (row := self._row_of(eqn)):
            side, product = row
            operands = [eqn.invars[side], eqn.invars[1 - side]]
            multiply = Spliced.of(partial(ring_row, product=product, **ring), operands)
            self.eqns += multiply.eqns(operands, [out], eqn)
            return
        # The sum gets a variable of its own; what has left keeps the one that others read.
        move = Spliced.of(leave(self.sides.between(frame, out)), [out])
        self.eqns.append(eqn.replace(outvars=move.ins))
        self.eqns += move.eqns(move.ins, [out], eqn)

    def _write_grouped(self, eqn: Any) -> None:
        image = eqn.invars[0]
        dim = eqn.params["dimension_numbers"].lhs_spec[0]
        is_samples = self.sides.cut.is_samples(self.frame.of(image)[dim])
        samples = self.sides.samples(image.aval.shape[dim]) if is_samples else None
        alone = Spliced.of(each_on_its_own(eqn, samples, {*free_axes(self.sides.mesh)}), eqn.invars)
        self.eqns += alone.eqns(eqn.invars, eqn.outvars, eqn)

    # -- products of one activation -----------------------------------------------------------

    def _groups(self) -> dict[int, list[int]]:
        """The products by which one activation, cut along its sequence, enters: by their first.

        Those of one unit, so that ZeRO 3 gathers no other unit's weights for them.
        """
        cut, frame = self.sides.cut, self.frame
        found: dict[tuple[Any, Any], list[int]] = {}
        for position, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive.name == "dot_general" and (at := cut.enters(frame, eqn)):
                x = eqn.invars[at[0]]
                between = self.sides.between(frame, x)
                if between.kept != between.whole and frame.is_weight(eqn.invars[1 - at[0]]):
                    found.setdefault((x, self.unit_of(eqn)), []).append(position)
        return {positions[0]: positions for positions in found.values()}

    def _write_columns(self, positions: Sequence[int]) -> None:
        eqns = [self.jaxpr.eqns[p] for p in positions]
        self.done.update(positions)
        sides = [self.sides.cut.enters(self.frame, eqn)[0] for eqn in eqns]
        weights = [eqn.invars[1 - side] for eqn, side in zip(eqns, sides, strict=True)]
        for w in weights:
            self._hoist(w)
        x = eqns[0].invars[sides[0]]
        pairs = list(zip(eqns, sides, strict=True))
        ring = self.sides.ring(self.frame, x)
        if ring and all(self._is_cut_evenly(w) for w in weights):
            products = [self._product(*pair) for pair in pairs]
            function: Any = lambda x, *weights: ring_columns(x, weights, products, **ring)  # noqa: E731
        else:
            function = columns([bound(*pair) for pair in pairs], self.sides.between(self.frame, x))
        new = Spliced.of(function, [x, *weights])
        self.eqns += new.eqns([x, *weights], [eqn.outvars[0] for eqn in eqns], eqns[0])

    def _hoist(self, weight: Any) -> None:
        """Write what makes a weight, which depends on parameters alone, before it is its turn."""
        position = self.makers.get(weight) if is_var(weight) else None
        if position is not None and position not in self.done:
            for v in self.jaxpr.eqns[position].invars:
                self._hoist(v)
            self._write(position)

    # -- products around a ring ---------------------------------------------------------------

    def _row_of(self, eqn: Any) -> tuple[int, Product] | None:
        """A product that leaves the cut by a weight: the activation's place, and its dims."""
        weights = [self.frame.is_weight(v) for v in eqn.invars]
        if eqn.primitive.name != "dot_general" or sorted(weights) != [False, True]:
            return None
        side = weights.index(False)
        x, weight = eqn.invars[side], eqn.invars[1 - side]
        dims = [self.sides.cut.dim(self.frame, v) for v in (x, weight)]
        if None in dims or self.sides.cut.sequence_dim(self.frame, x) is None:
            return None
        if not self._is_cut_evenly(weight):
            return None
        return side, self._product(eqn, side)

    def _is_cut_evenly(self, weight: Any) -> bool:
        """Not so a padded vocabulary: layers see it without its padding."""
        dim = self.sides.cut.dim(self.frame, weight)
        return dim is not None and weight.aval.shape[dim] % self.sides.cut.ways == 0

    def _product(self, eqn: Any, side: int) -> Product:
        """A product of the activation that is its operand `side` and a weight that is cut."""
        cut, frame = self.sides.cut, self.frame
        x, weight, y = eqn.invars[side], eqn.invars[1 - side], eqn.outvars[0]
        x_seq, y_seq = cut.sequence_dim(frame, x), cut.sequence_dim(frame, y)
        w_cut = cut.dim(frame, weight)
        assert x_seq is not None and y_seq is not None and w_cut is not None
        return Product(
            bound(eqn, side), x_seq, y_seq, w_cut, x_cut=cut.dim(frame, x), y_cut=cut.dim(frame, y)
        )

    # -- functions within ---------------------------------------------------------------------

    def _nested(self, position: int, eqn: Any) -> Any:
        written = {
            id(f.jaxpr): _Writing(self.sides, f, self.unit_of).run()
            for f in self.frame.inner[position]
        }

        def new(closed: Any) -> Any:
            jaxpr, _ = open_jaxpr(closed)
            return with_jaxpr(closed, written.get(id(jaxpr), jaxpr))

        return with_functions(eqn, new)


def bound(eqn: Any, side: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A product as a function of the activation, which is its operand `side`, and the weight."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        operands = (x, weight) if side == 0 else (weight, x)
        return eqn.primitive.bind(*operands, **eqn.params)

    return product


# -- grouped convolutions that no axis cuts: each device computes its own samples -----------------

GROUPS = ("feature_group_count", "batch_group_count")


def is_grouped(eqn: Any) -> bool:
    return eqn.primitive.name == "conv_general_dilated" and any(eqn.params[g] != 1 for g in GROUPS)


def each_on_its_own(
    eqn: Any, samples: Any, axes: set[str]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The convolution of an equation, manual over `axes`; `samples` are those that cut them."""
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
