"""A model with adapters, behind the protocol of models.

Its parameters are those of the model, of which few are trained, and the adapters'. What reads an
adapted weight is rewritten in the traced loss (`adapt_loss.py`): the model's code sees its weights.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxspeed.adapters.adapter import Adapter, leaves_with_adapters
from jaxspeed.adapters.choose_adapters import SavedAdapter
from jaxspeed.config.lora_section import Lora
from jaxspeed.placement.rows import Leaf
from jaxspeed.user_models.pretrained_model import Weights
from jaxspeed.user_models.protocol import SEED, Arrays, CachedModel, Model, nested

_START = 0x6C6F7261  # of the keys of adapters, far from the counts by which modules derive theirs


class AdaptedModel:
    """A model with adapters of some weights.

    Args:
      base: the model.
      leaves: its parameters, trained or not.
      adapters: by the paths of the weights.
      section: `lora` of the config, with the settings of a saved adapter.
      saved: an adapter whose values replace those of `init`.
    """

    def __init__(
        self,
        base: Model,
        leaves: Sequence[Leaf],
        adapters: Mapping[str, Adapter],
        section: Lora,
        saved: SavedAdapter | None = None,
    ) -> None:
        self.base, self.adapters, self.section, self.saved = base, adapters, section, saved
        self.leaves = leaves_with_adapters(leaves, adapters)
        self._own = frozenset(leaf.path for leaf in leaves)
        self._squares = frozenset(adapter.leaf("squares") for adapter in adapters.values())
        self._dtypes = {leaf.adapts: leaf.dtype for leaf in self.leaves if leaf.adapts}
        self.variables = dict(base.variables)
        if any(adapter.dropout for adapter in adapters.values()):
            key = jax.eval_shape(lambda: jax.random.key(0))
            self.variables.setdefault(SEED, jax.ShapeDtypeStruct((), key.dtype))

    @property
    def weights(self) -> Weights | None:
        return self.base.weights

    @property
    def needs_values(self) -> str | None:
        return self.base.needs_values

    def init(self, seed: jax.Array | int) -> tuple[Arrays, Arrays]:
        params, variables = self.base.init(seed)
        if SEED in self.variables:
            variables = {SEED: jax.random.key(seed), **variables}
        params = {**params, **self.drawn(seed)}
        return {**params, **self.magnitudes(params)}, variables

    def drawn(self, seed: jax.Array | int) -> Arrays:
        """First factors of the adapters."""
        key = jax.random.fold_in(jax.random.key(seed), _START)
        factors: Arrays = {}
        for path, adapter in self.adapters.items():
            factors |= adapter.initialized(key, self.section.init_lora_weights, self._dtypes[path])
        return factors

    def magnitudes(self, params: Mapping[str, Any]) -> Arrays:
        """First magnitudes of DoRA, of these weights and factors."""
        return {
            adapter.leaf("magnitude"): adapter.magnitude(params[path], params).astype(
                self._dtypes[path]
            )
            for path, adapter in self.adapters.items()
            if adapter.dora
        }

    def without_adapters(self) -> "AdaptedModel":
        """The base, as a model of the same parameters and variables."""
        base = copy.copy(self)
        base.adapters = {}
        return base

    def bind(self, params: Arrays, variables: Arrays, *, train: bool, step: Any, micro: Any) -> Any:
        base_params = {path: x for path, x in params.items() if path in self._own}
        known = self._without_seed(variables)
        return self.base.bind(base_params, known, train=train, step=step, micro=micro)

    def _without_seed(self, variables: Arrays) -> Arrays:
        """The variables of the model: those without the seed, if only adapters read it."""
        return {
            path: x
            for path, x in variables.items()
            if path not in self._squares
            and (path != SEED or path in self.base.variables or path not in self.variables)
        }

    def merged(self, params: Mapping[str, Any]) -> Arrays:
        """The model's own parameters, with the adapters added to their weights."""
        return {
            path: self.adapters[path].merged(x, params) if path in self.adapters else x
            for path, x in params.items()
            if path in self._own
        }

    def mutated(self, bound: Any, params: Arrays) -> Arrays:
        base_params = {path: x for path, x in params.items() if path in self._own}
        return self.base.mutated(bound, base_params)

    def after_step(self, variables: Arrays, step: Any) -> Arrays:
        return self.base.after_step(self._without_seed(variables), step)

    def cached(self, rows: int, length: int, params: Arrays, dtype: Any) -> CachedModel | None:
        base_params = {path: x for path, x in params.items() if path in self._own}
        cached = self.base.cached(rows, length, base_params, dtype)
        if cached is None:
            return None
        own_leaves = [leaf for leaf in self.leaves if leaf.path in self._own]
        model = AdaptedModel(cached.model, own_leaves, self.adapters, self.section)
        return cached._replace(model=model)

    def cached_values(self, bound: Any) -> Arrays:
        return self.base.cached_values(bound)

    def naming(self, bound: Any) -> contextlib.AbstractContextManager[None]:
        return self.base.naming(bound)

    def protect(self, bound: Any) -> None:
        self.base.protect(bound)

    def notes(self, compute_dtype: Any) -> Sequence[str]:
        return self.base.notes(compute_dtype)

    def native(self, flat: Mapping[str, Any], absent: Any) -> Any:
        """Nested by the paths: the adapters are in no tree of the model."""
        paths = (leaf.path for leaf in self.leaves)
        return nested({tuple(path.split("/")): flat.get(path, absent) for path in paths})
