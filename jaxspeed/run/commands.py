"""The commands as functions: train, evaluate, sample and check a config."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
from rich.console import Console

from jaxspeed.config import Config, load_config
from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import ByteTokenizer, Split, Tokenizer
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.engine import CheckReport, Engine
from jaxspeed.errors import ConfigError, DataError, ModelError
from jaxspeed.interop.pretrained import data_section
from jaxspeed.run.evaluation import Evaluated, evaluate
from jaxspeed.run.lm_eval_tasks import evaluate_tasks
from jaxspeed.run.rollouts import evaluate_prompts, stand_in
from jaxspeed.run.sampling import Chat, sample_texts
from jaxspeed.run.start import (
    Source,
    before_step_0,
    checkpointer_of,
    completer_of,
    in_steps,
    open_run,
    rewards_of,
    source_of,
)
from jaxspeed.run.trainer import Trainer
from jaxspeed.user_models.config_model import own_objective

log = logging.getLogger("jaxspeed")


def train(
    config: Config | Mapping[str, Any] | str | Path,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    quiet: bool = False,
) -> Trainer:
    """Train as `jaxspeed train` does, resuming the run in its folder.

    `model`, `loss_fn` and `optimizer` are as for `jaxspeed.initialize`. The returned trainer has
    the engine, the progress of the run, and its folder. `quiet` prints no progress.
    """
    trainer = open_run(source_of(config, model, loss_fn, optimizer), Console(quiet=quiet))
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


def evaluate_run(
    source: Source,
    tag: str | None = None,
    *,
    data: Sequence[str] = (),
    ema: bool = False,
    tasks: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """The loss of a checkpoint, and what follows from it: perplexity, accuracy.

    It is evaluated on all of the files `data`, or of the config's `data.eval`, without the training
    data; else on what is held out of these.

    Args:
      tag: the checkpoint; the newest intact one by default.
      data: paths of files and folders.
      ema: whether the moving average of the weights is evaluated.
      tasks: of lm-eval, names or YAML files; scores "TASK/METRIC" are in place of the loss.
      options: of these: `limit` (a number of examples, or a share below 1) and `num_fewshot`.
    """
    checkpoint, section = ChosenCheckpoint(source, tag), data_section(source.config)
    if tasks:
        tokenizer = source.tokenizer(checkpoint.files())
        engine, step, tag = checkpoint.restored(ema)
        with source.watchdog.section("evaluate"):
            progressed = source.watchdog.progressed
            of_data = tokenizer, tasks, section.seq_len
            scores = evaluate_tasks(engine, *of_data, progressed, **options)
        return {"step": step, "checkpoint": tag, "ema": ema, "files": [], **(scores or {})}
    apart = section.eval
    if not all(path and "\0" not in path for path in data):
        raise DataError("data: an empty path, or one with a NUL character; each needs a name")
    if data:
        keys = ("text_field", "dtype", "format")
        apart = SourceSection(paths=[*data], **{key: getattr(section, key) for key in keys})
    parts: dict[str, Split | None] = {}
    if apart is not None:
        most, extra = None, {}
        tokenizer = source.tokenizer(checkpoint.files())
        limits, batch = source.reads, source.batch_size()
        for name, samples in evaluation_parts(section, apart, limits, tokenizer, batch).items():
            parts[name] = Split([samples], seed=0, shuffle=False) if samples else None
    else:
        corpus = source.corpus()
        if corpus.held_out is None:
            raise DataError("data.held_out: 0, so no samples are held out to evaluate on")
        if source.folder.differs_in(data=corpus.fingerprint):
            log.warning(
                "the data differ from those of the run in %s: samples held out here may have been "
                "trained on there",
                checkpoint.folder,
            )
        parts["held out"], tokenizer = corpus.held_out, corpus.tokenizer
        most = source.config.run.eval_batches
        extra = {"unigram_entropy": corpus.unigram_entropy}

    def add_arrays(engine: Engine) -> None:
        """Compute what the objective computes once, before the checkpoint is restored."""
        before = before_step_0(source, engine, tokenizer)
        with source.watchdog.section("evaluate"):
            for name, split in parts.items() if before.entries else ():
                parts[name] = None if split is None else before.in_memory(split, most)

    evaluations, total = dict.fromkeys(parts, Evaluated()), Evaluated()
    with rewards_of(source, tokenizer) or nullcontext() as rewards:
        engine, step, tag = checkpoint.restored(ema, add_arrays)
        completer = completer_of(engine, rewards, tokenizer)
        with source.watchdog.section("evaluate"), engine.evaluating():
            for name, split in parts.items():
                if split is None:
                    continue
                if completer is not None:
                    of_prompts = split, step, most, source.watchdog.progressed
                    done = evaluate_prompts(completer, *of_prompts)
                else:
                    done = evaluate(engine, split, most, source.watchdog.progressed)
                evaluations[name] = done or Evaluated()
                total.add(evaluations[name].means, evaluations[name].weight)
    of_text = source.reads.sample == "tokens" and own_objective(source.config) is None
    of_bytes = isinstance(tokenizer, ByteTokenizer)
    files = [{"file": name, **_figures(x, of_text, of_bytes)} for name, x in evaluations.items()]
    return {
        "step": step,
        "checkpoint": tag,
        "ema": ema,
        **_figures(total, of_text, of_bytes),
        **extra,
        "files": [] if apart is None else files,
    }


def _figures(evaluated: Evaluated, of_text: bool, of_bytes: bool) -> dict[str, Any]:
    """What is shown of an evaluation; None for what nothing was evaluated for."""
    metrics = evaluated.means if evaluated.weight else {"loss": None}
    loss = metrics.pop("loss", None)
    shown = {"eval_loss": loss, "eval_weight": evaluated.weight}
    if of_text:
        with np.errstate(over="ignore"):
            shown["perplexity"] = None if loss is None else float(np.exp(loss))
        shown["tokens"] = round(evaluated.weight)
    if of_text and of_bytes:
        shown["bits_per_byte"] = None if loss is None else loss / math.log(2)
    return {**metrics, **shown}


def sample_run(
    source: Source,
    tag: str | None = None,
    prompts: Sequence[str] | None = None,
    *,
    ema: bool = False,
    **options: Any,
) -> Iterator[tuple[int, str]]:
    """Texts from a checkpoint, streamed; arguments and pieces are those of `sample_texts`."""
    engine, tokenizer, _ = _writing(source, tag, ema)
    context = source.config.data.seq_len or source.reads.seq_len
    return sample_texts(engine, tokenizer, prompts, context=context, **options)


def chat_run(source: Source, tag: str | None = None, *, ema: bool = False, **options: Any) -> Chat:
    """A conversation with the model of a checkpoint; `options` are those of `Chat`."""
    config = source.config
    engine, tokenizer, plain_prompts = _writing(source, tag, ema)
    defaults = {
        "tokens": config.run.sample_tokens,
        "temperature": config.run.sample_temperature,
        "context": config.data.seq_len or source.reads.seq_len,
        "plain": plain_prompts,
    }
    return Chat(engine, tokenizer, config.data, **defaults | options)


def _writing(source: Source, tag: str | None, ema: bool) -> tuple[Engine, Tokenizer, bool]:
    """A checkpoint's engine, its tokenizer, and whether its prompts are plain."""
    checkpoint = ChosenCheckpoint(source, tag)
    tokenizer = source.tokenizer(checkpoint.files())
    if tokenizer is None:
        raise ModelError("sample: the model has no tokenizer, so it cannot generate text")
    return checkpoint.restored(ema)[0], tokenizer, checkpoint.plain_prompts


def check_run(source: Source, *, layers: int | None = None) -> CheckReport:
    """`engine.check` of the config's model with initial weights on its first batch.

    With `layers`, of a model with this many layers; the full one is never created.
    """
    if layers is not None:
        tree = source.config.given
        if source.config.model is None or source.config.model.family is None:
            raise ConfigError("check: layers needs a model.family in the config")
        tree["model"].setdefault("config", {})["num_hidden_layers"] = layers
        source = replace(source, config=load_config(tree))
    corpus = source.corpus()
    engine, samples = in_steps(source, corpus).engine(), corpus.train
    size = engine.program.batch.train
    if source.reads.prompts is not None:
        return engine.check(stand_in(samples.batch(0, size), source.reads.vocab_size or 2))
    before = before_step_0(source, engine, corpus.tokenizer)
    return engine.check(before.in_memory(samples, ids=samples.sample_ids(0, size)).batch(0, size))


class ChosenCheckpoint:
    """The checkpoint that a command reads: the one of this tag, or the newest intact one.

    Where there is none yet, it is a pretrained model's own weights, if the config names one.
    """

    def __init__(self, source: Source, tag: str | None) -> None:
        self._source, self._tag = in_steps(source, None), tag
        self._all = checkpointer_of(source)
        self.folder = self._all.folder
        self._tags = [info.tag for info in self._all.list() if info.ok]
        self.plain_prompts = False  # of the run that saved it, once it is restored
        if tag is not None and tag not in self._tags:
            held_tags = ", ".join(self._tags) or "none"
            raise ConfigError(f"no checkpoint {tag} in {self.folder}: {held_tags}")
        if not self._tags:
            model = source.config.model
            if model is None or model.pretrained is None:
                raise ConfigError(f"{self.folder} holds no checkpoint; train first")
            adapter = source.config.lora and source.config.lora.adapter
            if str(source.folder.path) not in (model.pretrained, adapter):  # whose weights they are
                whose = f"{model.pretrained}, {f'with {adapter}' if adapter else 'untrained'}"
                log.warning(
                    "%s holds no checkpoint: the weights are those of %s", self.folder, whose
                )

    def files(self) -> dict[str, bytes]:
        """The files that were saved with it."""
        return self._all.files(self._tag or self._tags[-1]) if self._tags else {}

    def restored(
        self, ema: bool, before: Callable[[Engine], None] = lambda engine: None
    ) -> tuple[Engine, int, str | None]:
        """An engine with its state, the step and the tag; `before` is called with a fresh one."""
        engine, step, tag = self._source.engine(), 0, None
        before(engine)
        if self._tags:
            with self._source.watchdog.section("restore"):
                checkpoint = self._all.restore(
                    engine.program,
                    tag=self._tag,
                    in_place_of=engine.held,
                    frozen_as_read=engine.frozen_as_read,
                )
            engine.continue_from(checkpoint)
            step, tag = checkpoint.step, checkpoint.tag
            self.plain_prompts = bool(checkpoint.client_state.get("plain_prompts"))
        if ema:
            engine.state = engine.averaged
        return engine, step, tag
