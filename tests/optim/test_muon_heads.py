"""Muon on kernels with heads: [embed, heads, head_dim] is the matrix embed x (heads head_dim)."""

import jax
import numpy as np
import optax
import pytest

from jaxspeed.optim import build_optimizer, uses_muon
from jaxspeed.placement import Leaf

FOLDED = {
    "q/kernel": ((8, 2, 3), (8, 6), ("embed", "heads", "head_dim")),
    "o/kernel": ((2, 3, 8), (6, 8), ("heads", "head_dim", "embed")),
}


@pytest.mark.parametrize("path", FOLDED)
@pytest.mark.parametrize("layers", [(), (3,)])
def test_heads_are_folded_into_one_matrix(path: str, layers: tuple[int, ...]) -> None:
    shape, flat, names = FOLDED[path]
    leaf = Leaf(path, (*layers, *shape), "float32", ("layers",) * len(layers) + names)
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=(*layers, *shape)).astype(np.float32) for _ in range(3)]

    def run(shape: tuple[int, ...], **how) -> np.ndarray:
        tx = build_optimizer("Muon", {"lr": 0.1}, stacked=lambda _: leaf.stacked, **how)
        params = {path: np.ones(shape, np.float32)}
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update({path: grad.reshape(shape)}, state, params)
            params = jax.device_get(optax.apply_updates(params, updates))
        return params[path]

    ours = run(leaf.shape, inputs=lambda _: leaf.matrix_inputs)
    np.testing.assert_allclose(ours.reshape(*layers, *flat), run((*layers, *flat)), rtol=1e-5)


def test_what_has_three_dims_and_no_known_matrix_is_left_to_adam() -> None:
    assert not uses_muon("x/kernel", 3)
    assert uses_muon("x/kernel", 3, inputs=1)
    assert Leaf("x", (2, 3, 4), "float32", ("a", "b", "c")).matrix_inputs is None
    assert Leaf("b", (3, 2, 4), "float32", ("layers", "heads", "head_dim")).matrix_inputs is None
