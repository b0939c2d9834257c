"""Text to ids and back."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.data import BPETokenizer, ByteTokenizer, load_tokenizer, read_tokenizer
from jaxspeed.data.bpe import find_words, learn_merges
from jaxspeed.errors import DataError
from tests.data.corpora import sentences

pytestmark = pytest.mark.fast

TEXTS = sentences(30)
text_ = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def learned_plainly(words, merges):
    """Byte-pair encoding as it is defined: all pairs are counted anew before each merge."""
    cut = {word: list(word) for word, _ in words}
    learned = []
    for new in range(256, 256 + merges):
        pairs = Counter()
        for word, count in words:
            for pair in zip(cut[word], cut[word][1:]):
                pairs[pair] += count
        if not pairs or max(pairs.values()) < 2:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        learned.append(best)
        for word, ids in cut.items():
            out, i = [], 0
            while i < len(ids):
                if tuple(ids[i : i + 2]) == best:
                    out.append(new)
                    i += 2
                else:
                    out.append(ids[i])
                    i += 1
            cut[word] = out
    return learned, {word: tuple(ids) for word, ids in cut.items()}


@given(
    words=st.dictionaries(
        st.text("abc", min_size=1, max_size=9).map(str.encode), st.integers(1, 20), max_size=12
    ),
    merges=st.integers(0, 25),
)
def test_merges_are_those_of_the_definition(words, merges):
    assert learn_merges(words.items(), merges) == learned_plainly(list(words.items()), merges)


def test_an_unseen_word_is_encoded_by_the_same_merges():
    """What training made of its own words and what encoding makes of them is one thing."""
    trained = BPETokenizer.train(TEXTS, 400)
    loaded = load_tokenizer(trained.to_bytes())
    for text in TEXTS:
        assert loaded.encode(text).tolist() == trained.encode(text).tolist()


@given(text=text_)
def test_words_are_the_text(text):
    assert "".join(find_words(text)) == text


@given(text=text_)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_decoding_gives_the_text_back(kind, text):
    tokenizer = ByteTokenizer() if kind == "bytes" else TRAINED
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not len(ids) or 0 < ids.min() <= ids.max() < tokenizer.vocab_size


TRAINED = BPETokenizer.train(TEXTS, 384)


def test_bpe_is_shorter_than_bytes_and_as_large_as_asked():
    text = TEXTS[0]
    assert len(TRAINED.encode(text)) < len(text) / 2
    assert BPETokenizer.train(TEXTS, 280).vocab_size == 280
    assert TRAINED.vocab_size < 384  # no pair was left that occurs twice


def test_training_does_not_depend_on_the_order_of_the_texts():
    assert BPETokenizer.train(TEXTS[::-1], 280).merges == BPETokenizer.train(TEXTS, 280).merges


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])
def test_a_tokenizer_is_restored_from_its_bytes(tokenizer, tmp_path):
    again = load_tokenizer(tokenizer.to_bytes())
    assert type(again) is type(tokenizer) and again.name == tokenizer.name
    assert again.to_bytes() == tokenizer.to_bytes()
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode("the Häuser\n\tof 1234").tolist() == (
        tokenizer.encode("the Häuser\n\tof 1234").tolist()
    )
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    assert read_tokenizer(str(tmp_path)).to_bytes() == tokenizer.to_bytes()


def test_ids_that_no_text_has_decode_to_nothing():
    assert TRAINED.decode([0, 104, 10**6, 105]) == "hi"
    assert ByteTokenizer().decode(np.array([104, 0, 300, 105])) == "hi"


def test_half_a_surrogate_pair_stops_nothing():
    assert len(ByteTokenizer().encode("a\ud800b")) == 5
    assert len(TRAINED.encode("a\ud800b")) == 5


def test_bpe_of_less_than_the_bytes_is_refused():
    with pytest.raises(DataError, match="256"):
        BPETokenizer.train(TEXTS, 200)


def test_what_is_no_tokenizer_is_said_to_be_none(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*neither bytes, bpe nor the path"):
        read_tokenizer("nowhere")
    (tmp_path / "t.json").write_text("[1]")
    with pytest.raises(DataError, match=r"t\.json' is not a tokenizer\.json"):
        read_tokenizer(str(tmp_path / "t.json"))


def test_a_foreign_tokenizer_names_the_extra_when_its_library_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    foreign = json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}}}).encode()
    with pytest.raises(DataError, match=r"install jaxspeed\[hf\]"):
        load_tokenizer(foreign, "theirs.json")


# -- against the library, where it is installed ---------------------------------------------------


@given(text=text_)
def test_the_library_reads_our_file_and_encodes_as_we_do(text):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(TRAINED.to_bytes().decode())
    text = text + " the of 12345 __init__(self)\n\n    "
    assert theirs.encode(text).ids == TRAINED.encode(text).tolist()
    assert theirs.decode(theirs.encode(text).ids) == text


def test_a_foreign_tokenizer_is_read_by_the_library():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"the": 1, "of": 2, "[UNK]": 0}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    tokenizer = load_tokenizer(made.to_str().encode(), "theirs")
    assert tokenizer.encode("the of the").tolist() == [1, 2, 1]
    assert tokenizer.end == 3
    assert tokenizer.vocab_size == 4 and tokenizer.name == "theirs"
    assert load_tokenizer(tokenizer.to_bytes()).decode([1, 2, 3]) == "the of"
