"""Export of weights to safetensors files, block by block, from a checkpoint or from an engine."""

import importlib
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.checkpoint.catalog import existing
from jaxspeed.checkpoint.header import Header, read_header
from jaxspeed.checkpoint.manifest import is_local, read_manifest
from jaxspeed.checkpoint.orbax_arrays import FOLDER
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.checkpoint.stores import store_at
from jaxspeed.checkpoint.verification import check_valid, newest_valid
from jaxspeed.config import Config
from jaxspeed.errors import CheckpointError, PretrainedError
from jaxspeed.interop.hf_folder import CONFIG, COPIED, INDEX
from jaxspeed.interop.mapping import Bound, Index, MappingTable, bind, identity
from jaxspeed.interop.pretrained import FolderWeights
from jaxspeed.interop.safetensors import Tensor, TensorFile, check_dtype
from jaxspeed.objective.config_model import family_sizes
from jaxspeed.objective.pretrained_model import Pretrained
from jaxspeed.objective.train_state import TrainState, updated_values
from jaxspeed.train.program import Program

_BLOCK_BYTES = 64 << 20
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
    files: Sequence[Path] = ()


class Values(Protocol):
    """The arrays of an export."""

    @property
    def leaves(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype by path."""

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks that together are the array, of which each is read once."""


def export(
    folder: Any,
    out: Any,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    form: HFForm | None = None,
) -> ExportSummary:
    """Write the weights of a valid checkpoint to `out/model*.safetensors`.

    Without a `form` these are parameters and variables, by the paths of `engine.parameters`; with
    one, parameters in Hugging Face's format. Parameters are in the precision in which they are
    updated. A few blocks of one tensor are in memory at a time.

    Args:
      tag: the checkpoint; None for the newest valid one.
      dtype: of the floating tensors, such as "bfloat16"; None for their dtype in the checkpoint.
      file_bytes: larger exports are split into several files with an index.

    Raises:
      CheckpointError: no checkpoint is valid, or `out` cannot be written to.
      PretrainedError: the form is of another model.
    """
    store, processes = store_at(folder), Processes()
    if tag is None:
        tag = newest_valid(store, processes)
    else:
        check_valid(store, processes, existing(store, tag))
    source = store.root / tag
    header = read_header(source, read_manifest(source).format)
    kinds = _KINDS if form is None else _KINDS[:1]
    names = [n for n, leaf in header.leaves.items() if n.startswith(kinds) and not leaf.key]
    left = sorted(_path(n) for n in header.leaves if n.startswith(_KINDS) and n not in names)
    metadata = {"tag": tag, "step": str(header.step), "writer": "jaxspeed"}
    values = _CheckpointValues(source, header, names)
    files, tensors = _write(values, Path(out), dtype, file_bytes, metadata, form)
    total = sum(tensor.nbytes for tensor in tensors.values())
    return ExportSummary(tag, header.step, files, len(tensors), total, left)


def save_pretrained(
    program: Program,
    state: TrainState,
    out: str | Path,
    *,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    form: HFForm | None = None,
) -> ExportSummary:
    """Write the parameters of a state in Hugging Face's format; called on every process.

    Arguments are those of `export`; without a form that of the config's model.
    """
    form = form or hf_form(program.config, program.source.model)
    values = _StateValues(program, state)
    metadata = {"step": str(int(state.step)), "writer": "jaxspeed", "format": "pt"}
    files, tensors = _write(values, Path(out), dtype, file_bytes, metadata, form)
    total = sum(tensor.nbytes for tensor in tensors.values())
    left = sorted(path for path in state.variables)
    return ExportSummary("", int(state.step), files, len(tensors), total, left)


def hf_form(config: Config, model: Any, files: Sequence[Path] = ()) -> HFForm:
    """The form of the model that a config names, or that was pretrained.

    Raises:
      PretrainedError: it has none.
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
        raise PretrainedError(
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
        raise PretrainedError(f"{module} has no form in Hugging Face's format") from None


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
) -> tuple[list[str], dict[str, Tensor]]:
    """(the files' names, the tensors)."""
    shapes = {path: shape for path, (shape, _) in values.leaves.items()}
    bound = identity(shapes) if form is None else bind(form.table, shapes)
    tensors = _tensors(bound, values.leaves, _floating(dtype))
    groups = _file_groups(tensors, file_bytes)
    first = jax.process_index() == 0
    try:
        if first:
            target.mkdir(parents=True, exist_ok=True)
            if there := sorted(target.glob("model*.safetensors*")):
                raise CheckpointError(f"{target}: contains an export already ({there[0].name})")
        files = {
            name: TensorFile.create(target / name, {n: tensors[n] for n in group}, metadata)
            for name, group in groups.items()
            if first
        }
        file_of = {tensor: file for file in files.values() for tensor in file.tensors}
        for path in values.leaves:
            for index, block in values.blocks(path):
                if first:
                    _scatter(bound, path, index, block, file_of, tensors)
        for name, file in files.items():
            file.finish(target / name)
        if first and len(files) > 1:
            _write_index(target, tensors, groups)
        if first and form is not None:
            _write_other_files(target, tensors, form)
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
    found = {}
    for path, pieces in bound.pieces.items():
        stored = leaves[path][1]
        floats = jnp.issubdtype(jnp.dtype(stored), jnp.floating)
        for piece in pieces:
            name = piece.tensor
            tensor = Tensor(name, bound.tensors[name], dtype if dtype and floats else stored)
            check_dtype(name, tensor.dtype)
            found[name] = tensor
    wide_first = sorted(found.values(), key=lambda t: (-jnp.dtype(t.dtype).itemsize, t.name))
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
        if path.name in COPIED and path.is_file():
            shutil.copyfile(path, target / path.name)


# -- values ----------------------------------------------------------------------------------------


class _CheckpointValues:
    """Arrays of a checkpoint as stored by Orbax: Zarr chunks in one OCDBT database."""

    def __init__(self, source: epath.Path, header: Header, names: Sequence[str]) -> None:
        self._source = source
        self._names = {_path(name): name for name in names}
        self.leaves = {
            path: (header.leaves[name].shape, header.leaves[name].dtype)
            for path, name in self._names.items()
        }

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """Blocks of full chunks, without padding."""
        shape, dtype = self.leaves[path]
        if not math.prod(shape):
            return
        array = self._open(self._names[path])
        step = list(array.chunk_layout.read_chunk.shape or ())  # a scalar has none
        size = math.prod(step) * jnp.dtype(dtype).itemsize
        for dim in reversed(range(len(shape))):
            most = -(-shape[dim] // step[dim])
            times = max(1, min(most, _BLOCK_BYTES // size))
            step[dim] *= times
            size *= times
        starts = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
        for corner in itertools.product(*starts):
            ends = (min(a + s, n) for a, s, n in zip(corner, step, shape, strict=True))
            index = tuple(map(slice, corner, ends))
            yield index, np.asarray(array[index].read().result())

    def _open(self, name: str) -> Any:
        base = self._source / FOLDER
        spec = {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{base}/" if is_local(self._source) else f"{base}/",
                "path": f"{name}/",
            },
            # The fewest chunks in memory at a time that keep the disk busy.
            "context": {"file_io_concurrency": {"limit": 2}, "data_copy_concurrency": {"limit": 2}},
        }
        return ts.open(spec, open=True, read=True).result()


class _StateValues:
    """The parameters of a state, in the precision in which they are updated."""

    def __init__(self, program: Program, state: TrainState) -> None:
        self._arrays = {row.path: updated_values(state, row) for row in program.table}
        self.leaves = {
            row.path: (row.leaf.shape, str(self._arrays[row.path].dtype)) for row in program.table
        }

    def blocks(self, path: str) -> Iterator[tuple[Index, np.ndarray]]:
        """One shard at a time; if other processes have some, blocks that are gathered."""
        x, (shape, _) = self._arrays[path], self.leaves[path]
        if not x.is_fully_addressable:
            yield from _gathered(x, shape)
            return
        seen = set()
        for shard in x.addressable_shards:
            index = tuple(
                slice(*span.indices(n)[:2]) for span, n in zip(shard.index, x.shape, strict=True)
            )
            index = tuple(
                slice(min(i.start, n), min(i.stop, n)) for i, n in zip(index, shape, strict=True)
            )
            if str(index) in seen:
                continue
            seen.add(str(index))
            block = np.asarray(shard.data)[tuple(slice(i.stop - i.start) for i in index)]
            if block.size:
                yield index, block


def _gathered(x: jax.Array, shape: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """Blocks of rows, each replicated by a collective and read from this process's copy."""
    at = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    replicated = jax.jit(lambda x: x, out_shardings=at)
    rows = max(1, _BLOCK_BYTES // max(1, x.nbytes // max(1, x.shape[0]))) if x.ndim else 1
    for start in range(0, shape[0] if shape else 1, rows):
        if not shape:
            yield (), np.asarray(replicated(x).addressable_data(0))
            return
        stop = min(start + rows, shape[0])
        inside = (slice(start, stop), *(slice(0, n) for n in shape[1:]))
        yield inside, np.asarray(replicated(x[inside]).addressable_data(0))


def _floating(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    name = _DTYPES.get(dtype, dtype)
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise CheckpointError(f"dtype {dtype!r}: one of float32, bfloat16, float16, float64")
    return name


def _path(name: str) -> str:
    return name.split("/", 1)[1]
