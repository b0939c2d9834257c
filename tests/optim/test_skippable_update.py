"""A skipped update changes nothing, and one that is not skipped is the optimizer's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.optim.skippable_update import guarded_update

OPTIMIZERS = {
    "adam": optax.adamw(1e-2, weight_decay=0.1),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "trace twice": optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-1e-2)),
    "stateless": optax.sgd(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "in a cond": optax.MultiSteps(optax.adam(1e-2), 2),
    "lamb": optax.lamb(1e-2),
}


def trees() -> tuple[dict, dict]:
    rng = np.random.default_rng(0)

    def tree() -> dict:
        return {"w": jnp.asarray(rng.normal(size=(4, 6))), "b": jnp.asarray(rng.normal(size=6))}

    return tree(), tree()


def assert_equal(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.default_cases("adam", "momentum", "trace twice", "stateless", "factored", "lamb")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_not_skipped_is_the_optimizers(name: str) -> None:
    tx = OPTIMIZERS[name]
    params, grads = trees()
    ours = theirs = (params, tx.init(params))
    for _ in range(3):
        run = jax.jit(lambda g, p, s: guarded_update(tx, g, s, p, jnp.asarray(True)))
        ours = run(grads, *ours)
        updates, state = jax.jit(tx.update)(grads, theirs[1], theirs[0])
        theirs = (optax.apply_updates(theirs[0], updates), state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), ours, theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_update_changes_nothing(name: str, bad: float) -> None:
    tx = OPTIMIZERS[name]
    params, grads = trees()
    before = (params, tx.init(params))
    grads["w"] = grads["w"].at[0, 0].set(bad)
    after = jax.jit(lambda g, p, s: guarded_update(tx, g, s, p, jnp.asarray(False)))(grads, *before)
    assert_equal(after, before)


def test_the_update_stays_in_place() -> None:
    """The select adds no pass over the state: bytes are those of the plain update."""
    tx = optax.adam(1e-3)
    params = {"w": jnp.zeros((512, 512))}
    state = tx.init(params)

    def plain(p, s, g, keep):
        updates, s = tx.update(g, s, p)
        return optax.apply_updates(p, updates), s

    def guarded(p, s, g, keep):
        return guarded_update(tx, g, s, p, keep)

    cost = {
        f.__name__: jax.jit(f, donate_argnums=(0, 1))
        .lower(params, state, params, jnp.asarray(True))
        .compile()
        .cost_analysis()["bytes accessed"]
        for f in (plain, guarded)
    }
    assert cost["guarded"] <= 1.02 * cost["plain"]
