"""Open a run: config, corpus, engine and checkpoint to a Trainer ready for its next step.

What is cheap to open comes first, so that mistakes in a config are reported early.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optax

from jaxspeed.checkpoint import Checkpointer
from jaxspeed.checkpoint.process_agreement import Processes, is_first
from jaxspeed.config import Config, load_config
from jaxspeed.config.before_start import check_start
from jaxspeed.config.parse import PASSED
from jaxspeed.config.rollout_options import CHANGEABLE, PolicyOptions
from jaxspeed.config.run_sections import FrozenModelSection
from jaxspeed.data import Corpus, ModelLimits, Tokenizer, build, limits_of
from jaxspeed.data.choose_tokenizer import tokenizer_of_section
from jaxspeed.data.model_limits import limits_of_run
from jaxspeed.data.tokenizer import files_of, read_tokenizer, tokenizer_file, tokenizer_in
from jaxspeed.engine import Engine
from jaxspeed.engine.jax_setup import join_processes, start_devices
from jaxspeed.errors import CheckpointError, ConfigError, DataError, JaxspeedError
from jaxspeed.interop.pretrained import (
    data_section,
    refuse_other_tokenizer,
    warn_of_other_tokenizer,
)
from jaxspeed.interop.torch_runs import TorchRun, read_torch_run, table_in
from jaxspeed.known_jax_bugs import installed, refuse_old_jax
from jaxspeed.launch.variables import report_progress
from jaxspeed.metrics import ModelFlops, program_model_flops
from jaxspeed.metrics.start_lines import Showing, not_shown, start_lines
from jaxspeed.objectives import objective_of
from jaxspeed.parameter_server import batch_of
from jaxspeed.parameter_server.engine import engine_of
from jaxspeed.parameter_server.ray import RayEngine, ray_resources
from jaxspeed.parameter_server.ray import initialize as initialize_on_ray
from jaxspeed.placement.paths import listed
from jaxspeed.rewards.scoring import Rewards
from jaxspeed.run.computed_once import BeforeStep0, checkpoints_in
from jaxspeed.run.folder import RunFolder
from jaxspeed.run.rollouts import ROLLOUT, Completer, rollout_objective
from jaxspeed.run.same_run import facts_of, meet
from jaxspeed.run.step_records import recorder_of
from jaxspeed.run.trainer import Reached, Trainer
from jaxspeed.run.watchdog import Watchdog, watchdog_of
from jaxspeed.train.program import Program
from jaxspeed.user_models.config_model import (
    family_sizes,
    hidden_size_of,
    own_objective,
    resolve_model,
)

log = logging.getLogger("jaxspeed")


@dataclass(frozen=True)
class Source:
    """The inputs of a run: a config, and optionally a model, loss and optimizer."""

    config: Config
    folder: RunFolder
    reads: ModelLimits
    model: Any = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer: optax.GradientTransformation | None = None

    def corpus(self) -> Corpus:
        """The corpus for the model, with the tokenizer saved with the run, if any."""
        corpus = build(
            data_section(self.config),
            **vars(self.reads),
            batch_size=self.batch_size(),
            seed=self.config.run.seed,
            tokenizer=self._saved_tokenizer(),
        )
        is_own = own_objective(self.config) is not None  # with another loss than that of tokens
        return replace(corpus, unigram_entropy=None) if is_own else corpus

    def tokenizer(self, saved: Mapping[str, bytes]) -> Tokenizer | None:
        """The tokenizer of the model; None for a model of no text.

        It is that of a checkpoint's files, or of the run's folder, or of the config; the training
        data are read only where none of these has one.
        """
        section, data = self.config.model, data_section(self.config)
        is_family = self.model is None and section is not None and section.factory is None
        if is_family and limits_of(family_sizes(self.config)).sample != "tokens":
            return None
        tokenizer = tokenizer_in(saved, "the checkpoint's tokenizer") or self._saved_tokenizer()
        tokenizer = tokenizer or tokenizer_of_section(data)
        if tokenizer is not None:
            return tokenizer
        try:
            return self.corpus().tokenizer
        except DataError as error:
            if all(source.source in ("tokens", "synthetic") for source in data.sources):
                return None  # ids without one: it would be saved
            raise DataError(
                f"no tokenizer was saved with the checkpoint or in {self.folder.path}, and none "
                f"can be had from the training data: {error}"
            ) from None

    def _saved_tokenizer(self) -> Tokenizer | None:
        folder = self.folder.path
        is_there = self.folder.has_begun() and tokenizer_file(folder) is not None
        return read_tokenizer(folder) if is_there else None

    def stored_config(self) -> dict[str, Any]:
        """The config for the run's folder, with a comment on what only Python has of the run."""
        names = ("model", "loss_fn", "optimizer")
        passed = [name for name in names if getattr(self, name) is not None]
        return self.config.given | ({PASSED: passed} if passed else {})

    @staticmethod
    def start(config: Config) -> None:
        """Join the other processes, compare what they run, and start this one's devices."""
        refuse_old_jax(installed())
        join_processes(config.run.devices, config.run.watchdog.start)
        watchdog = watchdog_of(config.run.watchdog)
        if watchdog.beats is not None:
            meet(watchdog, facts_of(config.given))
        start_devices(config.run.devices)

    @property
    def watchdog(self) -> Watchdog:
        """This process's watchdog; no field, since a plan sends the source to other processes."""
        return watchdog_of(self.config.run.watchdog)

    def engine(self, **how: Any) -> Engine:
        """An engine with a fresh state; arguments are those of `engine_of`."""
        return engine_of(self.config, self.model, self.loss_fn, self.optimizer, **how)

    def batch_size(self) -> int:
        return batch_of(self.config).train


@dataclass(frozen=True)
class RaySource(Source):
    """A run whose workers and servers are processes on Ray; this one has no device but its CPU."""

    @staticmethod
    def start(config: Config) -> None:
        ray_resources(config)  # reports what Ray does not support before anything starts
        start_devices("cpu")
        watchdog_of(config.run.watchdog)

    def engine(self, showing: Showing = not_shown, **how: Any) -> RayEngine:
        with showing("starting workers and servers"):
            return initialize_on_ray(self.model, self.loss_fn, self.config, self.optimizer)

    def batch_size(self) -> int:
        return ray_resources(self.config).batch.train


def source_of(
    config: Config | Mapping[str, Any] | str | Path,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    *,
    name: str | Path | None = None,
    kind: type[Source] = Source,
) -> Source:
    """Read the config, start the devices that it names, and find the model's limits.

    The run's folder is run.output, or `runs/<name>`, by default the name of the config file.
    """
    loaded = load_config(config, hidden_size=hidden_size_of())
    _, loss = resolve_model(loaded, model, loss_fn)  # problems of the model before those of data
    kind.start(loaded)
    if name is None:
        name = config if isinstance(config, str | Path) else "run"
    output = loaded.run.output or Path("runs") / Path(name).stem
    folder = RunFolder(output, loaded.run.checkpoints)
    reads = limits_of_run(loaded, model, objective_of(loss))
    return kind(loaded, folder, reads, model, loss_fn, optimizer)


def open_run(source: Source, console: Any = None) -> Trainer:
    """A trainer at the run's newest intact checkpoint, or at step 0."""
    with contextlib.ExitStack() as until_open:
        trainer = _opened(source, console, until_open)
        until_open.pop_all()
        return trainer


def _opened(source: Source, console: Any, until_open: contextlib.ExitStack) -> Trainer:
    config, folder, begun = source.config, source.folder, time.perf_counter()
    check_start(config)
    begins_with = config.run.init_from if checkpointer_of(source).is_empty() else None
    if begins_with is not None and checkpoints_in(begins_with).is_empty():
        raise ConfigError(f"run.init_from: {begins_with} holds no checkpoint")
    imports = config.run.import_from if checkpointer_of(source).is_empty() else None
    imported = read_torch_run(imports.folder) if imports is not None else None
    showing = start_lines(console if is_first() else None)
    with showing("reading the data"):
        corpus = source.corpus()
    warn_of_other_tokenizer(config, corpus.tokenizer, source.reads.vocab_size)
    rewards = rewards_of(source, corpus.tokenizer, showing)
    if rewards is not None:
        until_open.enter_context(rewards)
        rewards.check_columns(corpus.train.columns)
    stored = source.stored_config()
    source = in_steps(source, corpus)
    config = source.config
    objective: Any = config.given.get("objective")
    whose = {
        "model": config.given.get("model"),
        "objective": objective and {k: x for k, x in objective.items() if k not in CHANGEABLE},
        "data": corpus.fingerprint,
        "tokenizer": config.data.tokenizer,
        "vocab_size": config.data.vocab_size,
        "seed": config.run.seed,
        "train_batch_size": source.batch_size(),
    }
    files = files_of(corpus.tokenizer)
    processes = Processes()
    processes.first("opening the folder of the run", lambda: folder.open(whose, files))
    unseen = processes.all(
        "looking for the folder of the run",
        folder.has_begun,
        lambda sees: sees.index(False) if False in sees else None,
    )
    if unseen is not None and is_first():
        log.warning(
            "run.output: %s is not shared: process %d, for one, does not see it. Checkpoints need "
            "a folder that all share (run.checkpoints)",
            folder.path,
            unseen,
        )
    flops = list[ModelFlops]()

    def count_flops(program: Program) -> None:
        with showing("tracing the loss"):
            flops.append(program_model_flops(program, corpus.train.shapes(program.batch.train)))

    try:
        engine = source.engine(showing=showing, before_init=count_flops)
        if not flops:
            count_flops(engine.program)
        before = before_step_0(source, engine, corpus.tokenizer)
        of_data = corpus.tokenizer, corpus.train, corpus.context
        completer = completer_of(engine, rewards, *of_data)
        checkpointer = checkpointer_of(source)
        checkpointer.check(engine.program, engine.excludes_frozen())
    except JaxspeedError:
        folder.withdraw()
        raise
    processes.first("storing the config in the folder", lambda: folder.store(stored))
    first = functools.partial(_import, engine, imported, corpus) if imported else None
    begin = functools.partial(_begin, engine, checkpointer, config.run.init_from, first)
    if console is not None and is_first():
        before.say = functools.partial(console.print, markup=False, highlight=False)
    if before.entries:
        before.has_begun = not checkpointer.is_empty()
        if unseen is not None:
            raise ConfigError(
                f"run.output: {folder.path} is not shared by all processes, and it has to keep "
                f"what the objective computes once ({listed([x.name for x in before.entries])})"
            )
        with source.watchdog.section("evaluate"):
            corpus = before.stored(corpus, folder.computed)
    with source.watchdog.section("restore"), showing("restoring a checkpoint"):
        try:
            reached = Reached() if before.is_warm and not before.has_begun else begin()
        except JaxspeedError:
            if imported is not None:
                folder.withdraw()
            raise
    report_progress(reached.step)
    recorder = recorder_of(
        engine,
        folder,
        flops[0],
        step=reached.step,
        seconds=_with_opening(reached, time.perf_counter() - begun),
        watchdog=source.watchdog,
        console=console,
    )
    if completer is not None:
        completer.phase = recorder.phase
    with showing("tracing the evaluation"):
        return Trainer(
            engine,
            corpus,
            folder,
            checkpointer,
            recorder,
            files,
            begin,
            reached,
            completer=completer,
        )


def rewards_of(
    source: Source, tokenizer: Tokenizer | None, showing: Showing = not_shown
) -> Rewards | None:
    """The rewards of the run's objective, whose workers have started; None if it has none."""
    objective, section = own_objective(source.config), source.config.objective
    if objective is None or section is None or not issubclass(objective.Options, PolicyOptions):
        return None
    options: Any = objective.Options.model_validate(section.own_keys)
    with showing("importing the rewards"):
        return Rewards(options, tokenizer=tokenizer, tick=source.watchdog.waits)


def completer_of(engine: Engine, rewards: Rewards | None, *of_data: Any) -> Completer | None:
    """What samples completions for the run's objective; None if it reads data alone.

    Raises:
      ConfigError: a reward model has another tokenizer than the data.
    """
    if rollout_objective(engine.program.traced_loss.loss_fn) is None:
        return None
    if rewards is not None:
        rewards.add_models(engine.program)
    return Completer(engine, rewards, *of_data)


def in_steps(source: Source, corpus: Corpus | None) -> Source:
    """The run with run.steps, which follow from run.epochs and the corpus; at least one.

    Without a corpus it is a run that does not train.
    """
    epochs = source.config.run.epochs
    if epochs is None:
        return source
    batches = 0.0 if corpus is None else epochs * corpus.epoch / source.batch_size()
    steps = max(1, math.ceil(round(batches, 6)))
    return replace(source, config=load_config(source.config, [f"run.steps={steps}"]))


def before_step_0(source: Source, engine: Engine, tokenizer: Tokenizer | None) -> BeforeStep0:
    """A fresh engine as it is before a run's step 0, once it has what the run begins with.

    Raises:
      ConfigError: one of its frozen models has another tokenizer than the data.
    """
    folder = source.config.run.init_from
    if source.config.run.import_from is not None and any(
        x.once and not isinstance(x.model, FrozenModelSection)
        for x in engine.program.computed_arrays
    ):
        raise ConfigError("run.import_from: needs the folder of objective.reference_model")
    warm_start = None if folder is None else functools.partial(_warm_start, engine, folder)
    before = BeforeStep0(engine, source.watchdog.tick, warm_start)
    for name, frozen in {**engine.program.frozen, **before.frozen}.items():
        refuse_other_tokenizer(tokenizer, frozen.model.weights, name)
    return before


def _begin(
    engine: Engine,
    checkpointer: Checkpointer,
    init_from: str | None,
    import_first: Callable[[], Reached] | None,
) -> Reached:
    """Restore the newest checkpoint, or begin with another run's; the progress of the run."""
    if not checkpointer.is_empty():
        return restore(engine, checkpointer)
    if import_first is not None:
        return import_first()
    if init_from is not None:
        _warm_start(engine, init_from)
    return Reached()


def _warm_start(engine: Engine, folder: str) -> None:
    """Initialize the weights from another run; values that cannot be used are logged."""
    there = checkpoints_in(folder)
    restored = there.restore(engine.program, weights_only=True, in_place_of=engine.held)
    engine.continue_from(restored)
    log.info("initialized from %s, %s", folder, restored.tag)
    for note in restored.notes:
        log.warning("run.init_from: %s", note)


def _import(engine: Engine, torch_run: TorchRun, corpus: Corpus) -> Reached:
    """Continue a run of DeepSpeed or torch; values that are not taken over are logged."""
    section = engine.config.run.import_from
    table = table_in(section.map) if section and section.map else None
    engine.import_run(torch_run, table)
    step, samples = int(engine.state.step), torch_run.samples or 0
    tokens = torch_run.tokens or samples * (corpus.train.tokens_each or 0)
    return Reached(step=step, tokens=tokens if step else 0)


def _with_opening(reached: Reached, took: float) -> dict[str, float]:
    """Wall time so far, with that of opening the run, which counts as restart if it is resumed."""
    phase = "wall/restart" if reached.step else "wall/other"
    return {**reached.seconds, phase: reached.seconds.get(phase, 0.0) + took}


def checkpointer_of(source: Source) -> Checkpointer:
    run = source.config.run
    return Checkpointer(source.folder.checkpoints, keep=run.keep, keep_every=run.keep_every)


def restore(engine: Engine, checkpointer: Checkpointer) -> Reached:
    """Restore the newest valid checkpoint; the progress of the run."""
    restored = checkpointer.restore(
        engine.program, in_place_of=engine.held, frozen_as_read=engine.frozen_as_read
    )
    engine.continue_from(restored)
    try:
        return Reached(**restored.client_state, rollout=restored.files.get(ROLLOUT))
    except TypeError:
        raise CheckpointError(
            f"checkpoint {restored.tag} was not saved by a run: its client_state holds "
            f"{sorted(restored.client_state) or 'nothing'}"
        ) from None
