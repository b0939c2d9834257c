"""Quantized tensors of a folder, which are several in its files and one to its reader.

Those of bitsandbytes are read in the dtype that they had, all others in fp32.

- fp8 with block scales (DeepSeek-V3, arXiv:2412.19437): `X` in fp8, and in `X_scale_inv` one factor
  for each block of it.
- MXFP4 (OCP Microscaling Formats 1.0): in `X_blocks` [..., rows, groups, 16] two numbers a byte,
  the first one in the low bits, and in `X_scales` [..., rows, groups] an exponent for each 32 of
  them. As in gpt-oss, whose tensors these are, the result is [..., columns, rows].
- bitsandbytes: NF4 and FP4 (`X` in bytes, `X.absmax`, a state in JSON and, where scales are
  quantized too, `X.nested_absmax`), int8 in rows (`X`, and `SCB` with the scales).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspeed.errors import PretrainedError
from jaxspeed.interop.safetensors import Tensor
from jaxspeed.placement.codec import Codec
from jaxspeed.quantization.codecs import FourBit, MatrixCodec, RowInt8
from jaxspeed.quantization.maps import TABLES

METHODS = ("fp8", "mxfp4", "bitsandbytes")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_BIAS = 127  # of an exponent
_FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@dataclass(frozen=True)
class BitsAndBytes:
    """A matrix [out, in] as bitsandbytes quantized it: what a codec of the same form stores."""

    shape: tuple[int, ...]
    values: str  # nf4, fp4 or int8
    block: int = 0
    double: bool = False
    offset: float = 0.0

    def arrays(
        self, codec: Codec, shape: tuple[int, ...], parts: Sequence[np.ndarray]
    ) -> dict[str, np.ndarray] | None:
        """A codec's arrays of a weight [*inputs, *outputs]; None for a codec of another form."""
        if not isinstance(codec, MatrixCodec):
            return None
        rows, size = self.shape
        codes, scales, *more = parts
        if isinstance(codec, RowInt8) and self.values == "int8":
            found = {"codes": codes, "scales": scales[:, None]}
        elif isinstance(codec, FourBit) and size % self.block == 0:
            if (codec.values, codec.block, codec.double) != (self.values, self.block, self.double):
                return None
            found = {"codes": codes.reshape(-1).view(np.uint8).reshape(rows, -1)}
            found["scales"] = scales.reshape(rows, -1)
            if self.double:
                found |= {"groups": more[2], "offset": np.asarray(self.offset, np.float32)}
        else:
            return None
        wanted = codec.arrays(shape, [1] * len(shape), np.float32, shape)
        for name in ("codes", "scales"):
            if found[name].size != math.prod(wanted[name].shape):
                return None
            found[name] = found[name].T.reshape(wanted[name].shape)
        return found


@dataclass(frozen=True)
class Packed:
    """A tensor that is stored as several."""

    tensor: Tensor
    parts: Sequence[str]
    unpack: Callable[..., np.ndarray]
    codes: BitsAndBytes | None = None


def packed_tensors(
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any],
    where: str,
    read: Callable[[str], np.ndarray],
    model_type: str = "",
) -> dict[str, Packed]:
    """The quantized tensors by name.

    Args:
      quantization: `quantization_config` of config.json.
      read: the array of a tensor; of bitsandbytes' tensors the shapes are in one.

    Raises:
      PretrainedError: the method is not supported, or scales do not fit.
    """
    if not isinstance(quantization, Mapping):
        raise PretrainedError(f"{where}: quantization_config is {quantization!r}, not a mapping")
    method = quantization.get("quant_method", METHODS[0])
    if method not in METHODS:
        raise PretrainedError(
            f"{where}: quantization_config.quant_method is {method!r}; {', '.join(METHODS)} are "
            "dequantized on reading. Dequantize it with transformers: from_pretrained(...)"
            ".dequantize().save_pretrained(...)"
        )
    if method == "bitsandbytes":
        return _of_bitsandbytes(tensors, where, read, model_type in _CONV1D)
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


# -- bitsandbytes ----------------------------------------------------------------------------------

_STATE = ".quant_state.bitsandbytes__"
_CONV1D = ("gpt2",)  # families whose files have [in, out]; bitsandbytes quantizes the transpose
_CHUNK = 1 << 22


def _of_bitsandbytes(
    tensors: Mapping[str, Tensor], where: str, read: Callable[[str], np.ndarray], transposed: bool
) -> dict[str, Packed]:
    """Weights in 4 bits, each with a state in JSON, and in 8 bits, each with the scales of rows."""
    found: dict[str, Packed] = {}
    for name in tensors:
        weight, is_state, values = name.rpartition(_STATE)
        if is_state:
            names = [weight, f"{weight}.absmax", f"{weight}.quant_map", name]
            own = [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
            names += own if own[0] in tensors else []
            try:
                state = json.loads(read(name).tobytes())
                shape = tuple(map(int, state["shape"]))
                dtype = jnp.dtype(state["dtype"])
                block, offset = int(state["blocksize"]), float(state.get("nested_offset", 0))
                table = TABLES[values]
                sizes = [tensors[each].nbytes for each in names]
                full = -(-math.prod(shape) // 2), -(-math.prod(shape) // block)
                each = 1 if len(names) > 4 else 4
                group = int(state.get("nested_blocksize", 256))
                if (sizes[0], sizes[1]) != (full[0], full[1] * each):
                    raise ValueError(f"{sizes[0]} bytes and {sizes[1]} of scales for {shape}")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise PretrainedError(
                    f"{where}: {name} is not a state of bitsandbytes: {error!r}"
                ) from None
            unpack = _four_bit(table, shape, dtype, block, group, np.float32(offset))
            how = BitsAndBytes(shape, values, block, len(names) > 4, offset)
        elif name.endswith(".SCB"):
            weight = f"{name.removesuffix('.SCB')}.weight"
            if weight not in tensors or tensors[weight].dtype != "int8":
                raise PretrainedError(f"{where}: {name} has no {weight} in 8 bits")
            form = f"{name.removesuffix('.SCB')}.weight_format"
            names = [weight, name, *([form] if form in tensors else [])]
            shape, dtype, unpack = tensors[weight].shape, jnp.dtype("float32"), _rows
            how = BitsAndBytes(shape, "int8")
            if form in tensors and read(form).any():
                raise PretrainedError(f"{where}: {form}: only rows, format 0, are read")
        else:
            continue
        if transposed:
            shape, unpack = shape[::-1], _transposed(unpack)
        codes = None if transposed or len(shape) != 2 else how
        found[weight] = Packed(Tensor(weight, shape, dtype.name), names, unpack, codes)
    return found


def _four_bit(
    table: np.ndarray, shape: tuple[int, ...], dtype: Any, block: int, group: int, offset: Any
) -> Callable[..., np.ndarray]:
    def unpack(packed: np.ndarray, absmax: np.ndarray, *parts: np.ndarray) -> np.ndarray:
        if len(parts) > 2:  # the scales are quantized too
            largest, of_scales = parts[2:]
            scales = of_scales[absmax] * np.repeat(largest, group)[: absmax.size]
            absmax = scales + offset
        codes, out = packed.reshape(-1).view(np.uint8), np.empty(math.prod(shape), dtype)
        for start in range(0, out.size, _CHUNK):  # without other arrays as large as the tensor
            part = codes[start // 2 : (start + _CHUNK + 1) // 2]
            values = table[np.stack([part >> 4, part & 15], -1).reshape(-1)]
            scales = np.repeat(absmax[start // block : -(-(start + _CHUNK) // block)], block)
            values = values[: out.size - start]
            out[start : start + values.size] = values * scales[: values.size]
        return out.reshape(shape)

    return unpack


def _rows(codes: np.ndarray, largest: np.ndarray, *_: np.ndarray) -> np.ndarray:
    out = codes * largest[:, None]
    out *= np.float32(1 / 127)
    return out


def _transposed(unpack: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *parts: unpack(*parts).T
