"""Prompts as a corpus: records and their columns, tokens, sizes, and what is wrong with files."""

import datetime
import json
import sys
import types
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from jaxspeed.config import Config
from jaxspeed.config.rollout_options import SamplingOptions
from jaxspeed.data import ByteTokenizer, ModelLimits, known_shapes
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.data.model_limits import PromptForm, limits_of_run
from jaxspeed.engine import memory_precheck
from jaxspeed.errors import DataError
from jaxspeed.objectives import Objective
from jaxspeed.objectives.named import NextToken
from jaxspeed.run import opening
from jaxspeed.run.start import Source, in_steps
from tests.data.chat_examples import message, write_lines
from tests.data.corpora import opened
from tests.data.preference_examples import BEGINS, merging_tokenizer

pytestmark = pytest.mark.fast

ARRAYS = ("tokens", "targets", "sampled_logprobs", "advantages", "row_weights")
FORM = PromptForm(ARRAYS, max_completion_length=8, num_generations=4)
TEXTS = [{"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": 2 * i} for i in range(12)]


def start(folder, records, form=FORM, batch_size=None, **data):
    file = write_lines(folder / "a.jsonl", records)
    section = {"source": "jsonl", "path": str(file), "seq_len": 64, "held_out": 0.0, **data}
    return opened(section, prompts=form, seq_len=None, batch_size=batch_size)


def prompts_of(split):
    return split.prompts(np.arange(split.samples))


def test_a_prompt_of_text_has_its_bytes_its_columns_and_its_place(tmp_path):
    prompts = prompts_of(start(tmp_path, TEXTS).train)
    assert [bytes(p.tokens).decode() for p in prompts] == [r["prompt"] for r in TEXTS]
    assert [p.prompt for p in prompts] == [r["prompt"] for r in TEXTS]
    assert [p.columns for p in prompts] == [{"answer": r["answer"]} for r in TEXTS]
    assert prompts[4].where == f"{tmp_path / 'a.jsonl'}, line 5"


def test_a_text_has_the_special_tokens_that_the_tokenizer_adds_before_it(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(merging_tokenizer(BEGINS).to_bytes())
    tokenizer = str(tmp_path / "tokenizer.json")
    (prompt,) = prompts_of(start(tmp_path, [{"prompt": "cab"}], tokenizer=tokenizer).train)
    assert prompt.tokens == (0, 4, 6)


def test_messages_are_rendered_up_to_the_answer_with_tools_and_variables(tmp_path):
    template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.role }}:{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    record = {
        "prompt": [message("system", "s"), message("user", "q")],
        "tools": [{"name": "f"}],
        "chat_template_kwargs": {"mood": "glad"},
        "answer": 1,
    }
    corpus = start(tmp_path, [record], chat_template=template, seq_len=200)
    (prompt,) = prompts_of(corpus.train)
    wanted = '[{"name": "f"}]gladsystem:s;user:q;assistant:'
    assert bytes(prompt.tokens).decode() == wanted
    assert prompt.prompt == record["prompt"]
    assert prompt.columns == {name: record[name] for name in (*record,)[1:]}


def test_a_prompt_in_messages_has_the_tokens_that_a_rollout_gives_it(tmp_path):
    from jaxspeed.generation.messages import encoded_messages

    record = {"prompt": [message("user", "q")]}
    data = {"seq_len": 200, "chat_template": "chatml"}
    (prompt,) = prompts_of(start(tmp_path, [record], **data).train)
    section = Config(data=data).data
    (tokens,), _ = encoded_messages([prompt.prompt], ByteTokenizer(), section)
    assert prompt.tokens == tuple(tokens)


def test_the_order_is_that_of_the_samples(tmp_path):
    train = start(tmp_path, TEXTS, shuffle=True).train
    ids = train.sample_ids(3, 5)
    assert [p.columns["answer"] for p in train.prompts(ids)] == [2 * i for i in ids]
    assert sorted(train.sample_ids(0, 12)) == [*range(12)]


def test_columns_of_any_type_are_those_of_the_source(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [
        {
            "prompt": "a",
            "tests": [{"in": [1, 2], "out": None}, {"in": [], "out": "x"}],
            "meta": {"level": 1.5, "tag": None},
            "messages": None,
            "day": datetime.date(2024, 1, 2),
        },
        {"prompt": "b", "tests": None, "meta": None, "messages": None, "day": None},
    ]
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    module = types.ModuleType("my_prompts")
    module.records = records
    monkeypatch.setitem(sys.modules, "my_prompts", module)
    for section in (
        {"source": "parquet", "path": str(tmp_path / "a.parquet")},
        {"source": "arrow", "path": str(tmp_path / "a.arrow")},
        {"source": "my_prompts:records"},
    ):
        corpus = opened({"held_out": 0.0, **section}, prompts=FORM)
        read = [{"prompt": p.prompt, **p.columns} for p in prompts_of(corpus.train)]
        assert read == records


def test_prompts_that_do_not_fit_are_dropped_and_counted(tmp_path):
    records = [{"prompt": "x" * n} for n in (3, 4, 5, 6)]
    corpus = start(tmp_path, records, seq_len=12)  # with 8 tokens after them
    assert [len(p.tokens) for p in prompts_of(corpus.train)] == [3, 4]
    assert "2 prompts, 7 tokens, 2 dropped (too long)" in corpus.summary
    assert (corpus.conversations.longest, corpus.context) == (6, 12)
    with pytest.raises(DataError, match=r"no prompt fits: the shortest of 4 has 3 .* of 10"):
        start(tmp_path, records, seq_len=10)


# -- batches ------------------------------------------------------------------------------------


def test_a_batch_is_blank_rows_of_the_longest_prompt_with_its_completion(tmp_path):
    corpus = start(tmp_path, [{"prompt": "x" * 9}, {"prompt": "y"}])
    shapes = corpus.train.shapes(8)
    assert {name: (x.shape, x.dtype) for name, x in shapes.items()} == {
        "tokens": ((8, 16), np.int32),  # 9 and 8 tokens, of which the last is only predicted
        "targets": ((8, 16), np.int32),
        "sampled_logprobs": ((8, 16), np.float32),
        "advantages": ((8,), np.float32),
        "row_weights": ((8,), np.float32),
    }
    batch = corpus.train.batch(0, 2)
    assert (batch["targets"] == -100).all() and not batch["row_weights"].any()
    longer = start(tmp_path, [{"prompt": "x" * 10}])
    assert longer.train.shapes(1)["tokens"].shape == (1, 32)
    bounded = start(tmp_path, [{"prompt": "x" * 10}], seq_len=20)
    assert bounded.train.shapes(1)["tokens"].shape == (1, 20)


def test_shapes_are_known_without_the_data():
    limits = ModelLimits("tokens", 48, 512, prompts=FORM)
    shapes = known_shapes(Config().data, limits, 4)
    assert {name: x.shape for name, x in shapes.items()} == {
        name: (4, 48) if name in ARRAYS[:3] else (4,) for name in ARRAYS
    }
    assert known_shapes(Config().data, ModelLimits(prompts=FORM), 4) is None


def test_attention_over_seq_is_examined_with_sequences_shorter_than_a_completion():
    objective = {"type": "grpo", "rewards": ["a:b"], "max_completion_length": 8}
    config = Config(model={"family": "gpt2", "preset": "tiny"}, objective=objective)
    assert memory_precheck._any_shapes(config, 2)["tokens"].shape == (1, 4)


def test_mixtures_share_columns_and_a_length(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", TEXTS)
    second = write_lines(tmp_path / "b.jsonl", [{"prompt": "z" * 30, "key": [1]}] * 4)
    parts = [
        {"source": "jsonl", "path": str(first), "weight": 3.0},
        {"source": "jsonl", "path": str(second), "weight": 1.0},
    ]
    data = {
        "mixture": parts,
        "seq_len": 64,
        "held_out": 0.0,
        "eval": {"source": "jsonl", "path": str(first)},
    }
    corpus = opened(data, prompts=FORM, seq_len=None)
    drawn = corpus.train.prompts(corpus.train.sample_ids(0, 16))
    assert sum(p.prompt.startswith("z") for p in drawn) == 4
    assert {tuple(p.columns) for p in drawn} == {("answer", "key")}
    assert corpus.train.shapes(2)["tokens"].shape == (2, 64)
    assert [p.columns for p in prompts_of(corpus.held_out)] == [
        {"answer": r["answer"]} for r in TEXTS
    ]
    limits = ModelLimits("tokens", vocab_size=512, prompts=FORM)
    (samples,) = evaluation_parts(
        Config(data={"seq_len": 64}).data, Config(data=data["eval"]).data, limits, ByteTokenizer()
    ).values()
    assert len(samples) == len(TEXTS)


def test_held_out_prompts_are_not_trained_on(tmp_path):
    corpus = start(tmp_path, TEXTS, held_out=0.25)
    train, held = ({p.prompt for p in prompts_of(x)} for x in (corpus.train, corpus.held_out))
    assert len(held) == 3 and train | held == {r["prompt"] for r in TEXTS} and not train & held


def test_synthetic_prompts_count_and_their_column_counts_on():
    corpus = opened({"source": "synthetic", "samples": 20, "held_out": 0.0}, prompts=FORM)
    assert corpus.train.samples == 20
    for prompt in prompts_of(corpus.train):
        ids = [*prompt.tokens, *prompt.columns["ids"]]
        assert len({*(np.diff(ids) % 512)}) == 1


def test_the_fingerprint_covers_prompts_and_columns(tmp_path):
    fingerprints = [start(tmp_path, TEXTS).fingerprint]
    assert start(tmp_path, TEXTS).fingerprint == fingerprints[0]
    for change in ({"answer": 3}, {"prompt": "else"}, {"key": None}):
        fingerprints.append(start(tmp_path, [*TEXTS[:-1], TEXTS[-1] | change]).fingerprint)
    assert len({*fingerprints}) == 4


# -- what an objective reads --------------------------------------------------------------------


def form_of(data=None, config=None, **keys):
    objective = {"type": "grpo", "rewards": ["a:b"], "max_completion_length": 8, **keys}
    gpt2 = {"family": "gpt2", "preset": "tiny"}
    sections = {"model": gpt2, "objective": objective, "data": data or {}, **(config or {})}
    return limits_of_run(Config(**sections)).prompts


def test_the_arrays_follow_from_the_objective():
    form = form_of(num_generations=4, num_iterations=3)
    assert (form.num_generations, form.num_iterations, form.max_completion_length) == (4, 3, 8)
    assert {*form.arrays} == {*ARRAYS, "old_logprobs"}
    assert {*form_of().arrays} == {*ARRAYS}
    assert {*form_of(top_p=0.8).arrays} == {*ARRAYS, "thresholds"}
    assert {*form_of(top_k=8, mirror_sampling=False).arrays} == {*ARRAYS}


class OnPolicy(Objective):
    """Reads what the model samples, without rewards."""

    Options: ClassVar = SamplingOptions
    records: ClassVar = "prompts"
    arrays: ClassVar = NextToken.arrays

    def loss(self, model, batch):
        raise NotImplementedError


def test_an_objective_without_rewards_reads_tokens_and_targets():
    gpt2 = Config(model={"family": "gpt2", "preset": "tiny"})
    objective = OnPolicy(SamplingOptions(max_completion_length=8))
    form = limits_of_run(gpt2, None, objective).prompts
    assert form == PromptForm(("tokens", "targets"), 8)


def test_old_logprobs_are_those_of_a_rollout_of_several_steps():
    micro = {"train_micro_batch_size_per_gpu": 2}
    for config in (
        {**micro, "gradient_accumulation_steps": 2},
        {**micro, "train_batch_size": 8, "mesh": {"data": 2}},
    ):
        assert {*form_of(config=config, steps_per_generation=2).arrays} == {*ARRAYS}
        of_two_steps = form_of(config=config, steps_per_generation=4)
        assert {*of_two_steps.arrays} == {*ARRAYS, "old_logprobs"}


def test_an_epoch_is_every_prompt_once(tmp_path):
    corpus = start(tmp_path, TEXTS, PromptForm(ARRAYS, 8, num_generations=4, num_iterations=2))
    assert corpus.epoch == 12 * 4 * 2
    assert start(tmp_path, TEXTS, batch_size=48).epoch == 48  # a batch of completions
    with pytest.raises(DataError, match="12 training samples, but a batch has 13"):
        start(tmp_path, TEXTS, batch_size=52)


def test_the_length_of_a_run_in_epochs_is_in_completions(tmp_path):
    corpus = start(tmp_path, TEXTS, PromptForm(ARRAYS, 8, num_generations=4, num_iterations=2))
    keys = {"train_batch_size": 16, "run": {"epochs": 1.5}}
    source = in_steps(Source(Config(**keys), None, ModelLimits()), corpus)
    assert source.config.run.steps == 12 * 4 * 2 * 1.5 / 16
    program = SimpleNamespace(batch=SimpleNamespace(train=16))
    trainer = SimpleNamespace(
        reached=SimpleNamespace(step=0),
        steps=9,
        corpus=corpus,
        engine=SimpleNamespace(program=program),
    )
    assert opening._where(trainer) == "9 steps (1.5 epochs)"


# -- what is wrong ------------------------------------------------------------------------------

BAD = [
    ({"text": "a"}, 'no field "prompt"; its fields: text'),
    ({"prompt": None, "text": "a"}, 'no field "prompt"'),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": []}, "prompt has no messages"),
    ({"prompt": 3}, "prompt is a int, not a list of messages"),
    ({"prompt": [3]}, "message 1 is a int, not an object"),
    ({"prompt": [{"content": "a"}]}, "message 1 has no role"),
    (
        {"prompt": [message("user", "a"), message("assistant", "b")]},
        "ends with a message of the as",
    ),
    ({"prompt": [message("user", "a")], "tools": 3}, "tools is a int"),
    (["a"], "a list, not an object"),
]


@pytest.mark.parametrize(("record", "problem"), BAD)
def test_a_bad_record_is_an_error_with_its_place(tmp_path, record, problem):
    with pytest.raises(DataError) as error:
        start(tmp_path, [{"prompt": "p"}, record, {"prompt": "p"}], chat_template="chatml")
    file = tmp_path / "a.jsonl"
    assert f"{file}: 1 of 3 records cannot be used:\n  line 2: " in str(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", " has no records"),
        ("[3]", ", record 0: a int, not an object"),
        ('{"prompt": "a', ", line 1: not JSON: .*: the file ends within this line"),
    ],
)
def test_a_file_without_a_record_that_has_fields_is_named(tmp_path, content, problem):
    (tmp_path / "a.jsonl").write_text(content)
    section = {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "seq_len": 64}
    with pytest.raises(DataError, match=rf"^data: .*a\.jsonl{problem}"):
        opened(section, prompts=FORM)


def test_data_of_another_kind_is_one_error(tmp_path):
    talk = {"messages": [message("user", "a"), message("assistant", "b")]}
    with pytest.raises(DataError, match=r"no prompts.*messages before the answer.*: messages"):
        start(tmp_path, [talk])
    with pytest.raises(DataError, match=r"data.format: messages, but the objective reads prompts"):
        start(tmp_path, TEXTS, format="messages")
    with pytest.raises(DataError, match="source stdlib holds no prompts"):
        opened({"seq_len": 64}, prompts=FORM)
    for key, value in (
        ("train_on", "everything"),
        ("truncate", "start"),
        ("packing", False),
        ("document_masks", False),
        ("untrained", "drop"),
    ):
        with pytest.raises(DataError, match=f"data.{key}: has no effect on prompts"):
            start(tmp_path, TEXTS, **{key: value})
    np.save(tmp_path / "ids.npy", np.arange(100))
    with pytest.raises(DataError, match="source tokens has no prompts"):
        opened({"source": "tokens", "path": str(tmp_path / "ids.npy")}, prompts=FORM)
    with pytest.raises(DataError, match=r"data.chat_template: conversations need one"):
        start(tmp_path, [{"prompt": talk["messages"][:1]}])


def test_a_completion_that_leaves_no_room_is_an_error_before_data_are_read():
    with pytest.raises(DataError, match=r"max_completion_length is 16, .* at most 16 tokens"):
        form_of({"seq_len": 16}, max_completion_length=16)
    assert form_of({"seq_len": 17}, max_completion_length=16).max_completion_length == 16


def test_preferences_have_prompts(tmp_path):
    corpus = start(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    (prompt,) = prompts_of(corpus.train)
    assert prompt.columns == {"chosen": "a", "rejected": "b"}
    json.dumps(prompt.columns)
