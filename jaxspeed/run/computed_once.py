"""Arrays that an objective computes once: of the rows of the data, by the model before step 0.

They are kept in the run's folder, under a key of the data, the weights and the settings.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.checkpoint.manifest import read_manifest
from jaxspeed.checkpoint.process_agreement import OnFirst, Processes, is_first
from jaxspeed.checkpoint.stores import checkpoints_of
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.data import Corpus, Split, placer
from jaxspeed.data.computed_rows import ComputedRows, RowStore, RowWriter
from jaxspeed.engine import Engine
from jaxspeed.interop.peft_layout import TENSORS
from jaxspeed.interop.safetensors import TensorFile
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.placement.paths import listed
from jaxspeed.train.array_program import array_function
from jaxspeed.train.frozen_model import frozen_program
from jaxspeed.train.gather_once import ModelState
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")
SYNC_BATCHES, SAY_SECONDS = 16, 10.0
Arrays = dict[str, np.ndarray]


@dataclass
class BeforeStep0:
    """An engine with the model before its step 0, which computes arrays of the data's rows.

    Attributes:
      tick: counts progress.
      warm_start: takes over the weights of another run, if the run begins with these.
      has_begun: whether the run has checkpoints: what it began with need not be there any more.
      say: takes a line on what is computed, which may take as long as training.
    """

    engine: Engine
    tick: Callable[[], Any] = lambda: None
    warm_start: Callable[[], None] | None = None
    has_begun: bool = False
    is_warm: bool = False
    say: Callable[[str], None] = log.info

    @cached_property
    def frozen(self) -> dict[str, Program]:
        """The programs of models of their own, by what the objective computes with them."""
        return {
            entry.name: frozen_program(self.engine.program, entry.model, entry.name)
            for entry in self.entries
            if isinstance(entry.model, FrozenModelSection)
        }

    @cached_property
    def entries(self) -> list[ComputedArrays]:
        """What the objective computes once, in this order."""
        return [entry for entry in self.engine.program.computed_arrays if entry.once]

    def stored(self, corpus: Corpus, folder: Path) -> Corpus:
        """A corpus with the arrays of what a run reads of it, which are kept in a folder."""
        splits = {"train": corpus.train, "held_out": corpus.held_out}
        for entry in self.entries:
            compute = RowComputation(self, entry)
            for name, split in splits.items():
                if split is not None:
                    store = RowStore(folder / entry.name / name, split.samples)
                    key = self._key(compute, corpus, name, split)
                    compute.into(store, split, self._read(name, split), key)
                    splits[name] = split.with_rows(store.rows())
        assert splits["train"] is not None
        return replace(corpus, train=splits["train"], held_out=splits["held_out"])

    def in_memory(
        self, split: Split, batches: int | None = None, ids: np.ndarray | None = None
    ) -> Split:
        """A split with the arrays of these samples, or of the first batches of an evaluation."""
        ids = self._first(split, batches) if ids is None else np.unique(ids)
        for entry in self.entries:
            parts = list(RowComputation(self, entry).of(split, ids))
            arrays = {name: np.concatenate([x[name] for _, x in parts]) for name in entry.writes}
            split = split.with_rows(ComputedRows(split.samples, ids, arrays))
        return split

    def _read(self, name: str, split: Split) -> np.ndarray:
        """The numbers of the samples that the run reads."""
        run, batch = self.engine.config.run, self.engine.program.batch
        if name == "train":
            return split.visited(run.steps or 0, batch.train)
        return self._first(split, run.eval_batches)

    def _first(self, split: Split, batches: int | None) -> np.ndarray:
        """The numbers of the samples of the first batches of an evaluation, by default of all."""
        size = self.engine.program.batch.train // self.engine.program.batch.accumulation
        return np.arange(split.samples if batches is None else min(split.samples, batches * size))

    def _key(
        self, compute: "RowComputation", corpus: Corpus, name: str, split: Split
    ) -> dict[str, Any]:
        """What the arrays of a split depend on."""
        config, entry = self.engine.config, compute.entry
        keys, weights = config.given, compute.program.model.weights
        data: list[Any] = [corpus.fingerprint, split.samples]
        if name == "held_out" and config.data.eval is not None:
            data.append(_digest(split))
        files = weights.origin.files if weights is not None and weights.origin else None
        adapter = config.lora.adapter if config.lora else None
        digest = TensorFile.open(Path(adapter).expanduser() / TENSORS).digest() if adapter else None
        key = {
            "data": data,
            "model": [keys.get("model"), config.run.seed, str(entry.model), files],
            "adapter": [keys.get("lora"), digest],
            "objective": keys.get("objective"),
            "precision": [config.compute_dtype, keys.get("torch_autocast")],
            "function": [entry.name, *entry.writes],
        }
        if not self.has_begun:
            key["run.init_from"] = config.run.init_from and _newest(config.run.init_from)
        return key


class RowComputation:
    """The arrays of an entry, computed for rows of a split."""

    def __init__(self, before: BeforeStep0, entry: ComputedArrays) -> None:
        self._before, self.entry = before, entry

    @cached_property
    def program(self) -> Program:
        """The program of the model that computes."""
        before = self._before
        return before.frozen.get(self.entry.name, before.engine.program)

    @cached_property
    def _compute(self) -> Callable[[Any], Any]:
        """The compiled program, with the model's state; its results are on all processes."""
        before, program, once, adapters = self._before, self.program, None, True
        state: Any
        if isinstance(self.entry.model, FrozenModelSection):
            state = program.init(0)
        else:
            if before.warm_start is not None and not before.is_warm:
                before.warm_start()
                before.is_warm = True
            state, once, model = before.engine.state, before.engine.gather_once, program.model
            if once is not None:
                state = once(ModelState.of(program, state))
            is_new = isinstance(model, AdaptedModel) and model.saved is None
            adapters = not is_new or before.is_warm
        arrays = array_function(program, self.entry.arrays, adapters=adapters, once=once)
        replicated = NamedSharding(program.mesh, PartitionSpec())
        at = replicated if jax.process_count() > 1 else None
        return partial(program.jit(arrays, out_shardings=at), state)

    def into(self, store: RowStore, split: Split, ids: np.ndarray, key: dict[str, Any]) -> None:
        """Add the arrays of these samples to a store, unless it has them with this key."""
        processes, name, say = Processes(), self.entry.name, self._before.say
        why = processes.first(f"reading {name}", lambda: store.unused(key))
        missing = ids if why else np.setdiff1d(ids, store.ids)
        arrays = listed(list(self.entry.writes))
        if not len(missing):
            say(f"{name}: {arrays} of {len(ids):,} samples are in {store.folder}")
            return
        say(
            f"{name}: {arrays} of {len(missing):,} samples are computed by the model before step 0,"
            f" and kept in {store.folder}" + (f": {why}" if why else "")
        )
        on_first, writers = OnFirst(f"writing {name}"), list[RowWriter]()

        def write(number: int, computed: np.ndarray, values: Arrays) -> None:
            if number == 0:
                if why:
                    store.begin(key, {n: x[0] for n, x in values.items()})
                writers.append(store.writer(len(missing)))
            writers[0].add(computed, values)
            if (number + 1) % SYNC_BATCHES == 0:
                writers[0].sync()

        begun = logged = time.monotonic()
        done = 0
        try:
            for number, batch in enumerate(self.of(split, missing)):
                on_first(partial(write, number, *batch))
                if (number + 1) % SYNC_BATCHES == 0:
                    on_first.agree()
                done += len(batch[0])
                if time.monotonic() - logged > SAY_SECONDS and is_first():
                    logged = time.monotonic()
                    rate = done / (logged - begun)
                    say(f"{name}: {done:,} of {len(missing):,} samples, {rate:.3g} a second")
            on_first(lambda: writers[0].sync())
        finally:
            for writer in writers:
                writer.close()
        on_first.agree()

    def of(self, split: Split, ids: np.ndarray) -> Iterator[tuple[np.ndarray, Arrays]]:
        """(numbers of samples, their arrays), batch by batch; the next one is on its way."""
        compute, program, batch = self._compute, self.program, self._before.engine.program.batch
        size = batch.train // batch.accumulation
        place = placer(program.batch_shardings, size)
        pending: tuple[np.ndarray, Any] | None = None
        for first in range(0, len(ids), size):
            chosen = ids[first : first + size]
            filled = np.resize(chosen, size) if len(chosen) < size else chosen
            rows = place(partial(split.of, filled))
            with program.set_mesh():
                sent = chosen, compute(rows)
            if pending:
                yield self._arrived(*pending)
            pending = sent
        if pending:
            yield self._arrived(*pending)

    def _arrived(self, ids: np.ndarray, arrays: Any) -> tuple[np.ndarray, Arrays]:
        values = {name: np.asarray(x)[: len(ids)] for name, x in arrays.items()}
        self._before.tick()
        return ids, values


def _digest(split: Split) -> str:
    """A digest of all samples: that of a corpus has no data that are only evaluated on."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in split.once(64):
        for name, x in sorted(batch.items()):
            digest.update(f"{name} {x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).data)
    return digest.hexdigest()


def _newest(folder: str) -> Any:
    """The checkpoint from which a run is initialized."""
    there = checkpoints_in(folder)
    tag = there.latest()
    return [tag, sorted(read_manifest(there.folder / tag).files.items())] if tag else None


def checkpoints_in(folder: str) -> Checkpointer:
    """The checkpoints in the folder of a run, or in one of checkpoints."""
    return Checkpointer(checkpoints_of(folder))
