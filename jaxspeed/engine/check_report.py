"""The report of `engine.check`: a step's values by three programs, leaf by leaf."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxspeed.adapters.adapted_model import AdaptedModel
from jaxspeed.engine.plain_flax import PlainGradients
from jaxspeed.placement.paths import counted, listed
from jaxspeed.placement.rows import Leaf
from jaxspeed.placement.show import as_text
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import Arrays
from jaxspeed.user_models.trainable import train_rule

# Tolerance for the order of summation, relative to the leaf's norm. fp32: sums of up to a million
# terms at eps 6e-8. 16 bits: eps 4e-3 (bf16) or 5e-4 (fp16) on each activation and gradient, whose
# errors mostly average out over a leaf.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
# Tolerance for ring messages, rounded N - 1 times: bf16 as above; int8 by up to 1/254 of a block's
# largest number, so a small leaf in the same block has few significant digits.
OF_WIRE = {"none": 0.0, "bf16": 5e-2, "int8": 0.5}
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
# A value is rounding noise up to this many times what it moves by when each parameter moves by one
# unit in its last place: the bias before a batch normalization, whose gradient is 0 but for that.
# The largest of several such moves counts: that of one number can be 0 by chance.
NOISE = 4.0
NUDGES = 4
SHOWN = 12


@dataclass(frozen=True)
class LeafDifference:
    """Relative differences of one parameter, ||sharded - plain|| / ||plain||.

    A leaf with less than 1/1000 of the global gradient norm is measured against that 1/1000, and
    one that is rounding noise (`NOISE`) against that: pure noise has no meaningful relative
    difference.
    """

    path: str
    gradient: float  # the larger of those against the plain step and against plain Flax
    update: float  # of the parameter's change, not of the parameter


@dataclass(frozen=True)
class CheckReport:
    """Differences between the sharded and the plain step."""

    loss: float
    leaves: tuple[LeafDifference, ...]
    tolerance: float
    devices: int
    # Parameters and state that are not trained or carried as by plain JAX and Flax.
    faults: tuple[str, ...] = ()
    lower: str = ""  # the 16-bit dtype in which the model computes by itself
    parts: int = 1  # of a micro-batch, in which plain Flax draws its random numbers

    @property
    def gradient(self) -> float:
        """The largest relative difference of a gradient."""
        return max((leaf.gradient for leaf in self.leaves), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether loss and gradients agree, and the trained parameters and carried state.

        Updates do not count: Adam turns the rounding noise of a zero gradient into full steps.
        """
        differences = [self.loss, *(leaf.gradient for leaf in self.leaves)]
        # Not "any(d > ...)": a NaN must fail.
        return not self.faults and all(d <= self.tolerance for d in differences)

    def __rich__(self) -> Group:
        verdict = "agrees with" if self.ok else "DIFFERS from"
        title = (
            f"the step on {counted(self.devices, 'device')} {verdict} the step on one device "
            f"(tolerance {self.tolerance:g}"
            + (f": the model computes in {self.lower})" if self.lower else ")")
        )
        table = Table(box=None)
        for name in ("relative difference of", "gradient", "update"):
            table.add_column(name, justify="left" if name[0] == "r" else "right")
        table.add_row("loss", f"{self.loss:.2e}", "")
        worst = sorted(self.leaves, key=lambda leaf: -leaf.gradient)
        for leaf in worst[:SHOWN]:
            table.add_row(leaf.path, f"{leaf.gradient:.2e}", f"{leaf.update:.2e}")
        if len(worst) > SHOWN:
            table.add_row(f"{len(worst) - SHOWN} others, all smaller", "", "")
        notes = self.faults
        if self.parts > 1:
            notes += (
                f"the loss draws random numbers, which each of the {self.parts} parts of a "
                "micro-batch draws by itself: one device computes the same parts, so that this "
                "check does not see what the division of the micro-batch changes",
            )
        apart = [leaf.path for leaf in worst if leaf.update > self.tolerance]
        if self.ok and apart:
            notes += (
                f"updates of {listed(apart)} differ although the gradients agree: an optimizer "
                "that divides by a gradient's size (Adam) makes full steps of rounding noise",
            )
        return Group(Text(title), table, *map(Text, notes))

    def __str__(self) -> str:
        return as_text(self, width=100)


class StepValues(NamedTuple):
    """The values of a step that are compared."""

    loss: Any
    grads: Arrays
    old: Arrays  # parameters, trained or not, before the step
    new: Arrays  # ... and after it
    variables: Arrays  # after it, without random keys
    skipped: Any  # whether it was, because the norm of its gradients is not finite


class Moves(NamedTuple):
    """Distances by which plain Flax's values move when parameters move in their last place."""

    loss: float
    grads: Mapping[str, float]
    values: Mapping[str, float]


def moves_from(by_flax: PlainGradients, nudged: PlainGradients) -> Moves:
    def between(old: Arrays, new: Arrays) -> dict[str, float]:
        return {path: norm(_wide(x) - _wide(new[path])) for path, x in old.items()}

    return Moves(
        norm(_wide(by_flax.loss) - _wide(nudged.loss)),
        between(by_flax.grads, nudged.grads),
        between(by_flax.values, nudged.values),
    )


def compare_steps(
    program: Program,
    lower: str,
    ours: StepValues,
    theirs: StepValues,
    by_flax: PlainGradients,
    moves: Sequence[Moves],
    others: Iterable[tuple[str, Any, Any]] = (),
    parts: int = 1,
) -> CheckReport:
    """Compare the sharded step with the plain one and with plain Flax.

    Args:
      lower: the 16-bit dtype in which the model computes.
      others: (what, by the engine, by plain Flax), compared as well.
      parts: of a micro-batch, which one device takes one by one.
    """
    tolerance = TOLERANCE[DTYPE_NAMES.get(lower, program.config.compute_dtype)]
    if program.update.ring:
        tolerance = max(tolerance, OF_WIRE[program.config.parallel.ring_wire])

    def noise(moved: Iterable[float]) -> float:
        """The size up to which a value is noise, over the tolerance."""
        return NOISE * max(moved) / tolerance

    floor = 1e-3 * math.sqrt(sum(norm(g) ** 2 for g in theirs.grads.values()))

    def gradient(path: str) -> float:
        sides = [theirs.grads[path], by_flax.grads.get(path, theirs.grads[path])]
        least = floor
        if path in by_flax.grads:
            least = max(floor, noise(m.grads[path] for m in moves))
        return max(_difference(ours.grads[path], side, least) for side in sides)

    leaves = tuple(
        LeafDifference(
            path,
            gradient(path),
            _difference(ours.new[path] - ours.old[path], theirs.new[path] - theirs.old[path]),
        )
        for path in ours.grads
    )
    least = noise(m.loss for m in moves)
    loss = max(_difference(ours.loss, side, least) for side in (theirs.loss, by_flax.loss))
    kept = {path: max(tolerance, noise(m.values[path] for m in moves)) for path in by_flax.values}
    faults: Iterable[str] = [
        *_faults(program, ours, by_flax, tolerance, kept),
        *_unlike(others, tolerance, least),
    ]
    if ours.skipped:  # it carries nothing on
        faults = ["the step is skipped: the norm of its gradients is not finite"]
    devices = len(program.devices)
    return CheckReport(loss, leaves, tolerance, devices, tuple(faults), lower, parts)


def _faults(
    program: Program,
    ours: StepValues,
    by_flax: PlainGradients,
    tolerance: float,
    floors: Mapping[str, float],
) -> Iterator[str]:
    """Parameters and state that are not trained or carried as by plain JAX and Flax.

    `floors` are the sizes against which carried values are measured at least.
    """
    for path, grad in by_flax.grads.items():
        if path not in ours.grads and norm(grad) > 0 and not _frozen_by_user(program, path):
            yield f"{path} is not trained: its jax.grad has norm {norm(grad):.3g}"
    for path in by_flax.created.paths:
        yield f"{path} is created by the training pass, and is not carried to the next step"
    for path in ours.grads.keys() - by_flax.grads.keys():
        yield f"{path} is trained, but is not a parameter for Flax"
    # Untrained parameters and all variables have the values that the loss assigned.
    carried = {path: x for path, x in ours.new.items() if path not in ours.grads} | ours.variables
    for path, value in carried.items():
        wanted = by_flax.values.get(path)
        off = 0.0 if wanted is None else _difference(value, wanted, floors[path])
        if not off <= tolerance:  # a NaN must fail
            yield f"{path} is carried to the next step with a relative difference of {off:.2e}"


def _unlike(
    others: Iterable[tuple[str, Any, Any]], tolerance: float, least: float
) -> Iterator[str]:
    for what, ours, by_flax in others:
        off = _difference(ours, by_flax, least)
        if not off <= tolerance and not (np.isnan(ours).all() and np.isnan(by_flax).all()):
            yield f"{what} differs from that by plain Flax, relatively by {off:.2e}"


def _frozen_by_user(program: Program, path: str) -> bool:
    """Whether `trainable`, an optimizer group or `lora` freezes a parameter."""
    rule = train_rule(program.config, program.source.trainable)
    row = program.table.rows.get(path)
    leaf = row.leaf if row else Leaf(path, (), np.dtype(np.float32))
    if leaf.range:
        return True
    # Only the table has the variables' types.
    chosen = row is None if rule.selection.by_leaf else rule.selection.chosen(leaf.paths, None)
    if isinstance(program.model, AdaptedModel):
        chosen = any(
            model_leaf.trainable for model_leaf in program.model.leaves if model_leaf.path == path
        )
    others = [r.leaf for r in program.table if r is not row]
    return not rule.over([*others, replace(leaf, trainable=chosen)])[-1].trainable


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def norm(x: Any) -> float:
    return float(np.linalg.norm(_wide(x).reshape(-1)))


def _difference(a: Any, b: Any, floor: float = 0.0) -> float:
    apart = norm(_wide(a) - _wide(b))
    return 0.0 if apart == 0 else apart / (max(norm(b), floor) or math.nan)
