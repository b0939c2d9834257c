"""DeepSpeed's checkpoints: ZeRO stages 0 to 3, its pipeline, and its universal format.

Stages 1 and 2 have, in `*_optim_states.pt` of each rank, its partition of the flat masters and
moments, and in `param_slice_mappings` which elements of it are which parameter's. Under stage 3
each rank has `ceil(n / ranks)` elements of every parameter, in the order of `param_shapes`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs.archives import StoredTensor, load
from jaxspeed.interop.torch_runs.pickles import Record
from jaxspeed.interop.torch_runs.torch_run import (
    FlatTensor,
    Span,
    TorchRun,
    as_pretrained_error,
    shape_of,
    whole_number,
)
from jaxspeed.optim.loss_scale import LossScale

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-(.+))?-model_states\.pt")
_BY_INDEX = (
    "its optimizer, which has its state by the parameters' numbers, without names: only ZeRO's "
    "stages 1 to 3 store names. The weights alone are read"
)
_UNIVERSAL = "Convert it with DeepSpeed's ds_to_universal.py, and import what that writes"
Values = dict[int, dict[int, dict[str, Any]]]  # by number of the model's part, and data rank


def is_deepspeed(folder: Path) -> bool:
    """Whether a folder has files of DeepSpeed's."""
    return (folder / "latest").is_file() or any(folder.glob("*model_states.pt"))


def read_deepspeed(folder: Path) -> TorchRun:
    """The run of a checkpoint of DeepSpeed's, or of the one that `latest` names.

    Raises:
      PretrainedError: it is incomplete or damaged, or its tensors are split over tensor ranks.
    """
    with as_pretrained_error(folder):
        if not any(folder.glob("*model_states.pt")):
            tag = (folder / "latest").read_text().strip()
            is_name = 0 < len(tag) < 256 and "\0" not in tag and Path(tag).name == tag
            if not is_name or not (folder / tag).is_dir():
                raise PretrainedError(
                    f"{folder / 'latest'}: names no folder beside it: {tag[:80]!r}"
                )
            folder = folder / tag
        return _read(folder)


def _read(folder: Path) -> TorchRun:
    inert = Counter[str]()
    models = _values(folder, _MODEL, inert)
    if not models:
        raise PretrainedError(f"{folder}: has no *_model_states.pt of rank 0")
    first = models[min(models)][0]
    layers = sorted(folder.glob("layer_*-model_states.pt"))
    run = TorchRun(folder, "DeepSpeed", inert=inert)
    run.steps, run.skipped = (
        whole_number(first.get(name) or 0) for name in ("global_steps", "skipped_steps")
    )
    run.updates = run.steps - run.skipped
    run.samples = whole_number(first.get("global_samples") or 0)
    run.position = _position(first.get("lr_scheduler"))
    if any(folder.glob("*expp_rank_*")) or any(folder.glob("*_expert_*")):
        raise PretrainedError(f"{folder}: has experts that are split over ranks. {_UNIVERSAL}")
    dimensions = first.get("checkpoint_parallel_dimensions") or {}
    if dimensions.get("tp_degree", 1) != 1 or (len(models) > 1 and not layers):
        raise PretrainedError(
            f"{folder}: has tensors that are split over tensor ranks. {_UNIVERSAL}"
        )
    if (folder / "zero").is_dir():
        _universal(run, folder / "zero")
    else:
        _partitioned(run, models, _values(folder, _OPTIM, inert, "optimizer_state_dict"))
    stored = _layers(layers, inert) if layers else dict(first["module"] or {})
    for name, tensor in stored.items():
        if isinstance(tensor, StoredTensor) and tensor.shape != (0,):  # a placeholder of stage 3
            run.parameters.setdefault(name, tensor)
    for alias, name in (first.get("shared_params") or {}).items():
        for tensors in (run.parameters, *run.moments.values()):
            if name in tensors:
                tensors.setdefault(alias, tensors[name])
    return run


def _values(
    folder: Path, pattern: re.Pattern[str], inert: Counter[str], key: str | None = None
) -> Values:
    values: Values = {}
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            rank, part = (int(number or 0) for number in match.groups())
            value = load(path, inert)
            of_part = values.setdefault(part, {})
            if rank in of_part:
                raise PretrainedError(f"{path}: there are two files of its rank")
            with as_pretrained_error(path):
                of_part[rank] = dict(value[key] if key else value)
    for part, of_ranks in values.items():
        if sorted(of_ranks) != list(range(len(of_ranks))):
            raise PretrainedError(
                f"{folder}: of part {part} it has only the files of the ranks {sorted(of_ranks)}"
            )
    return values


def _partitioned(run: TorchRun, models: Values, optim: Values) -> None:
    """Read masters and moments from flat partitions."""
    if not optim:
        run.kind, run.no_optimizer = "DeepSpeed, stage 0", _BY_INDEX
        return
    if optim.keys() != models.keys():
        raise PretrainedError(f"{run.folder}: lacks *_optim_states.pt of some ranks")
    updates = set[int]()
    for part, of_ranks in sorted(optim.items()):
        states = [of_ranks[rank] for rank in sorted(of_ranks)]
        of_model = models[part][0]
        is_stage_3 = "fp32_flat_groups" in states[0]
        stage = states[0].get("zero_stage", 1)
        run.kind = f"DeepSpeed, stage {stage}"
        counts = {len(states), *(n for s in states for n in _partition_counts(s))}
        if len(counts) > 1:
            raise PretrainedError(
                f"{run.folder}: was saved by {max(counts)} ranks, and has files of {min(counts)}"
            )
        if is_stage_3:
            of_groups = [_of_stage_3(state) for state in states]
            slices = [
                _slices_of_stage_3(of_model, rank, len(states)) for rank in range(len(states))
            ]
            _frozen_of_stage_3(run, models[part])
        else:
            of_groups = [_of_stages_1_and_2(state) for state in states]
            slices = [_slices_of_stages_1_and_2(state) for state in states]
        updates |= {n for groups, _ in of_groups for n in _updates(groups)}
        run.scaler = _scaler(states[0].get("loss_scaler")) or run.scaler
        shapes = {n: shape_of(x) for group in of_model["param_shapes"] for n, x in group.items()}
        spans: dict[str, dict[str, list[Span]]] = {}
        for (groups, masters), of_rank in zip(of_groups, slices, strict=True):
            for group, name, start, count in of_rank:
                for key, source in (("", masters[group]), *_flat(groups[group])):
                    spans.setdefault(key, {}).setdefault(name, []).append(
                        Span(source, start, count)
                    )
        for key, of_key in spans.items():
            target = run.moments.setdefault(key, {}) if key else run.parameters
            for name, some in of_key.items():  # tied ones are in several parts of a pipeline
                target.setdefault(name, FlatTensor(shapes[name], some))
    if len(updates) > 1:
        raise PretrainedError(
            f"{run.folder}: its ranks or groups have taken other steps: {updates}"
        )
    run.updates = updates.pop() if updates else run.updates


def _partition_counts(state: Mapping[str, Any]) -> Sequence[int]:
    counts = state.get("partition_count", [])
    return [whole_number(n) for n in (counts if isinstance(counts, list) else [counts])]


Groups = tuple[Any, Sequence[StoredTensor]]  # (the optimizer's state, the masters), by group


def _of_stages_1_and_2(state: Mapping[str, Any]) -> Groups:
    base = state["base_optimizer_state"]
    groups = base if isinstance(base, list) else _with_step(base)
    return groups, state["single_partition_of_fp32_groups"]


def _of_stage_3(state: Mapping[str, Any]) -> Groups:
    return _with_step(state["optimizer_state_dict"]), state["fp32_flat_groups"]


def _with_step(base: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The state of each group, with the step that some optimizers have in `param_groups`."""
    steps = {i: {"step": group["step"]} for i, group in enumerate(base["param_groups"])
             if "step" in group}  # fmt: skip
    return {i: {**steps.get(i, {}), **state} for i, state in base["state"].items()}


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    return ((k, x) for k, x in state.items() if isinstance(x, StoredTensor) and len(x.shape) == 1)


def _updates(groups: Any) -> set[int]:
    states = groups.values() if isinstance(groups, dict) else groups
    return {whole_number(state["step"]) for state in states if "step" in state}


def _slices_of_stages_1_and_2(state: Mapping[str, Any]) -> Iterator[tuple[int, str, int, int]]:
    """(group, name, first element, number of elements) of what is in a rank's partitions."""
    for group, of_group in enumerate(state["param_slice_mappings"]):
        for name, fragment in of_group.items():
            yield group, name, *(whole_size(fragment.get(key)) for key in ("start", "numel"))


def _slices_of_stage_3(
    model: Mapping[str, Any], rank: int, ranks: int
) -> Iterator[tuple[int, str, int, int]]:
    for group, shapes in enumerate(model["param_shapes"]):
        start = 0
        for name, shape in shapes.items():
            size = math.prod(shape_of(shape))
            share = -(-size // ranks)
            yield group, name, start, max(0, min(share, size - rank * share))
            start += share


def _frozen_of_stage_3(run: TorchRun, models: Mapping[int, Mapping[str, Any]]) -> None:
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        shape = shape_of(shape)
        size, share = math.prod(shape), -(-math.prod(shape) // len(models))
        spans = [
            Span(of["frozen_param_fragments"][name], 0, max(0, min(share, size - rank * share)))
            for rank, of in sorted(models.items())
        ]
        run.parameters[name] = FlatTensor(shape, spans)


def whole_size(value: Any) -> int:
    (size,) = shape_of((value,))
    return size


def _layers(paths: Sequence[Path], inert: Counter[str]) -> dict[str, Any]:
    """The tensors of a pipeline's layers, by the names that its module gives them."""
    tensors: dict[str, Any] = {}
    for path in paths:
        match = _LAYER.fullmatch(path.name)
        if match is None or match[2] not in (None, "model_00"):
            raise PretrainedError(f"{path}: is split over tensor ranks. {_UNIVERSAL}")
        tensors |= {f"{int(match[1])}.{name}": x for name, x in load(path, inert).items()}
    return tensors


def _universal(run: TorchRun, folder: Path) -> None:
    run.kind = "DeepSpeed, universal"
    updates = set[int]()
    for path in sorted(folder.glob("*/*.pt")):
        name, key = path.parent.name, path.stem
        value = load(path, run.inert)
        with as_pretrained_error(path):
            if key == "step":
                updates.add(whole_number(value["param"] if isinstance(value, dict) else value))
                continue
            tensor = value["param"]
            if not isinstance(tensor, StoredTensor):
                raise ValueError("its param is no tensor")
            (run.parameters if key == "fp32" else run.moments.setdefault(key, {}))[name] = tensor
    if len(updates) > 1:
        raise PretrainedError(f"{folder}: its parameters have taken other steps: {updates}")
    run.updates = updates.pop() if updates else run.updates


def _position(scheduler: Any) -> int | None:
    """Completed steps of a schedule: DeepSpeed's counts from -1, torch's from 0."""
    if scheduler is None:
        return None
    if "last_batch_iteration" in scheduler:
        return whole_number(scheduler["last_batch_iteration"] + 1)
    return whole_number(scheduler["last_epoch"]) if "last_epoch" in scheduler else None


def _scaler(scaler: Any) -> dict[str, float] | None:
    """The state of a dynamic scaler; a static one has none."""
    if not isinstance(scaler, Record) or not scaler.get("dynamic"):
        return None
    scale, iteration, last, hysteresis = (
        float(scaler.fields[name])
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    )
    values = scale, max(0.0, iteration - last - 1), hysteresis
    return dict(zip(LossScale._fields, values, strict=True))
