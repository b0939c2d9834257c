"""What a run says before its first step: M against N, the mesh, what the devices will exchange."""

import math
import os

import jax
from rich.console import Console

from jaxspeed.engine.oom_help import device_limit, stored_bytes
from jaxspeed.hardware.targets import Target
from jaxspeed.placement.show import bytes_text, scaled_text
from jaxspeed.run.trainer import Trainer
from jaxspeed.train.program import Program


def show_opening(console: Console, trainer: Trainer) -> None:
    """The table, the collectives of the compiled step, and where things lie."""
    engine, program = trainer.engine, trainer.engine.program
    if jax.process_index() != 0:
        console = Console(quiet=True)
    console.print(on_what(program), highlight=False)
    console.print(f"data  {trainer.corpus.summary}", highlight=False)
    console.print(f"run   {trainer.folder.path}, {_where(trainer)}", highlight=False)
    console.print()
    if not program.in_this_process:
        return
    console.print(engine.placements)
    with trainer.recorder.phase("compile"):
        compiled = engine.compiled(trainer.example())
    console.print(compiled)
    console.print(m_against_n(program, compiled.temp_bytes), highlight=False)
    console.print()


def on_what(program: Program, target: Target | None = None) -> str:
    """How many parameters, on which devices, in which format."""
    device, count = program.devices[0], len(program.devices)
    parameters = scaled_text(sum(math.prod(row.leaf.shape) for row in program.table), "").strip()
    where = "simulated on this CPU" if device.platform == "cpu" else f"({device.device_kind})"
    where = f"({target}, {target.chip.kind})" if target else where
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    on = f"[bold]{parameters} parameters on {count} devices[/] {where}{processes}"
    if program.serving and not program.in_this_process:
        count = program.ranks + program.serving.servers
        on = f"[bold]{parameters} parameters in {count} processes[/] on Ray"
    return f"{on}, {program.config.compute_dtype}{_server(program)}"


def _server(program: Program) -> str:
    """Who does what, where there are servers."""
    serving = program.serving
    if serving is None:
        return ""
    down, up = bytes_text(serving.pull.bytes), bytes_text(serving.push.bytes)
    servers = f"{serving.servers} server{'s' * (serving.servers > 1)}"
    return (
        f"\n[bold]{servers}, {program.ranks} workers[/] {serving.pace}; each worker pulls {down} "
        f"and pushes {up} a version"
    )


def m_against_n(
    program: Program, temp_bytes: int | None = None, target: Target | None = None
) -> str:
    """What the state needs, with temporary values where they are known, and what there is."""
    whole = sum(whole for whole, _ in program.table.bytes_by_role().values())
    limit = target.chip.memory if target else device_limit(program)
    waiting = sum(program.table.host_bytes_by_role().values())
    host = f" and {bytes_text(waiting)} in its host's memory" if waiting else ""
    has = f"N = {bytes_text(limit)} a device" if limit else _shared_memory(len(program.devices))
    owner = "server" if program.serving else "device"
    temp = ""
    if temp_bytes is not None:
        temp = f", and {bytes_text(temp_bytes)} of temporary values (from the compiler)"
    return (
        f"M = {bytes_text(whole)} of state in all, {bytes_text(stored_bytes(program.table))} a "
        f"{owner}{host} (from the table){temp}; {has}"
    )


def _where(trainer: Trainer) -> str:
    step = trainer.reached.step
    if step >= trainer.steps:
        return f"all {step} steps are done"
    return f"continued after step {step} of {trainer.steps}" if step else f"{trainer.steps} steps"


def _shared_memory(devices: int) -> str:
    """In place of an N: what simulated devices have together."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"N = {bytes_text(memory)}, this machine's, for all {devices} devices together"
