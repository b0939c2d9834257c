"""Loss of one micro-batch as a function of the stored parameters.

The loss is traced with names on its module calls (`traced_loss.py`), and the traced program is
executed. Where parameters are stored as layers read them, it is executed unchanged. Where some are
sharded or in another dtype (ZeRO 3), each unit gathers its parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.adapters.adapter import Adapter
from jaxspeed.adapters.products import WeightDims, squared_norms
from jaxspeed.axes import SEQ, position_axes, product
from jaxspeed.config.remat import NO_RECOMPUTE, Recompute
from jaxspeed.errors import ModelError
from jaxspeed.ops.free_axes import free_axes, free_sample_shards
from jaxspeed.placement.codec import PLAIN, Stored, pad, unpad
from jaxspeed.placement.constrain import constrain
from jaxspeed.placement.memory_kinds import in_host
from jaxspeed.placement.rows import Row
from jaxspeed.placement.specs import by_dim
from jaxspeed.placement.table import PlacementTable
from jaxspeed.remat.budget import ActivationShards
from jaxspeed.remat.residual_report import ResidualReport, residual_report
from jaxspeed.remat.resolve import resolve_policy
from jaxspeed.remat.unit_jaxprs import UnitJaxpr, unit_jaxprs
from jaxspeed.sequence_parallel import AttentionNotes, AttentionReport, SequenceSettings
from jaxspeed.tensor_parallel import REPLICATED, ActivationLayout
from jaxspeed.traced_loss.autocast import Autocast
from jaxspeed.traced_loss.by_parts import ByParts
from jaxspeed.traced_loss.loss import Loss, TermWeights
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.loss_traces import LossTraces
from jaxspeed.traced_loss.loss_weight import weights_of
from jaxspeed.traced_loss.passes import PartContext, after_split, boundaries
from jaxspeed.train_state.state import Arrays
from jaxspeed.user_models.protocol import Model
from jaxspeed.zero3 import (
    BY_CONSTRAINT,
    EvalContext,
    Exchange,
    ShardedParam,
    Units,
    encoded,
    run_segmented,
)
from jaxspeed.zero3.sharded_param import Storage


@dataclass(frozen=True)
class MicroBatchLoss:
    """`__call__(sources, variables, batch, step, micro, train) -> (Loss, written)`.

    `written` are variables and parameters that the loss changed, by path, as they are stored.
    """

    model: Model
    loss_fn: Callable[[Any, Any], Any]
    table: PlacementTable
    compute_dtype: Any
    unit_patterns: Sequence[str] = ()
    wire: Any = None  # the dtype in which gradients are reduced
    style: ActivationLayout = REPLICATED  # of activations and collectives over the tensor axis
    recompute: Recompute = NO_RECOMPUTE  # residual policy of units
    exchange: Exchange = BY_CONSTRAINT  # gathers the units' parameters
    autocast: Autocast | None = None  # of the traced loss, operation by operation
    sequence: SequenceSettings = field(default_factory=SequenceSettings)
    in_fp32: Sequence[str] = ()  # the batch's arrays that are not converted
    records_routing: bool = False  # the choices of a mixture's routers are written, as ROUTING

    def with_exchange(self, exchange: Exchange) -> "MicroBatchLoss":
        """Copy with another exchange, and the same traces."""
        return self._with_traces(replace(self, exchange=exchange))

    def stored_as(self, table: PlacementTable) -> "MicroBatchLoss":
        """Copy for parameters that are stored otherwise and read alike, with the same traces."""
        return self._with_traces(replace(self, table=table))

    def _with_traces(self, other: "MicroBatchLoss") -> "MicroBatchLoss":
        vars(other)["traces"] = self.traces
        return other

    @cached_property
    def traces(self) -> LossTraces:
        """Traced programs of the loss, with parameters as layers read them."""
        table = self.table
        params = {
            path: jax.ShapeDtypeStruct(table.shape_of(path), rows[0].read.dtype)
            for path, rows in table.parameters.items()
        }
        ranges = {
            path: [(row.path, row.leaf.shape[0]) for row in rows]
            for path, rows in table.parameters.items()
            # A pipeline divides the loss at one scan, and its stages read such ranges.
            if len(rows) > 1 and not (table.stack and path in table.stack.leaves)
        }
        patterns = tuple(self.unit_patterns)
        casts = self.autocast, self.compute_dtype
        trained = {
            name
            for path, rows in table.parameters.items()
            for row in rows
            if row.leaf.trainable
            for name in (path, row.path)
        }
        return LossTraces(
            self.model,
            self.loss_fn,
            params,
            patterns,
            *casts,
            ranges,
            self.sequence,
            trained,
            self.records_routing,
        )

    def __call__(
        self, sources: Arrays, variables: Arrays, batch: Any, step: Any, micro: Any, train: bool
    ) -> tuple[Loss, Arrays]:
        batch = self.cast(batch)
        variables = self.with_squares(sources, variables)
        sources = {row.path: self.given(row, sources[row.path]) for row in self.table}
        rest = (variables, batch, jnp.asarray(step, jnp.int32), jnp.asarray(micro, jnp.int32))
        program = self.trace(rest, train)
        args = [*(sources[path] for path in program.parameters), *jax.tree.leaves(rest)]
        outs = self._run(program, args, self.recompute if train else NO_RECOMPUTE, batch)
        loss, written = jax.tree.unflatten(program.out_tree, outs)
        return loss, self._as_stored(written)

    def with_squares(self, sources: Arrays, variables: Arrays) -> Arrays:
        """The variables, and the squared norms of the weights that have adapters with DoRA.

        Called before the loop over micro-batches, it computes them once a step: from the shards as
        they are stored, so that no weight is gathered. Replicated, as other variables are.
        """
        all_variables = dict(variables)
        for path, adapter in self.measured.items():
            name = adapter.leaf("squares")
            if name not in all_variables:
                rows = self.table.parameters[path]
                squares = [self._squares(row, adapter.dims, sources[row.path]) for row in rows]
                all_variables[name] = squares[0] if len(squares) == 1 else jnp.concatenate(squares)
        return all_variables

    @cached_property
    def measured(self) -> dict[str, Adapter]:
        """The adapters, by weight, whose weights are measured once a step.

        Not those of weights in host memory: they are measured where layers read them, because one
        more transfer takes longer than to square what is there.
        """
        adapters: Mapping[str, Adapter] = getattr(self.model, "adapters", {})
        return {
            path: adapter
            for path, adapter in adapters.items()
            if adapter.dora and not any(in_host(row.source) for row in self.table.parameters[path])
        }

    def _squares(self, row: Row, dims: WeightDims, source: Stored) -> jax.Array:
        """||W||^2 of each output of a stored weight, as layers read it."""
        shape, stored = row.leaf.shape, self.stored(row)
        value = stored.codec.decode(source, shape, row.read.dtype).astype(row.read.dtype)
        for d in dims.inputs:  # a code of padding may be the code of a number
            if value.shape[d] > shape[d]:
                number = jax.lax.broadcasted_iota(jnp.int32, value.shape, d)
                value = jnp.where(number < shape[d], value, 0)
        total, of_total = squared_norms(value, dims), (*dims.stack, *dims.outputs)
        # The sums are gathered here: else XLA may gather the weight, or them in each micro-batch.
        # Workers of one device each share a program, which names no device.
        entries = by_dim(row.source.spec, len(shape))
        for spec in ([entries[d] for d in of_total], []) if self.table.mesh.size > 1 else ():
            at = NamedSharding(self.table.mesh, PartitionSpec(*spec))
            total = constrain(total, at, "squares")
        return unpad(total, tuple(shape[d] for d in of_total))

    def mean_weights(
        self, variables: Arrays, micro: Any, step: Any, train: bool = True
    ) -> TermWeights | None:
        """The mean weights of micro-batches [micro-batches, ...]; None for a loss of one term.

        Computed before the micro-batches: their weights have to depend on the batch alone.
        """

        def first(micro: Any) -> Any:
            return self.cast(jax.tree.map(lambda x: x[0], micro))

        micro_batch = jax.eval_shape(first, micro)
        program = self.trace((variables, micro_batch, jnp.asarray(step), jnp.asarray(0)), train)
        if not program.loss_outputs.terms:
            return None
        weights = jax.vmap(lambda batch: weights_of(program, self.cast(batch)))(micro)
        means: TermWeights = jax.tree.map(lambda x: x.mean(0), weights)
        return means

    def _run(
        self, traced: LossProgram, args: Sequence[Any], recompute: Recompute, batch: Any
    ) -> Sequence[Any]:
        """Execute a traced loss by the placement table and the config."""
        program = self._rewritten(traced)
        storage: dict[Any, ShardedParam] = {}
        for row in self.table:
            v: Any = program.parameters[row.path]
            if row.gathered:
                storage[v] = replace(self.stored(row), dtype=v.aval.dtype)
        way = replace(self.way(program, recompute, storage), samples=self.samples(batch))
        return run_segmented(program.closed.jaxpr, program.closed.consts, args, storage, way)

    def _rewritten(self, traced: LossProgram) -> LossProgram:
        """A traced loss, rewritten for this mesh and placement."""
        return after_split(traced, self._context(traced))

    def _context(self, traced: LossProgram) -> PartContext:
        in_units = bool(self.recompute) or self._gathers
        specs = {row.path: row.read.spec for row in self.table}
        units = self._units(traced) if in_units else None
        return PartContext(self.table.mesh, specs, self.style, units, sequence=self.sequence)

    def attention(self, variables: Arrays, batch: Any) -> AttentionReport | None:
        """How the attention of such a micro-batch runs; None where no axis shards sequences.

        Raises ConfigError with all problems if it cannot run as the config says.
        """
        devices = free_axes().get(SEQ, 1)
        if devices == 1:
            return None
        traced, notes = self._trace_of(variables, batch), AttentionNotes()
        boundaries(traced, replace(self._context(traced), notes=notes))
        return notes.report(devices, traced.left_alone)

    @property
    def _gathers(self) -> bool:
        """Whether units gather parameters."""
        return any(row.gathered for row in self.table)

    def given(self, row: Row, source: Stored) -> Stored:
        """A stored parameter as units get it, or this rank's shard of it."""
        if row.source.codec != PLAIN:  # units remove the padding of the decoded value
            return source
        shape = list(row.source_shape)
        dim = self.stored(row).sharded_dim if self.exchange.per_rank else None
        if dim is not None:
            shape[dim] = source.shape[dim]
        return unpad(source, tuple(shape))

    def way(self, program: LossProgram, recompute: Recompute, storage: Storage) -> EvalContext:
        """Choose units and residuals of a program that the passes rewrote."""
        if not recompute:
            units = program.units if storage else Units()
            return EvalContext(units, exchange=self.exchange)
        if self.style.sequence_parallel:  # residuals are already sharded along the sequence
            recompute = replace(recompute, partition=False)
        units = self._units(program)
        unit_programs = self._unit_jaxprs(program)
        residuals = resolve_policy(recompute, unit_programs, *self._shared_by(program))
        inputs = frozenset(program.batch)
        return EvalContext(units, residuals=residuals, activations=inputs, exchange=self.exchange)

    def kept(self, variables: Arrays, batch: Any) -> ResidualReport | None:
        """Report the residuals of a micro-batch of these shapes; None without a residual policy."""
        if not self.recompute:
            return None
        program = self._of(variables, batch)
        unit_programs = self._unit_jaxprs(program)
        return residual_report(self.recompute, unit_programs, *self._shared_by(program))

    def recomputes(self, variables: Arrays, batch: Any) -> bool:
        """Whether a unit has a backward pass: none has if only what follows them is trained."""
        unit_programs = self._unit_jaxprs(self._of(variables, batch))
        return any(unit.differentiated for unit in unit_programs)

    def _of(self, variables: Arrays, batch: Any) -> LossProgram:
        """The rewritten loss of a micro-batch of these shapes."""
        return self._rewritten(self._trace_of(variables, batch))

    def _trace_of(self, variables: Arrays, batch: Any) -> LossProgram:
        batch = jax.eval_shape(self.cast, batch)
        first = jnp.asarray(0)
        return self.trace((variables, batch, first, first), train=True)

    def _unit_jaxprs(self, program: LossProgram) -> tuple[UnitJaxpr, ...]:
        trained = None  # in a part of the loss, activations may have gradients too
        if program.out_tree is not None:
            rows, parameters = self.table.rows, program.parameters
            trained = [v for path, v in parameters.items() if rows[path].leaf.trainable]
        jaxpr, units = program.closed.jaxpr, self._units(program)
        return tuple(unit_jaxprs(jaxpr, program.batch, units, trained))

    def _units(self, program: LossProgram) -> Units:
        """Units of a loss; to recompute a model in which nothing repeats, the model itself.

        Not to save residuals in host memory: those of one unit are the batch.
        """
        on_host = self.recompute.on_host or self.recompute.offload
        alone = self.recompute and not on_host and not program.units.serials
        return program.outermost if alone else program.units

    def _shared_by(self, program: LossProgram) -> tuple[ActivationShards, str]:
        """(the shards of a program's activations, device kind)."""
        positions = product(position_axes(), free_axes())
        lengths = (program.loss or program).lengths if positions > 1 else frozenset[int]()
        shards = ActivationShards(free_sample_shards(), positions if lengths else 1, lengths)
        return shards, self.table.mesh.devices.flat[0].device_kind

    def _as_stored(self, written: Arrays) -> Arrays:
        """Convert what the loss wrote, parameters to the table's storage.

        Raises ModelError for a parameter that layers read in another dtype or from host memory: a
        value computed from such a copy has lost precision or cannot be stored back.
        """
        params = {path for path in written if path in self.table.parameters}
        stored = {path: value for path, value in written.items() if path not in params}
        for path, value in self.table.in_rows({path: written[path] for path in params}).items():
            row = self.table[path]
            self._refuse_copies(row)
            stored[path] = pad(value.astype(row.source.dtype), row.shape(row.source))
        return stored

    def _refuse_copies(self, row: Row) -> None:
        if row.source.codec != PLAIN:
            raise ModelError(
                f"the loss writes the parameter {row.path}, which is stored by the codec "
                f"{row.source.codec.name}; let the loss write an nnx.Variable that is no Param"
            )
        if row.read.dtype != row.source.dtype or row.read.dtype != row.leaf.dtype:
            raise ModelError(
                f"the loss writes the parameter {row.path}, which is {row.leaf.dtype} and is read "
                f"as {row.read.dtype}: small changes would be rounded away. Read it in its own "
                f'dtype: "parallel": {{"full_precision": ["{row.path}"]}} (a pattern, as '
                '"teacher/**", covers several)'
            )
        if row.read.memory_kind != row.source.memory_kind:
            raise ModelError(
                f"the loss writes the parameter {row.path}, which zero_optimization.offload_param "
                "offloads; remove offload_param, or let the loss write an "
                "nnx.Variable that is no Param"
            )

    def trace(self, rest: tuple[Any, ...], train: bool) -> LossProgram:
        """Trace the loss, with parameters as layers read them, and find its units.

        `rest` are the arguments after the parameters: (variables, batch, step, micro); only their
        shapes are used. For shapes that were traced before, this is the same program.
        """
        variables, batch = self._shapes(rest)
        return self.traces.of(variables, batch, train)

    def _shapes(self, rest: tuple[Any, ...]) -> tuple[Any, Any]:
        """Shapes of (variables, batch), as the loss reads them."""
        variables, batch, _, _ = jax.tree.map(_shape, rest)
        for adapter in self.measured.values():
            squares = jax.ShapeDtypeStruct(adapter.outputs, jnp.float32)
            variables[adapter.leaf("squares")] = squares
        return variables, jax.eval_shape(self.cast, batch)

    def by_parts(
        self,
        rest: tuple[Any, ...],
        train: bool,
        parts: int | None = None,
        manual: Iterable[str] = (),
    ) -> ByParts:
        """Whether the loss of a micro-batch of these shapes is the sum of its parts'.

        Args:
          parts: their number, by default that of the data ranks.
          manual: the mesh axes that are manual where a part is computed.
        """
        variables, batch = self._shapes(rest)
        of = parts or self.table.ranks
        return self.traces.by_parts(variables, batch, train, of, frozenset(manual))

    def samples(self, batch: Any) -> int | None:
        """Number of samples of a batch, if it divides over the data ranks.

        None where a batch is that of one rank.
        """
        if self.exchange.per_rank:
            return None
        sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if size and size % self.table.ranks == 0 else None

    def cast(self, batch: Any) -> Any:
        """A batch in the compute dtype, but for the arrays of `in_fp32`."""

        def cast(keys: tuple[Any, ...], x: Any) -> Any:
            wide = any(getattr(key, "key", None) in self.in_fp32 for key in keys)
            if self.compute_dtype is None or wide or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return x.astype(self.compute_dtype)

        return jax.tree_util.tree_map_with_path(cast, batch)

    def stored(self, row: Row) -> ShardedParam:
        stored = ShardedParam(
            row.leaf.shape,
            row.read.dtype,
            self.table.sharding(row.read),
            self.table.sharding(row.source),
            self.wire,
            row.leaf.trainable,
            self._gradients_leave(row),
        )
        return encoded(stored, self.table.stored(row, row.source))

    def _gradients_leave(self, row: Row) -> NamedSharding | None:
        """Sharding of a gradient before its transfer to host memory; None: that of its source."""
        if row.grad is None or row.grad.memory_kind == row.read.memory_kind:
            return None
        if row.shape(row.grad) != row.shape(row.source):
            return None
        return self.table.sharding(row.grad).with_memory_kind(row.read.memory_kind)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """Shape of an array, a tracer or a shape, without its sharding.

    The sharding is no part of its type on a mesh whose axes are automatic.
    """
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
