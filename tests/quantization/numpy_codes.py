"""The definition of the codecs in NumPy, for matrices [out, in] as Hugging Face has them."""

from typing import Any

import numpy as np

from jaxspeed.quantization.maps import TABLES, dynamic_map


def four_bit(weight: np.ndarray, values: str, double: bool) -> dict[str, np.ndarray]:
    """Packed codes [out, in / 2], scales [out, in / 64]; and of the second level, if `double`."""
    table, (rows, size) = TABLES[values], weight.shape
    padded = np.zeros((rows, -(-size // 64) * 64), np.float32)
    padded[:, :size] = weight
    blocks = padded.reshape(rows, -1, 64)
    absmax = np.abs(blocks).max(-1)
    scaled = blocks * (np.float32(1) / np.where(absmax > 0, absmax, np.float32(1)))[..., None]
    order = np.argsort(table, kind="stable")
    middle = (table[order[:-1]] + table[order[1:]]) / np.float32(2)
    codes = order[np.searchsorted(middle, scaled.reshape(rows, -1))].astype(np.uint8)
    codes = codes[:, : size + size % 2]
    found = {"codes": (codes[:, ::2] << 4) | codes[:, 1::2], "scales": absmax}
    return found if not double else found | second_level(absmax)


def second_level(absmax: np.ndarray, offset: Any = None) -> dict[str, np.ndarray]:
    if offset is None:
        offset = mean_of_pairs(absmax.reshape(-1))
    flat = absmax.reshape(-1) - offset
    groups = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    largest = np.abs(groups).max(-1)
    scaled = groups * (np.float32(1) / np.where(largest > 0, largest, np.float32(1)))[:, None]
    distance = np.abs(scaled.astype(np.float64)[..., None] - dynamic_map().astype(np.float64))
    codes = distance.argmin(-1).astype(np.uint8).reshape(-1)[: flat.size]
    return {"scales": codes.reshape(absmax.shape), "groups": largest, "offset": offset}


def mean_of_pairs(x: np.ndarray) -> np.float32:
    """By sums of pairs, and rounded to even at the last but one of the 23 bits."""
    share = np.float32(1 / x.size)
    x = np.pad(x, (0, (1 << (x.size - 1).bit_length()) - x.size))
    while x.size > 1:
        x = x[: x.size // 2] + x[x.size // 2 :]
    bits = (x[:1] * share).view(np.int32)[0]
    rounded = (bits + (bits >> 1 & 1)) & ~np.int32(1)
    return np.array([rounded], np.int32).view(np.float32)[0]


def dequantized(found: dict[str, np.ndarray], values: str, size: int) -> np.ndarray:
    """The weight [out, in] of packed codes."""
    codes, scales = found["codes"], found["scales"]
    if "groups" in found:
        groups = np.repeat(found["groups"], 256)[: scales.size].reshape(scales.shape)
        scales = dynamic_map()[scales] * groups + found["offset"]
    nibbles = np.stack([codes >> 4, codes & 15], -1).reshape(len(codes), -1)
    return (TABLES[values][nibbles] * np.repeat(scales, 64, 1)[:, : nibbles.shape[1]])[:, :size]
