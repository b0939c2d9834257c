"""Export of weights to safetensors files, block by block, from a checkpoint or from an engine."""

import contextlib
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxspeed.adapters.adapter import PREFIX as ADAPTERS
from jaxspeed.adapters.choose_adapters import OtherNames
from jaxspeed.checkpoint.catalog import existing
from jaxspeed.checkpoint.header import FILES as SAVED
from jaxspeed.checkpoint.header import AdapterRecord, Header, read_header
from jaxspeed.checkpoint.manifest import read_manifest
from jaxspeed.checkpoint.process_agreement import OnFirst, Processes
from jaxspeed.checkpoint.restore import check_base
from jaxspeed.checkpoint.stores import as_checkpoint_error, store_at
from jaxspeed.checkpoint.verification import check_valid, newest_valid
from jaxspeed.config import Config, load_config
from jaxspeed.data.tokenizer import BESIDE, FILES
from jaxspeed.errors import CheckpointError, ConfigError, PretrainedError
from jaxspeed.interop.export_values import CheckpointValues, MergedValues, StateValues, Values
from jaxspeed.interop.hf_folder import CONFIG, COPIED, INDEX, PretrainedFolder
from jaxspeed.interop.mapping import Bound, Index, MappingTable, bind, identity
from jaxspeed.interop.peft import AdapterFolder, read_adapter
from jaxspeed.interop.peft_config import CONFIG as ADAPTER_CONFIG
from jaxspeed.interop.peft_config import AdapterForm
from jaxspeed.interop.peft_export import write_adapter
from jaxspeed.interop.peft_layout import TENSORS as ADAPTER
from jaxspeed.interop.pretrained import FolderWeights
from jaxspeed.interop.safetensors import Tensor, TensorFile, check_dtype
from jaxspeed.interop.torch_moments import MOMENTS, count_of, in_units, moments_in
from jaxspeed.placement.paths import listed
from jaxspeed.placement.rows import IS_RANGE
from jaxspeed.train.program import Program
from jaxspeed.train_state.state import TrainState
from jaxspeed.user_models.config_model import family_sizes, resolve_model
from jaxspeed.user_models.pretrained_model import Pretrained, Weights

_KINDS = ("params/", "variables/")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportSummary:
    """The files that an export wrote."""

    tag: str
    step: int
    files: list[str]
    tensors: int
    bytes: int
    left_out: list[str] = field(default_factory=list)  # variables that are not exported


class NoHFForm(PretrainedError):
    """A model is neither of a family nor has a mapping table."""


@dataclass(frozen=True)
class HFForm:
    """What a model is in Hugging Face's format.

    Args:
      table: which tensors are which parameters.
      config: the contents of config.json; None writes none.
      files: copied beside it, of the tokenizer and of generation.
    """

    table: MappingTable
    config: Mapping[str, Any] | None = None
    files: Sequence[Path | epath.Path] = ()


def export(
    folder: Any,
    out: Any,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    form: HFForm | None = None,
    ema: bool = False,
    merge: bool = False,
    weights: Weights | None = None,
    moments: bool = False,
) -> ExportSummary:
    """Write the weights of a valid checkpoint to `out/model*.safetensors`.

    Without a `form` these are parameters and variables, by the paths of `engine.parameters`; with
    one, what its table has, in Hugging Face's format, with the tokenizer that was saved with the
    checkpoint.
    Parameters are in the precision in which they are updated. A few blocks of one tensor are in
    memory at a time.

    Args:
      tag: the checkpoint; None for the newest valid one.
      dtype: of the floating tensors, such as "bfloat16"; None for their dtype in the checkpoint.
      file_bytes: larger exports are split into several files with an index.
      ema: write the moving averages of the parameters that have one.
      merge: add the adapters to the weights that they adapt; needs a `form`.
      weights: what the model was read from, of a checkpoint without frozen parameters; by default
        the folder that the checkpoint names.
      moments: write the optimizer's state too, under torch's names (`state.NAME.exp_avg`).

    Raises:
      CheckpointError: no checkpoint is valid, it has no moving average, `out` cannot be written to,
        or the frozen parameters are not where they were.
      PretrainedError: the form is of another model, or has no place for adapters.
    """
    source, header = _checkpoint(folder, tag)
    records = header.leaves | header.excluded
    names = [n for n, leaf in records.items() if n.startswith(_KINDS) and not leaf.key]
    if form is not None:
        names = [n for n in names if n.startswith(_KINDS[0]) or _path(n) in form.table.variables]
    left = sorted(_path(n) for n in header.leaves if n.startswith(_KINDS) and n not in names)
    metadata = {"tag": header.tag, "step": str(header.step), "writer": "jaxspeed"}
    stored = _stored(source, header, names, ema)
    if form is not None and any(name in FILES for name in header.files):
        others = [path for path in form.files if path.name not in BESIDE]
        form = replace(form, files=[*others, *(source / SAVED / name for name in header.files)])
    base = functools.partial(_base, source, header, weights, form)
    values = CheckpointValues(source, header, stored, functools.cache(base))
    merged = _without_adapters(values, header.adapters, merge) if form else values
    state = _state_of_torch(source, header, stored, form) if moments and form else []
    files, tensors = _write(merged, Path(out), dtype, file_bytes, metadata, form, state)
    total = sum(tensor.nbytes for tensor in tensors.values())
    return ExportSummary(header.tag, header.step, files, len(tensors), total, left)


def export_adapter(
    folder: Any,
    out: Any,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    form: HFForm | None = None,
    base: str | None = None,
    ema: bool = False,
    weights: Weights | None = None,
) -> ExportSummary:
    """Write the adapters of a valid checkpoint to a folder as PEFT does.

    Args:
      form: the base in Hugging Face's format; without one the keys are paths, and only jaxspeed
        reads the folder.
      base: the folder or the id of the base.
      tag, dtype, ema, weights: as of `export`.

    Raises:
      CheckpointError: no checkpoint is valid, it has no adapters, or `out` cannot be written to.
      PretrainedError: the form is of another model.
    """
    source, header = _checkpoint(folder, tag)
    if header.adapters is None:
        raise CheckpointError(f"{source}: has no adapters: the config had no section lora")
    names = [name for name in header.leaves | header.excluded if name.startswith(_KINDS[0])]
    frozen = functools.partial(_base, source, header, weights, form)
    stored = _stored(source, header, names, ema)
    values = CheckpointValues(source, header, stored, functools.cache(frozen))
    return _write_adapter(values, out, header.adapters, form, base, dtype, header.tag, header.step)


def saved_adapter(folder: str | Path, config: Config, model: Any) -> AdapterFolder:
    """An adapter that PEFT or jaxspeed saved, for this model, which a config may name.

    Raises:
      PretrainedError: the folder has none.
    """
    table = None
    with contextlib.suppress(NoHFForm):
        table = hf_form(config, model).table
    return AdapterFolder(read_adapter(folder), table)


def other_names(config: Config, model: Any, shapes: Mapping[str, Any]) -> OtherNames:
    """What modules, and parameters of no module's weight, are named in Hugging Face's model."""
    try:
        bound = bind(hf_form(config, model).table.in_memory(), shapes)
    except PretrainedError:  # it has no such form
        return {}
    heads = {embedding: head for head, embedding in bound.table.tied.items()}
    names: dict[str, list[tuple[int | None, str]]] = {}
    for path, pieces in bound.pieces.items():
        for piece in pieces:
            for tensor in filter(None, (piece.tensor, heads.get(piece.tensor))):
                name = tensor.removesuffix(".weight").removesuffix(".bias")
                names.setdefault(path, []).append((next(iter(piece.at), None), name))
    return names


def save_adapter(
    program: Program,
    state: TrainState,
    out: str | Path,
    *,
    dtype: str | None = None,
    form: HFForm | None = None,
) -> ExportSummary:
    """Write the adapters of a state to a folder as PEFT does; called on every process.

    Arguments are those of `export_adapter`; without a form that of the config's model, if it has
    one.
    """
    record = AdapterRecord.of(program)
    if record is None:
        raise PretrainedError("the model has no adapters: the config has no section lora")
    model, section = program.source.model, program.config.model
    if form is None:
        with contextlib.suppress(NoHFForm):
            form = hf_form(program.config, model)
    base = section.pretrained if section else None
    if base is None and isinstance(model, Pretrained) and isinstance(model.weights, FolderWeights):
        base = str(model.weights.folder.path)
    values = StateValues(program, state)
    return _write_adapter(values, out, record, form, base, dtype, "", int(state.step))


def _write_adapter(
    values: Values,
    out: Any,
    record: AdapterRecord,
    form: HFForm | None,
    base: str | None,
    dtype: str | None,
    tag: str,
    step: int,
) -> ExportSummary:
    adapter_form = AdapterForm(record, base=base)
    if form is not None:
        adapter_form = replace(adapter_form, table=form.table, config=form.config)
    tensors = write_adapter(values, out, adapter_form, _floating(dtype))
    total = sum(tensor.nbytes for tensor in tensors.values())
    return ExportSummary(tag, step, [ADAPTER_CONFIG, ADAPTER], len(tensors), total)


def _without_adapters(values: Values, record: AdapterRecord | None, merge: bool) -> Values:
    """The values of a model alone.

    Raises:
      PretrainedError: it has adapters that are not to be merged, or none that are.
    """
    if merge:
        if record is None:
            raise PretrainedError("there are no adapters to merge: the config had no section lora")
        return MergedValues(values, record.adapters)
    if record is not None:
        raise PretrainedError(
            "the model has adapters, which Hugging Face's format has no place for: merge them into "
            "the weights (--merge, merge=True), or write them alone (--format peft, save_adapter)"
        )
    return values


def _checkpoint(folder: Any, tag: str | None) -> tuple[epath.Path, Header]:
    """A valid checkpoint; without a tag the newest."""
    store, processes = store_at(folder), Processes()
    with as_checkpoint_error(store.root, "reading"):
        if tag is None:
            tag = newest_valid(store, processes)
        else:
            check_valid(store, processes, existing(store, tag))
        source = store.root / tag
        return source, read_header(source, read_manifest(source).format)


def _base(
    source: epath.Path, header: Header, weights: Weights | None, form: HFForm | None
) -> Weights:
    """The weights of the parameters that a checkpoint does not have, since they were frozen."""
    assert header.base is not None
    try:
        if weights is None:
            weights = _weights_in(header.base.folder, form)
        shapes = {n: x.shape for n, x in (header.leaves | header.excluded).items()}
        params = {_path(n): n for n in shapes if n.startswith(_KINDS[0])}
        base_params = {path: n for path, n in params.items() if not path.startswith(ADAPTERS)}
        weights.check(
            {
                p: shape
                for p, (shape, _) in CheckpointValues(source, header, base_params).leaves.items()
            }
        )
    except PretrainedError as error:
        raise CheckpointError(
            f"{source}: its frozen parameters were not saved, and cannot be read again: {error}"
        ) from None
    check_base(source, header, weights)
    return weights


def _weights_in(folder: str, form: HFForm | None) -> Weights:
    """The weights in a folder, of a family's model or else by the table of a form."""
    try:
        model, _ = resolve_model(load_config({"model": {"pretrained": folder}}))
    except (ConfigError, PretrainedError):
        if form is None:
            raise
        return FolderWeights(PretrainedFolder(folder), form.table)
    weights: Weights = model.weights
    return weights


def _stored(source: epath.Path, header: Header, names: Sequence[str], ema: bool) -> dict[str, str]:
    """{path: name} of what is exported."""
    stored = {_path(name): name for name in names}
    if ema:
        averages = {_path(name): name for name in header.leaves if name.startswith("ema/")}
        if not averages:
            raise CheckpointError(
                f"{source}: has no moving average of the weights: optimizer.ema_decay was not set"
            )
        stored |= averages
    return stored


def _state_of_torch(
    source: epath.Path, header: Header, stored: Mapping[str, str], form: HFForm
) -> list[tuple[Values, Bound]]:
    """An optimizer's moments and steps, and the tensors that they are."""
    parts: list[tuple[Values, Bound]] = []
    steps: dict[str, str] = {}
    fields = moments_in(header.leaves, stored)
    for kind, names in fields.items():
        if kind not in MOMENTS or any(IS_RANGE.search(path) for path in names):
            some = listed(sorted(names.values()))
            raise CheckpointError(f"{source}: torch's optimizers have no such state: {some}")
        key, power = MOMENTS[kind]
        values = CheckpointValues(source, header, names)
        bound = bind(in_units(form.table, power), {p: x for p, (x, _) in values.leaves.items()})
        count = count_of(next(iter(names.values())), kind, header.leaves)
        steps |= dict.fromkeys(bound.tensors, count)
        parts.append((values, bound.renamed(f"state.{{}}.{key}")))
    if not parts:
        raise CheckpointError(f"{source}: its optimizer has no moments")
    counts = {f"state.{n}.step": c for n, c in steps.items() if c}
    values = CheckpointValues(source, header, counts)
    values.leaves = dict.fromkeys(counts, ((), "float32"))
    return [*parts, (values, identity(dict.fromkeys(counts, ())))]


def save_pretrained(
    program: Program,
    state: TrainState,
    out: str | Path,
    *,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    form: HFForm | None = None,
    merge: bool = False,
) -> ExportSummary:
    """Write the parameters of a state in Hugging Face's format; called on every process.

    Arguments are those of `export`; without a form that of the config's model.
    """
    form = form or hf_form(program.config, program.source.model)
    stored = StateValues(program, state, form.table.variables)
    values = _without_adapters(stored, AdapterRecord.of(program), merge)
    metadata = {"step": str(int(state.step)), "writer": "jaxspeed", "format": "pt"}
    files, tensors = _write(values, Path(out), dtype, file_bytes, metadata, form)
    total = sum(tensor.nbytes for tensor in tensors.values())
    left = sorted(path for path in state.variables if path not in stored.leaves)
    return ExportSummary("", int(state.step), files, len(tensors), total, left)


def hf_form(config: Config, model: Any, files: Sequence[Path] = ()) -> HFForm:
    """The form of the model that a config names, or that was pretrained.

    Raises:
      NoHFForm: it has none.
      PretrainedError: its config has none.
    """
    if isinstance(model, Pretrained) and isinstance(model.weights, FolderWeights):
        folder, table, sizes = model.weights.folder, model.weights.table, model.config
        files = folder.extra_files()
        if not (folder.path / CONFIG).exists():
            return HFForm(table, None, files)
        values = {k: v for k, v in folder.config.items() if k != "quantization_config"}
        if sizes is not None:
            form = _family(sizes)
            if form.read_config(folder.config) != sizes:
                values |= _config_json(form, sizes)
        return HFForm(table, values, files)
    sizes = family_sizes(config)
    if sizes is None:
        raise NoHFForm(
            "the model has no form in Hugging Face's format: give a mapping table, as "
            "form=jaxspeed.interop.HFForm(table)"
        )
    form = _family(sizes)
    return HFForm(form.table(sizes), _config_json(form, sizes), files)


def _family(sizes: Any) -> Any:
    """The module `models/NAME_hf.py` of a family's Config."""
    module = type(sizes).__module__
    try:  # by name, so that the package imports no model of its own
        return importlib.import_module(f"{module}_hf")
    except ModuleNotFoundError:
        raise NoHFForm(f"{module} has no form in Hugging Face's format") from None


def _config_json(form: Any, sizes: Any) -> dict[str, Any]:
    try:
        values = dict(form.write_config(sizes))
    except ValueError as error:
        raise PretrainedError(f"the config has no form in config.json: {error}") from None
    return {"architectures": [form.MODEL_TYPES[values["model_type"]]], **values}


# -- writing ---------------------------------------------------------------------------------------


def _write(
    values: Values,
    target: Path,
    dtype: str | None,
    file_bytes: int,
    metadata: Mapping[str, str],
    form: HFForm | None,
    state: Sequence[tuple[Values, Bound]] = (),
) -> tuple[list[str], dict[str, Tensor]]:
    """(the files' names, the tensors); `state` is written beside the values."""
    shapes = {path: shape for path, (shape, _) in values.leaves.items()}
    bound = identity(shapes) if form is None else bind(form.table, shapes)
    tensors = _tensors(bound, values.leaves, _floating(dtype))
    for others, of_others in state:
        tensors |= _tensors(of_others, others.leaves, None)
    groups = _file_groups(tensors, file_bytes)
    files: dict[str, TensorFile] = {}
    file_of: dict[str, TensorFile] = {}

    def create() -> None:
        target.mkdir(parents=True, exist_ok=True)
        if there := sorted(target.glob("model*.safetensors*")):
            raise CheckpointError(f"{target}: contains an export already ({there[0].name})")
        for name, group in groups.items():
            of_group = {n: tensors[n] for n in group}
            files[name] = TensorFile.create(target / name, of_group, metadata)
            file_of.update(dict.fromkeys(group, files[name]))

    def finish() -> None:
        for name, file in files.items():
            file.finish(target / name)
        if len(files) > 1:
            _write_index(target, tensors, groups)
        if form is not None:
            _write_other_files(target, tensors, form)

    on_first = OnFirst("exporting")
    try:
        on_first(create)
        on_first.agree()
        for part, its_bound in ((values, bound), *state):
            for path in part.leaves:
                for index, block in part.blocks(path):
                    scatter = functools.partial(_scatter, its_bound, path, index, block)
                    on_first(functools.partial(scatter, file_of, tensors))
        on_first(finish)
        on_first.agree()
    except OSError as error:
        raise CheckpointError(f"{target}: export failed: {error.strerror or error}") from error
    return list(groups), tensors


def _scatter(
    bound: Bound,
    path: str,
    index: Index,
    block: np.ndarray,
    file_of: Mapping[str, TensorFile],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write a block of a parameter into its tensors."""
    used = set()
    for piece in bound.pieces[path]:
        if piece.within(index):
            file = file_of[piece.tensor]
            wide = block.astype(tensors[piece.tensor].dtype, copy=False)
            piece.write(file.array(piece.tensor), index, wide)
            used.add(file)
    for file in used:
        file.release()


def _tensors(
    bound: Bound, leaves: Mapping[str, tuple[tuple[int, ...], str]], dtype: str | None
) -> dict[str, Tensor]:
    """The tensors by name, the widest dtypes first, so that all are aligned."""
    tensors = {}
    for path, pieces in bound.pieces.items():
        stored = leaves[path][1]
        is_cast = jnp.issubdtype(jnp.dtype(stored), jnp.floating)
        is_cast &= path not in bound.table.variables
        for piece in pieces:
            name = piece.tensor
            tensor = Tensor(name, bound.tensors[name], dtype if dtype and is_cast else stored)
            check_dtype(name, tensor.dtype)
            tensors[name] = tensor
    wide_first = sorted(tensors.values(), key=lambda t: (-jnp.dtype(t.dtype).itemsize, t.name))
    return {tensor.name: tensor for tensor in wide_first}


def _file_groups(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, list[str]]:
    """{file: names}; a tensor is never split over files."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    of = len(groups)
    return {f"model-{i:05d}-of-{of:05d}.safetensors": g for i, g in enumerate(groups, start=1)}


def _write_index(
    target: Path, tensors: Mapping[str, Tensor], groups: Mapping[str, list[str]]
) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in groups.items() for name in names},
    }
    (target / INDEX).write_text(json.dumps(index, indent=1))


def _write_other_files(target: Path, tensors: Mapping[str, Tensor], form: HFForm) -> None:
    """config.json, with the dtype as both old and new versions spell it, and copied files."""
    if form.config is not None:
        dtype = next(iter(tensors.values())).dtype
        values = {**form.config, "torch_dtype": dtype, "dtype": dtype}
        (target / CONFIG).write_text(f"{json.dumps(values, indent=2)}\n")
    for path in form.files:
        if path.name in COPIED and path.exists():
            (target / path.name).write_bytes(path.read_bytes())


def _floating(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    name = _DTYPES.get(dtype, dtype)
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise CheckpointError(f"dtype {dtype!r}: one of float32, bfloat16, float16, float64")
    return name


def _path(name: str) -> str:
    return name.split("/", 1)[1]
