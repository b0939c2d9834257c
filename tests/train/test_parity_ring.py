"""Ten steps around rings are ten steps with XLA's collectives, and with plain JAX.

The reference is one device without jaxspeed. What a rank draws by itself is compared with it too:
its micro-batches are then the ranks' parts, which have the same numbers.
"""

import functools
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.errors import ModelError
from tests.support.collective_order import unordered_collectives
from tests.support.covering import covering
from tests.train.cases import CASES, RANKS, Case
from tests.train.parity import (
    assert_cut_as_the_stage_says,
    assert_loss_fell,
    assert_losses_equal,
    leaf_differences,
    plain,
    plain_of,
    run,
    whole_difference,
)

PAIR, GPT2 = CASES["pair"], CASES["gpt2"]
FULL = pytest.mark.full
SHORT = [("pair", 0, 4), ("pair", 3, 4)]  # others below are of stages 1 and 2


def around(name, stage, accumulation=1, **more):
    """A run around rings; `parallel` may say more of them."""
    parallel = {"data_reduction": "ring", **more.pop("parallel", {})}
    return run(CASES[name], stage, accumulation, parallel=parallel, **more)


@functools.lru_cache
def by_xla(name, accumulation):
    return run(CASES[name], 0, accumulation)


@pytest.mark.default_cases("pair-0-4")
@pytest.mark.parametrize(
    ("name", "stage", "accumulation"),
    [
        *SHORT,
        *(
            pytest.param(name, stage, accumulation, marks=FULL)
            for name in ("pair", "gpt2", "llama")
            for stage in range(4)
            for accumulation in (1, 4)
            if (name, stage, accumulation) not in SHORT
        ),
    ],
)
def test_ten_steps_equal_xlas_to_rounding(name, stage, accumulation):
    """Samples weigh differently, and of some ranks and micro-batches not at all."""
    case, ours, theirs = CASES[name], around(name, stage, accumulation), by_xla(name, accumulation)
    assert len(ours.losses) == 10
    assert_losses_equal(ours, theirs, 1e-5)
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-5)
    assert whole_difference(case, ours, theirs) <= 1e-5
    apart = leaf_differences(case, ours, theirs)
    assert max(d for path, d in apart.items() if case.has_gradient(path)) <= 1e-5
    assert_cut_as_the_stage_says(ours, plain_of(name, accumulation, "adam"), stage)
    assert_loss_fell(ours)


class Towers(nn.Module):
    """Loops over layers that do not depend on each other, two of them rematerialized at once."""

    @nn.compact
    def __call__(self, tokens):
        def tower(name, around):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            stack = around(nn.scan(Layer, length=2, **axes))(name=name)
            x = nn.Embed(32, 16, name=f"{name}_tokens")(tokens)
            return stack(nn.Dense(16, name=f"{name}_in")(x), None)[0]

        once = [tower(name, lambda stack: stack) for name in ("first", "second")]
        again = [tower(name, nn.remat) for name in ("third", "fourth")]
        return [nn.Dense(8)(nn.LayerNorm()(x)) for x in (*once, *again)]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(nn.LayerNorm()(x)))), None


def tower_tokens(rng, samples):
    return rng.integers(0, 32, (samples, 8), np.int32)


TOWERS = Case(
    Towers(), lambda model, x: sum(jnp.square(y).mean() for y in model(x)), tower_tokens, Towers
)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("case", "stage", "accumulation", "more"),
    [
        (GPT2, 3, 4, {}),
        (TOWERS, 3, 1, {}),
        *(
            pytest.param(*point, marks=FULL)
            for point in [
                (TOWERS, 3, 4, {}),
                (GPT2, 3, 1, {}),
                (CASES["llama"], 3, 4, {}),
                (PAIR, 3, 4, {}),
                (PAIR, 2, 4, {}),
                (GPT2, 3, 4, {"mesh": {"replica": 2, "data": 4}}),
                (GPT2, 3, 4, {"mesh": {"data": 4, "tensor": 2}}),
                (GPT2, 3, 4, {"parallel": {"ring_wire": "bf16", "ring_directions": "one"}}),
                (GPT2, 3, 4, {"parallel": {"ring_bucket_bytes": 1024}}),
                (GPT2, 3, 1, {"parallel": {"remat": {"every_n": 2}}}),
                (CASES["llama"], 3, 4, {"parallel": {"remat": "full"}}),
            ]
        ),
    ],
)
def test_data_orders_the_rings_of_a_step(case, stage, accumulation, more):
    """Or a step that was loaded would mix their messages."""
    more["parallel"] = {"data_reduction": "ring", **more.get("parallel", {})}
    batch = case.batches(accumulation, steps=1)[0]
    case = replace(case, example=batch)
    engine = run(case, stage, accumulation, steps=0, **more).engine
    text = engine.program.step.lower(engine.state, batch).compile().as_text()
    assert "collective-permute" in text
    assert not unordered_collectives(text)


@pytest.mark.sampled
def test_a_step_from_the_compilation_cache_is_the_one_that_was_compiled():
    for _ in ("compiled, unless it is in the cache already", "loaded"):
        jax.clear_caches()
        ours = around("gpt2", 3, 4)
        assert_losses_equal(ours, plain_of("gpt2", 4, "adam"), 1e-5)
        assert whole_difference(GPT2, ours, plain_of("gpt2", 4, "adam")) <= 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "accumulation", "mesh"),
    [
        pytest.param(1, 1, {"replica": 2}, marks=FULL),
        pytest.param(0, 4, {"replica": 4}, marks=FULL),
        pytest.param(2, 4, {"replica": 2}, marks=FULL),
        (3, 4, {"replica": 2}),
        pytest.param(2, 1, {"replica": -1, "data": 1}, marks=FULL),
    ],
)
def test_rings_across_nodes_train_alike(stage, accumulation, mesh):
    ours = around("pair", stage, accumulation, mesh=mesh)
    assert_losses_equal(ours, plain_of("pair", accumulation, "adam"), 1e-5)
    assert whole_difference(PAIR, ours, plain_of("pair", accumulation, "adam")) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_tensor_cuts_goes_round_in_rings_of_its_own(stage):
    ours = around("gpt2", stage, mesh={"tensor": 2}, train_batch_size=16)
    theirs = run(GPT2, 0, mesh={"tensor": 2}, train_batch_size=16)
    assert_losses_equal(ours, theirs, 1e-5)
    assert whole_difference(GPT2, ours, theirs) <= 1e-5


@pytest.mark.parametrize("stage", [0, *(pytest.param(s, marks=FULL) for s in (2, 3))])
def test_clipping_is_by_the_norm_of_the_sum(stage):
    reference = plain(PAIR, 4, "sgd", clipping=0.3, steps=4)
    assert min(reference.norms) > 0.5
    ours = around("pair", stage, 4, optimizer="sgd", steps=4, gradient_clipping=0.3)
    assert_losses_equal(ours, reference, 1e-5)
    assert whole_difference(PAIR, ours, reference) <= 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "wire"), covering([(1, "int8"), (3, "none"), (0, "bf16")], [(1, "int8")])
)
def test_a_step_that_overflows_is_skipped_by_all_ranks(stage, wire):
    """What is sent is not finite then, packed or not, and nothing of it is kept as an error.

    Each rank's own mean gradient is what must not overflow, and it may be larger than the mean of
    all: so the scale may have to come down further than XLA's.
    """
    fp16 = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}
    ours = around("pair", stage, optimizer="sgd", fp16=fp16, parallel={"ring_wire": wire})
    skipped = int(ours.engine.state.skipped)
    assert 0 < skipped < 8
    assert float(ours.engine.state.loss_scale.scale) == 2.0 ** (19 - skipped)
    assert all(np.isfinite(x).all() for x in ours.last.values())
    assert any((ours.last[path] != ours.first[path]).any() for path in ours.last)
    errors = jax.tree.leaves(ours.engine.state.ring_errors)
    assert bool(errors) == (wire == "int8")
    assert all(np.isfinite(x).all() for x in errors)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=FULL)])
def test_each_rank_draws_random_numbers_of_its_own(stage):
    """Those of micro-batch r, where one device takes the ranks' parts as its micro-batches."""
    case = CASES["dropout"]
    reference = plain(case, RANKS, "adam", ranks=1)
    ours = run_with_batches_of(case, RANKS, stage)
    assert_losses_equal(ours, reference, 1e-5)
    assert whole_difference(case, ours, reference) <= 1e-5


def run_with_batches_of(case, accumulation, stage):
    """Around rings, each step one micro-batch of as many samples as `accumulation` have."""
    name = next(name for name, other in CASES.items() if other is case)
    return around(name, stage, accumulation, gradient_accumulation_steps=1)


@pytest.mark.parametrize("name", ["batch statistics", pytest.param("linen", marks=FULL)])
def test_statistics_are_refused_because_each_rank_would_have_its_own(name):
    with pytest.raises(ModelError, match="changes variables of the model"):
        around(name, 0, steps=1)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", {"every_n": 2}])
def test_units_that_are_made_again_gather_around_rings_again(remat):
    ours = around("gpt2", 3, parallel={"remat": remat}, steps=4)
    assert_losses_equal(ours, plain(GPT2, 1, "adam", steps=4), 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("directions", [pytest.param("one", marks=FULL), "both"])
def test_two_runs_have_the_same_bits(directions):
    runs = [around("pair", 2, 4, parallel={"ring_directions": directions}, steps=3) for _ in "ab"]
    first, second = (r.last for r in runs)
    assert all((first[path] == second[path]).all() for path in first)


def test_every_device_holds_the_same_bits_of_what_is_whole():
    ours = around("pair", 0, 1, steps=3, parallel={"ring_wire": "bf16"})
    for x in jax.tree.leaves(ours.engine.state.params):
        shards = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(shards) == RANKS
        assert all((shard == shards[0]).all() for shard in shards)


@pytest.mark.sampled
@pytest.mark.parametrize("nbytes", [64, pytest.param(10_000, marks=FULL)])
def test_the_size_of_buckets_changes_nothing(nbytes):
    ours = around("pair", 1, parallel={"ring_bucket_bytes": nbytes}, steps=4)
    assert_losses_equal(ours, plain(PAIR, 1, "adam", steps=4), 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "accumulation"), covering([(2, 1), (3, 4), (0, 4), (1, 4)], [(2, 1)])
)
def test_bf16_trains_as_plain_jax_in_bf16(stage, accumulation):
    """To what N - 1 sums of bf16 may differ by: half a unit in the last place each, at random."""
    unit = 2**-8
    reference = plain(PAIR, accumulation, "sgd", compute_dtype=jnp.bfloat16)
    ours = around("pair", stage, accumulation, optimizer="sgd", bf16={"enabled": True})
    assert whole_difference(PAIR, ours, reference) <= 4 * unit
    assert_losses_equal(ours, reference, 4 * unit)
    assert_loss_fell(ours)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_masters_and_moments_may_wait_in_host_memory(stage):
    waiting = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    zero = {"stage": stage, **waiting}
    adam = {"type": "Adam", "params": {"lr": 1e-2}}
    ours = around(
        "pair", stage, optimizer=None, optimizer_section=adam, steps=4, zero_optimization=zero
    )
    assert_losses_equal(ours, plain(PAIR, 1, "adam", steps=4), 1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", covering([1, 3], [3]))
def test_parameters_that_are_not_trained_stay_as_they_are(stage):
    frozen = "layers/0/*"
    adam = {
        "type": "Adam",
        "params": {"lr": 1e-2},
        "groups": [{"pattern": frozen, "frozen": True}],
    }
    ours = around("pair", stage, optimizer=None, optimizer_section=adam, steps=3)
    theirs = run(PAIR, 0, optimizer=None, optimizer_section=adam, steps=3)
    assert_losses_equal(ours, theirs, 1e-5)
    still = [path for path in ours.last if path.startswith("layers/0/")]
    assert still and all((ours.last[p] == ours.first[p]).all() for p in still)
