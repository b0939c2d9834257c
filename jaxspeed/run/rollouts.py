"""Batches of completions that the model samples while it trains, and that rewards score.

A rollout serves one step, or several: `slices` of its rows, in `iterations` passes. It follows from
the parameters that draw it, the seed and the step: so a run that resumes at its first step draws it
again, and one that resumes later reads it from the checkpoint.
"""

import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from rich.text import Text

from jaxspeed.axes import PIPE
from jaxspeed.checkpoint.process_agreement import is_first
from jaxspeed.config.batch import Batch
from jaxspeed.data import Split, Tokenizer, placer
from jaxspeed.data.feeder import reader
from jaxspeed.data.model_limits import limits_of
from jaxspeed.data.prompts import PromptRecord
from jaxspeed.engine import Engine
from jaxspeed.errors import CheckpointError, RunError
from jaxspeed.generation import Rollout, Sampling
from jaxspeed.generation.messages import EndOfTurn, encoded_messages
from jaxspeed.generation.rollout import SampledCompletion
from jaxspeed.generation.text import end_of
from jaxspeed.interop.pretrained import ends_of
from jaxspeed.metrics.sinks import JsonlSink
from jaxspeed.objectives import Objective, objective_of
from jaxspeed.objectives.model_logprobs import ROUTING, THRESHOLDS
from jaxspeed.objectives.policy_gradient import ADVANTAGES, OLD, REFERENCE, SAMPLED, WEIGHTS, Rloo
from jaxspeed.objectives.terms_and_metrics import TOTALS, Mean
from jaxspeed.ops.next_tokens import IGNORED
from jaxspeed.ops.vocabulary_parallel import NO_THRESHOLD
from jaxspeed.rewards.advantages import advantages, completion_metrics, row_weights, totals_of
from jaxspeed.rewards.rollout_function import RolloutFunction, RolloutTrainer, SampledRow
from jaxspeed.rewards.scoring import RewardRow, Rewards, RewardTable, TrainerProgress
from jaxspeed.run.evaluation import Evaluated
from jaxspeed.user_models.config_model import sizes_of

ROLLOUT = "rollout.npz"  # a file of a checkpoint
COMPLETIONS = "completions.jsonl"
SAY_SECONDS = 60.0
Arrays = dict[str, np.ndarray]


class RolloutStopped(Exception):
    """A rollout was given up because the run is to stop."""


class StepBatch(NamedTuple):
    """What a step trains on.

    Attributes:
      arrays: on the devices.
      tokens: of prompts and completions.
      metrics: of the rollout.
    """

    arrays: Any
    tokens: int
    metrics: Mapping[str, float]


def rollout_objective(loss_fn: Callable[..., Any]) -> Objective | None:
    """The objective whose loss this is, if it samples completions."""
    objective = objective_of(loss_fn)
    return objective if objective is not None and objective.records == "prompts" else None


class RolloutSteps(NamedTuple):
    """How many steps a rollout serves, and with what.

    Attributes:
      rows: of a step, which are completions.
      generations: of a prompt.
      slices: into which a rollout's rows are divided.
      iterations: passes over them.
    """

    rows: int
    generations: int
    slices: int
    iterations: int

    @classmethod
    def of(cls, options: Any, batch: Batch) -> "RolloutSteps":
        """Those of an objective's options."""
        micro = options.steps_per_generation or batch.accumulation
        counts = (getattr(options, name, 1) for name in ("num_generations", "num_iterations"))
        generations, iterations = counts
        return cls(batch.train, generations, micro // batch.accumulation, iterations)

    @property
    def steps(self) -> int:
        return self.slices * self.iterations

    @property
    def prompts(self) -> int:
        return self.rows * self.slices // self.generations


@dataclass(frozen=True)
class ScoredRollout:
    """Completions of prompts, and what follows from their rewards.

    Attributes:
      first: the number of steps before those that it serves.
      arrays: of its rows, as the objective names them.
      tokens: of each row.
      metrics: their means.
    """

    first: int
    arrays: Arrays
    tokens: np.ndarray
    metrics: dict[str, float]

    def to_bytes(self) -> bytes:
        data = io.BytesIO()
        about = json.dumps({"first": self.first, "metrics": self.metrics})
        arrays: Any = {f"array/{name}": x for name, x in self.arrays.items()}
        np.savez_compressed(data, about=np.array(about), tokens=self.tokens, **arrays)
        return data.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ScoredRollout":
        with np.load(io.BytesIO(data)) as saved:
            about = json.loads(str(saved["about"]))
            names = [name for name in saved.files if name.startswith("array/")]
            arrays = {name.removeprefix("array/"): saved[name] for name in names}
            return cls(about["first"], arrays, saved["tokens"], about["metrics"])


@dataclass(frozen=True)
class RolloutRows:
    """Completions of prompts, before they are scored.

    Attributes:
      records: the prompt of each completion.
      prompts: its number among the rollout's.
      arrays: a row for each completion.
      names: of those that a step reads.
      columns: further ones of each, if a function has sampled them.
    """

    rollout: Rollout
    records: Sequence[PromptRecord]
    prompts: Sequence[int]
    arrays: Arrays
    names: set[str]
    columns: Sequence[Mapping[str, Any]]

    @property
    def read(self) -> Arrays:
        """The arrays that a step reads, as far as they are known."""
        names = {*self.names, ROUTING, REFERENCE}
        return {name: x for name, x in self.arrays.items() if name in names}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the model that count, of each."""
        return (self.arrays["targets"] != IGNORED).sum(1)

    @property
    def ended(self) -> np.ndarray:
        """Which have an end."""
        return np.array([row.ended_by != "tokens" for row in self.rollout.completions])

    def rows(self) -> list[RewardRow]:
        """What rewards get to see."""
        rows = []
        for i, (record, row) in enumerate(zip(self.records, self.rollout.completions)):
            is_text = isinstance(record.prompt, str)
            completion = row.text if is_text else [{"role": "assistant", "content": row.text}]
            columns = {**record.columns, **(self.columns[i] if self.columns else {})}
            about = record.prompt, completion, row.tokens, record.tokens, columns, record.where
            rows.append(RewardRow(*about, self.prompts[i]))
        return rows

    def as_records(self, step: int) -> list[dict[str, Any]]:
        """Of each completion, what `completions.jsonl` says of it."""
        return [
            {
                "step": step,
                "prompt": record.prompt,
                "completion": row.text,
                "tokens": len(row.tokens),
                "ended_by": row.ended_by,
            }
            for record, row in zip(self.records, self.rollout.completions)
        ]


class Completer:
    """Samples completions of prompts with an engine's parameters, and scores them.

    Args:
      tokenizer: of the prompts.
      train: those of a run.
      context: tokens that a prompt with its completion can have.

    Attributes:
      phase: a context of a run's time.
      stop: whether to give up, a question that all processes ask at the same places.
      stop_here: whether this process is to; of rewards, whose calls each has its own of.
    """

    def __init__(
        self,
        engine: Engine,
        rewards: Rewards | None,
        tokenizer: Tokenizer | None,
        train: Split | None = None,
        context: int | None = None,
    ) -> None:
        self.engine, self.rewards, self._tokenizer, self._train = engine, rewards, tokenizer, train
        self.phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.stop: Callable[[], bool] = lambda: False
        self.stop_here: Callable[[], bool] = lambda: False
        objective = rollout_objective(engine.program.traced_loss.loss_fn)
        assert objective is not None
        self.objective: Any = objective
        self.options: Any = self.objective.options
        self.steps = RolloutSteps.of(self.options, engine.program.batch)
        self._function: RolloutFunction | None = None
        if (path := self.options.rollout) is not None:
            most, sizes = self.options.max_completion_length, sizes_of(engine.program.source.model)
            self._function = RolloutFunction(path, most, context, limits_of(sizes).vocab_size)

    def example(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """The shapes of a step's batch: those of the data, and of routers' choices in a mixture."""
        program, sizes = self.engine.program, sizes_of(self.engine.program.source.model)
        is_dense = sizes is not None and not hasattr(sizes, "num_experts_per_tok")
        if is_dense or self._function is not None or program.mesh.shape.get(PIPE, 1) > 1:
            return dict(shapes)
        loss = replace(program.traced_loss, records_routing=True)
        step = jax.ShapeDtypeStruct((), jnp.int32)
        batch = program.read_batch(shapes, None, abstract=True)
        traced = loss.trace((*program.loss_inputs(batch), step, step), train=False)
        _, written = jax.tree.unflatten(traced.out_tree, traced.closed.out_avals)
        if ROUTING not in written:
            return dict(shapes)
        return {**shapes, ROUTING: jax.ShapeDtypeStruct(written[ROUTING].shape, jnp.int32)}

    def sample(
        self, split: Split, ids: np.ndarray, step: int, generations: int, **how: Any
    ) -> RolloutRows:
        """Completions of prompts, so many of each in a row; by default drawn as for training.

        Raises:
          RolloutStopped: `stop()` was true.
        """
        records = split.prompts(ids)
        at = [i // generations for i in range(len(records) * generations)]
        repeated, columns = [records[i] for i in at], list[Mapping[str, Any]]()
        rollout, masks = None, list[np.ndarray]()
        with self.phase("rollout"):
            if self._function is not None and not how:
                sampled = self._function(
                    [record.prompt for record in repeated],
                    [record.where for record in repeated],
                    RolloutTrainer(
                        self.engine, self._tokenizer, self.options, self._progress(step)
                    ),
                )
                rollout = self._as_rollout(sampled, self._turn(records))
                columns = [row.columns for row in sampled]
                masks = [row.is_model for row in sampled]
            else:
                with suppress(RolloutStopped):
                    rollout = self._drawn(records, step, generations, **how)
        if rollout is None:  # outside of the phase, whose section of the watchdog ends
            raise RolloutStopped
        shapes = split.shapes(1)
        longest = max(len(rollout.prompts[x.prompt]) + len(x.tokens) for x in rollout.completions)
        # A user's function may have longer prompts than the data.
        arrays = rollout.batch(max(shapes["tokens"].shape[1], longest - 1))
        for targets, is_model in zip(arrays["targets"], masks):
            targets[np.flatnonzero(targets != IGNORED)[~is_model]] = IGNORED
        return RolloutRows(rollout, repeated, at, arrays, {*shapes}, columns)

    def _drawn(
        self, records: Sequence[PromptRecord], step: int, generations: int, **how: Any
    ) -> Rollout:
        """Completions that the engine samples."""
        o, turn = self.options, self._turn(records)
        by_default = {"temperature": o.temperature, "top_p": o.top_p, "min_p": o.min_p}
        return self.engine.rollout(
            [record.tokens for record in records],
            o.max_completion_length,
            generations=generations,
            stop=[*o.stop, *turn.texts],
            stop_tokens=turn.tokens,
            step=step,
            tokenizer=self._tokenizer,
            tick=self._check,
            block=o.rollout_block,
            **{**by_default, "top_k": o.top_k or None, **how},
        )

    def _turn(self, records: Sequence[PromptRecord]) -> EndOfTurn:
        """What ends the answers to messages."""
        talks = [record.prompt for record in records if not isinstance(record.prompt, str)]
        return encoded_messages(talks[:1], self._tokenizer, self.engine.config.data)[1]

    def _as_rollout(self, sampled: Sequence[SampledRow], turn: EndOfTurn) -> Rollout:
        """The completions of a user's function."""
        tokenizer: Any = self._tokenizer
        ends = {end_of(tokenizer), *ends_of(self.engine.program.model.weights), *turn.tokens}
        rows = [
            SampledCompletion(
                i,
                0,
                ""
                if tokenizer is None
                else tokenizer.decode([x for x in row.tokens if x not in ends]),
                row.tokens,
                np.full(len(row.tokens), np.nan) if row.logprobs is None else row.logprobs,
                np.full(len(row.tokens), NO_THRESHOLD),
                "end" if row.tokens and row.tokens[-1] in ends else "tokens",
            )
            for i, row in enumerate(sampled)
        ]
        return Rollout([row.prompt_tokens for row in sampled], rows, [], Sampling())

    def _progress(self, step: int) -> TrainerProgress:
        steps, run = self.steps, self.engine.config.run
        epoch = step / steps.steps * steps.prompts / len(self._train) if self._train else 0.0
        return TrainerProgress(step, run.steps or 0, epoch)

    def score(self, sampled: RolloutRows, step: int) -> RewardTable:
        """What the rewards say of completions, as of this step.

        Raises:
          RolloutStopped: `stop_here()` was true on one of the processes.
        """
        assert self.rewards is not None
        with self.phase("rewards"):
            table = self.rewards.score(sampled.rows(), self._progress(step), self.stop_here)
        if table is None:
            raise RolloutStopped
        return table

    def _check(self) -> None:
        if self.stop():
            raise RolloutStopped

    def add_losses(self, losses: Evaluated, sampled: RolloutRows) -> None:
        """Add the loss of completions, of an objective without rewards."""
        engine = self.engine
        arrays = sampled.read
        ranks, rows = engine.program.ranks, len(sampled.records)
        more = -rows % ranks
        padded = {n: np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) for n, x in arrays.items()}
        padded["targets"][rows:] = IGNORED
        place = placer(engine.program.batch_shardings, rows + more)
        values = jax.device_get(engine.eval_totals(place(reader(padded))))
        losses.join(values.pop(TOTALS, {}), 1)
        metrics = {name: float(x) for name, x in values.items()}
        losses.add(metrics, metrics.pop("weight"))

    def of_steps(self, step: int) -> tuple[ScoredRollout, list[dict[str, Any]]]:
        """The rollout of the steps that follow `step`, and a record of each completion."""
        steps, o, split = self.steps, self.options, self._train
        assert split is not None
        ids = split.sample_ids(step // steps.steps, steps.prompts)
        sampled = self.sample(split, ids, step, steps.generations)
        arrays, ended = sampled.arrays, sampled.ended
        tokens = np.array([len(row.tokens) for row in sampled.rollout.completions])
        tokens += [len(record.tokens) for record in sampled.records]
        metrics = completion_metrics(sampled.lengths, ended)
        records = sampled.as_records(step + 1)
        if self.rewards is not None:
            table = self.score(sampled, step)
            if o.mask_truncated_completions:
                arrays["targets"][~ended] = IGNORED
            kl = None
            if isinstance(self.objective, Rloo) and o.beta:
                arrays[OLD] = self._old(arrays)
                difference = arrays[OLD] - self._reference(arrays)
                kl = np.where(arrays["targets"] != IGNORED, difference, 0).sum(1)
            advantage = advantages(table.values, o, kl=kl, names=table.names)
            arrays[ADVANTAGES] = advantage.values
            arrays[WEIGHTS] = row_weights(sampled.lengths, o)
            metrics = {**table.metrics, **metrics, **advantage.metrics}
            for i, record in enumerate(records):
                rewards = dict(zip(table.names, map(_number, table.values[i])))
                logged = {name: x[i] for name, x in table.logged.items()}
                record |= {"reward": _number(advantage.totals[i]), "rewards": rewards}
                record |= {"advantage": float(advantage.values[i])}
                records[i] = {**record, **logged, **record}
        if OLD in sampled.names and OLD not in arrays:
            arrays[OLD] = self._old(arrays)
        arrays = sampled.read
        if steps.slices > 1:
            draws = np.random.default_rng([self.engine.config.run.seed, step])
            order = draws.permutation(len(tokens))
            arrays, tokens = {name: x[order] for name, x in arrays.items()}, tokens[order]
        return ScoredRollout(step, arrays, tokens, metrics), records

    def _old(self, arrays: Arrays) -> np.ndarray:
        """The log-probabilities of the parameters as they are."""
        names = {"tokens", "targets", ROUTING}
        if self.options.mirror_sampling:
            names.add(THRESHOLDS)
        read = {name: x for name, x in arrays.items() if name in names}

        def compute(batch: Any) -> Any:
            return self.engine.logprobs(batch, temperature=self.options.temperature).logprobs

        with self.phase("rollout"), self.engine.evaluating():
            return self._by_micro_batches(compute, read)

    def _reference(self, arrays: Arrays) -> np.ndarray:
        """The log-probabilities of the reference."""
        with self.phase("rollout"):
            compute = self.engine.with_computed_arrays
            return self._by_micro_batches(lambda batch: compute(batch)[REFERENCE], arrays)

    def _by_micro_batches(self, compute: Callable[[Any], Any], arrays: Arrays) -> np.ndarray:
        batch = self.engine.program.batch
        size = batch.train // batch.accumulation
        place = placer(self.engine.program.batch_shardings, size)
        parts = []
        for start in range(0, len(arrays["tokens"]), size):
            part = {name: x[start : start + size] for name, x in arrays.items()}
            parts.append(process_allgather(compute(place(reader(part))), tiled=True))
        return np.concatenate(parts)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


class RolloutFeeder:
    """Infinite iterator over the batches of steps: what is in a rollout, and then the next one.

    Args:
      completer: with the engine that trains.
      step: the number of steps done.
      saved: the rollout in use, of the checkpoint of this step.
      folder: of the run, to whose `completions.jsonl` completions are written.
      say: takes a line with a completion, now and then.
    """

    def __init__(
        self,
        completer: Completer,
        step: int,
        saved: bytes | None,
        folder: Path,
        say: Callable[..., Any],
    ) -> None:
        self._completer, self._step, self._say = completer, step, say
        self._rollout = ScoredRollout.from_bytes(saved) if saved else None
        self._sink = JsonlSink(folder / COMPLETIONS, step + 1) if is_first() else None
        self._said = -math.inf
        self.batch: Any = None  # of the newest step

    def __next__(self) -> StepBatch:
        steps, done = self._completer.steps, self._step % self._completer.steps.steps
        if done == 0:
            self._rollout, records = self._completer.of_steps(self._step)
            self._write(records)
        rollout = self._rollout
        if rollout is None or rollout.first != self._step - done:
            raise CheckpointError(
                f"step {self._step} is within a rollout that its checkpoint does not have: "
                "it was saved with another gradient_accumulation_steps, or not by a run"
            )
        self._step += 1
        start = done % steps.slices * steps.rows
        here = slice(start, start + steps.rows)
        arrays = {name: x[here] for name, x in rollout.arrays.items()}
        place = placer(self._completer.engine.program.batch_shardings, steps.rows)
        self.batch = place(reader(arrays))
        metrics = rollout.metrics if done == 0 else {}
        return StepBatch(self.batch, int(rollout.tokens[here].sum()), metrics)

    def _write(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._sink is None:
            return
        try:
            for record in records:
                self._sink.write(record)
        except OSError as error:  # for example a full disk
            raise RunError(
                f"step {self._step + 1}: its completions cannot be written: "
                f"{error.strerror or error}. Once they can be, the run resumes from its newest "
                "checkpoint."
            ) from error
        if time.monotonic() - self._said > SAY_SECONDS:
            self._said = time.monotonic()
            shown = {**records[0], "prompt": _last_text(records[0]["prompt"])}
            texts = (repr(str(shown[name])[:200]) for name in ("prompt", "completion"))
            of_reward = f", reward {shown['reward']:.3g}" if shown.get("reward") is not None else ""
            line = Text(f"step {self._step + 1}: {' -> '.join(texts)}{of_reward}", "dim")
            self._say(line)

    @property
    def is_used_up(self) -> bool:
        """Whether the next step needs another rollout."""
        return self._step % self._completer.steps.steps == 0

    def in_use(self, step: int) -> bytes | None:
        """The rollout that the steps after `step` need, which older parameters have drawn.

        The step may be the one before this feeder's, whose batch has not been trained on.
        """
        done = step % self._completer.steps.steps
        return self._rollout.to_bytes() if self._rollout is not None and done else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sink is not None:
            self._sink.close()


def _last_text(prompt: Any) -> str:
    """A prompt, or the last of its messages."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def evaluate_prompts(
    completer: Completer,
    held_out: Split,
    step: int,
    most: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluated | None:
    """Means over held-out prompts of the rewards of their most likely completions, and pass@k.

    With `num_generations_eval` above 1 so many are sampled of each prompt too, and pass@k is the
    share of prompts of which one has at least the reward `pass_reward`. Without rewards it is the
    loss of the most likely completions. None if `stop()` was true between two batches.

    Args:
      most: batches of as many prompts as a micro-batch has completions.
    """
    o, batch = completer.options, completer.engine.program.batch
    size, k, evaluated = batch.train // batch.accumulation, o.num_generations_eval, Evaluated()
    is_own = o.rollout is not None  # the user's function samples
    count = -(-held_out.samples // size)
    for index in range(count if most is None else min(count, most)):
        ids = np.arange(index * size, min((index + 1) * size, held_out.samples))
        how: dict[str, Any] = {} if is_own else {"temperature": 0.0}
        sampled = completer.sample(held_out, ids, step, k if is_own else 1, **how)
        if completer.rewards is None:
            completer.add_losses(evaluated, sampled)
        else:
            table = completer.score(sampled, step)
            of_rows = {f"rewards/{name}/mean": x for name, x in zip(table.names, table.values.T)}
            of_rows["reward"] = totals_of(table.values, o)
            of_rows["completions/mean_length"] = sampled.lengths
            of_rows["completions/clipped_ratio"] = ~sampled.ended
            if k > 1:
                if not is_own:
                    # Other draws than those of training, and of other batches.
                    seed = (completer.engine.config.run.seed + 1 + index) % 2**31
                    several = completer.sample(held_out, ids, step, k, seed=seed)
                    table = completer.score(several, step)
                passes = totals_of(table.values, o).reshape(-1, k) >= o.pass_reward
                of_rows[f"pass@{k}"] = passes.any(1)
            means = {n: Mean(np.nansum(x), np.sum(~np.isnan(x))) for n, x in of_rows.items()}
            evaluated.join(means, 1)
            evaluated.weight += len(ids)
        if stop():
            return None
    if completer.rewards is not None:  # which no completion may have
        absent = Mean(np.nan, 1.0)
        evaluated.declared = {n: x if x.weight else absent for n, x in evaluated.declared.items()}
    return evaluated


def stand_in(blank: Arrays, vocab_size: int) -> Arrays:
    """A step's batch of random tokens, as if they had been sampled and scored."""
    draw, shape = np.random.default_rng(0), blank["tokens"].shape
    tokens = draw.integers(vocab_size, size=(shape[0], shape[1] + 1), dtype=np.int32)
    start = draw.integers(shape[1], size=(shape[0], 1))
    targets = np.where(np.arange(shape[1]) >= start, tokens[:, 1:], IGNORED)
    filled = {"tokens": tokens[:, :-1], "targets": targets}
    for name in (ADVANTAGES, WEIGHTS, SAMPLED, OLD):
        if name in blank:
            values: Any = draw.normal(size=blank[name].shape)
            if name == WEIGHTS:
                values = np.ones(shape[0])
            elif name != ADVANTAGES:
                values = 0.1 * values - math.log(vocab_size)
            filled[name] = values.astype(np.float32)
    return {**blank, **filled}
