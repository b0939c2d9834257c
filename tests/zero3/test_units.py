"""Units in awkward models: values, gradients and changed state equal plain JAX's.

Models are traced in fp64, so that a difference can only be a mistake. Two orders of summation were
seen to differ by at most 6e-15 of the largest gradient; 1e-13 leaves room for another compiler's
order, and for no mistake. (In fp32 the same sums differ by 1e-7 to 2e-6, where a small gradient
could be wrong unseen.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxspeed.jaxpr.module_scopes import tagged
from jaxspeed.zero3 import EvalContext, ShardedParam, Units, choose_units, run_segmented
from jaxspeed.zero3.residual_policy import ResidualPolicy
from tests.support.awkward import AWKWARD, OwnScan, Plain, TiedWeights, UnlikeBlocks
from tests.support.awkward.base import WIDTH

DEVICES = 8
TOLERANCE = 1e-13


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


class Split:
    """A model as a pure function of its parameters, in fp64."""

    def __init__(self, model_class: type[nnx.Module]) -> None:
        self.graph, params, rest = nnx.split(model_class(nnx.Rngs(0)), nnx.Param, ...)
        leaves, self.tree = jax.tree.flatten(params)
        self.leaves = [leaf.astype(jnp.float64) for leaf in leaves]
        self.rest = jax.tree.map(as_double, rest)
        self.x = jax.random.normal(jax.random.key(1), (4, WIDTH), jnp.float64)

    def loss(self, leaves: list[Any], rest: Any, x: Any, named: bool = False) -> Any:
        """(loss, every variable that is no parameter, as the model leaves it)."""
        module = nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves), rest, copy=True)
        if named:
            modules = {
                id(node): "/".join(map(str, path))
                for path, node in nnx.iter_graph(module)
                if isinstance(node, nnx.Module)
            }
            classes = {type(n) for _, n in nnx.iter_graph(module) if isinstance(n, nnx.Module)}
            with tagged(classes, lambda node: modules.get(id(node), "")):
                y = module(x)
        else:
            y = module(x)
        return (y**2).mean(), jax.tree.leaves(nnx.split(module, nnx.Param, ...)[2])


def as_double(x: Any) -> Any:
    return x.astype(jnp.float64) if x.dtype == jnp.float32 else x


def stored(leaf: Any) -> ShardedParam:
    """Sharded over eight devices on the last dim, which is padded if it does not divide."""
    gathered = NamedSharding(mesh(), PartitionSpec())
    sharding = NamedSharding(mesh(), PartitionSpec(*[None] * (leaf.ndim - 1), "data"))
    return ShardedParam(leaf.shape, leaf.dtype, gathered, sharding)


def as_stored(leaf: Any) -> jax.Array:
    missing = -leaf.shape[-1] % DEVICES
    padded = jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, missing)])
    return jax.device_put(padded, stored(leaf).sharding)


class Sliced:
    """The same model with its units gathering their own stored parameters."""

    def __init__(self, split: Split, residuals: ResidualPolicy | None = None) -> None:
        self.split, self.residuals = split, residuals
        trace = jax.make_jaxpr(lambda *args: split.loss(*args, named=True), return_shape=True)
        self.closed, _ = trace(split.leaves, split.rest, split.x)
        self.parameters = self.closed.jaxpr.invars[: len(split.leaves)]
        self.units: Units = choose_units(self.closed.jaxpr, self.parameters)

    def loss(self, leaves: list[Any], rest: Any, x: Any) -> Any:
        storage = dict(zip(self.parameters, map(stored, self.split.leaves), strict=True))
        args = [*leaves, *jax.tree.leaves(rest), x]
        context = EvalContext(self.units, residuals=self.residuals)
        outs = run_segmented(self.closed.jaxpr, self.closed.consts, args, storage, context)
        return outs[0], outs[1:]

    def gradients(self) -> Callable[..., Any]:
        return jax.value_and_grad(self.loss, has_aux=True)

    def arguments(self) -> tuple[Any, ...]:
        return [as_stored(leaf) for leaf in self.split.leaves], self.split.rest, self.split.x


def raw(tree: Any) -> list[np.ndarray]:
    """All leaves as numbers, random keys included."""
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [np.asarray(jax.random.key_data(x) if k else x) for x, k in zip(leaves, keys)]


def assert_same(plain: Any, cut: Any) -> None:
    """Loss, changed state and gradients agree, relative to the largest number of each array."""
    (_, plain_grads), (_, cut_grads) = plain, cut
    largest = max(np.abs(g).max() for g in plain_grads)
    assert largest > 1e-3
    for a, b in zip(plain_grads, cut_grads, strict=True):
        real = np.asarray(b)[tuple(map(slice, a.shape))]
        assert np.abs(a - real).max() <= TOLERANCE * largest
        assert np.count_nonzero(b) == np.count_nonzero(real)  # padding has no gradient
    for a, b in zip(raw(plain[0]), raw(cut[0]), strict=True):
        assert a.shape == b.shape
        assert np.abs(a.astype(float) - b.astype(float)).max() <= TOLERANCE * max(
            1, np.abs(a).max()
        )


@pytest.mark.default_cases("UnlikeBlocks", every=22)
@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
@pytest.mark.parametrize("model_class", AWKWARD, ids=lambda c: c.__name__)
def test_units_are_found_and_change_no_number(model_class):
    split = Split(model_class)
    sliced = Sliced(split)
    assert sliced.units.kinds == AWKWARD[model_class]
    reference = jax.jit(jax.value_and_grad(split.loss, has_aux=True))
    plain = reference(split.leaves, split.rest, split.x)
    assert_same(plain, jax.jit(sliced.gradients())(*sliced.arguments()))


def test_there_are_28_awkward_models():
    assert len(AWKWARD) == 28


def test_tracing_leaves_no_trace_on_the_classes():
    before = {c: dict(vars(c)) for c in (Plain, OwnScan, TiedWeights, UnlikeBlocks)}
    for model_class in before:
        Sliced(Split(model_class))
    assert {c: dict(vars(c)) for c in before} == before
