"""Preferences as a corpus: records, tokens, truncation, packing, and what is wrong with files."""

import json
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspeed.config import Config
from jaxspeed.data import ByteTokenizer, ModelLimits, known_shapes, tokenize
from jaxspeed.data.complete_documents import Packing
from jaxspeed.data.evaluation_parts import evaluation_parts
from jaxspeed.data.model_limits import PairForm, limits_of_run
from jaxspeed.data.pair_samples import mismatched, pack_pairs, row_length, sequences_of
from jaxspeed.data.preference_records import read_preference
from jaxspeed.data.preference_tokens import PreferenceEncoder, common_prefix
from jaxspeed.data.shown_samples import as_json, show_data
from jaxspeed.data.token_store import Masked, RecordTokens, in_memory
from jaxspeed.errors import DataError
from jaxspeed.objectives.pairs import most_pairs
from tests.data.chat_examples import message, write_lines
from tests.data.corpora import opened
from tests.data.preference_examples import (
    BEGINS,
    LABELS,
    PAIRS,
    TEXTS,
    Ranks,
    expected,
    merging_tokenizer,
    pairs_of,
    sequences_in,
    start,
)

pytestmark = pytest.mark.fast


def messages(user, *answers):
    return [message("user", user), *(message("assistant", text) for text in answers)]


# -- records ------------------------------------------------------------------------------------


def test_texts_of_pairs_end_with_the_end_token_and_the_mask_is_of_the_completion(tmp_path):
    wanted = [
        (expected(r["prompt"], r["chosen"]), expected(r["prompt"], r["rejected"])) for r in TEXTS
    ]
    assert pairs_of(start(tmp_path, TEXTS)) == sorted(wanted)
    assert pairs_of(start(tmp_path, TEXTS, held_out=0.3)) == sorted(wanted)


def test_an_answer_with_its_end_gets_no_second(tmp_path):
    record = {"prompt": "a", "chosen": "b\0", "rejected": "c"}
    assert pairs_of(start(tmp_path, [record])) == [(expected("a", "b"), expected("a", "c"))]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Q: a", "Q: b", "Q:"),  # the space is of the completions
        ("Q:a", "Q:b", "Q:"),
        ("abc", "ab", "a"),  # one begins the other: they part at the shorter's last letter
        ("a ", "b ", ""),
        ("a", "b", ""),
    ],
)
def test_an_implicit_prompt_of_texts_is_what_both_begin_with(chosen, rejected, prompt):
    read = read_preference({"chosen": chosen, "rejected": rejected}, "preference")
    completions = [chosen[len(prompt) :], rejected[len(prompt) :]]
    assert (read.prompt, read.completions) == (prompt, completions)


def test_an_implicit_prompt_of_messages_is_the_messages_that_both_begin_with(tmp_path):
    chosen, rejected = messages("hi", "yes"), messages("hi", "no")
    explicit = {"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}
    repeated = {"prompt": "hi", "chosen": chosen, "rejected": rejected}
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    wanted = [
        (
            f"{head}{said}<|im_end|>\n".encode(),
            ([0] * len(head) + [1] * len(said) + [1] * 11)[1:],
        )
        for said in ("yes", "no")
    ]
    for record in ({"chosen": chosen, "rejected": rejected}, explicit, repeated):
        corpus = start(tmp_path, [record], seq_len=200, chat_template="chatml")
        assert pairs_of(corpus) == [tuple(wanted)]


def test_later_turns_of_the_user_belong_to_the_completion(tmp_path):
    chosen = [message("assistant", "a"), message("user", "b"), message("assistant", "c")]
    record = {"prompt": messages("q"), "chosen": chosen, "rejected": [message("assistant", "d")]}
    ((better, _),) = pairs_of(start(tmp_path, [record], seq_len=200, chat_template="chatml"))
    head = len("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    assert better[0].decode().count("<|im_start|>") == 4
    assert better[1] == ([0] * head + [1] * (len(better[0]) - head))[1:]


def test_tools_and_variables_reach_the_template(tmp_path):
    template = "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    record = {
        "prompt": messages("q"),
        "chosen": [message("assistant", "a")],
        "rejected": [message("assistant", "b")],
        "tools": json.dumps([{"name": "f"}]),
        "chat_template_kwargs": {"mood": "glad"},
    }
    ((better, worse),) = pairs_of(start(tmp_path, [record], seq_len=99, chat_template=template))
    head = '[{"name": "f"}]gladq'
    assert (better[0].decode(), worse[0].decode()) == (f"{head}a", f"{head}b")
    assert better[1] == ([0] * len(head) + [1])[1:]


# -- tokens -------------------------------------------------------------------------------------


def records_of(tokenizer, records, kind="preference", **data):
    from jaxspeed.data.chat_masks import ChatEncoder

    encoder = PreferenceEncoder(ChatEncoder(tokenizer, Config(data=data).data))
    return [*encoder.encode([encoder.render(read_preference(r, kind)) for r in records])]


def test_a_completion_begins_where_the_tokens_diverge_the_same_on_both_sides(caplog):
    record = {"prompt": "ca", "chosen": "b", "rejected": "c"}
    (pair,) = records_of(merging_tokenizer(), [record])
    assert [d.ids.tolist() for d in pair.documents] == [[4, 6, 1], [4, 2, 4, 1]]
    # Its own beginning is stored of each; a pair has the smaller one.
    assert [d.trained.tolist() for d in pair.documents] == [
        [False, True, True],
        [False, False, True, True],
    ]
    assert "leaves out 'a'" in caplog.text
    documents = in_memory("x", [pair], merging_tokenizer())
    rows, _, counts = pack_pairs(documents, PAIRS, Packing(8, True), 0.0, None)
    batch = rows.read(np.array([0]))
    assert batch["tokens"][0].tolist() == [4, 6, 4, 2, 4, *[0] * 11]
    assert batch["targets"][0].tolist() == [6, 1, 2, 4, 1, *[-100] * 11]
    assert batch["mask"][0].tolist() == [1] * 5 + [0] * 11
    assert batch["segment_ids"][0].tolist() == [1, 1, 2, 2, 2] + [0] * 11
    assert batch["positions"][0].tolist() == [0, 1, 0, 1, 2] + [0] * 11
    assert str(counts) == "1 pair, 7 tokens, 5 trained"


def test_a_text_has_the_special_tokens_that_the_tokenizer_adds(tmp_path):
    (pair,) = records_of(
        merging_tokenizer(BEGINS), [{"prompt": "c", "chosen": "a", "rejected": "b"}]
    )
    assert [d.ids.tolist() for d in pair.documents] == [[0, 4, 2, 1], [0, 4, 3, 1]]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_prefix_is_the_longest(a, b):
    length = common_prefix(np.array(a, int), np.array(b, int))
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


# -- truncation ---------------------------------------------------------------------------------

LONG = {"prompt": "pppp", "chosen": "cccccc", "rejected": "r"}  # 11 and 6 tokens


@pytest.mark.parametrize(("seq_len", "length"), [(2048, 4224), (2047, 4096), (64, 136), (6, 14)])
def test_rows_whose_ends_are_read_have_a_length_that_attention_and_shards_divide(seq_len, length):
    assert row_length(PairForm("preference", reads_ends=True), seq_len) == length
    assert row_length(PAIRS, seq_len) == 2 * seq_len


@pytest.mark.parametrize(
    ("truncate", "chosen"), [("end", (b"ppppcccc", 4)), ("start", (b"pcccccc\0", 7))]
)
def test_each_side_is_truncated_by_itself_to_seq_len_plus_one(tmp_path, truncate, chosen):
    corpus = start(tmp_path, [LONG], seq_len=7, truncate=truncate)
    ((better, worse),) = pairs_of(corpus)
    assert (better[0], sum(better[1])) == chosen
    assert worse == expected("pppp", "r")
    assert "1 pair, 14 tokens" in corpus.summary and "1 truncated" in corpus.summary


def test_a_side_of_seq_len_plus_one_tokens_is_not_long(tmp_path):
    for form in (PAIRS, PairForm("preference", reads_ends=True)):
        corpus = start(tmp_path, [LONG], form, seq_len=10, truncate="drop")
        assert "1 pair, 17 tokens, 9 trained (" in corpus.summary
        with pytest.raises(DataError, match=r"nothing is left: .*1 dropped \(1 too long\)"):
            start(tmp_path, [LONG], form, seq_len=9, truncate="drop")


def test_a_score_is_of_sequences_that_fit_and_their_last_token_is_an_input(tmp_path):
    form = PairForm("preference", reads_ends=True, margins=True)
    records = [LONG, {"prompt": "p", "chosen": "cc", "rejected": "r", "margin": 0.5}]
    corpus = start(tmp_path, records, form, seq_len=3)
    assert "1 pair, 7 tokens, 5 trained, 1 dropped (1 too long)" in corpus.summary
    batch = corpus.train.slice(0, 1)
    assert bytes(batch["tokens"][0].astype(np.uint8)) == b"pcc\0pr\0\0"
    assert batch["segment_ids"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert batch["mask"][0].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert batch["margins"][0].tolist() == [0.5, *[0] * 7]


def test_pairs_without_a_signal_are_dropped_and_counted_by_reason(tmp_path):
    records = [
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a", "rejected": ""},
        {"prompt": messages("p"), "chosen": messages("a")[:0], "rejected": messages("b")},
        {"prompt": messages("p"), "chosen": [message("assistant", "")], "rejected": messages("b")},
        {"prompt": "p" * 40, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ]
    corpus = start(tmp_path, records, seq_len=39)
    assert pairs_of(corpus) == [(expected("p", "a"), expected("p", "b"))]
    reasons = (
        "1 with equal completions, 3 with an empty completion, 1 whose prompt fills the context"
    )
    assert f"1 pair, 6 tokens, 4 trained, 5 dropped ({reasons})" in corpus.summary
    with pytest.raises(DataError, match="nothing is left"):
        start(tmp_path, records[:4])


# -- completions with a label -------------------------------------------------------------------


def test_each_labelled_completion_has_the_one_before_it_in_its_block(tmp_path):
    records = [{"prompt": f"{i}", "completion": f"c{i}", "label": i % 3 == 0} for i in range(9)]
    corpus = start(tmp_path, records, LABELS, packing=False)
    before = {0: 3, 1: 0, 2: 1, 3: 2, 4: 8, 5: 4, 6: 5, 7: 6, 8: 7}  # the last block has 5
    wanted = [(expected(f"{i}", f"c{i}"), expected(f"{i}", f"c{before[i]}")) for i in range(9)]
    assert pairs_of(corpus) == sorted(wanted)
    assert "9 completions (3 desirable)" in corpus.summary
    for i in range(9):
        signs = corpus.train.slice(i, 1)["desirable"][0]
        assert signs.tolist() == [1 if i % 3 == 0 else -1, *[0] * 127]


def test_pairs_are_divided_with_the_chosen_ones_first(tmp_path):
    records = [{"prompt": "p", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(3)]
    corpus = start(tmp_path, records, PairForm("unpaired", kl_block=3), packing=False)
    batches = [corpus.train.slice(i, 1) for i in range(6)]
    texts = [sequences_in(b)[0] for b in batches]
    assert [x[0][0] for x in texts] == [f"p{s}{i}\0".encode() for s in "ab" for i in range(3)]
    assert [x[1][0] for x in texts] == [
        f"p{s}{(i - 1) % 3}\0".encode() for s in "ab" for i in range(3)
    ]
    assert [int(b["desirable"].sum()) for b in batches] == [1, 1, 1, -1, -1, -1]


def test_pairs_are_divided_by_the_thousand():
    ones = np.array([True])
    pairs = [RecordTokens((Masked(np.array([0]), ones), Masked(np.array([1]), ones)))] * 2500
    sequences = sequences_of(in_memory("x", pairs, None), np.arange(2500), LABELS)
    signs = [1] * 1000 + [-1] * 1000 + [1] * 1000 + [-1] * 1000 + [1] * 500 + [-1] * 500
    assert sequences.values.tolist() == signs


@given(st.integers(2, 40), st.integers(2, 9))
def test_completions_rotate_within_blocks(count, block):
    ones = np.array([False, True])
    records = [
        RecordTokens((Masked(np.array([i, i]), ones),), {"label": 1.0}) for i in range(count)
    ]
    whole = sequences_of(in_memory("x", records, None), np.arange(count), LABELS)
    partners = mismatched(whole, block).starts[:, 1, 1] // 2
    edges = [*range(0, count, block), count]
    if count - edges[-2] == 1 and len(edges) > 2:
        del edges[-2]
    for begin, end in pairwise(edges):
        assert partners[begin:end].tolist() == [end - 1, *range(begin, end - 1)]
        assert end - begin > 1


# -- packing ------------------------------------------------------------------------------------


@st.composite
def stores(draw):
    documents = []
    for i in range(draw(st.integers(1, 30))):
        prompt = draw(st.integers(0, 6))
        lengths = [draw(st.integers(2, 12)) for _ in range(2)]
        sides = [
            Masked(
                np.array([1 + i] * prompt + [101 + i + 50 * side] * length, np.uint8),
                np.arange(prompt + length) >= prompt,
            )
            for side, length in enumerate(lengths)
        ]
        documents.append(RecordTokens(tuple(sides)))
    return in_memory("x", documents, None), documents


@given(
    stores(),
    st.integers(6, 20),
    st.sampled_from(["end", "start", "drop"]),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(deadline=None)
def test_each_pair_is_in_one_row_with_its_sides_truncated(
    store, seq_len, truncate, reads_ends, most, held_out
):
    documents, records = store
    form = PairForm("preference", most, reads_ends=reads_ends)
    size, wanted = seq_len + 1, []
    for record in records:
        sides = []
        for ids, trained, _ in record.documents:
            kept = slice(-size, None) if truncate == "start" else slice(size)
            sides.append((bytes(ids[kept].tolist()), trained[kept][1:].astype(int).tolist()))
        longest = max(len(d.ids) for d in record.documents)
        fits = longest <= size or not (reads_ends or truncate == "drop")
        if fits and all(sum(mask) for _, mask in sides):
            wanted.append(tuple(sides))
    try:
        train, held, counts = pack_pairs(
            documents, form, Packing(seq_len, True, truncate), held_out, None
        )
    except DataError:
        assert not wanted
        return
    pairs = []
    for rows in filter(None, (train, held)):
        for i in range(len(rows)):
            (row,) = sequences_in(rows.read(np.array([i])))
            assert 1 <= len(row) // 2 <= most_pairs(2 * (seq_len + reads_ends), most)
            for text, _, positions in row:
                assert positions == [*range(len(text) - (not reads_ends))]
            sides = [(text, mask) for text, mask, _ in row]
            pairs += zip(sides[::2], sides[1::2])
    assert sorted(pairs) == sorted(wanted)
    assert (counts.pairs, counts.trained) == (
        len(wanted),
        sum(sum(mask) for pair in wanted for _, mask in pair),
    )


def test_pairs_are_packed_and_part_of_a_batch_is_that_of_the_whole(tmp_path):
    corpus = start(tmp_path, TEXTS)
    assert corpus.train.samples < len(TEXTS) / 2
    assert start(tmp_path, TEXTS, packing=False).train.samples == len(TEXTS)
    one = start(tmp_path, TEXTS, PairForm("preference", pairs_per_row=1))
    assert one.train.samples == len(TEXTS)
    whole = corpus.train.batch(0, 4)
    part = corpus.train.batch(0, 4, slice(1, 3), slice(32, 64))
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name][1:3, 32:64])


def test_rows_are_inputs_and_targets_with_mesh_seq_too(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", TEXTS)
    data = {"source": "jsonl", "path": str(file), "seq_len": 64, "held_out": 0.2}
    plain, of_seq = (opened(data, pairs=PAIRS, seq_len=None, targets=t) for t in (False, True))
    for name, array in plain.train.batch(3, 2).items():
        np.testing.assert_array_equal(array, of_seq.train.batch(3, 2)[name])


def test_a_model_without_segments_gets_a_pair_as_two_rows(tmp_path):
    form = PairForm("preference", segments=False, margins=True)
    records = [{"prompt": "p", "chosen": "cc", "rejected": "r", "margin": 2}]
    batch = start(tmp_path, records, form, seq_len=4).train.slice(0, 1)
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "mask", "margins"), (1, 2, 5)
    )
    assert [bytes(x.astype(np.uint8)) for x in batch["tokens"][0]] == [b"pcc\0\0", b"pr\0\0\0"]
    assert batch["mask"][0].tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 0, 0]]
    assert batch["margins"][0].tolist() == [[2, 0, 0, 0, 0], [0] * 5]
    with pytest.raises(DataError, match=r"mesh.seq"):
        opened({"source": "jsonl", "path": "x", "seq_len": 4}, pairs=form, targets=True)


@pytest.mark.parametrize(
    "form", [PAIRS, LABELS, PairForm("preference", reads_ends=True, margins=True)]
)
@pytest.mark.parametrize("segments", [True, False])
def test_shapes_are_known_without_the_data(tmp_path, form, segments):
    from dataclasses import replace

    form = replace(form, segments=segments)
    shapes = start(tmp_path, TEXTS, form).train.shapes(3)
    data = Config(data={"source": "jsonl", "path": "none", "seq_len": 64}).data
    assert known_shapes(data, ModelLimits("tokens", pairs=form), 3) == shapes


def test_a_score_needs_a_position_more_than_seq_len(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", TEXTS)
    data = {"source": "jsonl", "path": str(file)}
    assert opened(data, pairs=PAIRS, seq_len=64).train.tokens_each == 128
    whole = PairForm("preference", reads_ends=True)
    assert opened(data, pairs=whole, seq_len=64).train.tokens_each == 128
    with pytest.raises(DataError, match=r"a score is read .*; 63 or less would do"):
        opened(data | {"seq_len": 64}, pairs=whole, seq_len=64)


# -- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [PAIRS, LABELS])
def test_a_folder_of_tokens_holds_the_same_samples(tmp_path, form):
    records = [{**r, "margin": i / 2} for i, r in enumerate(TEXTS)]
    records.append({"prompt": "p", "chosen": "a", "rejected": "a"})
    corpus = start(tmp_path, records, form)
    section = Config(data={"source": "jsonl", "path": str(tmp_path / "a.jsonl")}).data
    written = tokenize(section, tmp_path / "tokens", tokenizer=ByteTokenizer(), pairs=form)
    assert written.documents == 2 * len(TEXTS)
    data = {"source": "tokens", "path": str(tmp_path / "tokens"), "seq_len": 64, "held_out": 0}
    again = opened(data, pairs=form, seq_len=None)
    assert pairs_of(again) == pairs_of(corpus)
    assert again.fingerprint == corpus.fingerprint
    assert "1 dropped (1 with equal completions)" in again.summary
    with pytest.raises(DataError, match="the objective reads documents"):
        opened(data, seq_len=None)
    margins = tmp_path / "tokens" / "margin.npy"
    np.save(margins, np.load(margins) + 1)
    with pytest.raises(DataError, match="is damaged"):
        opened(data, pairs=form, seq_len=None)


def test_labels_in_a_folder_of_tokens(tmp_path):
    records = [{"prompt": "p", "completion": "c" * (i + 1), "label": i == 1} for i in range(4)]
    corpus = start(tmp_path, records, LABELS)
    section = Config(data={"source": "jsonl", "path": str(tmp_path / "a.jsonl")}).data
    tokenize(section, tmp_path / "tokens", tokenizer=ByteTokenizer(), pairs=LABELS)
    data = {"source": "tokens", "path": str(tmp_path / "tokens"), "seq_len": 64, "held_out": 0}
    again = opened(data, pairs=LABELS, seq_len=None)
    np.testing.assert_array_equal(
        again.train.slice(0, 1)["desirable"], corpus.train.slice(0, 1)["desirable"]
    )
    with pytest.raises(DataError, match='"kto" reads labels'):
        opened(data, pairs=PAIRS, seq_len=None)


def test_the_fingerprint_covers_labels_margins_and_the_objectives_keys(tmp_path):
    def of(form=PAIRS, **changed):
        return start(tmp_path, [TEXTS[0] | changed, *TEXTS[1:]], form).fingerprint

    labels = [{"prompt": "p", "completion": "c", "label": i % 2 == 0} for i in range(4)]
    fingerprints = [of(), of(margin=1.0), of(margin=2.0), of(PairForm("preference", 2)), of(LABELS)]
    fingerprints += [
        of(PairForm("unpaired", kl_block=3)),
        start(tmp_path, labels, LABELS).fingerprint,
    ]
    fingerprints.append(
        start(tmp_path, [*labels[:-1], labels[-1] | {"label": True}], LABELS).fingerprint
    )
    assert len({*fingerprints}) == len(fingerprints)


def test_columns_and_iterables_hold_the_same_pairs(tmp_path, monkeypatch):
    wanted = pairs_of(start(tmp_path, TEXTS))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(TEXTS), tmp_path / "a.parquet")
    module = types.ModuleType("my_pairs")
    module.records = TEXTS
    monkeypatch.setitem(sys.modules, "my_pairs", module)
    for section in (
        {"source": "parquet", "path": str(tmp_path / "a.parquet")},
        {"source": "my_pairs:records"},
    ):
        data = {"seq_len": 64, "held_out": 0.0, **section}
        assert pairs_of(opened(data, pairs=PAIRS, seq_len=None)) == wanted


def test_a_mixture_and_evaluation_data(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", TEXTS[:12])
    second = write_lines(tmp_path / "b.jsonl", [{**r, "margin": 1.0} for r in TEXTS[12:]])
    parts = [{"source": "jsonl", "path": str(path)} for path in (first, second)]
    form = PairForm("preference", margins=True)
    data = {"mixture": parts, "seq_len": 64, "held_out": 0.0, "eval": parts[1]}
    corpus = opened(data, pairs=form, seq_len=None)
    assert corpus.held_out.samples and len(corpus.train.parts) == 2
    assert corpus.conversations.pairs == len(TEXTS)
    limits = ModelLimits("tokens", vocab_size=512, pairs=form)
    (samples,) = evaluation_parts(
        Config(data={"seq_len": 64}).data, Config(data=parts[1]).data, limits, ByteTokenizer()
    ).values()
    assert len(samples) == corpus.held_out.samples


def test_synthetic_pairs_count_on_from_their_prompt(tmp_path):
    corpus = opened(
        {"source": "synthetic", "seq_len": 15, "samples": 40}, pairs=PAIRS, vocab_size=256
    )
    for (better, better_mask), (worse, worse_mask) in pairs_of(corpus):
        steps = np.diff(np.frombuffer(better, np.uint8).astype(int)) % 256
        assert len({*steps}) == 1
        prompt = better_mask.index(1) + 1
        assert better[:prompt] == worse[:prompt] and worse_mask.index(1) + 1 == prompt
    assert "40 pairs" in corpus.summary


def test_what_an_objective_reads_is_known_from_the_config(tmp_path):
    def of(**objective):
        return limits_of_run(Config(**gpt2, objective=objective))

    gpt2 = {"model": {"family": "gpt2", "preset": "tiny"}}
    path = "tests.data.preference_examples:"
    assert limits_of_run(Config(**gpt2)).pairs is None
    ranks = of(type=f"{path}Ranks", pairs_per_row=3)
    assert ranks.pairs == PairForm("preference", 3, reads_ends=True, margins=True)
    assert ranks.sample == "tokens"
    assert of(type=f"{path}Labels").pairs == PairForm("unpaired")
    own = limits_of_run(Config(**gpt2), object(), Ranks())
    assert own.pairs == PairForm("preference", reads_ends=True, margins=True, segments=False)


@pytest.mark.parametrize("form", [PAIRS, LABELS])
def test_what_is_shown_is_what_the_loss_counts(tmp_path, form):
    records = [LONG, *TEXTS[:2], {"prompt": "p", "chosen": "a", "rejected": "a"}]
    data = {"source": "jsonl", "path": str(write_lines(tmp_path / "a.jsonl", records))}
    section = Config(data={"seq_len": 9, **data}).data
    shown = show_data(section, ModelLimits("tokens", pairs=form), samples=2)
    sides = [
        (x.side, "".join(f"<{p.text}>" if p.trained else p.text for p in x.pieces))
        for x in shown.samples
    ]
    long, first = (
        [("chosen", "pppp<cccccc>"), ("rejected", "pppp<r\0>")],
        ("desirable", "0?<yes \0>"),
    )
    assert sides[:2] == long if form is PAIRS else [("desirable", "pppp<cccccc>"), first]
    corpus = start(tmp_path, records, form, seq_len=9)
    assert f"{shown.total}" in corpus.summary
    masks = [split["mask"] for split in corpus.train.once(1)]
    if form is PAIRS:
        assert sum(int(mask.sum()) for mask in masks) == shown.total.trained
    json.dumps(as_json(shown))


# -- what is wrong ------------------------------------------------------------------------------

BAD = [
    ({"prompt": "p", "chosen": "c"}, PAIRS, 'no field "rejected"; its fields: prompt, chosen'),
    ({"prompt": "p", "chosen": "c", "rejected": messages("a")}, PAIRS, "must both be texts"),
    ({"prompt": messages("p"), "chosen": "c", "rejected": "r"}, PAIRS, "text, but prompt is none"),
    (
        {"prompt": "p", "chosen": messages("a", "b"), "rejected": messages("a", "c")},
        PAIRS,
        "repeat",
    ),
    ({"prompt": "p", "chosen": 3, "rejected": "r"}, PAIRS, "must both be texts"),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "1"}, PAIRS, 'margin is "1"'),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": True}, PAIRS, "margin is true"),
    (
        {"prompt": "p", "completion": "c", "label": 1},
        LABELS,
        "label is 1; it must be true or false",
    ),
    ({"prompt": "p", "completion": "c", "label": None}, LABELS, 'no field "label"'),
]


@pytest.mark.parametrize(("record", "form", "problem"), BAD)
def test_a_bad_record_is_an_error_with_its_place(tmp_path, record, form, problem):
    good = {"prompt": "p", "chosen": "c", "rejected": "r"}
    if form is LABELS:
        good = {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(DataError) as error:
        start(tmp_path, [good, record, good], form)
    assert "1 of 3 records cannot be used:\n  line 2: " in str(error.value)
    assert problem in str(error.value)


def test_data_of_another_kind_is_one_error(tmp_path):
    labels = [{"prompt": "p", "completion": "c", "label": True}]
    with pytest.raises(DataError, match=r'reads pairs: .*; "kto" reads labels'):
        start(tmp_path, labels)
    with pytest.raises(DataError, match=r"no preferences.*its first record: text"):
        start(tmp_path, [{"text": "a"}])
    with pytest.raises(DataError, match=r"data.format: messages"):
        start(tmp_path, TEXTS, format="messages")
    with pytest.raises(DataError, match=r"data.train_on"):
        start(tmp_path, TEXTS, train_on="everything")
    with pytest.raises(DataError, match=r"data.document_masks"):
        start(tmp_path, TEXTS, document_masks=False)
    with pytest.raises(DataError, match="source stdlib holds no preferences"):
        opened({"seq_len": 8}, pairs=PAIRS)
    with pytest.raises(DataError, match=r"objective.kl_block is 1"):
        start(tmp_path, labels, PairForm("unpaired", kl_block=1))
    with pytest.raises(DataError, match="none to mismatch it with"):
        start(tmp_path, labels, LABELS)
