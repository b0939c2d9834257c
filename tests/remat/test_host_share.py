"""The split of saved activations between host and device memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspeed.hlo.collectives import collectives
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.remat.host_share import LARGEST_ERROR, SplitActivation, joined, split

TENSOR = {"data": 4, "tensor": 2}


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(TENSOR, jax.devices()[:8])


# [batch, seq, embed], [batch, heads, seq], [batch, embed], and one that tensor does not divide
SHAPES = [(8, 8192, 64), (4, 6, 256), (4, 2048), (8, 33, 7)]


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("ratio", [0.05, 0.25, 0.4375, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_share_is_within_a_step_and_the_parts_join_to_the_activation(mesh, shape, ratio):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    with jax.set_mesh(mesh):
        parts = split(x, ratio)
        assert isinstance(parts, SplitActivation)
        assert parts.host.size + parts.device.size == x.size
        assert parts.host.size > 0
        assert abs(parts.host.size / x.size - ratio) <= LARGEST_ERROR
        np.testing.assert_array_equal(joined(parts), x)


def test_rows_end_where_tiles_end(mesh):
    with jax.set_mesh(mesh):
        assert split(jnp.zeros((1, 4096, 8)), 0.3).host.shape == (1, 2 * 640, 8)  # of 2048 each


def test_everything_is_one_part(mesh):
    x = jnp.zeros((4, 32, 32))
    with jax.set_mesh(mesh):
        assert split(x, 1.0) is x


@pytest.mark.parametrize("spec", [("data", "tensor"), ("data", None, "tensor")])
def test_no_shard_communicates(mesh, spec):
    x = jax.ShapeDtypeStruct(
        (8, 64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )

    def both_ways(x):
        parts = split(x, 0.25)
        host, device = jax.lax.optimization_barrier((parts.host + 1, parts.device))
        return joined(SplitActivation(host, device, parts.dim, parts.shards))

    def by_the_first_half_of_the_sequence(x):
        return jnp.concatenate([x[:, :16] + 1, x[:, 16:]], 1)

    def count(fn):
        with jax.set_mesh(mesh):
            return len(list(collectives(jax.jit(fn).lower(x).compile().as_text(), mesh)))

    assert count(both_ways) == 0
    if spec[1]:
        assert count(by_the_first_half_of_the_sequence) > 0
