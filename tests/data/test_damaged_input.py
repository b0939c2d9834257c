"""Damaged data and tokenizers: each is one DataError, none a traceback or a panic."""

import gzip
import json
import random
import sys
import tracemalloc

import numpy as np
import pytest

from jaxspeed.config.run_sections import SourceSection
from jaxspeed.data import files, token_store
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.data.open_source import open_source
from jaxspeed.data.tokenizer import ByteTokenizer, read_tokenizer
from jaxspeed.errors import DataError

pytestmark = pytest.mark.fast

DEEP = "[" * 100_000
LINES = b'{"text": "hello world, a b c d e f"}\n' * 50


def read(source, path):
    return list(open_source(SourceSection(source=source, path=str(path)), ModelLimits()))


@pytest.mark.parametrize(("source", "name"), [("text", "a.txt.gz"), ("jsonl", "a.jsonl.gz")])
def test_a_damaged_gzip_file_is_named(tmp_path, source, name):
    """Each byte of it; a header's fields may be another's."""
    sound, file = gzip.compress(LINES, mtime=0), tmp_path / name
    refused = 0
    for i in range(len(sound)):
        damaged = bytearray(sound)
        damaged[i] ^= 0xFF
        file.write_bytes(damaged)
        try:
            read(source, file)
        except DataError as error:
            refused += name in str(error)
    assert refused > len(sound) - 10


@pytest.mark.parametrize("record", [DEEP, f'{{"text": {DEEP}', f'{{"text": {"9" * 5000}}}'])
def test_a_line_that_json_does_not_read_is_named(tmp_path, record):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{record}\n')
    with pytest.raises(DataError, match="line 2"):
        read("jsonl", tmp_path / "a.jsonl")


BPE = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
    "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
}  # fmt: skip


def tokenizer_json(**changes):
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    content = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts)}
    content |= {name: changes.pop(name) for name in parts if name in changes}
    return json.dumps({**content, "model": BPE | changes})


TOKENIZERS = {
    "deep": DEEP,
    "deep model": f'{{"model": {DEEP}',
    "a model that is a list": '{"model": []}',
    "panics": tokenizer_json(continuing_subword_prefix="####"),
    "panics in merges": tokenizer_json(merges=[["ab", "ab"]]),
    "panics in a normalizer": tokenizer_json(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "an unknown token that is unknown": tokenizer_json(unk_token="zz"),
    "no word is known": json.dumps(
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "q"}}
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_damaged_tokenizer_is_named(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(TOKENIZERS[name])
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path / "tokenizer.json").encode("hello world")


@pytest.fixture
def stored(tmp_path):
    documents = [np.arange(1, 9, dtype=np.uint8)] * 3
    token_store.write(tmp_path / "tokens", "numbers", documents, ByteTokenizer())
    return tmp_path / "tokens"


ODD = (None, -1, 2**70, 1.5, float("inf"), "x", [], {}, True)


@pytest.mark.parametrize("field", ["format", "documents", "tokens", "dtype", "largest", "digest"])
def test_a_damaged_token_header_is_named_or_means_the_same(stored, field):
    """Also a field that is absent, and a header that is none."""
    sound = json.loads((stored / token_store.HEADER).read_text())
    absent = {name: value for name, value in sound.items() if name != field}
    headers = [{**sound, field: value} for value in ODD if value != sound[field]]
    for text in (*map(json.dumps, [*headers, absent]), "[]", "5", "", DEEP):
        (stored / token_store.HEADER).write_text(text)
        if field == "dtype" and text == json.dumps(absent):
            continue  # of the array, too
        with pytest.raises(DataError, match="tokens"):
            token_store.read(stored)


@pytest.mark.parametrize("name", [token_store.TOKENS, token_store.OFFSETS])
def test_a_damaged_array_is_named(stored, name):
    """Each byte of its header, and files of other formats."""
    sound = (stored / name).read_bytes()
    rng = random.Random(0)
    damaged = [bytes([*sound[:i], rng.randrange(256), *sound[i + 1 :]]) for i in range(0, 128, 3)]
    np.savez(stored / "a.npz", a=np.zeros(3))
    np.save(stored / "a.npy", np.zeros(0, np.int64))
    damaged += [b"", sound[:100], (stored / "a.npz").read_bytes(), (stored / "a.npy").read_bytes()]
    for content in damaged:
        (stored / name).write_bytes(content)
        try:
            found = token_store.read(stored)
        except DataError as error:
            assert "tokens" in str(error)
        else:  # a byte of the padding, or of the header's own text
            assert found.tokens.tolist() == [*range(1, 9)] * 3


COMPRESSORS = {".gz": "gzip", ".zst": "backports.zstd"}


def compressor(suffix):
    return pytest.importorskip(COMPRESSORS[suffix]).compress


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize(("source", "name"), [("text", "a.txt"), ("jsonl", "a.jsonl")])
def test_compressed_content_is_read_and_a_truncated_file_named(tmp_path, source, name, suffix):
    file, sound = tmp_path / (name + suffix), compressor(suffix)(LINES)
    (tmp_path / name).write_bytes(LINES * 2)
    expected = read(source, tmp_path / name)
    file.write_bytes(sound * 2)  # two members or frames
    assert read(source, file) == expected
    for size in range(1, len(sound)):
        file.write_bytes(sound[:size])
        with pytest.raises(DataError, match=rf"{name}\{suffix}' cannot be read"):
            read(source, file)


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize(("source", "name"), [("text", "a.txt"), ("jsonl", "a.jsonl")])
def test_a_file_that_expands_without_bound_is_refused_as_it_is_read(
    tmp_path, monkeypatch, source, name, suffix
):
    """Of 32 MB, with a bound of 4 MB, not more than 12 MB are ever in memory."""
    monkeypatch.setattr(files, "FREE", 4 << 20)
    file = tmp_path / (name + suffix)
    file.write_bytes(compressor(suffix)(b" " * (32 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"{name}\{suffix}' expands to more than 200 times"):
            read(source, file)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    for source, name in (("text", "a.txt.gz"), ("jsonl", "a.jsonl.gz")):
        (tmp_path / name).write_bytes(gzip.compress(b"x" * 1001))
        with pytest.raises(DataError, match="more than 1,000 bytes"):
            read(source, tmp_path / name)


def test_the_library_for_zstd_is_named_with_its_extra(tmp_path, monkeypatch):
    for library in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.txt.zst").touch()
    with pytest.raises(DataError, match=r"backports\.zstd.*install jaxspeed\[zstd\]"):
        read("text", tmp_path / "a.txt.zst")
