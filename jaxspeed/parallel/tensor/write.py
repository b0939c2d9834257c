"""Writing the crossings into a traced program: the same program, with constraints in it.

Equations are replaced one by one, each new one under the name of the one that it stands for, so
that a unit's equations stay together and ZeRO 3 can slice the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspeed.parallel.tensor.crossings import Cut, dims_cut_over
from jaxspeed.parallel.tensor.follow import CALLS, Frame, follow
from jaxspeed.parallel.tensor.moves import Between, columns, enter, leave
from jaxspeed.placement.mesh import DATA_AXES
from jaxspeed.placement.units.jaxprs import is_var

AXIS = "tensor"


@dataclass(frozen=True)
class Style:
    """How activations live between the cuts."""

    sequence_parallel: bool = False


AS_WHOLE = Style()


def with_crossings(
    jaxpr: Any,
    parameters: Mapping[str, Any],
    batch: Sequence[Any],
    specs: Mapping[str, Any],
    mesh: Mesh,
    style: Style,
) -> Any:
    """A traced program with its crossings in it.

    `parameters` are its variables by path, cut as `specs` say; `batch` those whose first dims are
    samples. A program none of whose parameters is cut over the axis stays as it is.
    """
    dims = dims_cut_over(AXIS, specs)
    if mesh.shape[AXIS] == 1 or not dims:
        return jaxpr
    followed = follow(jaxpr, parameters, batch)
    samples = next((followed.top.nodes[v][0] for v in batch if v.aval.shape), None)
    cut = Cut(followed, dims, mesh.shape[AXIS], samples)
    return Writer(cut, _in_context(mesh), style)(followed.top)


@dataclass(frozen=True)
class Writer:
    """Writes the crossings of a program whose parameters are cut over `tensor`."""

    cut: Cut
    mesh: Any  # of the trace's context
    style: Style

    def __call__(self, frame: Frame) -> Any:
        """The function of a frame with its crossings in it."""
        return _Rewriting(self, frame).run()

    def between(self, frame: Frame, atom: Any) -> Between:
        """How an activation that is not cut lives at a crossing."""
        entries: list[Any] = [
            self._samples(size) if self.cut.is_samples(node) else None
            for node, size in zip(frame.of(atom), atom.aval.shape, strict=True)
        ]
        whole = NamedSharding(self.mesh, PartitionSpec(*entries))
        dim = self.cut.sequence_dim(frame, atom) if self.style.sequence_parallel else None
        if dim is None:
            return Between(whole, whole)
        entries[dim] = AXIS
        return Between(whole, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def _samples(self, size: int) -> Any:
        """The data axes that cut the samples here: none that is manual, or does not divide."""
        free = free_axes(self.mesh)
        axes = tuple(axis for axis in DATA_AXES if axis in free)
        ways = 1
        for axis in axes:
            ways *= free[axis]
        return axes if ways > 1 and size % ways == 0 else None


def free_axes(mesh: Any) -> dict[str, int]:
    """The axes of a mesh that are left to the compiler, with their sizes."""
    return {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
        if kind is AxisType.Auto
    }


def _in_context(mesh: Mesh) -> Any:
    """The mesh as the trace under way sees it: inside a shard_map some axes are manual."""
    context = jax.sharding.get_abstract_mesh()
    return mesh if context.empty else context


class _Rewriting:
    """One function under way."""

    def __init__(self, writer: Writer, frame: Frame) -> None:
        self.writer, self.frame, self.jaxpr = writer, frame, frame.jaxpr
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
        if position in self.frame.inner and eqn.primitive.name not in OPAQUE_CALLS:
            self.eqns.append(self._nested(position, eqn))
        elif position in self.groups:
            self._write_columns(self.groups[position])
        else:
            self._write_plain(eqn)

    def _write_plain(self, eqn: Any) -> None:
        cut, frame = self.writer.cut, self.frame
        entering = {eqn.invars[i] for i in cut.enters(frame, eqn)}
        for v in entering - self.entered.keys():
            move = _Traced.of(enter(self.writer.between(frame, v)), [v])
            self.eqns += move.eqns([v], move.outs, eqn)
            self.entered[v] = move.outs[0]
        if entering:
            invars = [self.entered[v] if is_var(v) and v in entering else v for v in eqn.invars]
            eqn = eqn.replace(invars=invars)
        if not cut.leaves(frame, eqn):
            self.eqns.append(eqn)
            return
        # The sum gets a variable of its own; what has left keeps the one that others read.
        (out,) = eqn.outvars
        move = _Traced.of(leave(self.writer.between(frame, out)), [out])
        self.eqns.append(eqn.replace(outvars=move.ins))
        self.eqns += move.eqns(move.ins, [out], eqn)

    # -- products of one activation -----------------------------------------------------------

    def _groups(self) -> dict[int, list[int]]:
        """The products by which one activation, cut along its sequence, enters: by their first."""
        cut, frame = self.writer.cut, self.frame
        found: dict[Any, list[int]] = {}
        for position, eqn in enumerate(self.jaxpr.eqns):
            if eqn.primitive.name == "dot_general" and (at := cut.enters(frame, eqn)):
                x = eqn.invars[at[0]]
                between = self.writer.between(frame, x)
                if between.kept != between.whole and frame.is_weight(eqn.invars[1 - at[0]]):
                    found.setdefault(x, []).append(position)
        return {positions[0]: positions for positions in found.values()}

    def _write_columns(self, positions: Sequence[int]) -> None:
        eqns = [self.jaxpr.eqns[p] for p in positions]
        self.done.update(positions)
        sides = [self.writer.cut.enters(self.frame, eqn)[0] for eqn in eqns]
        weights = [eqn.invars[1 - side] for eqn, side in zip(eqns, sides, strict=True)]
        for w in weights:
            self._hoist(w)
        x = eqns[0].invars[sides[0]]
        products = [_product(eqn, side) for eqn, side in zip(eqns, sides, strict=True)]
        new = _Traced.of(columns(products, self.writer.between(self.frame, x)), [x, *weights])
        self.eqns += new.eqns([x, *weights], [eqn.outvars[0] for eqn in eqns], eqns[0])

    def _hoist(self, weight: Any) -> None:
        """Write what makes a weight, which depends on parameters alone, before it is its turn."""
        position = self.makers.get(weight) if is_var(weight) else None
        if position is not None and position not in self.done:
            for v in self.jaxpr.eqns[position].invars:
                self._hoist(v)
            self._write(position)

    # -- functions within ---------------------------------------------------------------------

    def _nested(self, position: int, eqn: Any) -> Any:
        written = {id(f.jaxpr): self.writer(f) for f in self.frame.inner[position]}

        def new(closed: Any) -> Any:
            jaxpr = getattr(closed, "jaxpr", closed)
            found = written.get(id(jaxpr), jaxpr)
            return closed.replace(jaxpr=found) if jaxpr is not closed else found

        name, params = eqn.primitive.name, dict(eqn.params)
        if name == "cond":
            params["branches"] = tuple(map(new, params["branches"]))
        else:
            key = {"scan": "jaxpr", "while": "body_jaxpr"}.get(name) or CALLS[name]
            params[key] = new(params[key])
        return eqn.replace(params=params)


@dataclass(frozen=True)
class _Traced:
    """A function that was traced on its own, to be put among other equations."""

    jaxpr: Any

    @classmethod
    def of(cls, function: Callable[..., Any], like: Sequence[Any]) -> "_Traced":
        """Traced on arrays like these variables."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in like]
        return cls(jax.make_jaxpr(function)(*shapes).jaxpr)

    @property
    def ins(self) -> list[Any]:
        return list(self.jaxpr.invars)

    @property
    def outs(self) -> list[Any]:
        return list(self.jaxpr.outvars)

    def eqns(self, ins: Sequence[Any], outs: Sequence[Any], like: Any) -> list[Any]:
        """Its equations from and to these variables, under the name of the equation `like`."""
        names = dict(zip((*self.ins, *self.outs), (*ins, *outs), strict=True))

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [names.get(v, v) if is_var(v) else v for v in atoms]

        return [
            e.replace(
                invars=named(e.invars), outvars=named(e.outvars), source_info=like.source_info
            )
            for e in self.jaxpr.eqns
        ]


# Functions with a derivative of their own: what is written into one pass would miss the other.
OPAQUE_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def _product(eqn: Any, side: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        operands = (x, weight) if side == 0 else (weight, x)
        return eqn.primitive.bind(*operands, **eqn.params)

    return product
