"""Quantized tensors of a folder, which are several in its files and one, in fp32, to its reader.

- fp8 with block scales (DeepSeek-V3, arXiv:2412.19437): `X` in fp8, and in `X_scale_inv` one factor
  for each block of it.
- MXFP4 (OCP Microscaling Formats 1.0): in `X_blocks` [..., rows, groups, 16] two numbers a byte,
  the first one in the low bits, and in `X_scales` [..., rows, groups] an exponent for each 32 of
  them. As in gpt-oss, whose tensors these are, the result is [..., columns, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.safetensors import Tensor

METHODS = ("fp8", "mxfp4")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_BIAS = 127  # of an exponent
_FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@dataclass(frozen=True)
class Packed:
    """A tensor that is stored as several."""

    tensor: Tensor
    parts: Sequence[str]
    unpack: Callable[..., np.ndarray]


def packed_tensors(
    tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], where: str
) -> dict[str, Packed]:
    """The quantized tensors by name.

    Args:
      quantization: `quantization_config` of config.json.

    Raises:
      PretrainedError: the method is not supported, or scales do not fit.
    """
    if not isinstance(quantization, Mapping):
        raise PretrainedError(f"{where}: quantization_config is {quantization!r}, not a mapping")
    method = quantization.get("quant_method", METHODS[0])
    if method not in METHODS:
        raise PretrainedError(
            f"{where}: quantization_config.quant_method is {method!r}; {' and '.join(METHODS)} are "
            "dequantized on reading. Dequantize it with transformers: from_pretrained(...)"
            ".dequantize().save_pretrained(...)"
        )
    found = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}{_SCALE}")
        if tensor.dtype in _FP8 and scales is not None:
            block = quantization.get("weight_block_size") or _block(tensor.shape, scales.shape)
            if not isinstance(block, list) or not all(type(n) is int and n > 0 for n in block):
                raise PretrainedError(
                    f"{where}: quantization_config.weight_block_size is {block!r}, not a list of "
                    "positive integers"
                )
            block = [1] * (len(tensor.shape) - len(block)) + list(block)
            grid = tuple(-(-n // b) for n, b in zip(tensor.shape, block))
            if np.prod(scales.shape) != np.prod(grid) or len(tensor.shape) != len(block):
                raise PretrainedError(
                    f"{where}: {scales.name} has shape {list(scales.shape)}; {name} "
                    f"{list(tensor.shape)} needs {list(grid)}, one for each block of {block}"
                )
            parts = (name, scales.name)
            found[name] = Packed(Tensor(name, tensor.shape, "float32"), parts, _fp8(tuple(block)))
        base = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{base}{_SCALES}")
        if base != name and tensor.dtype == "uint8" and scales is not None:
            *outer, rows, groups, size = (*tensor.shape, *[0] * (3 - len(tensor.shape)))
            if scales.shape != tensor.shape[:-1] or len(tensor.shape) < 3:
                raise PretrainedError(
                    f"{where}: {scales.name} has shape {list(scales.shape)}, expected "
                    f"{list(tensor.shape[:-1])}, a group of {name} each"
                )
            shape = (*outer, 2 * groups * size, rows)
            found[base] = Packed(Tensor(base, shape, "float32"), (name, scales.name), _mxfp4)
    return found


def _block(shape: Sequence[int], scales: Sequence[int]) -> list[int]:
    """The size of blocks that divide a tensor; one scale is of all of it."""
    if len(scales) != len(shape):
        return list(shape)
    return [-(-n // max(1, parts)) for n, parts in zip(shape, scales)]


def _fp8(block: tuple[int, ...]) -> Callable[..., np.ndarray]:
    def unpack(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
        out = stored.astype(np.float32)
        grid = [-(-n // b) for n, b in zip(out.shape, block)]
        scales = scales.astype(np.float32).reshape(grid)
        for dim in range(1, scales.ndim):
            scales = np.repeat(scales, block[dim], axis=dim)
        scales = scales[(slice(None), *map(slice, out.shape[1:]))]
        for i, row in enumerate(scales):  # without an array of scales as large as the tensor
            out[i * block[0] : (i + 1) * block[0]] *= row
        return out

    return unpack


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    *outer, rows, groups, size = blocks.shape
    out = np.empty((*outer, rows, groups, 2 * size), np.float32)
    for i in np.ndindex(*outer):  # a matrix at a time
        out[i][..., 0::2] = _FP4[blocks[i] & 15]
        out[i][..., 1::2] = _FP4[blocks[i] >> 4]
        out[i] *= np.ldexp(np.float32(1), scales[i].astype(np.int32) - _BIAS)[..., None]
    return out.reshape(*outer, rows, 2 * groups * size).swapaxes(-1, -2)
