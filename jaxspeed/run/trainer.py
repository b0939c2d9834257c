"""The step loop of a run: training, evaluation, checkpoints, recovery, stopping."""

import contextlib
import functools
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import jax

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.checkpoint import Checkpointer
from jaxspeed.checkpoint.process_agreement import is_first
from jaxspeed.config import Config
from jaxspeed.data import Corpus, Feeder, placer
from jaxspeed.engine import Engine
from jaxspeed.engine.reporter import took_nonfinite_loss
from jaxspeed.errors import CheckpointError, DivergedError, JaxspeedError, StateLostError
from jaxspeed.launch.variables import report_progress
from jaxspeed.metrics import counted_tokens
from jaxspeed.run.evaluation import compile_evaluation, evaluate
from jaxspeed.run.folder import RunFolder
from jaxspeed.run.lm_eval_tasks import evaluate_tasks
from jaxspeed.run.rollouts import (
    ROLLOUT,
    Completer,
    RolloutFeeder,
    RolloutStopped,
    evaluate_prompts,
)
from jaxspeed.run.sampling import FinalSample
from jaxspeed.run.signals import StopRequest
from jaxspeed.run.step_records import Recorder

log = logging.getLogger("jaxspeed")

# A step's metrics are read this many steps later. Fixed, so all processes take the same decision at
# the same step; large enough that the host does not wait for the devices.
LAG = 8
LOSSES_IN_A_ROW = 3  # losses of the state without a new step in between


@dataclass
class Reached:
    """Progress of a run. With the train state, this is all that resumption needs."""

    step: int = 0
    tokens: int = 0
    train_loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None  # of eval_loss
    seconds: dict[str, float] = field(default_factory=dict)  # of wall time, by phase
    nonfinite_losses: int = 0  # of steps that were taken nevertheless
    plain_prompts: bool = False  # of its data (`Corpus`): a chat prompts the model likewise
    rollout: bytes | None = None  # that later steps need; a file of a checkpoint


class Pending(NamedTuple):
    """A step whose metrics have not been read yet."""

    step: int
    metrics: Any
    tokens: int  # total number so far
    tokens_here: int  # of the step
    of_rollout: Mapping[str, float]  # further metrics


@dataclass
class Trainer:
    """Trains until the last step, a signal, or a loss that stays non-finite."""

    engine: Engine
    corpus: Corpus
    folder: RunFolder
    checkpointer: Checkpointer
    recorder: Recorder
    files: dict[str, bytes]  # saved with each checkpoint
    begin: Callable[[], Reached]  # restores the newest checkpoint into a fresh engine
    reached: Reached = field(default_factory=Reached)
    stopped_by: str | None = None
    sample: FinalSample | None = None  # for a run that shows one at its end
    completer: Completer | None = None  # for an objective of sampled completions

    def __post_init__(self) -> None:
        self.config: Config = self.engine.config
        self.steps = self.config.run.steps or 0
        self._pending: deque[Pending] = deque()
        self._bad_in_a_row = 0
        self._saved = self.reached.step  # the step of the newest checkpoint; 0 needs none
        self._profiling = self._diverged = False
        self._losses, self._lost_at = 0, -1  # losses of the state: in a row, step of the last
        self._evaluation_compiled: Callable[[], Any] | None = None
        self._rollouts: RolloutFeeder | None = None
        reads_data = self.completer is None and self.corpus.held_out is not None
        if reads_data and self.reached.step < self.steps:
            assert self.corpus.held_out is not None
            self._evaluation_compiled = compile_evaluation(self.engine, self.corpus.held_out)
        self._stop = StopRequest()
        if self.completer is not None:
            self.completer.stop = self._asked_to_stop
            self.completer.stop_here = lambda: self._stop.signal is not None
        self._watchdog = self.recorder.watchdog
        self._watchdog.tick(self.reached.step)

    def run(self) -> Reached:
        """Run the remaining steps, then evaluate and save a checkpoint."""
        watched = self._watchdog.section("step")
        with StopRequest(self._watchdog) as self._stop, self.recorder, watched:
            while True:
                try:
                    self._train()
                    return self.reached
                except StateLostError as lost:
                    self._recover(lost)
                except Exception:
                    self.folder.check()  # its removal is the cause of what failed
                    raise

    def _train(self) -> None:
        """Train from the current step to the end."""
        with self._feeder() as feeder:
            try:
                while not self._asked_to_stop():
                    if self._evaluation_is_due():
                        self._evaluate()
                    if self._checkpoint_is_due():
                        self._save()
                    if self.reached.step >= self.steps:
                        break
                    self._step(feeder)
                self._read_all()
                if self._profiling:
                    self._end_profile()
            except StateLostError:  # there is nothing left to save
                raise
            except BaseException as error:
                self._watchdog.failed(error)  # before anything that waits for other processes
                self._save_after_error()
                raise
            try:
                self._save()
                if self.sample is not None and self.stopped_by is None:
                    with self.recorder.phase("evaluate"):
                        self.sample.draw()
                if self.has_adapters and self.stopped_by is None:
                    self._write_adapters()
            finally:
                with self.recorder.phase("checkpoint"):
                    self.checkpointer.wait()

    @property
    def has_adapters(self) -> bool:
        return isinstance(self.engine.program.model, AdaptedModel)

    def _write_adapters(self) -> None:
        """Write the adapters of a run that ends in PEFT's format, beside its checkpoint."""
        folder = self.folder.adapter
        try:
            with self.recorder.phase("checkpoint"):
                if is_first():  # those of an earlier end
                    shutil.rmtree(folder, ignore_errors=True)
                self.engine.save_adapter(folder)
        except (JaxspeedError, OSError) as error:
            log.warning("%s was not written: %s", folder, str(error).splitlines()[0])

    def _recover(self, lost: StateLostError) -> None:
        """Go back to the newest checkpoint, or to step 0: the current state is lost."""
        self._pending.clear()
        was = self.reached
        self._losses = self._losses + 1 if was.step <= self._lost_at else 1
        self._lost_at = max(was.step, self._lost_at)
        if self._losses > LOSSES_IN_A_ROW:
            raise lost
        with self.recorder.phase("restart"):
            with contextlib.suppress(CheckpointError):  # of an earlier save: older ones are intact
                self.checkpointer.wait()
            self.engine.reset()
            self.reached = self.begin()
        self._saved = self.reached.step
        log.warning("step %d: %s; the run resumes after step %d", was.step, lost, self.reached.step)
        self.recorder.back_to(self.reached.step)

    def _evaluation_is_due(self) -> bool:
        step, every = self.reached.step, self.config.run.eval_every
        if step == 0 or self.reached.eval_step == step:
            return False
        return step >= self.steps or (every is not None and step % every == 0)

    def _checkpoint_is_due(self) -> bool:
        tenth = min(max(self.steps // 10, 1), 1000)
        return self.reached.step % (self.config.run.checkpoint_every or tenth) == 0

    def _asked_to_stop(self) -> bool:
        self._watchdog.tick(self.reached.step)
        if self.stopped_by is None and self._stop.agreed():
            signal = self._stop.signal
            assert signal is not None
            self.stopped_by = signal.name
        return self.stopped_by is not None

    # -- a step ---------------------------------------------------------------------------------

    def _step(self, feeder: Feeder | RolloutFeeder) -> None:
        self.folder.check()
        if isinstance(feeder, RolloutFeeder):
            if feeder.is_used_up:  # the devices are about to be waited for
                self._read_all()
            try:
                batch, tokens, of_rollout = next(feeder)
            except RolloutStopped:
                return
        else:
            with self.recorder.phase("data"):
                batch, _ = next(feeder)
            tokens, of_rollout = self._tokens_a_step, {}
        step, begun = self.reached.step + 1, time.perf_counter()
        if step == self.config.run.profile_step:
            self._profiling = True
            jax.profiler.start_trace(str(self.folder.profile))
        with self.recorder.phase("compute"):
            metrics = self.engine.train_batch(batch)
        self._watchdog.sections.stepped(time.perf_counter() - begun)
        self.recorder.sent(metrics["loss"])
        self.reached.step, self.reached.tokens = step, self.reached.tokens + tokens
        self._pending.append(Pending(step, metrics, self.reached.tokens, tokens, of_rollout))
        if len(self._pending) > LAG:
            self._read(1)
        if self._profiling and step >= self._last_profiled:
            self._end_profile()

    @property
    def _last_profiled(self) -> int:
        run = self.config.run
        return (run.profile_step or 0) + run.profile_steps - 1

    def _end_profile(self) -> None:
        self._read_all()
        jax.profiler.stop_trace()
        self._profiling = False

    def _read(self, count: int) -> None:
        """Wait for the oldest steps, and report them."""
        steps = [self._pending.popleft() for _ in range(count)]
        with self.recorder.phase("compute"):
            values = jax.device_get([step.metrics for step in steps])
        paces = self.recorder.arrived([step.tokens_here for step in steps])
        for (step, _, tokens, _, more), metrics, pace in zip(steps, values, paces, strict=True):
            numbers = {**more} | {name: float(x) for name, x in metrics.items()}
            self.reached.nonfinite_losses += took_nonfinite_loss(numbers)
            numbers["nonfinite_losses"] = self.reached.nonfinite_losses
            self.recorder.record(step, numbers, tokens, pace)
            self.reached.train_loss = numbers["loss"]
            bad = bool(numbers["skipped"]) or not math.isfinite(numbers["loss"])
            self._bad_in_a_row = self._bad_in_a_row + 1 if bad else 0
            if self._bad_in_a_row >= self.config.run.max_skipped:
                self._give_up(step)

    def _read_all(self) -> None:
        if self._pending:
            self._read(len(self._pending))

    def _give_up(self, step: int) -> None:
        self._diverged = True
        with self.recorder.phase("other"):
            size = self.engine.program.batch.train
            if self._rollouts is not None:
                batch = self._rollouts.batch
            else:
                read = functools.partial(self.corpus.train.batch, step - 1, size)
                batch = placer(self.engine.program.batch_shardings, size)(read)
            diagnosis = self.engine.diagnose(batch)
        self.checkpointer.wait()
        newest = self.checkpointer.latest()
        raise DivergedError(
            f"step {step}: the loss or the gradients were not finite in {self._bad_in_a_row} steps "
            f"in a row (run.max_skipped). Diagnosis with the current parameters: {diagnosis}. "
            + (f"The newest checkpoint is {newest}." if newest else "There is no checkpoint yet.")
        )

    # -- between steps --------------------------------------------------------------------------

    def _evaluate(self) -> None:
        held_out, tasks = self.corpus.held_out, self.config.run.eval_tasks
        if held_out is None and not tasks:
            return
        if self.sample is not None and self.reached.step >= self.steps:
            with self.recorder.phase("evaluate"):
                self.sample.start()
        self._read_all()
        means = dict[str, float]()
        with self.recorder.phase("evaluate"):
            if self._evaluation_compiled is not None:
                self._evaluation_compiled()
            most = self.config.run.eval_batches
            if held_out is not None and self.completer is not None:
                of_prompts = held_out, self.reached.step, most, self._asked_to_stop
                try:
                    evaluated = evaluate_prompts(self.completer, *of_prompts)
                except RolloutStopped:
                    evaluated = None
            elif held_out is not None:
                evaluated = evaluate(self.engine, held_out, most, self._asked_to_stop)
            if held_out is not None:
                if evaluated is None:
                    return
                means |= evaluated.means
                self.reached.eval_loss = means.get("loss")
            if tasks:
                of_data = self.corpus.tokenizer, tasks, self.corpus.context
                scores = evaluate_tasks(self.engine, *of_data, self._asked_to_stop)
                if scores is None:
                    return
                means |= scores
        self.reached.eval_step = self.reached.step
        self.recorder.evaluated(self.reached.step, means)

    def save(self) -> None:
        """Save the current step, and wait until it is written."""
        self._saved = -1
        self._save()
        self.checkpointer.wait()

    def _save(self) -> None:
        """Save the current step, unless it is saved, in the background of training."""
        self.folder.check()
        if self._saved == self.reached.step:
            return
        self._read_all()  # the records of all earlier steps must be written
        self.reached.seconds = self.recorder.seconds
        self.reached.plain_prompts = self.corpus.plain_prompts
        at = self.reached.step
        self.reached.rollout = self._rollouts.in_use(at) if self._rollouts else None
        progress, files = asdict(self.reached), self.files
        if (rollout := progress.pop("rollout")) is not None:
            files = files | {ROLLOUT: rollout}
        with self.recorder.phase("checkpoint"):
            try:
                self.checkpointer.wait()
            except CheckpointError as error:  # of the previous save: the current state is valid
                self.folder.check()
                log.warning("the previous checkpoint could not be saved: %s", error)
            else:
                report_progress(self._saved)
            self.checkpointer.save(
                self.engine.program,
                self.engine.state,
                client_state=progress,
                files=files,
                exclude_frozen=self.engine.excludes_frozen(),
            )
        self._saved = self.reached.step
        self.recorder.saved(self.reached.step)

    def _save_after_error(self) -> None:
        """Save the completed steps after an error, if possible.

        With several processes the others do not know of the error, and a save needs them all.
        """
        try:
            try:
                if jax.process_count() == 1 and not self._diverged:
                    self._save()
            finally:
                self.checkpointer.wait()
        except Exception as error:
            self.folder.check()  # its removal is the only error to report
            log.warning("step %d could not be saved: %s", self.reached.step, error)

    @functools.cached_property
    def _tokens_a_step(self) -> int:
        program, samples = self.engine.program, self.corpus.train
        counted = counted_tokens(program, samples.shapes(1))
        return program.batch.train * ((samples.tokens_each or 0) if counted is None else counted)

    # -- batches --------------------------------------------------------------------------------

    def _feeder(self) -> Feeder | RolloutFeeder:
        if self.completer is not None:
            say = self.recorder.progress.say
            at = self.reached.step, self.reached.rollout
            self._rollouts = RolloutFeeder(self.completer, *at, self.folder.path, say)
            return self._rollouts
        program, data = self.engine.program, self.config.data
        size = program.batch.train
        place = placer(program.batch_shardings, size)
        step = self.reached.step
        return Feeder(self.corpus.train, size, place, start_step=step, prefetch=data.prefetch)

    def close(self) -> None:
        """Release the run's folder."""
        if self.completer is not None and self.completer.rewards is not None:
            self.completer.rewards.close()
        self.checkpointer.close()
        self.folder.close()

    def example(self) -> Any:
        """The shapes of a batch."""
        shapes = self.corpus.train.shapes(self.engine.program.batch.train)
        return shapes if self.completer is None else self.completer.example(shapes)
