"""Text to ids and back."""

import json
import re
import unicodedata
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxspeed.data import BPETokenizer, ByteTokenizer, load_tokenizer, read_tokenizer, token_store
from jaxspeed.data import tokenizer as module
from jaxspeed.errors import DataError
from tests.data.corpora import sentences
from tests.support import covering

pytestmark = pytest.mark.fast

TEXTS = sentences(30)
text_ = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


# Words by Python's `re`, and the pattern that an earlier version gave to the library too.
PYTHON_WORDS = r" ?[^\W\d_]{1,32}| ?\d{1,3}| ?(?:[^\w\s]|_){1,32}|\s{1,64}(?!\S)|\s{1,64}"
find_words = re.compile(PYTHON_WORDS).findall


def utf8(text):
    return text.encode(errors="surrogatepass")


def bytes_of_tokens():
    """GPT-2's table: a printable character stands for its byte, U+0100 and up for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def merges_in(content):
    """[(first id, second id)] of a tokenizer.json, in the order of their own ids."""
    model = json.loads(content)["model"]
    vocab = model["vocab"]
    assert {k: v for k, v in vocab.items() if v < 256} == bytes_of_tokens()
    merges = [(vocab[first], vocab[second]) for first, second in model["merges"]]
    assert [vocab[a + b] for a, b in model["merges"]] == list(range(256, 256 + len(merges)))
    return merges


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


def encoded_plainly(text, merges):
    """Ids of a text by the definition: in each word the earliest merge first."""
    ranks = {pair: i for i, pair in enumerate(merges)}
    ids = []
    for word in find_words(text):
        spelled = list(utf8(word))
        while pairs := [pair for pair in pairwise(spelled) if pair in ranks]:
            best = min(pairs, key=ranks.__getitem__)
            out, i = [], 0
            while i < len(spelled):
                found = tuple(spelled[i : i + 2]) == best
                out.append(256 + ranks[best] if found else spelled[i])
                i += 2 if found else 1
            spelled = out
        ids += spelled
    return ids


@given(texts=st.lists(st.text("abc ", max_size=40), max_size=8), merges=st.integers(0, 25))
def test_merges_are_those_of_the_definition(texts, merges):
    words = Counter(utf8(word) for text in texts for word in find_words(text))
    trained = BPETokenizer.train(texts, 256 + merges)
    assert merges_in(trained.to_bytes()) == learned_plainly(sorted(words.items()), merges)[0]


# -- words ----------------------------------------------------------------------------------------

# Characters that Python's classes and Oniguruma's see differently are the likely ones here.
awkward_text = st.text(
    st.one_of(
        st.sampled_from("ab1_ \n\t.'\x1c\x1f\x85\u0301\u094d\u0e34½Ⅷ\u3000\ud800\udc00😀日語\0"),
        st.characters().filter(lambda c: unicodedata.category(c) != "Cn"),
    ),
    max_size=200,
)


@given(text=awkward_text)
def test_a_text_has_the_ids_of_the_definition(text):
    assert TRAINED.encode(text).tolist() == encoded_plainly(text, merges_in(TRAINED.to_bytes()))


def test_every_character_is_in_the_class_that_pythons_re_has_it_in():
    """By default of the 137,468 for private use, which are of one class, a hundredth."""
    assigned = (
        chr(n) for n in range(0x110000) if covering.is_full or n % 101 == 0 or not private(n)
    )
    texts = (f"a{c}b 1{c}2 .{c}! {c} x" for c in assigned
             if unicodedata.category(c) not in ("Cn", "Cs"))  # fmt: skip
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(module.WORDS), "isolated")
    for text in texts:
        assert [word for word, _ in split.pre_tokenize_str(text)] == find_words(text)


def private(n):
    return n >= 0xF0000 or 0xE000 <= n <= 0xF8FF


@given(text=st.text("ab1.  \n\n", max_size=60), part=st.integers(1, 20))
def test_long_texts_are_encoded_in_parts(text, part):
    ids = TRAINED.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART", part)
        words = [word for each in module._parts(text) for word in find_words(each)]
        assert words == find_words(text)
        assert TRAINED.encode(text).tolist() == ids


@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_any_ids_decode_to_the_bytes_of_their_tokens(ids):
    merges = merges_in(TRAINED.to_bytes())
    spelled = [bytes([i]) for i in range(256)]
    for first, second in merges:
        spelled.append(spelled[first] + spelled[second])
    text = b"".join(spelled[i] for i in ids if 0 < i < len(spelled)).decode(errors="replace")
    assert TRAINED.decode(ids) == text


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_file_whose_words_pythons_re_split_is_refused(kind, tmp_path):
    """Of a run as of a folder of tokens: the library would split other words by its pattern."""
    folder = tmp_path / "tokens"
    tokenizer = ByteTokenizer() if kind == "bytes" else TRAINED
    token_store.write(folder, "texts", [tokenizer.encode(TEXTS[0])], tokenizer)
    old = json.loads(tokenizer.to_bytes())
    old["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PYTHON_WORDS
    (folder / "tokenizer.json").write_text(json.dumps(old))
    for read in (read_tokenizer, token_store.read):
        with pytest.raises(DataError) as found:
            read(folder)
        for words in (str(folder), "an earlier version", "jaxspeed data tokenize", "run.init_from"):
            assert words in str(found.value)


# -- training ------------------------------------------------------------------------------------


def test_an_unseen_word_is_encoded_by_the_same_merges():
    """What training made of its own words and what encoding makes of them is one thing."""
    trained = BPETokenizer.train(TEXTS, 400)
    loaded = load_tokenizer(trained.to_bytes())
    for text in TEXTS:
        assert loaded.encode(text).tolist() == trained.encode(text).tolist()


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
    one, other = (BPETokenizer.train(texts, 280) for texts in (TEXTS, TEXTS[::-1]))
    assert one.to_bytes() == other.to_bytes()


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


# -- the library on its own ----------------------------------------------------------------------


@given(text=text_)
def test_the_library_reads_our_file_and_encodes_as_we_do(text):
    theirs = tokenizers.Tokenizer.from_str(TRAINED.to_bytes().decode())
    text = text + " the of 12345 __init__(self)\n\n    "
    assert theirs.encode(text).ids == TRAINED.encode(text).tolist()
    assert theirs.decode(theirs.encode(text).ids) == text


def test_a_foreign_tokenizer_is_read_by_the_library():
    model = tokenizers.models.WordLevel({"the": 1, "of": 2, "[UNK]": 0}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    tokenizer = load_tokenizer(made.to_str().encode(), "theirs")
    assert tokenizer.encode("the of the").tolist() == [1, 2, 1]
    assert tokenizer.end == 3
    assert tokenizer.vocab_size == 4 and tokenizer.name == "theirs"
    assert load_tokenizer(tokenizer.to_bytes()).decode([1, 2, 3]) == "the of"
