"""Whether the devices at hand have room for a step, before anything is allocated on them."""

import logging
import math
from typing import Any

import jax

from jaxspeed.config import Config
from jaxspeed.engine.oom_help import device_limit, remedies
from jaxspeed.hardware import chip_of_kind
from jaxspeed.objective.config_model import family_sizes
from jaxspeed.placement.show import bytes_text
from jaxspeed.planner.memory import Memory, memory_of
from jaxspeed.train.program import Program

log = logging.getLogger("jaxspeed")
NAMED = 3  # components that a warning names


def warn_of_room(program: Program, batch: Any = None) -> None:
    """A warning where a step is not expected to fit its devices.

    Costs nothing where it is not known what they have, as of simulated ones; else about a second,
    most of it a trace that the first step needs in any case.

    Args:
      program: on the devices at hand.
      batch: arrays or their shapes, of any number of samples; by default those of the config.
    """
    if program.serving:  # whose step is several programs
        return
    room = room_of(program)
    if room is None:
        return
    shapes = shapes_by_config(program.config) if batch is None else batch
    if shapes is None:
        return
    try:
        found = memory_of(program, of_a_step(shapes, program.batch.train))
    except Exception as error:  # an estimate is no reason to stop a run that may well work
        log.warning("memory: what a step needs could not be estimated: %s", error)
        return
    if found.on(room) == "does not fit":
        log.warning("%s", _told(program, found, room))


def room_of(program: Program) -> int | None:
    """The bytes that one device has for a program, where it tells or is a known chip."""
    limit = device_limit(program)
    if limit is not None:
        return limit
    chip = chip_of_kind(program.devices[0].device_kind)
    return chip.memory if chip else None


def of_a_step(batch: Any, samples: int) -> Any:
    """The shapes of a batch with as many samples as a step has."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((samples, *x.shape[1:]) if x.shape else (), x.dtype), batch
    )


def shapes_by_config(config: Config) -> Any:
    """Of a batch, where the config names its model and says `data.seq_len`; else None."""
    sizes = family_sizes(config)
    if sizes is None or config.data.seq_len is None:
        return None
    # Here because grain, with which data is read, gives the root logger a handler.
    from jaxspeed.data import facts, told_shapes

    return told_shapes(config.data, facts(sizes), samples=1)


def _told(program: Program, found: Memory, room: int) -> str:
    largest = sorted((c for c in found.components if not c.host), key=lambda c: -c.bytes)[:NAMED]
    parts = ", ".join(f"{bytes_text(c.bytes)} of {c.name}" for c in largest)
    kind = program.devices[0].device_kind
    lines = [
        f"a step is not expected to fit: it needs {bytes_text(found.device)} of a device "
        f"(estimated; {parts}), and {kind} has {bytes_text(room)}",
        *remedies(program)[:2],
    ]
    missing = math.ceil(100 * (found.device / room - 1))
    lines.append(
        f"it is {missing}% too much; `jaxspeed plan` tells of each part and what would fit"
    )
    return "\n".join(lines)
