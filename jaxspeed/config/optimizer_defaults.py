"""Validation and defaults of the `optimizer` and `scheduler` sections."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from jaxspeed.config.lr_schedules import ABSOLUTE_SCHEDULES, SCHEDULERS
from jaxspeed.config.optimizers import (
    OPTIMIZERS,
    PAGED,
    REMOVED_OPTIMIZERS,
    TRAINER_OPTIMIZERS,
    TWO_RATES,
    UNBUILT_OPTIMIZERS,
)
from jaxspeed.config.problems import Problem, from_pydantic, unknown_name
from jaxspeed.config.schema import Settings
from jaxspeed.config.suggestions import REMOVE, Fix
from jaxspeed.config.tree import VOCABULARY
from jaxspeed.config.types import Section
from jaxspeed.config.verdicts import REMOVED, judge, shown


def complete(settings: Settings) -> tuple[Settings, list[Problem], dict[str, str]]:
    """Fill in `optimizer` and `scheduler`, so that they can be built as they are.

    Returns:
      The settings, problems, and notes by path on defaults that surprise.
    """
    notes: dict[str, str] = {}
    problems: list[Problem] = []
    update: dict[str, Any] = {}
    for key, table in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        section = getattr(settings, key)
        if section is None:
            continue
        name = canonical_name(section.type, table)
        if name is None and key == "optimizer":
            name = TRAINER_OPTIMIZERS.get(section.type.lower())
        if name is None:
            problems.append(_unknown_type(key, section, table))
            continue
        params, wrong = _checked(key, table[name], section)
        problems += [_with_end(problem, settings.run.steps) for problem in wrong]
        update[key] = section.model_copy(update={"type": name, "params": params})
    written_params = settings.optimizer.params if settings.optimizer else {}
    settings = settings.model_copy(update=update)
    if "optimizer" in update:
        settings, notes = _base_rates(settings, written_params)
        notes |= _paged(settings)
    if "scheduler" in update:
        problems += _peak_rate(settings)
    return settings, problems, notes


def canonical_name(name: str, table: Iterable[str]) -> str | None:
    """DeepSpeed's spelling of a type, whatever its capitalisation."""
    return {known.lower(): known for known in table}.get(name.lower())


def _unknown_type(key: str, section: Any, table: Mapping[str, type[Section]]) -> Problem:
    path, name = f"{key}.type", section.type
    if unbuilt := canonical_name(name, UNBUILT_OPTIMIZERS):
        works = f'{unbuilt} is not built. Write "{UNBUILT_OPTIMIZERS[unbuilt]}".'
        return Problem(path, shown(name), works)
    if removed := canonical_name(name, REMOVED_OPTIMIZERS):
        new = REMOVED_OPTIMIZERS[removed]
        works = f'{REMOVED}, and not built here: write "{new}".'
        idle = [param for param in section.params if param not in table[new].model_fields]
        fix = {path: new} | {f"{key}.params.{param}": REMOVE for param in idle}
        return Problem(path, shown(name), works, fix=fix)
    return unknown_name(path, name, table)


def _checked(key: str, model: type[Section], section: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Validate parameters: the honoured ones with defaults, and problems."""
    prefix, params, tree = f"{key}.params.", section.params, {key: section.model_dump()}
    problems: list[Problem] = []
    for _ in range(2):
        try:
            checked = model.model_validate(params)
            break
        except ValidationError as error:
            siblings = list(model.model_fields)
            problems += [from_pydantic(item, prefix, siblings, tree) for item in error.errors()]
            wrong = {item["loc"][0] for item in error.errors()}
            params = {name: value for name, value in params.items() if name not in wrong}
    else:  # only required parameters are missing
        checked = model.model_construct(**params)
    filled = checked.model_dump(warnings=False)
    if filled.get("torch_adam") and filled.get("adam_w_mode") and "weight_decay" not in params:
        filled["weight_decay"] = 0.01  # of torch.optim.AdamW; DeepSpeed's own Adam has 0
    for name in params:
        declared = VOCABULARY[prefix + name]
        if judge(declared, filled[name], lambda path: None)[0] == "refused":
            works = f"Refused: {declared.sentence}"
            fix: Fix = {prefix + name: REMOVE}
            fix |= {"gradient_clipping": params[name]} if name == "max_grad_norm" else {}
            problems.append(Problem(prefix + name, shown(filled[name]), works, fix=fix))
    honoured = {
        name: value
        for name, value in filled.items()
        if VOCABULARY[prefix + name].verdict == "honoured"
    }
    return honoured, list(dict.fromkeys(problems))


def _with_end(problem: Problem, steps: int | None) -> Problem:
    """A problem of a schedule's parameters; of a missing end of the decay with its source."""
    if problem.path != "scheduler.params.total_num_steps" or problem.found != "nothing":
        return problem
    works = f'{problem.works} "auto" takes run.steps; WarmupLR has no decay.'
    return replace(problem, works=works, fix={problem.path: "auto"} if steps else {})


def rate_is_the_schedules(settings: Settings) -> bool:
    """Whether the schedule sets the rate itself, whatever the optimizer's `lr`."""
    scheduler = settings.scheduler
    if scheduler is None:
        return False
    name = canonical_name(scheduler.type, SCHEDULERS)
    if name == "WarmupLR":
        return scheduler.params.get("warmup_max_lr") is not None
    return name in ABSOLUTE_SCHEDULES


def _base_rates(
    settings: Settings, written_params: dict[str, Any]
) -> tuple[Settings, dict[str, str]]:
    """Fill in the optimizer's learning rates, as DeepSpeed does, with a note on a missing one."""
    optimizer = settings.optimizer
    assert optimizer is not None
    params = dict(optimizer.params)
    defaults, missing = {"lr": params["lr"]}, "lr" not in written_params
    if optimizer.type in TWO_RATES:
        defaults = dict(zip(("muon_lr", "adam_lr"), TWO_RATES[optimizer.type], strict=True))
        missing = any(params[key] is None for key in defaults) and params["lr"] is None
        for key, default in defaults.items():
            if params[key] is None:
                params[key] = default if params["lr"] is None else params["lr"]
        params["lr"] = params["muon_lr"] if params["lr"] is None else params["lr"]
    filled = optimizer.model_copy(update={"params": params})
    notes = {}
    if missing and not rate_is_the_schedules(settings):
        taken = " and ".join(f"{key} {value:g}" for key, value in defaults.items())
        whose = "its" if optimizer.type in ("NorMuon", "SOAP") else "DeepSpeed's"
        notes["optimizer.params.lr"] = f"Not set: {whose} default, {taken}, is taken."
    return settings.model_copy(update={"optimizer": filled}), notes


def _paged(settings: Settings) -> dict[str, str]:
    """A note on what a paged optimizer is here."""
    optimizer = settings.optimizer
    assert optimizer is not None
    if not optimizer.type.startswith(PAGED):
        return {}
    resident = optimizer.type.removeprefix(PAGED)
    offload = settings.zero_optimization.offload_optimizer
    if "device" in offload.model_fields_set and offload.device == "none":
        means = f"{resident}: offload_optimizer.device is none, so its state stays on the device."
    elif offload.device == "nvme":
        means = f"{resident}: its state is on the disk of offload_optimizer.nvme_path."
    else:
        means = (
            f"{resident} with zero_optimization.offload_optimizer.device cpu: its state is in host "
            "memory and streamed through the device in each step, not paged on demand."
        )
    return {"optimizer.type": f"{optimizer.type} is {means}"}


def _peak_rate(settings: Settings) -> list[Problem]:
    """Check that WarmupLR or the optimizer sets the rate at which the warm-up ends."""
    scheduler = settings.scheduler
    assert scheduler is not None
    is_set = scheduler.type != "WarmupLR" or scheduler.params["warmup_max_lr"] is not None
    if is_set or settings.optimizer is not None:
        return []
    works = "Needs the rate at which the warm-up ends, as there is no optimizer section."
    return [Problem("scheduler.params.warmup_max_lr", "nothing", works)]
