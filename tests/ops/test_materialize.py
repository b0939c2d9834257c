"""An array that is materialized is computed once in a program for CPUs, whoever reads it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed import models
from jaxspeed.ops.materialize import materialize
from tests.ops.meshes import simulated_mesh


def two_readers(once):
    def function(a, b):
        joined = once(jnp.concatenate([a, b]))
        return joined * 2, jnp.tanh(joined)

    return jax.jit(function)


def concatenations(function, *args):
    return len(re.findall(r" concatenate\(", function.lower(*args).compile().as_text()))


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
ARGS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)


def test_readers_share_what_is_materialized():
    assert concatenations(two_readers(lambda x: x), *ARGS) == 2  # else it has no use
    assert concatenations(two_readers(materialize), *ARGS) == 1


def test_nothing_is_copied_and_values_and_gradients_stay():
    found, wanted = two_readers(materialize), two_readers(lambda x: x)
    text = found.lower(*ARGS).compile().as_text()
    assert " copy(" not in text and len(re.findall(r" call\(", text)) == 1
    for f in (found, jax.vmap(found)):
        for x, y in zip(f(*ARGS), jax.vmap(wanted)(*ARGS) if f is not found else wanted(*ARGS)):
            np.testing.assert_array_equal(x, y)
    x, y = (jax.grad(lambda a, f=f: sum(map(jnp.sum, f(a, a))))(ARGS[0]) for f in (found, wanted))
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sharded_array_stays_sharded(axis):
    mesh = simulated_mesh(data=2)
    spec = jax.sharding.PartitionSpec(*[None] * axis, "data")
    at = jax.sharding.NamedSharding(mesh, spec)
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(4, 4), at)
    doubled = jax.jit(lambda x: materialize(x * 2) + 1)
    assert doubled(x).sharding.is_equivalent_to(at, 2)
    assert not re.search("all-(gather|to-all|reduce)", doubled.lower(x).compile().as_text())
    np.testing.assert_array_equal(doubled(x), np.asarray(x) * 2 + 1)


@pytest.mark.sampled
def test_a_stack_of_gradients_is_joined_once_for_the_norm_and_the_moments():
    """Two unrolled blocks: each of their gradients is a concatenation of two."""
    built = models.build("gpt2", None, {**SMALL, "unroll": True})
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,  # else the clipped gradient is what both moments read
        "optimizer": {"type": "AdamW"},
    }
    devices = jax.devices()[:1]
    program = jaxspeed.initialize(built.factory, built.loss, config, devices=devices).program
    batch = program.abstract_batch({"tokens": np.zeros((2, 17), np.int32)})
    text = program.step.lower(program.state, batch).compile().as_text()
    assert len(re.findall(r"= f32\[2,64,256\]\S* concatenate\(", text)) == 1
