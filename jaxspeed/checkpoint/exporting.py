"""Export of a checkpoint's weights to safetensors files, streamed block by block."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from etils import epath

from jaxspeed.checkpoint.catalog import existing
from jaxspeed.checkpoint.header import Header, LeafRecord, read_header
from jaxspeed.checkpoint.manifest import is_local, read_manifest
from jaxspeed.checkpoint.orbax_arrays import FOLDER
from jaxspeed.checkpoint.process_agreement import Processes
from jaxspeed.checkpoint.safetensors import Tensor, check_dtype, write_safetensors
from jaxspeed.checkpoint.stores import store_at
from jaxspeed.checkpoint.verification import check_valid, newest_valid
from jaxspeed.errors import CheckpointError

_BLOCK_BYTES = 64 << 20
_KINDS = ("params/", "variables/")


@dataclass(frozen=True)
class ExportSummary:
    """The files that an export wrote."""

    tag: str
    step: int
    files: list[str]
    tensors: int
    bytes: int
    left_out: list[str] = field(default_factory=list)  # variables that are random keys


def export(
    folder: Any,
    out: Any,
    *,
    tag: str | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
) -> ExportSummary:
    """Write parameters and variables of a valid checkpoint to `out/model*.safetensors`.

    Names are the paths of `engine.parameters`; parameters are in the precision in which they are
    updated. A few blocks of one tensor are in memory at a time.

    Args:
      tag: the checkpoint; None for the newest valid one.
      dtype: of the floating tensors, such as "bfloat16"; None for their dtype in the checkpoint.
      file_bytes: larger exports are split into several files with an index.

    Raises:
      CheckpointError: no checkpoint is valid, or `out` cannot be written to.
    """
    store, processes = store_at(folder), Processes()
    if tag is None:
        tag = newest_valid(store, processes)
    else:
        check_valid(store, processes, existing(store, tag))
    source = store.root / tag
    header = read_header(source, read_manifest(source))
    tensors = _tensors(header, _floating(dtype))
    left_out = sorted(_path(n) for n, leaf in header.leaves.items() if _is_exported(n) and leaf.key)
    files = _file_groups(tensors, file_bytes)
    metadata = {"tag": tag, "step": str(header.step), "writer": "jaxspeed"}
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if there := sorted(target.glob("model*.safetensors*")):
            raise CheckpointError(f"{target}: contains an export already ({there[0].name})")
        for name, names in files.items():
            streams = (
                (tensors[n], _blocks(source, n, header.leaves[n], tensors[n].dtype)) for n in names
            )
            write_safetensors(target / name, streams, metadata)
        if len(files) > 1:
            _write_index(target, tensors, files)
    except OSError as error:
        raise CheckpointError(f"{target}: export failed: {error.strerror or error}") from error
    total = sum(tensor.nbytes for tensor in tensors.values())
    return ExportSummary(tag, header.step, list(files), len(tensors), total, left_out)


def _tensors(header: Header, dtype: str | None) -> dict[str, Tensor]:
    """{name in the checkpoint: tensor}, the widest dtypes first, so that all are aligned."""
    found = {}
    for name, leaf in header.leaves.items():
        if _is_exported(name) and not leaf.key:
            floats = jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.floating)
            tensor = Tensor(_path(name), leaf.shape, dtype if dtype and floats else leaf.dtype)
            check_dtype(tensor.name, tensor.dtype)
            found[name] = tensor
    wide_first = sorted(found, key=lambda n: (-jnp.dtype(found[n].dtype).itemsize, n))
    return {name: found[name] for name in wide_first}


def _file_groups(tensors: dict[str, Tensor], file_bytes: int) -> dict[str, list[str]]:
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


def _write_index(target: Path, tensors: dict[str, Tensor], files: dict[str, list[str]]) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensors[n].name: file for file, names in files.items() for n in names},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _blocks(source: epath.Path, name: str, leaf: LeafRecord, dtype: str) -> Iterator[np.ndarray]:
    """One tensor without its padding, in blocks of rows."""
    if not math.prod(leaf.shape):
        return
    array = _open(source, name)[tuple(slice(0, size) for size in leaf.shape)]
    if not leaf.shape:
        yield np.asarray(array.read().result()).astype(jnp.dtype(dtype))
        return
    row = leaf.nbytes // leaf.shape[0]
    rows = max(1, _BLOCK_BYTES // row)
    height = array.chunk_layout.read_chunk.shape[0]
    if height * row <= 2 * _BLOCK_BYTES:  # a multiple of the chunks, so that each is read once
        rows = max(height, rows // height * height)
    for start in range(0, leaf.shape[0], rows):
        stop = min(start + rows, leaf.shape[0])
        yield np.asarray(array[start:stop].read().result()).astype(jnp.dtype(dtype), copy=False)


def _open(source: epath.Path, name: str) -> Any:
    """An array as stored by Orbax: Zarr chunks in one OCDBT database."""
    base = f"file://{source / FOLDER}/" if is_local(source) else f"{source / FOLDER}/"
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
        # The fewest chunks in memory at a time that keep the disk busy.
        "context": {"file_io_concurrency": {"limit": 2}, "data_copy_concurrency": {"limit": 2}},
    }
    return ts.open(spec, open=True, read=True).result()


def _floating(dtype: str | None) -> str | None:
    if dtype is None:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    name = short.get(dtype, dtype)
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise CheckpointError(f"dtype {dtype!r}: one of float32, bfloat16, float16, float64")
    return name


def _is_exported(name: str) -> bool:
    return name.startswith(_KINDS)


def _path(name: str) -> str:
    return name.split("/", 1)[1]
