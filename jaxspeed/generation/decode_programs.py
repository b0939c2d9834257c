"""Compiled programs of generation: of a sequence's start, of one more token, and of all tokens.

They run the traced loss in evaluation, so that parameters are gathered, transferred and sharded
as in a step. A cache is sharded over the data axes by sequences and over `tensor` by key heads.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import sample_axes
from jaxspeed.errors import ModelError
from jaxspeed.generation.sampling_rules import draw
from jaxspeed.objectives.model_logprobs import call_parameters
from jaxspeed.placement.batch_dims import sample_specs
from jaxspeed.placement.rules import model_sharding
from jaxspeed.traced_loss.loss import Outputs
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train.program import Program
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.train_state.state import Arrays
from jaxspeed.user_models.caching import cache_names
from jaxspeed.user_models.protocol import CachedModel

# What is drawn with: "keys" [rows, 2], of the seed, and the number of tokens "drawn" [rows] so far;
# for a repetition penalty the "text" [rows, length], filled up with NO_TOKEN.
Draws = Mapping[str, Any]
Rules = Mapping[str, Any]
NO_TOKEN = np.iinfo(np.int32).max


class ForwardPrograms:
    """The programs for batches of one number of sequences, and caches of one length.

    A batch has `tokens` [rows, seq], `positions` as they are, and in `at` [rows] the place of the
    token whose successor is drawn. For an encoder it has `inputs` and their `mask` [rows, in_seq],
    but none for `decode`: what is read of them is in the caches.
    """

    def __init__(self, once: GatherOnce, cached: CachedModel | None) -> None:
        self._once, self._program, self.cached = once, once.program, cached
        traced_loss = self._program.traced_loss
        model = traced_loss.model if cached is None else cached.model
        table = replace(once.table, stack=None)  # no stages run here
        sequence = replace(traced_loss.sequence, shards=False)
        self._traced_loss = replace(
            traced_loss, table=table, loss_fn=_logits, model=model, sequence=sequence
        )
        # Each waits until the program is compiled.
        self._decode_compiled: Callable[[], Any] = lambda: None
        self._fresh_compiled: Callable[[], Any] = lambda: None

    @functools.cached_property
    def recompute(self) -> Any:
        """`recompute(state, batch, draws, rules)`: the next tokens [rows], without a cache."""

        def recompute(state: ModelState, batch: Any, draws: Draws, rules: Rules) -> jax.Array:
            return self._next(state, {}, batch, draws, rules)[0]

        return self._jit(recompute, (None, self._rows, self._rows, None), self._replicated)

    @functools.cached_property
    def prefill(self) -> Any:
        """`prefill(state, batch, draws, rules)`: (the next tokens, caches of all before)."""

        def prefill(
            state: ModelState, batch: Any, draws: Draws, rules: Rules
        ) -> tuple[jax.Array, Arrays]:
            assert self.cached is not None
            return self._next(state, self.cached.fresh(), batch, draws, rules)

        in_shardings = (None, self._rows, self._rows, None)
        return self._jit(prefill, in_shardings, (self._replicated, self._caches))

    def decode(self, *args: Any) -> tuple[jax.Array, Arrays]:
        """`decode(state, caches, batch, draws, rules)`: (the next tokens, the caches after it).

        Donates the caches.
        """
        self._decode_compiled()
        outputs: tuple[jax.Array, Arrays] = self._decode(*args)
        return outputs

    @functools.cached_property
    def _decode(self) -> Any:
        def decode(
            state: ModelState, caches: Arrays, batch: Any, draws: Draws, rules: Rules
        ) -> tuple[jax.Array, Arrays]:
            return self._next(state, caches, batch, draws, rules)

        in_shardings = (None, self._caches, self._rows, self._rows, None)
        return self._jit(decode, in_shardings, (self._replicated, self._caches), donate_argnums=1)

    def check(self, rows: int, rules: Rules) -> None:
        """Raise ModelError if the model cannot be called with its caches.

        `decode` compiles from now on, in the background, for a request with these rules.
        """
        assert self.cached is not None
        tokens = np.zeros((rows, 1), np.int32)
        batch = {"tokens": tokens, "positions": tokens, "at": np.zeros(rows, np.int32)}
        keys = np.zeros((rows, *jax.random.key_data(jax.random.key(0)).shape), np.uint32)
        draws = {"keys": keys, "drawn": np.zeros(rows, np.int32)}
        fresh = jax.eval_shape(self.cached.fresh)
        caches = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._caches[path])
            for path, x in fresh.items()
        }
        batch, draws = rows_for_jit(self._program, batch, draws)
        arguments = (self._once.shapes, caches, batch, draws, rules)
        self._decode_compiled = compile_ahead(self._program.mesh, self._decode, *arguments)

    def fresh(self) -> Arrays:
        """Empty caches."""
        self._fresh_compiled()
        caches: Arrays = self._fresh()
        return caches

    def compile_fresh(self) -> None:
        """Start to compile `fresh` in the background."""
        self._fresh_compiled = compile_ahead(self._program.mesh, self._fresh)

    @functools.cached_property
    def _fresh(self) -> Any:
        assert self.cached is not None
        return self._jit(self.cached.fresh, (), self._caches)

    def _jit(self, function: Any, in_shardings: Any, shardings: Any, **options: Any) -> Any:
        at = {"in_shardings": in_shardings, "out_shardings": shardings}
        return self._program.jit(function, **at, **options)

    @property
    def _rows(self) -> NamedSharding:
        """The sharding of arrays with one row for each sequence."""
        return NamedSharding(self._program.mesh, PartitionSpec(sample_axes()))

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._program.mesh, PartitionSpec())

    @functools.cached_property
    def _caches(self) -> dict[str, NamedSharding]:
        """The shardings of the caches."""
        assert self.cached is not None
        mesh = self._program.mesh
        places = {}
        for path, shape in jax.eval_shape(self.cached.fresh).items():
            names = cache_names(path, len(shape.shape))
            spec = [*model_sharding(shape.shape, names, mesh.shape).spec]
            if "batch" in names:
                spec[names.index("batch")] = sample_axes()
            places[path] = NamedSharding(mesh, PartitionSpec(*spec))
        return places

    def _next(
        self, state: ModelState, caches: Arrays, batch: Any, draws: Draws, rules: Rules
    ) -> tuple[jax.Array, Arrays]:
        variables = {**state.variables, **caches}
        loss, written = self._traced_loss(state.sources, variables, batch, state.step, 0, False)
        logits = loss.metrics["logits"].value
        keys = jax.random.wrap_key_data(draws["keys"])
        for numbers in (jnp.arange(len(logits)), draws["drawn"]):
            keys = jax.vmap(jax.random.fold_in)(keys, numbers)
        seen = None
        if "text" in draws:
            rows = jnp.arange(len(logits))[:, None]
            seen = jnp.zeros(logits.shape, bool).at[rows, draws["text"]].set(True, mode="drop")
        tokens = draw(logits, rules, keys, seen)
        return tokens, {path: written.get(path, caches[path]) for path in caches}


def rows_for_jit(program: Program, *rows: Any) -> Any:
    """NumPy arrays of rows, placed on the devices of several processes: jit takes those of one."""
    if jax.process_count() == 1:
        return rows
    at = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), sample_specs(rows))
    return jax.device_put(rows, at)


def _logits(model: Any, batch: Any) -> Outputs:
    """The logits [rows, vocab] after the token of each sequence that `at` names."""
    accepted = call_parameters(model)
    names = {*batch} & {"at", "positions", "inputs", "mask"} & {*accepted}
    arguments: dict[str, Any] = {name: batch[name] for name in sorted(names)}
    if "decode" in accepted and batch["tokens"].shape[1] == 1:
        arguments["decode"] = True
    logits = model(batch["tokens"], **arguments)
    logits = logits[0] if isinstance(logits, tuple) else logits
    if getattr(logits, "ndim", 0) != 3 or logits.shape[:1] != batch["tokens"].shape[:1]:
        raise ModelError(
            f"generation calls model(tokens), which returned {np.shape(logits)}: a language model "
            "returns logits [batch, seq, vocab]"
        )
    if "at" in accepted:
        row = logits[:, 0]
    else:
        row = jnp.take_along_axis(logits, batch["at"][:, None, None], axis=1)[:, 0]
    return Outputs({"logits": row.astype(jnp.promote_types(row.dtype, jnp.float32))})
