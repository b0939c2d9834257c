"""Adapter of a Flax Linen module to the Model protocol.

Its variables are found by tracing the loss, or `init_with`, on an example batch, where the calls of
the module create them: in evaluation mode, and then in training mode, which may create more.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import freeze, meta
from flax.core.scope import DenyList

from jaxspeed.errors import ModelError
from jaxspeed.placement.paths import flat_with_paths, path_of
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.batches import call_loss, with_extra, zeros_of
from jaxspeed.user_models.caching import decode_argument, in_decoding, shapes
from jaxspeed.user_models.example_batch import ExampleBatch
from jaxspeed.user_models.linen_calls import (
    BoundLinen,
    CreatingLinen,
    ModuleCalls,
    in_evaluation,
    is_leaked,
    recorded_calls,
    traced_calls,
)
from jaxspeed.user_models.own_axes import with_own_axes
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.protocol import (
    AFTER_MICRO_BATCHES,
    SEED,
    Arrays,
    CachedModel,
    changed_after_step,
    check_collections,
    frozen_part,
    frozen_statistics_note,
    has_after_step,
    is_inexact,
    nested,
)
from jaxspeed.user_models.rng import FALLBACK, LINEN_STREAMS, linen_rngs, micro_batch_key
from jaxspeed.user_models.trainable import TrainRule
from jaxspeed.user_models.user_code import foreign


class LinenModel:
    """A Linen module as a Model: paths are `collection/...`, without `params/` for parameters."""

    weights: Weights | None = None
    _caches: frozenset[str] = frozenset()  # collections that are written in evaluation
    needs_values = None  # Flax traces initializers in each call too, so that none can need values

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example_batch: Any,
        trainable: TrainRule,
        full_precision: Callable[[Sequence[str]], bool],
        state_collections: Sequence[str] | None = None,
        init_with: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._module, self._init_with = module, init_with or loss_fn
        self._init_name = "init_with" if init_with else "loss_fn"
        self._example = ExampleBatch(example_batch)
        self._state_collections = state_collections
        self._seen = ModuleCalls(set(), set())
        boxed, collections = self._traced()
        check_collections(state_collections, (name for name in collections if name != "params"))
        names = _boxed_names(boxed)
        tree = meta.unbox(boxed)
        self._refuse_growing(tree)
        self._tree, values = jax.tree.structure(tree), _flat(tree)
        self._paths = list(values)
        params = _flat({"params": tree.get("params", {})})
        self.leaves = trainable.over(
            Leaf(
                path,
                tuple(leaf.shape),
                leaf.dtype,
                names.get(path, ()),
                trainable((path,), leaf),
                full_precision((path,)),
            )
            for path, leaf in params.items()
            if is_inexact(leaf)
        )
        self._frozen = frozen_part(self.leaves)
        parameters = {leaf.path for leaf in self.leaves}
        key = jax.eval_shape(lambda: jax.random.key(0))
        rest = {path: leaf for path, leaf in values.items() if path not in parameters}
        self.variables = {**rest, SEED: jax.ShapeDtypeStruct((), key.dtype)}

    def _traced(self) -> tuple[Any, set[str]]:
        """(shapes of the variables, with their metadata; names of all collections)."""
        collections: set[str] = set()
        while True:  # a stream that the module asks for may create more
            known, self._creates_in_training = set(self._seen.streams), True
            boxed = self._example.trace(lambda key, batch: self._create(key, batch, collections))
            if self._seen.streams <= {*known, *LINEN_STREAMS}:
                return boxed, collections

    def _without_fresh(self, variables: Any) -> Any:
        """Remove values that each call sows anew, unless the config lists them as state."""
        said = self._state_collections or ()

        def kept(tree: Any, place: tuple[str, ...]) -> Any:
            if not isinstance(tree, Mapping):
                return tree
            inside = {name: kept(x, (*place, name)) for name, x in tree.items()}
            return {
                name: x
                for name, x in inside.items()
                if (*place, name) not in self._seen.sown and not (isinstance(x, dict) and not x)
            }

        collections = {
            name: x if name in said else kept(x, (name,)) for name, x in variables.items()
        }
        return {name: x for name, x in collections.items() if jax.tree.leaves(x)}

    def _refuse_growing(self, variables: Any) -> None:
        for place in sorted(self._seen.sown):
            value = functools.reduce(lambda tree, name: (tree or {}).get(name), place, variables)
            if isinstance(value, tuple):
                raise ModelError(
                    f"parallel.state_collections names {place[0]!r}, into which the model sows "
                    f"{'/'.join(place[1:])} without a reduce_fn: a tuple that grows with each call "
                    "cannot be carried from step to step; sow it with reduce_fn and init_fn"
                )

    def _is_state(self, path: str) -> bool:
        """Whether a variable is carried from step to step."""
        if self._state_collections is None:
            return path != SEED
        return path.split("/")[0] in self._state_collections

    def _create(self, key: jax.Array, batch: Any, collections: set[str] | None = None) -> Any:
        """The variables, in their boxes if `collections` is given, to which all names are added."""
        variables, batch = with_extra({SEED: key}, batch)
        streams = {**linen_rngs(key, sorted(self._seen.streams)), FALLBACK: key}

        def called(train: bool, rngs: Mapping[str, jax.Array], created: Any) -> Any:
            bound = CreatingLinen(self._module, rngs, created, train)
            call = f"{self._init_name}(model, example_batch)"
            with recorded_calls(self._seen), foreign(call, self._example.shapes):
                call_loss(self._init_with, bound, batch, variables, 0, 0, train=train)
            if not bound.created:
                raise ModelError("loss_fn never called the model: model(...) makes its parameters")
            if collections is not None:
                collections.update(bound.created)
            kept = self._without_fresh(bound.created)
            if any(is_leaked(x, key) for x in jax.tree.leaves(kept)):
                raise ModelError(
                    f"{self._init_name} makes the model's first call inside a function that is "
                    "traced by itself (jax.checkpoint, jax.jit, jax.lax.scan), where parameters "
                    "cannot be created; pass initialize(..., init_with=lambda model, batch: "
                    "model(...))"
                )
            return kept

        def created(key: jax.Array) -> Any:
            initial = called(False, {FALLBACK: key}, {})
            if self._creates_in_training:
                before: Any = jax.tree.structure(initial)
                initial = called(True, streams, initial)
                self._creates_in_training = jax.tree.structure(initial) != before
            return initial if collections is not None else meta.unbox(initial)

        return with_own_axes(created)(key)[0]

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        key = jax.random.key(seed)
        values = _flat(self._create(key, self._example.arrays())) | {SEED: key}
        paths = [leaf.path for leaf in self.leaves]
        return {p: values[p] for p in paths}, {p: values[p] for p in self.variables}

    def bind(
        self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any
    ) -> BoundLinen:
        values = {**params, **variables}
        tree = jax.tree.unflatten(self._tree, [values[path] for path in self._paths])
        rngs = linen_rngs(micro_batch_key(variables[SEED], step, micro), sorted(self._seen.streams))
        if not train:
            # Every stream falls back to this one. Others are absent, so that a model whose dropout
            # is on where it has its stream (`self.has_rng("dropout")`) evaluates without it.
            rngs = {FALLBACK: rngs[FALLBACK]}
        sown = {place[0] for place in self._seen.sown}
        constant = {"params"} if train else {*tree} - sown - self._caches
        module = self._module if train else in_evaluation(self._module)
        return BoundLinen(module, tree, rngs, train, self._frozen, DenyList(tuple(constant)))

    def mutated(self, bound: BoundLinen, params: Arrays) -> Arrays:
        after = _flat(bound.variables)
        self._refuse_new(after, bound.seen.sown)
        state = [path for path in self.variables if self._is_state(path)]
        return {path: after[path] for path in state if path in after}

    def _refuse_new(self, after: Arrays, sown: set[tuple[str, ...]]) -> None:
        """Raise ModelError for state that a step creates: each step would create it anew."""
        fresh = tuple("/".join(place) for place in {*sown, *self._seen.sown})
        for path in after:
            known = path in self.variables or path in self._paths or not self._is_state(path)
            if not known and not any(path == x or path.startswith(f"{x}/") for x in fresh):
                raise ModelError(
                    f"the loss creates the variable {path} in each training step, as "
                    f"{self._init_name} does not: its value would be lost; let "
                    "initialize(..., init_with=lambda model, batch: ...) make that call too"
                )

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        if not has_after_step(self._module):
            return {}

        def bind(params: Arrays) -> BoundLinen:
            key = AFTER_MICRO_BATCHES
            return self.bind(params, variables, train=True, step=step, micro=key)

        return changed_after_step(self, bind, variables)

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> CachedModel | None:
        module = in_decoding(self._module)
        if module is None:
            return None
        empty = copy.copy(self)
        empty._module, empty._caches = module, frozenset({"cache"})

        def fresh(params: Arrays, variables: Arrays) -> Arrays:
            """Flax creates the collection in a call with sequences of full length."""
            bound = empty.bind(params, variables, train=False, step=0, micro=0)
            with foreign("the model, called with tokens in its mode decode,"):
                bound(jnp.zeros((rows, length), jnp.int32), **decode_argument(module))
            return _flat({"cache": bound.variables.get("cache", {})})

        arguments = params, shapes(dict(self.variables))
        caches = jax.eval_shape(fresh, *arguments)
        if not caches:
            return None
        tree = jax.tree.unflatten(self._tree, list(self._paths))
        model = copy.copy(empty)
        tree["cache"] = nested({tuple(path.split("/")): path for path in caches})["cache"]
        model._tree, model._paths = jax.tree.structure(tree), jax.tree.leaves(tree)
        model.variables = {**self.variables, **caches}
        return CachedModel(model, lambda: fresh(*map(zeros_of, arguments)), True)

    def cached_values(self, bound: BoundLinen) -> Arrays:
        flat = _flat({name: x for name, x in bound.variables.items() if name in self._caches})
        return {path: flat[path] for path in self.variables if path in flat}

    def naming(self, bound: BoundLinen) -> contextlib.AbstractContextManager[None]:
        return traced_calls(bound.seen)

    def protect(self, bound: BoundLinen) -> None:
        bound.variables = freeze(bound.variables)

    def notes(self, compute_dtype: Any) -> list[str]:
        statistics = [path.split("/") for path in self.variables if path.startswith("batch_stats/")]
        modules = dict.fromkeys("/".join(path[1:-1]) for path in statistics)
        return frozen_statistics_note([path for path in modules if self._frozen(path)])

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        return nested(
            {tuple(leaf.path.split("/")): flat.get(leaf.path, absent) for leaf in self.leaves}
        )


def _flat(variables: Any) -> dict[str, Any]:
    """Flatten variables {collection: tree} to {path: array}."""
    pairs = flat_with_paths(variables).items()
    return {path.removeprefix("params/"): leaf for path, leaf in pairs}


def _boxed_names(tree: Any) -> dict[str, tuple[str | None, ...]]:
    def is_box(x: Any) -> bool:
        return isinstance(x, meta.AxisMetadata)

    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    return {
        path_of(keys).removeprefix("params/"): tuple(getattr(box, "names", ()))
        for keys, box in pairs
        if is_box(box)
    }
