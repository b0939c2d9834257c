"""Reference gradients of one step by plain JAX and Flax on one device, independent for `check`.

The model adapters decide which arrays are trained and which are carried to the next
step, how variables are made and which mode a module is in, and a step on one device shares that
code. Here Flax and `jax.grad` decide: a parameter is what `jax.grad` differentiates, state is what
a plain Flax training loop would carry, variables are those of `Module.init` with the example batch,
and modes are set by the modules' own fields and methods. Only values, random streams and frozen
statistics come from the adapter.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import lift, meta
from flax.core.scope import DenyList, in_filter, union_filters

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.traced_loss.autocast import Autocast, autocast_function
from jaxspeed.traced_loss.loss import parse_loss
from jaxspeed.user_models import Model
from jaxspeed.user_models.batches import call_loss, with_extra
from jaxspeed.user_models.linen_calls import frozen_statistics
from jaxspeed.user_models.own_axes import with_own_axes
from jaxspeed.user_models.protocol import AFTER_MICRO_BATCHES, SEED, mode_arguments, nested
from jaxspeed.user_models.rng import FALLBACK

Arrays = dict[str, Any]
Role = Literal["parameter", "state", "other"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Names:
    """Paths, as a tree without leaves."""

    paths: tuple[str, ...] = ()


class PlainGradients(NamedTuple):
    """Loss, gradients and carried values after all micro-batches of a step."""

    loss: jax.Array
    grads: Arrays  # of every parameter, trained or not; complex ones are conjugated
    values: Arrays  # of parameters and state after the last micro-batch, before any update
    created: Names = Names()  # state that a loop of one's own would carry as well


def plain_gradients(
    model: Model,
    user_model: Any,
    loss_fn: Callable[[Any, Any], Any],
    params: Arrays,
    variables: Arrays,
    micro: Any,
    step: Any,
    collections: Sequence[str] | None,
    adds: Callable[[str, Any], bool],
    autocast: Autocast | None = None,
    adapted: AdaptedModel | None = None,
) -> PlainGradients:
    """The gradients of micro-batches [micro-batches, ...] from these values of a model.

    Args:
      user_model: what `initialize` was given.
      collections: the config's `parallel.state_collections`.
      adds: `adds(path, leaf)`: whether a Variable that is no Param is trained.
      adapted: the model with its adapters, which are merged into its weights here.
    """
    weights = adapted.adapters if adapted else {}
    adapters = [path for adapter in weights.values() for path in adapter.shapes]

    def bound(values: Arrays, number: Any) -> Any:
        parameters = {p: values[p] for p in params}
        parameters = adapted.merged(parameters) if adapted else parameters
        arguments = (parameters, {p: values[p] for p in variables})
        bound_model = plain_model(
            model, user_model, *arguments, train=True, step=step, micro=number
        )
        if _is_linen(bound_model):
            bound_model.variables = _without(bound_model.variables, sown)
            bound_model.split_streams(split)
        return bound_model

    sown, split = set[tuple[str, ...]](), set[str]()
    micro_batch = jax.tree.map(lambda x: x[0], micro)
    values = {**params, **variables}
    jax.eval_shape(
        with_own_axes(
            lambda v: _recorded(loss_fn, bound(v, 0), (micro_batch, v, step, 0), sown, split)
        ),
        values,
    )
    sown = {place for place in sown if collections is None or place[0] not in collections}
    roles: dict[str, Role] = {}
    jax.eval_shape(lambda v: _note_roles(bound(v, 0), collections, adds, roles), values)
    moving = [*(path for path, role in roles.items() if role == "parameter"), *adapters]

    def loss_of(active: Arrays, values: Arrays, batch: Any, number: Any, means: Any) -> Any:
        model_now = bound({**values, **active}, number)
        returned = call_loss(loss_fn, model_now, batch, values, step, number, train=True)
        loss, _ = parse_loss(returned, stop_weight=False)
        total, weight = loss.total, loss.weight
        loss_weights = (weight, [term.weight for term in loss.terms])
        if means is not None:  # the mean weights of all micro-batches
            of_loss, of_terms = means
            some = [of_loss, *(w for w in of_terms if w is not None)]
            total, weight = _per(total, of_loss), jnp.any(jnp.stack(some) > 0).astype(total.dtype)
            for term, of_term in zip(loss.terms, of_terms, strict=True):
                total = total + (term.total if of_term is None else _per(term.total, of_term))
        every = _values(model_now)
        fresh = tuple("/".join(place) for place in sown)
        created.update(
            path
            for path in every.keys() - values.keys()
            if not any(path == at or path.startswith(f"{at}/") for at in fresh)
        )
        after = {
            path: jnp.asarray(x, values[path].dtype)
            for path, x in every.items()
            if roles.get(path, "other") != "other" and path not in weights
        }
        return total / _unit(weight), (total, weight, after, loss_weights)

    created = set[str]()

    def loss(*args: Any) -> Any:
        return with_own_axes(loss_of)(*args)[0]

    loss_now = autocast_function(loss, autocast) if autocast else loss

    def one_more(carry: Any, xs: Any) -> Any:
        values, grads, total, weight = carry
        number, batch = xs
        active = {path: values[path] for path in moving}
        new, (t, w, after, _) = jax.grad(loss_now, has_aux=True)(
            active, values, batch, number, means
        )
        grads = {
            p: g + jnp.conj(new[p]).astype(g.dtype) * _unit(w).astype(g.dtype)
            for p, g in grads.items()
        }
        return ({**values, **after}, grads, total + t, weight + w), None

    def wide(x: Any) -> Any:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    count = jax.tree.leaves(micro)[0].shape[0]
    every_one = jnp.arange(count), micro
    *shapes, (_, others) = jax.eval_shape(
        lambda v: operator.itemgetter(0, 1, 3)(loss({}, v, micro_batch, 0, None)[1]), values
    )
    means = None
    if others:
        batch_weights = jax.lax.map(
            lambda xs: loss_now({}, values, *xs[::-1], None)[1][3], every_one
        )
        means = jax.tree.map(lambda x: x.mean(0), batch_weights)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    start: Any = (values, {path: wide(values[path]) for path in moving}, *zeros)
    (values, grads, total, weight), _ = jax.lax.scan(one_more, start, every_one)
    values = {**values, **_after_step(bound(values, AFTER_MICRO_BATCHES), values, roles)}
    share = _per(jnp.ones_like(weight), weight)
    grads = {path: g * share.astype(g.dtype) for path, g in grads.items()}
    created = {path for path in created if collections is None or path.split("/")[0] in collections}
    return PlainGradients(total * share, grads, values, Names(tuple(sorted(created))))


def _after_step(bound: Any, values: Arrays, roles: Mapping[str, Role]) -> Arrays:
    """The state after the root module's own `after_step()`, which ends a step."""
    if not hasattr(type(bound.module if _is_linen(bound) else bound), "after_step"):
        return {}
    bound.after_step()
    return {
        path: jnp.asarray(x, values[path].dtype)
        for path, x in _values(bound).items()
        if roles.get(path) == "state"
    }


def plain_loss(
    model: Model,
    user_model: Any,
    loss_fn: Callable[[Any, Any], Any],
    params: Arrays,
    variables: Arrays,
    batch: Any,
    step: Any,
    autocast: Autocast | None = None,
    train: bool = False,
) -> jax.Array:
    """The loss of a batch as one micro-batch."""

    def loss_of(params: Arrays, variables: Arrays, batch: Any) -> Any:
        bound_model = plain_model(
            model, user_model, params, variables, train=train, step=step, micro=0
        )
        loss, _ = parse_loss(
            call_loss(loss_fn, bound_model, batch, variables, step, 0, train=train)
        )
        terms = [(x.total, x.weight) for x in loss.terms if x.weight is not None]
        return sum((_per(*term) for term in terms), _per(loss.total, loss.weight))

    def loss(*args: Any) -> Any:
        return with_own_axes(loss_of)(*args)[0]

    loss_now = autocast_function(loss, autocast) if autocast else loss
    mean: jax.Array = loss_now(params, variables, batch)
    return mean


def _per(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The total over the weight, and 0 without weight."""
    return jnp.where(weight > 0, total / _unit(weight), 0)


def _unit(weight: jax.Array) -> jax.Array:
    """A weight to divide by: a micro-batch's may be 0, and its sum not."""
    return jnp.where(weight > 0, weight, 1)


def plain_init(
    module: nn.Module, call: Callable[[Any, Any], Any], seed: Any, example: Any
) -> Arrays:
    """The variables that `Module.init` makes in the calls of the loss for an example batch."""
    key = jax.random.key(seed)

    def initial(key: Any, batch: Any) -> Any:
        plain = PlainLinen(module, {}, {FALLBACK: key}, training=False, creates=True)
        variables, batch = with_extra({SEED: key}, batch)
        call_loss(call, plain, batch, variables, 0, 0, train=False)
        return meta.unbox(plain.variables)

    initial_values = flat_with_paths(with_own_axes(initial)(key, example)[0])
    return {path.removeprefix("params/"): x for path, x in initial_values.items()}


def plain_model(
    model: Model, user_model: Any, params: Arrays, variables: Arrays, **mode: Any
) -> Any:
    """What a loop of one's own passes to the loss, in place of the adapter's model."""
    if isinstance(user_model, nn.Module):
        bound = model.bind(params, variables, **mode)
        values = {**params, **variables}
        places = flat_with_paths(bound.variables)
        tree = {tuple(at.split("/")): values[at.removeprefix("params/")] for at in places}
        return PlainLinen(user_model, nested(tree), bound.rngs, mode["train"], bound.is_frozen)
    if isinstance(user_model, tuple):
        return model.bind(params, variables, **mode)
    module: nnx.Module = model.bind(params, variables, **{**mode, "train": True})
    if not mode["train"] or getattr(model, "trains_itself", False):
        name = "train" if mode["train"] else "eval"
        set_mode = getattr(module, name)
        try:
            inspect.signature(set_mode).bind()
        except TypeError:  # a method of that name that sets no mode
            set_mode = functools.partial(getattr(nnx.Module, name), module)
        set_mode()
    return module


class PlainLinen:
    """A Linen module in a loop of one's own: `Module.init` or `apply`, with what it changed last.

    With `creates`, its calls make the variables.
    """

    def __init__(
        self,
        module: nn.Module,
        variables: Any,
        rngs: Mapping[str, Any],
        training: bool,
        is_frozen: Callable[[str], bool] = lambda path: False,
        creates: bool = False,
    ) -> None:
        modes = {} if training else _mode_fields(module)
        self.module, self.variables = module.clone(**modes), variables  # type: ignore[arg-type]
        self.training, self._creates, self._rngs = training, creates, dict(rngs)
        self._is_frozen = is_frozen
        # In evaluation calls change nothing, but sow.
        self._kept = DenyList(("params",) if training else tuple(variables))

    def split_streams(self, names: Iterable[str]) -> None:
        """Add the streams that a lifted transformation splits, which nothing falls back from."""
        key = self._rngs[FALLBACK]
        for i, name in enumerate(sorted(set(names) - set(self._rngs))):
            self._rngs[name] = jax.random.fold_in(key, i)

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        value = getattr(self.module, name)
        is_method = inspect.isfunction(getattr(type(self.module), name, None))
        return functools.partial(self, method=name) if is_method else value

    def __call__(self, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        if self._creates:
            out, changed = self._run(self.module.init_with_output, (), args, True, kwargs)
            self.variables = meta.unbox(_both(self.variables, changed))
        else:
            every = union_filters(self._kept, mutable)
            out, changed = self.apply(self.variables, *args, mutable=every, **kwargs)
            self.variables = {**self.variables, **changed}
        if mutable is False:
            return out
        return out, {name: x for name, x in changed.items() if in_filter(mutable, name)}

    def apply(self, variables: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        if self._creates:
            return self(*args, mutable=mutable, **kwargs)
        return self._run(self.module.apply, (variables,), args, mutable, kwargs)

    def _run(self, call: Any, first: Any, args: Any, mutable: Any, kwargs: dict[str, Any]) -> Any:
        method, rngs = kwargs.get("method"), kwargs.pop("rngs", None)
        called = getattr(self.module, method) if isinstance(method, str) else method
        parameters = inspect.signature(called or type(self.module).__call__).parameters
        modes = mode_arguments(parameters, self.training)
        fields = _mode_fields(self.module)  # Flax refuses a mode that is both
        kwargs = {**{k: on for k, on in modes.items() if k not in fields}, **kwargs}
        call_rngs = {} if rngs is None else rngs if isinstance(rngs, Mapping) else {FALLBACK: rngs}
        streams = {**self._rngs, **call_rngs}
        context = frozen_statistics(self._is_frozen) if self.training else _evaluating()
        with nullcontext() if self._creates else context:
            if self._creates:
                return call(streams, *args, mutable=mutable, **kwargs)
            return call(*first, *args, rngs=streams, mutable=mutable, **kwargs)


def _mode_fields(module: nn.Module) -> dict[str, bool]:
    """A module's own fields that hold a mode, as they are in evaluation."""
    named = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    return mode_arguments({name: x for name, x in named.items() if isinstance(x, bool)}, False)


@contextlib.contextmanager
def _evaluating() -> Iterator[None]:
    """Context in which each module that is called has its mode fields set for evaluation."""

    def in_evaluation(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        for name, on in _mode_fields(context.module).items():
            if getattr(context.module, name) is not on:
                object.__setattr__(context.module, name, on)
        return method(*args, **kwargs)

    with nn.intercept_methods(in_evaluation):
        yield


def _both(old: Any, new: Any) -> Any:
    """Nested dicts with the entries of both, of which the old ones stay."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return old
    return {**new, **{name: _both(x, new[name]) if name in new else x for name, x in old.items()}}


def _recorded(
    loss_fn: Any, bound: Any, arguments: Any, sown: set[tuple[str, ...]], split: set[str]
) -> None:
    """Run the loss; record where Linen modules sow and which streams lifted functions split.

    `nn.intercept_methods` does not see methods of `nn.Module` itself.
    """
    sow, pack = nn.Module.sow, lift.pack

    def noted(self: Any, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
        sown.add((col, *self.path, name))
        return sow(self, col, name, *args, **kwargs)

    def packed(fn: Any, ins: Any, outs: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        split.update(name for name in jax.tree.leaves(rngs) if isinstance(name, str))
        return pack(fn, ins, outs, rngs, *args, **kwargs)

    with mock.patch.object(nn.Module, "sow", noted), mock.patch.object(lift, "pack", packed):
        call_loss(loss_fn, bound, *arguments, train=True)


def _note_roles(
    bound: Any,
    collections: Sequence[str] | None,
    adds: Callable[[str, Any], bool],
    roles: dict[str, Role],
) -> None:
    """Record the role of each array by Flax's types and collections."""
    if isinstance(bound, nnx.Module):
        for keys, leaf in nnx.to_flat_state(nnx.state(bound)):
            path = "/".join(map(str, keys))
            added = adds(path, leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
            roles[path] = "parameter" if added else _nnx_role(leaf, collections)
    elif _is_linen(bound):
        for name, tree in bound.variables.items():
            state: Role = "state" if collections is None or name in collections else "other"
            for path, x in flat_with_paths(tree).items():
                if name == "params":
                    roles[path] = "parameter" if jnp.issubdtype(x.dtype, jnp.inexact) else "other"
                else:
                    roles[f"{name}/{path}"] = state
    else:
        for path, x in flat_with_paths(bound.params).items():
            roles[path] = "parameter" if jnp.issubdtype(x.dtype, jnp.inexact) else "other"


def _nnx_role(leaf: Any, collections: Sequence[str] | None) -> Role:
    if isinstance(leaf, nnx.Param) and jnp.issubdtype(leaf.dtype, jnp.inexact):
        return "parameter"
    if isinstance(leaf, nnx.RngState):
        return "other"
    if collections is not None and isinstance(leaf, nnx.Variable):
        registered = nnx.variablelib.VariableTypeCache.get
        wanted = tuple(kind for kind in map(registered, collections) if kind is not None)
        named = any(kind.__name__ in collections for kind in type(leaf).__mro__)
        return "state" if named or isinstance(leaf, wanted) else "other"
    return "other" if isinstance(leaf, nnx.Intermediate) else "state"


def _values(bound: Any) -> Arrays:
    if isinstance(bound, nnx.Module):
        flat = nnx.to_flat_state(nnx.state(bound))
        return {
            "/".join(map(str, keys)): x.get_raw_value() if isinstance(x, nnx.Variable) else x
            for keys, x in flat
        }
    if not _is_linen(bound):
        return {}
    flat_variables = flat_with_paths(bound.variables)
    return {path.removeprefix("params/"): x for path, x in flat_variables.items()}


def _is_linen(bound: Any) -> bool:
    return isinstance(bound, PlainLinen)


def _without(variables: Any, places: set[tuple[str, ...]]) -> Any:
    """Nested dicts without the entries at some paths."""

    def pruned(tree: Any, place: tuple[str, ...]) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        inside = {name: pruned(x, (*place, name)) for name, x in tree.items()}
        return {name: x for name, x in inside.items() if (*place, name) not in places}

    return pruned(variables, ())
