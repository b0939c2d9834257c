"""Matrices are computed by owners: the same numbers, at most a device's share of the work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.config import load_config
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.train.build import build_program
from jaxspeed.train_state.state import native_tree
from jaxspeed.user_models.config_model import resolve_model
from tests.engine import tiny

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
LLAMA = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 20}
MIXTURE = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}
MOMENTUM, RATE = 0.95, 0.02


def program(family, stage, mesh, **sections):
    """The program of a small model with Muon, without arrays."""
    optimizer = {"type": "Muon", "params": {"lr": RATE, "ns_method": "standard"}}
    settings = {**tiny.config(stage), "optimizer": optimizer, "mesh": mesh, **sections}
    if family is tiny.Listed:
        return build_program(load_config(settings), tiny.Listed, tiny.squared_error)
    settings |= {"model": {"family": family, "config": MIXTURE if "mix" in family else LLAMA}}
    settings |= {"data": {"source": "synthetic", "seq_len": 8}}
    config = load_config(settings)
    return build_program(config, *resolve_model(config))


def orthogonal(matrix):
    """Five quintic Newton-Schulz iterations, in numpy."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def expected(row, gradients):
    """Muon's update of one leaf after these gradients, matrix by matrix."""
    inner = row.leaf.shape[row.leaf.matrix_stack :]
    inputs = np.prod(inner[: row.leaf.matrix_inputs or 1], dtype=int)
    average = nesterov = 0
    for gradient in gradients:
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        nesterov = MOMENTUM * average + (1 - MOMENTUM) * gradient
    matrices = nesterov.reshape(-1, inputs, np.prod(inner, dtype=int) // inputs)
    scale = max(1, matrices.shape[2] / inputs) ** 0.5
    return -RATE * scale * np.stack([orthogonal(x) for x in matrices]).reshape(row.leaf.shape)


CASES = [
    ("llama", 3, {"data": 8}),
    ("llama", 1, {"data": 4, "tensor": 2}),
    ("llama", 0, {"data": 2, "seq": 2, "tensor": 2}),
    ("llama", 2, {"pipe": 2, "data": 4}),
    ("llama", 1, {"pipe": 2, "data": 2, "tensor": 2}),
    ("llama", 3, {"replica": 2, "data": 4}),
    ("mixtral", 3, {"data": 4, "expert": 2}),
    ("mixtral", 1, {"data": 2, "expert": 2, "tensor": 2}),
    ("mixtral", 0, {"data": 8}),
    (tiny.Listed, 2, {"data": 8}),
    (tiny.Listed, 1, {"pipe": 3, "data": 2}),
]


@pytest.mark.default_cases("case0", "case4", "case7", "case9")
@pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])
def test_updates_equal_those_of_one_device(case):
    made = program(*case)
    table, rng = made.table, np.random.default_rng(0)
    rows = [row for row in table if row.leaf.trainable]
    gradients = [{row.path: rng.normal(size=row.leaf.shape) for row in rows} for _ in range(2)]
    transform = made.optimizer.transform
    with jax.enable_x64(True):
        params = native_tree(made.model, {row.path: jnp.zeros(row.leaf.shape) for row in rows})
        state, update = transform.init(params), jax.jit(transform.update)
        for flat in gradients:
            tree = native_tree(made.model, {path: jnp.asarray(x) for path, x in flat.items()})
            updates, state = jax.jit(lambda g, s, p: transform.update(g, s, p, placements=table))(
                tree, state, params
            )
        del update
    updates = flat_with_paths(updates)
    owned = {path for stack in table.owned for path in stack.paths}
    assert owned == {row.path for row in rows if "kernel" in row.path or "experts" in row.path} - {
        row.path for row in rows if "embed" in row.path or "head" in row.path or "gate" in row.path
    }
    for path in owned:
        want = expected(table[path], [flat[path] for flat in gradients])
        np.testing.assert_allclose(updates[path], want, atol=1e-9, err_msg=path)
