"""`jaxspeed.plan`: M against N from Python."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optax

from jaxspeed.config import Config, load_config
from jaxspeed.errors import ConfigError

# Importing the folder `plan` before the function takes its name: an import sets it otherwise.
from jaxspeed.hardware.known_chips import chips_of
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.in_child import PATIENCE, refuse_missing
from jaxspeed.planner.search.result import refuse_path, write_config

if TYPE_CHECKING:
    from jaxspeed.planner.plan import Plan

SEARCH_SECONDS = 240.0


def plan(
    config: Config | Mapping[str, Any] | str | Path,
    target: str | None = None,
    *,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    compile: bool | None = None,
    hardware: str | Path | None = None,
    patience: float = PATIENCE,
    tokens: float | None = None,
    keep: str | Path | None = None,
    search: bool = False,
    search_seconds: float = SEARCH_SECONDS,
    write: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> "Plan":
    """What a config would train, without making an array of its model.

    Args:
      config: what `jaxspeed.initialize` takes, with the data's shapes (`data.seq_len`).
      target: devices that need not be here: `v5p:4x4x8`, `h100:64`, `cpu:8`. Call this before
        anything else uses JAX, because as many devices are simulated. None: the devices here.
      model, loss_fn, optimizer: as `jaxspeed.initialize` takes them. To compile for a target they
        go to another process, so they must be functions of a module.
      compile: whether to compile the step; by default only where there is no target.
      hardware: a YAML file of chips beside the known ones.
      patience: seconds after which a compile for a target is given up.
      tokens: of a run, for its device-hours; by default `run.steps` of the config.
      keep: a file that is to have the compiled step, for a run that starts without compilation
        (`run.executable`).
      search: whether to look for the config that is fastest on the target, of those that differ
        from this one in its mesh, stage, schedule, recompute, offload and micro-batch; the batch of
        a step stays. With `compile` the best of them are compiled instead of this one.
      search_seconds: after which nothing more is estimated.
      write: a YAML or JSON file for the best config, where one was found.
      progress: called with a line as the search goes on.

    Raises:
      ConfigError, PlacementError, ModelError: what cannot be, with what would work.
      RunError: the compile failed.
    """
    # Here because grain, with which data is read, gives the root logger a handler.
    from jaxspeed.planner.make_plan import plan_run
    from jaxspeed.run import source_of

    found = target_of(target, chips_of(hardware)) if target is not None else None
    if search and found is None:
        raise ConfigError("search: needs a target, whose devices it is for")
    if search and not search_seconds > 0:
        raise ConfigError(f"search_seconds {search_seconds:g}: needs seconds, more than 0")
    if write is not None:
        refuse_path(write, search)
    compile = found is None if compile is None else compile
    if found and compile:
        refuse_missing(found, keep is not None)
    if keep is not None and not (found and compile):
        raise ConfigError("keep: there is a step to keep only where one is compiled for a target")
    if keep is not None and search:
        raise ConfigError("keep: a search compiles several steps; keep the one of what it writes")
    devices = [f"run.devices=cpu:{found.count}"] if found else []
    asked = load_config(config)
    source = source_of(load_config(asked, devices), model, loss_fn, optimizer, name="plan")
    made = plan_run(
        source,
        compiling=compile,
        target=found,
        patience=patience,
        tokens=tokens,
        keep=keep,
        search_seconds=search_seconds if search else None,
        progress=progress or (lambda text: None),
    )
    if write is not None and made.search and made.search.winner:
        named = str(config) if isinstance(config, str | Path) else None
        write_config(write, asked.given, made.search, named)
    return made
