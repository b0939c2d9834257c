"""`Space`: all choices for a model on a target, and their neighbourhoods."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from jaxspeed.axes import (
    AXES,
    DATA,
    PIPE,
    SEQ,
    TENSOR,
    axis_names,
    copying_axes,
    product,
    sample_axes,
)
from jaxspeed.config.batch import Stages
from jaxspeed.config.elastic import divisors
from jaxspeed.planner.search.candidate import FULL, NONE, Choice, remat_json

POLICIES = tuple(map(remat_json, ("none", "attention", "dots", "full")))
EVERY = (2, 4)  # units that are recomputed together
HOST_RATIOS = (0.0, 0.25, 0.5, 1.0)
MAX_CHUNKS = 4  # per stage: messages grow with their number, and the gain in bubble shrinks
_ALL = frozenset(each.name for each in fields(Choice))
# Fields but the mesh, each after those that it depends on.
_ORDER = (
    "stage",
    "recompute",
    "offload_activations",
    "offload_optimizer",
    "offload_parameters",
    "sequence",
    "schedule",
    "chunks",
    "stage_saves",
    "gather",
    "micro",
)
FAST = frozenset({"stage", "micro"})  # changed by DeepSpeed's autotuner in its fast mode


@dataclass(frozen=True)
class Space:
    """The choices for a config on one target.

    Attributes:
      base: the unchanged config, which is always one of the choices.
      devices: number of devices.
      samples: per step, the same for every choice.
      layers: layers to divide over stages; 0 if the model has no repeated blocks.
      tensor: degrees that divide the model's dims.
      node: number of devices on the fast network: tensor stays inside.
      holds: whether the target can lay out a mesh.
      splits: whether axes of such a mesh share a dim of the target's torus.
      offload: whether offloading is allowed.
      micro: the smallest and the largest micro-batch.
      changing: the fields that may differ from the base's.
      degrees: sizes of `seq`, and of the axes that shard samples and dims of the model, such as
        experts.
    """

    base: Choice
    devices: int
    samples: int
    layers: int
    tensor: tuple[int, ...]
    node: int
    holds: Callable[[tuple[int, ...]], bool] = lambda mesh: True
    splits: Callable[[tuple[int, ...]], bool] = lambda mesh: False
    offload: bool = True
    micro: tuple[int, int] = (1, 1024)
    changing: frozenset[str] = _ALL
    degrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def meshes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of `axis_names()`; the first of equals wins, so split dims come last."""
        if "mesh" not in self.changing:
            return (self.base.mesh,)
        varied = {PIPE, SEQ, TENSOR, *sample_axes()}
        kept = {axis: n for axis, n in self.base.sizes.items() if axis not in varied}
        free = self.devices // product(kept, kept)
        meshes = dict.fromkeys([self.base.mesh])
        of_sequences = self.degrees.get(SEQ, (self.base.sizes[SEQ],))
        for tensor, seq in itertools.product(self.tensor, of_sequences):
            near = tensor * seq
            for pipe in divisors(free // near) if free % near == 0 else ():
                # Padding layers waste compute.
                if pipe > 1 and (not self.layers or self.layers % pipe):
                    continue
                ranks = free // near // pipe
                for of_samples in self._of_samples(ranks, near):
                    sizes = {**kept, **of_samples, PIPE: pipe, SEQ: seq, TENSOR: tensor}
                    mesh = tuple(sizes[axis] for axis in axis_names())
                    if self.samples % ranks == 0 and mesh not in meshes and self.holds(mesh):
                        meshes[mesh] = None
        return tuple(sorted(meshes, key=self.splits))

    def _of_samples(self, ranks: int, near: int) -> list[dict[str, int]]:
        """Candidate sizes of the axes that shard samples.

        Of an axis that replicates state: 1, the config's, or one replica per node. Of one that
        stores it any divisor, or one of its `degrees`; `data` takes the remaining ranks.
        """
        inside = max(1, self.node // near)
        of_node = ranks // inside if ranks % inside == 0 and inside > 1 else 1
        assignments: list[dict[str, int]] = [{}]
        for axis in sample_axes():
            if axis != DATA and axis in self.base.sizes:
                copies = dict.fromkeys((1, self.base.sizes[axis], of_node))
                stored = self.degrees.get(axis, (1,)) if AXES[axis].dims else divisors(ranks)
                degrees = copies if axis in copying_axes() else stored
                assignments = [{**at, axis: n} for at in assignments for n in degrees]
        rests = [(at, *divmod(ranks, product(at, at))) for at in assignments]
        return [{**at, DATA: data} for at, data, remainder in rests if not remainder]

    def is_in(self, choice: Choice) -> bool:
        """Whether `choice` is in the space."""
        if choice == self.base:
            return True
        if choice != self.normal(choice) or choice.mesh not in self.meshes:
            return False
        constant = _ALL - self.changing - {"mesh"}  # `meshes` covers it
        if any(getattr(choice, field) != getattr(self.base, field) for field in constant):
            return False
        return all(getattr(choice, name) in self._of(name, choice) for name in _ORDER)

    def normal(self, choice: Choice) -> Choice:
        """The choice with the base's values in fields that have no effect."""
        idle: list[str] = []
        if choice.pipe == 1:
            idle += ["schedule", "chunks", "stage_saves", "gather"]
        elif choice.schedule != "interleaved":
            choice = replace(choice, chunks=2)  # the schema's default, without effect
        if choice.stage != 3:
            idle.append("gather")
        if choice.tensor == 1:
            idle.append("sequence")
        if choice.recompute == NONE or "budget" in choice.recompute:
            choice = replace(choice, offload_activations=0.0)
        if choice.stage_saves == "layers" and choice.recompute not in (NONE, FULL):
            choice = replace(choice, stage_saves="stage")
        return replace(choice, **{field: getattr(self.base, field) for field in idle})

    def _of(self, name: str, at: Choice) -> tuple[Any, ...]:
        """Allowed values of a field, given the other fields."""
        base_value = getattr(self.base, name)
        if name not in self.changing:
            return (base_value,)
        values = self._able(name, at)
        return (
            values
            if at.mesh != self.base.mesh or base_value in values or name == "micro"
            else (*values, base_value)
        )

    def _able(self, name: str, at: Choice) -> tuple[Any, ...]:
        base, no, both = self.base, (False,), (False, True)
        if name == "stage":
            if at.shards == 1:
                return (0, 3)  # stage 3 stores only masters
            # At stage 0 replica and data ranks are the same.
            return (0, 1, 2, 3) if at.copies in (1, base.copies) else (1, 2, 3)
        if name == "recompute":
            return tuple(dict.fromkeys((*POLICIES, *self._every(at), base.recompute)))
        if name == "offload_activations":
            if not self.offload or at.recompute == NONE:
                return (0.0,)
            return tuple(dict.fromkeys((*HOST_RATIOS, base.offload_activations)))
        if name == "offload_optimizer":
            return both if self.offload else no
        if name == "offload_parameters":
            # Offloaded parameters are updated in host memory, with offloaded moments.
            return both if self.offload and at.offload_optimizer else no
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
        return tuple(dict.fromkeys(("stage", "save", base.stage_saves)))

    def _every(self, at: Choice) -> list[str]:
        layers = self.layers // at.pipe
        return [remat_json({"every_n": n}) for n in EVERY if layers and layers % n == 0]

    def _chunks(self, at: Choice) -> tuple[int, ...]:
        if at.schedule != "interleaved":
            return (2,)
        layers_per_stage = self.layers // at.pipe
        return tuple(n for n in range(2, MAX_CHUNKS + 1) if layers_per_stage % n == 0)

    def _micros(self, at: Choice) -> tuple[int, ...]:
        """Micro-batch sizes that divide the samples of a rank and suit the pipeline."""
        per_rank, rest = divmod(self.samples, at.ranks)
        if rest:
            return ()
        stages = Stages(at.pipe, at.schedule == "interleaved")
        low, high = self.micro
        sizes = (n for n in divisors(per_rank) if low <= n <= high)
        return tuple(n for n in sizes if stages.accepts(per_rank // n))

    def coarse(self) -> Iterator[Choice]:
        """Choices to start from: of some fields only the extreme values and the base's."""
        base = self.base
        return self.all(
            gather=(base.gather,),
            sequence=(True, base.sequence),
            offload_activations=(0.0, 1.0, base.offload_activations),
        )

    def all(self, **some: tuple[Any, ...]) -> Iterator[Choice]:
        """Every choice, once, with the values of `some` where given; the base first."""
        yield self.base
        for mesh in self.meshes:
            yield from (choice for choice in self._on(mesh, some) if choice != self.base)

    def _on(self, mesh: tuple[int, ...], some: Mapping[str, tuple[Any, ...]]) -> Iterator[Choice]:
        """All choices on a mesh, field by field."""
        choices = [replace(self.base, mesh=mesh)]
        for name in _ORDER:
            grown = []
            for at in choices:
                values = self._of(name, at)
                if name in some:
                    values = tuple(v for v in values if v in some[name]) or values[:1]
                grown += [
                    at if value == getattr(at, name) else replace(at, **{name: value})
                    for value in values
                ]
            choices = grown
        yield from dict.fromkeys(at for at in choices if at == self.normal(at))

    def near(self, choice: Choice) -> list[Choice]:
        """Choices that are one change away, or two changes of a related pair of fields."""
        neighbours = dict.fromkeys(self.single(choice))
        for first, second in _PAIRS:
            for once in self._single(choice, first):
                neighbours.update(dict.fromkeys(self._single(once, second)))
        neighbours.pop(choice, None)
        return [neighbour for neighbour in neighbours if self.is_in(neighbour)]

    def single(self, choice: Choice) -> list[Choice]:
        """Choices that are one change away."""
        neighbours = dict.fromkeys(self._single(choice))
        neighbours.pop(choice, None)
        return [neighbour for neighbour in neighbours if self.is_in(neighbour)]

    def _single(self, choice: Choice, only: str | None = None) -> Iterator[Choice]:
        if only in (None, "mesh"):
            for mesh in self.meshes:
                if mesh != choice.mesh:
                    yield self._with_batch(replace(choice, mesh=mesh))
        for name in _ORDER:
            if only in (None, name):
                for value in self._of(name, choice):
                    if value != getattr(choice, name):
                        yield self._with_batch(replace(choice, **{name: value}))

    def _with_batch(self, choice: Choice) -> Choice:
        """The choice with dependent fields adjusted: chunks, offload and the micro-batch."""
        choice = self.normal(choice)
        chunks = self._chunks(choice) if choice.pipe > 1 else (choice.chunks,)
        if choice.chunks not in chunks and chunks:
            choice = replace(choice, chunks=chunks[0])
        if choice.offload_parameters and not choice.offload_optimizer:
            choice = replace(choice, offload_parameters=False)
        micros = self._micros(choice)
        if choice.micro not in micros and micros:
            below = [n for n in micros if n <= choice.micro]
            choice = replace(choice, micro=max(below) if below else min(micros))
        return self.normal(choice)


# Of any change and the micro-batch, one frees memory that the other uses.
_PAIRS = (
    *((name, "micro") for name in ("mesh", *_ORDER[:-1])),
    ("mesh", "stage"),
    ("mesh", "recompute"),
    ("stage_saves", "recompute"),
    ("stage", "recompute"),
)
