"""Output before the first step: placement table, compiled step, memory needed and available."""

import math

import jax
from rich.console import Console

from jaxspeed.engine.oom_help import device_limit, stored_bytes
from jaxspeed.generation.rollout_programs import RolloutPrograms, rollout_programs
from jaxspeed.hardware.targets import Target, memory_of_machine
from jaxspeed.metrics.start_lines import start_lines
from jaxspeed.placement.paths import counted
from jaxspeed.placement.show import bytes_text, scaled_text
from jaxspeed.placement.table import PlacementTable
from jaxspeed.run.trainer import Trainer
from jaxspeed.train.program import Program


def show_opening(console: Console, trainer: Trainer, detailed: bool | None = None) -> None:
    """Print devices, data, and memory; if detailed, placement table and compiled step too.

    By default a run of adapters, or of one device, is not.
    """
    engine, program = trainer.engine, trainer.engine.program
    if jax.process_index() != 0:
        console = Console(quiet=True)
    if detailed is None:
        detailed = len(program.devices) > 1 and not trainer.has_adapters
    console.print(on_what(program), highlight=False)
    console.print(trainable_line(program.table), highlight=False)
    console.print(f"data  {trainer.corpus.summary}", highlight=False)
    console.print(f"run   {trainer.folder.path}, {_where(trainer)}", highlight=False)
    console.print()
    if not program.in_this_process:
        return
    if detailed:
        console.print(engine.placements)
    with trainer.recorder.phase("compile"):
        meanwhile = trainer.sample.compile if trainer.sample else None
        showing = start_lines(console)
        compiled = engine.compiled(trainer.example(), meanwhile=meanwhile, showing=showing)
    if detailed:
        console.print(compiled)
    temp_bytes = max(report.temp_bytes for report in (compiled, *compiled.others.values()))
    rollout = rollout_programs(program, trainer.example())
    console.print(memory_line(program, temp_bytes, rollout=rollout), highlight=False)
    console.print()


def on_what(program: Program, target: Target | None = None) -> str:
    """Number of parameters, devices and compute dtype."""
    device = program.devices[0]
    parameters = scaled_text(sum(math.prod(row.leaf.shape) for row in program.table), "").strip()
    where = "simulated on this CPU" if device.platform == "cpu" else f"({device.device_kind})"
    where = f"({target}, {target.chip.kind})" if target else where
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    where = f"{where}{processes}" if program.in_this_process else "on Ray"
    exchanges = f"\n{program.exchange_text}" if program.exchange_text else ""
    on = f"[bold]{parameters} parameters {program.place}[/] {where}"
    return f"{on}, {program.config.compute_dtype}{exchanges}"


def trainable_line(table: PlacementTable) -> str:
    """Number and share of the parameters that are trained."""
    counts = [(math.prod(row.leaf.shape), row.leaf.trainable) for row in table]
    trained, total = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    return f"trainable parameters {trained:,} of {total:,} ({100 * trained / max(total, 1):.3g}%)"


def memory_line(
    program: Program,
    temp_bytes: int | None = None,
    target: Target | None = None,
    rollout: RolloutPrograms | None = None,
) -> str:
    """Memory of the state, of temporary values if known, of caches; memory of the devices."""
    tables = [program.table, *(frozen.table for frozen in program.frozen.values())]
    total = sum(total for table in tables for total, _ in table.bytes_by_role().values())
    limit = target.chip.memory if target else device_limit(program)
    offloaded = sum(sum(table.host_bytes_by_role().values()) for table in tables)
    per_device = sum(map(stored_bytes, tables))
    of_frozen = "".join(
        f", {bytes_text(stored_bytes(frozen.table))} of it for the {name}"
        for name, frozen in program.frozen.items()
    )
    host = f" and {bytes_text(offloaded)} in host memory" if offloaded else ""
    if limit:
        has = f"{bytes_text(limit)} per device"
    else:  # the devices are simulated
        ram = bytes_text(memory_of_machine())
        has = f"{ram} of host RAM shared by {counted(len(program.devices), 'device')}"
    temp = ""
    if temp_bytes is not None:
        temp = f", and {bytes_text(temp_bytes)} of temporary values (from the compiler)"
    if rollout and rollout.cache_bytes:
        temp += f", and {bytes_text(rollout.cache_bytes)} of key-value caches while it samples"
    return (
        f"needed: {bytes_text(total)} of state in total, {bytes_text(per_device)} "
        f"per {program.holder}{of_frozen}{host} (from the table){temp}; available: {has}"
    )


def _where(trainer: Trainer) -> str:
    step, batch = trainer.reached.step, trainer.engine.program.batch.train
    epochs = trainer.steps * batch / trainer.corpus.epoch
    if step >= trainer.steps:
        return f"all {step} steps are done"
    if step:
        return f"resumed after step {step} of {trainer.steps}"
    return f"{counted(trainer.steps, 'step')} ({epochs:.3g} epochs)"
