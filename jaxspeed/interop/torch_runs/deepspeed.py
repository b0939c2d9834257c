"""DeepSpeed's checkpoints: ZeRO stages 0 to 3, its pipeline, and its universal format.

Stages 1 and 2 have, in `*_optim_states.pt` of each rank, its partition of the flat masters and
moments, and in `param_slice_mappings` which elements of it are which parameter's. Under stage 3
each rank has `ceil(n / ranks)` elements of every parameter, in the order of `param_shapes`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs.archives import StoredTensor, TorchFiles, sizes_of
from jaxspeed.interop.torch_runs.pickles import Pickled, as_pretrained_error
from jaxspeed.interop.torch_runs.torch_run import (
    TorchRun,
    flat_tensor,
    number_of,
)
from jaxspeed.optim.loss_scale import LossScale

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_00)?-model_states\.pt")
_BY_INDEX = "its optimizer, whose state goes by the parameters' numbers: weights alone are read"
_SPLIT = "is split over tensor or expert ranks: convert it with DeepSpeed's ds_to_universal.py"
_MASTERS = "single_partition_of_fp32_groups"
Values = Mapping[str, Any]


def read_deepspeed(folder: Path) -> TorchRun:
    """The run of a checkpoint of DeepSpeed's, or of the one that `latest` names."""
    with as_pretrained_error(folder):
        if not any(folder.glob("*model_states.pt")):
            with (folder / "latest").open("rb") as file:
                tag = file.read(4096).decode().strip()
            is_name = 0 < len(tag) < 256 and "\0" not in tag and Path(tag).name == tag != ".."
            if not is_name or not (folder / tag).is_dir():
                raise PretrainedError(f"{folder}: latest names no folder: {tag[:80]!r}")
            folder = folder / tag
        run = TorchRun(folder)
        models = _values(run, _MODEL)
        if not models:
            raise PretrainedError(f"{folder}: has no *_model_states.pt of a rank")
        first, layers = models[min(models)][0], sorted(folder.glob("layer_*-model_states.pt"))
        of_experts = [*folder.glob("*expp_rank_*"), *folder.glob("*_expert_*")]
        if of_experts or (len(models) > 1 and not layers):
            raise PretrainedError(f"{folder}: {_SPLIT}")
        run.steps = number_of(first.get("global_steps") or 0)
        run.skipped = number_of(first.get("skipped_steps") or 0)
        run.samples = number_of(first.get("global_samples") or 0)
        run.position = _position(first.get("lr_scheduler"))
        if (folder / "zero").is_dir():
            _read_universal(run)
        else:
            _read_partitions(run, models)
        stored = _layers(run.files, layers) if layers else first["module"]
        for name, tensor in stored.items():
            if isinstance(tensor, StoredTensor) and tensor.shape != (0,):  # that of stage 3
                run.parameters.setdefault(name, tensor)
        names = [*run.moments, *run.parameters, *(n for of in run.moments.values() for n in of)]
        if not all(type(name) is str for name in names):
            raise ValueError("a name is no text")
        return run


def _values(run: TorchRun, pattern: re.Pattern[str]) -> dict[int, list[dict[str, Any]]]:
    """The objects of files, by the model's part and the data rank."""
    by_part: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(run.folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            rank, part = (int(number or 0) for number in match.groups())
            by_part.setdefault(part, {})[rank] = run.files.load(path)
    for part, of_ranks in by_part.items():
        if sorted(of_ranks) != list(range(len(of_ranks))):
            ranks = sorted(of_ranks)
            raise PretrainedError(
                f"{run.folder}: of part {part} it has only files of ranks {ranks}"
            )
    return {part: [x for _, x in sorted(of_ranks.items())] for part, of_ranks in by_part.items()}


def _read_partitions(run: TorchRun, models: Mapping[int, list[dict[str, Any]]]) -> None:
    optim, updates = _values(run, _OPTIM), set[int]()
    if not optim and not any(of[0].get("param_shapes") for of in models.values()):
        run.no_optimizer = _BY_INDEX
    elif optim.keys() != models.keys():
        raise PretrainedError(f"{run.folder}: lacks *_optim_states.pt of some ranks")
    for part, of_ranks in sorted(optim.items()):
        model, ranks = models[part][0], len(of_ranks)
        spans: dict[tuple[str, str], list[Any]] = {}
        for rank, of_rank in enumerate(of_ranks):
            state = of_rank["optimizer_state_dict"]
            run.scaler = _scaler(state.get("loss_scaler")) or run.scaler
            counts = state.get("partition_count", ranks)
            most = max(map(number_of, counts if isinstance(counts, list) else [counts]))
            if most != ranks:
                raise PretrainedError(f"{run.folder}: has files of {ranks} of {most} ranks")
            if "fp32_flat_groups" in state:
                base, masters = state["optimizer_state_dict"], state["fp32_flat_groups"]
                slices = _slices_of_stage_3(model["param_shapes"], rank, ranks, masters)
                _add_frozen(spans, models[part], rank, ranks)
            else:
                base, masters = state["base_optimizer_state"], state[_MASTERS]
                slices = _slices_of_stages_1_and_2(state)
            groups = [{**base["state"].get(i, {}), "": flat} for i, flat in enumerate(masters)]
            counts = {number_of(group["step"]) for group in groups if "step" in group}
            updates |= counts or {  # some optimizers have it there, and others what it once was
                number_of(group["step"]) for group in base["param_groups"] if "step" in group
            }
            for number, name, start, length in slices:
                for key, source in groups[number].items():
                    is_flat = isinstance(source, StoredTensor) and len(source.shape) == 1
                    if is_flat or not key:
                        spans.setdefault((key, name), []).append((source, start, length))
        shapes_by_name = [*model["param_shapes"], model.get("frozen_param_shapes") or {}]
        shapes = {n: sizes_of(x) for group in shapes_by_name for n, x in group.items()}
        for (key, name), some in spans.items():
            target = run.moments.setdefault(key, {}) if key else run.parameters
            # Tied parameters are in several parts of a pipeline.
            target.setdefault(name, flat_tensor(shapes[name], some))
    run.took(updates)


def _slices_of_stages_1_and_2(state: Values) -> Iterator[tuple[int, str, int, int]]:
    """(group, name, first element, number of elements) of what is in a rank's partitions."""
    for group, of_group in enumerate(state["param_slice_mappings"]):
        for name, fragment in of_group.items():
            start, length = sizes_of(fragment.fields[key] for key in ("start", "numel"))
            yield group, name, start, length


def _slices_of_stage_3(
    groups: Iterable[Values], rank: int, ranks: int, masters: Sequence[StoredTensor] = ()
) -> Iterator[tuple[int, str, int, int]]:
    for group, shapes in enumerate(groups):
        start = 0
        for name, shape in shapes.items():
            size = math.prod(sizes_of(shape))
            share = -(-size // ranks)
            yield group, name, start, max(0, min(share, size - rank * share))
            start += share
        if masters and masters[group].shape != (start,):
            raise ValueError(f"its partitions are not those of {ranks} ranks")


def _add_frozen(
    spans: dict[tuple[str, str], list[Any]], models: list[Any], rank: int, ranks: int
) -> None:
    """Add what a rank has of parameters that are not trained: under stage 3 a part of each."""
    model = models[min(rank, len(models) - 1)]
    shapes, fragments = (model.get(f"frozen_param_{key}") or {} for key in ("shapes", "fragments"))
    for _, name, _, length in _slices_of_stage_3([shapes], rank, ranks):
        if len(models) != ranks:
            raise ValueError(f"has the model's states of {len(models)} of {ranks} ranks")
        spans.setdefault(("", name), []).append((fragments[name], 0, length))


def _layers(files: TorchFiles, paths: list[Path]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path in paths:
        match = _LAYER.fullmatch(path.name)
        if match is None:
            raise PretrainedError(f"{path}: {_SPLIT}")
        tensors |= {f"{int(match[1])}.{name}": x for name, x in files.load(path).items()}
    return tensors


def _read_universal(run: TorchRun) -> None:
    updates = set[int]()
    for path in sorted((run.folder / "zero").glob("*/*.pt")):
        value = run.files.load(path)
        with as_pretrained_error(path):
            value = value["param"] if isinstance(value, dict) else value
            if path.stem == "step":
                updates.add(number_of(value))
                continue
            sizes_of(value.shape)
            is_master = path.stem == "fp32"
            target = run.parameters if is_master else run.moments.setdefault(path.stem, {})
            target[path.parent.name] = value
    of_moments = {name for of in run.moments.values() for name in of}
    if lacks := sorted(of_moments - run.parameters.keys()):
        raise PretrainedError(f"{run.folder}: zero/{lacks[0]} lacks fp32.pt")
    run.took(updates)


def _position(scheduler: Any) -> int | None:
    # Completed steps: DeepSpeed's schedules count from -1, torch's from 0.
    for name, first in (("last_batch_iteration", -1), ("last_epoch", 0)):
        if scheduler is not None and name in scheduler:
            return number_of(scheduler[name] - first)
    return None


def _scaler(scaler: Any) -> dict[str, float] | None:
    if not isinstance(scaler, Pickled) or not scaler.fields.get("dynamic"):
        return None
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    scale, iteration, last, hysteresis = (float(scaler.fields[name]) for name in names)
    values = scale, max(0.0, iteration - last - 1), hysteresis
    return dict(zip(LossScale._fields, values, strict=True))
