"""What a choice would take by formula alone, in microseconds: what is worth an estimate.

Nothing is decided by it but what is estimated first, and what certainly does not fit.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxspeed.hardware.targets import Target
from jaxspeed.planner.memory.components import MAY_BE_BELOW
from jaxspeed.planner.search.candidate import NONE, Choice
from jaxspeed.planner.search.model_sizes import ModelSizes

REACHED = 0.6  # of a chip's peak, by products of a usual size
IN_STAGES = 1.3  # what ticks and messages add to a pipeline's compute
HIDDEN = 0.7  # of the compute, behind which exchanges of parameters can go on
_SMALL = 4096  # rows of a product below which a chip reaches less


@dataclass(frozen=True)
class Sketched:
    """Of one device and step."""

    device: float
    host: float
    seconds: float


@dataclass(frozen=True)
class Sketch:
    """`sketch(choice)`: bytes and seconds of a model on a target.

    Attributes:
      sizes: of the model, for a sample.
      target: what devices there are.
      samples: of a step.
      tokens: of a sample.
      peak: FLOP/s of a device in the format of the products.
    """

    sizes: ModelSizes
    target: Target
    samples: int
    tokens: int
    peak: float

    def __call__(self, choice: Choice) -> Sketched:
        kept_device, kept_host = self._activations(choice)
        state_device, state_host = self._state(choice)
        return Sketched(
            state_device + kept_device, state_host + kept_host, self._seconds(choice, kept_host)
        )

    # -- bytes ----------------------------------------------------------------------------------

    def _state(self, at: Choice) -> tuple[float, float]:
        """Parameters, masters, moments and gradients: (of the device, of host memory)."""
        s, shard = self.sizes, at.data
        each = s.parameters / (at.pipe * at.tensor)
        param = s.compute_bytes / (shard if at.stage == 3 else 1)
        if at.stage == 3 and not at.optimizer_waits and s.state_bytes > 8:
            param = 0.0  # gathered from the masters
        state = s.state_bytes / (shard if at.stage >= 1 else 1)
        grad = s.grad_bytes / (shard if at.stage >= 2 else 1)
        device = [x for x, waits in self._waiting(at, param, state, grad) if not waits]
        host = [x for x, waits in self._waiting(at, param, state, grad) if waits]
        unit = s.in_units / max(s.units, 1) / at.tensor
        working = unit * (2 * s.compute_bytes + s.grad_bytes) if at.stage == 3 else 0.0
        if at.stage == 3 and at.pipe > 1 and at.gather == "step":
            working = each * s.compute_bytes
        # Stages bring all parameters that wait, and put interleaved ones into their order.
        if at.pipe > 1 and (at.parameters_wait or at.schedule == "interleaved"):
            working += each * (s.compute_bytes + s.grad_bytes)
        elif at.accumulation(self.samples) > 1 and at.stage < 3:  # of one micro-batch, to add
            working += each * s.compute_bytes
        return each * sum(device) + working, each * sum(host)

    @staticmethod
    def _waiting(
        at: Choice, param: float, state: float, grad: float
    ) -> Iterator[tuple[float, bool]]:
        yield param, at.parameters_wait
        yield state, at.optimizer_waits
        yield grad, at.parameters_wait

    def _activations(self, at: Choice) -> tuple[float, float]:
        """What is kept from forward to backward: (of the device, of host memory)."""
        s, micro = self.sizes, at.micro
        # Of the products half is cut over tensor, and the rest along the sequence if so asked.
        cut = at.tensor if at.sequence else 2 * at.tensor / (1 + at.tensor)
        everything = s.kept_by(NONE).bytes / cut
        kept = s.kept_by(at.recompute).bytes / cut
        together = json.loads(at.recompute)["every_n"] if "every_n" in at.recompute else 1
        one_unit = together * everything / max(s.units, 1)
        if at.pipe == 1:
            working = one_unit if at.recompute != NONE else 0.0
            if at.activations_wait:
                return micro * (working + kept / max(s.units, 1)), micro * kept
            return micro * (kept + working), 0.0
        chunks = at.chunks if at.schedule == "interleaved" else 1
        flight = min(at.accumulation(self.samples), 2 * at.pipe)
        if at.schedule == "gpipe":
            flight = at.accumulation(self.samples)
        handed = s.handed / max(s.units, 1) / cut  # of a chunk
        inside = (one_unit if at.recompute != NONE else 0.0) + kept / (at.pipe * chunks)
        waiting = (
            flight * chunks * (kept / (at.pipe * chunks) if at.stage_keeps == "save" else handed)
        )
        if at.activations_wait:
            return micro * inside, micro * waiting
        return micro * (inside + waiting), 0.0

    # -- seconds --------------------------------------------------------------------------------

    def _seconds(self, at: Choice, kept_host: float) -> float:
        s, chip = self.sizes, self.target.chip
        again = s.kept_by(at.recompute).again
        if at.pipe > 1 and at.stage_keeps == "stage":
            again += s.forward
        devices = at.ranks * at.pipe * at.tensor
        flops = self.samples * (3 * s.forward + again) / devices
        rows = at.micro * self.tokens
        reached = REACHED * rows / (rows + _SMALL / 8) * (0.97 ** math.log2(at.tensor))
        micros = at.accumulation(self.samples)
        weights = s.parameters / (at.pipe * at.tensor)
        read = micros * 3 * weights * s.compute_bytes / chip.bandwidth
        compute = max(flops / (self.peak * reached), read)
        if at.pipe > 1:
            chunks = at.chunks if at.schedule == "interleaved" else 1
            compute *= IN_STAGES * (1 + (at.pipe - 1) / (micros * chunks))
        shown = compute + self._of_tensor(at, micros) + self._of_update(at)
        beside = max(self._of_data(at, micros), self._of_host(at, micros, kept_host))
        return shown + max(0.0, beside - HIDDEN * compute) + 0.1 * beside

    def _of_tensor(self, at: Choice, micros: int) -> float:
        """Four all-reduces a unit, forward and backward, of what it is handed."""
        if at.tensor == 1:
            return 0.0
        s = self.sizes
        bytes_ = 4 * 2 * s.handed / at.pipe * at.micro * micros * (at.tensor - 1) / at.tensor
        return bytes_ / self._speed(at.tensor)

    def _of_data(self, at: Choice, micros: int) -> float:
        """Gathers of parameters and sums of gradients."""
        s = self.sizes
        each = s.parameters / (at.pipe * at.tensor)
        sums, gathers = 1.0, 0.0
        if at.stage in (1, 2):
            gathers = s.compute_bytes
        if at.stage >= 2:
            sums = float(micros)
        if at.stage == 3:
            often = 1 if at.gather == "step" and at.pipe > 1 else 2 * micros
            gathers = often * s.compute_bytes
        along = 0.0
        if at.data > 1:
            factor = 2 if at.stage == 0 else 1
            part = (at.data - 1) / at.data
            speed = self._speed(at.data * at.tensor)
            along += each * part * (gathers + factor * sums * s.grad_bytes) / speed
        if at.replica > 1:
            shared = each / (at.data if at.stage >= 2 else 1)
            speed = self._speed(at.ranks * at.tensor)
            along += 2 * shared * sums * s.grad_bytes / speed
        return along

    def _of_update(self, at: Choice) -> float:
        """State that comes from host memory for the update, and goes back: nothing hides it."""
        if not at.optimizer_waits:
            return 0.0
        shard = at.data if at.stage >= 1 else 1
        each = self.sizes.parameters / (at.pipe * at.tensor * shard)
        return 2 * self.sizes.state_bytes * each / self.target.chip.host_link

    def _of_host(self, at: Choice, micros: int, kept_host: float) -> float:
        s, link = self.sizes, self.target.chip.host_link
        each = s.parameters / (at.pipe * at.tensor * at.data)
        moved = 0.0
        if at.parameters_wait:
            moved += micros * 2 * (s.compute_bytes + s.grad_bytes) * each
        if at.activations_wait:
            moved += 2 * micros * kept_host
        return moved / link

    def _speed(self, span: int) -> float:
        """Bytes a second that a device sends along an axis over so many neighbouring devices."""
        chip = self.target.chip
        within = self.target.slice_count if self.target.topology else self.target.node
        if span > max(within, 1):
            return chip.outside
        return 2 * chip.link if chip.platform == "tpu" else chip.link * chip.links


def lacking(sketched: Sketched, target: Target) -> float:
    """By what factor it needs more than there is, with head room; 1 where that is not so."""
    chip = target.chip
    device = sketched.device * (1 + MAY_BE_BELOW) / chip.memory
    return max(1.0, device, sketched.host / chip.host_memory)
