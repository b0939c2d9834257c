"""Workers with several devices each, and servers with their state in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxspeed
from tests.parameter_server import serving
from tests.parameter_server.serving import assert_bitwise_equal, losses, parameters

WORDS, WIDTH, HIDDEN = 63, 24, 32  # words are padded over tensor


def normal(*names):
    return nnx.with_partitioning(nnx.initializers.normal(0.2), names)


class Words(nnx.Module):
    """An embedding, which is the head too, and one layer."""

    rate = 0.1

    def __init__(self, rngs):
        table = normal("vocab", "embed")
        self.embed = nnx.Embed(WORDS, WIDTH, embedding_init=table, rngs=rngs)
        up, down = normal("embed", "mlp"), normal("mlp", "embed")
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)
        self.dropout = nnx.Dropout(self.rate, rngs=rngs)

    def __call__(self, ids):
        h = self.embed(ids)
        h = h + self.dropout(self.down(jnp.tanh(self.up(h))))
        return self.embed.attend(h)


class Still(Words):
    rate = 0.0


def cross_entropy(model, batch):
    ids = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:])
    return losses.sum(), jnp.float32(losses.size)


BATCH, ACCUMULATION = 8, 2


def engine(devices, mesh, servers=0, model=Words, **more):
    own = {"data_reduction": "parameter_server", "servers": servers} if servers else {}
    parallel = more.pop("parallel", {})
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "gradient_clipping": 0.5,
        "run": {"seed": 3},
        "mesh": mesh,
        "parallel": {**own, **parallel},
        **more,
    }
    made = jaxspeed.initialize(model, cross_entropy, config, devices=jax.devices()[:devices])
    if servers:
        beside_rule = {name: x for name, x in parallel.items() if name not in serving.RULE}
        serving.share_programs(made, (devices, mesh, servers, model, beside_rule, more))
    return made


def batch(seed):
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, WORDS, (BATCH, 17)).astype(np.int32)}


def train(made, steps, first=0):
    return [float(made.train_batch(batch(first + i))["loss"]) for i in range(steps)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mesh", "servers", "more"),
    [
        ({"tensor": 2}, 3, {}),
        pytest.param({"tensor": 2}, 2, {"bf16": {"enabled": True}}, marks=pytest.mark.full),
        pytest.param({"replica": 2}, 2, {"parallel": {"remat": "full"}}, marks=pytest.mark.full),
        pytest.param({"replica": 2, "tensor": 2}, 2, {}, marks=pytest.mark.full),
    ],
)
def test_a_worker_of_several_devices_computes_as_one_device(mesh, servers, more):
    """With random numbers, padding over `tensor`, and a pulled version after each step."""
    each = mesh.get("tensor", 1) * mesh.get("replica", 1)
    workers = 2 if each == 2 else 1
    made = engine(workers * each + servers, mesh, servers, **more)
    assert made.program.workers == workers and len(made.program.worker_meshes) == workers
    train(made, 2)
    before = parameters(made)
    report = made.check(batch(5))
    assert report.ok, report
    assert all((parameters(made)[path] == x).all() for path, x in before.items())


@pytest.mark.full
def test_tensor_parallel_workers_train_as_one_device_each():
    ours, theirs = engine(7, {"tensor": 2}, 3, model=Still), engine(2, {}, model=Still)
    np.testing.assert_allclose(train(ours, 6), train(theirs, 6), rtol=1e-5)
    wanted = parameters(theirs)
    for path, value in parameters(ours).items():
        np.testing.assert_allclose(value, wanted[path], atol=2e-5, err_msg=path)
    a, b = (one.eval_batch(batch(9)) for one in (ours, theirs))
    assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5)


def test_a_device_of_a_worker_only_has_its_shards():
    made = engine(7, {"tensor": 2}, 3)
    train(made, 1)
    workers = made._workers
    for worker, mesh in enumerate(made.program.worker_meshes):
        held = workers._pulled[worker]["up/kernel"]
        for device in mesh.devices.flat:
            here = [s.data.size for x in held for s in x.addressable_shards if s.device == device]
            assert sum(here) == made.parameters["up/kernel"].size // 2
    # Of each gradient, too, a device sends what it computed: in all, every gradient once.
    push = made.program.serving.push.bytes
    assert push <= made.traffic.up[0] < 1.01 * push


def test_replicas_of_a_worker_push_once():
    made = engine(6, {"replica": 2}, 2)
    train(made, 1)
    push, pull = (getattr(made.program.serving, way).bytes for way in ("push", "pull"))
    assert made.program.ranks == 4 and made.program.workers == 2
    assert push <= made.traffic.up[0] < 1.01 * push + 64
    assert pull <= made.traffic.down[0] < 2.02 * pull + 64  # before and after the step


def test_asynchronous_workers_of_several_devices_share_the_parts():
    made = engine(7, {"tensor": 2}, 3, parallel={"max_staleness": 2, "worker_pace": [1.0, 3.0]})
    told = train(made, 4)
    made.wait()
    assert int(made.state.step) == 8 == sum(made.staleness.values())
    assert np.isfinite(told).all() and max(made.staleness) <= 2


# -- host memory -----------------------------------------------------------------------------------


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "more",
    [
        {"bf16": {"enabled": True}},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"bf16": {"enabled": True, "check_grad_overflow": False}},
            marks=pytest.mark.full),
    ],
    ids=["bf16", "fp32", "no skips"],
)  # fmt: skip
def test_servers_with_their_state_in_host_memory_train_alike(more):
    ours, theirs = (serving.served(**more, **zero) for zero in (OFFLOAD, {}))
    a, b = (losses(serving.train(one, 6)) for one in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-3 if more else 1e-5)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(ours.state.opt) if x.ndim}
    assert kinds == {"pinned_host"}
    assert ours.check(serving.batch(9)).ok
    wanted = parameters(theirs)
    for path, value in parameters(ours).items():
        np.testing.assert_allclose(value, wanted[path], atol=2e-3 if more else 1e-5)


@pytest.mark.full
def test_offloaded_state_is_restored(tmp_path):
    first = serving.served(**OFFLOAD)
    serving.train(first, 2)
    first.save_checkpoint(tmp_path)
    first.wait()
    serving.train(first, 1, first=2)
    again = serving.served(**OFFLOAD)
    again.load_checkpoint(tmp_path)
    serving.train(again, 1, first=2)
    assert_bitwise_equal(again, first)
    assert jnp.isfinite(again.eval_batch(serving.batch(7))["loss"])
