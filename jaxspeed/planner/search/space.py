"""All choices for a model on a target, and which are near each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from jaxspeed.config.batch import Stages
from jaxspeed.config.elastic import divisors
from jaxspeed.planner.search.candidate import FULL, MESH, NONE, Choice, as_word

WORDS = tuple(map(as_word, ("none", "attention", "dots", "full")))
EVERY = (2, 4)  # units that are made again together
MOST_CHUNKS = 4  # of a stage: messages grow with them, and what is saved of the wait shrinks
_ALL = frozenset(field.name for field in fields(Choice))
# Fields but the mesh, each after those that it depends on.
_ORDER = (
    "stage",
    "recompute",
    "activations_wait",
    "optimizer_waits",
    "parameters_wait",
    "sequence",
    "schedule",
    "chunks",
    "stage_keeps",
    "gather",
    "micro",
)
FAST = frozenset({"stage", "micro"})  # what DeepSpeed's autotuner changes in its fast mode


@dataclass(frozen=True)
class Space:
    """What of a config may be changed, on one target.

    Attributes:
      base: the config as it is, which is always one of the choices.
      devices: how many there are.
      samples: of a step: every choice has as many.
      layers: that stages share; 0 where the model has no blocks that repeat.
      tensor: degrees that divide what the model has.
      node: how many devices share the fast network: tensor stays inside.
      holds: whether the target can lay out (pipe, replica, data, tensor).
      offload: whether anything may wait in host memory.
      micro: the smallest and the largest micro-batch.
      changing: the fields that may differ from the base's; of the mesh any stands for all.
      fixed: axes of the mesh that are not changed here (seq, expert) take so many devices.
    """

    base: Choice
    devices: int
    samples: int
    layers: int
    tensor: tuple[int, ...]
    node: int
    holds: Callable[[tuple[int, int, int, int]], bool] = lambda mesh: True
    offload: bool = True
    micro: tuple[int, int] = (1, 1024)
    changing: frozenset[str] = _ALL
    fixed: int = 1

    @cached_property
    def meshes(self) -> tuple[tuple[int, int, int, int], ...]:
        """(pipe, replica, data, tensor)."""
        if not self.changing & set(MESH):
            return (self.base.mesh,)
        free = self.devices // self.fixed
        tensors = self.tensor
        found = dict.fromkeys([self.base.mesh])
        for tensor in tensors:
            for pipe in divisors(free // tensor) if free % tensor == 0 else ():
                # Padding computes for nothing.
                if pipe > 1 and (not self.layers or self.layers % pipe):
                    continue
                ranks = free // tensor // pipe
                for replica in self._copies(ranks, tensor):
                    mesh = pipe, replica, ranks // replica, tensor
                    if self.samples % ranks == 0 and mesh not in found and self.holds(mesh):
                        found[mesh] = None
        return tuple(found)

    def _copies(self, ranks: int, tensor: int) -> Iterable[int]:
        """How many copies of the state: one, as the config has, or one a node."""
        inside = max(1, self.node // tensor)
        of_node = ranks // inside if ranks % inside == 0 and inside > 1 else 1
        return dict.fromkeys(n for n in (1, self.base.replica, of_node) if ranks % n == 0)

    def is_in(self, choice: Choice) -> bool:
        """Whether it is one of the choices."""
        if choice == self.base:
            return True
        if choice != self.normal(choice) or choice.mesh not in self.meshes:
            return False
        still = _ALL - self.changing - set(MESH)  # meshes knows of those
        if any(getattr(choice, field) != getattr(self.base, field) for field in still):
            return False
        return all(getattr(choice, name) in self._of(name, choice) for name in _ORDER)

    def normal(self, choice: Choice) -> Choice:
        """With what says nothing here as the config has it."""
        idle: list[str] = []
        if choice.pipe == 1:
            idle += ["schedule", "chunks", "stage_keeps", "gather"]
        elif choice.schedule != "interleaved":
            choice = replace(choice, chunks=2)  # the schema's default: it has none
        if choice.stage != 3:
            idle.append("gather")
        if choice.tensor == 1:
            idle.append("sequence")
        if choice.recompute == NONE or "budget" in choice.recompute:
            choice = replace(choice, activations_wait=False)
        if choice.stage_keeps == "layers" and choice.recompute not in (NONE, FULL):
            choice = replace(choice, stage_keeps="stage")
        return replace(choice, **{field: getattr(self.base, field) for field in idle})

    def _of(self, name: str, at: Choice) -> tuple[Any, ...]:
        """What a field may be, with the others as they are there."""
        own = getattr(self.base, name)
        if name not in self.changing:
            return (own,)
        values = self._able(name, at)
        return (
            values
            if at.mesh != self.base.mesh or own in values or name == "micro"
            else (*values, own)
        )

    def _able(self, name: str, at: Choice) -> tuple[Any, ...]:
        base, no, both = self.base, (False,), (False, True)
        if name == "stage":
            if at.data == 1:
                return (0, 3)  # of which 3 keeps masters alone
            # At stage 0 ranks are all alike, copies or not.
            return (0, 1, 2, 3) if at.replica in (1, base.replica) else (1, 2, 3)
        if name == "recompute":
            return tuple(dict.fromkeys((*WORDS, *self._every(at), base.recompute)))
        if name == "activations_wait":
            return both if self.offload and at.recompute != NONE else no
        if name == "optimizer_waits":
            return both if self.offload else no
        if name == "parameters_wait":
            # They are updated where they wait: moments wait with them.
            return both if self.offload and at.optimizer_waits else no
        if name == "sequence":
            return both if at.tensor > 1 else (base.sequence,)
        if name == "micro":
            return self._micros(at)
        if name == "gather":
            return ("tick", "step") if at.pipe > 1 and at.stage == 3 else (base.gather,)
        if at.pipe == 1:
            return (getattr(base, name),)
        if name == "schedule":
            return tuple(dict.fromkeys(("1f1b", "interleaved", base.schedule)))
        if name == "chunks":
            return self._chunks(at)
        return tuple(dict.fromkeys(("stage", "save", base.stage_keeps)))

    def _every(self, at: Choice) -> list[str]:
        layers = self.layers // at.pipe
        return [as_word({"every_n": n}) for n in EVERY if layers and layers % n == 0]

    def _chunks(self, at: Choice) -> tuple[int, ...]:
        if at.schedule != "interleaved":
            return (2,)
        each = self.layers // at.pipe
        return tuple(n for n in range(2, MOST_CHUNKS + 1) if each % n == 0)

    def _micros(self, at: Choice) -> tuple[int, ...]:
        """Sizes of a micro-batch that share out the samples, and that the stages take."""
        a_rank, rest = divmod(self.samples, at.ranks)
        if rest:
            return ()
        stages = Stages(at.pipe, at.schedule == "interleaved")
        low, high = self.micro
        return tuple(n for n in divisors(a_rank) if low <= n <= high and stages.take(a_rank // n))

    def all(self) -> Iterator[Choice]:
        """Every choice, once; the config's own first."""
        yield self.base
        for mesh in self.meshes:
            yield from (choice for choice in self._on(mesh, {}) if choice != self.base)

    def coarse(self) -> Iterator[Choice]:
        """Those to begin with: of what a step away can be tried, one or two values each."""
        some = {
            "gather": (self.base.gather,),
            "sequence": (True, self.base.sequence),
        }
        yield self.base
        for mesh in self.meshes:
            yield from (choice for choice in self._on(mesh, some) if choice != self.base)

    def _on(
        self, mesh: tuple[int, int, int, int], some: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[Choice]:
        """Field by field, each with the values that those before it leave, and of `some`."""
        made = [self.base.on(mesh)]
        for name in _ORDER:
            grown = []
            for at in made:
                values = self._of(name, at)
                if name in some:
                    values = tuple(v for v in values if v in some[name]) or values[:1]
                grown += [
                    at if value == getattr(at, name) else replace(at, **{name: value})
                    for value in values
                ]
            made = grown
        yield from dict.fromkeys(at for at in made if at == self.normal(at))

    def near(self, choice: Choice) -> list[Choice]:
        """Choices that are one change away, or one of two that belong together.

        Recompute and the micro-batch do: what one frees, the other fills. So do the mesh and the
        micro-batch, the mesh and the stage, and what a stage keeps and the recompute in it.
        """
        found: dict[Choice, None] = {}
        for once in self._single(choice):
            found[once] = None
        for first, second in _PAIRS:
            for once in self._single(choice, first):
                for twice in self._single(once, second):
                    found[twice] = None
        found.pop(choice, None)
        return [each for each in found if self.is_in(each)]

    def single(self, choice: Choice) -> list[Choice]:
        """Those that are one change away."""
        found = dict.fromkeys(self._single(choice))
        found.pop(choice, None)
        return [each for each in found if self.is_in(each)]

    def _single(self, choice: Choice, only: str | None = None) -> Iterator[Choice]:
        if only in (None, "mesh"):
            for mesh in self.meshes:
                if mesh != choice.mesh:
                    yield self._with_batch(choice.on(mesh))
        for name in _ORDER:
            if only in (None, name):
                for value in self._of(name, choice):
                    if value != getattr(choice, name):
                        yield self._with_batch(replace(choice, **{name: value}))

    def _with_batch(self, choice: Choice) -> Choice:
        """With what the change takes along: chunks, what waits, and a micro-batch that divides."""
        choice = self.normal(choice)
        chunks = self._chunks(choice) if choice.pipe > 1 else (choice.chunks,)
        if choice.chunks not in chunks and chunks:
            choice = replace(choice, chunks=chunks[0])
        if choice.parameters_wait and not choice.optimizer_waits:
            choice = replace(choice, parameters_wait=False)
        micros = self._micros(choice)
        if choice.micro not in micros and micros:
            below = [n for n in micros if n <= choice.micro]
            choice = replace(choice, micro=max(below) if below else min(micros))
        return self.normal(choice)


_PAIRS = (
    ("recompute", "micro"),
    ("mesh", "micro"),
    ("mesh", "stage"),
    ("mesh", "recompute"),
    ("stage_keeps", "recompute"),
    ("stage_keeps", "micro"),
    ("stage", "recompute"),
    ("stage", "micro"),
    ("schedule", "micro"),
)
