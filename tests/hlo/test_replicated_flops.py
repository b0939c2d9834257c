"""Flops that data ranks repeat, in programs whose replicated products are known."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspeed.hlo import report
from jaxspeed.hlo.cost import cost
from jaxspeed.hlo.replica_groups import tiles_of
from jaxspeed.hlo.replicated_flops import replicated_flops
from tests.hlo.hlo_programs import array, compiled_text, constrain, mesh_of

ROWS, WIDTH = 64, 32
WHOLE = 2 * ROWS * WIDTH * WIDTH  # flops of x [ROWS, WIDTH] times w [WIDTH, WIDTH]
DATA = ("replica", "data")


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(jax.devices(), data=4, tensor=2)


def found(mesh, fn, *specs):
    """(replicated flops, all flops) a device, of x [ROWS, WIDTH], w and so on [WIDTH, WIDTH]."""
    shapes = [(ROWS, WIDTH), *[(WIDTH, WIDTH)] * (len(specs) - 1)]
    given = [array(mesh, shape, spec) for shape, spec in zip(shapes, specs, strict=True)]
    text = compiled_text(fn, *given)
    shardings = [x.sharding for x in given]
    return replicated_flops(text, mesh, shardings), cost(text).flops


def test_shardings_are_read_from_the_text_where_it_has_them(mesh):
    given = [array(mesh, shape, P("data")) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    text = compiled_text(product, *given)
    if "sharding=" in text:  # not with jaxlib 0.12
        assert replicated_flops(text, mesh) == found(mesh, product, P("data"), P("data"))[0]


def product(x, w):
    return jnp.tanh(x @ w)


def test_a_matmul_of_replicated_operands_is_replicated(mesh):
    assert found(mesh, product, P(), P()) == (WHOLE, WHOLE)


def test_a_product_of_what_data_shards_is_not(mesh):
    assert found(mesh, product, P("data"), P()) == (0, WHOLE // 4)
    assert found(mesh, product, P(None, "data"), P("data")) == (0, WHOLE // 4)


def test_sharded_over_tensor_alone_it_is_replicated_over_data(mesh):
    assert found(mesh, product, P(), P(None, "tensor")) == (WHOLE // 2, WHOLE // 2)


def test_what_one_data_axis_shards_is_replicated_over_the_other():
    mesh = mesh_of(jax.devices(), replica=2, data=4)
    assert found(mesh, product, P("data"), P()) == (WHOLE // 4, WHOLE // 4)
    assert found(mesh, product, P(DATA), P()) == (0, WHOLE // 8)


def test_of_several_products_those_that_are_replicated_count(mesh):
    def loss(x, w, noise):
        return product(x, w).sum() + product(product(noise, w), w).sum()

    replicated, every = found(mesh, loss, P("data"), P(), P())
    assert replicated == 2 * 2 * WIDTH**3
    assert every == replicated + WHOLE // 4


def test_what_was_summed_over_data_is_alike_from_there_on(mesh):
    """A gradient, say, which an optimizer multiplies: on every rank."""

    def update(x, w):
        gradient = constrain(x.T @ x, mesh)
        return gradient @ w

    replicated, every = found(mesh, update, P("data"), P())
    assert replicated == 2 * WIDTH**3
    assert every == replicated + 2 * WIDTH * WIDTH * ROWS // 4


def test_gathered_weights_are_no_replication(mesh):
    def step(x, w):
        return product(x, constrain(w, mesh))

    assert found(mesh, step, P("data"), P("data")) == (0, WHOLE // 4)


def test_loops_count_each_trip_and_recomputation_is_no_replication(mesh):
    @jax.checkpoint
    def layer(h, w):
        return jnp.sin(product(h, w))

    def loss(w, x):
        h, _ = lax.scan(lambda h, _: (layer(h, w), None), x, length=3)
        return (h**2).sum()

    def step(x, w):
        return jax.grad(loss)(w, x)

    replicated, every = found(mesh, step, P(), P())
    assert replicated == every >= 3 * 4 * WHOLE  # forward, again, and two products backward
    replicated, shared = found(mesh, step, P("data"), P())
    assert (replicated, shared) == (0, every // 4)


def test_a_carry_that_becomes_sharded_is_no_replication(mesh):
    """It starts from zeros, which all devices have alike."""

    def step(x, w):
        body = lambda h, _: (constrain(product(h, w) + x, mesh, "data"), None)  # noqa: E731
        return lax.scan(body, jnp.zeros_like(x), length=3)[0]

    replicated, every = found(mesh, step, P("data"), P())
    assert (replicated, every) == (0, 3 * WHOLE // 4)


def test_the_report_shows_the_share(mesh):
    def loss(x, w):
        return product(x, w).sum() + product(w, w).sum()

    def made(fn):
        given = array(mesh, (ROWS, WIDTH), P("data")), array(mesh, (WIDTH, WIDTH), P())
        return report(jax.jit(fn).lower(*given).compile(), mesh)

    share = 2 * WIDTH**3 / (2 * WIDTH**3 + WHOLE // 4)
    both, one = made(loss), made(product)
    assert both.replicated_flops == 2 * WIDTH**3
    assert both.figures()["replicated_flops"] == both.replicated_flops
    assert "of these replicated over data" in str(both) and f"{share:.0%}" in str(both)
    assert one.replicated_flops == 0 and "replicated" not in str(one)


def test_tiles_are_read_as_xla_writes_them():
    assert tiles_of("{replicated}", 4) == [0, 0, 0, 0]
    assert tiles_of("{devices=[2,2]<=[4]}", 4) == [0, 1, 2, 3]
    assert tiles_of("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 4) == [0, 0, 1, 1]
    turned = "{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}"
    assert tiles_of(turned, 4) == [0, 1, 0, 1]
    assert tiles_of("{devices=[2,2]0,2,1,3}", 4) == [0, 2, 1, 3]
    assert tiles_of("{maximal device=0}", 4) is None
    assert tiles_of("{devices=[2,2]<=[4] last_tile_dims={manual}}", 4) is None
