"""Server and worker functions: combined they make the step of one controller."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspeed
from jaxspeed.errors import ConfigError
from jaxspeed.parameter_server.ray.server_functions import LossScalars, combine_scalars
from jaxspeed.parameter_server.ray.server_program import assign_to_servers
from jaxspeed.parameter_server.ray.state_transfer import split_state
from tests.parameter_server.ray.ray_parts import DROPPING, Parts, batches, config, plain


def reference(**changes):
    return jaxspeed.initialize(config=plain(**changes), devices=jax.devices()[:2])


def assert_trains_as(engine, parts, given_batches, rtol=1e-5, atol=1e-5):
    for batch in given_batches:
        ours, theirs = parts.step(batch), engine.train_batch(batch)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(ours[0][name], theirs[name], rtol=rtol)
    whole, theirs = parts.state(), engine.state
    for path, value in engine.parameters.items():
        stored = (whole.master or whole.params)[path]
        np.testing.assert_allclose(stored, value, atol=atol, err_msg=path)
    assert int(whole.step) == int(theirs.step)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        pytest.param({"type": "Lamb", "params": {"lr": 0.01}}, marks=pytest.mark.full),
        pytest.param({"type": "Muon", "params": {"lr": 0.01}}, marks=pytest.mark.full),
    ],
    ids=lambda x: x["type"],
)
def test_ten_steps_are_those_of_data_parallelism(optimizer):
    # Clipping is on: the global norm is over all servers.
    parts = Parts(config(optimizer=optimizer))
    assert_trains_as(reference(optimizer=optimizer), parts, batches(10))


def test_an_optimizer_that_reads_full_matrices_gets_them_unpartitioned():
    parts = Parts(config(optimizer={"type": "Muon", "params": {"lr": 0.01}}))
    pieces = {path: x for own in parts.shares for path, x in own.items()}
    matrices = [row.path for row in parts.program.table if "mlp/" in row.path]
    assert matrices and all(pieces[path].is_full for path in matrices)


def test_servers_hold_equal_bytes():
    parts = Parts(config())
    held = [sum(x.nbytes for x in jax.tree.leaves(state)) for state in parts.states]
    assert max(held) < 1.1 * min(held)
    whole = sum(x.nbytes for x in jax.tree.leaves((parts.state().params, parts.state().opt)))
    assert sum(held) < 1.01 * whole


def test_mixed_precision_keeps_masters_on_servers_and_sends_16_bits():
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    changes = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 1, "optimizer": sgd}
    parts = Parts(config(**changes))
    published = parts.servers[0].published(parts.states[0])
    assert {x.dtype for x in published.params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all(x.dtype == jnp.float32 for x in parts.states[0].master.values())
    assert_trains_as(reference(**changes), parts, batches(3), rtol=2e-2, atol=1e-3)


def test_a_non_finite_step_is_skipped_by_all_servers_or_by_none():
    parts = Parts(config(fp16={"enabled": True, "initial_scale_power": 8}))
    before = [server.saved(state) for server, state in zip(parts.servers, parts.states)]
    server = parts.servers[0]
    poisoned = []

    def reduce(*given):
        grads, squares = type(server).reduce.func(server)(*given)
        poisoned.append(True)
        return grads, squares * jnp.nan

    server.__dict__["reduce"] = reduce
    metrics = parts.step(batches(1)[0])
    assert poisoned and all(bool(one["skipped"]) for one in metrics)
    after = [server.saved(state) for server, state in zip(parts.servers, parts.states)]
    for old, new in zip(before, after, strict=True):
        assert int(new["skipped"]) == 1
        for name in old:
            if name.startswith(("params/", "opt/")):
                np.testing.assert_array_equal(old[name], new[name], err_msg=name)


@pytest.mark.full  # as in test_asynchronous.py
def test_a_push_of_another_loss_scale_has_the_same_weight():
    parts = Parts(config(fp16={"enabled": True, "initial_scale_power": 8}, gradient_clipping=0.0))
    server, state = parts.servers[0], parts.states[0]
    ones = {path: jnp.ones(x.shape) for path, x in server.published(state).params.items()}
    scalars = LossScalars(1.0, 1.0, {}, 64.0)  # pulled before the scale rose to 256
    _, shares = combine_scalars([scalars])
    grads, _ = server.reduce([ones], shares, state.loss_scale.scale)
    assert all(float(x.reshape(-1)[0]) == 4.0 for x in grads.values())


def test_random_numbers_are_those_of_the_parameter_server_of_one_controller():
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    given = config(model=DROPPING, optimizer=sgd)
    parts = Parts(given)
    engine = jaxspeed.initialize(config=given, devices=jax.devices()[:4])
    assert_trains_as(engine, parts, batches(3))


def test_split_state_and_join_state_round_trip_bitwise():
    changes = {"optimizer": {**config()["optimizer"], "ema_decay": 0.9}, "bf16": {"enabled": True}}
    parts = Parts(config(**changes))
    parts.step(batches(1)[0])
    again, _ = split_state(parts.program, parts.state(), parts.shares)
    for server, state, theirs in zip(parts.servers, parts.states, again, strict=True):
        ours = server.saved(state)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].tobytes() == theirs[name].tobytes(), name
        taken = server.saved(server.restored(theirs))
        assert all(taken[name].tobytes() == ours[name].tobytes() for name in ours)


def test_an_optimizer_that_mixes_parameters_is_refused():
    given = config()
    del given["optimizer"]
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ConfigError, match=r"reads other parameters .* gradient_clipping"):
        Parts(given, optimizer=mixing)


def test_servers_without_parameters_are_refused():
    parts = Parts(config())
    with pytest.raises(ConfigError, match="would own nothing"):
        assign_to_servers(parts.program, 100_000)
