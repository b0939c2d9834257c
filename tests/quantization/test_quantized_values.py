"""Codes, scales and values of the codecs, against bitsandbytes and against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.jaxpr.traverse import consts_and_carry
from jaxspeed.quantization.codecs import FourBit, Reordered, RowInt8, codec_named, nearest8, value8
from jaxspeed.quantization.maps import dynamic_map
from tests.quantization import numpy_codes


def weight(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal(shape)
        * np.exp(rng.standard_normal(shape[0]))[(..., *[None] * (len(shape) - 1))]
    )
    x = x.astype(np.float32)
    x[1] = 0
    return np.asarray(jnp.asarray(x, dtype), dtype=dtype)


def stored(codec, value):
    """The arrays of a value on one device, by a compiled program."""
    arrays = codec.arrays(value.shape, [1] * value.ndim, value.dtype, value.shape)
    made = jax.jit(lambda x: codec.encode(x, value.shape, arrays))(jnp.asarray(value))
    for name, array in arrays.items():
        assert made[name].shape == array.shape and made[name].dtype == array.dtype, name
    return made


def decoded(codec, arrays, shape, dtype=jnp.float32):
    return np.asarray(jax.jit(lambda x: codec.decode(x, shape, dtype))(arrays))[
        tuple(map(slice, shape))
    ]


def as_files(arrays, inputs: int = 1) -> dict[str, np.ndarray]:
    """Matrices [out, in] of arrays of one matrix [*inputs, *outputs]."""
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    for name in ("codes", "scales"):
        x = arrays[name]
        arrays[name] = x.reshape(int(np.prod(x.shape[:inputs])), -1).T
    return arrays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", ["nf4", "fp4"])
def test_single_quantized_blocks_are_those_of_bitsandbytes(references, values, dtype):
    x = weight(48, 320, dtype=dtype)
    theirs = references.call("bnb.quantized", weight=x, values=values)
    codec = FourBit(values=values, double=False)
    ours = stored(codec, np.ascontiguousarray(x.T))
    found = as_files(ours)
    np.testing.assert_array_equal(found["codes"], theirs["packed"].reshape(48, -1))
    np.testing.assert_array_equal(found["scales"], theirs["absmax"].reshape(48, -1))
    value = decoded(codec, ours, x.T.shape, jnp.dtype(dtype))
    np.testing.assert_array_equal(value.T, theirs["value"])


@pytest.mark.parametrize("values", ["nf4", "fp4"])
def test_the_second_level_is_that_of_bitsandbytes_with_the_same_offset(references, values):
    x = weight(80, 448)
    theirs = references.call("bnb.quantized", weight=x, values=values, double=True)
    found = as_files(stored(FourBit(values=values), np.ascontiguousarray(x.T)))
    np.testing.assert_allclose(found["offset"], theirs["offset"], rtol=1e-6)
    absmax = numpy_codes.four_bit(x, values, double=False)["scales"]
    np.testing.assert_array_equal(found["codes"], theirs["packed"].reshape(80, -1))
    given = numpy_codes.second_level(absmax, theirs["offset"])
    np.testing.assert_array_equal(given["groups"], theirs["groups"])
    own = numpy_codes.second_level(absmax, found["offset"])
    np.testing.assert_array_equal(own["scales"], found["scales"])
    np.testing.assert_array_equal(own["groups"], found["groups"])


def test_rows_in_8_bits_are_those_of_bitsandbytes(references):
    x = np.array(weight(40, 100))
    x[1, 0] = 1e-3  # there a row of zeros has no code
    theirs = references.call("bnb.in_rows", weight=x)
    codec = RowInt8()
    ours = stored(codec, np.ascontiguousarray(x.T))
    found = as_files(ours)
    np.testing.assert_array_equal(found["codes"], theirs["codes"])
    np.testing.assert_array_equal(found["scales"][:, 0], theirs["stats"])
    np.testing.assert_allclose(decoded(codec, ours, x.T.shape).T, theirs["value"], rtol=2e-7)


SHAPES = [
    ((130, 6), 1),
    ((96, 5), 1),
    ((4, 32, 6), 2),
    ((3, 96, 7), 2),
    ((5, 24, 2, 6), 2),
    ((2, 128, 4, 3), 2),
    ((63, 3), 1),
]


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
def test_codes_are_those_of_numpy_for_any_shape(shape, inputs, double):
    """Blocks of several input dims (heads) too, and rows that are no multiple of 64."""
    x = weight(*shape)
    size = int(np.prod(shape[:inputs]))
    codec = FourBit(inputs, len(shape) - inputs, double=double)
    ours = stored(codec, x)
    found = as_files(ours, inputs)
    rows = x.reshape(size, -1).T
    expected = numpy_codes.four_bit(rows, "nf4", double)
    np.testing.assert_array_equal(found["codes"], expected["codes"])
    own = expected["scales"].shape[1]
    np.testing.assert_array_equal(found["scales"][:, :own], expected["scales"])
    value = decoded(codec, ours, shape).reshape(size, -1).T
    # XLA does not round the product of a scale's code and its group before the offset is added,
    # and of its code there is another rounding.
    atol = 2.0**-22 * np.abs(rows).max()
    again = numpy_codes.dequantized(expected, "nf4", size)
    np.testing.assert_allclose(value, again, rtol=2e-7, atol=atol)
    assert np.abs(value - rows).max() < 0.2 * np.abs(rows).max()


@pytest.mark.default_cases("codec1", "codec2")
@pytest.mark.parametrize("codec", [FourBit(), FourBit(values="fp4", double=False), RowInt8()])
def test_a_stack_has_the_codes_of_its_layers(codec):
    x = weight(3, 2, 128, 10)  # layers, experts
    together = stored(codec, x)
    for at in np.ndindex(3, 2):
        alone = stored(codec, x[at])
        for name, array in alone.items():
            np.testing.assert_array_equal(together[name][at], array, name)
    value = decoded(codec, together, x.shape)
    np.testing.assert_array_equal(value[2, 1], decoded(codec, alone, x.shape[2:]))


@pytest.mark.parametrize("codec", [FourBit(), FourBit(2, 1), FourBit(1, 1, "fp4", double=False)])
def test_nothing_as_large_as_a_weight_is_made_before_a_scan_over_layers(codec):
    """XLA:GPU would hold it: the table's values in fp32 were 16 arrays of each weight's shape."""
    x = weight(3, *([4, 32] if codec.inputs == 2 else [128]), 128)
    size = x[0].size

    def loss(rows, arrays):
        def layer(rows, one):
            value = codec.decode(one, x.shape[1:], jnp.float32)
            return jnp.tanh(rows @ value.reshape(128, 128)), None

        return jax.lax.scan(layer, rows, arrays)[0].sum()

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 128)), stored(codec, x))
    loops = [eqn for eqn in program.eqns if eqn.primitive.name == "scan"]
    given = [v.aval for loop in loops for v in loop.invars[: consts_and_carry(loop)[0]]]
    assert len(loops) == 2, "forward and backward"
    assert all(aval.size < size // 64 for aval in given), given


def test_the_values_of_8_bits_are_those_of_the_table():
    values = np.asarray(jax.jit(value8)(jnp.arange(256, dtype=jnp.uint8)))
    np.testing.assert_allclose(values, dynamic_map(), rtol=2e-7, atol=0)
    assert values[127] == 0 and values[255] == 1
    np.testing.assert_array_equal(nearest8(jnp.asarray(values)), np.arange(256))


def test_a_codec_is_found_by_its_name():
    own = (FourBit(), FourBit(2, 1, "fp4", 128, False), RowInt8(), RowInt8(1, 2))
    for codec in (*own, Reordered(FourBit(2, 1), (1, 2, 0)), Reordered(RowInt8(), (1, 0))):
        assert codec_named(codec.name) == codec
    assert codec_named("nf4") is None
