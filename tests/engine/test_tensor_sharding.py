"""A user's model on a tensor axis: inferred, sharded by layer specs, or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.errors import ConfigError, PlacementError
from jaxspeed.tensor_parallel.insert_constraints import warn_no_sequence_dim
from tests.support import foreign_models

RATE, STEPS, SEED = 0.1, 10, 3
MODELS = {
    "encoder and decoder": lambda: foreign_models.encoder_decoder(shared=True),
    "convolutions and attention": foreign_models.conv_attention,
    "plain stack": lambda: foreign_models.tower(24, 32, 16, 40, 8),
}
BETWEEN: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"sequence_parallel_activations": True, "tensor_overlap": "none"},
    "ring": {"sequence_parallel_activations": True, "tensor_overlap": "ring"},
}


def config(batch: Any, tensor: int, stage: int = 0, **sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": len(next(iter(batch.values()))),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "mesh": {"tensor": tensor, "data": 8 // tensor},
        "run": {"seed": SEED, "compilation_cache": False},
        **sections,
    }


def by_hand(model: foreign_models.Foreign) -> tuple[list[float], dict[str, Any]]:
    """Plain SGD on one device, without jaxspeed: (losses, parameters)."""
    graph, params, rest = nnx.split(model.model(nnx.Rngs(SEED)), nnx.Param, ...)
    tx = optax.sgd(RATE)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            found = model.loss(nnx.merge(graph, params, rest), model.batch)
            return found[0] / found[1] if isinstance(found, tuple) else found

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    flat = nnx.to_flat_state(params)
    return losses, {"/".join(map(str, path)): v.get_value() for path, v in flat}


@pytest.mark.parametrize(
    ("name", "tensor", "stage", "between"),
    [
        pytest.param("encoder and decoder", 4, 3, "sharded", marks=pytest.mark.full),
        pytest.param("encoder and decoder", 2, 1, "ring", marks=pytest.mark.full),
        pytest.param("convolutions and attention", 2, 2, "replicated", marks=pytest.mark.full),
        pytest.param("convolutions and attention", 4, 0, "sharded", marks=pytest.mark.full),
        pytest.param("plain stack", 4, 3, "replicated", marks=pytest.mark.full),
        ("plain stack", 8, 0, "sharded"),
    ],
)
def test_a_model_without_names_trains_as_on_one_device(name, tensor, stage, between):
    model = MODELS[name]()
    engine = jaxspeed.initialize(
        model.model,
        model.loss,
        config(model.batch, tensor, stage, parallel=BETWEEN[between]),
        example_batch=model.batch,
    )
    assert engine.program.proposal is not None and engine.program.proposal.sharded
    losses = [float(engine.train_batch(model.batch)["loss"]) for _ in range(STEPS)]
    expected, params = by_hand(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, value in engine.parameters.items():
        np.testing.assert_allclose(value, params[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_the_logged_proposal_as_layer_specs_shards_the_same(caplog):
    model = foreign_models.tower(24, 32, 16, 40, 8)
    sections = config(model.batch, 4)
    with caplog.at_level("INFO", "jaxspeed"):
        inferred = jaxspeed.initialize(model.model, model.loss, sections, example_batch=model.batch)
    assert "the sharding was inferred" in caplog.text and '"layer_specs"' in caplog.text
    proposal = jaxspeed.propose_tensor_sharding(model.model, model.loss, model.batch, tensor=4)
    assert str(proposal) in caplog.text
    said = jaxspeed.initialize(
        model.model, model.loss, {**sections, **proposal.config}, example_batch=model.batch
    )
    assert said.program.proposal is None
    specs = [{row.path: row.read.spec for row in e.placements} for e in (inferred, said)]
    assert specs[0] == specs[1]


def test_shapes_are_example_enough():
    model = foreign_models.tower(24, 32, 16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.batch)
    proposal = jaxspeed.propose_tensor_sharding(model.model, model.loss, shapes, tensor=2)
    assert proposal.sharded


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 12, rngs=rngs)
        self.down = nnx.Linear(12, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


PAIR = foreign_models.Foreign(
    Pair,
    {"x": np.ones((8, 16), np.float32), "y": np.zeros((8, 16), np.float32)},
    foreign_models.squared,
)


def specs(**words: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"partition_config": {"layer_specs": words}}}


def test_layer_specs_need_no_example():
    engine = jaxspeed.initialize(
        Pair, PAIR.loss, config(PAIR.batch, 4, **specs(up="column", down="row"))
    )
    sharded = {row.path: tuple(row.read.spec) for row in engine.placements}
    assert sharded == {
        "up/kernel": (None, "tensor"),
        "up/bias": ("tensor",),
        "down/kernel": ("tensor", None),
        "down/bias": (None,),
    }
    assert engine.check(PAIR.batch).ok


def test_without_names_specs_or_an_example_the_error_names_the_alternatives():
    with pytest.raises(ConfigError, match=r"mesh.tensor is 4.*example_batch.*layer_specs"):
        jaxspeed.initialize(Pair, PAIR.loss, config(PAIR.batch, 4))


def test_inference_can_be_left_out(caplog):
    sections = config(PAIR.batch, 4, parallel={"infer_tensor_cuts": "never"})
    engine = jaxspeed.initialize(Pair, PAIR.loss, sections)
    assert not any("tensor" in str(row.read.spec) for row in engine.placements)
    assert "no parameter is sharded over it" in caplog.text


def test_what_does_not_divide_is_refused_with_the_degrees_that_work():
    with pytest.raises(
        PlacementError, match=r"(?s)a dim of 12 .*tensor=8: down.*1, 2, 3, 4, 6, 12"
    ):
        jaxspeed.initialize(
            Pair, PAIR.loss, config(PAIR.batch, 8, **specs(up="column", down="row"))
        )


def test_a_proposal_leaves_indivisible_dims_replicated_and_says_so():
    proposal = jaxspeed.propose_tensor_sharding(Pair, PAIR.loss, PAIR.batch, tensor=5)
    assert not proposal.sharded
    assert "replicated:" in str(proposal) and "degrees that work" in str(proposal)


# -- what a compiler, or we, could get wrong ------------------------------------------------------


class Depthwise(nnx.Module):
    """A depthwise kernel, replicated, and a pair of matmuls."""

    def __init__(self, rngs: nnx.Rngs):
        self.dw = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(self.dw(x))))


@pytest.mark.default_cases("words1-4-0-2")
@pytest.mark.parametrize(
    ("tensor", "stage", "accumulation"),
    [
        (4, 0, 2),
        pytest.param(4, 3, 1, marks=pytest.mark.full),
        pytest.param(2, 0, 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("words", [{"up": "column", "down": "row"}, {"dw": "replicated"}])
def test_the_gradient_of_a_replicated_depthwise_kernel_is_right(tensor, stage, accumulation, words):
    """XLA alone makes it as many times too large as the tensor axis has devices."""
    batch = {"x": foreign_models.numbers(4, 4, 16), "y": foreign_models.numbers(4, 4, 16)}
    engine = jaxspeed.initialize(
        Depthwise,
        foreign_models.squared,
        config(batch, tensor, stage, gradient_accumulation_steps=accumulation, **specs(**words)),
    )
    report = engine.check(batch)
    assert report.ok, str(report)


class OddHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(65, 16, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.head = nnx.Linear(16, 65, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        return self.head(x + self.down(jnp.tanh(self.up(x))))


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.full), "ring"])
def test_a_head_whose_vocabulary_does_not_divide_is_no_part_of_a_ring(overlap):
    batch = {"tokens": foreign_models.tokens(9)}
    between = {"sequence_parallel_activations": True, "tensor_overlap": overlap}
    engine = jaxspeed.initialize(
        OddHead,
        foreign_models.next_token,
        config(batch, 4, 2, parallel=between),
        example_batch=batch,
    )
    assert "head/kernel" in engine.program.proposal.sharded
    assert engine.check(batch).ok


class Joined(nnx.Module):
    """Two views of each sample, one after the other."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, views: jax.Array) -> jax.Array:
        x = jnp.concatenate([views[:, 0], views[:, 1]])
        return self.down(jnp.tanh(self.up(x)))


@pytest.mark.sampled
def test_concatenated_samples_stay_sharded_over_the_data_axes():
    batch = {"x": foreign_models.numbers(2, 16)}
    flops = {}
    for tensor in (1, 4):
        engine = jaxspeed.initialize(
            Joined,
            lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
            config(batch, tensor),
            example_batch=batch,
        )
        flops[tensor] = engine.compiled(batch).flops
        assert engine.check(batch).ok
    assert flops[4] <= 1.05 * flops[1]


def test_activations_without_a_sequence_are_logged():
    warn_no_sequence_dim.cache_clear()
    parallel = {"sequence_parallel_activations": True}
    engine = jaxspeed.initialize(
        Pair, PAIR.loss, config(PAIR.batch, 4, parallel=parallel), example_batch=PAIR.batch
    )
    with pytest.MonkeyPatch.context() as patch:
        logged: list[str] = []
        patch.setattr("jaxspeed.tensor_parallel.insert_constraints.log.warning", logged.append)
        engine.eval_batch(PAIR.batch)
    assert len(logged) == 1 and "sequence_parallel_activations has no effect" in logged[0]
