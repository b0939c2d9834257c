"""The pass of adapters: each product of a traced loss that reads an adapted weight is adapted.

A weight reaches its products through casts, transposes, reshapes, slices of a stack, scans, jit,
checkpoint and branches: the view that a value is of a weight is followed through them, with the
adapter's factors as that view has them. Into an inner program they go as further inputs. Any other
read of a weight, also one by a function with a custom derivative, is of the merged weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspeed.adapters.adapter import Adapter
from jaxspeed.adapters.products import (
    RANK,
    Factors,
    adapted,
    dims_of,
    factor_shapes,
    is_adaptable,
    merged,
    norms,
)
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.primitives import CASTS, CHECKPOINTS, INLINED, PAIRWISE, RESHAPES
from jaxspeed.jaxpr.rewriter import Atom, Rewriter, Rewriting
from jaxspeed.jaxpr.traverse import (
    Body,
    Jaxpr,
    JaxprEqn,
    Var,
    bodies,
    forwarded_operands,
    is_marked,
    is_var,
    with_functions,
    with_jaxpr,
)
from jaxspeed.jaxpr.weight_uses import WeightDims
from jaxspeed.placement.paths import listed
from jaxspeed.user_models.rng import micro_batch_key

Labels = frozenset[int]  # the dims of a weight that are in a dim of a value
Label = int  # a dim of a value, or RANK


class View(NamedTuple):
    """What a value is of a weight: the same elements, or some of them, in other dims.

    Attributes:
      path: of the weight.
      labels: for each dim of the value the weight's dims that are in it; none of a size of 1.
      order: the value's dims in the weight's order.
      stacked: the weight's dims that scans or indices have taken.
      parts: the adapter's values by name; their dims are in `order` too.
    """

    path: str
    labels: tuple[Labels, ...]
    order: tuple[int, ...]
    stacked: Labels
    parts: tuple[tuple[str, Atom], ...] = ()


@dataclass(frozen=True)
class AdaptedLoss:
    """A program with its adapters, and the weights that it merges with theirs."""

    jaxpr: Jaxpr
    merged: tuple[str, ...]


def weight_dims(jaxpr: Jaxpr, weights: Mapping[Var, str]) -> dict[str, list[WeightDims]]:
    """The dims of each weight in the products that read it, in the program's order."""
    walk = _Walk({})
    walk.run(jaxpr, [_first_view(weights[v], v) if v in weights else None for v in jaxpr.invars])
    return walk.uses


def adapt_loss(
    jaxpr: Jaxpr,
    parameters: Mapping[str, Var],
    adapters: Mapping[str, Adapter],
    key: tuple[Var, Var, Var] | None,
    squares: Mapping[str, Var] | None = None,
) -> AdaptedLoss:
    """Adapt the products of a loss that read weights with adapters.

    Args:
      parameters: the program's variables that are parameters, with the adapters' leaves.
      key: the variables of a key, the step and the micro-batch, for dropout; None for none.
      squares: those of the squared norms of weights, for DoRA; others are computed at each read.

    Raises:
      ModelError: a weight's dims are not those that were assumed, or a weight that has dropout is
        read otherwise than by products.
    """
    names = {v: path for path, v in parameters.items() if path in adapters}
    uses = weight_dims(jaxpr, names)
    for path, adapter in adapters.items():
        _check_dims(adapter, uses.get(path, ()))
    walk = _Walk(adapters, with_dropout=key is not None)
    program = Rewriting(walk, jaxpr, [None] * len(jaxpr.invars))
    for v, path in names.items():
        view = _first_view(path, v)
        program.set_state(v, walk.with_parts(program, view, parameters, key, squares or {}))
    for position in range(len(jaxpr.eqns)):
        program.write(position)
    walk.merge_results(program, jaxpr.outvars)
    merged_paths = tuple(walk.merged)
    dropped = [path for path in merged_paths if adapters[path].dropout]
    if dropped:
        raise ModelError(
            f"lora.lora_dropout: {listed(dropped)} is read otherwise than by a product or a lookup "
            "(or inside a function with a derivative of its own), where its adapter has no input "
            "to drop; set it to 0, or name the module in lora.exclude_modules"
        )
    return AdaptedLoss(_without_unread(program.finished(), {*jaxpr.eqns}), merged_paths)


def _first_view(path: str, v: Var) -> View:
    dims = range(len(_aval(v).shape))
    return View(path, tuple(frozenset([d]) for d in dims), tuple(dims), frozenset())


def _check_dims(adapter: Adapter, uses: Sequence[WeightDims]) -> None:
    """Refuse dims that were assumed and that no use has."""
    if not adapter.is_assumed or not uses or adapter.dims in uses:
        return
    raise ModelError(
        f"lora: {adapter.path} {adapter.shape} was taken for a weight with the inputs "
        f"{adapter.dims.inputs} and the outputs {adapter.dims.outputs} of its dims, and the loss "
        f"uses it otherwise, with the inputs {uses[0].inputs} and the outputs {uses[0].outputs}: "
        "pass initialize(..., example_batch=...), a batch or the shapes of one, by which this is "
        "found"
    )


class _Walk(Rewriter[View | None]):
    """Follows weights, notes their uses, and adapts those of `adapters`."""

    def __init__(self, adapters: Mapping[str, Adapter], with_dropout: bool = False) -> None:
        super().__init__()
        self.adapters, self.with_dropout = adapters, with_dropout
        self.uses: dict[str, list[WeightDims]] = {}
        self.merged: dict[str, None] = {}
        self._entered: dict[Any, tuple[Jaxpr, Jaxpr, list[bool]]] = {}
        # By the original and the new inner program, which are kept alive.
        self._held: dict[tuple[int, int], tuple[Any, Jaxpr, Any]] = {}
        self._count = 0  # of products with dropout
        self.rules = {
            **dict.fromkeys(CASTS, self._cast),
            **dict.fromkeys(("name", "sharding_constraint"), self._same),
            **dict.fromkeys(PAIRWISE, self._pairwise),
            **dict.fromkeys(RESHAPES, self._reshape),
            "broadcast_in_dim": self._broadcast,
            "transpose": self._transpose,
            "slice": self._slice,
            "split": self._split,
            "dynamic_slice": self._dynamic_slice,
            "scan": self._scan,
            "cond": self._branches,
            **dict.fromkeys(CHECKPOINTS, self._checkpoint),
        }

    def equation(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        views = [program.state(v) for v in eqn.invars]
        if not any(views):
            program.emit(eqn)
            return [None] * len(eqn.outvars)
        name = eqn.primitive.name
        if name in INLINED and bodies(eqn) and not is_marked(eqn):
            return [program.state(v) for v in program.inline(eqn)]
        if name in self.rules and (bodies(eqn) or self._is_view(name, views)):
            return self.rules[name](program, eqn)
        return self._read(program, eqn, views)

    def _is_view(self, name: str, views: Sequence[View | None]) -> bool:
        """Whether an equation may be a view: of a weight's own elements, not placed by them."""
        return views[0] is not None or name in PAIRWISE

    # -- views -------------------------------------------------------------------------------------

    def _same(self, program: Rewriting[View | None], eqn: JaxprEqn) -> list[View | None]:
        program.emit(eqn)
        return [program.state(eqn.invars[0])]

    def _pairwise(self, program: Rewriting[View | None], eqn: JaxprEqn) -> list[View | None]:
        program.emit(eqn)
        return [program.state(v) for v in eqn.invars]

    def _cast(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        if not jnp.issubdtype(_aval(eqn.outvars[0]).dtype, jnp.floating):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        return self._same(program, eqn)

    def _transpose(self, program: Rewriting[View | None], eqn: JaxprEqn) -> list[View | None]:
        view = _of(program, eqn)
        program.emit(eqn)
        permutation = eqn.params["permutation"]
        place = {old: new for new, old in enumerate(permutation)}
        labels = tuple(view.labels[d] for d in permutation)
        return [view._replace(labels=labels, order=tuple(place[d] for d in view.order))]

    def _broadcast(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        old, new = _aval(eqn.invars[0]), _aval(eqn.outvars[0])
        if old.size != new.size or list(eqn.params["broadcast_dimensions"]) != sorted(
            eqn.params["broadcast_dimensions"]
        ):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        return self._reshape(program, eqn)

    def _reshape(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        view = self._in_order(program, _of(program, eqn), eqn)
        old, new = _aval(eqn.invars[0]).shape, _aval(eqn.outvars[0]).shape
        if 0 in old:
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        labels: list[Labels] = []
        stacked = view.stacked
        for before, after in _groups(old, new):
            joint = frozenset().union(*(view.labels[d] for d in before))
            stacked |= frozenset() if after else joint
            labels += [joint if len(before) else frozenset()] * len(after)
        reshaped = View(view.path, tuple(labels), tuple(range(len(new))), stacked)
        if not self._separates(reshaped):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        program.emit(eqn)
        if view.parts:
            dims = self._dims(reshaped)
            a, b = factor_shapes(new, dims, self.adapters[view.path].rank)
            stack, outputs = (tuple(new[d] for d in x) for x in (dims.stack, dims.outputs))
            shapes = {"a": a, "b": b, "mask": (*stack, a[-1])}
            shapes |= dict.fromkeys(("magnitude", "squares"), (*stack, *outputs))
            parts = tuple(
                (name, self._spliced(program, x, eqn, _reshaped, shapes.get(name, stack)))
                for name, x in view.parts
            )
            reshaped = reshaped._replace(parts=parts)
        return [reshaped]

    def _slice(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        view, params = _of(program, eqn), eqn.params
        ends = list(zip(params["start_indices"], params["limit_indices"], strict=True))
        strides = params["strides"] or [1] * len(ends)
        shape = _aval(eqn.invars[0]).shape
        part_of = {
            d: slice(*bounds, stride)
            for d, (bounds, stride) in enumerate(zip(ends, strides, strict=True))
            if (bounds, stride) != ((0, shape[d]), 1)
        }
        if self._measures(view, part_of):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        program.emit(eqn)
        return [self._sliced(program, view, part_of, eqn)]

    def _split(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        view, axis, start = _of(program, eqn), eqn.params["axis"], 0
        if self._measures(view, [axis]):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        program.emit(eqn)
        slices: list[View | None] = []
        for size in eqn.params["sizes"]:
            part_of = {axis: slice(start, start + size, 1)}
            slices.append(self._sliced(program, view, part_of, eqn))
            start += size
        return slices

    def _sliced(
        self,
        program: Rewriting[View | None],
        view: View,
        part_of: Mapping[int, slice],
        eqn: JaxprEqn,
    ) -> View:
        def sliced(x: Any, labels: Sequence[Label]) -> Any:
            return x[tuple(part_of.get(label, slice(None)) for label in labels)]

        return self._each_part(program, view, eqn, sliced)

    def _dynamic_slice(
        self, program: Rewriting[View | None], eqn: JaxprEqn
    ) -> Sequence[View | None]:
        view, sizes = _of(program, eqn), eqn.params["slice_sizes"]
        shape = _aval(eqn.invars[0]).shape
        part_of = [d for d, size in enumerate(sizes) if size != shape[d]]
        if self._measures(view, part_of):
            return self._read(program, eqn, [program.state(v) for v in eqn.invars])
        program.emit(eqn)
        starts = [program.atom(eqn.invars[1 + d]) for d in part_of]

        def sliced(x: Any, labels: Sequence[Label], *starts: Any) -> Any:
            for d, start in zip(part_of, starts, strict=True):
                if d in labels:
                    x = lax.dynamic_slice_in_dim(x, start, sizes[d], labels.index(d))
            return x

        return [self._each_part(program, view, eqn, sliced, starts)]

    def _measures(self, view: View, part_of: Any) -> bool:
        """Whether DoRA's norm is not that of a slice of a weight."""
        adapter = self.adapters.get(view.path)
        return bool(adapter and adapter.dora) and bool({*part_of} & {*self._dims(view).inputs})

    def _in_order(self, program: Rewriting[View | None], view: View, eqn: JaxprEqn) -> View:
        """The view with its parts' dims in the order of the value."""
        ordered = view._replace(order=tuple(range(len(view.order))))
        if view.order == ordered.order or not view.parts:
            return ordered
        old, new = self._labels_of_parts(view), self._labels_of_parts(ordered)
        parts = tuple(
            (name, self._spliced(program, x, eqn, _in_dims_of, old[name], new[name]))
            for name, x in view.parts
        )
        return ordered._replace(parts=parts)

    def _each_part(
        self,
        program: Rewriting[View | None],
        view: View,
        eqn: JaxprEqn,
        change: Callable[..., Any],
        operands: Sequence[Atom] = (),
    ) -> View:
        """The view with `change(part, labels of its dims, *operands)` for each part."""
        labels = self._labels_of_parts(view) if view.parts else {}

        def changed(name: str, x: Atom) -> Atom:
            of_part = labels[name]
            return program.splice(lambda x, *o: change(x, of_part, *o), [x, *operands], eqn)[0]

        return view._replace(parts=tuple((name, changed(name, x)) for name, x in view.parts))

    def _spliced(
        self, program: Rewriting[View | None], x: Atom, eqn: JaxprEqn, change: Any, *args: Any
    ) -> Atom:
        return program.splice(lambda x: change(x, *args), [x], eqn)[0]

    def _separates(self, view: View) -> bool:
        """Whether each dim of a view is of one role."""
        adapter = self.adapters.get(view.path)
        if adapter is None:
            return True
        dims = adapter.dims
        roles = ({*dims.stack}, {*dims.inputs}, {*dims.outputs})
        return all(any(labels <= role for role in roles) for labels in view.labels)

    def _dims(self, view: View) -> WeightDims:
        """The roles of a value's dims, by those of the weight's."""
        adapter = self.adapters[view.path]
        dims = adapter.dims

        def of(role: Sequence[int]) -> tuple[int, ...]:
            return tuple(d for d in view.order if view.labels[d] and view.labels[d] <= {*role})

        added = {d for d in view.order if not view.labels[d]}
        stack = tuple(d for d in view.order if d in added or view.labels[d] <= {*dims.stack})
        return WeightDims(stack, of(dims.inputs), of(dims.outputs), dims.kind)

    def _labels_of_parts(self, view: View) -> dict[str, tuple[Label, ...]]:
        dims = self._dims(view)
        outputs = (*dims.stack, *dims.outputs)
        return {
            "a": (*dims.stack, *dims.inputs, RANK),
            "b": (*dims.stack, RANK, *dims.outputs),
            "mask": (*dims.stack, RANK),
            "magnitude": outputs,
            "squares": outputs,
            "scale": dims.stack,
            "adapted": dims.stack,
            "key": dims.stack,
        }

    # -- reads -------------------------------------------------------------------------------------

    def _read(
        self, program: Rewriting[View | None], eqn: JaxprEqn, views: Sequence[View | None]
    ) -> list[View | None]:
        """Write a product with its adapter; any other equation reads merged weights."""
        for operand, view in enumerate(views):
            used = dims_of(eqn, operand) if view else None
            if view is None or used is None:
                continue
            self._note(view, used)
            others = [v for i, v in enumerate(views) if i != operand]
            if any(others) or not self._adapts(eqn, operand, view):
                continue
            self._adapted(program, eqn, operand, view)
            return [None] * len(eqn.outvars)
        groups = eqn.params.get("feature_group_count", 1)
        refused = [view.path for view in views if view and view.path in self.adapters]
        if groups > 1 and refused:  # PEFT's A is of all groups, and has no merged weight
            raise ModelError(
                f"lora: {listed(refused)} is the weight of a convolution with {groups} groups of "
                "features, for which there are no adapters here: name its module in "
                "lora.exclude_modules"
            )
        operands = [
            self._merged(program, v, view, eqn) if view else program.atom(v)
            for v, view in zip(eqn.invars, views, strict=True)
        ]
        program.emit(eqn, operands)
        # A result that is an operand unchanged has its adapter if that has been merged.
        left = [None if view and view.parts else view for view in views]
        return [
            None if i is None else left[i]
            for i in forwarded_operands(eqn) or [None] * len(eqn.outvars)
        ]

    def _note(self, view: View, used: WeightDims) -> None:
        """Note a use by the dims of the weight, if each is of one role."""

        def of(dims: Sequence[int]) -> Labels:
            return frozenset().union(*(view.labels[d] for d in dims))

        stack, inputs, outputs = of(used.stack) | view.stacked, of(used.inputs), of(used.outputs)
        count = len(stack | inputs | outputs)
        if inputs and outputs and len(stack) + len(inputs) + len(outputs) == count:
            sorted_dims = (tuple(sorted(x)) for x in (stack, inputs, outputs))
            dims = WeightDims(next(sorted_dims), next(sorted_dims), next(sorted_dims), used.kind)
            self.uses.setdefault(view.path, []).append(dims)

    def _adapts(self, eqn: JaxprEqn, operand: int, view: View) -> bool:
        adapter = self.adapters.get(view.path)
        if adapter is None or not view.parts or not view.stacked <= {*adapter.dims.stack}:
            return False
        dims = self._dims(view)
        return bool(dims.inputs and dims.outputs) and is_adaptable(
            eqn, operand, dims, has_magnitude=adapter.dora
        )

    def _adapted(
        self, program: Rewriting[View | None], eqn: JaxprEqn, operand: int, view: View
    ) -> None:
        adapter, dims = self.adapters[view.path], self._dims(view)
        names = [name for name, _ in view.parts]
        atoms = [program.as_traced(v, eqn) for v in eqn.invars]
        number, self._count = self._count, self._count + 1

        def product(*args: Any) -> Any:
            operands, parts = args[: len(atoms)], dict(zip(names, args[len(atoms) :], strict=True))
            factors, scale = _factors(adapter, dims, operands[operand], parts)
            key = parts.get("key")
            if key is not None:
                key = jax.random.fold_in(key.reshape(-1)[0], number)
            rate = adapter.dropout if key is not None else 0
            return adapted(eqn, operands, operand, dims, factors, scale, dropout=rate, key=key)

        outputs = program.splice(product, [*atoms, *(x for _, x in view.parts)], eqn)
        program.replace(eqn.outvars, outputs)

    def _merged(
        self, program: Rewriting[View | None], v: Atom, view: View, eqn: JaxprEqn | None
    ) -> Atom:
        """The value with the adapter of its weight."""
        if not view.parts:
            return program.atom(v)
        self.merged[view.path] = None
        adapter, dims = self.adapters[view.path], self._dims(view)
        names = [name for name, _ in view.parts]

        def total(weight: Any, *parts: Any) -> Any:
            of_view = dict(zip(names, parts, strict=True))
            factors, scale = _factors(adapter, dims, weight, of_view)
            return merged(weight, dims, factors, scale)

        atoms = [program.as_traced(v, eqn), *(x for _, x in view.parts)]
        return program.splice(total, atoms, eqn)[0]

    def merge_results(
        self,
        program: Rewriting[View | None],
        outvars: Sequence[Any],
        but: Sequence[int] = (),
    ) -> None:
        """Let a program's results that are views be merged, but for some."""
        for i, v in enumerate(outvars):
            view = program.state(v) if is_var(v) else None
            if view is not None and i not in but:
                program.replace([v], [self._merged(program, v, view, None)])

    # -- parts, and inner programs -----------------------------------------------------------------

    def with_parts(
        self,
        program: Rewriting[View | None],
        view: View,
        parameters: Mapping[str, Var],
        key: tuple[Var, Var, Var] | None,
        squares: Mapping[str, Var],
    ) -> View:
        """The view of a weight with the values of its adapter."""
        adapter = self.adapters[view.path]
        parts: dict[str, Atom] = {
            "a": parameters[adapter.leaf("A")],
            "b": parameters[adapter.leaf("B")],
        }
        if adapter.dora:
            parts["magnitude"] = parameters[adapter.leaf("magnitude")]
            if view.path in squares:
                parts["squares"] = squares[view.path]
        if not adapter.is_uniform:
            ranks, scales = adapter.per_layer(adapter.ranks), adapter.per_layer(adapter.scales)
            constants = {
                "mask": np.arange(adapter.rank) < ranks[..., None],
                "scale": scales,
                "adapted": ranks > 0,
            }
            for name, x in constants.items():
                if name != "adapted" or adapter.dora:
                    array = np.asarray(x, np.float32)
                    # A variable, as other inputs of a scan are.
                    (parts[name],) = program.splice(
                        lambda array=array: jnp.asarray(array) * 1, [], None
                    )
        if key is not None and adapter.dropout:

            def keys(*args: Any) -> Any:
                root = adapter.key(micro_batch_key(*args))
                return jax.random.split(root, adapter.stack) if adapter.stack else root

            (parts["key"],) = program.splice(keys, key, None)
        return view._replace(parts=tuple(parts.items()))

    def _scan(self, program: Rewriting[View | None], eqn: JaxprEqn) -> Sequence[View | None]:
        (body,) = bodies(eqn)
        count, first = body.num_consts, body.first_xs
        views = [program.state(v) for v in eqn.invars]
        inner: list[View | None] = []
        for i, view in enumerate(views):
            if view is not None and i >= first:
                view = self._of_trip(view)
            inner.append(view if i < count or i >= first else None)
        # A carried weight, or one that is scanned along another dim than a stacked one, is merged.
        atoms = [
            self._merged(program, v, view, eqn) if view and not kept else program.atom(v)
            for v, view, kept in zip(eqn.invars, views, inner, strict=True)
        ]
        entering = [
            self._in_front(program, view, eqn) if view and kept and i >= first else view
            for i, (view, kept) in enumerate(zip(views, inner, strict=True))
        ]
        pairs = list(zip(entering, inner, strict=True))
        more = [
            [x for view, kept in group if view and kept for _, x in view.parts]
            for group in (pairs[:count], pairs[first:])
        ]
        same = forwarded_operands(eqn)
        entered = self._entered_body(
            eqn, body, inner, [i for i, o in enumerate(same) if o is not None]
        )
        run, carried = as_function(entered, body.consts), body.num_carry
        parts = [atoms[:count], atoms[count:first], atoms[first:], *more]
        how = {key: eqn.params[key] for key in ("reverse", "unroll", "length")}

        def scan(*args: Any) -> list[Any]:
            operands = iter(args)
            consts, carry, xs, of_consts, of_xs = ([next(operands) for _ in part] for part in parts)

            def trip(carry: list[Any], xs: tuple[list[Any], list[Any]]) -> tuple[Any, Any]:
                outs = run(*consts, *carry, *xs[0], *of_consts, *xs[1])
                return outs[:carried], outs[carried:]

            carry, ys = lax.scan(trip, carry, (xs, of_xs), **how)
            return [*carry, *ys]

        program.replace(eqn.outvars, program.splice(scan, [x for p in parts for x in p], eqn))
        return [None if i is None else views[i] for i in same or [None] * len(eqn.outvars)]

    def _of_trip(self, view: View) -> View | None:
        """The view of a slice along the first dim, if it can be one."""
        adapter = self.adapters.get(view.path)
        if adapter and not view.labels[0] <= {*adapter.dims.stack}:
            return None
        order = tuple(d - 1 for d in view.order if d)
        stacked = view.stacked | view.labels[0]
        return View(view.path, view.labels[1:], order, stacked, view.parts)

    def _in_front(self, program: Rewriting[View | None], view: View, eqn: JaxprEqn) -> View:
        """The view with the first dim of the value first in its parts."""

        def moved(x: Any, labels: Sequence[Label]) -> Any:
            return jnp.moveaxis(x, labels.index(0), 0)

        return self._each_part(program, view, eqn, moved) if view.order[0] else view

    def _checkpoint(self, program: Rewriting[View | None], eqn: JaxprEqn) -> list[View | None]:
        (body,) = bodies(eqn)
        views = [program.state(v) for v in eqn.invars]
        return self._with_more(program, eqn, [body], views)

    def _branches(self, program: Rewriting[View | None], eqn: JaxprEqn) -> list[View | None]:
        views = [program.state(v) for v in eqn.invars]
        return self._with_more(program, eqn, bodies(eqn), views)

    def _with_more(
        self,
        program: Rewriting[View | None],
        eqn: JaxprEqn,
        programs: Sequence[Body],
        views: Sequence[View | None],
    ) -> list[View | None]:
        """Write an equation whose programs get the parts of weights as further inputs."""
        same = forwarded_operands(eqn)
        kept = [i for i, operand in enumerate(same) if operand is not None]
        left = iter(programs)

        def new(held: Any) -> Any:
            body = next(left)
            entered = self._entered_body(eqn, body, views[body.first :], kept)
            entry = held, entered, with_jaxpr(held, entered)
            return self._held.setdefault((id(held), id(entered)), entry)[-1]

        rewritten = with_functions(eqn, new)
        more = [x for view in views if view for _, x in view.parts]
        program.eqns.append(rewritten.replace(invars=[*map(program.atom, eqn.invars), *more]))
        return [None if i is None else views[i] for i in same or [None] * len(eqn.outvars)]

    def _entered_body(
        self, eqn: JaxprEqn, body: Body, views: Sequence[View | None], kept: Sequence[int]
    ) -> Jaxpr:
        """An inner program with the parts of its inputs' views as further inputs.

        Results that are views are merged, but for those `kept`, which are unchanged inputs. Equal
        programs of equal views stay one: units are counted by it.
        """
        first = body.first_xs if eqn.primitive.name == "scan" else len(views)
        key = id(body.jaxpr), *(view and (view[1:4], self._how(view)) for view in views)
        if key in self._entered:
            _, entered, are_merged = self._entered[key]
            paths = [view.path for view, on in zip(views, are_merged, strict=True) if view and on]
            self.merged |= dict.fromkeys(paths)
            return entered
        more: list[Var] = []
        inner: list[View | None] = []
        for i, view in enumerate(views):
            parts = []
            for name, x in view.parts if view else ():
                shape = x.aval.shape[1:] if i >= first else x.aval.shape
                parts.append((name, Var(x.aval.update(shape=shape))))
            more += [v for _, v in parts]
            inner.append(view._replace(parts=tuple(parts)) if view else None)
        jaxpr = body.jaxpr.replace(invars=[*body.jaxpr.invars, *more])
        program = Rewriting(self, jaxpr, [*inner, *[None] * len(more)])
        outside, self.merged = self.merged, {}
        for position in range(len(jaxpr.eqns)):
            program.write(position)
        self.merge_results(program, jaxpr.outvars, kept)
        are_merged = [view is not None and view.path in self.merged for view in inner]
        self.merged = outside | self.merged
        entered = _without_unread(program.finished(), {*jaxpr.eqns})
        self._entered[key] = body.jaxpr, entered, are_merged
        return entered

    def _how(self, view: View) -> Any:
        """What an inner program depends on of an adapter; the path where there is none."""
        adapter = self.adapters.get(view.path)
        return (adapter.how, tuple(name for name, _ in view.parts)) if adapter else view.path


def _aval(atom: Atom) -> Any:
    return atom.aval


def _of(program: Rewriting[View | None], eqn: JaxprEqn) -> View:
    view = program.state(eqn.invars[0])
    assert view is not None
    return view


def _factors(
    adapter: Adapter, dims: WeightDims, weight: Any, parts: Mapping[str, Any]
) -> tuple[Factors, Any]:
    """The factors and the scale of a view."""
    a, scale = parts["a"], parts.get("scale", adapter.scale)
    if "mask" in parts:
        shape = parts["mask"].shape
        rows = [1] * (a.ndim - len(shape))
        a = a * parts["mask"].reshape(*shape[:-1], *rows, shape[-1]).astype(a.dtype)
    factors = Factors(a, parts["b"], parts.get("magnitude"), parts.get("squares"))
    if factors.magnitude is not None and "adapted" in parts:
        # Without an adapter the magnitude is the weight's norm.
        on = parts["adapted"]
        on = on.reshape(*on.shape, *[1] * (factors.magnitude.ndim - on.ndim))
        norm = norms(weight, dims, factors, scale).astype(factors.magnitude.dtype)
        factors = factors._replace(magnitude=jnp.where(on > 0, factors.magnitude, norm))
    return factors, scale


def _in_dims_of(x: Any, old: Sequence[Label], new: Sequence[Label]) -> Any:
    return x.transpose([old.index(label) for label in new])


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Runs of dims before and after a reshape that have the same elements."""
    runs: list[tuple[Sequence[int], Sequence[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start, begin = i, j
        if i < len(old) and old[i] == 1 and (j == len(new) or new[j] != 1):
            i += 1
        elif j < len(new) and new[j] == 1 and (i == len(old) or old[i] != 1):
            j += 1
        else:
            left, right = old[i], new[j]
            i, j = i + 1, j + 1
            while left != right:
                if left < right:
                    left, i = left * old[i], i + 1
                else:
                    right, j = right * new[j], j + 1
        runs.append((range(start, i), range(begin, j)))
    return runs


def _without_unread(jaxpr: Jaxpr, originals: set[JaxprEqn]) -> Jaxpr:
    """A program without the equations that were inserted and that nothing reads."""
    read = {v for v in jaxpr.outvars if is_var(v)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn in originals or eqn.effects or any(v in read for v in eqn.outvars):
            eqns.append(eqn)
            read.update(v for v in eqn.invars if is_var(v))
    return jaxpr.replace(eqns=eqns[::-1])
