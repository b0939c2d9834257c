"""A small model with stacked layers, and programs of it with state on a disk or in memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import jaxspeed
from jaxspeed.checkpoint.leaves import key_data
from jaxspeed.disk.disk_array import in_memory
from jaxspeed.disk.tier import DiskTier, StepSeconds
from jaxspeed.engine import Engine
from jaxspeed.train.build import build_program

LAYERS, INPUTS, WIDTH = 3, 29, 12
AXES = {
    "stack/w": ["layers", None, "mlp"],
    "stack/b": ["layers", None],
    "table": ["vocab", None],
}


def model(width=WIDTH):
    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "odd": jnp.linspace(0.5, 1.5, 7),
            "scale": jnp.ones((width,)),
            "stack": {
                "b": jnp.zeros((LAYERS, width)),
                "w": jax.random.normal(keys[0], (LAYERS, width, width)) / width**0.5,
            },
            "table": jax.random.normal(keys[1], (INPUTS, width)) / INPUTS**0.5,
        }

    def apply(params, x):
        h = x @ params["table"]
        for w, b in zip(params["stack"]["w"], params["stack"]["b"]):
            h = h + jnp.tanh(h @ w + b)
        return (h * params["scale"]).sum(-1) * params["odd"].mean()

    return init, apply


def loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def batch_of(samples, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, INPUTS)).astype(np.float32)
    return {"x": x, "y": x.sum(-1)}


def program(device, folder=None, *, mesh=None, stage=0, bucket=50, width=WIDTH, **sections):
    """A program with its state on this device of `offload_optimizer`."""
    mesh = mesh or {"data": 1}
    offload = {"device": device, **sections.pop("offload", {})}
    if device == "nvme":
        offload["nvme_path"] = str(folder)
    own = {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": offload,
            "sub_group_size": bucket,
            **sections.pop("zero", {}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "train_micro_batch_size_per_gpu": 2,
        "mesh": mesh,
        "parallel": {"logical_axes": AXES},
    }
    count = int(np.prod(list(mesh.values())))
    return build_program(
        jaxspeed.Config.load({**own, **sections}), model(width), loss, devices=jax.devices()[:count]
    )


def engine(made):
    return Engine(made, made.init(0))


class MemoryTier(DiskTier):
    """Buckets in memory, updated one after another: no file, no threads, no buffer used twice."""

    class _Regions:
        def __init__(self, nbytes):
            self.bytes = np.zeros(nbytes, np.uint8)

        def read(self, offset, buffer):
            buffer[:] = self.bytes[offset : offset + buffer.nbytes]
            return self

        def write(self, offset, buffer):
            self.bytes[offset : offset + buffer.nbytes] = buffer
            return self

        def wait(self):
            return 0.0, 0.0

        def seal(self):
            pass

        def refuse_changed(self):
            pass

    def __init__(self, buckets, options):
        super().__init__(buckets, options)
        self._file = self._Regions(self.nbytes)

    def update(self, step, compute):
        assert step == self.step
        self.step = step + 1
        for bucket in self.buckets:
            buffer = np.zeros(bucket.nbytes, np.uint8)
            self._file.read(bucket.offset, buffer)
            results = jax.block_until_ready(compute(bucket, bucket.arrays(buffer)))
            after = np.zeros(bucket.nbytes, np.uint8)
            bucket.store(results, after)
            self._file.write(bucket.offset, after)
        self.last = StepSeconds()


def with_buckets_in_memory(made):
    """The program with the same phases and buckets, and no disk."""
    tier = made.update.tier
    update = replace(made.update, tier=MemoryTier(tier.buckets, tier.options))
    return replace(made, update=update)


def assert_same_state(ours, theirs):
    """Bitwise, what is on a disk too."""
    for a, b in zip(values_of(ours), values_of(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def values_of(state):
    """All arrays of a state, with those on a disk."""
    return [np.array(key_data(x)) for x in jax.tree.leaves(in_memory(state))]
