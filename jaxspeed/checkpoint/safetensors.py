"""Streaming writer of the safetensors format: 8 bytes of length, a JSON header, the tensors."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxspeed.errors import CheckpointError

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in the header."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def check_dtype(name: str, dtype: str) -> None:
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name} is {dtype}, which safetensors does not have; it has {', '.join(_NAMES)}"
        )


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[Tensor, Iterator[np.ndarray]]],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, each given as blocks in C order; the file is renamed when complete."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor, _ in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that what follows is aligned
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor, blocks in tensors:
            start = file.tell()
            for block in blocks:
                file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
            assert file.tell() - start == tensor.nbytes, tensor.name
    os.replace(partial, path)
