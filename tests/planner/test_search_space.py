"""The space of a search: every choice is a valid config with the user's batch."""

import math
import random
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.config import Config
from jaxspeed.hardware.targets import target_of
from jaxspeed.planner.compile.workers import Inline
from jaxspeed.planner.search.candidate import choice_of, keys_of, with_keys
from jaxspeed.planner.search.space import FAST
from jaxspeed.planner.search_run import Job, SearchProblem, search_problem, search_run, search_space
from jaxspeed.run import source_of
from tests.engine import tiny
from tests.moe.dense_experts import DenseMixture, batches, config, loss_fn
from tests.planner.choices import space_of
from tests.support.covering import examples

BATCHES = st.sampled_from(
    [
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        {"train_batch_size": 64},
        {"train_batch_size": 64, "gradient_accumulation_steps": 8},
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 1},
    ]
)
# Words that say what the search changes, each in another way.
ALIASES = st.lists(
    st.sampled_from(
        [
            ("zero_optimization", {"stage": 3}),
            ("zero_optimization", {"stage": 2, "cpu_offload": True}),
            ("zero_optimization", {"stage": 1, "mics_shard_size": 2}),
            ("zero_optimization", {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
            ("tensor_parallel", {"autotp_size": 2}),
            ("pipeline", {"stages": 2}),
            ("pipeline", {"stages": 2, "activation_checkpoint_interval": 1}),
            ("parallel", {"remat": {"every_n": 2}}),
            ("parallel", {"remat": {"budget": "1 GB"}}),
            ("parallel", {"gradient_reduction": "step"}),
            ("parallel", {"sequence_parallel_activations": True, "tensor_overlap": "ring"}),
            ("parallel", {"pipeline_schedule": "interleaved"}),
            ("activation_checkpointing", {"cpu_checkpointing": True}),
            (
                "activation_checkpointing",
                {"cpu_checkpointing": True, "cpu_checkpointing_ratio": 0.3},
            ),
            ("activation_checkpointing", {"number_checkpoints": 2, "partition_activations": True}),
            ("mesh", {"tensor": 2, "data": 2, "replica": -1}),
            ("mesh", {"pipe": -1, "data": 4}),
            ("data_parallel_size", 4),
        ]
    ),
    max_size=3,
)


def is_valid(written):
    try:
        config = Config.load(written)
        choice = choice_of(config, 8)
        config.batch(choice.ranks, choice.pipe)
    except Exception:
        return False
    return True


@settings(max_examples=examples(15, 40), deadline=None)
@given(BATCHES, ALIASES, st.randoms(use_true_random=False))
def test_every_choice_is_a_valid_config_with_the_same_batch(batch, words, chance):
    written = {**batch, **dict(words)}
    if not is_valid(written):
        return
    space = space_of(written, 8)
    choice = choice_of(Config.load(written), 8)
    assert space.base == choice
    for _ in range(10):  # steps from it
        choice = chance.choice(space.near(choice))
        assert space.is_in(choice)
        made = Config.load(with_keys(written, keys_of(written, space.base, choice, space.samples)))
        assert choice_of(made, 8) == choice
        solved = made.batch(choice.ranks, choice.pipe)
        assert (solved.train, solved.micro) == (space.samples, choice.micro)


PLAIN = {"train_batch_size": 64}


def test_activations_that_are_no_longer_offloaded_are_still_recomputed():
    """`cpu_checkpointing` alone implies `full`, which must stay without it."""
    written = {**PLAIN, "activation_checkpointing": {"cpu_checkpointing": True}}
    space = space_of(written, 8)
    stays = replace(space.base, offload_activations=0.0)
    words = keys_of(written, space.base, stays, space.samples)
    assert choice_of(Config.load(with_keys(written, words)), 8) == stays


def test_the_unchanged_config_needs_no_keys():
    space = space_of(PLAIN, 8)
    assert keys_of(PLAIN, space.base, space.base, space.samples) == {}


def test_a_choice_is_near_to_what_it_is_near_to_and_all_are_reached():
    """So that a walk can get from any choice to any other."""
    space = space_of(
        PLAIN,
        4,
        layers=4,
        tensor=(1, 2),
        changing=frozenset({"mesh", "stage", "micro"}),
    )
    seen, edge = {space.base}, [space.base]
    while edge:
        edge = [c for at in edge for c in space.single(at) if c not in seen]
        seen.update(edge)
    choices = list(space.all())
    assert choices[0] == space.base and len(choices) == len(set(choices)) > 50
    assert seen == set(choices)


@pytest.mark.default_cases("3")
@pytest.mark.parametrize("seed", range(4))
def test_neighbours_are_choices_and_singles_among_them(seed):
    space = space_of(PLAIN, 8)
    at = random.Random(seed).choice(list(space.all()))
    near, single = space.near(at), space.single(at)
    assert at not in near and set(single) <= set(near)
    assert all(map(space.is_in, near))


def test_only_meshes_that_model_and_target_can_hold_are_choices():
    space = space_of(PLAIN, 8, layers=6, tensor=(1, 2), holds=lambda mesh: mesh[0] != 2)
    found = {choice.mesh for choice in space.all()}
    assert all(6 % pipe == 0 and tensor in (1, 2) for pipe, *_, tensor in found)
    assert not any(pipe == 2 for pipe, *_ in found)
    assert all(math.prod(mesh) == 8 for mesh in found)
    assert all(mesh[3:5] == (1, 1) for mesh in found)  # sequences are not sharded; no experts
    assert (1, 1, 8, 1, 1, 1) in found and (1, 1, 4, 1, 1, 2) in found


def test_a_search_keeps_the_axis_of_sequences():
    space = space_of(PLAIN | {"mesh": {"seq": 4}}, 16, layers=6, tensor=(1, 2))
    found = [choice.sizes for choice in space.all()]
    assert len({*map(str, found)}) > 3
    assert all(sizes["seq"] == 4 and math.prod(sizes.values()) == 16 for sizes in found)


def test_the_expert_axis_divides_the_models_experts():
    space = space_of(PLAIN, 8, layers=6, tensor=(1, 2), degrees={"expert": (1, 2, 6)})
    meshes = [choice.sizes for choice in space.all()]
    assert {sizes["expert"] for sizes in meshes} == {1, 2}  # 8 devices are no multiple of 6
    assert {"pipe": 2, "replica": 1, "data": 2, "seq": 1, "expert": 2, "tensor": 1} in meshes


def test_the_degrees_are_those_of_the_models_experts():
    given = {**config(0), "train_batch_size": 64, "mesh": {"expert": 1}}
    source = source_of(given, DenseMixture, loss_fn)
    shapes = {
        name: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype) for name, x in batches()[0].items()
    }
    program, _ = Job(source, shapes)(None)
    target = target_of("h100:8")
    space = search_space(search_problem(source, program, shapes, target), program)
    assert space.degrees == {"expert": (1, 2, 4), "seq": (1,)}  # of 4 experts


def test_without_a_stack_there_are_no_stages():
    assert {choice.pipe for choice in space_of(PLAIN, 8, layers=0).all()} <= {1}


def test_fast_mode_changes_the_stage_and_the_micro_batch_alone():
    space = space_of(PLAIN, 8, changing=FAST)
    assert {choice.mesh for choice in space.all()} == {space.base.mesh}
    assert {(c.stage, c.micro) for c in space.all()} == {
        (stage, micro) for stage in range(4) for micro in (1, 2, 4, 8)
    }
    assert len(list(space.all())) == 16


def test_micro_batches_are_within_their_bounds():
    found = {c.micro for c in space_of(PLAIN, 8, micro=(2, 4), changing=FAST).all()}
    assert found == {2, 4, 8}  # 8 is what the config has


def test_without_host_memory_nothing_is_offloaded():
    choices = space_of(PLAIN, 8, offload=False).all()
    assert not any(
        c.offload_optimizer or c.offload_parameters or c.offload_activations for c in choices
    )


# -- the section `autotuning` ---------------------------------------------------------------------


def asked(**tuning):
    """A search of 64 samples on 8 GPUs with this section."""
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    source = source_of(tiny.config(autotuning=tuning, **batch), tiny.PAIR, tiny.squared_error)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.batch(64))
    program, _ = Job(source, shapes)(None)
    return source, program, shapes, target_of("h100:8")


def space_within(**tuning):
    source, program, shapes, target = asked(**tuning)
    return list(search_space(search_problem(source, program, shapes, target), program).all())


def test_the_section_bounds_the_choices():
    assert {choice.micro for choice in space_within(enabled=False)} == {1, 2, 4, 8}
    low = space_within(enabled=True, min_train_micro_batch_size_per_gpu=4)
    assert {choice.micro for choice in low} == {4, 8}
    high = space_within(enabled=True, max_train_micro_batch_size_per_gpu=4)
    assert {choice.micro for choice in high} == {1, 2, 4}
    assert len({choice.offload_optimizer for choice in low}) == 2
    fast = space_within(enabled=True, fast=True)
    assert len({choice.offload_optimizer for choice in fast}) == 1
    assert {choice.tensor for choice in space_within(enabled=True, mp_size=2)} == {1, 2}
    assert {choice.tensor for choice in low} == {1}


def test_so_many_candidates_are_estimated(monkeypatch):
    first, real = [], SearchProblem.estimate

    def estimate(problem, choice):
        """The first one's for all, which is quicker."""
        return first[0] if first else first.append(real(problem, choice)) or first[0]

    monkeypatch.setattr(SearchProblem, "estimate", estimate)
    monkeypatch.setattr("jaxspeed.planner.search_run._pool", lambda given: Inline(given.estimate))
    few = {"enabled": True, "fast": True, "tuner_num_trials": 3}
    source, program, shapes, target = asked(**few)
    found = search_run(source, program, shapes, target, seconds=60, patience=1)
    assert len(found.candidates) == 3 < found.considered


def test_sizes_of_the_axis_of_sequences_are_searched_where_they_are_degrees():
    space = space_of(PLAIN, 8, layers=6, tensor=(1, 2), degrees={"seq": (1, 2, 8, 16)})
    found = {choice.mesh: choice.sizes for choice in space.all()}.values()
    assert {sizes["seq"] for sizes in found} == {1, 2, 8}
    assert all(math.prod(sizes.values()) == 8 for sizes in found)
    assert any(sizes["seq"] == 2 == sizes["tensor"] for sizes in found)
