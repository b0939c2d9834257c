"""Weights alone: a new optimizer, another head, other names; what was left out is listed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from jaxspeed.checkpoint import Checkpointer
from tests.checkpoint import states
from tests.engine import tiny


class Renamed(nnx.Module):
    """As states.Awkward under other names, with another head."""

    def __init__(self, rngs: nnx.Rngs, outputs: int = 2):
        self.body = nnx.Dict(
            first=nnx.Linear(tiny.FEATURES, 12, rngs=rngs), second=nnx.Linear(12, 7, rngs=rngs)
        )
        self.head = nnx.Linear(7, outputs, rngs=rngs)
        self.added = nnx.Linear(outputs, 1, rngs=rngs)

    def __call__(self, x):
        h = jnp.tanh(self.body["second"](jnp.tanh(self.body["first"](x))))
        return self.added(self.head(h))


RENAMES = {"wide": "body/first", "narrow": "body/second"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    engine = states.engine(stage=3)
    states.steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    engine.wait()
    return folder, engine


def test_a_new_optimizer_starts_from_the_restored_weights(trained, tmp_path):
    folder, old = trained
    new = states.engine(stage=1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    assert new.load_checkpoint(folder, weights_only=True)[0] == "step-00000003"
    assert int(new.state.step) == 0
    for path, value in old.parameters.items():
        np.testing.assert_array_equal(new.parameters[path], value)
    moments = [x for x in jax.tree.leaves(new.state.opt) if x.ndim]
    assert not any(np.asarray(x).any() for x in moments)


def test_an_optimizers_copies_of_parameters_are_the_restored_ones(trained):
    """Schedule-free and averaging transformations hold copies from their first step on."""
    folder, old = trained
    copying = optax.GradientTransformation(
        init=lambda params: params, update=lambda grads, state, params: (grads, state)
    )
    config = {"train_batch_size": 8, "bf16": {"enabled": True}}
    new = jaxspeed.initialize(states.Awkward, tiny.squared_error, config, optimizer=copying)
    new.load_checkpoint(folder, weights_only=True)
    copies = new.program.layout.logical(new.state.opt)
    for path, value in states.flat_with_paths(copies).items():
        np.testing.assert_array_equal(value, old.parameters[path])


def test_renames_apply_to_modules_and_the_rest_is_listed(trained):
    folder, old = trained
    new = states.engine(stage=3, model=Renamed)
    fresh = {path: np.asarray(value) for path, value in new.parameters.items()}
    restored = Checkpointer(folder).restore(new.program, weights_only=True, renames=RENAMES)
    new.state = restored.state
    for source, target in RENAMES.items():
        for leaf in ("kernel", "bias"):
            expected = old.parameters[f"{source}/{leaf}"]
            np.testing.assert_array_equal(new.parameters[f"{target}/{leaf}"], expected)
    for path in ("head/kernel", "head/bias", "added/kernel", "added/bias"):
        np.testing.assert_array_equal(new.parameters[path], fresh[path])
    assert sorted(restored.notes) == [
        "added/bias is reinitialized: not in the checkpoint",
        "added/kernel is reinitialized: not in the checkpoint",
        "head/bias is reinitialized: [1] in the checkpoint, [2] here",
        "head/kernel is reinitialized: [7, 1] in the checkpoint, [7, 2] here",
    ]


def test_what_the_model_has_no_place_for_is_listed(trained):
    folder, _ = trained
    new = states.engine(model=Renamed)
    renames = {"wide": "body/first"}
    restored = Checkpointer(folder).restore(new.program, weights_only=True, renames=renames)
    assert "narrow/kernel was not restored: not in the model" in restored.notes
    assert "narrow/bias was not restored: not in the model" in restored.notes


def test_statistics_come_along_and_random_streams_begin_anew(tmp_path):
    old = states.engine(model=states.Stateful)
    states.steps(old, 0, 3)
    old.save_checkpoint(tmp_path)
    old.wait()
    new = states.engine(model=states.Stateful, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    before = states.held(new)
    new.load_checkpoint(tmp_path, weights_only=True)
    after, source = states.held(new), states.held(old)
    floating = [n for n, x in source.items() if n.startswith("variable ") and x.dtype.kind == "f"]
    streams = [n for n, x in source.items() if n.startswith("variable ") and x.dtype.kind != "f"]
    assert floating and streams
    states.assert_same({n: after[n] for n in floating}, {n: source[n] for n in floating})
    states.assert_same({n: after[n] for n in streams}, {n: before[n] for n in streams})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"renames": {"wide": "x"}}, "renames need weights_only=True"),
        ({"renames": {"deep": "x"}, "weights_only": True}, "no parameter 'deep'; it has head/bias"),
    ],
)
def test_renames_that_would_do_nothing_are_refused(trained, more, says):
    folder, engine = trained
    with pytest.raises(jaxspeed.CheckpointError, match=says):
        engine.load_checkpoint(folder, **more)


def test_a_model_that_shares_nothing_is_refused(trained):
    other = tiny.engine(model=tiny.PAIR)
    with pytest.raises(jaxspeed.CheckpointError, match="no parameter matches this model's"):
        other.load_checkpoint(trained[0], weights_only=True)
