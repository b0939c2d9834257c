"""Server and worker functions: combined they make the step of one controller."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspeed
from jaxspeed.config import load_config
from jaxspeed.errors import ConfigError
from jaxspeed.parameter_server.ray import server_state
from jaxspeed.parameter_server.ray.build import BuildArguments
from jaxspeed.parameter_server.ray.ray_engine import program_of
from jaxspeed.parameter_server.ray.server_state import ServerLayout
from jaxspeed.traced_loss.accumulate import Sums
from tests.parameter_server.ray.ray_parts import (
    DROPPING,
    LLAMA,
    Parts,
    batches,
    config,
    plain,
    small_language,
)


def reference(**changes):
    return jaxspeed.initialize(*small_language(), plain(**changes), devices=jax.devices()[:2])


def program_and_layout(**changes):
    model, loss = small_language()
    program, build = program_of(load_config(config(**changes)), BuildArguments(model, loss))
    return program, build.layout


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
        # test_on_ray.py has it for SGD, with the processes, and below are Adam and Lamb.
        pytest.param(
            {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, marks=pytest.mark.full
        ),
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
    program, layout = program_and_layout(optimizer={"type": "Muon", "params": {"lr": 0.01}})
    matrices = [row.path for row in program.table if "mlp/" in row.path]
    assert matrices and all(len(layout.splits[path].pieces) == 1 for path in matrices)


def test_servers_hold_equal_bytes():
    parts = Parts(config())
    held = [sum(x.nbytes for x in jax.tree.leaves(state)) for state in parts.states]
    assert max(held) < 1.1 * min(held)
    whole = sum(x.nbytes for x in jax.tree.leaves((parts.state().params, parts.state().opt)))
    assert sum(held) < 1.01 * whole


BF16 = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}, "ema_decay": 0.9},
}


@pytest.fixture(scope="module")
def in_bf16():
    return Parts(config(**BF16))


def test_mixed_precision_keeps_masters_on_servers_and_sends_16_bits(in_bf16):
    published = in_bf16.published[0]
    assert {x.dtype for x in published.params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all(x.dtype == jnp.float32 for x in in_bf16.states[0].master.values())
    assert_trains_as(reference(**BF16), in_bf16, batches(3), rtol=2e-2, atol=1e-3)


def test_a_non_finite_step_is_skipped_by_all_servers_or_by_none():
    parts = Parts(config(fp16={"enabled": True, "initial_scale_power": 8}))
    before = [server.get_state() for server in parts.servers]
    first, *others = parts.reduced(parts.pushed(batches(1)[0]))
    reduced = [first._replace(squares=first.squares * np.nan), *others]
    metrics = [server.apply(*reduced)[1] for server in parts.servers]
    assert all(bool(one["skipped"]) for one in metrics)
    after = [server.get_state() for server in parts.servers]
    for old, new in zip(before, after, strict=True):
        assert int(new["skipped"]) == 1
        for name in old:
            if name.startswith(("params/", "opt/")):
                np.testing.assert_array_equal(old[name], new[name], err_msg=name)


@pytest.mark.full  # as in test_asynchronous.py
def test_a_push_of_another_loss_scale_has_the_same_weight():
    parts = Parts(config(fp16={"enabled": True, "initial_scale_power": 8}, gradient_clipping=0.0))
    server = parts.servers[0]
    ones = {path: np.ones(x.shape, np.float32) for path, x in parts.published[0].params.items()}
    losses = Sums({}, np.float32(1), np.float32(1), {})
    server.reduce(1.0, np.float32(64), [losses], ones)  # pulled before the scale rose to 256
    assert all(float(x.reshape(-1)[0]) == 4.0 for x in server._sums.grads.values())


FREE = {"bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}


@pytest.mark.sampled
def test_an_update_in_buckets_equals_the_update_at_once(monkeypatch):
    sums = {"gradient_allreduce_op": "sum", "optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}
    sums["model"] = LLAMA
    ours = Parts(config(**FREE, **sums))
    assert len(ours.layout.buckets) >= 3
    monkeypatch.setattr(server_state, "bucket_paths", lambda program: ())
    theirs = Parts(config(**FREE, **sums))
    assert not theirs.layout.buckets
    for batch in batches(3):
        a, b = ours.step(batch), theirs.step(batch)
        assert a[0].keys() == b[0].keys()
        for one, other in zip(a, b, strict=True):
            for name in other:
                np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
    for x, y in zip(*(jax.tree.leaves(parts.state()) for parts in (ours, theirs)), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-5, atol=1e-6)


@pytest.mark.full  # test_worker_meshes.py has it for the same programs on local devices
def test_a_worker_of_several_devices_computes_as_one_device():
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    mesh = {"data": 2, "tensor": 2, "replica": 2}
    given = {"optimizer": sgd, "model": DROPPING, "train_batch_size": 8}
    ours = Parts(config(**given, mesh=mesh, gradient_accumulation_steps=1))
    theirs = Parts(config(**given, mesh={"data": 2}, gradient_accumulation_steps=1))
    assert ours.program.ranks == 4 and ours.worker._step.program.mesh.size == 4
    for batch in batches(3):
        a, b = (parts.step(batch)[0] for parts in (ours, theirs))
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
        np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)
    for path, value in theirs.state().params.items():
        np.testing.assert_allclose(ours.state().params[path], value, atol=1e-5, err_msg=path)


@pytest.mark.sampled
def test_random_numbers_are_those_of_the_parameter_server_of_one_controller():
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    given = config(model=DROPPING, optimizer=sgd)
    parts = Parts(given)
    engine = jaxspeed.initialize(config=given, devices=jax.devices()[:4])
    assert_trains_as(engine, parts, batches(3))


def test_split_state_and_join_state_round_trip_bitwise(in_bf16):
    parts = in_bf16
    parts.step(batches(1)[0])
    again, _ = parts.layout.split_state(parts.program, parts.state())
    for server, theirs in zip(parts.servers, again, strict=True):
        ours = server.get_state()
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].tobytes() == theirs[name].tobytes(), name
        server.set_state(theirs)
        taken = server.get_state()
        assert all(taken[name].tobytes() == ours[name].tobytes() for name in ours)


MIXING = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01))


@pytest.mark.sampled
def test_an_optimizer_that_mixes_parameters_trains_as_on_one_device():
    """Every server updates all of the state; each reduces and publishes its pieces."""
    given = {name: x for name, x in config().items() if name != "optimizer"}
    theirs = {name: x for name, x in plain().items() if name != "optimizer"}
    parts = Parts(given, optimizer=MIXING)
    assert parts.layout.mixed
    engine = jaxspeed.initialize(*small_language(), theirs, MIXING, devices=jax.devices()[:2])
    assert_trains_as(engine, parts, batches(5))
    first, second = (server.get_state() for server in parts.servers)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    half = [sum(x.nbytes for x in one.params.values()) for one in parts.published]
    assert max(half) < 1.2 * min(half)


def test_servers_without_parameters_are_refused():
    program, _ = program_and_layout()
    with pytest.raises(ConfigError, match="would own nothing"):
        ServerLayout.of(program, 100_000, synchronous=True)
