"""Which random numbers of a traced loss are constrained, and that they stay the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.placement.mesh import build_mesh
from jaxspeed.traced_loss import sharded_draws

SAMPLES, WIDTH = 16, 3
MESH = build_mesh({"data": 4, "replica": 2}, jax.devices())
RANKS = ("replica", "data")


def key(x):
    """Of nothing that is sharded."""
    del x
    return jax.random.key(7)


def normal(x):
    return jax.random.normal(key(x), (x.shape[0], WIDTH))


def split_keys(x):
    keys = jax.random.split(key(x), x.shape[0])
    return jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(keys)


def folded_keys(x):
    def one(i):
        return jax.random.uniform(jax.random.fold_in(key(x), i), (WIDTH,))

    return jax.vmap(one)(jnp.arange(x.shape[0]))


def folded_into_samples(x):
    return jax.random.normal(key(x), (WIDTH * x.shape[0],)).reshape(x.shape[0], WIDTH)


def gamma(x):
    return jax.random.gamma(key(x), 2.0, (x.shape[0],))


def classes(x):
    return jax.random.categorical(key(x), jnp.zeros(5), shape=(x.shape[0],))


def shuffled(x):
    return x[jax.random.permutation(key(x), x.shape[0])]


def integers(x):
    return jax.random.randint(key(x), (x.shape[0],), 0, 1000)


def in_a_scan(x):
    return jax.lax.scan(lambda k, _: (jax.random.split(k)[0], normal(x)), key(x), length=2)[1]


def in_a_checkpoint(x):
    return jax.checkpoint(lambda x: x[:, None] * normal(x))(x)


def in_a_branch(x):
    return jax.lax.cond(x[0] > 0, normal, lambda x: 2 * normal(x), x)


def twice(x):
    """Two calls of one function: each has its own constraint."""
    draw = jax.jit(normal)
    return draw(x) + draw(2 * x)


def of_other_sizes(x):
    weights = jax.random.normal(key(x), (WIDTH, WIDTH))
    return x[:, None] * weights.sum(0) + jax.random.uniform(key(x))


def of_other_generators(x):
    return jax.random.normal(jax.random.key(0, impl="rbg"), (x.shape[0],))


def nothing(x):
    return jnp.tanh(x)


# How many constraints; `randint` and `permutation` draw their bits in parts.
LOSSES = {
    normal: 1,
    split_keys: 1,
    folded_keys: 1,
    folded_into_samples: 1,
    gamma: 1,
    classes: 1,
    shuffled: 1,
    integers: 2,
    in_a_scan: 1,
    in_a_checkpoint: 1,
    in_a_branch: 2,
    twice: 2,
    of_other_sizes: 0,
    of_other_generators: 0,
    nothing: 0,
}


def samples():
    return jnp.linspace(-1, 1, SAMPLES)


def written(fn, mesh=MESH):
    closed = jax.make_jaxpr(fn)(samples())
    sizes = sharded_draws.shared_sizes({SAMPLES}, mesh)
    return closed, sharded_draws.with_draws_sharded(closed.jaxpr, sizes, mesh)


def constraints(jaxpr):
    """The shardings in a program, those of its functions once for each call."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append((eqn.params["sharding"], eqn.invars[0].aval.shape))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += constraints(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_draws_of_a_row_a_sample_are_constrained_on_it(fn):
    closed, jaxpr = written(fn)
    found = constraints(jaxpr)
    assert len(found) == LOSSES[fn]
    for sharding, shape in found:
        rest = [P.UNCONSTRAINED] * (len(shape) - 1)
        assert shape[0] == SAMPLES and sharding.spec == P(RANKS, *rest)
    if not found:
        assert jaxpr is closed.jaxpr


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_the_numbers_stay_the_same(fn):
    closed, jaxpr = written(fn)
    run = jax.jit(jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts)))
    (ours,) = run(jax.device_put(samples(), NamedSharding(MESH, P(RANKS))))
    np.testing.assert_allclose(ours, jax.jit(fn)(samples()), rtol=1e-6, atol=1e-7)


def test_nothing_is_constrained_where_ranks_cannot_share_the_samples():
    assert sharded_draws.shared_sizes({SAMPLES, SAMPLES + 1}, MESH) == {SAMPLES}
    alone = build_mesh({"tensor": 2, "data": 1}, jax.devices()[:2])
    assert not sharded_draws.shared_sizes({SAMPLES}, alone)
    closed, jaxpr = written(normal, alone)
    assert jaxpr is closed.jaxpr


def test_nothing_is_constrained_over_manual_axes():
    seen = []

    def local(x):
        seen.append(sharded_draws.shared_sizes({SAMPLES}, MESH))
        return x

    spec = P(RANKS)
    jax.eval_shape(
        jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec, axis_names={*RANKS}),
        samples(),
    )
    assert seen == [frozenset()]
