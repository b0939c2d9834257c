"""Codes of 8-bit moments: nearest values, scales of the logical layer, alike on every mesh."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.placement import Leaf, build_mesh, build_table
from jaxspeed.placement.codec import StoredValue
from jaxspeed.quantization import moments
from jaxspeed.quantization.maps import dynamic_map
from jaxspeed.quantization.moments import DynamicBlocks, MomentRule, nearest_codes, values_of
from tests.support.covering import covering
from tests.train.eight_bit import coded


def numbers(signed):
    """Of all magnitudes, the map's own, the middles of two, and their neighbours."""
    rng = np.random.default_rng(0)
    table = dynamic_map(signed).astype(np.float64)
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middles, np.float32(end)) for end in (-9, 9)]
    drawn = rng.normal(size=50_000) * 10.0 ** rng.uniform(-8, 0, 50_000)
    x = np.concatenate([drawn, table, middles, *near, [0, -0.0, 1, -1, 1e-30]])
    x = np.clip(x, -1, 1).astype(np.float32)
    return x if signed else np.abs(x)


def nearest(x, signed):
    """By the distance to every value, exactly."""
    table = dynamic_map(signed).astype(np.float64)
    parts = np.array_split(x.astype(np.float64), 16)
    return np.concatenate([np.abs(part[:, None] - table).argmin(1) for part in parts])


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_of_the_nearest_value(signed):
    x = numbers(signed)
    codes = jax.jit(lambda x: nearest_codes(x, signed))(x)
    np.testing.assert_array_equal(codes, nearest(x, signed))
    every = jax.jit(lambda c: values_of(c, signed))(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(every, dynamic_map(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_without_tables_as_on_tpus_only_near_ties_differ(signed, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, default: tpu(*x))
    x = numbers(signed)
    codes = np.asarray(jax.jit(lambda x: nearest_codes(x, signed))(x)).astype(int)
    other = codes != nearest(x, signed)
    assert other[:50_000].mean() < 1e-4
    table = dynamic_map(signed).astype(np.float64)
    distances = [np.abs(x - table[c]) for c in (codes, nearest(x, signed))]
    np.testing.assert_array_less(distances[0][other] - distances[1][other], 2e-6 * np.abs(x[other]))
    every = jax.jit(lambda c: values_of(c, signed))(np.arange(256, dtype=np.uint8))
    np.testing.assert_allclose(every, dynamic_map(signed), rtol=1e-6)


# (shape, names of its dims): blocks end with rows of the last dim, with some of its rows, with rows
# of several dims, and inside of rows; tensor shards end where blocks do, and do not.
LEAVES = {
    "columns": ((32, 512), (None, "mlp")),
    "columns of a stack": ((2, 64, 704), ("layers", None, "mlp")),
    "rows": ((96, 64), (None, None)),
    "heads": ((2, 28, 14, 64), ("layers", "embed", "heads", "head_dim")),
    "odd rows": ((101, 7, 64), (None, None, None)),
    "odd columns": ((100, 333), ("embed", "vocab")),
    "a vector": ((5000,), (None,)),
    "vectors": ((3, 4100), ("layers", None)),
}
MESHES = [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 1}]
FEW = [("columns of a stack", 1), ("heads", 2), ("odd rows", 0), ("odd columns", 1), ("vectors", 0)]


def stored_value(name, sizes, signed):
    shape, names = LEAVES[name]
    leaf = Leaf("w", shape, jnp.dtype("float32"), names)
    mesh = build_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    rule = MomentRule({"w": leaf.stacked})
    row = build_table([leaf], mesh, stage=1, codecs=(rule,))["w"]
    codec = DynamicBlocks(signed, leaf.stacked)
    at = row.opt.sharding(mesh)
    return StoredValue(shape, row.shape(row.opt), np.dtype("float32"), at, codec, leaf.stacked)


def drawn(shape):
    rng = np.random.default_rng(1)
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 0, shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "mesh"), covering([(n, i) for n in LEAVES for i in range(len(MESHES))], FEW)
)
def test_codes_and_scales_are_those_of_the_logical_layer(name, mesh):
    value = stored_value(name, MESHES[mesh], signed=True)
    x, stacked = drawn(value.shape), value.stacked
    encode = jax.jit(value.encode, out_shardings=value.shardings)
    stored = encode(x)
    codes, scales, values = coded(x, True, bool(stacked))
    inside = tuple(map(slice, value.shape))
    np.testing.assert_array_equal(np.asarray(stored["codes"])[inside], codes)
    found = np.asarray(stored["scales"])[tuple(map(slice, value.shape[:stacked]))]
    found = found.reshape(len(scales), -1)
    np.testing.assert_array_equal(found[:, : scales.shape[1]], scales)
    assert not found[:, scales.shape[1] :].any()
    np.testing.assert_array_equal(jax.jit(value.decode)(stored), values)
    assert value.total_bytes == codes.size + 4 * scales.size


def test_where_shards_end_inside_of_blocks_only_maxima_are_exchanged():
    """Columns of 352 on each of two devices: maxima of 32 of them."""
    value = stored_value("columns of a stack", {"data": 4, "tensor": 2}, signed=True)
    assert value.shardings["scales"].spec[2:] != value.shardings["codes"].spec[2:]

    def encode(x):
        return value.codec.encode(x, value.shape, value.arrays)

    x = jax.ShapeDtypeStruct(value.padded, jnp.float32, sharding=value.sharding)
    text = jax.jit(encode, out_shardings=value.shardings).lower(x).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-\w+|collective-permute)", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in moved if shape]
    assert sizes and max(sizes) <= math.prod(value.shape) // 32


def test_no_array_has_256_candidates_for_each_number():
    value = stored_value("columns", {"data": 1}, signed=False)
    compiled = (
        jax.jit(value.encode).lower(value.arrays["codes"].update(dtype=jnp.float32)).compile()
    )
    shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest <= math.prod(value.shape)


def test_zeros_and_numbers_that_are_none():
    codec, shape = DynamicBlocks(True), (2, 256)
    arrays = codec.arrays(shape, (1, 1), jnp.float32, shape)
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    x = jnp.zeros(shape).at[1, 3].set(jnp.nan)
    stored = jax.jit(lambda x: codec.encode(x, shape, like))(x)
    decoded = jax.jit(lambda stored: codec.decode(stored, shape, jnp.float32))(stored)
    assert not decoded[0].any() and stored["scales"][0] == 0
    assert jnp.isnan(decoded[1]).all()
    assert {c.name for c in moments.MOMENT_CODECS} == {
        f"8-bit {kind}{layers}" for kind in ("signed", "unsigned") for layers in ("", " by layer")
    }
