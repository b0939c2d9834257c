"""Conversations as a corpus: formats, masks, packing, truncation, and what is wrong with files."""

import gzip
import io
import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.config import Config
from jaxspeed.data import ByteTokenizer, known_shapes, tokenize
from jaxspeed.data.complete_documents import Packing, best_fit, pack_documents
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.shown_samples import show_data
from jaxspeed.data.token_store import Masked, in_memory
from jaxspeed.errors import DataError
from tests.data import chat_examples
from tests.data.chat_examples import chat, message, write_lines
from tests.data.corpora import opened

pytestmark = pytest.mark.fast
TALKS = [chat(f"{i} the of to", f"{'and in ' * (1 + i % 5)}{i}") for i in range(40)]
MESSAGES = [{"messages": talk} for talk in TALKS]
PAIRS = [(talk[0]["content"], talk[1]["content"]) for talk in TALKS]
FORMATS = {
    "messages": MESSAGES,
    "conversations": [
        {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
        for a, b in PAIRS
    ],
    "prompt_completion": [{"prompt": talk[:1], "completion": talk[1:]} for talk in TALKS],
    "alpaca": [{"instruction": a, "input": "", "output": b, "id": 1} for a, b in PAIRS],
}
DATA = {"chat_template": "chatml", "held_out": 0.0}


def start(file, seq_len=128, **data):
    kind = data.pop("source", "jsonl")
    section = {"source": kind, "path": str(file), **DATA, **data}
    return opened(section, seq_len=seq_len)


def documents_of(corpus):
    """Each document's tokens and mask, read from the samples of both splits; as sorted texts."""
    found = []
    for split in filter(None, (corpus.train, corpus.held_out)):
        for batch in split.once(4):
            rows = zip(batch["tokens"], batch["segment_ids"], batch["positions"], batch["mask"])
            for tokens, segments, positions, mask in rows:
                for number in range(1, segments.max() + 1):
                    at = np.flatnonzero(segments == number)
                    if not mask[at].any():  # a padded sample of an evaluation
                        continue
                    assert (np.diff(at) == 1).all()
                    assert positions[at].tolist() == [*range(len(at))]
                    found.append((bytes(tokens[at].astype(np.uint8)), mask[at].tolist()))
    return sorted(found)


def chatml(talk):
    """The text of a conversation, and a mask of its characters: independent of the package."""
    text, mask = "", []
    for each in talk:
        head = f"<|im_start|>{each['role']}\n"
        said = f"{each['content']}<|im_end|>\n"
        text += head + said
        mask += [0] * len(head) + [int(each["role"] == "assistant")] * len(said)
    return text.encode(), mask


@pytest.mark.parametrize("written", ["jsonl", "jsonl.gz", "json", "parquet"])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_recognized_and_holds_the_same_documents(tmp_path, kind, written):
    file, records = tmp_path / f"a.{written}", FORMATS[kind]
    if written == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), file)
    elif written == "json":
        file.write_text(json.dumps(records, indent=1))
    else:
        write_lines(tmp_path / "a.jsonl", records)
        if written == "jsonl.gz":
            file.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for named in ({}, {"format": kind}):
        corpus = start(file, source=written.removesuffix(".gz"), **named)
        assert documents_of(corpus) == sorted(map(chatml, TALKS))
    assert "40 conversations" in corpus.summary


def test_texts_with_completions_and_alpacas_prompt(tmp_path):
    texts = [{"prompt": f"{a} ->", "completion": f" {b}"} for a, b in PAIRS]
    corpus = opened(
        {"source": "jsonl", "path": str(write_lines(tmp_path / "a.jsonl", texts)), "held_out": 0},
        seq_len=128,
    )
    wanted = [
        (f"{a} -> {b}\0".encode(), [0] * len(f"{a} ->") + [1] * len(f" {b}\0")) for a, b in PAIRS
    ]
    assert documents_of(corpus) == sorted(wanted)

    lines = [
        {"instruction": "Do it.", "input": "x", "output": "y"},
        {"instruction": "Do it.", "output": "z"},
    ]
    file = write_lines(tmp_path / "b.jsonl", lines)
    corpus = opened({"source": "jsonl", "path": str(file), "held_out": 0}, seq_len=400)
    begin = "Below is an instruction that describes a task"
    then = (
        "Write a response that appropriately completes the request.\n\n### Instruction:\nDo it.\n\n"
    )
    heads = (
        f"{begin}, paired with an input that provides further context. {then}### Input:\nx\n\n"
        "### Response:\n",
        f"{begin}. {then}### Response:\n",
    )
    assert documents_of(corpus) == sorted(
        ((head + said).encode(), [0] * len(head) + [1] * len(said))
        for head, said in zip(heads, ("y\0", "z\0"))
    )
    # Its template is saved with the tokenizer, so that a chat with the model renders it too.
    assert b"### Response" in corpus.tokenizer.beside["chat_template.jinja"]


def test_parts_tools_and_share_gpts_names_are_read(tmp_path):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "of"}]
    lines = [
        {"messages": [{"role": "user", "content": parts}, message("assistant", "a")]},
        {"messages": [message("system", ""), *chat("the of", "a")]},
        {
            "conversations": [
                {"from": "system", "value": "be"},
                {"from": "user", "value": "hi"},
                {"from": "assistant", "value": "b"},
                {"from": "tool", "value": "c"},
            ]
        },
        {"system": "be", "conversations": [{"from": "human", "value": "hi"}]},
    ]
    write_lines(tmp_path / "a.jsonl", lines[:2])
    assert documents_of(start(tmp_path / "a.jsonl")) == [chatml(chat("the of", "a"))] * 2
    write_lines(tmp_path / "b.jsonl", lines[2:3])
    talk = [*chat("hi", "b", system="be"), message("tool", "c")]
    assert documents_of(start(tmp_path / "b.jsonl")) == [chatml(talk)]
    lines[3]["conversations"].append({"from": "gpt", "value": "d"})
    write_lines(tmp_path / "c.jsonl", lines[3:])
    assert documents_of(start(tmp_path / "c.jsonl")) == [chatml(chat("hi", "d", system="be"))]
    # Arguments that are JSON, as OpenAI writes them, are the object that templates expect.
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [message("user", "hi"), message("assistant", tool_calls=[call])]
    tools = json.dumps([{"name": "f"}])
    write_lines(tmp_path / "d.jsonl", [{"messages": talk, "tools": tools}])
    corpus = start(tmp_path / "d.jsonl", seq_len=1500, chat_template="qwen")
    ((text, _),) = documents_of(corpus)
    assert b'{"name": "f", "arguments": {"x": 1}}' in text and b'<tools>\n{"name": "f"}\n' in text


def test_arguments_are_the_text_that_they_were_for_a_template_that_adds_texts(tmp_path):
    """DeepSeek's does; of an argument named as a method or an attribute the value is read."""
    source = (
        "{% for m in messages %}{{ m.role + ':' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + READ }}{% endfor %}{{ m.content }}\n{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": '{"text":1,  "_text": 2}'}}
    talk = [message("user", "hi"), message("assistant", "b", tool_calls=[call])]
    write_lines(tmp_path / "a.jsonl", [{"messages": talk}])
    reads = {
        "c.function.arguments": b'f{"text":1,  "_text": 2}b',
        "c.function.arguments['text'] | string": b"f1b",
        "c.function.arguments.text | string": b"f1b",
    }
    for read, said in reads.items():
        (tmp_path / "t.jinja").write_text(source.replace("READ", read))
        corpus = start(tmp_path / "a.jsonl", seq_len=1500, chat_template=str(tmp_path / "t.jinja"))
        ((text, _),) = documents_of(corpus)
        assert b"assistant:" + said in text


@pytest.mark.parametrize("written", ["jsonl", "parquet"])
def test_a_content_of_null_beside_calls_is_one_that_templates_can_ask_about(tmp_path, written):
    """As in transformers: DeepSeek's template writes calls `if message.content is none`."""
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    said = message("assistant", tool_calls=[call]) | {"content": None}
    records = [{"messages": [message("user", "a "), said, message("assistant", "c")]}]
    file = tmp_path / f"a.{written}"
    if written == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), file)
    else:
        write_lines(file, records)
    asks = "{% for m in messages %}{{ 'b ' if m.content is none else m.content }}{% endfor %}"
    corpus = start(file, source=written, chat_template=asks)
    assert [text for text, _ in documents_of(corpus)] == [b"a b c"]


def test_variables_of_the_config_and_of_a_record_reach_the_template(tmp_path):
    source = "{{ messages[0].content }}{{ mood }}{% generation %}{{ messages[1].content }}"
    source += "{% endgeneration %}"
    lines = [MESSAGES[0], MESSAGES[0] | {"chat_template_kwargs": {"mood": "!"}}]
    file = write_lines(tmp_path / "a.jsonl", lines)
    more = {"chat_template": source, "chat_template_kwargs": {"mood": "?"}}
    (a, b), text = PAIRS[0], [x for x, _ in documents_of(start(file, **more))]
    assert text == [f"{a}!{b}".encode(), f"{a}?{b}".encode()]


# -- packing --------------------------------------------------------------------------------------


def masked(lengths, seed=0):
    """Documents of these lengths with random tokens and masks."""
    rng = np.random.default_rng(seed)
    return [Masked(rng.integers(1, 99, n), rng.random(n) < 0.4) for n in lengths]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 24),
    st.sampled_from(["end", "start", "drop"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)
def test_packing_holds_each_document_once_and_mixes_none(lengths, seq_len, how, held_out, together):
    documents, size = masked(lengths), seq_len + 1
    packing = Packing(seq_len, True, how, together)
    train, held, ids, counts = pack_documents(
        in_memory("a", documents, None), packing, held_out, None
    )
    wanted, over = [], 0
    for x in documents:
        if len(x.ids) > size and how == "drop":
            continue
        part = slice(-size, None) if how == "start" else slice(size)
        if x.trained[part][1:].any():
            wanted.append((x.ids[part].tolist(), [False, *x.trained[part][1:].tolist()]))
            over += len(x.ids) > size
    found, trained, in_training = [], 0, np.zeros(0, np.int64)
    for samples in filter(None, (train, held)):
        batch = samples.read(np.arange(len(samples)))
        assert batch["tokens"].shape == (len(samples), size)
        segments, mask = batch["segment_ids"], batch["mask"]
        # What the loss counts: targets of the same segment as the token before.
        trained += int((mask[:, 1:] * (segments[:, 1:] == segments[:, :-1])).sum())
        if samples is train:
            in_training = np.bincount(batch["tokens"][mask > 0].astype(int), minlength=0)
        for row in range(len(samples)):
            assert together or segments[row].max() == 1
            for number in range(1, segments[row].max() + 1):
                at = segments[row] == number
                assert (np.diff(np.flatnonzero(at)) == 1).all()
                assert batch["positions"][row][at].tolist() == [*range(at.sum())]
                found.append((batch["tokens"][row][at].tolist(), (mask[row][at] > 0).tolist()))
            assert not mask[row][segments[row] == 0].any()
    assert sorted(found) == sorted(wanted)
    assert counts.trained == trained
    assert (counts.samples, counts.truncated) == (len(wanted), over)
    assert counts.dropped == len(documents) - len(wanted)
    assert counts.tokens == sum(len(ids) for ids, _ in wanted)
    assert counts.longest == max(lengths)
    size = max(len(ids), len(in_training))
    assert (np.resize(np.append(ids, np.zeros(size)), size)[:size] >= 0).all()
    assert ids.sum() == in_training.sum()


@given(st.lists(st.integers(1, 50), max_size=60))
def test_bins_hold_each_document_once_and_are_at_least_half_full(lengths):
    bins = best_fit(np.asarray(lengths, np.int64), 50)
    assert sorted(i for each in bins for i in each) == [*range(len(lengths))]
    sums = [sum(lengths[i] for i in each) for each in bins]
    assert all(0 < total <= 50 for total in sums)
    assert sum(total <= 25 for total in sums) <= 1  # two such would be one


def test_long_conversations_are_truncated_by_the_policy_and_counted(tmp_path):
    talks = [chat("a", "b"), chat("a" * 50, "b" * 50), chat("a" * 200, "b" * 10)]
    file = write_lines(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    whole = [chatml(talk) for talk in talks]
    size = 128 + 1
    assert len(whole[1][0]) > size
    for how, wanted, dropped in (
        ("end", [whole[0], tuple(x[:size] for x in whole[1])], 1),  # of the third none is trained
        (
            "start",
            [whole[0], *((text[-size:], [0, *mask[1 - size :]]) for text, mask in whole[1:])],
            0,
        ),
        ("drop", [whole[0]], 2),
    ):
        corpus = start(file, truncate=how)
        assert documents_of(corpus) == sorted(wanted)
        counts = corpus.conversations
        assert (counts.samples, counts.dropped) == (len(wanted), dropped)
        assert counts.truncated == len(wanted) - 1
        assert counts.longest == max(len(text) for text, _ in whole)
        assert f"{dropped} dropped" in corpus.summary or not dropped


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("kind", ["chats", "texts"])
def test_the_loss_counts_what_is_shown_as_trained(tmp_path, kind, masks):
    """Also without document masks, where texts continue one another and conversations do not."""
    how = {"document_masks": masks}
    if kind == "chats":
        file = write_lines(tmp_path / "a.jsonl", MESSAGES)
        section = {"source": "jsonl", "path": str(file), **DATA, "train_on": "everything", **how}
    else:
        (tmp_path / "a.txt").write_text("x" * 3)
        (tmp_path / "b.txt").write_text("y" * 9)
        section = {"source": "text", "path": str(tmp_path / "*.txt"), "held_out": 0.0, **how}
    seq_len = 300 if kind == "chats" else 13  # 4 + 10 tokens of texts, one of them the first
    corpus, total = opened(section, seq_len=seq_len), 0
    for batch in corpus.train.once(1):
        counts = batch.get("mask", np.ones_like(batch["tokens"]))[:, 1:] > 0
        if masks:  # nothing is predicted across documents
            counts &= np.diff(batch["segment_ids"]) == 0
        total += int(counts.sum())
    data = Config.load({"data": {"tokenizer": "bytes", **section}}).data
    shown = show_data(data, ModelLimits(seq_len=seq_len))
    assert total == sum(counts.trained for counts in shown.counts.values())
    if kind == "texts":
        assert total == sum(each.trained for each in shown.samples) == 14 - (2 if masks else 1)


def test_one_conversation_a_sample_and_a_share_of_few_held_out(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", MESSAGES[:7])
    corpus = start(file, 300, packing=False, held_out=0.05)
    assert (corpus.train.samples, corpus.held_out.samples) == (6, 1)
    assert documents_of(corpus) == sorted(map(chatml, TALKS[:7]))


def test_the_order_is_a_function_of_seed_and_step_and_the_identity_of_the_data(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", MESSAGES)
    first, again = start(file, 300), start(file, 300)
    assert first.fingerprint == again.fingerprint
    for step in (0, 3, 17):
        for name, x in first.train.batch(step, 2).items():
            assert (again.train.batch(step, 2)[name] == x).all()
    changes = (
        {"train_on": "everything"}, {"truncate": "drop"}, {"packing": False},
        {"chat_template": "alpaca"},
    )  # fmt: skip
    found = {start(file, 300, **change).fingerprint for change in changes}
    assert len({*found, first.fingerprint}) == 5


def test_tokenized_conversations_are_those_of_their_file(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", MESSAGES)
    folder = chat_examples.tokenizer_folder(tmp_path / "tokenizer")
    data = {"source": "jsonl", "path": str(file), "tokenizer": str(folder), **DATA}
    tokenize(Config(data=data).data, tmp_path / "tokens")
    there = opened(
        {"source": "tokens", "path": str(tmp_path / "tokens"), "held_out": 0}, seq_len=64
    )
    here = opened(data, seq_len=64)
    assert (there.conversations, there.train.samples) == (here.conversations, here.train.samples)
    for name, x in here.train.batch(0, 4).items():
        assert (there.train.batch(0, 4)[name] == x).all()
    assert (
        there.tokenizer.beside["chat_template.jinja"]
        == here.tokenizer.beside["chat_template.jinja"]
    )
    trained = np.load(tmp_path / "tokens" / "trained.npy")
    trained[3] ^= True
    np.save(tmp_path / "tokens" / "trained.npy", trained)
    with pytest.raises(DataError, match="the digest in its header differs"):
        opened({"source": "tokens", "path": str(tmp_path / "tokens")}, seq_len=64)


def test_evaluation_data_are_conversations_by_their_fields(tmp_path):
    file = write_lines(tmp_path / "a.json", [])
    file.write_text(json.dumps(MESSAGES))
    text = tmp_path / "b.json"
    text.write_text('{"no": "conversation"}')
    data = Config(data={**DATA, "source": "jsonl", "path": "unused.jsonl"}).data
    section = data.model_copy(
        update={"source": None, "path": None, "paths": [str(file), str(text)]}
    )
    limits = ModelLimits("tokens", 64, 256)
    parts = evaluation_parts(data, section, limits, ByteTokenizer())
    batch = parts[str(file)].read(np.arange(3))
    assert {"mask", "positions"} <= batch.keys() and batch["mask"].any()
    plain = parts[str(text)].read(np.arange(1))
    assert bytes(plain["tokens"][0][:23].astype(np.uint8)) == b'{"no": "conversation"}\0'
    # The format of a config is that of files which have records.
    both = write_lines(tmp_path / "c.jsonl", [{"text": "the of", **each} for each in MESSAGES])
    named = section.model_copy(update={"format": "messages", "paths": [str(both), str(text)]})
    parts = evaluation_parts(data, named, limits, ByteTokenizer())
    assert "positions" in parts[str(both)].read(np.arange(1))
    assert "positions" not in parts[str(text)].read(np.arange(1))


def test_a_plan_knows_the_arrays_of_a_batch(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", MESSAGES)
    limits = ModelLimits("tokens", 64, 256)
    batch = start(file, seq_len=64).train.batch(0, 2)
    for data in (
        {"source": "jsonl", "path": str(file), **DATA},
        {"source": "jsonl", "path": "not/there.jsonl", "format": "messages", **DATA},
    ):
        shapes = known_shapes(Config(data=data).data, limits, 2)
        assert {name: (x.shape, x.dtype) for name, x in shapes.items()} == {
            name: (x.shape, x.dtype) for name, x in batch.items()
        }
    none = known_shapes(Config(data={"source": "jsonl", "path": "not/there"}).data, limits, 2)
    assert none.keys() == {"tokens", "segment_ids"}


def test_texts_can_be_mixed_with_conversations_and_count_entirely(tmp_path):
    chats = write_lines(tmp_path / "a.jsonl", MESSAGES)
    texts = write_lines(
        tmp_path / "b.jsonl", [{"text": "the of " * (1 + i % 9)} for i in range(60)]
    )
    sources = [{"source": "jsonl", "path": str(file)} for file in (chats, texts)]
    corpus = opened({"mixture": sources, "chat_template": "chatml", "held_out": 0.2}, seq_len=128)
    for split in (corpus.train, corpus.held_out):
        of_chats, of_texts = (part.read(np.arange(len(part))) for part in split.parts)
        assert of_chats.keys() == of_texts.keys()
        segments, positions, mask = (of_texts[x] for x in ("segment_ids", "positions", "mask"))
        assert mask[segments > 0].all()
        for row, places in zip(segments, positions):
            for number in range(1, row.max() + 1):
                assert places[row == number].tolist() == [*range((row == number).sum())]
    assert corpus.conversations.samples == len(TALKS)
    data = {"mixture": sources, "chat_template": "chatml", "document_masks": False}
    batch = opened(data, seq_len=128).train.batch(0, 8)
    assert batch.keys() == {"tokens", "mask"}


# -- bad input ------------------------------------------------------------------------------------

GOOD = json.dumps(MESSAGES[0])
BAD = {
    "no JSON": ('{"messages": nothing}', "line 2: not JSON: Expecting value"),
    "no object": ("3", "line 2: a int, not an object with fields"),
    "another format": (
        json.dumps(FORMATS["alpaca"][0]), "the fields of alpaca, but this file is read as messages"
    ),
    "other fields": ('{"text": "a"}', 'no field "messages"; its fields: text'),
    "no messages": ('{"messages": []}', "messages has no messages"),
    "no list": ('{"messages": "a"}', "messages is a str, not a list of messages"),
    "no role": ('{"messages": [{"content": "a"}]}', "message 1 has no role"),
    "an empty message": (
        json.dumps({"messages": chat("", "a")}), r"message 1 \(user\) is empty"
    ),
    "an image": (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        r'message 1 \(user\) has content of type "image"; this model reads text',
    ),
    "a typo of a role": (
        json.dumps({"messages": [message("user", "a"), message("asistant", "a")]}),
        r'message 2: the chat template \(chatml\) does not know the role "asistant"',
    ),
    "nothing trained": (
        json.dumps({"messages": [message("user", "a")]}),
        r"no token of it is trained: the assistant has no message in it \(data.untrained: drop",
    ),
    "tools": (json.dumps(MESSAGES[0] | {"tools": "a"}), "tools is neither a list nor the JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_record_is_named_with_its_line(tmp_path, what):
    line, match = BAD[what]
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(DataError, match=match) as error:
        start(tmp_path / "a.jsonl")
    assert error.match(r"a.jsonl: 1 of 3 records cannot be used:\n  line 2: ")


def test_all_bad_records_of_a_file_are_one_error_with_the_first_ten_and_the_count(tmp_path):
    lines = [GOOD, *(f'{{"messages": {i}}}' for i in range(30)), GOOD, GOOD[:40]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        start(tmp_path / "a.jsonl")
    folder = chat_examples.tokenizer_folder(tmp_path / "tokenizer")
    with pytest.raises(DataError) as same:
        start(tmp_path / "a.jsonl", tokenizer=str(folder))
    assert str(same.value) == str(error.value)
    (tmp_path / "b.jsonl").write_text('{"messages": 1}\n' * 3)  # not one can be encoded
    with pytest.raises(DataError, match="3 of 3 records"):
        start(tmp_path / "b.jsonl", tokenizer=str(folder))
    first, *listed, last = str(error.value).splitlines()
    assert first == f"data: {tmp_path / 'a.jsonl'}: 31 of 33 records cannot be used:"
    assert [line.partition(":")[0] for line in listed] == [f"  line {i}" for i in range(2, 12)]
    assert last == "  and 21 more"


def test_a_torn_last_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{GOOD}\n{GOOD[:-9]}")
    torn = "line 2: not JSON: .*: the file ends within this line, so it was truncated"
    with pytest.raises(DataError, match=torn):
        start(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(MESSAGES)[:-9])
    with pytest.raises(DataError, match=r"1 of 1 records cannot be used:\n  the array: not JSON"):
        start(tmp_path / "a.json", source="json", format="messages")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "b')
    with pytest.raises(DataError, match="the file ends within this line"):
        opened({"source": "jsonl", "path": str(tmp_path / "b.jsonl")})


def test_a_template_that_raises_or_ignores_a_role_is_an_error_of_each_record(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"messages": chat("a", "b", system="c")}] * 3)
    with pytest.raises(DataError, match=r"3 of 3(.|\n)*line 1: the chat template .* raises: never"):
        start(file, chat_template="{{ raise_exception('never') }}")
    silent = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"message 1: the chat template .* not know .* \"system\""):
        start(file, chat_template=silent)
    with pytest.raises(DataError, match=r"^data.chat_template: conversations need one"):
        start(file, chat_template=None)
    (tmp_path / "b.jinja").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"^data.chat_template: .*b.jinja' is not text"):
        start(file, chat_template=str(tmp_path / "b.jinja"))
    silent = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"no token of it is trained: all are masked"):
        start(write_lines(file, MESSAGES[:1]), chat_template=silent)


def test_untrained_conversations_can_be_dropped_and_are_counted(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [*MESSAGES[:3], {"messages": [message("user", "a")]}])
    corpus = start(file, untrained="drop")
    assert (corpus.conversations.samples, corpus.conversations.dropped) == (3, 1)
    with pytest.raises(DataError, match=r"holds no text|not one training sample"):
        start(write_lines(file, [{"messages": [message("user", "a")]}]), untrained="drop")


def test_keys_of_conversations_need_some(tmp_path):
    (tmp_path / "a.txt").write_text("the of to " * 99)
    text = {"source": "text", "path": str(tmp_path / "a.txt")}
    with pytest.raises(DataError, match=r"data.train_on: only conversations have it"):
        opened({**text, "train_on": "last_turn"})
    with pytest.raises(DataError, match=r"data.train_on: only conversations have it"):
        opened({**text, "train_on": "assistant"})  # set, though it is the default
    with pytest.raises(DataError, match=r"data.format: source text has no records"):
        opened({**text, "format": "messages"})


def test_text_beside_conversations_is_read_as_before_with_a_warning(tmp_path, caplog):
    file = write_lines(tmp_path / "a.jsonl", [{"text": "the of to", **m} for m in MESSAGES])
    data = {"source": "jsonl", "path": str(file), "held_out": 0}
    with caplog.at_level("WARNING", "jaxspeed"):
        assert opened(data).conversations is None
    assert "data.format: messages reads its conversations" in caplog.text
    named = opened({**data, "format": "messages", "chat_template": "chatml"}, seq_len=128)
    assert documents_of(named) == sorted(map(chatml, TALKS))


def test_an_iterable_of_records_and_a_folder_of_datasets(tmp_path, monkeypatch):
    module = types.ModuleType("my_chats")
    module.records = MESSAGES
    monkeypatch.setitem(sys.modules, "my_chats", module)
    wanted = sorted(map(chatml, TALKS))
    assert documents_of(opened({"source": "my_chats:records", **DATA}, seq_len=128)) == wanted
    pyarrow = pytest.importorskip("pyarrow")
    call = {"function": {"name": "f", "arguments": {"x": "1"}}, "id": None}
    calls = [message("user", "a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    table = pyarrow.Table.from_pylist([{"messages": calls}, {"messages": chat("a", "b")}])
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as out,
        pyarrow.ipc.new_file(out, table.schema) as writer,
    ):
        writer.write_table(table)
    corpus = start(tmp_path / "a.arrow", source="arrow", chat_template="qwen", seq_len=300)
    texts = [text.decode() for text, _ in documents_of(corpus)]
    assert any('{"name": "f", "arguments": {"x": "1"}}' in text for text in texts)
    assert not any("null" in text or "None" in text for text in texts)


def test_a_sentencepiece_model_is_refused(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the of to and in is it you"] * 9), model_writer=model,
        vocab_size=19, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    file = write_lines(tmp_path / "a.jsonl", MESSAGES)
    with pytest.raises(DataError, match=r"conversations need a tokenizer.json"):
        start(file, tokenizer=str(tmp_path))


@pytest.mark.parametrize("of", ["one source", "a mixture's", "evaluation's"])
def test_a_source_has_the_format_that_its_key_says(tmp_path, of):
    """Of records that have texts too, which are read without it."""
    file = write_lines(tmp_path / "a.jsonl", [{"text": "the of to", **m} for m in MESSAGES])
    asked = {"source": "jsonl", "path": str(file), "format": "messages"}
    data = {
        "one source": asked,
        "a mixture's": {"mixture": [asked, asked]},
        "evaluation's": {"source": "synthetic", "tokenizer": "bytes", "eval": asked},
    }[of]
    if of == "evaluation's":
        data |= {"mixture": [{"source": "jsonl", "path": str(file), "format": "messages"}]}
        del data["source"]
    corpus = opened({**data, "chat_template": "chatml"}, seq_len=128)
    for split in (corpus.train, corpus.held_out):
        assert b"<|im_start|>" in bytes(split.padded(0, 2)["tokens"].astype(np.uint8))
