"""The commands as functions: train, evaluate, sample and check a config."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax

from jaxspeed.config import Config, load_config
from jaxspeed.data import Corpus
from jaxspeed.engine import CheckReport, Engine
from jaxspeed.errors import ConfigError, DataError
from jaxspeed.run.evaluation import evaluate
from jaxspeed.run.sampling import sample_texts
from jaxspeed.run.start import Source, checkpointer_of, open_run, restore, source_of
from jaxspeed.run.trainer import Trainer

log = logging.getLogger("jaxspeed")


def train(
    config: Config | Mapping[str, Any] | str | Path,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Trainer:
    """Train as `jaxspeed train` does, resuming the run in its folder.

    `model`, `loss_fn` and `optimizer` are as for `jaxspeed.initialize`. The returned trainer has
    the engine, the progress of the run, and its folder.
    """
    trainer = open_run(source_of(config, model, loss_fn, optimizer))
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


def evaluate_run(source: Source, tag: str | None = None) -> dict[str, Any]:
    """The held-out loss of a checkpoint."""
    engine, corpus, step, tag = _restored(source, tag)
    if corpus.held_out is None:
        raise DataError("data.held_out: 0, so no samples are held out to evaluate on")
    with source.watchdog.section("evaluate"):
        most = source.config.run.eval_batches
        found = evaluate(engine, corpus.held_out, most, source.watchdog.progressed) or {}
    return {"step": step, "checkpoint": tag, **found, "unigram_entropy": corpus.unigram_entropy}


def sample_run(
    source: Source, tag: str | None = None, prompts: Sequence[str] | None = None, **options: Any
) -> Iterator[tuple[int, str]]:
    """Texts from a checkpoint, streamed; arguments and pieces are those of `sample_texts`."""
    engine, corpus, _, _ = _restored(source, tag)
    return sample_texts(engine, corpus, prompts, **options)


def check_run(source: Source, *, layers: int | None = None) -> CheckReport:
    """`engine.check` of the config's model with initial weights on its first batch.

    With `layers`, of a model with this many layers; the full one is never created.
    """
    if layers is not None:
        given = source.config.given
        if source.config.model is None or source.config.model.family is None:
            raise ConfigError("check: layers needs a model.family in the config")
        given["model"].setdefault("config", {})["num_hidden_layers"] = layers
        source = replace(source, config=load_config(given))
    corpus, engine = source.corpus(), source.engine()
    return engine.check(corpus.train.batch(0, engine.program.batch.train))


def _restored(source: Source, tag: str | None) -> tuple[Engine, Corpus, int, str]:
    checkpointer = checkpointer_of(source)
    tags = [info.tag for info in checkpointer.list() if info.ok]
    if not tags:
        raise ConfigError(f"{checkpointer.folder} holds no checkpoint; train first")
    if tag is not None and tag not in tags:
        raise ConfigError(f"no checkpoint {tag} in {checkpointer.folder}: {', '.join(tags)}")
    corpus, engine = source.corpus(), source.engine()
    if source.folder.differs_in(data=corpus.fingerprint):
        log.warning(
            "the data differ from those of the run in %s: samples held out here may have been "
            "trained on there",
            checkpointer.folder,
        )
    with source.watchdog.section("restore"):
        found, reached = restore(engine, checkpointer, tag)
    return engine, corpus, reached.step, found
