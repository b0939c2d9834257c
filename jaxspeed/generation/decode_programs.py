"""Compiled programs of generation: of sequences' starts, and of many more tokens in one loop.

They run the traced loss in evaluation, so that parameters are gathered, transferred and sharded
as in a step. A cache is sharded over the data axes by sequences and over `tensor` by key heads.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import sample_axes
from jaxspeed.errors import ModelError
from jaxspeed.generation.sampling_rules import Drawn, draw
from jaxspeed.objectives.model_logprobs import ROUTING, call_parameters
from jaxspeed.placement.batch_dims import sample_specs
from jaxspeed.placement.rules import model_sharding
from jaxspeed.placement.xla_options import without_ynnpack
from jaxspeed.traced_loss.loss import Outputs
from jaxspeed.train.gather_once import GatherOnce, ModelState
from jaxspeed.train.program import Program
from jaxspeed.train_state.staged_init import compile_ahead
from jaxspeed.train_state.state import Arrays
from jaxspeed.user_models.caching import cache_names
from jaxspeed.user_models.protocol import CachedModel

SEGMENT = 32  # tokens of each sequence that a call of `decode` draws at most
NO_TOKEN = np.iinfo(np.int32).max
UNDRAWN = -1  # in place of a token, where a sequence draws none


class DecodeRows(NamedTuple):
    """What `decode` reads and updates of each sequence.

    A row with a known next token reads it; the others draw one.

    Attributes:
      text: int [rows, width], what the model sees of it, from the start of its context on.
      length: int [rows], of what is known of the text.
      place: int [rows], in the text, of the token that is read next.
      left: int [rows], tokens that are drawn at most; 0 after an end.
      drawn: int [rows], tokens drawn so far.
      folds: int [rows, n]: its draws are of the seed's key after `fold_in` of each of these, and
        of the number of tokens drawn.
      seen: int [rows, width], all of its tokens, filled up with NO_TOKEN, for a repetition penalty.
      prompt: int [rows], where what is drawn begins in `seen`.
    """

    text: Any
    length: Any
    place: Any
    left: Any
    drawn: Any
    folds: Any
    seen: Any = None
    prompt: Any = None


class Draws(NamedTuple):
    """How all rows draw.

    Attributes:
      key: the data of the seed's random key.
      ends: int [n], the tokens after which a row draws no more; filled up with UNDRAWN.
      rules: of `Sampling.rules`.
    """

    key: Any
    ends: Any
    rules: Mapping[str, Any]


class Decoded(NamedTuple):
    """What `decode` returns.

    Attributes:
      drawn: of [rows, segment].
      reads: the number of tokens that were read of each row.
      routing: [rows, segment, routers, k], the choices of a mixture's routers for these.
    """

    caches: Any
    rows: Any
    drawn: Any
    reads: Any
    routing: Any


class ForwardPrograms:
    """The programs for batches of one number of sequences, and caches of one length.

    A start has `tokens` [rows, seq] and `positions` as they are; for an encoder it has `inputs`
    and their `mask` [rows, in_seq], but none for `decode`: what is read of them is in the caches.

    Args:
      rows_of: the dim of sequences of each array of the caches, where it has one.
      segment: tokens of a row that a call of `decode` draws at most.
      records: whether the choices of a mixture's routers are returned.
    """

    def __init__(
        self,
        once: GatherOnce,
        cached: CachedModel | None,
        rows_of: Mapping[str, int | None],
        segment: int = SEGMENT,
        records: bool = False,
    ) -> None:
        self._once, self._program, self.cached = once, once.program, cached
        traced_loss = self._program.traced_loss
        model = traced_loss.model if cached is None else cached.model
        table = replace(once.table, stack=None)  # no stages run here
        sequence = replace(traced_loss.sequence, shards=False)
        self._traced_loss = replace(
            traced_loss,
            table=table,
            loss_fn=_logits,
            model=model,
            sequence=sequence,
            records_routing=records,
        )
        self._rows_of, self.segment = rows_of, segment
        # Each waits until the program is compiled.
        self._decode_compiled: Callable[[], Any] = lambda: None
        self._fresh_compiled: Callable[[], Any] = lambda: None

    @property
    def loops(self) -> bool:
        """Whether one call of `decode` draws many tokens.

        XLA moves what does not change out of a loop: in one whose units gather their parameters,
        all of them would be live together.
        """
        return not any(row.gathered for row in self._once.table)

    @functools.cached_property
    def prefill(self) -> Any:
        """`prefill(state, batch)`: (caches of all tokens of the starts, the choices of routers)."""

        def prefill(state: ModelState, batch: Any) -> tuple[Arrays, jax.Array | None]:
            assert self.cached is not None
            return self._call(state, self.cached.fresh(), batch)[1:]

        return self._jit(prefill, (None, self._rows), (self._caches, self._replicated))

    @functools.cached_property
    def insert(self) -> Any:
        """`insert(caches, others, sources)`: caches with rows of other ones; donates the first.

        `sources` [rows] has the row, among those of the same data rank, that takes a row's place;
        where it is negative the row stays.
        """
        ranks = self._program.ranks

        def insert(caches: Arrays, others: Arrays, sources: jax.Array) -> Arrays:
            sources = sources.reshape(ranks, -1)
            size = sources.shape[1]

            def inserted(x: jax.Array, other: jax.Array, dim: int) -> jax.Array:
                shape = x.shape
                x, other = (
                    a.reshape(*shape[:dim], ranks, size, *shape[dim + 1 :]) for a in (x, other)
                )
                take = jax.vmap(
                    functools.partial(lax.dynamic_index_in_dim, axis=dim), (dim, 0), dim
                )

                def with_row(row: Any, x: jax.Array) -> jax.Array:
                    source = lax.dynamic_index_in_dim(sources, row, 1, keepdims=False)
                    before = lax.dynamic_slice_in_dim(x, row, 1, dim + 1)
                    stays = (source < 0).reshape(-1, *[1] * (x.ndim - dim - 1))
                    after = jnp.where(stays, before, take(other, jnp.maximum(source, 0)))
                    return lax.dynamic_update_slice_in_dim(x, after, row, dim + 1)

                # Row by row, so that XLA writes in place and copies no array.
                return lax.fori_loop(0, size, with_row, x).reshape(shape)

            dims = self._rows_of
            return {
                path: x if (dim := dims[path]) is None else inserted(x, others[path], dim)
                for path, x in caches.items()
            }

        in_shardings = (self._caches, self._caches, self._rows)
        return self._jit(insert, in_shardings, self._caches, donate_argnums=0)

    def decode(self, *args: Any) -> "Decoded":
        """`decode(state, caches, rows, steps, draws)`: up to `steps` more tokens of each row.

        Without `loops` it is one. Donates the caches.
        """
        self._decode_compiled()
        outputs: Decoded = self._decode(*args)
        return outputs

    @functools.cached_property
    def _decode(self) -> Any:
        def decode(
            state: ModelState, caches: Arrays, rows: DecodeRows, steps: Any, draws: Draws
        ) -> Any:
            keys = jax.random.wrap_key_data(
                jnp.broadcast_to(draws.key, (len(rows.place), *draws.key.shape))
            )
            for fold in rows.folds.T:
                keys = jax.vmap(jax.random.fold_in)(keys, fold)
            if not self.loops:
                caches, rows, *results = self._next(state, caches, rows, draws, keys)
                drawn, routing = jax.tree.map(lambda x: x[:, None], results)
                return Decoded(caches, rows, drawn, jnp.ones((), int), routing)

            def goes_on(carry: Any) -> jax.Array:
                count, _, rows, _ = carry
                return (count < steps) & jnp.any(rows.left > 0)

            def body(carry: Any) -> Any:
                count, caches, rows, all_results = carry
                caches, rows, *results = self._next(state, caches, rows, draws, keys)
                all_results = jax.tree.map(
                    lambda all_x, x: lax.dynamic_update_slice_in_dim(all_x, x[:, None], count, 1),
                    all_results,
                    results,
                )
                return count + 1, caches, rows, all_results

            shape = len(rows.place), self.segment
            zeros = jnp.zeros(shape, jnp.float32)
            undrawn = Drawn(jnp.full(shape, UNDRAWN, jnp.int32), zeros, zeros)
            routing = self._no_choices(state, caches, rows)
            start = jnp.zeros((), jnp.int32), caches, rows, [undrawn, routing]
            count, caches, rows, (drawn, routing) = lax.while_loop(goes_on, body, start)
            return Decoded(caches, rows, drawn, count, routing)

        in_shardings = (None, self._caches, self._rows, None, None)
        shardings = Decoded(self._caches, self._rows, *[self._replicated] * 3)
        return self._jit(decode, in_shardings, shardings, donate_argnums=1)

    def check(self, rows: DecodeRows, draws: Draws) -> None:
        """Raise ModelError if the model cannot be called with its caches."""
        (rows,) = rows_for_jit(self._program, rows)
        self._decode.trace(self._once.shapes, self.cache_shapes, rows, np.int32(1), draws)

    def compile_decode(self, rows: DecodeRows, draws: Draws) -> None:
        """Start to compile `decode` for such rows in the background."""
        (rows,) = rows_for_jit(self._program, rows)
        arguments = self._once.shapes, self.cache_shapes, rows, np.int32(1), draws
        self._decode_compiled = compile_ahead(self._program.mesh, self._decode, *arguments)

    def fresh(self) -> Arrays:
        """Empty caches."""
        if self.cached is None:
            return {}
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
        """Compile, with the same kernels on any number of devices."""
        return jax.jit(
            self._program.in_mesh(function),
            in_shardings=in_shardings,
            out_shardings=shardings,
            compiler_options=without_ynnpack(self._program.mesh),
            **options,
        )

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
        if self.cached is None:
            return {}
        mesh = self._program.mesh
        places = {}
        for path, shape in jax.eval_shape(self.cached.fresh).items():
            names = cache_names(path, len(shape.shape))
            spec = [*model_sharding(shape.shape, names, mesh.shape).spec]
            if (dim := self._rows_of[path]) is not None:
                spec += [None] * (dim + 1 - len(spec))
                spec[dim] = sample_axes()
            places[path] = NamedSharding(mesh, PartitionSpec(*spec))
        return places

    @functools.cached_property
    def cache_shapes(self) -> Arrays:
        """Shapes, dtypes and shardings of the caches."""
        if self.cached is None:
            return {}
        return {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._caches[path])
            for path, x in jax.eval_shape(self.cached.fresh).items()
        }

    def _next(
        self, state: ModelState, caches: Arrays, rows: DecodeRows, draws: Draws, keys: jax.Array
    ) -> tuple[Arrays, DecodeRows, Drawn, jax.Array | None]:
        """Read one token of each row, and draw one where the next is not known."""
        place, active = rows.place, rows.left > 0
        logits, caches, routing = self._call(state, caches, self._read(rows))
        seen, columns = None, jnp.arange(len(logits))[:, None]
        if rows.seen is not None:
            seen = jnp.zeros(logits.shape, bool).at[columns, rows.seen].set(True, mode="drop")
        drawn = draw(logits, draws.rules, jax.vmap(jax.random.fold_in)(keys, rows.drawn), seen)
        draws_one = active & (place + 1 >= rows.length)
        drawn = drawn._replace(tokens=jnp.where(draws_one, drawn.tokens, UNDRAWN))

        def written(text: jax.Array, at: jax.Array) -> jax.Array:
            here = (jnp.arange(text.shape[1]) == at[:, None]) & draws_one[:, None]
            return jnp.where(here, drawn.tokens[:, None], text)

        ends = jnp.any(drawn.tokens[:, None] == draws.ends, axis=-1)
        left = jnp.where(ends, 0, rows.left - 1)
        together = self.cached is not None and self.cached.one_by_one
        return (
            caches,
            rows._replace(
                text=written(rows.text, place + 1),
                length=rows.length + draws_one,
                place=place + (1 if together else active),
                left=jnp.where(draws_one, left, rows.left),
                drawn=rows.drawn + draws_one,
                seen=None if rows.seen is None else written(rows.seen, rows.prompt + rows.drawn),
            ),
            drawn,
            None if routing is None else routing[:, 0],
        )

    def _read(self, rows: DecodeRows) -> dict[str, jax.Array]:
        """The batch of the tokens that are read next; of the entire texts without a cache."""
        place = rows.place
        if self.cached is None:
            tokens = rows.text
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            return {"tokens": tokens, "positions": positions, "at": place}
        tokens = jnp.take_along_axis(rows.text, place[:, None], axis=1, mode="clip")
        return {"tokens": tokens, "positions": place[:, None], "at": jnp.zeros_like(place)}

    def _no_choices(self, state: ModelState, caches: Arrays, rows: DecodeRows) -> jax.Array | None:
        """Space for the choices of routers [rows, segment, routers, k], if any are recorded."""
        inputs = {**state.variables, **caches}, self._read(rows), state.step, state.step
        program = self._traced_loss.trace(inputs, False)
        _, written = jax.tree.unflatten(program.out_tree, program.closed.out_avals)
        if ROUTING not in written:
            return None
        count, _, *choices = written[ROUTING].shape
        return jnp.full((count, self.segment, *choices), -1, jnp.int32)

    def _call(
        self, state: ModelState, caches: Arrays, batch: Any
    ) -> tuple[jax.Array, Arrays, jax.Array | None]:
        """(logits [rows, vocab], the caches after the call, the choices of routers)."""
        variables = {**state.variables, **caches}
        loss, written = self._traced_loss(state.sources, variables, batch, state.step, 0, False)
        after = {path: written.get(path, caches[path]) for path in caches}
        return loss.metrics["logits"].value, after, written.get(ROUTING)


def rows_for_jit(program: Program, *rows: Any) -> Any:
    """NumPy arrays of rows, placed on the devices of several processes: jit takes those of one."""
    if jax.process_count() == 1:
        return rows
    at = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), sample_specs(rows))
    return jax.device_put(rows, at)


def _logits(model: Any, batch: Any) -> Outputs:
    """The logits [rows, vocab] after the token of each sequence that `at` names."""
    accepted = call_parameters(model)
    names = (
        {*batch} & {"at", "positions", "inputs", "mask", "patches", "patch_places"} & {*accepted}
    )
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
