"""Analytic cost model: bytes and seconds of a choice by formula, computed in microseconds.

It only orders the estimates of a search and excludes what certainly does not fit.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxspeed.axes import EXPERT, SEQ, TENSOR, copying_axes, storing_axes
from jaxspeed.hardware.targets import Target
from jaxspeed.planner.memory.components import MAY_BE_BELOW
from jaxspeed.planner.search.candidate import NONE, Choice
from jaxspeed.planner.search.model_sizes import ModelSizes
from jaxspeed.planner.time.links import Links

PEAK_FRACTION = 0.6  # of a chip's peak FLOP/s, reached by matmuls of a usual size
PIPELINE_OVERHEAD = 1.3  # factor of ticks and messages on a pipeline's compute
OVERLAPPED = 0.7  # of the compute, which hides communication of parameters
_SMALL = 4096  # rows of a matmul below which a chip reaches less


@dataclass(frozen=True)
class AnalyticCost:
    """Bytes per device and in its share of host memory, and seconds per step."""

    device: float
    host: float
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """The analytic cost of a model on a target, as a function of a choice.

    Attributes:
      sizes: of the model, per sample.
      target: the devices.
      links: of the target under a mesh.
      samples: per step.
      tokens: per sample.
      peak: FLOP/s of a device in the matmuls' dtype.
      on_disk: whether offloaded optimizer state is on a disk.
    """

    sizes: ModelSizes
    target: Target
    links: Callable[[tuple[int, ...]], Links]
    samples: int
    tokens: int
    peak: float
    on_disk: bool = False

    def __call__(self, choice: Choice) -> AnalyticCost:
        saved_device, saved_host = self._activations(choice)
        state_device, state_host = self._state(choice)
        return AnalyticCost(
            state_device + saved_device, state_host + saved_host, self._seconds(choice, saved_host)
        )

    # -- bytes ----------------------------------------------------------------------------------

    def _state(self, at: Choice) -> tuple[float, float]:
        """Parameters, masters, moments and gradients: bytes (on device, in host memory)."""
        s = self.sizes
        parts = self._parts(at)
        per_device = sum(count for count, _ in parts)
        stored = sum(count / shards for count, shards in parts)
        param = s.compute_bytes * (stored if at.stage == 3 else per_device)
        if at.stage == 3 and not at.offload_optimizer and s.state_bytes > 8:
            param = 0.0  # gathered from the masters
        state = s.state_bytes * (stored if at.stage >= 1 else per_device)
        grad = s.grad_bytes * (stored if at.stage >= 2 else per_device)
        placed = (
            (param, at.offload_parameters),
            (state, at.offload_optimizer),
            (grad, at.offload_parameters),
        )
        device = [x for x, offloaded in placed if not offloaded]
        host = [x for x, offloaded in placed if offloaded]
        unit = s.in_units / max(s.units, 1) * at.pipe * per_device / s.parameters
        working = unit * (2 * s.compute_bytes + s.grad_bytes) if at.stage == 3 else 0.0
        if at.stage == 3 and at.pipe > 1 and at.gather == "step":
            working = per_device * s.compute_bytes
        # Stages fetch all offloaded parameters, and reorder those of interleaved chunks.
        if at.pipe > 1 and (at.offload_parameters or at.schedule == "interleaved"):
            working += per_device * (s.compute_bytes + s.grad_bytes)
        elif at.accumulation(self.samples) > 1 and at.stage < 3:  # one micro-batch's gradients
            working += per_device * s.compute_bytes
        if self.on_disk and at.offload_optimizer:
            host.remove(state)
        return sum(device) + working, sum(host)

    def _parts(self, at: Choice) -> list[tuple[float, int]]:
        """(number of parameters on a device before ZeRO's sharding, ZeRO's shards of them).

        The first are those that only `pipe` and `tensor` shard.
        """
        counts = {axis: n for axis, n in self.sizes.sharded.items() if at.sizes[axis] > 1}
        common = self.sizes.parameters - sum(counts.values())
        parts = [(common, 1)] + [(n, at.sizes[axis]) for axis, n in counts.items()]
        return [
            (n / (at.pipe * at.tensor * axis_size), at.shards // axis_size)
            for n, axis_size in parts
        ]

    def _activations(self, at: Choice) -> tuple[float, float]:
        """Activations saved from forward to backward: bytes (on device, in host memory)."""
        s, micro = self.sizes, at.micro
        # Half of the matmul results are sharded over tensor, the others only with sequence
        # parallelism.
        num_shards = at.tensor if at.sequence else 2 * at.tensor / (1 + at.tensor)
        num_shards *= at.seq
        everything = s.saved_by(NONE).bytes / num_shards
        saved = s.saved_by(at.recompute).bytes / num_shards
        group = json.loads(at.recompute)["every_n"] if "every_n" in at.recompute else 1
        one_unit = group * everything / max(s.units, 1)
        share = at.offload_activations
        if at.pipe == 1:
            working = one_unit if at.recompute != NONE else 0.0
            fetched = share * saved / max(s.units, 1)
            return micro * (working + (1 - share) * saved + fetched), micro * share * saved
        chunks = at.chunks if at.schedule == "interleaved" else 1
        flight = min(at.accumulation(self.samples), 2 * at.pipe)
        if at.schedule == "gpipe":
            flight = at.accumulation(self.samples)
        unit_input = s.unit_inputs / max(s.units, 1) / num_shards
        inside = (one_unit if at.recompute != NONE else 0.0) + saved / (at.pipe * chunks)
        per_chunk = saved / (at.pipe * chunks) if at.stage_saves == "save" else unit_input
        in_flight = flight * chunks * per_chunk
        return micro * (inside + (1 - share) * in_flight), micro * share * in_flight

    # -- seconds --------------------------------------------------------------------------------

    def _seconds(self, at: Choice, saved_host: float) -> float:
        s, chip = self.sizes, self.target.chip
        recomputed = s.saved_by(at.recompute).recomputed
        if at.pipe > 1 and at.stage_saves == "stage":
            recomputed += s.forward
        devices = at.ranks * at.pipe * at.seq * at.tensor
        flops = self.samples * (3 * s.forward + recomputed) / devices
        rows = at.micro * self.tokens / at.seq
        fraction = PEAK_FRACTION * rows / (rows + _SMALL / 8) * (0.97 ** math.log2(at.tensor))
        micros = at.accumulation(self.samples)
        weights = s.parameters / (at.pipe * at.tensor)
        read = micros * 3 * weights * s.compute_bytes / chip.bandwidth
        compute = max(flops / (self.peak * fraction), read)
        if at.pipe > 1:
            chunks = at.chunks if at.schedule == "interleaved" else 1
            compute *= PIPELINE_OVERHEAD * (1 + (at.pipe - 1) / (micros * chunks))
        exposed = compute + self._of_tensor(at, micros) + self._of_update(at)
        exposed += self._of_attention(at, micros) + self._of_experts(at)
        overlapped = max(self._of_data(at, micros), self._of_host(at, micros, saved_host))
        return exposed + max(0.0, overlapped - OVERLAPPED * compute) + 0.1 * overlapped

    def _of_tensor(self, at: Choice, micros: int) -> float:
        """Four all-reduces per unit of its input, forward and backward together."""
        if at.tensor == 1:
            return 0.0
        s = self.sizes
        size = s.unit_inputs / (at.pipe * at.seq) * at.micro * micros
        bytes_ = 4 * 2 * size * (at.tensor - 1) / at.tensor
        return bytes_ / self._speed(at, (TENSOR,), at.tensor)

    def _of_attention(self, at: Choice, micros: int) -> float:
        """Exchanges over `seq`, in three passes: at most four arrays like a unit's input."""
        if at.seq == 1:
            return 0.0
        size = self.sizes.unit_inputs / (at.pipe * at.seq * at.tensor) * at.micro * micros
        bytes_ = 3 * 4 * size * (at.seq - 1) / at.seq
        return bytes_ / self._speed(at, (SEQ,), at.seq * at.tensor)

    def _of_experts(self, at: Choice) -> float:
        """Exchanges of rows: two in the forward pass, three in the backward pass."""
        if at.sizes[EXPERT] == 1:
            return 0.0
        size = self.sizes.expert_rows * self.samples / (at.ranks * at.pipe * at.seq)
        bytes_ = 5 * size * (1 - 1 / at.sizes[EXPERT])
        return bytes_ / self._speed(at, (EXPERT,), at.sizes[EXPERT] * at.seq * at.tensor)

    def _of_data(self, at: Choice, micros: int) -> float:
        """All-gathers of parameters and reductions of gradients."""
        s = self.sizes
        sums, gathers = 1.0, 0.0
        if at.stage in (1, 2):
            gathers = s.compute_bytes
        if at.stage >= 2:
            sums = float(micros)
        if at.stage == 3:
            often = 1 if at.gather == "step" and at.pipe > 1 else 2 * micros
            gathers = often * s.compute_bytes
        seconds = 0.0
        parts = self._parts(at)
        if at.shards > 1:
            factor = 2 if at.stage == 0 else 1
            moved = sum(count * (1 - 1 / shards) for count, shards in parts)
            speed = self._speed(at, storing_axes(), at.shards * at.tensor)
            seconds += moved * (gathers + factor * sums * s.grad_bytes) / speed
        if at.copies > 1:
            shared = sum(n / (shards if at.stage >= 2 else 1) for n, shards in parts)
            speed = self._speed(at, copying_axes(), at.ranks * at.tensor)
            seconds += 2 * shared * sums * s.grad_bytes / speed
        return seconds

    def _of_update(self, at: Choice) -> float:
        """Offloaded optimizer state fetched for the update and written back, not overlapped."""
        if not at.offload_optimizer:
            return 0.0
        per_device = sum(n / (shards if at.stage >= 1 else 1) for n, shards in self._parts(at))
        return 2 * self.sizes.state_bytes * per_device / self.target.chip.host_link

    def _of_host(self, at: Choice, micros: int, saved_host: float) -> float:
        s, link = self.sizes, self.target.chip.host_link
        per_device = sum(n / shards for n, shards in self._parts(at))
        moved = 0.0
        if at.offload_parameters:
            moved += micros * 2 * (s.compute_bytes + s.grad_bytes) * per_device
        if at.offload_activations:
            moved += 2 * micros * saved_host
        return moved / link

    def _speed(self, at: Choice, axes: tuple[str, ...], span: int) -> float:
        """Bytes per second that a device sends along axes, which span so many neighbours."""
        chip = self.target.chip
        if self.target.topology:
            route = self.links(at.mesh).route(
                tuple(axis for axis in axes if at.sizes.get(axis, 1) > 1)
            )
            return chip.outside if route.across > 1 else chip.link * route.parallel_links
        return chip.outside if span > max(self.target.node, 1) else chip.link * chip.links


def memory_excess(cost: AnalyticCost, target: Target) -> float:
    """Needed over available memory, with headroom; at least 1."""
    chip = target.chip
    device = cost.device * (1 + MAY_BE_BELOW) / chip.memory
    return max(1.0, device, cost.host / chip.host_memory)
