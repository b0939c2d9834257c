"""Reference gradients of one step by plain JAX and Flax on one device, independent for `check`.

The model adapters (`objective`) decide which arrays are trained and which are carried to the next
step, and a step on one device shares that code. Here Flax and `jax.grad` decide: a parameter is
what `jax.grad` differentiates, state is what a plain Flax training loop would carry. Only values,
random streams and the mode of a module come from the adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxspeed.objective import Model
from jaxspeed.objective.autocast import Autocast, autocast_function
from jaxspeed.objective.batches import call_loss
from jaxspeed.objective.loss import parse_loss
from jaxspeed.objective.own_axes import with_own_axes
from jaxspeed.placement.paths import flat_with_paths

Arrays = dict[str, Any]
Role = Literal["parameter", "state", "other"]


class PlainGradients(NamedTuple):
    """Loss, gradients and carried values after all micro-batches of a step."""

    loss: jax.Array
    grads: Arrays  # of every parameter, trained or not; complex ones are conjugated
    values: Arrays  # of parameters and state after the last micro-batch, before any update


def plain_gradients(
    model: Model,
    loss_fn: Callable[[Any, Any], Any],
    params: Arrays,
    variables: Arrays,
    micro: Any,
    step: Any,
    collections: Sequence[str] | None,
    adds: Callable[[str, Any], bool],
    autocast: Autocast | None = None,
) -> PlainGradients:
    """The gradients of micro-batches [micro-batches, ...] from these values of a model.

    `collections` is the config's `parallel.state_collections`, `adds(path, leaf)` whether a
    Variable that is no Param is trained.
    """

    def bound(values: Arrays, number: Any) -> Any:
        given = ({p: values[p] for p in params}, {p: values[p] for p in variables})
        made = model.bind(*given, train=True, step=step, micro=number)
        if _is_linen(made):
            made.variables = _without(made.variables, sown)
        return made

    sown = set[tuple[str, ...]]()
    one = jax.tree.map(lambda x: x[0], micro)
    values = {**params, **variables}
    jax.eval_shape(
        with_own_axes(lambda v: _recorded(loss_fn, bound(v, 0), (one, v, step, 0), sown)), values
    )
    sown = {place for place in sown if collections is None or place[0] not in collections}
    roles: dict[str, Role] = {}
    jax.eval_shape(lambda v: _note_roles(bound(v, 0), collections, adds, roles), values)
    moving = [path for path, role in roles.items() if role == "parameter"]

    def loss_of(active: Arrays, values: Arrays, batch: Any, number: Any) -> Any:
        model_now = bound({**values, **active}, number)
        loss, _ = parse_loss(call_loss(loss_fn, model_now, batch, values, step, number, train=True))
        weight = loss.weight
        after = {
            path: jnp.asarray(x, values[path].dtype)
            for path, x in _values(model_now).items()
            if roles.get(path, "other") != "other"
        }
        mean = jnp.where(weight > 0, loss.total / jnp.where(weight > 0, weight, 1), 0)
        return mean, (loss.total, weight, after)

    def loss(*args: Any) -> Any:
        return with_own_axes(loss_of)(*args)[0]

    loss_now = autocast_function(loss, autocast) if autocast else loss

    def one_more(carry: Any, xs: Any) -> Any:
        values, grads, total, weight = carry
        number, batch = xs
        active = {path: values[path] for path in moving}
        new, (t, w, after) = jax.grad(loss_now, has_aux=True)(active, values, batch, number)
        grads = {
            p: g + jnp.conj(new[p]).astype(g.dtype) * w.astype(g.dtype) for p, g in grads.items()
        }
        return ({**values, **after}, grads, total + t, weight + w), None

    def wide(x: Any) -> Any:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    count = jax.tree.leaves(micro)[0].shape[0]
    shapes = jax.eval_shape(lambda v: loss({}, v, one, 0)[1][:2], values)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    start: Any = (values, {path: wide(values[path]) for path in moving}, *zeros)
    (values, grads, total, weight), _ = jax.lax.scan(one_more, start, (jnp.arange(count), micro))
    share = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
    grads = {path: g * share.astype(g.dtype) for path, g in grads.items()}
    return PlainGradients(total * share, grads, values)


def _recorded(loss_fn: Any, bound: Any, given: Any, sown: set[tuple[str, ...]]) -> None:
    """Run the loss and record where Linen modules sow."""
    sow = nn.Module.sow

    def noted(self: Any, col: str, name: str, *args: Any, **kwargs: Any) -> bool:
        sown.add((col, *self.path, name))
        return sow(self, col, name, *args, **kwargs)

    with mock.patch.object(nn.Module, "sow", noted):
        call_loss(loss_fn, bound, *given, train=True)


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
    return isinstance(getattr(bound, "module", None), nn.Module)


def _without(variables: Any, places: set[tuple[str, ...]]) -> Any:
    """Nested dicts without the entries at some paths."""

    def pruned(tree: Any, place: tuple[str, ...]) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        inside = {name: pruned(x, (*place, name)) for name, x in tree.items()}
        return {name: x for name, x in inside.items() if (*place, name) not in places}

    return pruned(variables, ())
