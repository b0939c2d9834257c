"""A corpus as a run opens it."""

import math
import sys
import time
import types
from collections import Counter

import numpy as np
import pytest
from jaxspeed.models import build as build_model

from jaxspeed.config.run_sections import Data
from jaxspeed.data import (
    BPETokenizer,
    ByteTokenizer,
    build,
    limits_of,
    load_tokenizer,
    tokenize,
)
from jaxspeed.errors import DataError
from tests.data.corpora import json_lines, opened, sentences, text_files

TEXTS = sentences(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_files(tmp_path_factory.mktemp("texts"), TEXTS)


def text(folder, **more):
    return {"source": "text", "path": str(folder), **more}


# -- what is in it ------------------------------------------------------------------------------


def test_the_standard_library_opens_in_a_few_seconds_and_fits_the_smallest_model():
    start = time.perf_counter()
    c = opened(vocab_size=256, seq_len=128)
    assert time.perf_counter() - start < 5
    assert c.train.samples > 20_000 and c.held_out.samples > 500
    assert c.tokenizer.vocab_size == 256
    assert 2.5 < c.unigram_entropy < 3.6
    assert "standard library" in c.summary and "\n" not in c.summary
    batch = c.train.batch(0, 4)
    assert batch["tokens"].shape == (4, 129) and batch["tokens"].dtype == np.int32


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_train_and_held_out_are_the_corpus_and_share_no_document(folder, tokenizer):
    c = opened(text(folder, tokenizer=tokenizer, vocab_size=300, held_out=0.2, shuffle=False))
    trained = np.concatenate([b["tokens"][:, :-1].ravel() for b in c.train.once(1)])
    held = np.concatenate([b["tokens"][0, 1:][b["mask"][0, 1:] == 1] for b in c.held_out.once(1)])
    decoded = c.tokenizer.decode(np.append(trained, held))
    # A sample less than whole is dropped at the end of training, and nothing predicts the first.
    total = sum(map(len, TEXTS))
    assert total - 17 * 8 <= len(decoded) <= total
    long = [t[1:] for t in TEXTS if len(t) > 60]
    out, rest = c.tokenizer.decode(held), c.tokenizer.decode(trained)
    assert sum(t in out for t in long) >= 5
    assert not any(t in rest for t in long if t in out)


def test_the_unigram_entropy_is_that_of_the_training_tokens(folder):
    c = opened(text(folder, held_out=0))
    counts = Counter(b"".join(t.encode() + b"\0" for t in TEXTS))
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert c.unigram_entropy == pytest.approx(expected, abs=1e-12)


def test_the_entropy_of_a_mixture_is_that_of_the_mixed_tokens(tmp_path):
    a, b = (json_lines(tmp_path / f"{x}.jsonl", [x * 99] * 40) for x in "ab")
    parts = [{"source": "jsonl", "path": str(f), "weight": w} for f, w in ((a, 3), (b, 1))]
    c = opened({"mixture": parts})
    p = {"a": 0.99 * 3 / 4, "b": 0.99 / 4, "end": 0.01}
    expected = -sum(q * math.log(q) for q in p.values())
    assert c.unigram_entropy == pytest.approx(expected, abs=1e-12)
    first = np.concatenate([c.train.batch(t, 20)["tokens"][:, 8] for t in range(20)])
    assert (first == ord("a")).mean() == pytest.approx(0.75, abs=0.03)


def test_a_mixture_may_hold_made_samples_beside_read_ones(folder):
    parts = [text(folder), {"source": "synthetic", "samples": 50}]
    c = opened({"mixture": parts, "held_out": 0.2})
    for batch in (c.train.batch(0, 8), *c.held_out.once(8)):
        assert {x.shape for x in batch.values()} == {(8, 17)}
    counted = sum(b["mask"].any(1).sum() for b in c.held_out.once(8))
    assert counted == c.held_out.samples


def test_synthetic_samples_can_be_learned_and_are_the_same_each_time():
    c = opened({"source": "synthetic", "samples": 64})
    batch = c.train.batch(0, 16)
    steps = np.diff(batch["tokens"]) % 512
    usual = [np.bincount(row).max() / len(row) for row in steps]
    assert np.mean(usual) > 0.7
    again = opened({"source": "synthetic", "samples": 64}).train.batch(0, 16)
    assert (again["tokens"] == batch["tokens"]).all()
    assert c.unigram_entropy == pytest.approx(math.log(512))


def test_synthetic_images_have_the_models_shape_and_classes():
    c = opened({"source": "synthetic", "samples": 200}, sample="images", image_shape=(8, 6, 3),
               classes=4)  # fmt: skip
    batch = c.train.batch(0, 64)
    assert batch["images"].shape == (64, 8, 6, 3) and set(batch["labels"]) == {0, 1, 2, 3}
    means = [batch["images"][batch["labels"] == k].mean(0) for k in range(4)]
    assert np.std(means, axis=0).mean() > 0.3


@pytest.mark.parametrize(
    "family, expected",
    [
        ("gpt2", {"sample": "tokens", "seq_len": 128, "vocab_size": 256}),
        ("llama", {"sample": "tokens"}),
        ("vit", {"sample": "images", "image_shape": (32, 32, 3), "classes": 10}),
        ("mlp", {"sample": None}),
    ],
)
def test_facts_are_read_from_a_familys_sizes(family, expected):
    found = limits_of(build_model(family, "tiny").config)
    assert {k: getattr(found, k) for k in expected} == expected
    if found.sample:
        assert build(Data(source="synthetic"), **vars(found), seed=0).train.samples


# -- each key of the section ----------------------------------------------------------------------


FILLER = {"source": "synthetic", "samples": 1, "weight": 1e-9}


def decoded(data, **limits):
    """The first that is trained on, in order."""
    c = opened(data | {"held_out": 0, "shuffle": False}, **limits)
    ids = np.concatenate([c.train.batch(t, 1)["tokens"][0, :-1] for t in range(8)])
    return (c.tokenizer or ByteTokenizer()).decode(ids)


@pytest.mark.parametrize("of", ["one source", "a mixture's", "evaluation's"])
@pytest.mark.parametrize("key", ["path", "paths", "text_field", "split", "samples", "dtype"])
def test_a_source_is_read_where_its_keys_say(key, of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = json_lines(
        tmp_path / "a.jsonl", ["abcdefgh" * 40], field="body" if key == "text_field" else "text"
    )
    asked = {
        "path": {"source": "jsonl", "path": str(file)},
        "paths": {"source": "jsonl", "paths": [str(file)]},
        "text_field": {"source": "jsonl", "path": str(file), "text_field": "body"},
        "split": {"source": "huggingface", "path": "letters", "split": "odd"},
        "samples": {"source": "synthetic", "samples": 7},
        "dtype": {"source": "tokens", "path": "ids.bin", "dtype": "uint16"},
    }[key]
    np.frombuffer(b"abcdefgh" * 40, np.uint8).astype(np.uint16).tofile("ids.bin")
    splits = {"train": [{"text": "zyxw" * 80}], "odd": [{"text": "abcdefgh" * 40}]}
    library = types.ModuleType("datasets")
    library.load_dataset = lambda name, split: splits[split]
    monkeypatch.setitem(sys.modules, "datasets", library)
    if of == "evaluation's":
        evaluated = opened({"source": "synthetic", "tokenizer": "bytes", "eval": asked}).held_out
        if key == "samples":
            assert evaluated.samples == 7
        else:
            assert ByteTokenizer().decode(evaluated.padded(0, 1)["tokens"][0]).startswith("abcdef")
        return
    data = {"mixture": [asked, FILLER]} if of == "a mixture's" else asked
    if key == "samples":
        parts = opened(data | {"held_out": 0}).train.parts
        assert len(parts[0]) == 7
    else:
        assert "abcdefghabcdefg" in decoded(data)


def test_order_and_samples_follow_the_sections_keys(folder):
    in_turn = decoded(text(folder))
    assert in_turn[:100] == "\0".join(TEXTS)[:100]

    def first(**more):
        return opened(text(folder, held_out=0, **more), seed=1).train.batch(0, 4)

    shuffled = first()["tokens"]
    assert (first(seed=1)["tokens"] == shuffled).all()
    assert not (first(seed=2)["tokens"] == shuffled).all()
    assert first(shuffle=False)["tokens"][0, 0] == ord(TEXTS[0][0])
    assert first(seq_len=8)["tokens"].shape == (4, 9)
    assert set(first(document_masks=False)) == {"tokens"} != set(first())


def test_the_tokenizer_is_the_one_that_is_asked_for(folder):
    bpe = opened(text(folder, tokenizer="bpe", vocab_size=270)).tokenizer
    assert isinstance(bpe, BPETokenizer) and bpe.vocab_size == 270
    assert len(bpe.encode(TEXTS[1])) < len(TEXTS[1].encode())


# -- being continued ----------------------------------------------------------------------------


def test_the_fingerprint_changes_with_what_is_read_and_its_order(folder, tmp_path):
    def of(data=None, **limits):
        return opened(text(folder) | (data or {}), **limits).fingerprint

    one = of()
    assert of() == one
    other = text_files(tmp_path / "other", [*TEXTS[:-1], TEXTS[-1] + "!"])
    changed = {
        "corpus": of({"path": str(other)}),
        "tokenizer": of({"tokenizer": "bpe", "vocab_size": 300}),
        "seq_len": of({"seq_len": 8}),
        "seed": of(seed=1),
        "own seed": of({"seed": 2}),
        "held out": of({"held_out": 0.1}),
        "masks": of({"document_masks": False}),
        "shuffle": of({"shuffle": False}),
    }
    assert len({one, *changed.values()}) == 1 + len(changed)
    assert of({"seed": 1}) == changed["seed"]
    made = {"source": "synthetic", "path": None}
    images = {"sample": "images", "image_shape": (4, 4, 1)}
    for limits in ({}, images):
        sizes = [of(made | {"samples": n}, **limits) for n in (50, 51)]
        assert len(set(sizes)) == 2


def test_a_run_that_is_continued_has_its_own_tokenizer(folder, tmp_path, monkeypatch):
    data = text(folder, tokenizer="bpe", vocab_size=300)
    first = opened(data)
    monkeypatch.setattr(BPETokenizer, "train", None)
    again = opened(data, tokenizer=load_tokenizer(first.tokenizer.to_bytes()))
    assert again.fingerprint == first.fingerprint
    assert (again.train.batch(3, 4)["tokens"] == first.train.batch(3, 4)["tokens"]).all()


# -- token files --------------------------------------------------------------------------------


def test_tokens_from_files_are_the_tokens_of_the_text(folder, tmp_path):
    data = text(folder, tokenizer="bpe", vocab_size=300)
    summary = tokenize(Data(**data), tmp_path / "tokens")
    assert summary.documents == 60 and "60 documents" in str(summary)
    direct = opened(data)
    read = opened({"source": "tokens", "path": str(tmp_path / "tokens")})
    assert isinstance(read.train.parts[0].parts[0].stream.tokens, np.memmap)
    assert read.tokenizer.to_bytes() == direct.tokenizer.to_bytes()
    assert read.unigram_entropy == direct.unigram_entropy
    for step in range(3):
        for name, x in direct.train.batch(step, 8).items():
            assert (read.train.batch(step, 8)[name] == x).all()


def test_token_files_of_another_text_of_the_same_length_are_another_corpus(tmp_path):
    def of(letter):
        texts = text_files(tmp_path / f"{letter}.texts", [letter * 50] * 20)
        tokenize(Data(**text(texts)), tmp_path / letter)
        return opened({"source": "tokens", "path": str(tmp_path / letter)}).fingerprint

    assert of("a") != of("b")


def test_token_folders_can_be_chained_and_mixed_with_text(folder, tmp_path):
    for name, texts in (("a", TEXTS[:30]), ("b", TEXTS[30:])):
        tokenize(Data(**text(text_files(tmp_path / f"{name}.texts", texts))), tmp_path / name)
    paths = [str(tmp_path / name) for name in "ab"]
    c = opened({"source": "tokens", "paths": paths})
    ids = np.concatenate([c.train.sample_ids(t, 1) for t in range(c.train.samples)])
    assert sorted(ids) == list(range(c.train.samples))
    parts = [{"source": "tokens", "path": paths[0]}, text(folder)]
    assert opened({"mixture": parts}).train.batch(0, 4)["tokens"].shape == (4, 17)


def test_plain_npy_files_hold_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(400, dtype=np.uint64).reshape(20, 20))
    c = opened({"source": "tokens", "path": str(tmp_path / "a.npy"), "held_out": 0})
    c2 = opened({"source": "tokens", "path": str(tmp_path), "held_out": 0})
    assert c.fingerprint == c2.fingerprint and c.train.samples == 24
    every = {int(t) for b in c.train.once(8) for t in b["tokens"].ravel()}
    assert every >= set(range(384))


def test_a_folder_is_written_completely_or_not_at_all(folder, tmp_path):
    (folder.parent / "bad").mkdir(exist_ok=True)
    bad = text_files(tmp_path / "bad", TEXTS[:3])
    (bad / "9.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        tokenize(Data(**text(bad)), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]
    tokenize(Data(**text(folder)), tmp_path / "out")
    with pytest.raises(DataError, match="out' already exists"):
        tokenize(Data(**text(folder)), tmp_path / "out")
    with pytest.raises(DataError, match=r"0000\.txt/out' cannot be written"):
        tokenize(Data(**text(folder)), folder / "0000.txt" / "out")


def test_damaged_token_files_are_named(folder, tmp_path):
    out = tmp_path / "out"
    tokenize(Data(**text(folder)), out)
    source = {"source": "tokens", "path": str(out)}
    whole = (out / "tokens.npy").read_bytes()
    (out / "tokens.npy").write_bytes(whole[:-5])
    with pytest.raises(DataError, match="out' is damaged"):
        opened(source)
    (out / "tokens.npy").write_bytes(whole)
    header = (out / "header.json").read_text()
    (out / "header.json").write_text(header.replace('"format": 1', '"format": 4'))
    with pytest.raises(DataError, match="has format 4; this version of jaxspeed reads 1, 2, 3"):
        opened(source)
    (out / "header.json").write_text(header[:20])
    with pytest.raises(DataError, match="out' is damaged"):
        opened(source)


# -- what does not fit --------------------------------------------------------------------------


def wrong(match, data, **limits):
    with pytest.raises(DataError, match=match) as caught:
        opened(data, **limits)
    assert "\n" not in str(caught.value)


def test_limits_of_the_model_are_kept(folder):
    wrong(r"data.seq_len is 32, but the model has 16 positions; 16 or less would do",
          text(folder, seq_len=32))  # fmt: skip
    wrong("bytes has 256 ids, but the model's vocabulary has 200", text(folder), vocab_size=200)
    wrong("data.vocab_size is 600, but the model's vocabulary has 512",
          text(folder, tokenizer="bpe", vocab_size=600))  # fmt: skip
    wrong("data.seq_len: must be set", text(folder), seq_len=None)
    wrong("data.vocab_size: bpe needs it", text(folder, tokenizer="bpe"), vocab_size=None)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000))
    wrong("ids up to 999, but the model's vocabulary has 512",
          {"source": "tokens", "path": str(tmp_path / "a.npy")})  # fmt: skip


def test_a_corpus_that_is_too_small_is_refused(tmp_path):
    def of(length):
        (tmp_path / "a.txt").write_text("x" * length)
        return {"source": "text", "path": str(tmp_path / "a.txt"), "held_out": 0}

    wrong("holds no text", of(0))
    wrong(r"too small.*not one training sample of 16 tokens.*shorter data.seq_len", of(10))
    assert opened(of(16)).train.samples == 1  # and the end is a token too
    wrong("too small: 6 training samples, but a batch has 8", of(100), batch_size=8)
    wrong(r"data.held_out: 0.001 of .* is less than one sample", of(100) | {"held_out": 0.001})


def test_sources_of_another_kind_than_the_model_reads_are_refused(tmp_path):
    wrong("holds text, but the model reads images", {}, sample="images")
    wrong("the kind of this model's samples is unknown", {"source": "synthetic"}, sample=None)
    np.savez(tmp_path / "a.npz", images=np.zeros((20, 4, 4, 3)), labels=np.zeros(20, int))
    wrong("has arrays, but the model reads tokens",
          {"source": "images", "path": str(tmp_path / "a.npz")})  # fmt: skip


def test_tokens_of_another_tokenizer_are_refused(folder, tmp_path):
    tokenize(Data(**text(folder)), tmp_path / "bytes", tokenizer=ByteTokenizer())
    source = {"source": "tokens", "path": str(tmp_path / "bytes")}
    other = BPETokenizer.train(TEXTS, 300)
    wrong(r"a different tokenizer \(bytes\) than the rest \(bpe", source,
          tokenizer=other)  # fmt: skip
