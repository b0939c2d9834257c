"""The loss of one micro-batch as a function of the stored parameters.

Where every parameter is stored as layers read it, the loss is simply traced. Where some are cut or
in another dtype (ZeRO 3), the loss is traced once with names on its module calls, and run again
with each unit gathering its own parameters.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxspeed.config import match
from jaxspeed.config.remat import NOTHING_SAID, Recompute
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.evaluate import RANDOM, as_function, forwarded, runs
from jaxspeed.objective.loss import Loss, parse_loss
from jaxspeed.objective.protocol import Model
from jaxspeed.objective.sharded_draws import shared_sizes, with_draws_sharded
from jaxspeed.objective.train_state import Arrays, pad, unpad
from jaxspeed.objective.user_code import foreign
from jaxspeed.ops.free_axes import free_axes
from jaxspeed.placement.mesh import DATA_AXES, data_parallel_size
from jaxspeed.placement.rows import Row
from jaxspeed.placement.table import PlacementTable
from jaxspeed.remat.residual_report import ResidualReport, kept_of
from jaxspeed.remat.resolve import keeping_of
from jaxspeed.remat.unit_jaxprs import members
from jaxspeed.tensor_parallel import AS_WHOLE, Style, with_crossings
from jaxspeed.zero3 import GatherScatter, ShardedParam, Units, Way, choose_units, run_sliced


@dataclass(frozen=True)
class Objective:
    """`__call__(sources, variables, batch, step, micro, train) -> (Loss, what the loss wrote)`.

    Written are variables of the model, by path, and parameters, as they are stored.
    """

    model: Model
    loss_fn: Callable[[Any, Any], Any]
    table: PlacementTable
    compute_dtype: Any
    unit_patterns: Sequence[str] = ()
    wire: Any = None  # the dtype in which gradients are reduced
    style: Style = AS_WHOLE  # of what crosses the tensor axis
    recompute: Recompute = NOTHING_SAID  # what units keep for their backward pass
    exchange: GatherScatter | None = None  # of units, where the data axes are manual

    def __call__(
        self, sources: Arrays, variables: Arrays, batch: Any, step: Any, micro: Any, train: bool
    ) -> tuple[Loss, Arrays]:
        batch = jax.tree.map(self.cast, batch)
        sources = {row.path: self._given(row, sources[row.path]) for row in self.table}
        recompute = self.recompute if train else NOTHING_SAID
        sliced = recompute or any(row.gathered for row in self.table)
        if self.table.mesh.shape["tensor"] == 1 and not sliced:
            return self._direct(sources, variables, batch, step, micro, train)
        rest = (variables, batch, jnp.asarray(step), jnp.asarray(micro))
        program = self.trace(rest, train)
        storage = {
            var: self.stored(row)
            for var, row in zip(program.parameters, self.table, strict=True)
            if row.gathered
        }
        args = [*(sources[row.path] for row in self.table), *jax.tree.leaves(rest)]
        crossed = self._crossed(program)
        way = self.way(crossed, program, program.batch, recompute)
        way = replace(way, samples=self.samples(batch))
        outs = run_sliced(crossed, program.closed.consts, args, storage, way)
        loss, written = jax.tree.unflatten(program.out_tree, outs)
        return loss, self._as_stored(written)

    def _given(self, row: Row, source: jax.Array) -> jax.Array:
        """A stored parameter as units are given it; of an exchange, this rank's cut."""
        shape = list(row.source_shape)
        dim = self.stored(row).cut_dim if self.exchange else None
        if dim is not None:
            shape[dim] = source.shape[dim]
        return unpad(source, tuple(shape))

    def way(
        self, jaxpr: Any, program: "Traced", activations: Sequence[Any], recompute: Recompute
    ) -> Way:
        """How the pieces of a program are run; `activations` are its inputs that are no weights."""
        if not recompute:
            return Way(program.units)
        if self.style.sequence_parallel:  # what is kept is cut along its sequence already
            recompute = replace(recompute, partition=False)
        found = tuple(members(jaxpr, activations, program.units))
        keeping = keeping_of(recompute, found, *self._shared_by())
        return Way(program.units, keeping=keeping, activations=frozenset(activations))

    def kept(self, variables: Arrays, batch: Any) -> ResidualReport | None:
        """What units keep of a micro-batch of these shapes; None where the config does not say."""
        if not self.recompute:
            return None
        batch = jax.tree.map(lambda x: jax.eval_shape(self.cast, x), batch)
        first = jnp.asarray(0)
        program = self.trace((variables, batch, first, first), train=True)
        found = tuple(members(self._crossed(program), program.batch, program.units))
        return kept_of(self.recompute, found, *self._shared_by())

    def _shared_by(self) -> tuple[int, str]:
        """(into how many parts devices share activations, what they are)."""
        free = free_axes()
        ways = math.prod(free.get(axis, 1) for axis in DATA_AXES)
        return ways, self.table.mesh.devices.flat[0].device_kind

    def _crossed(self, program: "Traced") -> Any:
        """A traced loss with what it exchanges over the tensor axis written into it."""
        paths = [row.path for row in self.table]
        in_units = bool(self.recompute) or any(row.gathered for row in self.table)
        sizes = self._shared_sizes(program.batch)
        return with_crossings(
            with_draws_sharded(program.closed.jaxpr, sizes, self.table.mesh),
            dict(zip(paths, program.parameters, strict=True)),
            program.batch,
            {row.path: row.read.spec for row in self.table},
            self.table.mesh,
            self.style,
            program.units.of if in_units else lambda eqn: None,
        )

    def _direct(
        self, params: Arrays, variables: Arrays, batch: Any, step: Any, micro: Any, train: bool
    ) -> tuple[Loss, Arrays]:
        def run(
            values: list[Any], variables: Arrays, batch: Any, step: Any, micro: Any
        ) -> tuple[Loss, Arrays]:
            given = dict(zip(params, values, strict=True))
            return self._traced_loss(given, variables, batch, step, micro, train, named=False)[:2]

        given = (list(params.values()), variables, batch, jnp.asarray(step), jnp.asarray(micro))
        closed, shape = jax.make_jaxpr(run, return_shape=True)(*given)
        closed, out_tree = _without_unwritten(closed, shape, params, variables)
        sizes = self._shared_sizes(jax.tree.leaves(batch))
        jaxpr = with_draws_sharded(closed.jaxpr, sizes, self.table.mesh)
        outs = as_function(jaxpr, closed.consts)(*jax.tree.leaves(given))
        loss, written = jax.tree.unflatten(out_tree, outs)
        return loss, self._as_stored(written)

    def _as_stored(self, written: Arrays) -> Arrays:
        """What the loss wrote, parameters as the table stores them.

        ModelError for a parameter that layers read in another dtype or bring from host memory: what
        the loss computes from such a copy has lost what the stored one knows.
        """
        stored = {}
        for path, value in written.items():
            if path in self.table.rows:
                row = self.table[path]
                self._refuse_copies(row)
                value = pad(value.astype(row.source.dtype), row.shape(row.source))
            stored[path] = value
        return stored

    def _refuse_copies(self, row: Row) -> None:
        if row.read.dtype != row.source.dtype or row.read.dtype != row.leaf.dtype:
            raise ModelError(
                f"the loss writes the parameter {row.path}, which is {row.leaf.dtype} and is read "
                f"as {row.read.dtype}: small changes would be rounded away. Keep it in its own "
                f'dtype: "parallel": {{"full_precision": ["{row.path}"]}} (a pattern, as '
                '"teacher/**", covers several)'
            )
        if row.read.memory_kind != row.source.memory_kind:
            raise ModelError(
                f"the loss writes the parameter {row.path}, which zero_optimization.offload_param "
                "keeps in host memory; leave offload_param out, or let the loss write an "
                "nnx.Variable that is no Param"
            )

    def _shared_sizes(self, batch: Sequence[Any]) -> frozenset[int]:
        """The numbers of samples in a batch of arrays or variables that the data ranks share."""
        avals = [getattr(x, "aval", x) for x in batch]
        return shared_sizes({x.shape[0] for x in avals if x.shape}, self.table.mesh)

    def _traced_loss(
        self,
        params: Arrays,
        variables: Arrays,
        batch: Any,
        step: Any,
        micro: Any,
        train: bool,
        named: bool,
    ) -> tuple[Loss, Arrays, bool]:
        bound = self.model.bind(params, variables, train=train, step=step, micro=micro)
        naming = self.model.naming(bound) if named else contextlib.nullcontext()
        with naming, foreign("loss_fn(model, batch)", batch):
            returned = self.loss_fn(bound, batch)
        loss, is_sum = parse_loss(returned)
        after = self.model.mutated(bound, params) if train else {}
        dtypes = {path: x.dtype for path, x in variables.items()}
        return loss, {p: jnp.asarray(v, dtypes.get(p)) for p, v in after.items()}, is_sum

    def trace(self, rest: tuple[Any, ...], train: bool) -> "Traced":
        """The loss as a program, with parameters as layers read them, and its units.

        `rest` is what follows the parameters: (variables, batch, step, micro).
        """
        params = {
            row.path: jax.ShapeDtypeStruct(row.leaf.shape, row.read.dtype) for row in self.table
        }
        is_sum = False

        def run(values: list[Any], *rest: Any) -> Any:
            nonlocal is_sum
            given = dict(zip(params, values, strict=True))
            variables, batch, step, micro = rest
            loss, after, is_sum = self._traced_loss(
                given, variables, batch, step, micro, train, named=True
            )
            return loss, after

        closed, shape = jax.make_jaxpr(run, return_shape=True)(list(params.values()), *rest)
        closed, out_tree = _without_unwritten(closed, shape, params, rest[0])
        parameters = closed.jaxpr.invars[: len(params)]
        # After them come (variables, batch, step, micro), each with its leaves.
        first = len(params) + len(jax.tree.leaves(rest[0]))
        batch = closed.jaxpr.invars[first : first + len(jax.tree.leaves(rest[1]))]
        units = choose_units(closed.jaxpr, parameters, self.unit_patterns, match)
        return Traced(closed, parameters, batch, out_tree, units, is_sum)

    def samples(self, batch: Any) -> int | None:
        """How many samples a batch has, where the ranks can share them evenly.

        None of a rank's own: it looks nothing up for others.
        """
        if self.exchange:
            return None
        sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if size and size % data_parallel_size(self.table.mesh) == 0 else None

    def cast(self, x: Any) -> Any:
        if self.compute_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.compute_dtype)

    def stored(self, row: Row) -> ShardedParam:
        return ShardedParam(
            row.leaf.shape,
            row.read.dtype,
            self.table.sharding(row.read),
            self.table.sharding(row.source),
            self.wire,
            row.leaf.trainable,
            self._gradients_leave(row),
            self.exchange,
        )

    def _gradients_leave(self, row: Row) -> NamedSharding | None:
        """How a gradient is cut before it leaves for host memory; None: as its source is."""
        if row.grad is None or row.grad.memory_kind == row.read.memory_kind:
            return None
        if row.shape(row.grad) != row.shape(row.source):
            return None
        return self.table.sharding(row.grad).with_memory_kind(row.read.memory_kind)


@dataclass(frozen=True)
class Traced:
    """A loss as a program."""

    closed: Any
    parameters: Sequence[Any]  # its variables that are parameters
    batch: Sequence[Any]  # ... and those that are arrays of the batch
    out_tree: Any
    units: Units
    is_sum: bool  # the loss function returned (sum, weight)

    @property
    def draws_random_numbers(self) -> bool:
        return any(runs(eqn, RANDOM) for eqn in self.closed.jaxpr.eqns)

    @property
    def written(self) -> frozenset[str]:
        """The parameters and variables (statistics, say) that the loss changes."""
        _, after = jax.tree.unflatten(self.out_tree, range(self.out_tree.num_leaves))
        return frozenset(after)


def _without_unwritten(
    closed: Any, shape: Any, params: Iterable[str], variables: Arrays
) -> tuple[Any, Any]:
    """(program, tree of its results) of a traced loss, without what leaves it as it came.

    Its first inputs are the parameters at these paths, one by one, and then the variables.
    """
    paths = [*params, *sorted(variables)]
    loss, after = shape
    count = len(jax.tree.leaves(loss))
    origins = forwarded(closed.jaxpr)[count:]
    own = dict(zip(closed.jaxpr.invars, paths, strict=False))
    names = jax.tree.unflatten(jax.tree.structure(after), range(len(origins)))
    kept = {path: i for path, i in names.items() if own.get(origins[i]) != path}
    outs = closed.jaxpr.outvars
    outs = [*outs[:count], *(outs[count + i] for i in kept.values())]
    jaxpr = closed.jaxpr.replace(outvars=outs)
    return closed.replace(jaxpr=jaxpr), jax.tree.structure((loss, kept))
