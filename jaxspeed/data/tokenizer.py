"""Tokenizers: bytes, byte-pair encoding, and any Hugging Face tokenizer.json.

A run saves its tokenizer as a tokenizer.json in every case, also one trained here: other libraries
can read it.
"""

import functools
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxspeed.data import bpe
from jaxspeed.data.files import read_bytes
from jaxspeed.errors import DataError

# A byte that no text contains ends a document: 256 ids are enough for bytes.
END = 0
CACHED_WORDS = 1 << 20
TRAINED_ON = 32 << 20


class Tokenizer(Protocol):
    """Encodes text to ids and back; `end` is the end-of-document id, if there is one."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_bytes(self) -> bytes: ...


class ByteTokenizer:
    """The bytes of UTF-8 as ids."""

    name = "bytes"
    vocab_size = 256
    end = END

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return _join(bytes([i]) for i in ids if END < i < 256)

    def to_bytes(self) -> bytes:
        return _tokenizer_json([])


class BPETokenizer:
    """Byte-pair encoding with these merges, in the order in which they were learned."""

    end = END

    def __init__(self, merges: Sequence[bpe.Pair]) -> None:
        self.merges = [(int(a), int(b)) for a, b in merges]
        self._spelled = [bytes([i]) for i in range(256)]
        for first, second in self.merges:
            self._spelled.append(self._spelled[first] + self._spelled[second])
        self._words = _WordCache({pair: 256 + i for i, pair in enumerate(self.merges)})

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn the merges from the first 32 MB of text."""
        if vocab_size < 256:
            raise DataError(
                f"data.vocab_size is {vocab_size}; bpe needs at least 256 (one id for each byte)"
            )
        words: Counter[str] = Counter()
        left = TRAINED_ON
        for text in texts:
            words.update(bpe.find_words(text[:left]))
            left -= len(text)
            if left <= 0:
                break
        spelled = sorted((_utf8(word), count) for word, count in words.items())
        merges, encoded = bpe.learn_merges(spelled, vocab_size - 256)
        made = cls(merges)
        made._words.update((w.decode(errors="surrogatepass"), ids) for w, ids in encoded.items())
        return made

    @property
    def name(self) -> str:
        return f"bpe, {self.vocab_size} ids"

    @property
    def vocab_size(self) -> int:
        return len(self._spelled)

    def encode(self, text: str) -> np.ndarray:
        words = map(self._words.__getitem__, bpe.find_words(text))
        return np.fromiter(itertools.chain.from_iterable(words), np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return _join(self._spelled[i] for i in ids if END < i < self.vocab_size)

    def to_bytes(self) -> bytes:
        return _tokenizer_json(self.merges)


class _WordCache(dict[str, bpe.Word]):
    """Cache of the ids of words; text repeats its words."""

    def __init__(self, ranks: dict[bpe.Pair, int]) -> None:
        super().__init__()
        self._ranks = ranks

    def __missing__(self, word: str) -> bpe.Word:
        if len(self) >= CACHED_WORDS:
            self.clear()
        ids = self[word] = bpe.encode_word(_utf8(word), self._ranks)
        return ids


class LibraryTokenizer:
    """Any tokenizer.json, through the library `tokenizers`."""

    def __init__(self, content: bytes, name: str) -> None:
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError:
            raise DataError(
                f"data.tokenizer: {name!r} needs the library tokenizers; install jaxspeed[hf]"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exceptions
            raise DataError(f"data.tokenizer: {name!r} is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._content = content
        self.name = name
        # Ids may have gaps: the largest must fit the model.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(True).values(), default=0)
        ids = map(self._tokenizer.token_to_id, ENDS)
        self.end: int | None = next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> np.ndarray:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=True)

    def to_bytes(self) -> bytes:
        return self._content


# Names of end-of-text tokens, the most common first.
ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
)


def load_tokenizer(content: bytes, name: str = "the tokenizer saved with the run") -> Tokenizer:
    """A tokenizer from its `to_bytes`, or from any tokenizer.json."""
    try:
        read = json.loads(content)
        model = read["model"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"data.tokenizer: {name!r} is not a tokenizer.json") from None
    if read.get("pre_tokenizer") != _PRE_TOKENIZER:
        return LibraryTokenizer(content, name)
    vocab = model["vocab"]
    merges = [(vocab[first], vocab[second]) for first, second in model["merges"]]
    return BPETokenizer(merges) if merges else ByteTokenizer()


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a file, or in a folder's tokenizer.json."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(
            f"data.tokenizer: {path!r} is neither bytes, bpe nor the path of a tokenizer.json"
        )
    return load_tokenizer(read_bytes(file), path)


# -- in Hugging Face's format -------------------------------------------------------------------

_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": bpe.WORDS},
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", **_BYTE_LEVEL},
    ],
}


def _tokenizer_json(merges: Sequence[bpe.Pair]) -> bytes:
    tokens = list(_printable())
    for first, second in merges:
        tokens.append(tokens[first] + tokens[second])
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [[tokens[first], tokens[second]] for first, second in merges],
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZER,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **_BYTE_LEVEL},
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False).encode()


@functools.cache
def _printable() -> tuple[str, ...]:
    """The character for each byte in tokenizer.json: itself if printable, else U+0100 and up."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return tuple(chr(i) if i in seen else chr(next(others)) for i in range(256))


def _utf8(text: str) -> bytes:
    # JSON can contain half of a surrogate pair; that must not be an error.
    return text.encode("utf-8", errors="surrogatepass")


def _join(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", errors="replace")
