"""A transformation of one's own reads where its leaves are stored: Optax's extra `placements`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspeed.optim import ByMatrix, by_owners, matrices_of
from tests.engine import tiny
from tests.support.covering import covering

RATE = 0.05


def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def by_shards():
    """Divide each update by the number of shards in which its leaf's moments are stored."""

    def update(updates, state, params=None, *, placements, **extra):
        def scaled(keys, u):
            row = placements[path_of(keys)]
            assert u.shape == row.leaf.shape
            sharding = placements.sharding(row.opt)
            shard = sharding.shard_shape(row.shape(row.opt))
            return u * np.prod(shard) / np.prod(row.shape(row.opt))

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def of_matrices():
    """As `by_shards` in a chain, of the leaves of two dims; SGD of the others."""
    return optax.partition(
        {"matrix": optax.chain(by_shards(), optax.sgd(RATE)), "other": optax.sgd(RATE)},
        lambda params: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params),
    )


POINTS = [
    (stage, more)
    for stage in range(4)
    for more in (
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": {"enabled": True}},
        {"parallel": {"data_reduction": "ring"}},
    )
]
OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "stage": 1}


@pytest.mark.parametrize(
    ("stage", "more"), covering([*POINTS, (1, {"zero_optimization": OFFLOADED})], [(1, {})])
)
def test_an_optimizer_reads_the_placement_of_its_leaves(stage, more):
    sections = {"optimizer": None, **more}
    engine = tiny.engine(tiny.Listed, stage=stage, optimizer_=of_matrices(), **sections)
    before = {path: np.asarray(x, np.float64) for path, x in engine.parameters.items()}
    plain = tiny.engine(tiny.Listed, stage=0, optimizer_=optax.sgd(RATE), **sections)
    batch = tiny.batch(8 * more.get("gradient_accumulation_steps", 1))
    engine.train_batch(batch), plain.train_batch(batch)
    for path, start in before.items():
        row = engine.placements[path]
        shards = 8 if stage and start.ndim == 2 else 1
        assert ("data" in str(row.opt.spec)) == bool(stage)
        step = np.asarray(plain.parameters[path], np.float64) - start
        ours = np.asarray(engine.parameters[path], np.float64) - start
        np.testing.assert_allclose(ours * shards, step, rtol=1e-3, atol=1e-6, err_msg=path)


def test_one_that_takes_no_further_arguments_works():
    plain = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(lambda u: -RATE * u, updates), state),
    )
    engine, other = (
        tiny.engine(tiny.Listed, stage=1, optimizer_=each, optimizer=None)
        for each in (plain, optax.sgd(RATE))
    )
    for each in (engine, other):
        each.train_batch(tiny.batch(8))
    for path, x in other.parameters.items():
        np.testing.assert_allclose(engine.parameters[path], x, rtol=1e-6)


def polar(view, arrays):
    """The nearest orthogonal matrix, and how often it was computed."""
    u, _, v = jnp.linalg.svd(arrays["update"], full_matrices=False)
    return {"update": u @ v, "count": arrays["count"] + 1}


def with_owners():
    """Orthogonal updates of matrices, by their owners, which count them; SGD's of the others."""

    def init(params):
        def count(keys, p):
            return jnp.zeros(()) if p.ndim == 2 else optax.MaskedNode()

        return ByMatrix({"count": jax.tree_util.tree_map_with_path(count, params)})

    def update(updates, state, params=None, *, placements, **extra):
        flat = {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(updates)}
        counts = jax.tree_util.tree_leaves_with_path(state.by_matrix["count"])
        counts = {path_of(keys): x for keys, x in counts}
        views = {path: matrices_of(placements[path].leaf) for path in counts}
        arrays = {path: {"update": flat[path], "count": counts[path]} for path in counts}
        results = by_owners(polar, views, arrays, placements)

        def chosen(name, otherwise):
            return lambda keys, x: results.get(path_of(keys), {name: otherwise(x)})[name]

        direction = jax.tree_util.tree_map_with_path(chosen("update", lambda u: u), updates)
        counted = jax.tree_util.tree_map_with_path(
            chosen("count", lambda x: x), state.by_matrix["count"]
        )
        return jax.tree.map(lambda u: -RATE * u, direction), ByMatrix({"count": counted})

    return optax.GradientTransformationExtraArgs(init, update)


def test_an_optimizer_of_ones_own_has_its_matrices_computed_by_owners():
    engine = tiny.engine(tiny.Listed, stage=1, optimizer_=with_owners(), optimizer=None)
    assert {stack.share for stack in engine.placements.owned} == {1}
    paths = [path for path, row in engine.placements.rows.items() if len(row.leaf.shape) == 2]
    before = {path: np.asarray(engine.parameters[path]) for path in paths}
    engine.train_batch(tiny.batch(8))
    for path in paths:
        step = (before[path] - np.asarray(engine.parameters[path])) / RATE
        small = min(step.shape)
        product = step @ step.T if step.shape[0] == small else step.T @ step
        np.testing.assert_allclose(product, np.eye(small), atol=1e-4, err_msg=path)
