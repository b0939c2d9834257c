"""A Flax Linen module as a Model.

Its variables are known once its loss has been traced on an example batch, with the module creating
them at its first call.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from jaxspeed.errors import ModelError
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.units.tags import scope
from jaxspeed.train.foreign import foreign
from jaxspeed.train.model.face import (
    SEED,
    Arrays,
    Trainable,
    example_shapes,
    is_floating,
    mode_arguments,
    nested,
)
from jaxspeed.train.rng import linen_rngs, micro_batch_key


class LinenModel:
    """Collections are kept as paths `collection/...`; those of `params` without the collection."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example_batch: Any,
        trainable: Trainable,
        full_precision: Callable[[str], bool],
    ) -> None:
        self._module, self._loss_fn = module, loss_fn
        self._example = example_shapes(example_batch)
        boxed = jax.eval_shape(self._create, jax.random.key(0))
        names = _boxed_names(boxed)
        flat = _flatten(meta.unbox(boxed))
        self._keys = {_path(keys): keys for keys in flat}
        found = {_path(keys): leaf for keys, leaf in flat.items()}
        own = [p for p, k in self._keys.items() if k[0] == "params" and is_floating(found[p])]
        self.leaves = tuple(
            Leaf(
                path,
                tuple(found[path].shape),
                found[path].dtype,
                names.get(path, ()),
                trainable(path, found[path]),
                full_precision(path),
            )
            for path in own
        )
        rest = {p: found[p] for p in found if p not in set(own)}
        key = jax.eval_shape(lambda: jax.random.key(0))
        self.variables = {**rest, SEED: jax.ShapeDtypeStruct((), key.dtype)}

    def _create(self, key: jax.Array) -> Any:
        bound = _Creating(self._module, key)
        zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), self._example)
        with foreign("loss_fn(model, example_batch)", self._example):
            self._loss_fn(bound, zeros)
        if bound.variables is None:
            raise ModelError("loss_fn never called the model: model(...) makes its parameters")
        return bound.variables

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        key = jax.random.key(seed)
        flat = _flatten(meta.unbox(self._create(key)))
        values = {_path(keys): leaf for keys, leaf in flat.items()} | {SEED: key}
        own = [leaf.path for leaf in self.leaves]
        return {p: values[p] for p in own}, {p: values[p] for p in self.variables}

    def bind(
        self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any
    ) -> "BoundLinen":
        values = {**params, **{p: v for p, v in variables.items() if p != SEED}}
        tree = nested({self._keys[path]: value for path, value in values.items()})
        key = micro_batch_key(variables[SEED], step, micro)
        return BoundLinen(self._module, tree, linen_rngs(key), train)

    def mutated(self, bound: "BoundLinen") -> Arrays:
        after = {_path(keys): leaf for keys, leaf in _flatten(bound.variables).items()}
        return {path: after[path] for path in self.variables if path in after}

    def naming(self, bound: "BoundLinen") -> contextlib.AbstractContextManager[None]:
        return _naming()

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return nested(
            {self._keys[leaf.path][1:]: flat.get(leaf.path, absent) for leaf in self.leaves}
        )


class BoundLinen:
    """A Linen module with its variables, called as the module is; it keeps what a call changes."""

    def __init__(
        self, module: nn.Module, variables: Any, rngs: dict[str, jax.Array], training: bool
    ) -> None:
        self.module, self.variables, self.training = module, variables, training
        self._rngs = rngs

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        kwargs = {**_mode(self.module, method, self.training), **kwargs}
        mutable = [c for c in self.variables if c != "params"] if self.training else False
        rngs = self._rngs if self.training else None
        result = self.module.apply(
            self.variables, *args, rngs=rngs, mutable=mutable, method=method, **kwargs
        )
        if mutable is False:
            return result
        out, changed = result
        self.variables = {**self.variables, **changed}
        return out


class _Creating:
    """Stands for the module while its variables are made: the first call creates them."""

    training = False

    def __init__(self, module: nn.Module, key: jax.Array) -> None:
        self.module, self._key = module, key
        self.variables: Any = None

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        kwargs = {**_mode(self.module, method, False), **kwargs}
        if self.variables is None:
            out, self.variables = self.module.init_with_output(
                self._key, *args, method=method, **kwargs
            )
            return out
        plain = meta.unbox(self.variables)
        return self.module.apply(plain, *args, method=method, mutable=False, **kwargs)


def _mode(module: nn.Module, method: Any, training: bool) -> dict[str, bool]:
    called = getattr(module, method) if isinstance(method, str) else method or type(module).__call__
    return mode_arguments(inspect.signature(called).parameters, training)


@contextlib.contextmanager
def _naming() -> Iterator[None]:
    def name(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        with scope(type(context.module).__name__, "/".join(context.module.path)):
            return next_fun(*args, **kwargs)

    with nn.intercept_methods(name):
        yield


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in keys): leaf for keys, leaf in pairs}


def _path(keys: tuple[str, ...]) -> str:
    return "/".join(keys[1:] if keys[0] == "params" else keys)


def _boxed_names(tree: Any) -> dict[str, tuple[str | None, ...]]:
    def is_box(x: Any) -> bool:
        return isinstance(x, meta.AxisMetadata)

    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return {
        _path(tuple(key.key for key in keys)): tuple(getattr(box, "names", ()))
        for keys, box in pairs
        if is_box(box)
    }
