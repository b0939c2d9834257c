"""Training a case with jaxspeed on 8 devices, and comparing it with the plain reference."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspeed
from tests.support import reference
from tests.train.cases import CASES, MICRO, RANKS, Case

Arrays = dict[str, np.ndarray]


@dataclass
class Trained:
    """What a run with jaxspeed came to."""

    engine: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: Arrays = field(default_factory=dict)
    last: Arrays = field(default_factory=dict)


def config(stage: int = 0, accumulation: int = 1, samples: int = 0, **sections: Any) -> Any:
    """A config that cuts every leaf, however small."""
    return {
        "train_batch_size": samples,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "run": {"seed": 3, "compilation_cache": False},
        **sections,
    }


def run(
    case: Case,
    stage: int = 0,
    accumulation: int = 1,
    optimizer: optax.GradientTransformation | str | None = "adam",
    trainable: Any = None,
    steps: int | None = None,
    optimizer_section: Any = None,
    **sections: Any,
) -> Trained:
    """Train the case with jaxspeed; `optimizer` None is for the config's `optimizer_section`."""
    samples = RANKS * MICRO * accumulation
    batches = case.batches(accumulation)[:steps]
    if optimizer_section is not None:
        sections["optimizer"] = optimizer_section
    engine = jaxspeed.initialize(
        case.model,
        case.loss,
        config(stage, accumulation, samples, **sections),
        case.optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
        example_batch=case.example,
        trainable=trainable,
    )
    trained = Trained(engine, first=snapshot(engine))
    for batch in batches:
        metrics = engine.train_batch(batch)
        trained.losses.append(float(metrics["loss"]))
        trained.norms.append(float(metrics["grad_norm"]))
    trained.last = snapshot(engine)
    return trained


def plain(case: Case, accumulation: int, optimizer: Any, **settings: Any) -> reference.Run:
    """Train the case on one device, without jaxspeed."""
    steps = settings.pop("steps", None)
    settings = {"ranks": RANKS, "seed": 3, **settings}
    if isinstance(optimizer, str):
        optimizer = case.optimizer(optimizer)
    batches = case.batches(accumulation)[:steps]
    return reference.train(
        case.plain(), case.loss, batches, optimizer, accumulation=accumulation, **settings
    )


@functools.lru_cache
def plain_of(name: str, accumulation: int, optimizer: str) -> reference.Run:
    """The reference of a case, once for all stages."""
    return plain(CASES[name], accumulation, optimizer)


def snapshot(engine: Any) -> Arrays:
    return {path: np.array(x) for path, x in engine.parameters.items()}


def assert_losses_equal(ours: Any, plain: Any, tolerance: float) -> None:
    assert len(ours.losses) == len(plain.losses)
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=tolerance, atol=0)


def assert_loss_fell(ours: Any) -> None:
    """The mean of the last three batches is below 9 tenths of the first one's."""
    assert np.mean(ours.losses[-3:]) < 0.9 * ours.losses[0]


def updates(result: Any) -> Arrays:
    """theta_T - theta_0, leaf by leaf."""
    return {p: result.last[p].astype(np.float64) - result.first[p] for p in result.first}


def norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in arrays.values())))


def whole_difference(case: Case, ours: Any, plain: Any) -> float:
    """How far the whole update is from the reference's, relative to its norm."""
    a, b = updates(ours), updates(plain)
    assert a.keys() == b.keys()
    real = [path for path in b if case.has_gradient(path)]
    assert 2 * len(real) > len(b)
    return norm({p: a[p] - b[p] for p in real}) / norm({p: b[p] for p in real})


def leaf_differences(case: Case, ours: Any, plain: Any) -> dict[str, float]:
    """The same for each leaf. One whose gradient is zero by symmetry has no update to compare:
    both are the rounding of a sum that is zero, and are measured against the whole update."""
    a, b = updates(ours), updates(plain)
    whole = norm(b)
    return {
        path: norm({path: a[path] - b[path]})
        / (norm({path: b[path]}) if case.has_gradient(path) else whole)
        for path in b
    }


def stored_share(arrays: Any, logical_bytes: int) -> float:
    """The first device's bytes of these arrays, from its live shards, as a share of what they hold
    without padding."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(arrays) for s in x.addressable_shards if s.device == first]
    return sum(s.data.nbytes for s in shards) / logical_bytes


def assert_cut_as_the_stage_says(ours: Trained, plain: reference.Run, stage: int) -> None:
    """An eighth on each device, and at most as much again for padding (12 rows become 16)."""
    size = sum(x.nbytes for x in plain.first.values())
    moments = [x for x in jax.tree.leaves(ours.engine.state.opt) if x.ndim]
    share = stored_share(ours.engine.state.params, size)
    assert share <= 2 / RANKS if stage == 3 else share == 1
    share = stored_share(moments, size * (len(moments) // len(plain.first)))
    assert share <= 2 / RANKS if stage >= 1 else share == 1


# -- the grid -------------------------------------------------------------------------------------

STAGES = (0, 1, 2, 3)
WAYS = (("adam", 1), ("sgd", 4), ("adam", 4), ("sgd", 1))  # (optimizer, accumulation)


# The stage at which a case always runs, so that each stage meets both optimizers, one micro-batch
# and several. GPT-2 is always among the points of test_parity_memory.py, ViT also among those of
# test_parity_pipeline.py.
ALWAYS = {
    "llama": 1,
    "linen": 3,
    "pair": 0,
    "dropout": 0,
    "batch statistics": 3,
    "tied weights": 2,
    "called twice": 3,
    "unlike blocks": 3,
    "keyword arguments": 1,
}


def grid(*names: str) -> list[Any]:
    """Every case x stage x way, all but one of each case marked `full`.

    Case i takes way i + stage where it always runs.
    """
    params = []
    for name in names:
        first = list(CASES).index(name)
        for stage in STAGES:
            for number, (optimizer, accumulation) in enumerate(WAYS):
                always = stage == ALWAYS.get(name) and number == (first + stage) % len(WAYS)
                params.append(
                    pytest.param(
                        name,
                        stage,
                        accumulation,
                        optimizer,
                        id=f"{name}-stage{stage}-x{accumulation}-{optimizer}".replace(" ", "_"),
                        marks=() if always else pytest.mark.full,
                    )
                )
    return params


def assert_trains_as_plain_jax(name: str, stage: int, accumulation: int, optimizer: str) -> None:
    """The claim of the issue, for one point of the grid."""
    case = CASES[name]
    plain = plain_of(name, accumulation, optimizer)
    ours = run(case, stage, accumulation, optimizer)
    assert_losses_equal(ours, plain, 1e-5)
    assert_loss_fell(ours)
    assert whole_difference(case, ours, plain) <= 1e-4
    if optimizer == "sgd":
        assert max(leaf_differences(case, ours, plain).values()) <= 1e-5
        # Under Adam a bias without gradient wanders, and the statistics of its norm with it.
        assert_variables_equal(ours, plain)
    assert_cut_as_the_stage_says(ours, plain, stage)


def assert_variables_equal(ours: Trained, plain: reference.Run) -> None:
    """Statistics too, those of every micro-batch one after the other."""
    for path, value in plain.rest.items():
        if jnp.issubdtype(value.dtype, jnp.floating):
            theirs = ours.engine.state.variables[path]
            np.testing.assert_allclose(theirs, value, rtol=1e-5, atol=1e-5, err_msg=path)
