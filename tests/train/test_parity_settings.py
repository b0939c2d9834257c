"""What a config changes about the update: clipping, sums, groups, frozen leaves, the average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support import reference
from tests.support.awkward import base as awkward
from tests.support.covering import covering
from tests.train.cases import CASES, regression, vectors, weighted_error
from tests.train.parity import (
    Trained,
    assert_losses_equal,
    leaf_differences,
    norm,
    plain,
    run,
    updates,
    whole_difference,
)

STEPS = 4
GPT2, TIED, PAIR = CASES["gpt2"], CASES["tied weights"], CASES["pair"]


def assert_equal(case, ours: Trained, expected: reference.Run) -> None:
    assert_losses_equal(ours, expected, 1e-5)
    np.testing.assert_allclose(ours.norms, expected.norms, rtol=1e-5)
    assert max(leaf_differences(case, ours, expected).values()) <= 1e-5


@pytest.mark.parametrize(
    ("case", "stage", "accumulation"),
    [
        pytest.param(PAIR, 2, 4, id="pair-2-4"),
        *(
            pytest.param(GPT2, *at, id="gpt2-{}-{}".format(*at), marks=pytest.mark.full)
            for at in ((0, 4), (1, 1), (2, 4), (3, 1))
        ),
    ],
)
def test_clipping_is_by_the_global_norm(case, stage, accumulation):
    # A small step moves a norm's scale of 1 by few of fp32's steps, so the rate is a large one.
    sgd = optax.sgd(0.5 if case is GPT2 else 0.1, momentum=0.9)
    expected = plain(case, accumulation, sgd, clipping=0.3, steps=STEPS)
    assert min(expected.norms) > 0.5  # it is active at every step
    ours = run(case, stage, accumulation, sgd, steps=STEPS, gradient_clipping=0.3)
    assert_equal(case, ours, expected)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_summed_gradients_are_the_mean_times_the_ranks(stage):
    small = optax.sgd(0.1 / 8, momentum=0.9)
    expected = plain(TIED, 4, small, gradient_factor=8.0, steps=STEPS)
    ours = run(TIED, stage, 4, small, steps=STEPS, gradient_allreduce_op="sum")
    assert_equal(TIED, ours, expected)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
def test_reducing_once_a_step_equals_reducing_each_micro_batch(stage):
    """Micro-batches and ranks weigh differently here, some nothing at all."""
    once, each = (
        run(PAIR, stage, 4, "sgd", steps=STEPS, parallel={"gradient_reduction": when})
        for when in ("step", "micro_batch")
    )
    assert_losses_equal(once, each, 1e-6)
    assert max(leaf_differences(PAIR, once, each).values()) <= 1e-5


ADAMW = {"lr": 3e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
GROUPS = [
    {"pattern": "head/**", "lr_factor": 0.25, "weight_decay": 0.0},
    {"pattern": "blocks/0/**", "frozen": True},
]


def adamw(factor: float = 1.0, decay: float = 0.1) -> optax.GradientTransformation:
    return optax.adamw(factor * 3e-2, b1=0.9, b2=0.95, eps=1e-6, weight_decay=decay)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_groups_have_their_own_rate_and_decay_and_frozen_ones_stay(stage):
    case = CASES["keyword arguments"]
    kinds = {"head": adamw(0.25, 0.0), "rest": adamw()}
    expected = plain(
        case,
        4,
        optax.multi_transform(
            kinds, lambda tree: {p: "head" if p.startswith("head") else "rest" for p in tree}
        ),
        frozen=lambda path: path.startswith("blocks/0/"),
    )
    section = {"type": "AdamW", "params": ADAMW, "groups": GROUPS}
    ours = run(case, stage, 4, None, optimizer_section=section)
    assert_losses_equal(ours, expected, 1e-5)
    assert whole_difference(case, ours, expected) <= 1e-4
    still = {path for path, moved in updates(ours).items() if not moved.any()}
    assert still == {path for path in ours.first if path.startswith("blocks/0/")}


@pytest.mark.parametrize("stage", covering([0, 3], [3]))
def test_the_average_follows_its_formula(stage):
    """a_t = d a_{t-1} + (1 - d) theta_t, a_0 = theta_0."""
    expected = plain(TIED, 1, adamw(), ema_decay=0.7, steps=STEPS)
    section = {"type": "AdamW", "params": ADAMW, "ema_decay": 0.7}
    ours = run(TIED, stage, 1, None, steps=STEPS, optimizer_section=section)
    average = ours.engine.state.ema
    assert average.keys() == expected.ema.keys()
    for path, value in expected.ema.items():
        logical = np.asarray(average[path])[tuple(map(slice, value.shape))]
        moved = norm({path: value - expected.first[path]})
        assert norm({path: logical - value}) <= 1e-5 * moved, path


class Adapter(nnx.Param):
    """The trained part of an adapted model."""


class AdaptedBlock(awkward.Block):
    """A frozen block with a low-rank adapter beside it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.a = Adapter(jax.random.normal(rngs.params(), (awkward.WIDTH, 2)) / 4)
        self.b = Adapter(jax.random.normal(rngs.params(), (2, awkward.WIDTH)) / 4)

    def __call__(self, x):
        return super().__call__(x) + x @ self.a[...] @ self.b[...]


class Adapted(awkward.Plain):
    block = AdaptedBlock


CHOICES = [
    pytest.param(Adapter, 0, marks=pytest.mark.full),
    pytest.param(["a", "b"], 1, marks=pytest.mark.full),
    pytest.param(["a", "b"], 2, marks=pytest.mark.full),
    (Adapter, 3),
]


@pytest.mark.parametrize(("trainable", "stage"), CHOICES)
def test_only_what_is_chosen_is_trained(trainable, stage):
    case = regression(Adapted, weighted_error, rates=(1e-2, 0.03))
    expected = plain(
        case, 4, "sgd", frozen=lambda path: path.split("/")[-1] not in ("a", "b"), steps=STEPS
    )
    ours = run(case, stage, 4, "sgd", trainable=trainable, steps=STEPS)
    assert_losses_equal(ours, expected, 1e-5)
    a, b = updates(ours), updates(expected)
    for path in a:
        chosen = path.split("/")[-1] in ("a", "b")
        assert a[path].any() == b[path].any() == chosen
        if chosen:
            assert norm({path: a[path] - b[path]}) <= 1e-5 * norm({path: b[path]}), path
    moments = [x for x in jax.tree.leaves(ours.engine.state.opt) if x.ndim]
    assert len(moments) == 2 * awkward.DEPTH  # none for what is frozen


def test_metrics_are_averaged_as_the_loss_is():
    """A metric of each micro-batch, weighted as its loss."""

    def with_metrics(model, batch):
        total, weight = weighted_error(model, batch)
        return total, weight, {"first": batch["x"][0, 0], "count": jnp.float32(len(batch["x"]))}

    case = CASES["pair"]
    metered = type(case)(case.model, with_metrics, vectors, case.plain)
    batch = metered.batches(4)[0]
    metrics = run(metered, 2, 4, "sgd", steps=1).engine.train_batch(batch)
    parts = [
        jax.tree.map(lambda x, i=i: reference.slice_of_each_rank(x, i, 4, 8), batch)
        for i in range(4)
    ]
    weights = [part["weight"].sum() for part in parts]
    first = sum(w * part["x"][0, 0] for w, part in zip(weights, parts)) / sum(weights)
    np.testing.assert_allclose(metrics["first"], first, rtol=1e-5)
    assert float(metrics["count"]) == len(parts[0]["x"])
    assert float(metrics["weight"]) == sum(weights)
