"""Checks of a step before allocation: attention that is refused, memory that does not suffice."""

import logging
import math
from typing import Any

import jax

from jaxspeed.axes import SEQ
from jaxspeed.config import Config
from jaxspeed.data import known_shapes
from jaxspeed.data.model_limits import limits_of_run
from jaxspeed.engine.oom_help import device_limit, remedies
from jaxspeed.hardware import chip_of_kind
from jaxspeed.placement.batch_dims import check_sequence_dims
from jaxspeed.placement.show import bytes_text
from jaxspeed.planner.memory import Memory, memory_of
from jaxspeed.train.program import Program
from jaxspeed.user_models.batches import WithExtra
from jaxspeed.user_models.config_model import family_sizes

log = logging.getLogger("jaxspeed")
NAMED = 3  # number of components in the warning


def warn_of_room(program: Program, batch: Any = None) -> None:
    """Log a warning if a step is not expected to fit its devices.

    Free if their memory size is unknown, as of simulated devices; otherwise about a second, most of
    it a trace that the first step reuses.

    Args:
      program: on the current devices.
      batch: arrays or their shapes, of any number of samples; by default derived from the config.
    """
    if not program.on_one_mesh:
        return
    room = room_of(program)
    if room is None:
        return
    shapes = shapes_by_config(program.config) if batch is None else batch
    if shapes is None:
        return
    try:
        memory = memory_of(program, of_a_step(shapes, program.batch.train))
    except Exception as error:  # a failed estimate must not stop a run that may well work
        log.warning("memory: the memory of a step could not be estimated: %s", error)
        return
    if memory.on(room) == "does not fit":
        log.warning("%s", _message(program, memory, room))


def refuse_attention(program: Program, batch: Any = None) -> None:
    """Raise ConfigError with all attentions that cannot run over `seq` as the config says.

    And for an order of tokens that the loss does not allow, and BatchError for a batch without the
    dims of positions that the config names. Before anything is allocated; only where the batch's
    shapes are known, as in `warn_of_room`. Otherwise the first step refuses them.
    """
    config, sequence = program.config, program.config.parallel.sequence
    if program.mesh.shape[SEQ] == 1:
        return
    if batch is not None:
        samples = batch.samples if isinstance(batch, WithExtra) else batch
        check_sequence_dims(samples, sequence.dims, program.mesh.shape)
    if sequence.kind == "auto" and sequence.layout != "zigzag":
        return
    shapes = _any_shapes(config, program.mesh.shape[SEQ]) if batch is None else batch
    if shapes is not None and program.on_one_mesh:
        program.attention_report(of_a_step(shapes, program.batch.train))


def _any_shapes(config: Config, seq: int) -> Any:
    """As `shapes_by_config`, of sequences that `seq` divides if the config sets no length."""
    if family_sizes(config) is None or config.data.seq_len is not None:
        return shapes_by_config(config)
    limits = limits_of_run(config)
    more = int(limits.pairs is not None and limits.pairs.reads_ends)  # inputs of each completion
    data = config.data.model_copy(update={"seq_len": 2 * seq - more})
    return known_shapes(data, limits, samples=1)


def room_of(program: Program) -> int | None:
    """Memory of one device in bytes: reported by the backend, or of a known chip."""
    limit = device_limit(program)
    if limit is not None:
        return limit
    chip = chip_of_kind(program.devices[0].device_kind)
    return chip.memory if chip else None


def of_a_step(batch: Any, samples: int) -> Any:
    """The shapes of a batch with a step's number of samples."""
    if isinstance(batch, WithExtra):
        return WithExtra(of_a_step(batch.samples, samples), batch.extra)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((samples, *x.shape[1:]) if x.shape else (), x.dtype), batch
    )


def shapes_by_config(config: Config) -> Any:
    """Shapes of a batch if the config names its model and sets `data.seq_len`, otherwise None."""
    if family_sizes(config) is None or config.data.seq_len is None:
        return None
    return known_shapes(config.data, limits_of_run(config), samples=1)


def _message(program: Program, memory: Memory, room: int) -> str:
    largest = sorted((c for c in memory.components if not c.host), key=lambda c: -c.bytes)[:NAMED]
    parts = ", ".join(f"{bytes_text(c.bytes)} of {c.name}" for c in largest)
    kind = program.devices[0].device_kind
    lines = [
        f"a step is not expected to fit: it needs {bytes_text(memory.device)} per device "
        f"(estimated; {parts}), and {kind} has {bytes_text(room)}",
        *remedies(program)[:2],
    ]
    missing = math.ceil(100 * (memory.device / room - 1))
    lines.append(
        f"{missing}% over budget; `jaxspeed plan` shows the breakdown and configs that fit"
    )
    return "\n".join(lines)
