"""The function `jaxspeed.plan`: whether a config fits its devices, and its step time."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspeed.config import Config, load_config
from jaxspeed.errors import ConfigError
from jaxspeed.hardware.known_chips import chips_of
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner import SEARCH_SECONDS
from jaxspeed.planner.compile import PATIENCE
from jaxspeed.planner.compile.in_child import StepCompiler, refuse_missing

if TYPE_CHECKING:
    import optax

    from jaxspeed.planner.plan import Plan


def plan(
    config: Config | Mapping[str, Any] | str | Path,
    target: str | None = None,
    *,
    model: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    optimizer: "optax.GradientTransformation | None" = None,
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
    """Plan a config: memory, step time and communication, without allocating the model.

    Args:
      config: as for `jaxspeed.initialize`, with the data's shapes (`data.seq_len`).
      target: absent devices: `v5p:4x4x8`, `h100:64`, `cpu:8`. Call this before any other use of
        JAX, because as many devices are simulated. None: the current devices.
      model, loss_fn, optimizer: as for `jaxspeed.initialize`. To compile for a target they are
        pickled for another process, so they must be functions of a module.
      compile: whether to compile the step; by default only without a target.
      hardware: a YAML file with further chips.
      patience: timeout in seconds of a compilation for a target.
      tokens: of a run, for its device-hours; by default `run.steps` of the config.
      keep: a file for the compiled step, with which a run starts without compilation
        (`run.executable`).
      search: whether to search for the fastest config on the target among variants of this one's
        mesh, stage, schedule, recompute, offload and micro-batch, at the same batch size. With
        `compile` the best of them are compiled instead of this one.
      search_seconds: time limit of the search's estimates.
      write: a YAML or JSON file for the best config, if one was found.
      progress: called with lines about the search's progress.

    Raises:
      ConfigError, PlacementError, ModelError: an impossible setting, with what would work.
      RunError: the compilation failed.
    """
    machine = target_of(target, chips_of(hardware)) if target is not None else None
    if search and machine is None:
        raise ConfigError("search: needs a target")
    if search and not search_seconds > 0:
        raise ConfigError(f"search_seconds {search_seconds:g}: must be more than 0")
    if write is not None:
        from jaxspeed.planner.search.result import refuse_path

        refuse_path(write, search)
    compile = machine is None if compile is None else compile
    if machine and compile:
        refuse_missing(machine, keep is not None)
    if keep is not None and not (machine and compile):
        raise ConfigError("keep: needs a target and compile, because it saves the compiled step")
    if keep is not None and search:
        raise ConfigError(
            "keep: a search compiles several steps; use keep in a plan of the config that it writes"
        )
    compiles_step = compile and not search
    with StepCompiler(machine, keep) if machine and compiles_step else nullcontext() as compiler:
        # The imports of JAX, here and in the compiler's process, take a second.
        from jaxspeed.planner.make_plan import plan_run
        from jaxspeed.run import source_of
        from jaxspeed.user_models.config_model import hidden_size_of

        devices = [f"run.devices=cpu:{machine.count}"] if machine else []
        asked = load_config(config, hidden_size=hidden_size_of())
        run_plan = plan_run(
            source_of(load_config(asked, devices), model, loss_fn, optimizer, name="plan"),
            compiling=compile,
            target=machine,
            compiler=compiler,
            patience=patience,
            tokens=tokens,
            search_seconds=search_seconds if search else None,
            progress=progress or (lambda text: None),
        )
    if write is not None and run_plan.search and run_plan.search.winner:
        from jaxspeed.planner.search.result import write_config

        named = str(config) if isinstance(config, str | Path) else None
        write_config(write, asked.given, run_plan.search, named)
    return run_plan
