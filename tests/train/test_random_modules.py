"""Random modules train as plain Flax and Optax train them: what plain Optax would move is moved
alike, what plain Flax would carry is carried alike, and nothing else is."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspeed
from tests.support.random_modules import (
    KINDS,
    NNX_KINDS,
    OVERWRITTEN,
    SOWN,
    WIDTH,
    Described,
    Part,
    Spec,
    linen_module,
    loss_of,
    nnx_factory,
    specs,
)
from tests.support.reference import slice_of_each_rank

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

DEVICES, MICRO, STEPS, SEED = 8, 2, 3, 3
TOLERANCE = {"sgd": 1e-5, "adam": 1e-4}
BF16 = 2e-2  # with a bf16 parameter, whose gradient is rounded after sums in another order
Arrays = dict[str, Any]


@dataclass(frozen=True, repr=False)
class Settings(Described):
    """How a module is trained."""

    stage: int = 0
    accumulation: int = 1
    tensor: int = 1
    optimizer: str = "sgd"

    @property
    def ranks(self) -> int:
        return DEVICES // self.tensor

    @property
    def samples(self) -> int:
        return self.ranks * MICRO * self.accumulation

    @property
    def config(self) -> Mapping[str, Any]:
        return {
            "train_batch_size": self.samples,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "run": {"seed": SEED, "compilation_cache": False},
            **({"mesh": {"data": -1, "tensor": self.tensor}} if self.tensor > 1 else {}),
        }

    def transform(self) -> optax.GradientTransformation:
        # Where a gradient is zero but for rounding, a larger epsilon keeps Adam from taking full
        # steps.
        return optax.adam(1e-2, eps=1e-3) if self.optimizer == "adam" else optax.sgd(0.05, 0.9)

    def batches(self) -> list[Arrays]:
        rng = np.random.default_rng(0)

        def batch() -> Arrays:
            x = rng.normal(size=(self.samples, WIDTH)).astype(np.float32)
            weight = rng.integers(0, 4, self.samples).astype(np.float32)
            return {"x": x, "y": np.roll(x, 1, axis=1), "weight": weight}

        return [batch() for _ in range(STEPS + 1)]  # the last is evaluated


SETTINGS = st.builds(
    Settings,
    stage=st.integers(0, 3),
    accumulation=st.sampled_from((1, 4)),
    tensor=st.sampled_from((1, 1, 1, 2)),
    optimizer=st.sampled_from(("sgd", "adam")),
)


@dataclass
class Run:
    """What training came to: by path, parameters and state before and after."""

    losses: list[float] = field(default_factory=list)  # of each step, and of the evaluation
    norms: list[float] = field(default_factory=list)
    sown: list[float] = field(default_factory=list)
    params: tuple[Arrays, Arrays] = ({}, {})
    state: tuple[Arrays, Arrays] = ({}, {})


# -- plain Flax and Optax on one device -----------------------------------------------------------


def key_of(key: Any, step: Any, micro: Any) -> Any:
    """The rule of random keys."""
    return jax.random.fold_in(jax.random.fold_in(key, step), micro)


class PlainNnx:
    """A module whose modes are as training wants them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        module = nnx_factory(spec, plain=True)(nnx.Rngs(jax.random.key(SEED)))
        self.graph, state = nnx.split(module)
        self.leaves = {path_of(keys): (keys, leaf) for keys, leaf in nnx.to_flat_state(state)}

    def init(self) -> tuple[Arrays, Arrays]:
        values = {path: value_of(leaf) for path, (_, leaf) in self.leaves.items()}
        params = {path: x for path, x in values.items() if self.is_parameter(path)}
        return params, {path: x for path, x in values.items() if self.is_state(path)}

    def is_parameter(self, path: str) -> bool:
        leaf = self.leaves[path][1]
        return isinstance(leaf, nnx.Param) and jnp.issubdtype(leaf.dtype, jnp.inexact)

    def is_state(self, path: str) -> bool:
        fresh = isinstance(self.leaves[path][1], nnx.RngState | nnx.Intermediate)
        return not fresh and not self.is_parameter(path)

    def loss(self, values: Arrays, batch: Any, step: Any, micro: Any, train: bool) -> Any:
        """(what the loss returns, all values after it)."""

        def filled(path: str, leaf: Any) -> Any:
            if path in values:
                value = values[path]
            elif isinstance(leaf, nnx.RngKey):
                value = key_of(leaf.get_value(), step, micro)
            elif isinstance(leaf, nnx.RngCount):
                value = jnp.zeros_like(leaf.get_value())
            else:
                value = leaf.get_value()
            return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value

        flat = [(keys, filled(path, leaf)) for path, (keys, leaf) in self.leaves.items()]
        module = nnx.merge(self.graph, nnx.from_flat_state(flat), copy=True)
        if not train:
            module.eval()
        returned = loss_of(self.spec, linen=False)(module, batch)
        after = {path_of(keys): value_of(leaf) for keys, leaf in leaves_of(module)}
        return returned, {path: after[path] for path in values}


class PlainLinen:
    """A module whose norms run on their statistics where it was told so."""

    def __init__(self, spec: Spec, example: Any) -> None:
        self.spec, self.module = spec, linen_module(spec, plain=True)
        variables = self.module.init(jax.random.key(SEED), example["x"], train=False)
        kept = without_sown(variables)
        self.keys = {linen_path(keys): keys for keys in kept}
        self.first = {linen_path(keys): x for keys, x in kept.items()}

    def init(self) -> tuple[Arrays, Arrays]:
        own = {path for path, keys in self.keys.items() if keys[0] == "params"}
        params = {path: x for path, x in self.first.items() if path in own}
        return params, {path: x for path, x in self.first.items() if path not in own}

    def loss(self, values: Arrays, batch: Any, step: Any, micro: Any, train: bool) -> Any:
        tree: dict[str, Any] = {}
        for path, value in values.items():
            *parents, last = self.keys[path]
            functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = (
                value
            )
        key = key_of(jax.random.key(SEED), step, micro)
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(("params", "dropout"))}
        bound = BoundLinen(self.module, tree, rngs, train, self.spec.collection)
        returned = loss_of(self.spec, linen=True)(bound, batch)
        after = {linen_path(keys): x for keys, x in without_sown(bound.variables).items()}
        return returned, {path: after[path] for path in values}


class BoundLinen:
    """`apply` as a user writes it who wants what is sown."""

    def __init__(self, module: Any, variables: Any, rngs: Any, train: bool, sown: str) -> None:
        self.module, self.variables, self.rngs, self.train = module, variables, rngs, train
        self.mutable = [*(c for c in variables if c != "params"), sown] if train else [sown]

    def __call__(self, x: Any) -> Any:
        y, changed = self.module.apply(
            self.variables, x, train=self.train, rngs=self.rngs, mutable=self.mutable
        )
        self.variables = {**self.variables, **changed}
        return y


def path_of(keys: Any) -> str:
    return "/".join(map(str, keys))


def linen_path(keys: Any) -> str:
    return path_of(keys[1:] if keys[0] == "params" else keys)


def value_of(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def leaves_of(module: nnx.Module) -> Any:
    return nnx.to_flat_state(nnx.state(module))


def without_sown(variables: Any) -> Arrays:
    """Arrays by their keys, without what was sown."""
    pairs = jax.tree_util.tree_leaves_with_path(variables)
    named = ((tuple(getattr(k, "key", None) for k in keys), x) for keys, x in pairs)
    return {keys: x for keys, x in named if not set(keys) & set(SOWN)}


def train_plainly(spec: Spec, how: Settings, linen: bool) -> Run:
    *batches, last = how.batches()
    model = PlainLinen(spec, last) if linen else PlainNnx(spec)
    params, state = model.init()
    run = Run(params=(copied(params), {}), state=(copied(state), {}))
    trained = {path for path in params if spec.is_trained(path)}
    optimizer = how.transform()
    opt = jax.jit(optimizer.init)({path: params[path] for path in trained})

    @jax.jit
    def micro_batch(params: Arrays, state: Arrays, batch: Any, step: Any, micro: Any) -> Any:
        """(gradients, (total, weight, what was sown, all parameters, state))."""

        def mean(active: Arrays) -> Any:
            values = {**params, **active, **state}
            (*value, metrics), after = model.loss(values, batch, step, micro, train=True)
            total, weight = value if len(value) == 2 else (value[0], jnp.ones(()))
            share = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
            written, carried = split(after, params)
            return total * share, (total, weight, metrics["sown"], written, carried)

        return jax.grad(mean, has_aux=True)({path: params[path] for path in trained})

    @jax.jit
    def update(grads: Arrays, opt: Any, params: Arrays) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(jnp.abs(g) ** 2) for g in grads.values()))
        updates, opt = optimizer.update(grads, opt, params)
        return norm, optax.apply_updates(params, updates), opt

    for t, batch in enumerate(batches):
        # NumPy's sums: each would be a program to compile for every shape, as jax.numpy's.
        sums = {path: np.zeros_like(params[path]) for path in trained}
        total = weight = sown = 0.0
        for i in range(how.accumulation):
            part = {
                name: slice_of_each_rank(x, i, how.accumulation, how.ranks)
                for name, x in batch.items()
            }
            grads, (s, w, n, params, state) = micro_batch(params, state, part, t, i)
            s, w, n, grads = jax.tree.map(np.asarray, (s, w, n, grads))
            sums = {path: sums[path] + np.conj(g) * w for path, g in grads.items()}
            total, weight, sown = total + s, weight + w, sown + n * w
        active = {path: params[path] for path in trained}
        norm, active, opt = update({p: g / weight for p, g in sums.items()}, opt, active)
        params = params | active
        run.losses.append(float(total / weight))
        run.norms.append(float(norm))
        run.sown.append(float(sown / weight))

    evaluate = jax.jit(lambda values, batch: model.loss(values, batch, 0, 0, train=False)[0])
    *value, metrics = evaluate({**params, **state}, last)
    run.losses.append(float(value[0] / value[1] if len(value) == 2 else value[0]))
    run.sown.append(float(metrics["sown"]))
    run.params = (run.params[0], copied(params))
    run.state = (run.state[0], copied(state))
    return run


def split(values: Arrays, params: Arrays) -> tuple[Arrays, Arrays]:
    """(parameters, state)."""
    return (
        {path: x for path, x in values.items() if path in params},
        {path: x for path, x in values.items() if path not in params},
    )


def copied(arrays: Arrays) -> Arrays:
    return {path: np.array(x) for path, x in arrays.items()}


# -- with jaxspeed --------------------------------------------------------------------------------


def train_with_jaxspeed(spec: Spec, how: Settings, linen: bool) -> Run:
    *batches, last = how.batches()
    engine = jaxspeed.initialize(
        linen_module(spec) if linen else nnx_factory(spec),
        loss_of(spec, linen),
        how.config,
        how.transform(),
        example_batch=last,
        trainable=spec.trainable(linen),
    )
    run = Run(params=(copied(engine.parameters), {}), state=(kept_by(engine, linen), {}))
    for batch in batches:
        metrics = engine.train_batch(batch)
        run.losses.append(float(metrics["loss"]))
        run.norms.append(float(metrics["grad_norm"]))
        run.sown.append(float(metrics["sown"]))
    run.params = (run.params[0], copied(engine.parameters))
    run.state = (run.state[0], kept_by(engine, linen))
    metrics = engine.eval_batch(last)
    run.losses.append(float(metrics["loss"]))
    run.sown.append(float(metrics["sown"]))
    assert_equal(run.params[1], copied(engine.parameters), "a parameter that evaluation moved")
    assert_equal(run.state[1], kept_by(engine, linen), "state that evaluation moved")
    engine.close()
    return run


def kept_by(engine: Any, linen: bool) -> Arrays:
    """All that the live module holds but parameters, random streams and what is sown."""
    module, params = engine.module, engine.parameters
    if linen:
        flat = {linen_path(keys): x for keys, x in without_sown(module.variables).items()}
    else:
        flat = {
            path_of(keys): value_of(leaf)
            for keys, leaf in leaves_of(module)
            if not isinstance(leaf, nnx.RngState | nnx.Intermediate)
        }
    return copied({path: x for path, x in flat.items() if path not in params})


# -- the claim ------------------------------------------------------------------------------------


def assert_trains_as_plain_flax(spec: Spec, how: Settings, linen: bool) -> None:
    plain = train_plainly(spec, how, linen)
    ours = train_with_jaxspeed(spec, how, linen)
    half = any(part.kind == "half" for part in spec.parts)
    tolerance = BF16 if half else TOLERANCE[how.optimizer]
    assert_starts_alike(ours.params, plain.params, "parameters")
    assert_starts_alike(ours.state, plain.state, "state")
    np.testing.assert_allclose(ours.sown, plain.sown, rtol=1e-6, err_msg="sown in a micro-batch")
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=tolerance, err_msg="losses")
    np.testing.assert_allclose(ours.norms, plain.norms, rtol=tolerance, err_msg="gradient norms")

    trained = {path for path in plain.params[0] if spec.is_trained(path)}
    unread = {p for p in trained if (part := spec.owner(p)) and part.calls == 0}
    written = {p for p in plain.params[0] if p not in trained and moved(plain.params, p)}
    still = (plain.params[0].keys() - trained - written) | {
        path for path in unread if not moved(plain.params, path)
    }
    assert_moved_alike(ours.params, plain.params, trained, tolerance)
    assert_moved_alike(ours.params, plain.params, written, tolerance)
    assert_equal(*(only(x, still) for x in ours.params), "a parameter that nothing moves")

    exact = {p for p, x in plain.state[0].items() if not np.issubdtype(x.dtype, np.inexact)}
    still = {path for path in plain.state[0] if not moved(plain.state, path)}
    assert_moved_alike(ours.state, plain.state, plain.state[0].keys() - exact - still, tolerance)
    assert_equal(only(ours.state[1], exact), only(plain.state[1], exact), "counted state")
    assert_equal(*(only(x, still) for x in ours.state), "state that nothing moves")


def assert_starts_alike(ours: Any, theirs: Any, what: str) -> None:
    """From the same values, and of the same dtypes at the end."""
    wanted = {path: (x.shape, x.dtype) for path, x in theirs[0].items()}
    for arrays in ours:
        found = {path: (x.shape, x.dtype) for path, x in arrays.items()}
        apart = sorted(p for p in found | wanted if found.get(p) != wanted.get(p))
        assert not apart, f"{what} of plain Flax that are others here, or of another type: {apart}"
    for path, value in theirs[0].items():
        np.testing.assert_allclose(ours[0][path], value, rtol=1e-5, atol=1e-6, err_msg=path)


def moved(run: tuple[Arrays, Arrays], path: str) -> bool:
    return not np.array_equal(run[0][path], run[1][path])


def only(arrays: Arrays, paths: Any) -> Arrays:
    return {path: arrays[path] for path in paths}


def assert_equal(ours: Arrays, theirs: Arrays, what: str) -> None:
    assert ours.keys() == theirs.keys(), what
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=f"{what}: {path}")


def assert_moved_alike(ours: Any, theirs: Any, paths: Any, tolerance: float) -> None:
    """The difference of all these updates, relative to their norm."""
    mine = {p: wide(ours[1][p]) - wide(ours[0][p]) for p in paths}
    wanted = {p: wide(theirs[1][p]) - wide(theirs[0][p]) for p in paths}
    differences = {p: norm([mine[p] - wanted[p]]) for p in paths}
    whole = norm(wanted.values())
    worst = sorted(differences, key=lambda p: -differences[p])[:3]
    told = ", ".join(f"{p}: {differences[p]:.2e} of {norm([wanted[p]]):.2e}" for p in worst)
    assert norm(differences.values()) <= tolerance * whole, f"of {whole:.2e} in all, {told}"


def wide(x: Any) -> Any:
    return x.astype(np.promote_types(x.dtype, np.float64))


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in arrays)))


# Each feature at least once, with a few things beside it that could hide it.
BOTH: dict[str, tuple[Spec, Settings]] = {
    "real parameters": (Spec((Part("mlp", depth=1, calls=2),)), Settings(3, 4, optimizer="adam")),
    "complex parameters": (Spec((Part("spectral"), Part("mlp"))), Settings(1, 4)),
    "complex parameters, cut": (
        Spec((Part("spectral", depth=1), Part("spectral", frozen="some")), "dict"),
        Settings(3, 1, optimizer="adam"),
    ),
    "state": (
        Spec((Part("count", calls=2), Part("average"), Part("first"), Part("mlp")), weighted=True),
        Settings(0, 4),
    ),
    "state that becomes a constant": (Spec((Part("first"),), weighted=True), Settings(1, 4)),
    "state that becomes a constant in a remat": (
        Spec((Part("first"),), staged="remat"),
        Settings(3),
    ),
    "state that becomes a parameter": (Spec((Part("past"),), weighted=True), Settings(0, 4)),
    "complex state": (Spec((Part("phase", depth=2), Part("table"))), Settings(2, 4)),
    "sown into a tuple": (
        Spec((Part("sow", calls=2), Part("count")), "attributes", weighted=True),
        Settings(1, 4),
    ),
    "sown into a sum": (
        Spec((Part("add", depth=1, calls=2), Part("mlp")), collection="counters", setup=True),
        Settings(3, 1, optimizer="adam"),
    ),
    "sown beside state": (Spec((Part("count"), Part("sow")), collection="counters"), Settings()),
    "frozen parameters": (
        Spec((Part("mlp", frozen="all"), Part("mlp", frozen="some"), Part("sow", frozen="all"))),
        Settings(3, 4),
    ),
    "trained by a function": (
        Spec((Part("mlp", frozen="some"), Part("spectral", frozen="all")), freezing="function"),
        Settings(2, 1, optimizer="adam"),
    ),
    "random draws": (
        Spec((Part("dropout"), Part("noise", calls=2), Part("dropout", depth=1)), setup=True),
        Settings(0, 4),
    ),
    "no random draws": (
        Spec((Part("noise", mode="set"), Part("dropout", mode="set")), weighted=True),
        Settings(1, 4),
    ),
    "batch statistics": (
        Spec((Part("norm", calls=2), Part("norm", affine="bias", depth=1), Part("mlp")), "dict"),
        Settings(3, 4),
    ),
    "a norm on its statistics": (
        Spec((Part("norm", mode="set"), Part("norm"), Part("mlp"))),
        Settings(2, 4, optimizer="adam"),
    ),
    "frozen norms": (
        Spec(
            (
                Part("norm", frozen="all"),
                Part("norm", affine="bias", frozen="some", depth=1),
                Part("norm", affine="none", frozen="all"),
                Part("mlp"),
            ),
            setup=True,
        ),
        Settings(1, 4),
    ),
    "norms that are frozen in part": (
        Spec((Part("norm", frozen="some"), Part("norm", affine="none", frozen="some"))),
        Settings(0, 4),
    ),
    "weights cut over a tensor axis": (
        Spec((Part("mlp"), Part("norm", frozen="all"), Part("mlp", depth=1)), "dict", setup=True),
        Settings(3, 4, tensor=2),
    ),
    "shared and scanned layers": (
        Spec((Part("shared", depth=1), Part("scanned", axis=1), Part("scanned", axis=2, calls=2))),
        Settings(3, 4),
    ),
    "layers that pass on random keys": (
        Spec((Part("spectral"), Part("mlp"), Part("mlp"), Part("scanned"))),
        Settings(3),
    ),
    "containers, bf16 and keys": (
        Spec((Part("nested", frozen="some"), Part("half", depth=1), Part("draws", calls=2))),
        Settings(2, 4, optimizer="adam"),
    ),
}
NNX = BOTH | {
    "trained by a type": (
        Spec((Part("mlp", frozen="some"), Part("norm", frozen="all")), freezing="type"),
        Settings(3, 4, optimizer="adam"),
    ),
    "a norm in evaluation mode": (
        Spec((Part("norm", mode="eval", depth=1), Part("dropout", mode="eval"), Part("norm"))),
        Settings(0, 4),
    ),
    "modes to be filled in": (
        Spec((Part("norm", mode="none", depth=1), Part("dropout", mode="none"))),
        Settings(2, 4),
    ),
    "all in evaluation mode": (
        Spec((Part("norm", mode="none"), Part("noise")), evaluating=True, weighted=True),
        Settings(1, 4),
    ),
    "sown and popped": (
        Spec((Part("sow"), Part("add"), Part("declared")), reads="pop", weighted=True),
        Settings(0, 4),
    ),
    "sown and captured": (
        Spec((Part("sow", depth=1), Part("add", calls=2), Part("count")), reads="capture"),
        Settings(3, 4),
    ),
    "a declared Intermediate": (
        Spec((Part("declared", calls=2), Part("count")), reads="state"),
        Settings(3, 4),
    ),
    "state that the loss writes": (
        Spec((Part("tally"), Part("mlp")), weighted=True),
        Settings(1, 4),
    ),
    "a frozen parameter that the loss writes": (
        Spec((Part("teacher"), Part("teacher", depth=1, frozen="some")), weighted=True),
        Settings(0, 4),
    ),
    "a cut and frozen parameter that the loss writes": (
        Spec((Part("teacher", frozen="all"), Part("teacher", calls=2)), freezing="type"),
        Settings(3, 1, optimizer="adam"),
    ),
    "called by nnx.jit": (
        Spec((Part("shared"), Part("nested"), Part("draws"), Part("dropout")), staged="jit"),
        Settings(3, 4),
    ),
    "called by nnx.remat": (
        Spec((Part("scanned"), Part("norm"), Part("sow"), Part("noise")), "dict", staged="remat"),
        Settings(1, 4, optimizer="adam"),
    ),
    "parts that are never called": (
        Spec((Part("mlp", calls=0), Part("norm", calls=0), Part("teacher", calls=0))),
        Settings(3, 4, optimizer="adam"),
    ),
}
# What no module drawn at random has: a trained parameter that the loss writes. The update is of
# what was written, as in a loop over plain nnx.
OVERWRITING: dict[str, tuple[Spec, Settings]] = {
    "once a step": (Spec((Part(OVERWRITTEN), Part("mlp"))), Settings(3, 1)),
    "in each micro-batch": (Spec((Part(OVERWRITTEN),), weighted=True), Settings(0, 4)),
}
# One failure is made as simple as it can be; more of them would take minutes each.
LONG = settings(max_examples=200, report_multiple_bugs=False)
MODULES = specs(NNX_KINDS, linen=False)
LINEN_MODULES = specs(KINDS, linen=True)


# These go the way of another that always runs, or of one in test_frozen_normalisation.py,
# test_complex_parameters.py and test_written_by_the_loss.py.
FULL_NNX = (
    "real parameters",
    "complex parameters, cut",
    "frozen norms",
    "a norm on its statistics",
    "a norm in evaluation mode",
    "all in evaluation mode",
    "sown into a tuple",
    "sown and captured",
    "trained by a function",
    "a frozen parameter that the loss writes",
    "complex parameters",
    "sown into a sum",
    "norms that are frozen in part",
    "weights cut over a tensor axis",
    # Others here: in a remat, called by nnx.jit, written by the loss.
    "state that becomes a constant",
    "shared and scanned layers",
    "trained by a type",
    # test_written_by_the_loss.py
    "sown beside state",
    "a declared Intermediate",
    # test_trainable.py
    "frozen parameters",
    # test_frozen_normalisation.py
    "no random draws",
    "batch statistics",
    "modes to be filled in",
)
FULL_LINEN = (
    "frozen norms",
    "frozen parameters",
    "random draws",
    "sown into a tuple",
    "state",
    "a norm on its statistics",
    "real parameters",
    "complex parameters, cut",
    "state that becomes a constant",
    "state that becomes a parameter",
    "complex state",
    "trained by a function",
    "no random draws",
    "batch statistics",
    "norms that are frozen in part",
    "complex parameters",
    "sown into a sum",
    # The program is that of nnx.
    "layers that pass on random keys",
    "containers, bf16 and keys",
)


def names(examples: Any, full: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full if name in full else ()) for name in examples]


@pytest.mark.default_cases(every=13)
@pytest.mark.parametrize("name", names(NNX, FULL_NNX))
def test_an_nnx_module_trains_as_plain_nnx(name):
    assert_trains_as_plain_flax(*NNX[name], linen=False)


@pytest.mark.default_cases("state that becomes a constant in a remat")
@pytest.mark.parametrize("name", names(BOTH, FULL_LINEN))
def test_a_linen_module_trains_as_plain_linen(name):
    assert_trains_as_plain_flax(*BOTH[name], linen=True)


@pytest.mark.default_cases("in each micro-batch")
@pytest.mark.parametrize("name", OVERWRITING)
def test_a_trained_parameter_that_the_loss_writes_is_updated_from_there(name):
    assert_trains_as_plain_flax(*OVERWRITING[name], linen=False)


@pytest.mark.full
@given(spec=MODULES, how=SETTINGS)
@LONG
def test_random_nnx_modules_train_as_plain_nnx(spec, how):
    assert_trains_as_plain_flax(spec, how, linen=False)


@pytest.mark.full
@given(spec=LINEN_MODULES, how=SETTINGS)
@LONG
def test_random_linen_modules_train_as_plain_linen(spec, how):
    assert_trains_as_plain_flax(spec, how, linen=True)
