"""The programs of a run's rollouts and what is in memory beside them, from shapes alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.axes import PIPE
from jaxspeed.config.rollout_options import SamplingOptions
from jaxspeed.generation.continuous_batching import GroupShape
from jaxspeed.generation.decode_programs import UNDRAWN, Draws, ForwardPrograms
from jaxspeed.generation.generate import LAYOUTS, OF_OTHERS, Generator
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text_row import bucket
from jaxspeed.hardware.chip import chip_for
from jaxspeed.objectives import objective_of
from jaxspeed.placement.paths import counted
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.train.phases import BATCH, STATE, StepPhase
from jaxspeed.train.program import Program

# Values of the programs: the model as they read it, caches (those of a group, of the other groups,
# of starts, and of starts before these), and what is small.
MODEL, CACHES, OTHERS, STARTED, EARLIER = "model", "caches", "others", "started", "earlier"
CHOICES = "choices"  # of routers
ROWS, STARTS, AT, STEPS, DRAWS = "rows", "starts", "at", "steps", "draws"
ENDS = 4  # tokens at which texts end, at most


@dataclass(frozen=True)
class RolloutPrograms:
    """The programs of a rollout, for devices that may be absent.

    Attributes:
      draws: how tokens are drawn, as values of the same shapes.
      rows: completions of a rollout.
      generations: of a prompt.
      steps: that train on a rollout.
      prompt: tokens to which the longest prompts are padded.
      tokens: of a completion, at most.
      groups: of rows, whose caches are in memory at once.
    """

    once: GatherOnce
    programs: ForwardPrograms
    shape: GroupShape
    draws: Draws
    rows: int
    generations: int
    steps: int
    prompt: int
    tokens: int
    groups: int

    @property
    def prefills(self) -> bool:
        """Whether starts are computed in batches of their own."""
        cached = self.programs.cached
        return cached is not None and not cached.one_by_one

    @property
    def batches_of_starts(self) -> int:
        return -(-self.rows // self.generations // self.shape.rows)

    @property
    def caches(self) -> int:
        """The number of groups' caches that are in memory at once, with those of starts.

        Starts wait for free rows; when the rows of one data rank have none that waits, the next
        batch of starts is computed, and those of other ranks may still wait in the batch before.
        """
        return self.groups + (min(self.batches_of_starts, 2) if self.prefills else 0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all these caches on a device."""
        shapes = self.programs.cache_shapes.values()
        shards = ((math.prod(x.sharding.shard_shape(x.shape)), x.dtype.itemsize) for x in shapes)
        return self.caches * sum(size * itemsize for size, itemsize in shards)

    def figures(self) -> dict[str, Any]:
        """JSON-serializable figures."""
        return {
            "rows": self.rows,
            "rows_of_group": self.shape.rows,
            "groups": self.groups,
            "length": self.shape.length,
            "caches": self.caches,
            "cache_bytes": self.cache_bytes,
            "gathered": bool(self.once.gathered),
        }

    def __str__(self) -> str:
        shape, starts = self.shape, self.caches - self.groups
        rows, ranks = shape.rows // shape.ranks, shape.ranks
        caches = f"caches of {counted(self.groups, 'group')}"
        if starts:
            caches += f" and {counted(starts, 'batch', 'es')} of starts"
        gathers = "gathered once" if self.once.gathered else "read where they are"
        if not self.programs.loops:
            gathers = "gathered for each token"
        if self.programs.cached is None:
            caches = "no caches"
        return (
            f"sampling: {counted(self.rows, 'completion')} in groups of {rows} rows x "
            f"{counted(ranks, 'rank')} x {shape.length:,} tokens, {caches}; "
            f"parameters are {gathers}"
        )

    @cached_property
    def phases(self) -> tuple[StepPhase, ...]:
        """The programs: `prefill`, then those during which what it returns is in memory."""
        programs, mesh = self.programs, self.once.program.mesh
        read, written = (
            (MODEL, CACHES, ROWS, STEPS, DRAWS),
            (CACHES, ROWS, "drawn", "reads", CHOICES),
        )
        decode = StepPhase("decode", programs._decode, read, written, (CACHES,), mesh)
        if not self.prefills:
            return (decode,)
        prefill = StepPhase(
            "prefill", programs.prefill, (MODEL, STARTS), (STARTED, CHOICES), (), mesh
        )
        inserted = CACHES, STARTED, AT
        return (
            prefill,
            decode,
            StepPhase("refill", programs.insert, inserted, (CACHES,), (CACHES,), mesh),
        )

    def values(self, batch: Any) -> dict[str, Any]:
        """The shapes of what is in memory while rows are sampled and refilled.

        Those of `Program.values` without the batch, the caches of all groups, and those of the
        starts before the last.
        """
        values, model = self.once.program.values(batch), self.once.shapes
        read = {id(x) for x in jax.tree.leaves(model)}
        unread = jax.tree.map(lambda x: None if id(x) in read else x, values[STATE])
        caches, rows = self.programs.cache_shapes, self.shape.rows
        values |= {
            STATE: unread,
            MODEL: model,
            CACHES: caches,
            OTHERS: [caches] * (self.groups - 1),
            ROWS: self._placed(self.shape.arrays([]), self.programs._rows),
            STEPS: self._placed(np.int32(1)),
            DRAWS: self._placed(self.draws),
        }
        if self.prefills:
            text, at = np.zeros((rows, self.prompt), np.int32), np.zeros(rows, np.int32)
            starts = {"tokens": text, "positions": text, "at": at}
            values |= {
                STARTS: self._placed(starts, self.programs._rows),
                AT: self._placed(at, self.programs._rows),
                EARLIER: [caches] * (self.caches - self.groups - 1),
            }
        del values[BATCH]
        return values

    def _placed(self, arrays: Any, at: NamedSharding | None = None) -> Any:
        """Shapes with a sharding, by default replicated."""
        at = at or NamedSharding(self.once.program.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), arrays)


def rollout_programs(
    program: Program, batch: Mapping[str, Any], platform: str | None = None
) -> RolloutPrograms | None:
    """The programs of the rollouts that a program's batches come from.

    None where its objective does not sample, or a user's function does.

    Args:
      batch: the shapes of the longest batch.
      platform: for which they are; by default that of the devices.
    """
    objective = objective_of(program.traced_loss.loss_fn)
    if objective is None or objective.records != "prompts":
        return None
    options = objective.options
    assert isinstance(options, SamplingOptions)
    if options.rollout is not None:
        return None
    chip = chip_for(program.devices[0].device_kind)
    once = GatherOnce(program, chip.memory if chip else None)
    generator = Generator(program, once=once)
    tokens, generations = options.max_completion_length, getattr(options, "num_generations", 1)
    longest = batch["tokens"].shape[1]
    limit = generator.context or longest
    prompt = bucket(max(longest - tokens, 1), limit)
    length = min(prompt + tokens, limit)
    accumulation = program.batch.accumulation
    slices = (options.steps_per_generation or accumulation) / accumulation
    rows = round(program.batch.train * slices)
    here = program.mesh.devices.flat[0].platform
    block, groups, _ = LAYOUTS.get(platform or here, OF_OTHERS)
    block = options.rollout_block or block
    shape = GroupShape(block * program.ranks, program.ranks, length, length, folds=3)
    rules = Sampling(options.temperature, options.top_k or None, options.top_p, options.min_p).rules
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    draws = Draws(key, np.full(ENDS, UNDRAWN, np.int32), rules)
    return RolloutPrograms(
        once,
        generator.programs_for(shape, draws, records=program.mesh.shape.get(PIPE, 1) == 1),
        shape,
        draws,
        rows,
        generations,
        steps=max(round(slices * getattr(options, "num_iterations", 1)), 1),
        prompt=prompt,
        tokens=tokens,
        groups=min(groups, -(-rows // shape.rows)),
    )
