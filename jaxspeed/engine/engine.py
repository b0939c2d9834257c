"""The Engine: train state, compiled steps (recompiled, with a warning, for new batch shapes)."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Protocol

import jax
import jax.numpy as jnp

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.checkpoint import Restored
from jaxspeed.config import Config
from jaxspeed.deepspeed_habits import DeepSpeedHabits, PureStep
from jaxspeed.engine import check as checking
from jaxspeed.engine import diagnose as diagnosing
from jaxspeed.engine.calls import Calls
from jaxspeed.engine.gathered import Gathered
from jaxspeed.engine.loaded_adapters import LoadedAdapters
from jaxspeed.engine.logprobs import LogprobPrograms, Logprobs
from jaxspeed.engine.offload_check import asks, check_moves
from jaxspeed.engine.reporter import Reporter
from jaxspeed.engine.rollout_check import RolloutCheck, check_rollout
from jaxspeed.engine.saver import Saver
from jaxspeed.engine.step_from_file import StepFromFile
from jaxspeed.engine.step_profile import StepProfile
from jaxspeed.engine.step_report import compiled_report
from jaxspeed.engine.values import averaged_state, averages_of, parameters_of, with_values
from jaxspeed.errors import ConfigError, JaxspeedError
from jaxspeed.generation import (
    SEGMENT,
    Generated,
    Generation,
    Generator,
    Request,
    Rollout,
    Sampling,
    TextTokenizer,
)
from jaxspeed.generation.messages import Prompt, encoded_messages
from jaxspeed.hlo import CompiledReport
from jaxspeed.interop import ExportSummary, HFForm, save_adapter, save_pretrained
from jaxspeed.interop.mapping import MappingTable
from jaxspeed.interop.pretrained import ends_of, tokenizer_of
from jaxspeed.interop.torch_runs import TorchRun, import_run, read_torch_run
from jaxspeed.jaxpr.paused_collector import paused_collector
from jaxspeed.metrics.start_lines import Showing, not_shown
from jaxspeed.objectives.terms_and_metrics import TOTALS
from jaxspeed.placement.table import PlacementTable
from jaxspeed.train.dispatch_limit import DispatchLimit
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.train.phases import PhasedStep
from jaxspeed.train.program import Metrics, Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.batch_checks import array_of, is_tensor
from jaxspeed.user_models.batches import WithExtra
from jaxspeed.user_models.config_model import image_processor

log = logging.getLogger("jaxspeed")
Batch = Mapping[str, Any] | Any


class Watch(Protocol):
    """The watchdog of a user's own loop."""

    def call(self, name: str, step: int) -> AbstractContextManager[Callable[[Any], None]]: ...
    def compiles(self) -> None: ...
    def opened(self) -> None: ...
    def closed(self) -> None: ...


def watched[E: "Engine", **P, R](
    section: str,
) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """Attribute the time of a method to a section of the watchdog, if the engine has one."""

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @wraps(method)
        def call(self: E, /, *args: P.args, **named: P.kwargs) -> R:
            with self.watching(section) as sent:
                result = method(self, *args, **named)
                if isinstance(result, Mapping) and "loss" in result:  # on its way
                    sent(result["loss"])
                return result

        return call

    return decorate


class Engine(DeepSpeedHabits):
    """Trains one model: `engine.train_batch(batch)` is one optimizer step over a global batch."""

    _held: Mapping[str, Any] = MappingProxyType({})  # what a step's phases read beside the state
    _is_closed = False

    def __init__(self, program: Program, state: TrainState) -> None:
        self._state = state
        self._held = program.held(state)
        self._open(program, int(state.step))

    def _open(self, program: Program, step: int) -> None:
        self.program = program
        path = program.config.run.executable
        if path is not None and len(program.phases) > 1:
            raise ConfigError("run.executable: it holds one program, and a step is several here")
        self._from_file = StepFromFile(program, path) if path is not None else None
        self._reporter = Reporter(program, step)
        self._pace = DispatchLimit(program.mesh.devices.flat[0])
        self._saver = Saver(program)
        self._adapters = LoadedAdapters(program)
        self._call = Calls(program)
        self._phased = PhasedStep(program.phases, self._held) if program.phases_of else None
        before = program.array_phases
        self._before_step = PhasedStep(before, self._held) if before else None
        self._moves_checked = False
        self._gathered = Gathered(program, self._call.processes)
        self._profile = StepProfile(program)
        self._generator: Generator | None = None
        self._logprobs: LogprobPrograms | None = None
        self._closing: list[Callable[[], None]] = []
        self._watch: Watch | None = None

    def watch_with(self, watch: Watch) -> None:
        """Attribute the time of this engine's calls to the sections of a watchdog."""
        self._watch = watch
        watch.opened()
        self.on_close(watch.closed)

    def watching(self, section: str) -> AbstractContextManager[Callable[[Any], None]]:
        """A section of the watchdog; what it yields is called with an output on its way."""
        if self._watch is None:
            return nullcontext(lambda output: None)
        return self._watch.call(section, self._reporter.step)

    @property
    def state(self) -> TrainState:
        """The train state. Assigning another one continues from its step."""
        if tier := self.program.update.tier:
            tier.refuse_lost()
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        if tier := self.program.update.tier:
            tier.refuse_other(int(state.step))
        self._reporter.begin_at(int(state.step))
        self._gathered.drop()
        self._saver.replaced(self._state, state)
        self._state = state

    def continue_from(self, restored: Restored) -> None:
        """Take the state of a checkpoint that was restored for this engine's program."""
        self.state = restored.state
        self._saver.restored(restored)
        self._adapters.restore(restored)

    @property
    def frozen_as_read(self) -> bool:
        """Whether the frozen parameters are those of the folder that the model is read from."""
        return self._saver.frozen_as_read

    @property
    def held(self) -> TrainState | None:
        """The state in this process that loading another one frees."""
        return self._state

    @watched("restore")
    def reset(self) -> None:
        """Replace the state by a freshly initialized one."""
        self.state = self.program.init(self.config.run.seed)
        self._saver.initialized()

    # -- training -------------------------------------------------------------------------------

    @watched("step")
    def train_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """One optimizer step. Metrics are asynchronous arrays: float(m["loss"]) waits for them.

        `extra` is a tree of arrays for `loss_fn(model, batch, extra)`, which are not divided into
        samples: a graph's edges, another network's weights, tables. They stay where they lie.
        """
        self._refuse_training()
        placed = self._place(batch, "train_batch", self.program.batch.train, extra)
        if not self._moves_checked:
            if asks(self.program):
                with paused_collector():
                    check_moves(self.program, placed)
            self._moves_checked = True
        self._profile.begin(self._reporter.step + 1, self._state)
        start = time.perf_counter()
        self._gathered.drop()
        self._call.compile_together(self._step, self.state, placed)
        self._state, metrics = self._call(self._step, self.state, placed)
        self._pace.sent(metrics["loss"])
        self._reporter.stepped(metrics, start)
        compiled = partial(self.compiled, batch, extra)
        self._profile.end(self._reporter.step, metrics, compiled, placed, self._state)
        return metrics

    def _refuse_training(self) -> None:
        """Raise JaxspeedError if the engine is closed, or has no adapter in use."""
        if self._is_closed:
            raise JaxspeedError(
                "engine.train_batch: the engine is closed, and no longer writes metrics or "
                "checkpoints; close it after the last step. engine.wait() waits for all so far"
            )
        self._adapters.in_use("train_batch")
        if tier := self.program.update.tier:
            tier.refuse_lost()

    def eval_batch(self, batch: Batch, extra: Any = None) -> Metrics:
        """The loss of a batch in evaluation mode; its size must be divisible by the data ranks."""
        metrics = self.eval_totals(batch, extra)
        return {name: value for name, value in metrics.items() if name != TOTALS}

    @watched("evaluate")
    def eval_totals(self, batch: Batch, extra: Any = None) -> Metrics:
        """As `eval_batch`, with a `Metric` of each that a mean over batches would not combine."""
        once = self._gathered.now()
        placed = self._place(batch, "evaluating" if once else "eval_batch", None, extra)
        placed = self._with_arrays(placed)
        state: Any = once.shapes if once else self.state
        evaluate = (once or self.program).evaluate
        self._call.compile_together(evaluate, state, placed)
        if once:
            state = self._call(self._gathered.of, self.state)
        metrics: Metrics = self._call(evaluate, state, placed)
        self._pace.sent(metrics["loss"])
        return metrics

    @watched("evaluate")
    def with_computed_arrays(self, batch: Batch) -> Any:
        """A batch with the arrays that its objective computes before a step."""
        return self._with_arrays(self._place(batch, "eval_batch", None))

    def _with_arrays(self, batch: Any) -> Any:
        if not self._before_step:
            return batch
        self._call.compile_together(self._before_step, self._state, batch)
        return self._call(self._before_step.batch, self._state, batch)

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of several calls of `eval_batch` with the same parameters.

        Under ZeRO 3 and `offload_param` each call gathers them; in this context they are gathered
        once, if they and the train state fit into half of a device's memory, and freed at its end.
        Pipelines gather as always. On several processes each has to enter it.
        """
        return self._gathered.evaluating()

    @watched("evaluate")
    def logprobs(
        self,
        batch: Batch,
        reference: bool = False,
        temperature: float = 1.0,
        entropy: bool = False,
        is_top: bool = False,
        mean_logit: bool = False,
    ) -> Logprobs:
        """The log-probability of each target of a batch of tokens, and more on request.

        In evaluation mode, of any number of rows that the data ranks divide; a mesh's pipeline
        stages do not run as stages. `evaluating` is a context for several calls.

        Args:
          batch: `tokens` [batch, seq + 1] with the other arrays of `models/language.py`.
          reference: of the base, without the adapters that `lora` trains.
          temperature: divides the logits.
          entropy, is_top, mean_logit: whether to compute these for each token too.

        Raises:
          ConfigError: the model predicts no next tokens, or the base's own values are not known.
        """
        program, state = self.runnable
        if self._logprobs is None or self._logprobs.program is not program:
            call = self._call if program is self.program else Calls(program)
            self._logprobs = LogprobPrograms(program, call)
        once = self._gathered.now()
        requests = {
            "temperature": float(temperature),
            "entropy": entropy,
            "is_top": is_top,
            "mean_logit": mean_logit,
        }
        read: Any = self._call(self._gathered.of, state) if once else state
        computed = self._logprobs(read, batch, once, reference, requests)
        self._pace.sent(computed.sums)
        return computed

    @property
    def gather_once(self) -> GatherOnce | None:
        """How `evaluating` gathers parameters; None where it gathers none."""
        return self._gathered.for_evaluation()

    @property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The compiled step as a function: `state, metrics = step(state, batch)`.

        It donates its state.

        Raises:
          JaxspeedError: a step is several programs.
        """
        names = ", ".join(phase.name for phase in self.program.phases)
        if len(self.program.phases) > 1:
            raise JaxspeedError(
                f"engine.step: a step is several programs here ({names}), so there is no one "
                "function; call engine.train_batch"
            )
        return PureStep(self._step)

    @property
    def _step(self) -> Any:
        return self._from_file or self._phased or self.program.step

    def add_hook(self, fn: Callable[[int, dict[str, float]], Any], every: int = 1) -> None:
        """Call `fn(step, metrics)` every `every` steps, with metrics as numbers.

        Training does not wait: a step's hooks are called once its metrics have arrived, some steps
        later, and the last ones in `wait` or `close`.
        """
        self._reporter.add_hook(fn, every)

    @watched("save")
    def wait(self) -> None:
        """Wait for all steps and saves so far, and log what is pending."""
        self._reporter.flush()
        if self._phased:
            self._phased.wait()
        arrays = jax.tree.leaves(self._state)
        jax.block_until_ready([x for x in arrays if not x.is_deleted()])  # by a step that failed
        self._saver.wait()

    @watched("save")
    def close(self) -> None:
        """Wait, stop saving in the background, and close what writes metrics; ends training."""
        self.wait()
        self._saver.close()
        while self._closing:
            self._closing.pop()()
        if tier := self.program.update.tier:
            tier.close()
        self._is_closed = True

    def on_close(self, fn: Callable[[], None]) -> None:
        """Call `fn` in `close`, after the last hooks."""
        self._closing.append(fn)

    def _place(self, batch: Batch, what: str, size: int | None, extra: Any = None) -> Any:
        self.program.refuse_missing(batch)
        placed = self._call.place(batch, what, size, self._not_donated(extra))
        if self._call.new_shapes and self._watch is not None:
            self._watch.compiles()
        return placed

    def _not_donated(self, extra: Any) -> Any:
        """Extra arrays, with copies of those that the state holds: the step donates its state."""
        held = set() if extra is None else set(map(id, jax.tree.leaves(self.held)))
        return jax.tree.map(lambda x: jnp.copy(x) if id(x) in held else x, extra)

    # -- checkpoints ----------------------------------------------------------------------------

    @watched("save")
    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool | None = None,
    ) -> str:
        """Start saving a checkpoint of the current state in the background, and return its tag.

        `wait` waits for it and raises its errors. `exclude_frozen_parameters` is by default that of
        the config's section `checkpoint`.

        Raises:
          CheckpointError: frozen parameters are to be left out, which could not be read again.
        """
        return self._saver.save(
            self.state, directory, tag, client_state, exclude_frozen_parameters, self._adapters
        )

    def excludes_frozen(self) -> bool:
        """Whether checkpoints have only what is trained: a frozen base in a folder stays there.

        By default with adapters; `checkpoint.exclude_frozen_parameters` decides otherwise. Frozen
        parameters that are not as they were read are always saved.
        """
        return self._saver.excludes_frozen()

    @watched("restore")
    def load_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        *,
        weights_only: bool = False,
        renames: Mapping[str, str] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Restore a checkpoint that was saved on any mesh; returns (its tag, its client_state).

        Without a tag the newest intact one; (None, {}) and a warning if there is none. With
        `weights_only` the optimizer and the step start anew, and omitted values are logged;
        `renames` maps paths of the checkpoint to the model's. The current state is freed first: the
        devices never hold two.
        """
        self._adapters.in_use("load_checkpoint")
        self._gathered.drop()
        restored = self._saver.load(directory, tag, weights_only, renames, self.held)
        if restored is None:
            log.warning("%s holds no checkpoint: the state stays as it is", directory)
            return None, {}
        self.continue_from(restored)
        for note in restored.notes:
            log.warning("checkpoint %s: %s", restored.tag, note)
        return restored.tag, restored.client_state

    @watched("restore")
    def import_run(
        self,
        source: str | Path | TorchRun,
        table: MappingTable | Callable[[Any], MappingTable] | None = None,
    ) -> None:
        """Continue a run of DeepSpeed or torch, with its optimizer, from a folder.

        What is not taken over is logged. `table` says which tensors are which parameters, by
        default as the model's family does.

        Raises:
          CheckpointError, PretrainedError: it is of another model or optimizer, or damaged.
        """
        self._adapters.in_use("import_run")
        self._gathered.drop()
        run = source if isinstance(source, TorchRun) else read_torch_run(source)
        restored = import_run(self.program, run, table, self.state)
        self.continue_from(restored)
        for note in restored.notes:
            log.warning("imported %s: %s", run.folder, note)

    @watched("save")
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        form: HFForm | None = None,
        ema: bool = False,
        merge: bool = False,
    ) -> ExportSummary:
        """Write the parameters to a Hugging Face folder, with config.json and the tokenizer.

        Called on every process. `dtype` is fp32, bf16 or fp16, by default that of the update; a
        `form` is needed where the model is neither of a family nor pretrained. With `ema` the
        moving averages are written in their place, and with `merge` the weights with their
        adapters.
        """
        state = self.averaged if ema else self.state
        return save_pretrained(self.program, state, folder, dtype=dtype, form=form, merge=merge)

    @watched("save")
    def load_adapter(self, folder: str | Path, name: str) -> None:
        """Read an adapter that PEFT or jaxspeed saved, for `use_adapter(name)`.

        Its weights, ranks and alphas, and what it has beside them (magnitudes, saved modules,
        biases), have to be those of the config's section `lora`.

        Raises:
          ConfigError, PretrainedError: it is of another config or of another model.
        """
        self._adapters.load(folder, name)

    def use_adapter(self, name: str | None) -> None:
        """Train, evaluate and generate with an adapter of `load_adapter` from now on.

        None is the base alone, for evaluation and generation until the next call.

        The one in use is kept, with its moments and moving averages, as checkpoints keep it too;
        that of the start has the name "default". One that was never in use starts with fresh
        moments. The step and the schedules that count it are the run's.

        Raises:
          ConfigError: no adapter of this name is loaded, or what the base had in place of trained
            parameters is not known.
        """
        if name != self._adapters.used:
            self.state = self._adapters.exchange(self.state, name)

    def save_adapter(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        form: HFForm | None = None,
        ema: bool = False,
    ) -> ExportSummary:
        """Write the adapters to a folder that PEFT loads, and `lora.adapter` here.

        Called on every process; arguments are those of `save_pretrained`. Where the model has no
        form in Hugging Face's format, only `lora.adapter` reads the folder.
        """
        self._adapters.in_use("save_adapter")
        state = self.averaged if ema else self.state
        return save_adapter(self.program, state, folder, dtype=dtype, form=form)

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], tokens: int = 100, **options: Any
    ) -> list[Generated]:
        """Continue each prompt by at most `tokens` tokens, with the current parameters.

        Prompts are texts, lists of tokens or lists of messages, which may have images, of any
        lengths; an answer to messages ends as their chat template ends a turn. On several processes
        it is called on each, with equal arguments. `options` are those of `stream`.
        """
        return self.stream(prompts, tokens, steps=SEGMENT, **options).finish()

    @watched("generate")
    def stream(
        self,
        prompts: Sequence[Prompt],
        tokens: int = 100,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        context: int | None = None,
        tokenizer: TextTokenizer | None = None,
        steps: int = 1,
    ) -> Generation:
        """`generate`, as an iterator of pieces: (number of the prompt, new text, token).

        Args:
          temperature: 0 takes the most likely token.
          top_k, top_p, min_p, repetition_penalty: see `jaxspeed.generation.Sampling`.
          stop: texts before which a text ends; it also ends where the tokenizer's document does.
          stop_tokens: tokens before which it ends too, as the end of a turn in a chat.
          seed: prompt i draws from `fold_in(key(seed), i)`, whatever else is in the batch.
          context: tokens that the model sees at most, by default its max_position_embeddings; a
            longer text is continued from its last half.
          tokenizer: with `encode` and `decode`; by default that of a pretrained model's folder.
          steps: tokens that a piece has at most.

        Raises:
          ConfigError: an argument that is not allowed, before anything is compiled.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        state, generator = self._generates()
        tokenizer = tokenizer or tokenizer_of(generator.program.model.weights)
        images = image_processor(self.config, generator.program.source.model)
        encoded, turn = encoded_messages(prompts, tokenizer, self.config.data, images)
        stop, stop_tokens = [*stop, *turn.texts], [*stop_tokens, *turn.tokens]
        request = Request(encoded, tokens, sampling, stop, seed, context, tokenizer, stop_tokens)
        generation = generator.start(state, request, steps)
        generation.batching.around = partial(self.watching, "generate")
        return generation

    def rollout(
        self,
        prompts: Sequence[Prompt],
        tokens: int = 512,
        *,
        generations: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        seed: int | None = None,
        step: int | None = None,
        context: int | None = None,
        tokenizer: TextTokenizer | None = None,
        tick: Callable[[], Any] = lambda: None,
        **layout: int | None,
    ) -> Rollout:
        """Sample completions of many prompts, with log-probabilities, from the current parameters.

        Finished rows are refilled. A completion has at most `tokens` tokens, of which the last may
        be an end: the tokenizer's, those of the folder's generation_config.json, or `stop_tokens`.
        A prompt may be a list of messages, whose answer ends as its chat template ends a turn.
        Prompts that exceed the context with so many tokens are dropped. Arguments that are not
        below are those of `stream`; on several processes they are equal.

        Args:
          generations: completions of each prompt.
          repetition_penalty: refused, unless it is 1.
          seed, step: tokens are drawn from `fold_in` of the seed's key with the step, the numbers
            of prompt and generation, and that of the token; by default the run's.
          tick: called before each segment, on all processes alike; it may raise.
          layout: `segment`, the tokens after which texts are looked at (8 on CPUs, 32 elsewhere);
            `block`, the rows that a device computes together (8 on CPUs, 64 elsewhere), on which
            bits depend; `groups` of such rows with caches of their own (1 on CPUs, 2 elsewhere).

        Raises:
          ConfigError: an argument that is not allowed, or no prompt fits into the context.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        state, generator = self._generates()
        weights = generator.program.model.weights
        tokenizer = tokenizer or tokenizer_of(weights)
        seed = self.config.run.seed if seed is None else seed
        encoded, turn = encoded_messages(prompts, tokenizer, self.config.data)
        stop, stop_tokens = [*stop, *turn.texts], [*stop_tokens, *turn.tokens]
        request = Request(encoded, tokens, sampling, stop, seed, context, tokenizer, stop_tokens)

        def around() -> AbstractContextManager[Any]:
            tick()
            return self.watching("rollout")

        return generator.rollout(
            state,
            request,
            ends_of(weights),
            generations=generations,
            step=self._reporter.step if step is None else step,
            around=around,
            **layout,
        )

    def _generates(self) -> tuple[TrainState, Generator]:
        """(the state of the model that runs, its generator)."""
        program, state = self.runnable
        if self._generator is None or self._generator.program is not program:
            self._generator = Generator(program, once=self._gathered.once(program))
        return state, self._generator

    # -- inspection -----------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The validated settings."""
        return self.program.config

    @property
    def placements(self) -> PlacementTable:
        """The placement table: sharding and memory of every array of the state."""
        return self.program.table

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """The parameters by path on the devices, decoded and unpadded, in the dtype of the update.

        Offloaded ones are copied to the devices.
        """
        return parameters_of(self.program, self.state)

    @parameters.setter
    def parameters(self, values: Mapping[str, Any]) -> None:
        """Replace the parameters at these paths; the optimizer's state and the step stay.

        Magnitudes of DoRA that are not given are measured again where their weights are.
        """
        self.state = with_values(self.program, self.state, values)

    @property
    def ema_parameters(self) -> dict[str, jax.Array]:
        """The moving averages of the parameters (`optimizer.ema_decay`), like `parameters`.

        Those that are not trained are as they are.

        Raises:
          ConfigError: the config keeps no moving average.
        """
        return averages_of(self.program, self.state)

    @property
    def averaged(self) -> TrainState:
        """The state with the moving averages as parameters, of which one at a time is on devices.

        Raises:
          ConfigError: the config keeps no moving average.
        """
        return averaged_state(self.program, self.state)

    @property
    def runnable(self) -> tuple[Program, TrainState]:
        """A program and a state for running the model."""
        return self.program, self.state

    @property
    def module(self) -> Any:
        """The model with the current parameters, in evaluation mode; valid until the next step.

        A Flax module, or for Linen modules and pairs a callable with the same interface. Its
        parameters cannot be edited, as the engine would not see it: assign `engine.parameters`.
        """
        return self._bound(self.program, self.parameters, self.state.variables)

    @staticmethod
    def _bound(program: Program, parameters: Mapping[str, Any], variables: Any) -> Any:
        model, values = program.model, dict(parameters)
        if isinstance(model, AdaptedModel):  # outside of a traced loss, no product is adapted
            values = model.merged(values)
        bound = model.bind(values, variables, train=False, step=0, micro=0)
        program.model.protect(bound)
        return bound

    @watched("compile")
    def compiled(
        self,
        batch: Batch,
        extra: Any = None,
        *,
        meanwhile: Callable[[], None] | None = None,
        showing: Showing = not_shown,
    ) -> CompiledReport:
        """Bytes, flops and collectives of the compiled step for a batch of these shapes.

        `meanwhile` is called while it compiles, if that takes more than a second; `showing` shows
        its phases.
        """
        with self.program.set_mesh():
            return compiled_report(self.program, batch, self._from_file, extra, meanwhile, showing)

    def check_rollout(self, rollout: Rollout) -> RolloutCheck:
        """Compare the sampler's log-probabilities of a rollout with those of training.

        Both are of the current parameters, which have to be those that drew it.
        """
        with self.evaluating():
            return check_rollout(rollout, self.logprobs, self.program)

    @watched("compile")
    def check(self, batch: Batch, extra: Any = None, **smaller: Any) -> checking.CheckReport:
        """Compare this step with the same step on one device, from the current state.

        The state is unchanged. If the model does not fit one device, `layers=2` (models named by
        the config) or `model=<a smaller factory>` checks a smaller one, freshly initialized.
        """
        self.program.refuse_missing(batch)
        read = self.program.read_batch(batch, self.program.batch.train, extra)
        user_batch = jax.tree.map(
            lambda x: jnp.asarray(array_of(x, "batch") if is_tensor(x) else x),
            batch if extra is None else WithExtra(batch, extra),
        )
        with self.program.set_mesh():
            return checking.check(
                self.program,
                self.state,
                read,
                self.reduced_by,
                self._held,
                as_given=user_batch,
                **smaller,
            )

    def reduced_by(self, program: Program, held: Mapping[str, Any]) -> checking.Reduced:
        """The function that computes a batch's reduced gradients as this engine does.

        `held` are the values that phases of such a program read beside state and batch.
        """
        return checking.reduced_by_one(program, held)

    @watched("evaluate")
    def diagnose(self, batch: Batch, extra: Any = None) -> diagnosing.Diagnosis:
        """The first non-finite input, parameter, layer or gradient for this batch."""
        self.program.refuse_missing(batch)
        batch = self.program.read_batch(batch, self.program.batch.train, extra)
        placed = jax.device_put(batch, self.program.batch_shardings(batch))
        placed = self._with_arrays(placed)
        with self.program.set_mesh():
            return diagnosing.diagnose(self.program, self.state, placed)
