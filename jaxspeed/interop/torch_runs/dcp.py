"""Checkpoints of torch.distributed.checkpoint: `.metadata`, and blobs of torch.save in *.distcp."""

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs.archives import (
    MappedFile,
    StoredTensor,
    TorchArchive,
    read_pickle,
)
from jaxspeed.interop.torch_runs.pickles import MOST_BYTES, Name, Record
from jaxspeed.interop.torch_runs.torch_run import (
    Chunk,
    ChunkedTensor,
    TorchRun,
    as_pretrained_error,
    shape_of,
    whole_number,
)

METADATA = ".metadata"
# {prefix}state.{parameter}.{moment}, with the names of parameters, or with their numbers.
_OF_OPTIMIZER = re.compile(r"(?:.*\.)?state\.(?P<name>.+)\.(?P<key>\w+)")
_COUNTS = {"last_epoch": "position", "step": "steps", "ntokens_seen": "tokens"}
_MEGATRON = (
    "has Megatron's flat buffers (gbuf), which have no parameter's name: save it there with "
    "--dist-ckpt-optim-fully-reshardable, or export it from Megatron to Hugging Face's format"
)
Index = dict[str, dict[tuple[int, ...], Record]]  # where it is, by key and offsets


class _Reader:
    def __init__(self, folder: Path, run: TorchRun) -> None:
        self._folder, self._run = folder, run
        self._files: dict[str, MappedFile] = {}

    def blob(self, where: Record) -> TorchArchive:
        """What torch.save wrote at a place."""
        path = where.fields["relative_path"]
        if where.get("transform_descriptors"):
            raise PretrainedError(f"{self._folder}: is compressed by an extension of torch's")
        if not isinstance(path, str) or Path(path).name != path:
            raise PretrainedError(f"{self._folder}: names a file that is not in it")
        if path not in self._files:
            self._files[path] = MappedFile(self._folder / path)
        start, length = shape_of((where.fields["offset"], where.fields["length"]))
        return TorchArchive(self._files[path], start, length)

    def value(self, where: Record) -> Any:
        blob = self.blob(where)
        try:
            return blob.value
        finally:
            self._run.inert.update(blob.inert)

    def tensor(self, key: str, of: Record, index: Index) -> ChunkedTensor:
        """A tensor, of which nothing is read yet."""
        properties = of.fields["properties"]
        state = properties.get("state")
        dtype = state[0] if state else properties.get("dtype")
        if not isinstance(dtype, Name):
            raise ValueError(f"{key} has no dtype")
        element = jnp.dtype(dtype.text.removeprefix("torch.")).name
        chunks = []
        for chunk in of.fields["chunks"]:
            offsets, sizes = (shape_of(chunk.fields[name]) for name in ("offsets", "sizes"))
            blob = self.blob(index[key][offsets])
            opened = partial(_tensor_of, blob)
            chunks.append(Chunk(offsets, sizes, blob.file, opened))
        return ChunkedTensor(shape_of(of.fields["size"]), element, chunks)


def _tensor_of(blob: TorchArchive) -> StoredTensor:
    value = blob.value
    if not isinstance(value, StoredTensor):
        raise PretrainedError(f"{blob}: has no tensor")
    return value


def is_dcp(folder: Path) -> bool:
    """Whether a folder has a checkpoint of torch's DCP."""
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def read_dcp(folder: Path) -> TorchRun:
    """The run of a checkpoint of torch's DCP, as FSDP2 writes it.

    Raises:
      PretrainedError: it is incomplete or damaged, or its optimizer has no names.
    """
    path = folder / METADATA
    run = TorchRun(folder, "torch's DCP")
    with as_pretrained_error(path):
        if not path.is_file():
            raise PretrainedError(f"{path}: missing: the save did not end")
        if path.stat().st_size > MOST_BYTES:
            raise PretrainedError(f"{path}: has more than {MOST_BYTES:,} bytes")
        metadata = read_pickle(path.read_bytes(), str(path), run.inert)
        entries = metadata.fields["state_dict_metadata"]
        index: Index = {}
        for key, where in metadata.fields["storage_data"].items():
            offset = key.get("offset")
            at = shape_of(offset) if offset is not None else ()
            index.setdefault(key.fields["fqn"], {})[at] = where
        if any("gbuf" in key for key in entries):
            raise PretrainedError(f"{folder}: {_MEGATRON}")
        _fill(run, _Reader(folder, run), entries, index)
    return run


def _fill(run: TorchRun, reader: _Reader, entries: dict[str, Record], index: Index) -> None:
    updates = set[int]()
    by_number = Counter[bool]()
    for key, entry in entries.items():
        last = key.rpartition(".")[2]
        match = _OF_OPTIMIZER.fullmatch(key)
        if entry.fields.get("chunks") is None:
            if last in _COUNTS:
                (where,) = index[key].values()
                _count(run, last, reader.value(where))
            continue
        tensor = reader.tensor(key, entry, index)
        if match:
            by_number[match["name"].isdecimal()] += 1
            if match["key"] == "step":
                updates.add(whole_number(_number(tensor)))
            else:
                run.moments.setdefault(match["key"], {})[match["name"]] = tensor
        elif not tensor.shape and last in _COUNTS:
            _count(run, last, _number(tensor))
        elif math.prod(tensor.shape):
            run.parameters[key] = tensor
    if by_number[True]:
        raise PretrainedError(
            f"{run.folder}: its optimizer has parameters by numbers: save it there with "
            "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which has names"
        )
    if not run.moments:
        run.no_optimizer = "its optimizer: it has none (no keys state.NAME.exp_avg)"
    if len(updates) > 1:
        raise PretrainedError(f"{run.folder}: its parameters have taken other steps: {updates}")
    run.updates = updates.pop() if updates else run.steps
    run.steps = run.steps or run.updates


def _number(tensor: ChunkedTensor) -> Any:
    if math.prod(tensor.shape) != 1:
        raise ValueError(f"a count is a tensor {list(tensor.shape)}")
    return tensor.array().item()


def _count(run: TorchRun, name: str, value: Any) -> None:
    setattr(run, _COUNTS[name], whole_number(value))
