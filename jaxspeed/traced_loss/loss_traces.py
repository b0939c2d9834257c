"""Tracing of the loss, once per shapes and context, for all its users.

JAX caches the result of `jax.make_jaxpr` by the function's identity, the tree, shapes and dtypes of
its arguments, the mesh in context with its manual axes, and the settings that JAX lists as relevant
to a trace. This module passes it the same function again, and keys it by what else a trace depends
on.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from jaxspeed.errors import ModelError
from jaxspeed.objectives import objective_of
from jaxspeed.objectives.model_logprobs import ROUTING
from jaxspeed.ops import gpu, splash
from jaxspeed.ops.attention import autocast_to, over_sequences
from jaxspeed.placement.batch_dims import sequence_dims
from jaxspeed.placement.paths import flat_with_paths, listed
from jaxspeed.sequence_parallel import SequenceSettings
from jaxspeed.traced_loss.autocast import Autocast, asks_for_full_precision
from jaxspeed.traced_loss.by_parts import ByParts, by_parts
from jaxspeed.traced_loss.loss import Loss, parse_loss
from jaxspeed.traced_loss.loss_program import LossProgram
from jaxspeed.traced_loss.passes import TraceContext, before_split
from jaxspeed.traced_loss.router_choices import with_choices_recorded, with_choices_replayed
from jaxspeed.train_state.state import Arrays
from jaxspeed.user_models.batches import EXTRA, call_loss
from jaxspeed.user_models.own_axes import OwnAxes, with_own_axes
from jaxspeed.user_models.protocol import Model
from jaxspeed.user_models.user_code import foreign

log = logging.getLogger("jaxspeed")

# They change the random keys in a loss, but are missing in JAX's cache key (0.11.2, 0.12.0.1).
SETTINGS = ("jax_default_prng_impl", "jax_enable_custom_prng")


USE_AUTOCAST = (
    "in float32 the same loss works: parts of the model have a dtype of their own. Instead of "
    'casting parameters and inputs (bf16 or fp16), use "torch_autocast": {{"enabled": true, '
    '"dtype": "{}"}}, which casts the operands of matmuls and convolutions'
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """A value as a tree without leaves."""

    value: bool


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Form:
    """Return form of a loss function: a tree without leaves, so that JAX caches it."""

    is_sum: bool
    own_axes: OwnAxes


class LossTraces:
    """Traced programs of one loss; holds no tracer, and no program that JAX does not hold."""

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[[Any, Any], Any],
        params: Mapping[str, jax.ShapeDtypeStruct],
        unit_patterns: Sequence[str],
        autocast: Autocast | None = None,
        cast_to: Any = None,  # the dtype to which parameters and inputs are cast
        ranges: Mapping[str, Sequence[tuple[str, int]]] | None = None,  # as in `TraceContext`
        sequence: SequenceSettings | None = None,
        trained: Collection[str] = (),  # as in `TraceContext`
        records_routing: bool = False,
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._params, self._unit_patterns = params, unit_patterns
        self._autocast, self._cast_to = autocast, cast_to
        self._ranges = ranges or {}
        self._sequence = sequence or SequenceSettings()
        self._trained, self._records_routing = trained, records_routing
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._programs: WeakKeyDictionary[Any, LossProgram] = WeakKeyDictionary()
        self._by_parts: WeakKeyDictionary[Any, dict[int, ByParts]] = WeakKeyDictionary()

    def of(self, variables: Any, batch: Any, train: bool) -> LossProgram:
        """Trace for variables and a batch of these shapes, in this context."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        arguments = (list(self._params.values()), variables, batch, index, index)
        key = (train, gpu.assumption(), splash.generation())
        key += tuple(getattr(jax.config, name) for name in SETTINGS)
        function = self._functions.setdefault(key, self._function(train))
        try:
            closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        except ModelError as error:
            if self._works_in_fp32(function, arguments):
                raise ModelError(
                    f"{error}; {USE_AUTOCAST.format(jnp.dtype(self._cast_to))}"
                ) from error
            raise
        if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            # The loss reads a value of an outer trace, which does not exist for the next call.
            del self._functions[key]
            return self._program(closed, shape, variables, batch, train)
        if closed not in self._programs:
            self._programs[closed] = self._program(closed, shape, variables, batch, train)
        return self._programs[closed]

    def by_parts(
        self, variables: Any, batch: Any, train: bool, parts: int, manual: frozenset[str]
    ) -> ByParts:
        """Whether the loss of a batch of these shapes is the sum of its parts'.

        A part is traced where the axes `manual` are: as it runs, so that it is traced once.
        """
        declared = objective_of(self._loss_fn)
        if declared is not None and declared.entire_batch:
            return ByParts(
                f"{type(declared).__name__} declares entire_batch: its loss mixes samples"
            )
        traced = self.of(variables, batch, train)
        if names := traced.weight_parameters:
            return ByParts(
                f"the loss's weight depends on parameters that are trained ({listed(names)}), so "
                "the gradient is not a sum over samples"
            )
        known = self._by_parts.setdefault(traced.closed, {})
        if parts not in known:

            def trace(batch: Any) -> LossProgram:
                return self.of(variables, batch, train)

            def trace_part(batch: Any) -> LossProgram:
                programs: list[LossProgram] = []

                def inside() -> None:
                    programs.append(trace(batch))

                mapped = jax.shard_map(
                    inside, in_specs=(), out_specs=None, axis_names=set(manual), check_vma=False
                )
                jax.eval_shape(mapped)
                return programs[0]

            known[parts] = by_parts(trace, batch, parts, train, trace_part if manual else trace)
        return known[parts]

    def _works_in_fp32(self, function: Callable[..., Any], arguments: Any) -> bool:
        """Whether a loss that fails with 16-bit parameters and inputs can be traced in fp32."""

        def wide(x: Any) -> Any:
            is_low = x.dtype == self._cast_to
            return jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_low else x

        if self._cast_to is None:
            return False
        try:
            jax.make_jaxpr(function)(*jax.tree.map(wide, arguments))
        except ModelError:
            return False
        return True

    def _function(self, train: bool) -> Callable[..., tuple[Loss, Arrays, _Form]]:
        """(parameters, variables, batch, step, micro) -> (loss, written, form of the loss)."""
        model, loss_fn, paths = self._model, self._loss_fn, list(self._params)
        autocast, drops = self._autocast, self._drops(train)

        def loss(
            values: list[Any], variables: Arrays, batch: Any, step: Any, micro: Any
        ) -> tuple[Loss, Arrays, _Static]:
            params = dict(zip(paths, values, strict=True))
            bound = model.bind(params, variables, train=drops, step=step, micro=micro)
            cast = autocast_to(autocast.dtype if autocast else None)
            sharded = over_sequences(self._sequence.shards)
            with model.naming(bound), cast, sharded, foreign("loss_fn(model, batch)", batch):
                returned = call_loss(loss_fn, bound, batch, variables, step, micro, train=train)
            parsed, is_sum = parse_loss(returned)
            if not train:
                parsed = parsed._replace(
                    terms=tuple(x for x in parsed.terms if x.weight is not None)
                )
            after = model.mutated(bound, params) if train else model.cached_values(bound)
            dtypes = {path: x.dtype for path, x in variables.items() if path != EXTRA}
            written = {path: jnp.asarray(x, dtypes.get(path)) for path, x in after.items()}
            return parsed, written, _Static(is_sum)

        def traced(*args: Any) -> tuple[Loss, Arrays, _Form]:
            (parsed, written, is_sum), axes = with_own_axes(loss)(*args)
            return parsed, written, _Form(is_sum.value, axes)

        return traced

    def _program(
        self, closed: Any, shape: Any, variables: Any, batch: Any, train: bool
    ) -> LossProgram:
        loss, written, form = shape
        _note_ignored(form.own_axes.constraints)
        if self._autocast and not self._programs:  # once
            self._autocast.is_safe.check(closed.jaxpr, list(self._params))
            if asks_for_full_precision(closed.jaxpr):
                log.warning(
                    "torch_autocast has no effect: the model sets the precision of all its "
                    "matmuls and convolutions to HIGHEST, and these keep fp32"
                )
        # The inputs: parameters, then (variables, batch, step, micro), each with its leaves.
        inputs = iter(closed.jaxpr.invars)
        parameters = {path: next(inputs) for path in self._params}
        of_variables = {
            next(inputs): path
            for path in sorted(variables)
            for _ in jax.tree.leaves(variables[path])
        }
        arrays = [next(inputs) for _ in jax.tree.leaves(batch)]
        dims = zip(arrays, sequence_dims(batch, self._sequence.dims), strict=True)
        program = LossProgram(
            closed,
            parameters,
            arrays,
            jax.tree.structure((loss, written)),
            of_variables,
            self._unit_patterns,
            form.is_sum,
            form.own_axes,
            {v: dim for v, dim in dims if dim is not None and self._sequence.shards},
        )
        if self._records_routing:
            program = with_choices_recorded(program)
        elif isinstance(batch, Mapping) and ROUTING in batch:
            number = [*flat_with_paths(batch)].index(ROUTING)
            program = with_choices_replayed(program, arrays[number])
        adapters = getattr(self._model, "adapters", {})
        context = TraceContext(
            self._autocast,
            adapters,
            train,
            self._drops(train),
            self._ranges,
            self._sequence,
            self._trained,
        )
        return before_split(program, context)

    def _drops(self, train: bool) -> bool:
        """Whether the model and its adapters have dropout."""
        objective = objective_of(self._loss_fn)
        return train and (objective is None or objective.dropout)


def _note_ignored(constraints: tuple[str, ...]) -> None:
    if constraints:
        log.info(
            "the model's own sharding constraints are ignored: the config shards activations, and "
            "the numbers are the same (%s)",
            listed(constraints),
        )
