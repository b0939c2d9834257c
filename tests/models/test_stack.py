"""Stacked layers: one scan, the same numbers unrolled, randomness of each layer's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxspeed import models
from tests.support.covering import covering

BATCHES = {
    "gpt2": {"tokens": np.random.default_rng(0).integers(0, 256, (2, 17))},
    "llama": {"tokens": np.random.default_rng(0).integers(0, 256, (2, 17))},
    "gemma": {"tokens": np.random.default_rng(0).integers(0, 256, (2, 33))},
    "smollm3": {"tokens": np.random.default_rng(0).integers(0, 256, (2, 17))},
    "ministral": {"tokens": np.random.default_rng(0).integers(0, 256, (2, 33))},
    "vit": {"images": np.ones((2, 32, 32, 3), np.float32), "labels": np.array([1, 2])},
    "mlp": {"x": np.ones((2, 16), np.float32), "y": np.array([1, 2])},
}


def value_and_grad(family, **overrides):
    built = models.build(family, "tiny", overrides)
    graphdef, params, rest = nnx.split(built.factory(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        total, weight = built.loss(nnx.merge(graphdef, params, rest), BATCHES[family])
        return total / weight

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "llama" else pytest.mark.full) for f in BATCHES]
)
def test_an_unrolled_stack_equals_a_scanned_one(family):
    value, gradient = value_and_grad(family)
    same, same_gradient = value_and_grad(family, unroll=True)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    for (path, x), (_, y) in zip(
        nnx.to_flat_state(gradient), nnx.to_flat_state(same_gradient), strict=True
    ):
        x, y = np.asarray(x.get_value()), np.asarray(y.get_value())
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-9, path
        assert np.any(y), f"{path} has no gradient"


@pytest.mark.default_cases("llama", "gemma", "smollm3", "ministral", "mlp")
@pytest.mark.parametrize("family", BATCHES)
def test_a_stack_calls_its_block_once_inside_one_scan(family):
    built = models.build(family, "tiny", {"num_hidden_layers": 5})
    model = built.factory(nnx.Rngs(0))
    block, calls = type(model.blocks), []
    original = block.__call__

    def counted(self, *args):
        calls.append(self)
        return original(self, *args)

    block.__call__ = counted
    try:
        program = jax.make_jaxpr(lambda: built.loss(model, BATCHES[family])[0])()
    finally:
        block.__call__ = original
    assert len(calls) == 1
    assert isinstance(calls[0], nnx.Module)
    lengths = [e.params["length"] for e in program.eqns if e.primitive.name == "scan"]
    assert lengths.count(5) == 1


def losses(built, model, times=1):
    return [float(built.loss(model, BATCHES["gpt2"])[0]) for _ in range(times)]


@pytest.mark.default_cases("llama")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_draws_anew_in_training_and_is_off_in_evaluation(family):
    built = models.build(family, "tiny", {"dropout": 0.3})
    model = built.factory(nnx.Rngs(0))
    model.train()
    one, other = losses(built, model, 2)
    assert one != other
    model.eval()
    one, other = losses(built, model, 2)
    without = models.build(family, "tiny")
    plain = without.factory(nnx.Rngs(0))
    nnx.update(plain, nnx.state(model, nnx.Param))
    assert one == other == losses(without, plain)[0]


def test_a_model_without_dropout_has_no_random_state():
    for family in BATCHES:
        model = nnx.eval_shape(lambda f=family: models.build(f, "tiny").factory(nnx.Rngs(0)))
        assert not jax.tree.leaves(nnx.state(model, nnx.RngState))


def test_each_layer_drops_by_a_key_of_its_own():
    model = models.build("gpt2", "tiny", {"dropout": 0.5}).factory(nnx.Rngs(0))
    keys = model.blocks.dropout.rngs.key
    assert keys.shape == (2,)
    data = jax.random.key_data(keys.get_value())
    assert np.any(data[0] != data[1])


def test_reseeding_the_stacked_keys_reseeds_every_layer():
    """Only the blocks' keys change, and put back they give the same loss again."""
    built = models.build("gpt2", "tiny", {"dropout": 0.5})
    model = built.factory(nnx.Rngs(0))
    start = jax.tree.map(lambda x: x, nnx.state(model, nnx.RngState))  # the counters before a call

    def loss_with(keys):
        nnx.update(model, start)
        model.blocks.dropout.rngs.key.set_value(keys)
        return losses(built, model)[0]

    old = model.blocks.dropout.rngs.key.get_value()
    fresh = jax.vmap(jax.random.fold_in, (0, None))(old, 7)
    assert loss_with(old) == loss_with(old)
    for layer in range(2):
        assert loss_with(old.at[layer].set(fresh[layer])) != loss_with(old)


def test_dropout_under_jit_returns_its_counters():
    built = models.build("gpt2", "tiny", {"dropout": 0.3})
    model = built.factory(nnx.Rngs(0))
    step = nnx.jit(lambda m: built.loss(m, BATCHES["gpt2"])[0])
    assert float(step(model)) != float(step(model))


@pytest.mark.parametrize("family", covering(BATCHES, ["gpt2", "mlp"]))
def test_a_mesh_in_the_context_changes_neither_weights_nor_metadata(family):
    """Logical names are not mesh axes: Flax must not try to place by them."""
    built = models.build(family, "tiny", {"dropout": 0.1})
    mesh = jax.make_mesh(
        (1,) * 6,
        ("pipe", "replica", "data", "seq", "expert", "tensor"),
        axis_types=(AxisType.Auto,) * 6,
    )

    def init():
        return jax.jit(lambda: nnx.split(built.factory(nnx.Rngs(0)))[1])()

    alone = init()
    with jax.set_mesh(mesh):
        meshed = init()
        nnx.eval_shape(lambda: built.factory(nnx.Rngs(0)))
    for (path, x), (_, y) in zip(nnx.to_flat_state(alone), nnx.to_flat_state(meshed)):
        assert x.get_metadata() == y.get_metadata(), path
        x, y = x.get_value(), y.get_value()
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def test_initial_weights_follow_gpt_2s_recipe():
    model = nnx.jit(models.build("gpt2", "tiny", {"hidden_size": 256}).factory)(nnx.Rngs(0))
    spread = [
        (model.embed.table, 0.02),
        (model.blocks.attn.q_proj.kernel, 0.02),
        (model.blocks.mlp.up.kernel, 0.02),
        (model.blocks.attn.o_proj.kernel, 0.02 / 2),  # 1 / sqrt(2 * 2 layers)
        (model.blocks.mlp.down.kernel, 0.02 / 2),
    ]
    for variable, wanted in spread:
        assert float(jnp.std(variable.get_value())) == pytest.approx(wanted, rel=0.02)
    layers = model.blocks.mlp.up.kernel.get_value()
    assert not np.array_equal(layers[0], layers[1])
