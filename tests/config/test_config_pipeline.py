"""Keys of pipeline parallelism, and the micro-batches that fill its stages."""

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxspeed.axes import AXES
from jaxspeed.config import Batch, Config, explain_config, load_config
from jaxspeed.errors import ConfigError

pytestmark = pytest.mark.fast

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"

STAGES = st.integers(2, 6)
SCHEDULE = st.sampled_from(["1f1b", "gpipe", "interleaved"])


@st.composite
def asked(draw):
    """Batch sizes of a config, valid or nearly so, and the number of data ranks."""
    ranks, micro = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    accumulation = draw(st.integers(1, 24))
    off_by = draw(st.sampled_from([0, 0, 0, 0, 1, ranks, micro * ranks]))
    all_said = {
        TRAIN: micro * accumulation * ranks + off_by,
        MICRO: micro,
        ACCUMULATION: accumulation,
    }
    keys = draw(
        st.sampled_from(
            [
                (TRAIN,),
                (MICRO,),
                (TRAIN, MICRO),
                (TRAIN, ACCUMULATION),
                (MICRO, ACCUMULATION),
                tuple(all_said),
            ]
        )
    )
    return {key: all_said[key] for key in keys}, ranks


def piped(stages, schedule="1f1b", **said):
    return {"mesh": {"pipe": stages}, "parallel": {"pipeline_schedule": schedule}, **said}


def passes(micro_batches, stages, schedule):
    """Whether so many micro-batches can pass the stages."""
    rest = micro_batches % stages if schedule == "interleaved" else 0
    return micro_batches >= stages and rest == 0


# The batch.


@given(asked(), STAGES, SCHEDULE)
def test_a_pipelines_batch_keeps_what_was_said_and_fills_the_stages(asked, stages, schedule):
    said, ranks = asked
    try:
        batch = Config.load(piped(stages, schedule, **said)).batch(ranks)
    except ConfigError:
        return
    assert batch.train == batch.micro * batch.accumulation * ranks
    assert passes(batch.accumulation, stages, schedule)
    found = {TRAIN: batch.train, MICRO: batch.micro, ACCUMULATION: batch.accumulation}
    assert said.items() <= found.items()


@given(asked(), STAGES, SCHEDULE)
def test_what_is_right_with_one_stage_fails_only_for_want_of_micro_batches(asked, stages, schedule):
    said, ranks = asked
    try:
        alone = Config(**said).batch(ranks)
    except ConfigError:
        with pytest.raises(ConfigError):
            Config.load(piped(stages, schedule, **said)).batch(ranks)
        return
    if ACCUMULATION in said or (TRAIN in said and MICRO in said):
        possible = passes(alone.accumulation, stages, schedule)
    elif MICRO in said:
        possible = True
    else:
        possible = any(
            alone.micro % number == 0 and passes(number, stages, schedule)
            for number in range(1, 4 * stages + 1)
        )
    try:
        Config.load(piped(stages, schedule, **said)).batch(ranks)
    except ConfigError:
        assert not possible
    else:
        assert possible


@given(train=st.integers(1, 400), ranks=st.integers(1, 8), stages=STAGES)
def test_of_a_train_batch_alone_a_pipeline_makes_up_to_four_micro_batches_a_stage(
    train, ranks, stages
):
    assume(train % ranks == 0)
    samples = train // ranks
    numbers = [n for n in range(stages, 4 * stages + 1) if samples % n == 0]
    rounds = [n for n in numbers if n % stages == 0]
    assume(numbers)
    batch = Config.load(piped(stages, train_batch_size=train)).batch(ranks)
    assert batch.accumulation == max(rounds or numbers)


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        ({TRAIN: 64}, Batch(64, 2, 16)),
        ({TRAIN: 16}, Batch(16, 1, 8)),
        ({TRAIN: 18}, Batch(18, 1, 9)),
        ({TRAIN: 20}, Batch(20, 1, 10)),
        ({MICRO: 3}, Batch(96, 3, 16)),
        ({TRAIN: 48, MICRO: 6}, Batch(48, 6, 4)),
        ({TRAIN: 48, ACCUMULATION: 6}, Batch(48, 4, 6)),
        ({MICRO: 3, ACCUMULATION: 5}, Batch(30, 3, 5)),
    ],
)
def test_four_stages_over_two_data_ranks(said, batch):
    assert Config.load(piped(4, **said)).batch(2) == batch


def proposals(error):
    """Each change that an error says would work, as the dicts of keys that make it."""
    for proposal in str(error).partition("Would work: ")[2].rstrip(".").split("; "):
        if proposal == 'parallel.pipeline_schedule "1f1b"':
            yield {"parallel": {}}
            continue
        *fixed, last = proposal.split(" with ")
        both = dict(part.split(" ") for part in fixed)
        key, values = re.fullmatch(r"(.+?) (\d.*)", last).groups()
        for value in values.split(" or "):
            yield {name: int(size) for name, size in (both | {key: value}).items()}


@settings(max_examples=400)
@given(asked(), STAGES, SCHEDULE)
def test_every_change_that_an_error_proposes_works(asked, stages, schedule):
    said, ranks = asked
    tree = piped(stages, schedule, **said) | {"data_parallel_size": ranks}
    try:
        Config.load(tree)
    except ConfigError as error:
        changes = list(proposals(error))
        assert changes
        for change in changes:
            ranks_now = change.pop("data-parallel size", ranks)
            assert Config.load(tree | change | {"data_parallel_size": ranks_now}).batch(ranks_now)


@settings(deadline=None)
@given(asked(), STAGES, SCHEDULE)
def test_load_refuses_exactly_what_no_number_of_data_ranks_repairs(asked, stages, schedule):
    said, _ = asked
    tree = piped(stages, schedule, **said)

    def works(ranks):
        try:
            return Config.load(tree | {"data_parallel_size": ranks}).batch(ranks)
        except ConfigError:
            return None

    some = any(works(ranks) for ranks in range(1, said.get(TRAIN, 1) + 1))
    try:
        Config.load(tree)
    except ConfigError:
        assert not some
    else:
        assert some


BAD_BATCHES = {
    "a train batch of too few samples": (
        piped(4, train_batch_size=6),
        "train_batch_size 6 = train_micro_batch_size_per_gpu ? x gradient_accumulation_steps ? "
        "x data-parallel size 2, which no 4 to 16 equal micro-batches divide. "
        "Needs at least 4. Would work: train_batch_size 8.",
    ),
    "accumulation that was said": (
        piped(4, train_batch_size=32, gradient_accumulation_steps=2),
        "found 2 micro-batches for 4 pipeline stages, by train_batch_size 32 = "
        "train_micro_batch_size_per_gpu ? x gradient_accumulation_steps 2 x data-parallel size 2. "
        "Needs at least 4. Would work: gradient_accumulation_steps 4.",
    ),
    "accumulation that is implied": (
        piped(4, train_batch_size=16, train_micro_batch_size_per_gpu=8),
        "found 1 micro-batch for 4 pipeline stages, by train_batch_size 16 = "
        "train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps ? x data-parallel size 2. "
        "Needs at least 4. Would work: train_micro_batch_size_per_gpu 2; train_batch_size 64.",
    ),
    "a triple": (
        piped(
            2, train_batch_size=8, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1
        ),
        "Would work: gradient_accumulation_steps 2 with train_micro_batch_size_per_gpu 2; "
        "gradient_accumulation_steps 2 with train_batch_size 16.",
    ),
    "the nearest number that divides": (
        piped(2, "interleaved", train_batch_size=40, gradient_accumulation_steps=5),
        "Would work: gradient_accumulation_steps 4; parallel",
    ),
    "chunks that do not come round": (
        piped(
            4, "interleaved", train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=6
        ),
        "found 6 micro-batches for 4 pipeline stages, by train_batch_size ? = "
        "train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 6 x data-parallel size 2. "
        "Needs a multiple of 4, to interleave. Would work: gradient_accumulation_steps 4 or 8; "
        'parallel.pipeline_schedule "1f1b".',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_too_few_micro_batches_are_told_the_numbers_that_would_do(name):
    tree, message = BAD_BATCHES[name]
    with pytest.raises(ConfigError) as caught:
        Config.load(tree | {"data_parallel_size": 2})
    assert str(caught.value).startswith("1 problem in the config:")
    assert message in str(caught.value)


def test_stages_that_the_devices_tell_are_passed_to_the_batch():
    config = Config.load({"mesh": {"pipe": -1}, TRAIN: 32, ACCUMULATION: 2})
    assert config.batch(1, pipe=2) == Batch(32, 16, 2)
    with pytest.raises(ConfigError, match="2 micro-batches for 4 pipeline stages"):
        config.batch(1, pipe=4)
    with pytest.raises(ConfigError, match="pass it as `pipe`"):
        config.batch(1)


def elastic(stages, schedule="1f1b"):
    section = {"enabled": True, "max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7]}
    return Config.load(piped(stages, schedule, elasticity=section))


def test_an_elastic_batch_takes_the_largest_micro_batches_that_fill_the_stages():
    assert elastic(1).batch(4) == Batch(24, 3, 2)
    assert elastic(2).batch(4) == Batch(24, 3, 2)
    assert elastic(3).batch(4) == Batch(24, 2, 3)
    assert elastic(4, "interleaved").batch(2) == Batch(24, 3, 4)
    assert elastic(4, "interleaved").batch(1) == Batch(24, 3, 8)


def test_an_elastic_batch_that_cannot_fill_the_stages_says_what_its_sizes_make():
    with pytest.raises(ConfigError, match=r"2 or 3 or 6 micro-batches for 7 .* at least 7"):
        elastic(7).batch(4)


# The keys.


@pytest.mark.parametrize(
    ("tree", "axes"),
    [
        ({"pipeline": {"stages": 4}}, {"data": -1, "pipe": 4}),
        ({"pipeline": {"stages": 4}, "mesh": {"pipe": 4}}, {"data": -1, "pipe": 4}),
        ({"pipeline": {"stages": 4}, "mesh": {"pipe": -1, "data": 2}}, {"data": 2, "pipe": 4}),
        ({"pipeline": {"stages": "auto"}, "mesh": {"pipe": 2}}, {"data": -1, "pipe": 2}),
        ({"mesh": {"pipe": -1}}, {"pipe": -1}),
        ({"mesh": {"pipe": 2, "tensor": 2}}, {"data": -1, "pipe": 2, "tensor": 2}),
    ],
)
def test_the_stages_are_an_axis_of_the_mesh(tree, axes):
    mesh = load_config(tree).mesh
    assert {axis: getattr(mesh, axis) for axis in AXES if getattr(mesh, axis) != 1} == axes


def test_the_defaults_are_1f1b_with_the_stage_recomputed_and_gathers_in_each_tick():
    parallel = Config().parallel
    assert (parallel.pipeline_schedule, parallel.pipeline_chunks) == ("1f1b", 2)
    assert (parallel.pipeline_recompute, parallel.pipeline_gather) == ("stage", "tick")


@pytest.mark.parametrize(
    ("said", "interval", "recompute"),
    [
        (None, 0, "stage"),
        (None, 1, "layers"),
        (None, 3, "layers"),
        ("layers", 0, "layers"),
        ("layers", 2, "layers"),
        ("save", 0, "save"),
        ("stage", 0, "stage"),
    ],
)
def test_both_words_for_recomputation_come_to_one(said, interval, recompute):
    tree = {"pipeline": {"activation_checkpoint_interval": interval}}
    tree["parallel"] = {} if said is None else {"pipeline_recompute": said}
    config = load_config(tree)
    assert config.pipeline_recompute == config.parallel.pipeline_recompute == recompute
    dumped = json.loads(config.model_dump_json())
    assert load_config(dumped).pipeline_recompute == recompute


KEYS = {
    "parallel.pipeline_schedule": "interleaved",
    "parallel.pipeline_chunks": 3,
    "parallel.pipeline_recompute": "layers",
    "parallel.pipeline_gather": "step",
    "pipeline.partition": "parameters",
    "pipeline.activation_checkpoint_interval": 2,
    "pipeline.pipe_partitioned": True,
    "pipeline.grad_partitioned": False,
}
APPROXIMATED = {path for path in KEYS if path.startswith("pipeline.")}


def all_words(**more):
    tree = {"parallel": {}, "pipeline": {}, "zero_optimization": {"stage": 3}, **more}
    for path, value in KEYS.items():
        section, key = path.split(".")
        tree[section][key] = value
    return tree


def verdicts(tree):
    return {row.key: row for row in explain_config(tree) if row.key in KEYS}


def test_keys_of_stages_are_ignored_while_there_is_one():
    rows = verdicts(all_words())
    assert {row.verdict for row in rows.values()} == {"harmless"}
    assert {row.sentence for row in rows.values()} == {"Ignored while mesh.pipe is 1."}
    assert rows.keys() == KEYS.keys()


@pytest.mark.parametrize("size", [2, -1])
def test_words_for_the_stages_say_something_where_there_are_more(size):
    rows = verdicts(all_words(mesh={"pipe": size}))
    for path, row in rows.items():
        assert row.verdict == ("approximated" if path in APPROXIMATED else "honoured"), path


def test_chunks_count_with_the_interleaved_schedule_alone():
    rows = verdicts(piped(2) | {"parallel": {"pipeline_chunks": 2}})
    assert rows["parallel.pipeline_chunks"].verdict == "harmless"
    assert 'pipeline_schedule is "1f1b"' in rows["parallel.pipeline_chunks"].sentence


def test_pipeline_gather_is_ignored_without_zero_3():
    tree = piped(2) | {"parallel": {"pipeline_gather": "step"}, "zero_optimization": {"stage": 2}}
    row = verdicts(tree)["parallel.pipeline_gather"]
    assert (row.verdict, row.sentence) == (
        "harmless",
        "Ignored while zero_optimization.stage is 2.",
    )


@pytest.mark.parametrize(
    "word", ["best", "uniform", "Parameters", "flops", "type:TransformerLayer", "type:a|B"]
)
def test_every_even_partition_gives_the_same_stages(word):
    tree = piped(2) | {"pipeline": {"partition": word}}
    row = verdicts(tree)["pipeline.partition"]
    assert row.verdict == "approximated"
    assert "same stages" in row.sentence
    kept = load_config(tree).pipeline.partition
    assert kept == (word if word.startswith("type:") else word.lower())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("reduction", ["auto", "micro_batch"])
def test_stages_compose_with_every_zero_stage(stage, reduction):
    tree = piped(2, "interleaved", zero_optimization={"stage": stage}, train_batch_size=16)
    tree["mesh"]["tensor"] = 2
    tree["parallel"]["gradient_reduction"] = reduction
    assert load_config(tree).batch(2).accumulation == 8
