"""Checkpoints of torch.distributed.checkpoint: `.metadata`, and blobs of torch.save in *.distcp."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.torch_runs.archives import StoredTensor, sizes_of
from jaxspeed.interop.torch_runs.pickles import MOST_BYTES, Pickled, as_pretrained_error
from jaxspeed.interop.torch_runs.torch_run import (
    TensorInParts,
    TorchRun,
    number_of,
)

METADATA = ".metadata"
# {prefix}state.{parameter}.{moment}, with the names of parameters, or with their numbers.
_OF_OPTIMIZER = re.compile(r"(?:.*\.)?state\.(?P<name>.+)\.(?P<key>\w+)")
_COUNTS = {"last_epoch": "position", "step": "steps", "ntokens_seen": "tokens"}
_MEGATRON = (
    "has Megatron's flat buffers (gbuf), without names: save it there with "
    "--dist-ckpt-optim-fully-reshardable, or export it to Hugging Face's format"
)
_BY_NUMBER = "its optimizer has numbers for names: save it there with get_optimizer_state_dict"
Index = dict[str, dict[tuple[int, ...], Pickled]]  # where a value is, by its key and offsets


def read_dcp(folder: Path) -> TorchRun:
    """The run of a checkpoint of torch's DCP, as FSDP2 writes it."""
    path, run = folder / METADATA, TorchRun(folder)
    with as_pretrained_error(path):
        if not path.is_file():
            raise PretrainedError(f"{path}: missing: the save did not end")
        with path.open("rb") as file:
            metadata = run.files.unpickled(file.read(MOST_BYTES + 1))
        entries = metadata.fields["state_dict_metadata"]
        if any("gbuf" in key for key in entries):
            raise PretrainedError(f"{folder}: {_MEGATRON}")
        index: Index = {}
        for key, place in metadata.fields["storage_data"].items():
            name, offset = key.fields["fqn"], sizes_of(key.fields.get("offset") or ())
            if type(name) is str:
                index.setdefault(name, {})[offset] = place
        _fill(run, entries, index)
    return run


def _fill(run: TorchRun, entries: Mapping[str, Pickled], index: Index) -> None:
    updates = set[int]()
    for key, entry in entries.items():
        last, match = key.rpartition(".")[2], _OF_OPTIMIZER.fullmatch(key)
        value: Any = None
        if "chunks" in entry.fields:
            value = _tensor(run, key, entry.fields, index)
        elif last in _COUNTS:
            value = _opener(run, *index[key].values())()
        if match and isinstance(value, TensorInParts):
            if match["name"].isdecimal():
                raise PretrainedError(f"{run.folder}: {_BY_NUMBER}")
            if last == "step":
                updates.add(number_of(value))
            else:
                run.moments.setdefault(last, {})[match["name"]] = value
        elif last in _COUNTS and value is not None and not match:
            setattr(run, _COUNTS[last], number_of(value))
        elif value is not None and math.prod(value.shape):
            run.parameters[key] = value
    if not run.moments:
        run.no_optimizer = "an optimizer's state (keys state.NAME.exp_avg)"
    run.took(updates)
    run.steps = run.steps or run.updates


def _opener(run: TorchRun, place: Pickled) -> Callable[[], Any]:
    name = place.fields["relative_path"]
    if place.fields.get("transform_descriptors"):
        raise ValueError("it is compressed by an extension of torch's")
    if type(name) is not str or Path(name).name != name:
        raise ValueError("it names a file that is not in its folder")
    start, length = sizes_of(place.fields[key] for key in ("offset", "length"))
    path = run.folder / name
    if start + length > path.stat().st_size:
        raise ValueError(f"{name} ends before {start + length:,}")
    return partial(run.files.load, path, start, length)


def _tensor(run: TorchRun, key: str, fields: Mapping[str, Any], index: Index) -> TensorInParts:
    """A tensor in chunks that are a grid; nothing of it is read yet."""
    shape, properties = sizes_of(fields["size"]), fields["properties"].fields
    state = properties.get("state")
    dtype = (state[0] if state else properties["dtype"]).text.removeprefix("torch.")
    dtype, starts, boxes = jnp.dtype(dtype).name, [{n} for n in shape], dict[Any, Any]()
    parts: list[tuple[tuple[slice, ...], Callable[[], np.ndarray]]] = []
    for chunk in fields["chunks"]:
        offsets, sizes = (sizes_of(chunk.fields[name]) for name in ("offsets", "sizes"))
        if not math.prod(sizes):
            continue
        place = index[key][offsets]
        boxes[offsets] = sizes
        for of_dim, start in zip(starts, offsets, strict=True):
            of_dim.add(start)
        at = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        parts.append((at, partial(_chunk, _opener(run, place), sizes, dtype, key)))
    edges = [sorted(of_dim) for of_dim in starts]
    ends = [dict(itertools.pairwise(of_dim)) for of_dim in edges]
    is_grid = math.prod(map(len, ends)) == len(boxes) == len(parts) and all(
        of_dim.get(start) == start + size
        for offsets, sizes in boxes.items()
        for of_dim, start, size in zip(ends, offsets, sizes, strict=True)
    )
    if math.prod(shape) and not (is_grid and all(0 in of_dim for of_dim in ends)):
        raise ValueError(f"the chunks of {key} are not those of a tensor {list(shape)}")
    return TensorInParts(shape, dtype, parts)


def _chunk(opened: Callable[[], Any], sizes: tuple[int, ...], dtype: str, key: str) -> np.ndarray:
    value = opened()
    if not isinstance(value, StoredTensor) or (value.shape, value.dtype) != (sizes, dtype):
        raise PretrainedError(f"{key}: a chunk of its file is no {dtype} {list(sizes)}")
    return value.array()
