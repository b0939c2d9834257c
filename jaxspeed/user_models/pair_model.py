"""Adapter of a pair of pure functions (init, apply) to the Model protocol.

`init(key)` or `init(key, batch)` returns a tree of parameters; `apply(params, ...)` is what the
loss function calls as `model(...)`. If `apply` has a parameter `rng` (or `key`), it gets this
micro-batch's key; if it has `train` (or `deterministic`, ...), its mode. Units are marked
with `jaxspeed.unit`.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.batches import RNG_ARGUMENTS, with_extra
from jaxspeed.user_models.example_batch import ExampleBatch
from jaxspeed.user_models.init_for_real import init_values, note_of, shapes_of
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.protocol import (
    SEED,
    Arrays,
    CachedModel,
    is_array,
    is_inexact,
    mode_arguments,
)
from jaxspeed.user_models.rng import micro_batch_key
from jaxspeed.user_models.trainable import TrainRule
from jaxspeed.user_models.user_code import foreign


class PairModel:
    """A pair as a Model; leaves that are not floating-point (index tables) are not trained."""

    weights: Weights | None = None

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        example_batch: Any,
        trainable: TrainRule,
        full_precision: Callable[[Sequence[str]], bool],
    ) -> None:
        self._init, self._apply = init, apply
        self._example: ExampleBatch | None = None
        needed = [p for p in inspect.signature(init).parameters.values() if p.default is p.empty]
        if len(needed) > 1:
            if example_batch is None:
                raise ModelError("init takes a batch: pass initialize(..., example_batch=...)")
            self._example = ExampleBatch(example_batch)
        abstract, self.needs_values = shapes_of(self._create, jax.random.key(0))
        if self._example and self.needs_values:
            self._example.keep_all()
        elif self._example:
            self._example.trace(self._created)
        self._tree = jax.tree.structure(abstract)
        flat = flat_with_paths(abstract)
        self._paths = list(flat)
        if len(flat) != len(jax.tree.leaves(abstract)):
            raise ModelError('init returned two leaves with one path; a name may not contain "/"')
        self.leaves = trainable.over(
            Leaf(path, tuple(x.shape), x.dtype, (), trainable((path,), x), full_precision((path,)))
            for path, x in flat.items()
            if is_inexact(x)
        )
        rest = {path: x for path, x in flat.items() if not is_inexact(x)}
        key = jax.eval_shape(lambda: jax.random.key(0))
        self.variables = {**rest, SEED: jax.ShapeDtypeStruct((), key.dtype)}
        self._parameters = inspect.signature(apply).parameters

    def _create(self, key: jax.Array) -> Any:
        return self._created(key, self._example.arrays() if self._example else None)

    def _created(self, key: jax.Array, batch: Any) -> Any:
        call = "init(key, batch)" if self._example else "init(key)"
        with foreign(call, self._example.shapes if self._example else None):
            params = self._init(key, with_extra({}, batch)[1]) if self._example else self._init(key)
        bad = {path: x for path, x in flat_with_paths(params).items() if not is_array(x)}
        if bad:
            path, value = next(iter(bad.items()))
            kind = getattr(value, "dtype", type(value).__name__)
            raise ModelError(
                f"init returned a {kind} at {path or 'its root'}; parameters are NumPy or JAX "
                "arrays of numbers, in a tree"
            )
        return params

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        key = jax.random.key(seed)
        params = init_values(self.needs_values, lambda s: self._create(jax.random.key(s)), seed)
        values = flat_with_paths(params) | {SEED: key}
        paths = [leaf.path for leaf in self.leaves]
        return {p: values[p] for p in paths}, {p: values[p] for p in self.variables}

    def bind(
        self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any
    ) -> "BoundPair":
        values = {**params, **variables}
        tree = jax.tree.unflatten(self._tree, [values[path] for path in self._paths])
        keywords: dict[str, Any] = dict(mode_arguments(self._parameters, train))
        key = next((w for w in RNG_ARGUMENTS if w in self._parameters), None)
        if key is not None:
            keywords[key] = micro_batch_key(variables[SEED], step, micro)
        return BoundPair(self._apply, tree, keywords, train)

    def mutated(self, bound: "BoundPair", params: Arrays) -> Arrays:
        return {}

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        return {}  # a pure function has no method

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> CachedModel | None:
        return None  # a pure function keeps nothing between its calls

    def cached_values(self, bound: "BoundPair") -> Arrays:
        return {}

    def naming(self, bound: "BoundPair") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def protect(self, bound: "BoundPair") -> None:
        """Leave the user's own containers as they are."""

    def notes(self, compute_dtype: Any) -> list[str]:
        return note_of(self.needs_values, self.leaves)

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return jax.tree.unflatten(self._tree, [flat.get(path, absent) for path in self._paths])


class BoundPair:
    """`apply` with its parameters: called as `model(...)`."""

    def __init__(
        self, apply: Callable[..., Any], params: Any, keywords: dict[str, Any], training: bool
    ) -> None:
        self.params, self.training = params, training
        self._apply, self._given = apply, keywords

    @property
    def calls(self) -> Callable[..., Any]:
        return self._apply

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self.params, *args, **{**self._given, **kwargs})
