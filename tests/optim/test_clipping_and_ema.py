"""The global norm, clipping by it, and the moving average of the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.optim import clip_by_norm, ema, global_norm

TREE = {"a": jnp.asarray([3.0, 0.0]), "b": [jnp.asarray([[4.0]]), optax.MaskedNode()]}


def test_the_norm_is_that_of_all_leaves_as_one_vector():
    assert float(global_norm(TREE)) == 5.0
    assert float(global_norm({})) == 0.0


def test_the_norm_of_half_precision_leaves_is_summed_in_float32():
    # 300^2 is beyond float16, and in bfloat16 a sum of ones stops at 256.
    assert float(global_norm([jnp.full(4, 300, jnp.float16)])) == 600.0
    assert float(global_norm([jnp.ones(1 << 16, jnp.bfloat16)])) == 256.0
    assert global_norm([jnp.ones(2, jnp.bfloat16)]).dtype == jnp.float32


def test_the_norm_of_sharded_leaves_is_that_of_all():
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "pipe"), axis_types=(AxisType.Auto,) * 3)
    specs = [P(), P(None, None), P("data"), P(None, "data"), P("tensor", "data"), P("tensor")]
    specs += [P(("data", "tensor")), P("pipe", None)]
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(8, 4)).astype(np.float32) for _ in specs]
    at = [NamedSharding(mesh, spec) for spec in specs]
    norm = jax.jit(lambda tree: global_norm(tree, at), in_shardings=(at,))(values)
    expected = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in values))
    np.testing.assert_allclose(norm, expected, rtol=1e-6)


def test_gradients_are_all_reduced_together_and_their_norm_once():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, at = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    matrices = [jnp.eye(16)] * 12

    def loss(matrices, x):
        for matrix in matrices:
            x = jnp.tanh(x @ matrix)
        return jnp.sum(x)

    @functools.partial(jax.jit, in_shardings=(everywhere, at))
    def update(matrices, x):
        found = jax.grad(loss)(matrices, x)
        found = [jax.lax.with_sharding_constraint(each, at) for each in found]
        norm = global_norm(found, [at] * len(found))
        return [m - g / norm for m, g in zip(matrices, found, strict=True)]

    program = update.lower(matrices, jnp.ones((32, 16))).compile().as_text()
    assert program.count(" all-reduce(") == 2


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_element_that_is_not_finite_shows_in_the_norm(bad):
    assert not np.isfinite(global_norm([jnp.ones(3), jnp.asarray([1.0, bad])]))


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 4.999])
def test_larger_norms_are_clipped_as_deepspeed_does(max_norm):
    clipped, factor = clip_by_norm(TREE, global_norm(TREE), max_norm)
    expected = 1 / max(1.0, (5.0 + 1e-6) / max_norm)
    assert float(factor) == pytest.approx(expected, rel=1e-7)
    np.testing.assert_allclose(clipped["a"], [3 * expected, 0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"][0], [[4 * expected]], rtol=1e-6)


def test_the_epsilon_is_part_of_the_formula():
    tiny = [jnp.asarray([1e-6])]
    _, factor = clip_by_norm(tiny, global_norm(tiny), 1e-6)
    assert float(factor) == pytest.approx(0.5)


@pytest.mark.parametrize("max_norm", [5.1, 100.0, 0.0])
def test_smaller_norms_and_a_limit_of_zero_change_nothing(max_norm):
    clipped, factor = clip_by_norm(TREE, global_norm(TREE), max_norm)
    assert float(factor) == 1.0
    jax.tree.map(np.testing.assert_array_equal, clipped, TREE)


def test_clipping_keeps_each_leafs_dtype():
    tree = [jnp.full(4, 8, jnp.bfloat16)]
    assert clip_by_norm(tree, global_norm(tree), 1.0)[0][0].dtype == jnp.bfloat16


def test_the_average_is_the_sum_of_all_past_weights():
    decay, weights = 0.9, [1.0, 5.0, -2.0, 3.0]
    average = ema.init({"w": jnp.asarray([weights[0]]), "masked": optax.MaskedNode()})
    for value in weights[1:]:
        average = ema.update(
            average, {"w": jnp.asarray([value]), "masked": optax.MaskedNode()}, decay
        )
    powers = [decay**3, *((1 - decay) * decay**i for i in (2, 1, 0))]
    np.testing.assert_allclose(average["w"], [np.dot(powers, weights)], rtol=1e-6)


def test_a_float32_average_of_bfloat16_weights_stays_float32():
    average = ema.update({"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}, 0.999)
    assert average["w"].dtype == jnp.float32
    np.testing.assert_allclose(average["w"], 0.001, rtol=1e-4)


def test_the_first_average_shares_no_memory_with_the_weights():
    params = {"w": jnp.ones(4)}
    average = ema.init(params)
    params["w"].delete()
    np.testing.assert_array_equal(average["w"], 1)
