"""Steps on a GPU: equal to plain Optax with all that saves memory; what is in host memory.

JAX_PLATFORMS=cuda python -m pytest tests/gpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxspeed.models import gpt2

import jaxspeed

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
BATCH, STEPS, RATE = 4, 4, 1e-3
HOST = {"device": "cpu"}
SAVED = {
    "resident": {},
    "stage 3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "remat": {"parallel": {"remat": "full"}},
    "moments in host memory": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}},
    "parameters in host memory": {
        "parallel": {"remat": "full"},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": HOST,
            "offload_optimizer": HOST,
        },
    },
    "inputs in host memory": {
        "parallel": {"remat": "full"},
        "activation_checkpointing": {"cpu_checkpointing": True},
    },
    "micro-batches": {"gradient_accumulation_steps": 2},
}


def batches(seq):
    rng = np.random.default_rng(0)
    return [
        {"tokens": rng.integers(0, SIZES["vocab_size"], (BATCH, seq + 1)).astype(np.int32)}
        for _ in range(STEPS)
    ]


def engine_of(sections, **more):
    return jaxspeed.initialize(
        config={
            "train_batch_size": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
            "gradient_clipping": 1.0,
            "model": {"family": "gpt2", "config": SIZES},
            "run": {"seed": 0, "compilation_cache": False},
            **sections,
            **more,
        }
    )


def plain(seq):
    """(losses, parameters) of plain JAX and Optax, in one jitted step on the GPU."""
    graph, params, rest = nnx.split(gpt2.build(gpt2.Config(**SIZES), nnx.Rngs(0)), nnx.Param, ...)
    adamw = optax.adamw(RATE, b1=0.9, b2=0.999, weight_decay=0.1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state = tx.init(params)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            logits = nnx.merge(graph, params, rest)(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        update, state = tx.update(grads, state, params)
        return optax.apply_updates(params, update), state, value

    losses = []
    for batch in batches(seq):
        params, state, value = step(params, state, batch["tokens"])
        losses.append(float(value))
    flat = {"/".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(params)}
    return losses, {path.removesuffix("/value"): x for path, x in flat.items()}


@pytest.fixture(scope="module", autouse=True)
def without_tf32():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def expected():
    return plain(64)


@pytest.mark.parametrize("name", SAVED)
def test_a_step_equals_plain_optax(name, expected):
    engine = engine_of(SAVED[name])
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches(64)]
    found = {path: np.asarray(x) for path, x in engine.parameters.items()}
    wanted_losses, wanted = expected
    assert found.keys() == wanted.keys()
    worst = max(np.abs(found[p] - wanted[p]).max() for p in wanted)
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
    assert worst < 0.1 * RATE  # of updates of RATE each step; a leaf of tiny gradients is the worst


@pytest.mark.parametrize("name", SAVED)
def test_bf16_follows_fp32(name):
    engine = engine_of(SAVED[name], bf16={"enabled": True})
    losses = [float(engine.train_batch(batch)["loss"]) for batch in batches(256)]
    wanted, _ = plain(256)
    np.testing.assert_allclose(losses, wanted, rtol=2e-3)


@pytest.mark.parametrize(
    ("name", "bytes_each"),  # of a parameter: master and moments, then its bf16 copy too
    [("moments in host memory", 12), ("parameters in host memory", 14)],
)
def test_state_in_host_memory_is_there(name, bytes_each):
    engine = engine_of(SAVED[name], bf16={"enabled": True})
    batch = batches(256)[0]
    engine.train_batch(batch)
    report = engine.compiled(batch)
    size = sum(x.size for x in engine.parameters.values())
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(engine.state) if x.size > 10_000}
    assert "pinned_host" in kinds
    assert report.host_argument_bytes == bytes_each * size


def values(state):
    """Copies: a step cannot donate an array of host memory of which NumPy has a view."""
    on_device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), state)
    return jax.tree.map(np.asarray, jax.device_put(state, on_device))


def test_a_checkpoint_of_host_memory_restores_bitwise(tmp_path):
    sections = SAVED["parameters in host memory"]
    engine = engine_of(sections)
    first, *later = batches(64)
    engine.train_batch(first)
    engine.save_checkpoint(tmp_path, tag="one")
    engine.wait()
    saved = values(engine.state)
    other = engine_of(sections)
    other.load_checkpoint(tmp_path, tag="one")
    jax.tree.map(np.testing.assert_array_equal, values(other.state), saved)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(other.state) if x.size > 10_000}
    assert "pinned_host" in kinds
    # Later losses may differ by a rounding, also of two equal runs: atomics add up the gradients of
    # the embedding, unless XLA_FLAGS has --xla_gpu_deterministic_ops=true.
    found, wanted = (
        [float(each.train_batch(b)["loss"]) for b in later] for each in (other, engine)
    )
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_text_is_generated_as_without_a_cache():
    engine = engine_of({})
    prompt = batches(16)[0]["tokens"][:1, :8]
    (found,) = engine.generate(prompt.tolist(), 8, temperature=0.0)
    model = gpt2.build(gpt2.Config(**SIZES), nnx.Rngs(0))
    tokens = jnp.asarray(prompt)
    for _ in range(8):
        tokens = jnp.concatenate([tokens, jnp.argmax(model(tokens)[:, -1:], axis=-1)], axis=1)
    assert list(found.tokens) == tokens[0, -8:].tolist()
