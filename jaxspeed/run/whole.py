"""Whole commands: train, evaluate, sample and check what a config says."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optax

from jaxspeed.config import Config
from jaxspeed.data import Corpus
from jaxspeed.engine import CheckReport, Engine
from jaxspeed.errors import CheckpointError, DataError
from jaxspeed.run.evaluation import evaluate
from jaxspeed.run.sampling import sample_text
from jaxspeed.run.start import Source, checkpointer_of, open_run, restore, source_of
from jaxspeed.run.trainer import Trainer


def train(
    config: Config | Mapping[str, Any] | str | Path,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Trainer:
    """Train as `jaxspeed train` does, and continue where the run in its folder stopped.

    `model`, `loss_fn` and `optimizer` as `jaxspeed.initialize` takes them. What is returned holds
    the engine, how far the run is, and the folder that its files are in.
    """
    trainer = open_run(source_of(config, model, loss_fn, optimizer))
    trainer.run()
    return trainer


def evaluate_run(source: Source, tag: str | None = None) -> dict[str, Any]:
    """The held-out loss of a checkpoint."""
    engine, corpus, step, tag = _restored(source, tag)
    if corpus.held_out is None:
        raise DataError("data.held_out: 0, so no samples are held out to evaluate on")
    batch = engine.program.batch
    found = evaluate(
        engine,
        corpus.held_out.once(batch.train // batch.accumulation),
        most=source.config.run.eval_batches,
    )
    return {"step": step, "checkpoint": tag, **found, "unigram_entropy": corpus.unigram_entropy}


def sample_run(source: Source, tag: str | None = None, *, seed: int = 0) -> Iterator[str]:
    """Text from a checkpoint, in pieces as they come."""
    engine, corpus, _, _ = _restored(source, tag)
    return sample_text(engine, corpus, seed=seed)


def check_run(source: Source, *, layers: int | None = None) -> CheckReport:
    """The engine's check of the config's model, from fresh weights, on its first batch."""
    corpus, engine = source.corpus(), source.engine()
    return engine.check(corpus.train.batch(0, engine.program.batch.train), layers=layers)


def _restored(source: Source, tag: str | None) -> tuple[Engine, Corpus, int, str]:
    checkpointer = checkpointer_of(source)
    found = tag or checkpointer.latest()
    if found is None:
        raise CheckpointError(f"{source.folder.checkpoints} holds no checkpoint; train first")
    corpus, engine = source.corpus(), source.engine()
    reached = restore(engine, checkpointer, tag)
    return engine, corpus, reached.step, found
