"""Training log and hooks: losses, skipped steps, clipping, step times, memory, batch shapes.

The log does not wait for devices unless `wall_clock_breakdown` is set: a step's metrics are logged
once they have arrived, which may be some steps later.
"""

import contextlib
import logging
import math
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspeed.engine.startup_log import clips_by_default
from jaxspeed.placement.show import bytes_text
from jaxspeed.train.program import Metrics, Program

log = logging.getLogger("jaxspeed")
CLIPPED = 1 - 1e-5  # a norm below this fraction of another one differs by more than rounding
MANY = 4  # shapes of one program from which on recompiling is a habit
SHOWN = ("loss", "grad_norm", "grad_norm_clipped", "lr", "loss_scale")


Hook = Callable[[int, dict[str, float]], Any]


class Reporter:
    """Logs every `steps_per_print` steps and every skipped step; calls hooks.

    Of the steps that were taken although their loss is not finite, the first is logged. The others
    are counted, for hooks, for the lines of `steps_per_print`, and for `flush`.
    """

    def __init__(self, program: Program, step: int = 0) -> None:
        self._config = program.config
        self._device = program.mesh.devices.flat[0]
        self._waiting: deque[tuple[int, Metrics]] = deque()
        weakref.finalize(self, _arrived, self._waiting)  # at the process's end, at the latest
        self._seconds: deque[float] = deque(maxlen=100)
        self._step = step
        self._hooks: list[tuple[Hook, int]] = []
        self._clips_by_default = clips_by_default(program)
        self._nonfinite_losses = self._logged_losses = 0

    @property
    def step(self) -> int:
        """Number of steps so far."""
        return self._step

    def add_hook(self, hook: Hook, every: int) -> None:
        """Call the hook with the metrics of every `every`-th step."""
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1")
        self._hooks.append((hook, every))

    def begin_at(self, step: int) -> None:
        """Continue the count from this step."""
        self.flush()
        self._step = step

    def stepped(self, metrics: Metrics, start: float) -> None:
        """Record one more step, started at `start` by the performance counter."""
        self._step += 1
        if self._config.wall_clock_breakdown:  # only then is a step waited for
            jax.block_until_ready(metrics)
            self._seconds.append(time.perf_counter() - start)
        for value in metrics.values():
            value.copy_to_host_async()
        self._waiting.append((self._step, metrics))
        while self._waiting and all(map(_is_ready, self._waiting[0][1].values())):
            self._say(*self._waiting.popleft())

    def flush(self) -> None:
        """Log the pending steps, and the number of losses that are not finite, if it has grown.

        This waits for the devices.
        """
        while self._waiting:
            self._say(*self._waiting.popleft())
        if self._nonfinite_losses > max(self._logged_losses, 1):
            self._logged_losses = self._nonfinite_losses
            log.warning(
                "%d steps so far were taken although their loss is not finite",
                self._nonfinite_losses,
            )

    def _say(self, step: int, metrics: Metrics) -> None:
        self._say_nonfinite_loss(step, metrics)
        if bool(metrics["skipped"]):
            log.warning(
                "step %d skipped: its gradients are not finite (%d skipped so far, loss scale %g); "
                "engine.diagnose(batch) names the cause",
                step,
                int(metrics["skipped_steps"]),
                float(metrics["loss_scale"]),
            )
        elif self._clips_by_default and float(metrics["grad_norm_clipped"]) < CLIPPED * float(
            metrics["grad_norm"]
        ):
            self._clips_by_default = False  # said once
            log.warning(
                "step %d: the gradient norm %.4g was clipped to %.4g, the default of "
                "gradient_clipping (as in DeepSpeed); set it to 0 for no clipping. Later clipped "
                "steps are not logged: compare the metrics grad_norm and grad_norm_clipped",
                step,
                float(metrics["grad_norm"]),
                float(metrics["grad_norm_clipped"]),
            )
        for hook, often in self._hooks:
            if step % often == 0:
                numbers = {name: float(value) for name, value in metrics.items()}
                hook(step, {**numbers, "nonfinite_losses": float(self._nonfinite_losses)})
        every = self._config.steps_per_print
        if every and step % every == 0:
            shown = ", ".join(f"{k} {float(metrics[k]):.6g}" for k in SHOWN if k in metrics)
            if count := self._nonfinite_losses:
                shown += f", {count} losses not finite"
            log.info("step %d: %s%s%s", step, shown, self._times(), self._memory())

    def _say_nonfinite_loss(self, step: int, metrics: Metrics) -> None:
        if not took_nonfinite_loss(metrics):
            return
        self._nonfinite_losses += 1
        if self._nonfinite_losses == 1:
            finite = math.isfinite(float(metrics["grad_norm"]))
            log.warning(
                "step %d: the loss is %g, but the step was taken, since %s; "
                "engine.diagnose(batch) names the cause. Later ones are not logged: the metric "
                "nonfinite_losses counts them",
                step,
                float(metrics["loss"]),
                "its gradients are finite" if finite else "bf16.check_grad_overflow is off",
            )

    def _times(self) -> str:
        if not self._config.wall_clock_breakdown:
            return ""
        count, median = len(self._seconds), statistics.median(self._seconds)
        return f", {1e3 * median:.3g} ms per step (median of {count})"

    def _memory(self) -> str:
        if not self._config.memory_breakdown:
            return ""
        stats: dict[str, Any] = self._device.memory_stats() or {}
        if "bytes_in_use" not in stats:
            live = sum(
                shard.data.nbytes
                for array in jax.live_arrays(self._device.platform)
                for shard in array.addressable_shards
                if shard.device == self._device
            )
            return f", {bytes_text(live)} of live arrays on {self._device}"
        peak = bytes_text(stats.get("peak_bytes_in_use", 0))
        return f", {bytes_text(stats['bytes_in_use'])} in use, peak {peak}"


def took_nonfinite_loss(metrics: Mapping[str, Any]) -> bool:
    """Whether the step was taken although its loss is not finite."""
    return not metrics["skipped"] and not math.isfinite(float(metrics["loss"]))


def _arrived(waiting: deque[tuple[int, Metrics]]) -> None:
    """Wait for metrics: JAX 0.11.2 aborts where one arrives while the interpreter ends."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for _, metrics in waiting:
            for value in metrics.values():
                np.asarray(value)


def _is_ready(x: Any) -> bool:
    return x.is_ready()


class ShapeLog:
    """Remembers the batch shapes that one program has seen."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._seen: set[Any] = set()

    def is_new(self, batch: Any) -> bool:
        """Whether a batch has shapes that were not seen yet."""
        return _shapes_of(batch) not in self._seen

    def see(self, batch: Any) -> None:
        """Remember the shapes of a batch, and log them if they are new."""
        key = _shapes_of(batch)
        if key in self._seen:
            return
        self._seen.add(key)
        shown = ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in key)
        log.info("%s: compiling for batch %s", self._program, shown)
        if len(self._seen) >= MANY:
            log.warning(
                "%s: this is the %dth batch shape, and each is compiled anew; pad batches to a few "
                "fixed shapes. Now: %s",
                self._program,
                len(self._seen),
                shown,
            )


def _shapes_of(batch: Any) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Name, shape and dtype of each array of a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return tuple((jax.tree_util.keystr(k), tuple(x.shape), str(x.dtype)) for k, x in leaves)
