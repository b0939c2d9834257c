"""Variables that the loss changes after the last block, in a pipeline, by micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ModelError
from tests.train.flax_loop import SGD, WIDTH, Ended, Setting, assert_alike, batches, train_nnx

BINS, LAYERS = 4, 4


class State(nnx.Variable):
    pass


class Block(nnx.Module):
    """Passes on x, and counts of each sample in its row for this layer."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, counts, number):
        x = x + jnp.tanh(self.linear(x))
        chosen = jax.nn.one_hot(x[:, :BINS].argmax(-1), BINS, dtype=jnp.int32)
        return x, jax.lax.dynamic_update_slice_in_dim(counts, chosen[:, None], number, axis=1)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.counts = State(jnp.zeros((LAYERS, BINS), jnp.int32))
        self.average = State(jnp.zeros(WIDTH))  # its value depends on the micro-batches' order
        self.steps = State(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        counts = jnp.zeros((len(x), LAYERS, BINS), jnp.int32)
        for number, block in enumerate(self.blocks):
            x, counts = block(x, counts, number)
        self.counts[...] += counts.sum(0)
        self.average[...] = 0.5 * self.average[...] + 0.5 * x.mean(0)
        return self.head(x)[:, 0] + 0.1 * self.average[...].sum()

    def after_step(self):
        self.steps[...] += 1


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def trained(model, stage=0, **parallel):
    setting = Setting(stage, 4, 2)
    config = setting.config(64, mesh={"data": 4, "pipe": 2}, parallel=parallel)
    engine = jaxspeed.initialize(model, loss, config, SGD, example_batch=batches()[0])
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches()]
    state = {p: np.array(x) for p, x in engine.state.variables.items() if p != "(seed)"}
    values = {path: np.array(x) for path, x in engine.parameters.items()}
    return engine, Ended(losses, values | state)


@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (2, {}),
        pytest.param(
            3, {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}, marks=pytest.mark.full
        ),
        pytest.param(0, {"pipeline_schedule": "gpipe"}, marks=pytest.mark.full),
        pytest.param(1, {"pipeline_recompute": "save"}, marks=pytest.mark.full),
    ],
)
def test_they_are_those_of_a_loop_over_micro_batches(stage, parallel):
    engine, ours = trained(Net, stage, **parallel)
    plain = train_nnx(Net, loss, batches(), SGD, Setting(stage, 4, 2))
    assert_alike(ours, plain)
    np.testing.assert_array_equal(ours.values["counts"], plain.values["counts"])
    assert ours.values["counts"].sum() == 4 * 64 * LAYERS and ours.values["steps"] == 4
    # Evaluation changes nothing.
    before = np.array(engine.state.variables["average"])
    engine.eval_batch(batches()[0])
    np.testing.assert_array_equal(np.array(engine.state.variables["average"]), before)


@pytest.mark.sampled
def test_check_agrees_with_a_pipeline():
    setting = Setting(0, 4, 2)
    config = setting.config(64, mesh={"data": 4, "pipe": 2})
    engine = jaxspeed.initialize(Net, loss, config, SGD, example_batch=batches()[0])
    report = engine.check(batches()[0])
    assert report.ok, str(report)


class CountsInBlocks(Net):
    """Each block changes a variable of its own."""

    def __init__(self, rngs):
        super().__init__(rngs)
        for block in self.blocks:
            block.calls = State(jnp.zeros(()))

    def __call__(self, x):
        counts = jnp.zeros((len(x), LAYERS, BINS), jnp.int32)
        for number, block in enumerate(self.blocks):
            x, counts = block(x, counts, number)
            block.calls[...] += x.sum()
        return self.head(x)[:, 0]


class ReadsBefore(Net):
    """What it changes after the blocks is read before them."""

    def __call__(self, x):
        return super().__call__(x + self.average[...])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CountsInBlocks, "an output of block 0 is read outside of the next block"),
        (ReadsBefore, "in the blocks, or before them: average"),
    ],
)
def test_changes_in_or_before_the_blocks_are_refused(model, message):
    with pytest.raises(ModelError, match=message):
        trained(model, stage=2)
