"""Tables of quantized values, equal bitwise to those of bitsandbytes.

A code is an index into its table. Of `TABLES`, `nf4` has the quantiles of a normal distribution
(QLoRA, arXiv 2305.14314), `fp4` a sign, two bits of exponent and one of mantissa; `dynamic_map` has
8 bits, of which a dynamic number is the exponent's (arXiv 1511.04561).
"""

import functools

import numpy as np

_NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
_FP4 = np.concatenate([_MAGNITUDES, 0 - _MAGNITUDES])  # without a negative zero
TABLES = {"nf4": _NF4, "fp4": _FP4}


@functools.cache
def dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> np.ndarray:
    """The 256 ascending values of `create_dynamic_map`, which has zero and one.

    Where the exponent is -k (k from `max_exponent_bits` - 1 to 0), the fraction has one bit more
    than for -k - 1: the means of that many equal parts of 0.1 to 1.
    """
    bits, values = total_bits - 1 - max_exponent_bits, [0.0, 1.0]

    def add(parts: int, exponent: int) -> None:
        bounds = _linspace(np.float32(0.1), np.float32(1), parts + 1)
        means = np.float32(10.0**exponent) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        values.extend([*means, *(-means if signed else ())])

    for i in range(max_exponent_bits):
        add(2 ** (i + bits) if signed else 2 ** (i + bits + 1), i + 1 - max_exponent_bits)
    if rest := 2**bits - 1:
        add(rest, 0)
    values += [0.0] * (256 - len(values))
    table = np.sort(np.array(values, np.float32))
    table.flags.writeable = False
    return table


def _linspace(start: np.float32, stop: np.float32, number: int) -> np.ndarray:
    """PyTorch's: from the two ends to the middle, by an fp32 step, products not rounded."""
    step = float((stop - start) / np.float32(number - 1))
    i = np.arange(number)
    near, far = float(start) + step * i, float(stop) - step * (number - 1 - i)
    return np.where(i < number // 2, near, far).astype(np.float32)


def borders(table: np.ndarray) -> np.ndarray:
    """The largest fp32 number that is nearest to each value of an ascending table but the last."""
    middle = (table[:-1].astype(np.float64) + table[1:]) / 2
    rounded = middle.astype(np.float32)
    return np.where(rounded > middle, np.nextafter(rounded, np.float32(-np.inf)), rounded)
