"""A table that is stored cut by columns is looked up where it lies: same numbers, never whole."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspeed
from jaxspeed import ops
from jaxspeed.hlo import collectives
from jaxspeed.train import build_program
from tests.support.covering import covering

VOCAB, SAMPLES, SEQ = 512, 16, 4

READS = {
    "ops.embed": ops.embed,
    "jnp.take": lambda table, ids: jnp.take(table, ids, axis=0),
    "indexing": lambda table, ids: table[ids],
    "one id a sample": lambda table, ids: table[ids[:, 0]][:, None],
}


class Bag(nnx.Module):
    """A table that is looked up, and is the head as well."""

    def __init__(self, read: Any, width: int, names: bool, rngs: nnx.Rngs):
        init = jax.random.normal(rngs.params(), (VOCAB, width))
        metadata = {"out_sharding": ("vocab", "embed"), "eager_sharding": False} if names else {}
        self.table = nnx.Param(init, **metadata)
        self.read = read

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.tanh(self.read(self.table[...], ids)) @ self.table[...].T


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(model(batch["ids"]), axis=-1))


def program_of(read: str, width: int, mesh: dict[str, int], names: bool = True) -> Any:
    config = jaxspeed.Config.model_validate(
        {
            "train_batch_size": SAMPLES,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "mesh": mesh,
        }
    )
    return build_program(config, lambda rngs: Bag(READS[read], width, names, rngs), loss)


def batch() -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(0).integers(0, VOCAB, (SAMPLES, SEQ)).astype(np.int32)}


def compiled(program: Any) -> str:
    return program.step.lower(program.state, program.abstract_batch(batch())).compile().as_text()


def communicated(program: Any) -> Any:
    return collectives(compiled(program), program.mesh)


def gathers_of_the_table(program: Any, found: Any) -> int:
    """How many gathers there are as large as the table."""
    whole = VOCAB * program.table["table"].leaf.shape[1]
    return sum(c.runs for c in found if c.kind == "all-gather" and c.elements >= whole)


MESHES = ({"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "tensor": 2})


# Every way to read at both widths, every mesh at both widths.
@pytest.mark.default_cases("one id a sample-64-mesh18", "one id a sample-60-mesh22")
@pytest.mark.parametrize(
    ("read", "width", "mesh"),
    covering(
        itertools.product(READS, (64, 60), MESHES),
        [
            (read, width, MESHES[(i + j) % len(MESHES)])
            for i, read in enumerate(READS)
            for j, width in enumerate((64, 60))
        ],
    ),
)
def test_a_step_equals_plain_jax(read, width, mesh):
    program = program_of(read, width, mesh)
    before = np.asarray(program.init(0).params["table"])[:VOCAB, :width]
    state, metrics = program.step(program.init(0), batch())

    def plain(table):
        h = jnp.tanh(READS[read](table, batch()["ids"]))
        return jnp.mean(jax.nn.logsumexp(h @ table.T, axis=-1))

    value, gradient = jax.jit(jax.value_and_grad(plain))(before)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    after = np.asarray(state.params["table"])[:VOCAB, :width]
    np.testing.assert_allclose(after, before - gradient, rtol=0, atol=1e-6)


def test_an_id_outside_the_table_is_still_not_a_number():
    program = program_of("ops.embed", 64, {"data": 8})
    wrong = {"ids": np.full((SAMPLES, SEQ), VOCAB, np.int32)}
    assert np.isnan(program.evaluate(program.init(0), wrong)["loss"])


@pytest.mark.default_cases("ops.embed", "one id a sample")
@pytest.mark.parametrize("read", READS)
def test_only_the_head_gathers_the_table(read):
    """Once in each pass, for the product; the lookup moves what it looked up."""
    program = program_of(read, 64, {"data": 8})
    found = communicated(program)
    assert gathers_of_the_table(program, found) == 2
    moved = [c for c in found if c.kind == "all-to-all"]
    tokens = SAMPLES * (1 if read == "one id a sample" else SEQ)
    assert [c.elements for c in moved] == [tokens * 64 // 8] * 2, "there and back"


def test_a_row_sharded_table_is_gathered():
    """Without names the longest dim is cut, the vocabulary: an id may be on any device.

    Once for the lookup, and in each pass for the product.
    """
    program = program_of("ops.embed", 64, {"data": 8}, names=False)
    assert program.table["table"].source.spec[0] == "data"
    assert gathers_of_the_table(program, communicated(program)) == 3
