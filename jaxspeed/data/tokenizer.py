"""Tokenizers: bytes, byte-pair encoding, any tokenizer.json, and SentencePiece's tokenizer.model.

A run saves its tokenizer as a file that other libraries read: SentencePiece's as a tokenizer.model,
any other as a tokenizer.json, also one trained here.
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from jaxspeed.data.files import read_bytes
from jaxspeed.errors import DataError

# A byte that no text contains ends a document: 256 ids are enough for bytes.
END = 0
TRAINED_ON = 32 << 20
FILES = ("tokenizer.json", "tokenizer.model")  # of a folder, the first that is there
CHAT_TEMPLATE = "chat_template.jinja"
# What a folder's tokenizer has beside it, for other libraries.
BESIDE = (
    *FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
)


class Tokenizer(Protocol):
    """Encodes text to ids and back; `end` is the end-of-document id, if there is one.

    `file` is the name of the file that holds `to_bytes()`: one of FILES. `beside` has the contents
    of the other files of its folder, by name: a chat template, for example. `end_text` is the text
    that is encoded as `end`. `spell` decodes special tokens too, which `decode` leaves out.
    """

    beside: Mapping[str, bytes]

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def end_text(self) -> str | None: ...
    def encode(self, text: str) -> np.ndarray: ...
    def encode_with_offsets(self, texts: Sequence[str]) -> list["Encoded"]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def spell(self, ids: Iterable[int]) -> str: ...
    def to_bytes(self) -> bytes: ...


class Encoded(NamedTuple):
    """A text's tokens, and which of its characters each is of."""

    ids: np.ndarray  # unsigned [tokens]
    offsets: np.ndarray  # int64 [tokens, 2]: [start, end)


class ByteTokenizer:
    """The bytes of UTF-8 as ids."""

    name = "bytes"
    file = "tokenizer.json"
    vocab_size = 256
    end = END
    end_text = chr(END)
    beside: Mapping[str, bytes] = {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        return [Encoded(self.encode(text), _byte_offsets(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if END < i < 256).decode("utf-8", errors="replace")

    def spell(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        return _tokenizer_json(_byte_ids(), [])


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """DataError for those of the library `tokenizers`: plain Exceptions, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"data.tokenizer: {what}: {error}") from None


class LibraryTokenizer:
    """Any tokenizer.json, through the library `tokenizers`."""

    file = "tokenizer.json"
    beside: Mapping[str, bytes] = {}

    def __init__(self, content: bytes, name: str) -> None:
        with _library_errors(f"{name!r} is not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._content = content
        self.name = name
        # Ids may have gaps: the largest must fit the model.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(True).values(), default=0)
        ids = map(self._tokenizer.token_to_id, ENDS)
        self.end: int | None = next((i for i in ids if i is not None), None)

    @property
    def end_text(self) -> str | None:
        return None if self.end is None else self._tokenizer.id_to_token(self.end)

    def encode(self, text: str) -> np.ndarray:
        with _library_errors(f"{self.name!r} cannot encode {text[:40]!r}"):
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoded.ids, np.uint32)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        clean = [_SURROGATE.sub("\ufffd", text) for text in texts]
        with _library_errors(f"{self.name!r} cannot encode {[x[:40] for x in texts[:1]]}"):
            encodings = self._tokenizer.encode_batch(clean, add_special_tokens=False)
        return [
            Encoded(np.asarray(x.ids, np.uint32), np.asarray(x.offsets, np.int64).reshape(-1, 2))
            for x in encodings
        ]

    def added(self) -> tuple[list[int], list[int]]:
        """What the library's post-processor puts before and after a text."""
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        text = np.flatnonzero(np.equal(encoded.special_tokens_mask, 0))
        begin, end = (text[0], text[-1] + 1) if len(text) else (len(encoded.ids),) * 2
        return encoded.ids[:begin], encoded.ids[end:]

    def decode(self, ids: Iterable[int]) -> str:
        return self._text(ids, without_special=True)

    def spell(self, ids: Iterable[int]) -> str:
        return self._text(ids, without_special=False)

    def _text(self, ids: Iterable[int], without_special: bool) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        with _library_errors(f"{self.name!r} cannot decode {known[:10]}"):
            return self._tokenizer.decode(known, skip_special_tokens=without_special)

    def to_bytes(self) -> bytes:
        return self._content


class SentencePieceTokenizer:
    """A SentencePiece model of any kind, through the library `sentencepiece`."""

    file = "tokenizer.model"
    beside: Mapping[str, bytes] = {}

    def __init__(self, content: bytes, name: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise DataError(
                f"data.tokenizer: {name!r} needs the library sentencepiece, which is not "
                "installed: pip install 'jaxspeed[sentencepiece]'"
            ) from None
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except Exception as error:  # the library raises what the error code of its C++ maps to
            raise DataError(
                f"data.tokenizer: {name!r} is not a SentencePiece model: {error}"
            ) from None
        self._content = content
        self.name = name
        self.vocab_size: int = self._model.vocab_size()
        end = self._model.eos_id()
        self.end: int | None = end if end >= 0 else None
        self.end_text: str | None = self._model.id_to_piece(end) if end >= 0 else None

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(_SURROGATE.sub("\ufffd", text)), np.uint32)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        raise DataError(
            f"data.tokenizer: conversations need a {FILES[0]}: {self.name!r} is a SentencePiece "
            "model, which does not find special tokens in a text; write one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self.vocab_size])

    spell = decode

    def to_bytes(self) -> bytes:
        return self._content


class BPETokenizer(LibraryTokenizer):
    """Byte-pair encoding (BPE; Sennrich et al., arXiv:1508.07909) over bytes, as trained here.

    `content` is what `to_bytes` returned.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(content, "bpe")
        self.name = f"bpe, {self.vocab_size} ids"
        self.end = END

    @property
    def end_text(self) -> str | None:
        return chr(END)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn the merges from the first 32 MB of text: of the most frequent pair, 2 at least.

        Ties go to the smaller pair of ids, so the result does not depend on the order of the texts.
        """
        if vocab_size < 256:
            raise DataError(
                f"data.vocab_size is {vocab_size}; bpe needs at least 256 (one id for each byte)"
            )
        learner = tokenizers.Tokenizer.from_str(_tokenizer_json(_byte_ids(), []).decode())
        # As "special tokens" the bytes get the ids 0 to 255 in their order.
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(_byte_ids()),
            show_progress=False,
        )
        learner.train_from_iterator(_first(texts, TRAINED_ON), trainer)
        model = json.loads(learner.to_str())["model"]
        return cls(_tokenizer_json(model["vocab"], model["merges"]))

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([self._encode_part(part) for part in _parts(text)])

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        return [self._encode_parts(text) for text in texts]

    def _encode_parts(self, text: str) -> Encoded:
        parts = [part for part in _parts(text) if part]
        encodings = super().encode_with_offsets(parts) if parts else []
        starts = itertools.accumulate(map(len, parts), initial=0)
        none = Encoded(np.zeros(0, np.uint32), np.zeros((0, 2), np.int64))
        moved = [none, *(Encoded(x.ids, x.offsets + start) for x, start in zip(encodings, starts))]
        return Encoded(*(np.concatenate(arrays) for arrays in zip(*moved)))

    def decode(self, ids: Iterable[int]) -> str:
        return super().decode(i for i in ids if i > END)

    def _encode_part(self, text: str) -> np.ndarray:
        if not _SURROGATE.search(text):
            return super().encode(text)
        # The library refuses the text: words are split in one without, and merged one by one.
        words = self._tokenizer.pre_tokenizer[0].pre_tokenize_str(_SURROGATE.sub("\ufffd", text))
        spelled = (map(_printable().__getitem__, _utf8(text[a:b])) for _, (a, b) in words)
        tokens = (self._tokenizer.model.tokenize("".join(word)) for word in spelled)
        return np.asarray([token.id for word in tokens for token in word], np.uint32)


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer.json puts before and after a text, as transformers does.

    `encode` adds none.
    """
    return tokenizer.added() if isinstance(tokenizer, LibraryTokenizer) else ([], [])


# Text is encoded in parts: the library takes about 120 bytes of memory for each character of one.
PART = 1 << 18


def _parts(text: str) -> Iterator[str]:
    """Split a text between words only: before whitespace that follows something else."""
    start = 0
    while space := _BEFORE_SPACE.search(text, start + PART):
        yield text[start : space.start()]
        start = space.start()
    yield text[start:]


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield _SURROGATE.sub("\ufffd", text[:characters])
        characters -= len(text)
        if characters <= 0:
            return


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


def load_tokenizer(content: bytes, name: str = "the content given") -> Tokenizer:
    """The tokenizer of a tokenizer.json: this module's own, or any other."""
    try:
        read = json.loads(content)
        model = read["model"]
        if not isinstance(model, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"data.tokenizer: {name!r} is not a tokenizer.json") from None
    if read.get("pre_tokenizer") == _split_by(_OLD_WORDS):
        raise DataError(
            f"data.tokenizer: {name!r} was saved by an earlier version of jaxspeed, whose "
            "tokenizers are not read; tokenize the text again (`jaxspeed data tokenize`), and "
            "begin a new run: run.init_from takes the weights of the old one"
        )
    if read.get("pre_tokenizer") != _split_by(WORDS):
        return LibraryTokenizer(content, name)
    return BPETokenizer(content) if model.get("merges") else ByteTokenizer()


def tokenizer_file(folder: Path) -> Path | None:
    """The file of the tokenizer in a folder, if there is one."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file, or in a folder's tokenizer.json or tokenizer.model.

    That of a folder has the files beside it as well.
    """
    contents: dict[str, bytes] = {}
    try:
        file = Path(path).expanduser()
        if file.is_dir():
            inside = (name for name in BESIDE if (file / name).is_file())
            contents = {name: read_bytes(file / name) for name in inside}
        elif file.is_file():
            contents = {FILES[file.suffix == ".model"]: read_bytes(file)}
    except (OSError, RuntimeError) as error:  # a name that is too long, a user that is unknown
        raise DataError(f"data.tokenizer: {str(path)!r}: {error}") from None
    tokenizer = tokenizer_in(contents, str(path))
    if tokenizer is None:
        raise DataError(
            f"data.tokenizer: {str(path)!r} is neither bytes, bpe nor the path of a "
            f"{' or '.join(FILES)}"
        )
    return tokenizer


def tokenizer_in(contents: Mapping[str, bytes], name: str) -> Tokenizer | None:
    """The tokenizer of a folder's files, given by name; None if none of FILES is there."""
    file = next((file for file in FILES if file in contents), None)
    if file is None:
        return None
    read = load_tokenizer if file == FILES[0] else SentencePieceTokenizer
    tokenizer: Tokenizer = read(contents[file], name)
    tokenizer.beside = {n: contents[n] for n in BESIDE if n in contents and n != file}
    return tokenizer


def files_of(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files from which `tokenizer_in` makes an equal tokenizer."""
    if tokenizer is None:
        return {}
    return {tokenizer.file: tokenizer.to_bytes(), **tokenizer.beside}


# -- in Hugging Face's format -------------------------------------------------------------------

# Words as GPT-2 splits them: a space belongs to the word after it. Lengths are bounded, or a line
# of a million dashes would be slow. Every character is in exactly one word. Letters, digits and
# whitespace are those of Python's `re`: other than Oniguruma's \w, Python's has no marks, and its
# \s has the four separators of ASCII.
_LETTER, _SPACE = r"\p{L}\p{Nl}\p{No}", r"\s\x1c-\x1f"
WORDS = (
    rf" ?[{_LETTER}]{{1,32}}| ?\p{{Nd}}{{1,3}}| ?[^{_LETTER}\p{{Nd}}{_SPACE}]{{1,32}}"
    rf"|[{_SPACE}]{{1,64}}(?![^{_SPACE}])|[{_SPACE}]{{1,64}}"
)
# The pattern in files that are refused: Oniguruma gives its classes other characters.
_OLD_WORDS = r" ?[^\W\d_]{1,32}| ?\d{1,3}| ?(?:[^\w\s]|_){1,32}|\s{1,64}(?!\S)|\s{1,64}"
_BEFORE_SPACE = re.compile(r"(?<=\S)(?=\s)")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _split_by(words: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", **_BYTE_LEVEL}]}


def _tokenizer_json(vocab: dict[str, int], merges: Sequence[Sequence[str]]) -> bytes:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _split_by(WORDS),
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


def _byte_ids() -> dict[str, int]:
    return {token: byte for byte, token in enumerate(_printable())}


def _byte_offsets(text: str) -> np.ndarray:
    """The character of each byte of UTF-8: [start, end)."""
    codes = np.fromiter(map(ord, text), np.int64, len(text))
    sizes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    starts = np.repeat(np.arange(len(text)), sizes)
    return np.stack([starts, starts + 1], 1)


def _utf8(text: str) -> bytes:
    # JSON can contain half of a surrogate pair; that must not be an error.
    return text.encode("utf-8", errors="surrogatepass")
