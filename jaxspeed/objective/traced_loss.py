"""Tracing of the loss, once per shapes and context, for all its users.

JAX caches the result of `jax.make_jaxpr` by the function's identity, the tree, shapes and dtypes of
its arguments, the mesh in context with its manual axes, and the settings that JAX lists as relevant
to a trace. This module passes it the same function again, and keys it by what else a trace depends
on.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from jaxspeed.config import match
from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.primitives import RANDOM
from jaxspeed.jaxpr.traverse import forwarded, is_var, runs
from jaxspeed.objective.autocast import Autocast, asks_for_full_precision, with_autocast
from jaxspeed.objective.batches import EXTRA, call_loss
from jaxspeed.objective.by_parts import ByParts, by_parts
from jaxspeed.objective.loss import Loss, parse_loss
from jaxspeed.objective.own_axes import OwnAxes, with_own_axes
from jaxspeed.objective.protocol import Model
from jaxspeed.objective.train_state import Arrays
from jaxspeed.objective.user_code import foreign
from jaxspeed.ops import gpu, splash
from jaxspeed.ops.attention import autocast_to
from jaxspeed.placement.paths import listed
from jaxspeed.zero3 import Units, choose_units, outermost_calls

log = logging.getLogger("jaxspeed")

# They change the random keys in a loss, but are missing in JAX's cache key (0.11.2, 0.12.0.1).
SETTINGS = ("jax_default_prng_impl", "jax_enable_custom_prng")


@dataclass(frozen=True)
class Traced:
    """A traced loss."""

    closed: Any
    parameters: Sequence[Any]  # its variables that are parameters
    batch: Sequence[Any]  # and those that are arrays of the batch
    out_tree: Any
    unit_patterns: Sequence[str]
    is_sum: bool  # the loss function returned (sum, weight)
    own_axes: OwnAxes  # axis names of the model

    @cached_property
    def units(self) -> Units:
        return choose_units(self.closed.jaxpr, self.parameters, self.unit_patterns, match)

    @cached_property
    def outermost(self) -> Units:
        """The units of a model in which nothing repeats: the calls of the loss."""
        return outermost_calls(self.closed.jaxpr, self.parameters)

    @property
    def draws_random_numbers(self) -> bool:
        return any(runs(eqn, RANDOM) for eqn in self.closed.jaxpr.eqns)

    @property
    def written(self) -> frozenset[str]:
        """Parameters and variables (such as statistics) that the loss changes."""
        _, after = jax.tree.unflatten(self.out_tree, range(self.out_tree.num_leaves))
        return frozenset(after)


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
    ) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._params, self._unit_patterns = params, unit_patterns
        self._autocast, self._cast_to = autocast, cast_to
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._programs: WeakKeyDictionary[Any, Traced] = WeakKeyDictionary()
        self._by_parts: WeakKeyDictionary[Any, ByParts] = WeakKeyDictionary()

    def of(self, variables: Any, batch: Any, train: bool) -> Traced:
        """Trace for variables and a batch of these shapes, in this context."""
        index = jax.ShapeDtypeStruct((), jnp.int32)
        given = (list(self._params.values()), variables, batch, index, index)
        key = (train, gpu.assumption(), splash.generation())
        key += tuple(getattr(jax.config, name) for name in SETTINGS)
        function = self._functions.setdefault(key, self._function(train))
        try:
            closed, shape = jax.make_jaxpr(function, return_shape=True)(*given)
        except ModelError as error:
            if self._works_in_fp32(function, given):
                raise ModelError(
                    f"{error}; {USE_AUTOCAST.format(jnp.dtype(self._cast_to))}"
                ) from error
            raise
        if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            # The loss reads a value of an outer trace, which does not exist for the next call.
            del self._functions[key]
            return self._program(closed, shape, variables, batch)
        if closed not in self._programs:
            self._programs[closed] = self._program(closed, shape, variables, batch)
        return self._programs[closed]

    def by_parts(self, variables: Any, batch: Any, train: bool, ranks: int) -> ByParts:
        """Whether the loss of a batch of these shapes is the sum of its parts'."""
        program = self.of(variables, batch, train).closed
        if program not in self._by_parts:

            def trace(batch: Any) -> Traced:
                return self.of(variables, batch, train)

            self._by_parts[program] = by_parts(trace, batch, ranks)
        return self._by_parts[program]

    def _works_in_fp32(self, function: Callable[..., Any], given: Any) -> bool:
        """Whether a loss that fails with 16-bit parameters and inputs can be traced in fp32."""

        def wide(x: Any) -> Any:
            is_low = x.dtype == self._cast_to
            return jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_low else x

        if self._cast_to is None:
            return False
        try:
            jax.make_jaxpr(function)(*jax.tree.map(wide, given))
        except ModelError:
            return False
        return True

    def _function(self, train: bool) -> Callable[..., tuple[Loss, Arrays, _Form]]:
        """(parameters, variables, batch, step, micro) -> (loss, written, form of the loss)."""
        model, loss_fn, paths = self._model, self._loss_fn, list(self._params)
        autocast = self._autocast

        def loss(
            values: list[Any], variables: Arrays, batch: Any, step: Any, micro: Any
        ) -> tuple[Loss, Arrays, _Static]:
            params = dict(zip(paths, values, strict=True))
            bound = model.bind(params, variables, train=train, step=step, micro=micro)
            cast = autocast_to(autocast.dtype if autocast else None)
            with model.naming(bound), cast, foreign("loss_fn(model, batch)", batch):
                returned = call_loss(loss_fn, bound, batch, variables, step, micro, train=train)
            found, is_sum = parse_loss(returned)
            after = model.mutated(bound, params) if train else model.cached_values(bound)
            dtypes = {path: x.dtype for path, x in variables.items() if path != EXTRA}
            written = {path: jnp.asarray(x, dtypes.get(path)) for path, x in after.items()}
            return found, written, _Static(is_sum)

        def traced(*args: Any) -> tuple[Loss, Arrays, _Form]:
            (found, written, is_sum), axes = with_own_axes(loss)(*args)
            return found, written, _Form(is_sum.value, axes)

        return traced

    def _program(self, closed: Any, shape: Any, variables: Any, batch: Any) -> Traced:
        loss, written, form = shape
        _note_ignored(form.own_axes.constraints)
        if self._autocast:
            if not self._programs:  # once
                self._autocast.is_safe.check(closed.jaxpr, list(self._params))
                if asks_for_full_precision(closed.jaxpr):
                    log.warning(
                        "torch_autocast has no effect: the model sets the precision of all its "
                        "matmuls and convolutions to HIGHEST, and these keep fp32"
                    )
            paths = dict(zip(closed.jaxpr.invars, self._params, strict=False))
            closed = with_autocast(closed, self._autocast, paths)
        closed, out_tree = _without_unwritten(closed, (loss, written), self._params, variables)
        parameters = closed.jaxpr.invars[: len(self._params)]
        # After them come (variables, batch, step, micro), each with its leaves.
        first = len(parameters) + len(jax.tree.leaves(variables))
        of_batch = closed.jaxpr.invars[first : first + len(jax.tree.leaves(batch))]
        return Traced(
            closed,
            parameters,
            of_batch,
            out_tree,
            self._unit_patterns,
            form.is_sum,
            form.own_axes,
        )


def _note_ignored(constraints: tuple[str, ...]) -> None:
    if constraints:
        log.info(
            "the model's own sharding constraints are ignored: the config shards activations, and "
            "the numbers are the same (%s)",
            listed(constraints),
        )


def _without_unwritten(
    closed: Any, shape: Any, params: Iterable[str], variables: Arrays
) -> tuple[Any, Any]:
    """Remove outputs that are unchanged inputs: (program, tree of its results).

    Transposes that nothing else reads go too: a stack is found by what reads its parameters.
    Its first inputs are the parameters at these paths, one by one, and then the variables.
    """
    rest = (path for path in sorted(variables) for _ in jax.tree.leaves(variables[path]))
    paths = [*params, *rest]
    loss, after = shape
    count = len(jax.tree.leaves(loss))
    origins = forwarded(closed.jaxpr)[count:]
    own = dict(zip(closed.jaxpr.invars, paths, strict=False))
    names = jax.tree.unflatten(jax.tree.structure(after), range(len(origins)))
    changed = {path: i for path, i in names.items() if own.get(origins[i]) != path}
    outs = closed.jaxpr.outvars
    outs = [*outs[:count], *(outs[count + i] for i in changed.values())]
    eqns: list[Any] = []
    read = set(filter(is_var, outs))
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.primitive.name != "transpose" or eqn.outvars[0] in read:
            eqns.append(eqn)
            read.update(filter(is_var, eqn.invars))
    jaxpr = closed.jaxpr.replace(outvars=outs, eqns=eqns[::-1])
    return closed.replace(jaxpr=jaxpr), jax.tree.structure((loss, changed))
