"""Adapter of an `nnx.Module` factory to the Model protocol."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock
from weakref import finalize

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.variablelib import VariableTypeCache, is_array_ref

from jaxspeed.errors import ModelError
from jaxspeed.jaxpr.module_scopes import tagged
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.caching import create_caches
from jaxspeed.user_models.held_arrays import HeldArrays
from jaxspeed.user_models.init_for_real import init_values, note_of, shapes_of
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.protocol import (
    AFTER_MICRO_BATCHES,
    EDITED,
    EVALUATION,
    SEED,
    STATISTICS,
    Arrays,
    CachedModel,
    changed_after_step,
    check_collections,
    frozen_part,
    frozen_statistics_note,
    has_after_step,
    is_array,
    is_inexact,
    nested,
)
from jaxspeed.user_models.rng import micro_batch_key
from jaxspeed.user_models.trainable import TrainRule
from jaxspeed.user_models.user_code import foreign

_MOST_PATHS = 1000  # of a Variable: modules that refer to each other have endlessly many
# Where Flax versions and models keep the logical names of a parameter's dims.
NAME_KEYS = ("logical_axes", "out_sharding", "sharding_names", "sharding")


class NnxModel:
    """An nnx module as a Model.

    A shared Variable is stored at the first path at which it is found; patterns know the others.
    """

    weights: Weights | None = None

    def __init__(
        self,
        factory: Callable[[nnx.Rngs], nnx.Module],
        trainable: TrainRule,
        full_precision: Callable[[Sequence[str]], bool],
        state_collections: Sequence[str] | None = None,
        seeded: bool = False,
    ) -> None:
        self._factory = factory
        self._variant = trainable, full_precision, state_collections, seeded
        self._caches: frozenset[str] = frozenset()
        self._graph, state, self.needs_values = self._abstract()
        module = nnx.merge(self._graph, state, copy=True)
        self._has_after_step = has_after_step(module)
        # By a module's identity: one with a dataclass as a base compares by its fields.
        self._held_by: dict[int, list[Any]] = {}
        self.trains_itself = _has_own(module, "train") and not self._left_in_evaluation(
            type(module)
        )
        flat = list(nnx.to_flat_state(state))
        self._kinds = {_path(keys): (keys, variable) for keys, variable in flat}
        paths = _all_paths(module, [keys for keys, _ in flat])
        self.leaves = trainable.over(
            Leaf(
                path,
                tuple(value_of(v).shape),  # v.shape and v.dtype may be metadata of the model's own
                value_of(v).dtype,
                dim_names(v),
                trainable(paths[path], v),
                full_precision(paths[path]) or bool(v.get_metadata().get("full_precision")),
                paths[path][1:],
            )
            for path, (_, v) in self._kinds.items()
            if is_inexact(value_of(v)) and (isinstance(v, nnx.Param) or trainable.adds(path, v))
        )
        self._state_collections = state_collections
        every = [v for _, v in flat if isinstance(v, nnx.Variable)]
        check_collections(state_collections, (n for v in every for n in _collections_of(v)))
        self._frozen = frozen_part(self.leaves)
        self._modes = [(path, mode) for path, _, mode in _modes(module)]
        self._norms = [
            _path(keys)
            for keys, node in nnx.iter_graph(module)
            if isinstance(node, nnx.BatchNorm) and node.dtype is None
        ]
        own = {leaf.path for leaf in self.leaves}
        self.variables = {
            path: jax.ShapeDtypeStruct(value_of(v).shape, value_of(v).dtype)
            for path, (_, v) in self._kinds.items()
            if path not in own
        }
        if seeded:  # for the loss; the module has its own random streams
            key = jax.eval_shape(lambda: jax.random.key(0))
            self.variables[SEED] = jax.ShapeDtypeStruct((), key.dtype)

    def _abstract(self) -> tuple[Any, nnx.State, str | None]:
        """(structure, state with shapes in place of arrays, why it was built for real).

        Split within the trace: outside of it Flax takes the shapes that a list, a dict or a tuple
        holds for part of the structure (0.12.12).
        """
        graphs = []

        def state() -> nnx.State:
            graph, state = nnx.split(self._build(0))
            graphs.append(graph)
            return state

        with nnx.use_eager_sharding(False):
            shapes, reason = shapes_of(state)
        return graphs[-1], shapes, reason

    def _left_in_evaluation(self, kind: type[nnx.Module]) -> bool:
        """Whether the factory calls the model's `eval`, and no `train` after it."""
        called: dict[int, str] = {}
        found: list[bool] = []

        def noted(name: str) -> Callable[..., Any]:
            own = getattr(kind, name)

            def call(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
                result = own(module, *args, **kwargs)
                called[id(module)] = name
                return result

            return call

        def state() -> nnx.State:
            module = self._build(0)
            found.append(called.get(id(module)) == "eval")
            return nnx.split(module)[1]

        patched = (mock.patch.object(kind, name, noted(name)) for name in ("eval", "train"))
        with next(patched), next(patched), nnx.use_eager_sharding(False):
            shapes_of(state)
        return found[-1]

    def _build(self, seed: jax.Array | int) -> nnx.Module:
        with _quick_streams(), foreign("the model factory, called as factory(rngs),"):
            module = self._factory(nnx.Rngs(jax.random.key(seed)))
        if not isinstance(module, nnx.Module):
            raise ModelError(
                f"the model factory returned a {type(module).__name__}; it must return an "
                "nnx.Module: lambda rngs: MyModel(..., rngs=rngs)"
            )
        _drop_sown(module)
        keep_arrays(module)
        return module

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        with nnx.use_eager_sharding(False):
            state = init_values(self.needs_values, lambda s: nnx.split(self._build(s))[1], seed)
        values = {_path(keys): value_of(v) for keys, v in nnx.to_flat_state(state)}
        values[SEED] = jax.random.key(seed)
        own = [leaf.path for leaf in self.leaves]
        return {p: values[p] for p in own}, {p: values[p] for p in self.variables}

    def bind(
        self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any
    ) -> nnx.Module:
        module = self.module({**params, **self._reseeded(variables, step, micro)})
        if not train and _has_own(module, "eval"):
            module.eval()  # decides alone, as in a loop of one's own
            return module
        if train and self.trains_itself:
            module.train()
        for path, part, mode in _modes(module):
            for name, value in mode.items():
                if not train:
                    setattr(part, name, EVALUATION[name])
                elif value is None:
                    setattr(part, name, not EVALUATION[name])
            if train and STATISTICS in mode and self._frozen(path):
                setattr(part, STATISTICS, True)
        return module

    def module(self, values: Arrays) -> nnx.Module:
        """Build a module with these values."""
        with nnx.use_eager_sharding(False):
            flat = [
                (keys, v.replace(values[path]) if isinstance(v, nnx.Variable) else values[path])
                for path, (keys, v) in self._kinds.items()
            ]
            module: nnx.Module = nnx.merge(self._graph, nnx.from_flat_state(flat), copy=True)
        copies = []
        for path, node, name, held in list(_held(module)):
            object_now = held.copied()
            setattr(node, name, nnx.static(object_now))
            copies.append((path, object_now, held))
        if copies:
            self._held_by[id(module)] = copies
            finalize(module, self._held_by.pop, id(module))
        return module

    def _reseeded(self, variables: Arrays, step: Any, micro: Any) -> Arrays:
        def fresh(path: str, value: Any) -> Any:
            kind = type(self._kinds[path][1])
            if issubclass(kind, nnx.RngKey):
                return micro_batch_key(value, step, micro)
            return jnp.zeros_like(value) if issubclass(kind, nnx.RngCount) else value

        return {path: fresh(path, x) for path, x in variables.items() if path in self._kinds}

    def mutated(self, bound: nnx.Module, params: Arrays) -> Arrays:
        """Collect changed state; random streams and intermediate values are per micro-batch."""
        for path, object_now, held in self._held_by.get(id(bound), ()):
            changed = held.changed(object_now)
            if changed:
                raise ModelError(
                    f"the loss changes {path}.{changed}, an array in a plain "
                    f"{type(object_now).__name__} of the model, where Flax does not see it: store "
                    "an nnx.Variable there, in a class that is an nnx.Module"
                )
        after = {_path(keys): v for keys, v in nnx.to_flat_state(nnx.split(bound)[1])}
        kinds = {path: self._kinds[path][1] for path in self.variables if path != SEED}
        state = [path for path, v in kinds.items() if _is_state(v, self._state_collections)]
        found = {path: value_of(after[path]) for path in (*state, *params) if path in after}
        return {path: x for path, x in found.items() if x is not params.get(path)}

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        if not self._has_after_step:
            return {}

        def bind(params: Arrays) -> nnx.Module:
            key = AFTER_MICRO_BATCHES
            return self.bind(params, variables, train=True, step=step, micro=key)

        return changed_after_step(self, bind, variables)

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> CachedModel | None:
        if self.needs_values:
            return None
        modes: list[bool | None] = []

        def factory(rngs: nnx.Rngs) -> nnx.Module:
            module = self._factory(rngs)
            modes.append(create_caches(module, rows, length, dtype))
            return module

        model = NnxModel(factory, *self._variant)
        kinds = {path: v for path, (_, v) in model._kinds.items()}
        model._caches = frozenset(path for path, v in kinds.items() if isinstance(v, nnx.Cache))
        if modes[-1] is None or not model._caches:
            return None

        def fresh() -> Arrays:
            _, variables = model.init(0)
            return {path: variables[path] for path in model._caches}

        return CachedModel(model, fresh, modes[-1])

    def cached_values(self, bound: nnx.Module) -> Arrays:
        if not self._caches:
            return {}
        after = {_path(keys): v for keys, v in nnx.to_flat_state(nnx.state(bound, nnx.Cache))}
        return {path: value_of(after[path]) for path in self._caches}

    def naming(self, bound: nnx.Module) -> contextlib.AbstractContextManager[None]:
        paths: dict[int, str] = {}
        classes: list[type] = []
        for keys, node in nnx.iter_graph(bound):
            if isinstance(node, nnx.Module):
                paths[id(node)] = _path(keys)
                classes.append(type(node))
        return tagged(classes, lambda module: paths.get(id(module), ""))

    def protect(self, bound: nnx.Module) -> None:
        for _, node in nnx.iter_graph(bound):
            if isinstance(node, nnx.Param):
                hooks = node.get_metadata().get("on_set_value", ())
                hooks = hooks if isinstance(hooks, tuple) else (hooks,)
                node.set_metadata("on_set_value", (*hooks, _refuse_edit))

    def notes(self, compute_dtype: Any) -> list[str]:
        frozen = [p for p, mode in self._modes if STATISTICS in mode and self._frozen(p)]
        evaluating = [
            f"{path or 'the model'} ({name})"
            for path, mode in self._modes
            for name, value in mode.items()
            if value == EVALUATION[name] and path not in frozen and not self.trains_itself
        ]
        found = [*note_of(self.needs_values, self.leaves), *frozen_statistics_note(frozen)]
        if evaluating:
            found.append(
                "modules that the model's factory set to evaluation mode stay in it during "
                f"training: {listed(evaluating)}"
            )
        if compute_dtype is not None and self._norms:
            name = jnp.dtype(compute_dtype).name
            found.append(
                "nnx.BatchNorm has float32 statistics, and without a dtype promotes its output "
                f"(and all that follows) to float32 under {name}: pass it "
                f"dtype=jnp.{name} ({listed(self._norms)})"
            )
        return found

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return nested(
            {self._kinds[leaf.path][0]: flat.get(leaf.path, absent) for leaf in self.leaves}
        )


def _modes(module: nnx.Module) -> Iterator[tuple[str, nnx.Module, dict[str, Any]]]:
    """Yield (path, module, mode attributes) of each module with mode attributes."""
    for keys, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            mode = {name: getattr(node, name) for name in EVALUATION if hasattr(node, name)}
            if mode:
                yield _path(keys), node, mode


def _has_own(module: nnx.Module, mode: str) -> bool:
    """Whether a module's class has an `eval` or `train` of its own, to be called without arguments.

    Those of the modules inside are called by it or not at all: Flax's only set attributes.
    """
    own = getattr(type(module), mode)
    if own is getattr(nnx.Module, mode) or not inspect.isfunction(own):
        return False
    _, *rest = inspect.signature(own).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic for p in rest)


def _is_state(variable: Any, collections: Sequence[str] | None) -> bool:
    """Whether a variable is carried from step to step.

    That is, whether it is of these collections, by the names of their types; None for all but
    intermediate values.
    """
    if isinstance(variable, nnx.RngState):
        return False
    if collections is None or not isinstance(variable, nnx.Variable):
        return not isinstance(variable, nnx.Intermediate)
    names = _collections_of(variable)
    return any(name in names for name in collections)


def _collections_of(variable: nnx.Variable) -> set[str]:
    """Names of a variable's type and its base types."""
    kinds = [kind for kind in type(variable).__mro__ if issubclass(kind, nnx.Variable)]
    return {kind.__name__ for kind in kinds} | {
        name for name, kind in VariableTypeCache.items() if kind in kinds
    }


def _refuse_edit(variable: Any, value: Any) -> Any:
    raise ModelError(EDITED)


def _drop_sown(module: nnx.Module) -> None:
    """Remove what calls in the factory have sown, as `nnx.pop` does: growing tuples."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, nnx.Intermediate) and isinstance(value_of(value), tuple):
                    delattr(node, name)


def _path(keys: tuple[Any, ...]) -> str:
    return "/".join(map(str, keys))


def _all_paths(module: nnx.Module, leaves: Sequence[tuple[Any, ...]]) -> dict[str, tuple[str, ...]]:
    """All paths of each leaf by its first: it, or a module that it is in, may be there again."""
    again: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for first, *others in nnx.find_duplicates(module):
        at = tuple(map(str, first))
        also = [tuple(map(str, other)) for other in others]
        # A module's reference to one that holds it gives no path: it could be followed for ever.
        again[at] = [other for other in also if other[: len(at)] != at]

    def paths_of(leaf: tuple[str, ...]) -> tuple[str, ...]:
        found = {leaf: None}
        reached = [leaf]
        for path in reached:  # grows
            for end in range(len(path) + 1):
                for other in again.get(path[:end], ()):
                    there = (*other, *path[end:])
                    if there not in found and len(found) < _MOST_PATHS:
                        found[there] = None
                        reached.append(there)
        return _path(leaf), *sorted(_path(path) for path in found if path != leaf)

    return {_path(keys): paths_of(tuple(map(str, keys))) for keys in leaves}


def value_of(leaf: Any) -> Any:
    """Stored value of a Variable, without its hooks, or an array that a module stores itself."""
    if not isinstance(leaf, nnx.Variable):
        return leaf
    value = leaf.get_raw_value()
    return value[...] if is_array_ref(value) else value


def keep_arrays(module: nnx.Module) -> None:
    """Mark every array of a module as data, and check that all data are arrays of numbers.

    Flax detects arrays that modules store without a Variable by their type, and while shapes are
    traced they have another one (Flax 0.12.12), so that they would end up in the static part.
    """
    for keys, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            value = value_of(node)
            if isinstance(value, (bool, int, float)):
                node.set_raw_value(jnp.asarray(value))
            else:
                _check_array(_path(keys), value)
        elif isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, (nnx.Pytree, nnx.Variable)):
                    continue  # nodes of their own, which may refer to this one
                if _traced(value):
                    setattr(node, name, nnx.data(value))
                elif isinstance(value, np.ndarray):
                    _check_array(_path((*keys, name)), value)
                elif not any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
                    held = HeldArrays.of(value)
                    if held is not None:
                        setattr(node, name, nnx.data(held))


def _held(module: nnx.Module) -> Iterator[tuple[str, nnx.Module, str, HeldArrays]]:
    """Yield (path, module, attribute, its arrays) of the plain objects that hold arrays."""
    for keys, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module):
            for name, value in list(vars(node).items()):
                if isinstance(value, HeldArrays):
                    yield _path((*keys, name)), node, name, value


def _traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def _check_array(path: str, value: Any) -> None:
    if not is_array(value):
        kind = getattr(value, "dtype", type(value).__name__)
        raise ModelError(f"the model stores a {kind} at {path}; state must be arrays of numbers")


def dim_names(variable: Any) -> tuple[str | None, ...]:
    metadata = variable.get_metadata()
    names = next((metadata[key] for key in NAME_KEYS if metadata.get(key) is not None), ())
    names = getattr(names, "spec", names)
    return tuple(n if isinstance(n, str) else None for n in names)


@contextlib.contextmanager
def _quick_streams() -> Iterator[None]:
    """Random streams that count up without a search of the entire trace.

    flax 0.12 asks a counter under trace for its sharding, and JAX writes an error with the tracer's
    origin for the answer "none": the time to trace a factory was quadratic in its layers.
    """

    def draw(stream: Any) -> jax.Array:
        getattr(stream.count, "_check_can_update", lambda: None)()
        count = stream.count[...]
        stream.count.set_value(count + 1)
        return jax.random.fold_in(stream.key[...], count)

    with mock.patch.object(nnx.RngStream, "__call__", draw):
        yield
