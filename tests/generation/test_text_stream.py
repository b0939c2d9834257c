"""Streamed text: whole characters, up to a stop string, whatever the borders of tokens."""

import random

import pytest

from jaxspeed.data.tokenizer import BPETokenizer, ByteTokenizer
from jaxspeed.errors import ConfigError
from jaxspeed.generation import Request
from jaxspeed.generation.text import TextStream
from jaxspeed.generation.text_row import first_seen
from jaxspeed.objectives.padding import bucket

pytestmark = pytest.mark.fast

TEXT = "The café’s naïve 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 – 日本語のテキスト, 👩‍👩‍👧 and the end. " * 4
TOKENIZERS = {"bytes": ByteTokenizer(), "bpe": BPETokenizer.train([TEXT], 300)}


def streamed(tokenizer, ids, stop=(), prompt="naïve "):
    """(pieces, the stream) of tokens after a prompt."""
    stream = TextStream(tokenizer, [int(i) for i in tokenizer.encode(prompt)], stop)
    pieces = []
    for token in ids:
        pieces.append(stream.add(int(token))[0])
        if stream.stopped:
            break
    return [*pieces, stream.end()], stream


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_pieces_are_whole_characters_and_together_the_text(tokenizer):
    pieces, stream = streamed(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == stream.text == TEXT
    for i in range(len(pieces)):
        assert TEXT.startswith("".join(pieces[:i]))
    assert len(pieces) > 100 and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_bytes_that_are_no_text_are_shown_at_the_end_at_the_latest(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(1, 256) for _ in range(rng.randrange(1, 200))]
        pieces, stream = streamed(tokenizer, ids, prompt="a")
        whole = tokenizer.decode([97, *ids])[1:]
        assert "".join(pieces) == stream.text == whole
        for i in range(len(pieces)):
            assert whole.startswith("".join(pieces[:i]))


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("stop", ["の", "テキスト, ", " – 日", "é’s n", "end. The", "👧"])
def test_a_stop_string_ends_the_text_before_it_across_tokens(tokenizer, stop):
    ids = tokenizer.encode(TEXT)
    pieces, stream = streamed(tokenizer, ids, ("never there", stop))
    assert stream.stopped and "".join(pieces) == stream.text == TEXT[: TEXT.index(stop)]
    for i in range(len(pieces)):  # nothing of the stop string was shown before it was complete
        assert TEXT[: TEXT.index(stop)].startswith("".join(pieces[:i]))


def test_the_beginning_of_a_stop_string_is_shown_when_it_goes_on_otherwise():
    pieces, stream = streamed(ByteTokenizer(), b"aaab aab", ("aaaa", "aac"))
    assert pieces == ["", "", "", "aaab", " ", "", "", "aab", ""] and not stream.stopped
    assert streamed(ByteTokenizer(), b"xaa", ("aab",))[0] == ["x", "", "", "aa"]


@pytest.mark.parametrize("context", [2, 3, 7, 16, 128])
def test_a_text_longer_than_the_context_is_seen_from_its_last_half_on(context):
    starts = [first_seen(n, context) for n in range(1, 6 * context)]
    assert starts == sorted(starts)
    assert len(set(starts)) <= 2 + 5 * context // (context // 2)  # the cache is filled anew
    for n, start in enumerate(starts, 1):
        assert n - start <= context
        assert start == 0 if n <= context else n - start > context - context // 2 - 1


def test_lengths_are_compiled_for_powers_of_two():
    assert [bucket(n, 100) for n in (1, 16, 17, 33, 65, 100)] == [16, 16, 32, 64, 100, 100]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"seed": 2**31}, "seed: it is an integer from 0 to 2\\^31 - 1"),
        ({"prompts": "a text"}, "prompts: "),
        ({"prompts": []}, "prompts: "),
        ({"tokens": -1}, "tokens: -1"),
        ({"tokens": 1.5}, "tokens: 1.5"),
        ({"seed": -1}, "seed: -1"),
        ({"context": 1}, "context: 1"),
        ({"stop": "."}, "stop: "),
        ({"stop": [""]}, "stop: "),
    ],
    ids=str,
)
def test_an_impossible_request_is_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        Request(**{"prompts": [[1]], **bad})


def test_an_empty_prompt_begins_after_the_end_of_a_document():
    assert Request(["", "a"], tokenizer=ByteTokenizer()).encoded() == [[0], [97]]
    with pytest.raises(ConfigError, match="prompt 2 is empty"):
        Request([[1], []]).encoded()
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        Request(["a"]).encoded()
